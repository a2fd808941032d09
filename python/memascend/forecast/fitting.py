"""A change with which a run fits that does not fit as it is: the first of a few that is enough by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memascend.common.sizes import format_size
from memascend.forecast.simulation import TOKENS_MAX
from memascend.forecast.total_memory import CALL_BYTES, MemoryTotal, pytorch_memory
from memascend.forecast.traffic import projection_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import torch

    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit

_MIB = 1 << 20
#: Shorter sequences are not proposed.
_TOKENS_MIN = 128


def fitting_change(
    whole: MemoryTotal,
    smallest: int,
    units: Sequence[Unit],
    config: Any,
    directory: Path,
    dtype: torch.dtype,
    work: Workload,
) -> str | None:
    """Return the options with which a run on the CPU fits whose host memory is `whole`, or None where none does.

    `smallest` is the total of the least plan, in bytes.
    """
    spare = max(0, whole.held - smallest)
    if spare and whole.total - spare <= whole.available:
        mib = (whole.held - (whole.total - whole.available)) // _MIB
        return f"--host-memory {max(mib, -(-smallest // _MIB))}MiB"
    room = whole.available - (whole.total - spare - (whole.pytorch or 0))
    for change, changed in _smaller(work):
        if _least(units, config, dtype, changed) > room:  # Spares the runs of an estimate.
            continue
        estimates = pytorch_memory(config, directory, dtype, changed, projections=projection_bytes(units, changed))
        if estimates is not None and estimates["estimated_bytes"] <= room:
            budget = f" --host-memory {-(-smallest // _MIB)}MiB" if spare else ""
            return f"{change}{budget} (PyTorch then takes about {format_size(estimates['estimated_bytes'])})"
    return None


def _least(units: Sequence[Unit], config: Any, dtype: torch.dtype, work: Workload) -> int:
    """Return bytes that PyTorch takes in any case: hidden states of the batch, and calls of layers for its slices."""
    width = getattr(config.get_text_config(), "hidden_size", None) or 0
    calls = CALL_BYTES * sum(unit.repeated for unit in units) * (work.slices - 1)
    return work.tokens * width * dtype.itemsize + calls


def _smaller(work: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield options of a step that takes less memory at once, the ones that cost least first."""
    micro = work.micro_batch_size or work.batch_size
    most = max(1, TOKENS_MAX // work.seq_len)  # Larger ones are estimated as the whole batch is.
    while micro > 1:  # The largest that fits: a layer computes more at once.
        micro = min(most, (micro + 1) // 2)
        yield f"--micro-batch-size {micro}", replace(work, micro_batch_size=micro)
    rows = work.batch_size
    if rows > 1:
        passes = work.grad_accum * rows
        yield (
            f"--batch-size 1 --grad-accum {passes}",
            replace(work, batch_size=1, grad_accum=passes, micro_batch_size=None),
        )
    tokens = work.seq_len // 2
    while tokens >= _TOKENS_MIN:
        changed = replace(work, batch_size=1, grad_accum=work.grad_accum * rows, seq_len=tokens, micro_batch_size=None)
        batch = f"--batch-size 1 --grad-accum {changed.grad_accum} " if rows > 1 else ""
        yield f"{batch}--seq-len {tokens}", changed
        tokens //= 2
