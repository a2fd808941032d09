"""Trying a part of a layer on a few tokens: whether it works token by token, and whether tiles would save memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.errors import MemascendError, first_line
from memascend.machine.cuda import autocast, autocast_of
from memascend.offloading.buffers import version_of
from memascend.offloading.collectors import Collected
from memascend.offloading.tile_calls import Join, swapped
from memascend.offloading.trial import agree, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.machine.cuda import ComputeDevice
    from memascend.offloading.tile_calls import TileCall

#: Tokens that a part is tried with, and how many of them alone.
TOKENS, ALONE = 256, 8
#: Tiles are worth their time where a part keeps more than this share of its input's bytes beside input and output.
WORTH_SHARE = 0.5
_SEED = 0x711E
#: Without values to compare: parts of a name in which tokens meet.
_MEETING = ("attention", "attn", "conv", "mixer", "mamba")


class _WholeError(Exception):
    """The part has to see the whole sequence."""


class TileTrial:
    """Calls a part with random tokens together, in another order, and some of them alone."""

    def __init__(self, module: nn.Module, device: ComputeDevice | None, compares: bool = True) -> None:
        """Try `module`; without `compares`, on tensors without values, see what shapes and names tell."""
        self._module, self._device, self._compares = module, device, compares

    def of(self, forward: Callable[..., Any], call: TileCall) -> list[Join] | str:
        """Return how outputs of tiles are joined, or why the part is to run on the whole sequence."""
        try:
            self._check_modules()
            with undisturbed(self._module, self._device):
                return self._try(forward, call)
        except _WholeError as error:
            return str(error)
        except (MemascendError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"it fails on a tile ({type(error).__name__}: {first_line(error)})"

    def _check_modules(self) -> None:
        for inner in self._module.modules():
            kind = type(inner).__name__
            if isinstance(inner, nn.modules.batchnorm._BatchNorm):
                raise _WholeError(f"its {kind} takes the statistics of all tokens")
            if any("capacity" in name for name in vars(inner)):
                raise _WholeError(f"its {kind} has a capacity, which tokens take from each other")
            if not self._compares and any(word in kind.lower() for word in _MEETING):
                raise _WholeError(f"its {kind} has tokens meet, by its name")

    def _try(self, forward: Callable[..., Any], call: TileCall) -> list[Join]:
        inputs = _inputs(call)
        tokens = inputs[0].shape[0]
        together = self._outputs(forward, call, inputs, first=True)
        joins = [_join(leaf, call, tokens) for leaf in together]
        if not self._compares:
            return joins
        held = _attributes(self._module)
        turned = self._outputs(forward, call, [tensor.flip(0) for tensor in inputs])
        alone = torch.linspace(0, tokens - 1, min(tokens, ALONE)).long().tolist()
        single = [self._outputs(forward, call, [tensor[token : token + 1] for tensor in inputs]) for token in alone]
        if (written := _written(held, _attributes(self._module))) is not None:
            raise _WholeError(f"it keeps something of each call ({written})")
        for index, (join, leaf) in enumerate(zip(joins, together, strict=True)):
            whole = join.part(leaf, 0, tokens)
            others = torch.cat([join.part(outputs[index], 0, 1) for outputs in single])
            if not agree(join.part(turned[index], 0, tokens).flip(0), whole) or not agree(others, whole[alone]):
                raise _WholeError("what it returns for a token depends on other tokens")
        return joins

    def _outputs(
        self, forward: Callable[..., Any], call: TileCall, inputs: Sequence[torch.Tensor], first: bool = False
    ) -> list[torch.Tensor]:
        """Call the part with copies of `inputs`, (tokens, ...) each; raise `_WholeError` for what no tile may do."""
        # As while training, so that evaluation runs on the same tiles.
        given = call.tile(inputs, 0, len(inputs[0]), [tensor.is_floating_point() for tensor in inputs])
        aliases = [p.detach().requires_grad_(p.requires_grad) for p in self._module.parameters()]
        with torch.enable_grad():  # A leaf could not be written to.
            tile = [tensor.clone() for tensor in given]
        versions = [version_of(tensor) for tensor in tile]
        # Storages, since tensors would refer to the graph that refers to this list.
        saved: list[torch.UntypedStorage] = []
        collected = Collected()
        kind, dtype, _ = autocast_of(call.device)
        try:
            with (
                torch.enable_grad(),
                autocast(kind, dtype, False),
                swapped(self._module, aliases),
                torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.untyped_storage()), _no_backward),
            ):
                leaves, _ = call.call(forward, tile)
        finally:
            taken = collected.take()
        if taken:
            raise _WholeError("transformers collects what a router within it returns")
        if versions != [version_of(tensor) for tensor in tile]:
            raise _WholeError("it changes an input in place")
        if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise _WholeError("it returns something that is no tensor")
        if _leaves_of(leaves) - {id(tensor) for tensor in (*given, *aliases)}:
            raise _WholeError("it computes with trained weights that are not its own")
        if first:
            self._check_worth(tile, aliases, leaves, saved)
        return [leaf.detach() for leaf in leaves]

    @staticmethod
    def _check_worth(
        tile: Sequence[torch.Tensor],
        aliases: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        saved: Sequence[torch.UntypedStorage],
    ) -> None:
        beside = {tensor.untyped_storage()._cdata for tensor in (*tile, *aliases, *leaves)}
        kept = {storage._cdata: storage.nbytes() for storage in saved}
        own = sum(nbytes for storage, nbytes in kept.items() if storage not in beside)
        if own < WORTH_SHARE * sum(tensor.nbytes for tensor in tile):
            raise _WholeError("it keeps little beside its input and output")


def _inputs(call: TileCall) -> list[torch.Tensor]:
    """Return random tokens like a call's, (tokens, ...) each; whole numbers are the call's own."""
    generator = torch.Generator().manual_seed(_SEED)
    count = min(TOKENS, call.tokens)
    inputs = []
    for tensor in call.flat(call.tensors):
        some = tensor[:count]
        if some.is_floating_point():
            some = torch.randn(some.shape, generator=generator, device="cpu").to(some.device, some.dtype)
        inputs.append(some)
    return inputs


def _join(leaf: torch.Tensor, call: TileCall, tokens: int) -> Join:
    """Return how an output for `tokens` tokens is joined."""
    if call.dims == 2 and leaf.ndim >= 3 and leaf.shape[:2] == (1, tokens):
        return Join(as_input=True)
    if leaf.ndim >= 2 and leaf.shape[0] == tokens:
        return Join(as_input=False)
    raise _WholeError("it returns something that has no value for each token")


def _attributes(module: nn.Module) -> dict[tuple[int, str], tuple[int, int | None]]:
    """Return identities and versions of what the modules hold, but for their parameters."""
    held = {}
    for number, inner in enumerate(module.modules()):
        for name, value in (*inner.__dict__.items(), *inner._buffers.items()):
            if name not in ("training", "_parameters"):
                version = version_of(value) if type(value) is torch.Tensor else None
                held[number, name] = id(value), version
    return held


def _written(before: dict[tuple[int, str], Any], after: dict[tuple[int, str], Any]) -> str | None:
    """Return the name of an attribute that a call has changed, or None."""
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            return key[1]
    return None


def _leaves_of(outputs: Sequence[torch.Tensor]) -> set[int]:
    """Return the identities of the leaves that gradients of `outputs` would reach."""
    found: set[int] = set()
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def _no_backward(_: Any) -> torch.Tensor:
    raise AssertionError("no backward pass goes through a trial")
