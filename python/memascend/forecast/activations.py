"""The activations of recomputed layers for which a plan of host memory leaves room: they are not computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.memory_plan.estimates import Shape
from memascend.memory_plan.host import lend
from memascend.memory_plan.lines import HOLES_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit
    from memascend.memory_plan.lines import Plan


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """How many calls of repeated layers keep their activations in a pass."""

    #: Of how many, and the bytes of one.
    kept: int
    calls: int
    nbytes: int

    @property
    def wanted_bytes(self) -> int:
        """Bytes of all calls of a pass."""
        return self.calls * self.nbytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all that is kept, with the holes between."""
        return int(self.kept * self.nbytes * (1 + HOLES_SHARE))

    @property
    def share(self) -> float:
        """The share of the calls that are not computed again."""
        return self.kept / self.calls if self.calls else 0.0

    @staticmethod
    def of(plan: Plan, units: Sequence[Unit], config: Any, work: Workload) -> KeptLayers:
        """Return how many fit in what `plan` leaves; none over ranks, or where the widths of layers are unknown.

        An estimate: a run measures its first pass, and keeps what fits of the bytes that it found.
        """
        shape, repeated = Shape.of(config), [unit for unit in units if unit.repeated]
        calls = len(repeated) * work.slices
        if shape is None or not calls or not work.recompute or work.ranks > 1:
            return KeptLayers(0, calls, 0)
        nbytes = shape.kept_bytes(work.layer_tokens, repeated[0].tensors[0].dtype.itemsize)
        return KeptLayers(min(calls, plan.activations_bytes // nbytes), calls, nbytes)


def lent(plan: Plan, units: Sequence[Unit], config: Any, work: Workload) -> Plan:
    """Return `plan` with as much of its budget lent to activations as they want, if it lends."""
    wanted = KeptLayers.of(plan, units, config, work).wanted_bytes
    if not plan.lends or wanted <= plan.activations_bytes:
        return plan
    return lend(plan, units, int(wanted * (1 + HOLES_SHARE)))
