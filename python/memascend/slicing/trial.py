"""Trying a layer on a part of a batch: whether each row gives the same alone as among others."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.autograd.buffers import BufferCopies, BufferState, version_of
from memascend.autograd.rng import RandomState
from memascend.common.graphs import is_compiled
from memascend.errors import MemascendError, first_line
from memascend.slicing.calls import Outputs
from memascend.slicing.collectors import Collected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend.hardware.cuda import ComputeDevice
    from memascend.slicing.calls import Call

#: For each output of a layer: whether the values of slices are put side by side; otherwise they are the same for all.
Joins = list[bool]

#: By how much an output vector may differ between a row alone and the row among others, relative to its length: other
#: shapes take other kernels, which round otherwise.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
#: The part of the vectors that have to agree. A token near the border between two experts may go to the other one.
AGREEING = 0.75


class _WritesError(Exception):
    """The layer has written to its inputs."""


class Trial:
    """Calls a layer with two rows of a batch, and with each of them alone, without gradients and without dropout."""

    def __init__(self, module: nn.Module, device: ComputeDevice | None, between: Callable[[nn.Module], None]) -> None:
        """Try `module`, calling `between` with it after each call."""
        self._module, self._device, self._between = module, device, between

    def of(self, plain: Callable[..., Any], call: Call) -> Joins | str:
        """Return how the outputs of slices are joined, or why the layer has to see the whole batch."""
        for inner in self._module.modules():
            if isinstance(inner, nn.modules.batchnorm._BatchNorm) and inner.training:
                return f"its {type(inner).__name__} takes the statistics of a whole batch"
        try:
            with undisturbed(self._module, self._device):
                pair, first, second = (self._outputs(plain, call, *rows) for rows in ((0, 2), (0, 1), (1, 2)))
        except (MemascendError, MemoryError, torch.OutOfMemoryError):
            raise
        except _WritesError as error:
            return str(error)
        except Exception as error:
            return f"it fails on two rows of the batch ({type(error).__name__}: {first_line(error)})"
        if not len(pair.leaves) == len(first.leaves) == len(second.leaves):
            return "it returns other things for one row than for two"
        joins: Joins = []
        for both, one, other in zip(pair.leaves, first.leaves, second.leaves, strict=True):
            by_rows = _joins_by_rows(both, one, other)
            if by_rows is None:
                return "what it returns for two rows is not what it returns for each of them alone"
            joins.append(by_rows)
        return joins

    def _outputs(self, plain: Callable[..., Any], call: Call, begin: int, end: int) -> Outputs:
        leaves = [_copy_of(leaf) for leaf in call.some(begin, end)]
        versions = _versions(leaves)
        args, kwargs = call.arguments(leaves)
        collected = Collected()
        try:
            outputs = Outputs.of(plain(*args, **kwargs), collected.take())
            if _versions(leaves) != versions:
                raise _WritesError("it changes an input in place")
            return outputs
        finally:
            collected.take()
            self._between(self._module)


@contextmanager
def undisturbed(module: nn.Module, device: ComputeDevice | None) -> Iterator[None]:
    """Have calls of a module leave nothing behind in it, draw no random numbers, and make no graph."""
    training = [inner for inner in module.modules() if inner.training]
    # Graphs for the shapes of a trial would be made for nothing.
    compiled = "torch._dynamo" in sys.modules and any(is_compiled(inner) for inner in module.modules())
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    try:
        for inner in training:
            inner.training = False
        with (
            torch.no_grad(),
            eager,
            RandomState(device).restored(),
            BufferState(module, BufferCopies(), within_checkpoint=True).restored(),
        ):
            yield
    finally:
        for inner in training:
            inner.training = True


def _copy_of(leaf: Any) -> Any:
    """Return a copy of a tensor that is no weight: the layer may write to it."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter) else leaf


def _versions(leaves: list[Any]) -> list[int | None]:
    return [version_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _joins_by_rows(both: Any, one: Any, other: Any) -> bool | None:
    """Return whether an output for two rows is those for each, side by side; False if all three are the same.

    None if neither is so.
    """
    if not all(isinstance(value, torch.Tensor) for value in (both, one, other)):
        plain = type(both) is type(one) is type(other) and isinstance(both, bool | int | float | str | None)
        return False if plain and both == one == other else None
    if one.ndim and one.shape == other.shape and both.shape == (2 * len(one), *one.shape[1:]):
        return True if agree(both, torch.cat([one, other])) else None
    if both.shape == one.shape == other.shape and torch.equal(one, other) and agree(both, one):
        return False
    return None


def tolerance_of(tensor: torch.Tensor) -> float:
    """Return by how much an output vector may differ by roundings, relative to its length."""
    tolerance = _TOLERANCES.get(tensor.dtype, 3e-2)
    if torch.is_autocast_enabled(tensor.device.type):
        tolerance = max(tolerance, _TOLERANCES[torch.bfloat16])
    return tolerance


def agree(actual: torch.Tensor, expected: torch.Tensor, share: float = AGREEING) -> bool:
    """Return whether a share of the vectors along the last dimension are the same but for roundings."""
    if not actual.is_floating_point():
        return actual.dtype == expected.dtype  # which experts, which rows: roundings may decide
    tolerance = tolerance_of(actual)
    vectors = [tensor.reshape(-1, tensor.shape[-1]).nan_to_num().double() for tensor in (actual, expected)]
    difference = torch.linalg.vector_norm(vectors[0] - vectors[1], dim=-1)
    agreeing = difference <= tolerance * torch.linalg.vector_norm(vectors[1], dim=-1)
    return bool(agreeing.double().mean() >= share)
