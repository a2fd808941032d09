"""Recompute a unit's activations in the backward pass; its inputs wait in spare budgeted memory or on the SSD.

The scheme is that of Chen et al. 2016 (arXiv 1604.06174), with the graph of the first forward kept and only
its saved tensors dropped, so that gradients flow through whatever the unit was called with.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from memascend.errors import MemascendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend._memascend import Runtime, Stash

#: Inputs below this stay where they are: an SSD request costs more than it frees.
STASH_FROM_BYTES = 64 * 1024


class StashedInput:
    """An input put aside by the runtime; `restore` brings its values back into a fresh tensor."""

    def __init__(self, runtime: Runtime, tensor: torch.Tensor) -> None:
        """Start copying `tensor` out."""
        self.shape, self.dtype, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad
        self.stash: Stash = runtime.stash(tensor.data_ptr(), tensor.nbytes)

    def restore(self) -> torch.Tensor:
        """Return the values; shape and dtype as they were."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.stash.restore(tensor.data_ptr())
        return tensor.requires_grad_(self.requires_grad)


class InputStash:
    """Puts the inputs of recomputed units aside, each tensor once however many units it is passed to."""

    def __init__(self, runtime: Runtime) -> None:
        """Put them into the keeping of `runtime`."""
        self.runtime = runtime
        #: (version, stand-in) by identity of the tensor.
        self._known = WeakIdKeyDictionary()

    def put(self, tensor: torch.Tensor) -> StashedInput | torch.Tensor:
        """Return a stand-in for `tensor`, or the tensor itself where moving it would gain nothing."""
        movable = (
            tensor.requires_grad
            and not tensor.is_leaf
            and tensor.device.type == "cpu"
            and tensor.nbytes >= STASH_FROM_BYTES
            and tensor.is_contiguous()
        )
        if not movable:
            return tensor
        known = self._known.get(tensor)
        if known is not None and known[0] == tensor._version:
            return known[1]
        stashed = StashedInput(self.runtime, tensor)
        self._known[tensor] = (tensor._version, stashed)
        return stashed


#: Recomputations that hold recomputed tensors, views of weights among them.
_holding: weakref.WeakSet[Recomputation] = weakref.WeakSet()


def forget_recomputed() -> None:
    """Drop what was recomputed and not asked for yet; what is asked for later is recomputed once more.

    An abandoned backward pass holds buffers by it for as long as its loss lives.
    """
    for recomputation in list(_holding):
        recomputation.values = {}
    _holding.clear()


class Recomputation:
    """One call of a unit whose saved tensors are computed again when the backward pass asks for the first."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict[str, Any], stash: InputStash) -> None:
        """Remember how to call `function` again: inputs, random state and autocast."""
        self.function = function
        leaves, self.structure = pytree.tree_flatten((args, kwargs))
        self.leaves = [stash.put(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.random_state = _shared_random_state()
        self.autocast = (
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            torch.is_autocast_cache_enabled(),
        )
        self.saved = 0
        self.values: dict[int, torch.Tensor] = {}

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the function; keep its graph and none of the tensors that the graph would save."""
        with torch.autograd.graph.saved_tensors_hooks(self._drop, self._recall):
            return self.function(*args, **kwargs)

    def _drop(self, _: torch.Tensor) -> int:
        self.saved += 1
        return self.saved - 1

    def _recall(self, index: int) -> torch.Tensor:
        if index not in self.values:
            self._recompute()
        return self.values.pop(index)

    def _recompute(self) -> None:
        leaves = [leaf.restore() if isinstance(leaf, StashedInput) else leaf for leaf in self.leaves]
        # Detached inputs keep this second graph from reaching back into the first.
        leaves = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        values: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> int:
            values[len(values)] = tensor.detach()
            return len(values) - 1

        def refuse(_: int) -> torch.Tensor:
            raise MemascendError("a recomputed graph was asked for gradients of its own")

        with (
            torch.enable_grad(),
            _random_state(self.random_state),
            _autocast(*self.autocast),
            torch.autograd.graph.saved_tensors_hooks(keep, refuse),
        ):
            self.function(*args, **kwargs)
        if len(values) != self.saved:
            raise MemascendError(
                f"recomputing a unit saved {len(values)} tensors where the first forward saved {self.saved}: its "
                "forward is not deterministic; pass recompute=False"
            )
        self.values = values
        _holding.add(self)


_latest_random_state = torch.empty(0, dtype=torch.uint8)


def _shared_random_state() -> torch.Tensor:
    """Return the generator's state (5 KB), the same tensor as long as nothing draws from it."""
    global _latest_random_state
    state = torch.get_rng_state()
    if not torch.equal(state, _latest_random_state):
        _latest_random_state = state
    return _latest_random_state


@contextmanager
def _random_state(state: torch.Tensor) -> Iterator[None]:
    current = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(current)


def _autocast(dtype: torch.dtype | None, cache: bool) -> Any:
    if dtype is None:
        return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
    return torch.autocast("cpu", dtype=dtype, cache_enabled=cache)
