"""The host memory that a run takes in all, beside what this process can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.common.sizes import format_size
from memascend.forecast.traffic import state_kinds
from memascend.machine.limits import available_memory
from memascend.plan.estimates import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.forecast.traffic import Work
    from memascend.layout.units import Unit


@dataclass(frozen=True, slots=True)
class Whole:
    """The parts of a run's host memory, in bytes."""

    #: What memascend plans to hold, or the weights, gradients and states of a model in memory.
    held: int
    #: An estimate of what PyTorch holds beside it; None where the model's layers are not known.
    pytorch: int | None
    #: What the interpreter and its libraries hold already.
    interpreter: int
    #: What this process can have, with what it holds already, and the bound that sets it.
    available: int
    bound: str
    #: What `held` is called.
    name: str = "planned"

    @staticmethod
    def of(held: int, pytorch: int | None, interpreter: int, name: str = "planned") -> Whole:
        """Add up a run, beside the memory that is available now."""
        left, bound = available_memory()
        return Whole(held, pytorch, interpreter, left + interpreter, bound, name)

    @property
    def total(self) -> int:
        """The sum of what is known."""
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
        """Return what `forecast.report` describes."""
        return {
            "planned_bytes": self.held,
            "pytorch_bytes": self.pytorch,
            "interpreter_bytes": self.interpreter,
            "total_bytes": self.total,
            "available_bytes": self.available,
            "bound": self.bound,
            "fits": self.fits,
        }


def pytorch_memory(config: Any, units: Sequence[Unit], work: Work) -> dict[str, int] | None:
    """Estimate what PyTorch holds beside the plan's buffers at the worst moment of a step, on the CPU.

    None where the configuration does not say what its layers are like.

    The logits and one layer are counted as in `plan.estimates`, and the other layers where they are not recomputed.
    Autograd makes the gradient of each parameter whole before it is taken over: the largest one counts, and beside the
    head's also the gradient of the logits.

    The estimate is 48 MB too low for both models of benches/results, where the head's gradient dominates. For Llamas of
    width 512 with 32,000 words it is 393 MB where 462 were measured (1,024 tokens), and 786 where 858 were (2,048). It
    is least accurate where a layer dominates: 164 MB where 314 were measured (width 1,024, MLP 4,096, 2,048 tokens).
    """
    shape = Shape.of(config)
    if shape is None:
        return None
    itemsize = units[0].tensors[0].dtype.itemsize
    logits, layer = shape.logits_bytes(work.tokens), shape.layer_bytes(work.tokens, itemsize)
    # The largest gradient within the layers, and outside of them.
    inner = max((place.nbytes for unit in units if unit.repeated for place in unit.places), default=0)
    outer = max((place.nbytes for unit in units if not unit.repeated for place in unit.places), default=0)
    beside = 0
    if not work.recompute:
        beside = max(0, sum(unit.repeated for unit in units) - 1) * shape.kept_bytes(work.tokens, itemsize)
    return {
        "logits_bytes": logits,
        "layer_bytes": layer,
        "gradient_bytes": max(inner, outer),
        "estimated_bytes": max(logits, outer + itemsize * work.tokens * shape.vocabulary, layer + inner) + beside,
    }


def in_memory_bytes(units: Sequence[Unit], work: Work) -> int:
    """Return the bytes of a model's weights, gradients and optimizer states in memory."""
    tensors = [tensor for unit in units for tensor in unit.tensors]
    return sum(2 * tensor.nbytes + sum(state_kinds(tensor, work).values()) for tensor in tensors)
