"""Bytes that a rank sends to the others and receives in an optimizer step, as `memascend.stats` counts them.

Weights of a unit are gathered when another one was used before it, and on devices when it is not there. Gradients are
exchanged in every backward pass, and the sums that projections need from other ranks (APOLLO) in the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.forecast.traffic import projections
from memascend.layout.division import ranks_of, sent_bytes
from memascend.optim.apollo_ranks import Division

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.forecast.traffic import Traffic
    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit


def network(units: Sequence[Unit], work: Workload, moved: Traffic) -> dict[str, Any]:
    """Return the bytes of each rank, as `forecast.report` describes them.

    `units` are divided over `work.ranks`, and `moved` is the traffic of the first. All gradients are assumed to be
    there on every rank.
    """
    others = work.ranks - 1
    weights = others * moved.gathered
    kept = [work.grad_accum * nbytes for nbytes in _kept_bytes(units, work.ranks)]
    divisions = [Division(made, 0, tensor.shard) for tensor, made in projections(units, work) if tensor.shard]
    sent = [
        weights + sum(kept) - of_rank + sum(division.sent_bytes(rank) for division in divisions)
        for rank, of_rank in enumerate(kept)
    ]
    received = [
        weights + others * of_rank + sum(division.received_bytes(rank) for division in divisions)
        for rank, of_rank in enumerate(kept)
    ]
    return {
        "ranks": work.ranks,
        "weights_bytes": weights,
        "sent_bytes": sent,
        "received_bytes": received,
        "busiest_bytes": max(*sent, *received),
    }


def _kept_bytes(units: Sequence[Unit], ranks: int) -> list[int]:
    """Return the bytes of a backward pass's gradients that the store of each rank keeps."""
    kept = [0] * ranks
    for place in (place for unit in units for tensor in unit.tensors if tensor.trained for place in tensor.places):
        for rank in ranks_of(place):
            kept[rank] += sent_bytes(place, rank)
    return kept
