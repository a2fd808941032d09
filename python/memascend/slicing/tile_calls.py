"""One call of a part of a layer, cut along its tokens."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch import nn

#: Arguments beside tensors that are the same for each tile.
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
#: Stands for a tensor among the leaves of a call without its tensors.
_TENSOR = object()


@dataclass(frozen=True, slots=True)
class Join:
    """How an output of tiles is joined."""

    #: Whether it has the dimensions of tokens that the input has; otherwise one dimension of tokens, the first.
    as_input: bool

    def whole(self, leaf: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor for an output whose tile is `leaf`; `like` is an input of the part."""
        lead = like.shape[: token_dims(like)]
        shape = (*lead, *leaf.shape[len(lead) :]) if self.as_input else (lead.numel(), *leaf.shape[1:])
        return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)

    def part(self, whole: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return the tokens from `begin` to `end`, with one dimension of tokens; a view of a contiguous tensor."""
        return by_tokens(whole, token_dims(whole) if self.as_input else 1)[begin:end]


def token_dims(tensor: torch.Tensor) -> int:
    """Return how many of a tensor's first dimensions count tokens: (sequences, length, ...) or (tokens, width)."""
    return min(2, tensor.ndim - 1)


def tokens_of(args: tuple, kwargs: dict[str, Any]) -> int:
    """Return how many tokens the first tensor of numbers has that a part is called with; 0 without one."""
    leaves = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    first = next((leaf for leaf in leaves if leaf.is_floating_point() and leaf.ndim > 1), None)
    return 0 if first is None else first.shape[: token_dims(first)].numel()


def by_tokens(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Return a tensor with one dimension of tokens in place of its first `dims`."""
    return tensor if dims == 1 else tensor.reshape(-1, *tensor.shape[dims:])


class TileCall:
    """The arguments of one call, whose tensors all have the same tokens first."""

    def __init__(self, tensors: list[torch.Tensor], leaves: list[Any], structure: Any, dims: int) -> None:
        """Take the tensors, the leaves with `_TENSOR` in their places, the structure, and the dimensions of tokens."""
        self.tensors, self.dims = tensors, dims
        self._leaves, self._structure = leaves, structure

    @staticmethod
    def of(args: tuple, kwargs: dict[str, Any]) -> TileCall | None:
        """Return a call that can be cut, or None."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or not tensors[0].is_floating_point() or tensors[0].ndim < 2:
            return None
        lead = tensors[0].shape[: token_dims(tensors[0])]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                alike = leaf.ndim > len(lead) and token_dims(leaf) == len(lead) and leaf.shape[: len(lead)] == lead
                if not alike or leaf.layout is not torch.strided or leaf.device != tensors[0].device:
                    return None
            elif not isinstance(leaf, _CONSTANTS):
                return None
        constants = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return TileCall(tensors, constants, structure, len(lead))

    def without_tensors(self) -> TileCall:
        """Return the call without its tensors, which a graph may keep."""
        return TileCall([], self._leaves, self._structure, self.dims)

    @property
    def tokens(self) -> int:
        """How many tokens there are, of all sequences together."""
        return self.tensors[0].shape[: self.dims].numel()

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tensors[0].device

    def kind(self) -> Hashable:
        """Return a key that calls which are cut alike share, however many tokens they have."""
        tensors = tuple((tensor.shape[self.dims :], self.dims, tensor.dtype) for tensor in self.tensors)
        constants = tuple(None if leaf is _TENSOR else (type(leaf), leaf) for leaf in self._leaves)
        return tensors, constants, repr(self._structure)

    def bounds(self, tile: int) -> list[tuple[int, int]]:
        """Return the first token of each tile, and the one behind its last."""
        return [(begin, min(begin + tile, self.tokens)) for begin in range(0, self.tokens, tile)]

    @staticmethod
    def flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors without history, each with one dimension of tokens."""
        return [by_tokens(tensor.detach(), token_dims(tensor)) for tensor in tensors]

    def tile(
        self, flat: Sequence[torch.Tensor], begin: int, end: int, trained: Sequence[bool] = ()
    ) -> list[torch.Tensor]:
        """Return the tokens from `begin` to `end` as one sequence; slices of `trained` tensors want gradients."""
        tile = [tensor[begin:end] if self.dims == 1 else tensor[begin:end].unsqueeze(0) for tensor in flat]
        for tensor, wanted in zip(tile, trained, strict=False):
            tensor.requires_grad_(wanted)
        return tile

    def call(self, forward: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Any]:
        """Call a part with these tensors; return its outputs, and their structure."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return pytree.tree_flatten(forward(*args, **kwargs))


@contextmanager
def swapped(module: nn.Module, weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have a module compute with other tensors in place of its parameters, in the order of `parameters()`.

    Gradients of the parameters themselves would call the program's hooks on them for each tile.
    """
    by_parameter = dict(zip(module.parameters(), weights, strict=True))
    replaced: list[tuple[dict[Any, Any], str, Any]] = []
    try:
        for inner in module.modules():
            held: dict[Any, Any] = inner._parameters
            for name, parameter in list(held.items()):
                if parameter is not None:
                    replaced.append((held, name, parameter))
                    dict.__setitem__(held, name, by_parameter[parameter])
        yield
    finally:
        for parameters, name, parameter in replaced:
            dict.__setitem__(parameters, name, parameter)
