"""Trying a part of a layer on a few tokens: whether it works token by token, and whether tiles would save memory."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.autograd.buffers import version_of
from memascend.errors import MemascendError, first_line
from memascend.hardware.cuda import autocast, autocast_of
from memascend.slicing.collectors import Collected
from memascend.slicing.tile_calls import Join, by_tokens, swapped, token_dims
from memascend.slicing.trial import AGREEING, agree, tolerance_of, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend.hardware.cuda import ComputeDevice
    from memascend.slicing.tile_calls import TileCall

#: Tokens that a part is tried with, and how many of them alone.
TOKENS, ALONE = 256, 8
#: The part of the values that have to agree among equal tokens: roundings hardly ever decide between those.
_EQUAL_AGREEING = 0.95
#: The part of the tokens whose gradients have to agree. As with values, roundings may send a token to another expert.
_GRADIENTS_AGREEING = 0.75
#: By how much gradients may differ, relative to tolerances of values: they have more roundings behind them.
_GRADIENT_TOLERANCE = 2.0
#: Tiles are worth their time where a part keeps more than this share of its input's bytes beside input and output.
WORTH_SHARE = 0.5
_SEED = 0x711E
#: Without values to compare: parts of a name in which tokens meet.
_MEETING = ("attention", "attn", "conv", "mixer", "mamba")
#: Parts of names of modules that drop whole sequences at random, which no comparison shows.
_DROPPING = ("droppath", "stochasticdepth")
_DROPPING_ROWS = (nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)


class _WholeError(Exception):
    """The part has to see the whole sequence."""


class TileTrial:
    """Calls a part with random tokens together, in another order, as sequences of one token, and some of them alone.

    Equal tokens are tried too, since they go to the same experts. Gradients are compared, since a weight that is zero
    at first may let tokens meet later. The behaviour of a part in training alone is tried where it draws no random
    numbers.
    """

    def __init__(self, module: nn.Module, device: ComputeDevice | None, compares: bool = True) -> None:
        """Try `module`; without `compares`, on tensors without values, judge by shapes and names."""
        self._module, self._device, self._compares = module, device, compares
        self._trained = [inner for inner in module.modules() if inner.training]

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
            plain = kind.lower().replace("_", "")
            if isinstance(inner, _DROPPING_ROWS) or any(word in plain for word in _DROPPING):
                raise _WholeError(f"its {kind} drops whole sequences")
            if not self._compares and any(word in kind.lower() for word in _MEETING):
                raise _WholeError(f"its {kind} has tokens meet, by its name")

    def _try(self, forward: Callable[..., Any], call: TileCall) -> list[Join]:
        inputs = _inputs(call)
        tokens = inputs[0].shape[0]
        together = self._called(forward, call, inputs)
        self._check_worth(together)
        joins = [_join(leaf, call, tokens) for leaf in together.leaves]
        if not self._compares:
            return joins
        held = _attributes(self._module)
        single = self._check_values(forward, call, inputs, joins, together)
        self._check_written(held)
        self._check_gradients(joins, together, single, _alone(tokens))
        with self._training() as trains:
            if trains:
                held = _attributes(self._module)
                first, second = (self._called(forward, call, inputs) for _ in range(2))
                if [_join(leaf, call, tokens) for leaf in first.leaves] != joins:
                    raise _WholeError("it returns other things while training")
                self._check_written(held)
                # Where random numbers decide, the outputs tell nothing of other tokens.
                if all(map(_agree, first.leaves, second.leaves)):
                    self._check_values(forward, call, inputs, joins, first)
        return joins

    @contextmanager
    def _training(self) -> Iterator[bool]:
        """Have the modules train that the program trains, but for dropout; give whether there are any."""
        training = [inner for inner in self._trained if not isinstance(inner, nn.modules.dropout._DropoutNd)]
        try:
            for inner in training:
                inner.training = True
            yield bool(training)
        finally:
            for inner in training:
                inner.training = False

    def _check_values(
        self,
        forward: Callable[..., Any],
        call: TileCall,
        inputs: Sequence[torch.Tensor],
        joins: Sequence[Join],
        together: _Called,
    ) -> list[_Called]:
        """Raise `_WholeError` where values depend on other tokens; return the calls with one token each."""
        tokens = inputs[0].shape[0]

        def outputs(inputs: Sequence[torch.Tensor], **how: bool) -> list[torch.Tensor]:
            return self._called(forward, call, inputs, **how).parts(joins, tokens)

        def check(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], share: float = AGREEING) -> None:
            if not all(_agree(*pair, share) for pair in zip(actual, expected, strict=True)):
                raise _WholeError("what it returns for a token depends on other tokens")

        whole = together.parts(joins, tokens)
        check([part.flip(0) for part in outputs([tensor.flip(0) for tensor in inputs])], whole)
        same = outputs([tensor[:1].repeat(tokens, *[1] * (tensor.ndim - 1)) for tensor in inputs])
        check(same, [part[:1].expand_as(part) for part in same], _EQUAL_AGREEING)
        if call.dims > 1:
            check(outputs(inputs, across=True), whole)
        alone = _alone(tokens)
        single = [self._called(forward, call, [tensor[token : token + 1] for tensor in inputs]) for token in alone]
        parts = zip(*(called.parts(joins, 1) for called in single), strict=True)
        check([torch.cat(part) for part in parts], [part[alone] for part in whole])
        return single

    def _check_gradients(
        self, joins: Sequence[Join], together: _Called, single: Sequence[_Called], alone: Sequence[int]
    ) -> None:
        """Raise `_WholeError` where gradients depend on other tokens: also where weights are zero that use those."""
        agreeing = [
            together.gradients_agree(called, joins, token)
            for token, called in list(zip(alone, single, strict=True))[1::2]
        ]
        if sum(agreeing) < _GRADIENTS_AGREEING * len(agreeing):
            raise _WholeError("the gradients of what it returns for a token depend on other tokens")

    def _check_written(self, held: dict[tuple[int, str], tuple[Any, int | None]]) -> None:
        if (written := _written(held, _attributes(self._module))) is not None:
            raise _WholeError(f"it keeps something of each call ({written})")

    def _called(
        self, forward: Callable[..., Any], call: TileCall, inputs: Sequence[torch.Tensor], across: bool = False
    ) -> _Called:
        """Call the part with copies of `inputs`, (tokens, ...) each, as one sequence, or `across` as one token each.

        Raises `_WholeError` for an operation that no tile may do.
        """
        # As while training, so that evaluation runs on the same tiles.
        given = call.tile(inputs, 0, len(inputs[0]), [tensor.is_floating_point() for tensor in inputs])
        aliases = [p.detach().requires_grad_(p.requires_grad) for p in self._module.parameters()]
        with torch.enable_grad():  # A leaf could not be written to.
            tile = [tensor.transpose(0, 1).clone() if across else tensor.clone() for tensor in given]
        versions = [version_of(tensor) for tensor in tile]
        # Storages, since tensors would refer to the graph that refers to this list.
        saved: list[torch.UntypedStorage] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.untyped_storage())
            return tensor.detach()

        collected = Collected()
        kind, dtype, _ = autocast_of(call.device)
        try:
            with (
                torch.enable_grad(),
                autocast(kind, dtype, False),
                swapped(self._module, aliases),
                torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
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
        if leaves_of(leaves) - {id(tensor) for tensor in (*given, *aliases)}:
            raise _WholeError("it computes with trained weights that are not its own")
        return _Called(leaves, tile, given, aliases, saved, across)

    @staticmethod
    def _check_worth(called: _Called) -> None:
        beside = {tensor.untyped_storage()._cdata for tensor in (*called.tile, *called.aliases, *called.leaves)}
        kept = {storage._cdata: storage.nbytes() for storage in called.saved}
        own = sum(nbytes for storage, nbytes in kept.items() if storage not in beside)
        if own < WORTH_SHARE * sum(tensor.nbytes for tensor in called.tile):
            raise _WholeError("it keeps little beside its input and output")


@dataclass
class _Called:
    """One call of a part with some tokens."""

    leaves: list[torch.Tensor]
    #: The inputs of the part: copies of `given`, (1, tokens, ...) each, or `across` (tokens, 1, ...).
    tile: list[torch.Tensor]
    given: list[torch.Tensor]
    #: The tensors that the part computed with in place of its weights.
    aliases: list[torch.Tensor]
    #: The tensors that autograd saved.
    saved: list[torch.UntypedStorage]
    across: bool

    def parts(self, joins: Sequence[Join], tokens: int) -> list[torch.Tensor]:
        """Return the outputs, (tokens, ...) each."""
        parts = []
        for join, output in zip(joins, self.leaves, strict=True):
            leaf = output.detach()
            if self.across and join.as_input:
                if leaf.shape[:2] != (tokens, 1):
                    raise _WholeError("what it returns depends on how tokens are divided into sequences")
                leaf = leaf.transpose(0, 1)
            parts.append(join.part(leaf, 0, tokens))
        return parts

    def gradients_agree(self, single: _Called, joins: Sequence[Join], token: int) -> bool:
        """Return whether the gradients of the output for `token` are as in a call with that token alone."""
        generator = torch.Generator().manual_seed(_SEED)
        outputs, given, alone, given_alone = [], [], [], []
        for leaf, other, join in zip(self.leaves, single.leaves, joins, strict=True):
            if leaf.requires_grad != other.requires_grad:
                return False
            if leaf.requires_grad:
                some = torch.randn(other.shape, generator=generator).to(other.device, other.dtype)
                whole = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
                join.part(whole, token, token + 1).copy_(join.part(some, 0, 1))
                outputs.append(leaf)
                given.append(whole)
                alone.append(other)
                given_alone.append(some)
        if not outputs:
            return True
        numbers = [index for index, tensor in enumerate((*self.given, *self.aliases)) if tensor.requires_grad]
        targets, others = ([*called.given, *called.aliases] for called in (self, single))
        made = torch.autograd.grad(
            outputs, [targets[index] for index in numbers], given, retain_graph=True, allow_unused=True
        )
        expected = torch.autograd.grad(alone, [others[index] for index in numbers], given_alone, allow_unused=True)
        for index, actual, wanted in zip(numbers, made, expected, strict=True):
            if index < len(self.given) and actual is not None:
                rows = by_tokens(actual, token_dims(actual)).clone()
                own = rows[token].clone()
                rows[token] = 0
                if not _near(rows, None) or not _near(own, None if wanted is None else wanted.reshape(own.shape)):
                    return False
            elif not _near(actual, wanted):
                return False
        return True


def _near(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Return whether two gradients are the same but for roundings; None is zero."""
    tensors = [tensor for tensor in (actual, expected) if tensor is not None]
    if not tensors:
        return True
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    if len(tensors) < 2:
        return not norms[0] > 0
    tolerance = _GRADIENT_TOLERANCE * tolerance_of(tensors[0])
    difference = torch.linalg.vector_norm(tensors[0] - tensors[1], dtype=torch.float32)
    return not difference > tolerance * max(norms)  # A value that is not finite tells nothing.


def _agree(actual: torch.Tensor, expected: torch.Tensor, share: float = AGREEING) -> bool:
    """Return whether most values are the same but for roundings."""
    if actual.shape != expected.shape:
        return False
    if actual.is_floating_point():
        return agree(actual, expected, share)
    return actual.dtype == expected.dtype and bool((actual == expected).double().mean() >= share)


def _alone(tokens: int) -> list[int]:
    """Return the tokens that are tried alone."""
    return torch.linspace(0, tokens - 1, min(tokens, ALONE)).long().tolist()


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
    if leaf.is_complex():
        raise _WholeError("it returns complex numbers")
    if call.dims == 2 and leaf.ndim >= 3 and leaf.shape[:2] == (1, tokens):
        return Join(as_input=True)
    if leaf.ndim >= 2 and leaf.shape[0] == tokens:
        return Join(as_input=False)
    raise _WholeError("it returns something that has no value for each token")


def _attributes(module: nn.Module) -> dict[tuple[int, str], tuple[Any, int | None]]:
    """Return the attributes of the modules, but for their parameters, with the versions of tensors."""
    held = {}
    for number, inner in enumerate(module.modules()):
        for name, value in (*inner.__dict__.items(), *inner._buffers.items()):
            if name not in ("training", "_parameters"):
                held[number, name] = value, version_of(value) if type(value) is torch.Tensor else None
    return held


def _written(
    before: dict[tuple[int, str], tuple[Any, int | None]], after: dict[tuple[int, str], tuple[Any, int | None]]
) -> str | None:
    """Return the name of an attribute that a call has changed, or None."""
    nothing = None, -1
    for key in before.keys() | after.keys():
        (value, version), (other, other_version) = before.get(key, nothing), after.get(key, nothing)
        if value is not other or version != other_version:
            return key[1]
    return None


def leaves_of(outputs: Sequence[torch.Tensor]) -> set[int]:
    """Return the identities of the leaves that gradients of `outputs` would reach."""
    found: set[int] = set()
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            found.add(id(node.variable))  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found
