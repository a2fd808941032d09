"""The total host memory of a run, beside the memory that this process can have."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memascend.common.sizes import format_size
from memascend.forecast.simulation import LIBRARIES_BYTES, simulate_step
from memascend.forecast.traffic import state_kinds
from memascend.hardware.memory_limits import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit

#: Memory of a layer's call between the passes, beside tensors. A call of a Llama layer has 77 kB of allocations
#: (`tests/forecast/test_call_bytes.py` counts them): 70 nodes of autograd of 0.6 to 0.9 kB with the names of what they
#: save, and 25 kB of Python's objects. The rest is for holes between them: resident memory was seen to grow by 84 kB
#: for a layer of width 64, and by 99 kB for one of width 1,536.
CALL_BYTES = 96 * 1024


@dataclass(frozen=True, slots=True)
class MemoryTotal:
    """The parts of a run's host memory, in bytes."""

    #: Planned by memascend, or the weights, gradients and states of a model in memory.
    held: int
    #: An estimate of PyTorch's memory beside it; None where it is not known.
    pytorch: int | None
    #: Held by the interpreter and its libraries.
    interpreter: int
    #: Available to this process, with the bytes it holds already, and the bound that sets it.
    available: int
    bound: str
    #: Label of `held`.
    name: str = "planned"

    @staticmethod
    def of(held: int, pytorch: int | None, interpreter: int, name: str = "planned", processes: int = 1) -> MemoryTotal:
        """Add up a run, beside the memory that is available now, divided among `processes`."""
        left, bound = available_memory()
        if processes > 1:
            bound += f", for each of {processes} processes"
        return MemoryTotal(held, pytorch, interpreter, left // processes + interpreter, bound, name)

    def with_activations(self, kept_bytes: int) -> MemoryTotal:
        """Return the same with activations that are kept: a run has them take at most half of what all else leaves."""
        return replace(self, held=self.held + min(kept_bytes, max(0, self.available - self.total) // 2))

    @property
    def total(self) -> int:
        """The sum of the known parts."""
        return self.held + (self.pytorch or 0) + self.interpreter

    @property
    def fits(self) -> bool:
        """Whether this process can have it; where PyTorch's share is not known, that is not judged."""
        return self.pytorch is None or self.total <= self.available

    def text(self) -> str:
        """Return one line."""
        size = format_size
        pytorch = "PyTorch's, not known" if self.pytorch is None else f"about {size(self.pytorch)} PyTorch"
        return (
            f"in all: {size(self.held)} {self.name} + {pytorch} + {size(self.interpreter)} interpreter = "
            f"{size(self.total)} of {size(self.available)} ({self.bound})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the entry that `forecast.report` describes."""
        return {
            "planned_bytes": self.held,
            "pytorch_bytes": self.pytorch,
            "interpreter_bytes": self.interpreter,
            "total_bytes": self.total,
            "available_bytes": self.available,
            "bound": self.bound,
            "fits": self.fits,
        }


def pytorch_memory(
    config: Any, directory: Path, dtype: torch.dtype, work: Workload, *, in_memory: bool = False, projections: int = 0
) -> dict[str, int] | None:
    """Estimate PyTorch's memory beside the plan's buffers in a step on the CPU, or beside a model in memory.

    `projections`: bytes that projecting a gradient takes there too, in the backward pass.

    None where the model's code cannot be run without values (`forecast.simulation`). benches/plan_accuracy.py measures
    it beside the plan.
    """
    step = simulate_step(config, directory, dtype, work, in_memory=in_memory)
    if step is None:
        return None
    # For one call of each layer the constants of the plan have room.
    calls = CALL_BYTES * step.layers * (work.slices - 1)
    return {
        "forward_bytes": step.forward,
        "backward_bytes": step.backward,
        "projections_bytes": projections,
        "calls_bytes": calls,
        "libraries_bytes": LIBRARIES_BYTES,
        "estimated_bytes": max(step.forward, step.backward + projections) + calls + LIBRARIES_BYTES,
    }


def longest_sequence(work: Workload, whole: MemoryTotal, estimate: Callable[[Workload], int | None]) -> int | None:
    """Return about how many tokens a sequence may have so that a run fits which does not as it is.

    PyTorch's share grows with the tokens from the result of `estimate` for half of them. None where that is not known,
    or where no length fits.
    """
    shorter = replace(work, seq_len=work.seq_len // 2)
    less = estimate(shorter)
    if not less or not whole.pytorch or whole.pytorch <= less:
        return None
    each = (whole.pytorch - less) / (work.seq_len - shorter.seq_len)
    longest = work.seq_len - math.ceil((whole.total - whole.available) / each)
    return longest if longest > 1 else None


def in_memory_bytes(units: Sequence[Unit], work: Workload) -> int:
    """Return the bytes of a model's weights in memory, and of gradients and states of those that are trained."""
    tensors = [tensor for unit in units for tensor in unit.tensors]
    trained = [tensor for tensor in tensors if tensor.trained]
    states = sum(sum(state_kinds(tensor, work).values()) for tensor in trained)
    return states + sum(tensor.nbytes for tensor in tensors) + sum(tensor.nbytes for tensor in trained)
