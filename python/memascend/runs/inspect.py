"""What stands in a store, without training: inspected, verified, its checkpoints changed, written in other formats."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import KeptStore
from memascend.common.outputs import put_in_place, workspace, writing
from memascend.common.progress import Progress
from memascend.common.sizes import format_size
from memascend.durable.record import parse_record
from memascend.runs.resume import resume

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def inspect(paths: Sequence[Path], tbw: float | None = None) -> dict[str, Any]:
    """Return what a store holds, as JSON can tell it; `tbw` are terabytes that a drive may be written in its life."""
    kept = KeptStore(list(paths))
    try:
        found = kept.report()
        # After a run in place that was killed there may be nothing but checkpoints.
        record = parse_record(kept.state, paths) if kept.state is not None else None
        found["notices"] = kept.notices
        found["checkpoints"] = [
            {"tag": tag, "generation": generation, "bytes": held, "steps": parse_record(state, paths)["steps"]}
            for tag, generation, held, state in kept.snapshots()
        ]
    finally:
        kept.close()
    if record is None:
        return found | {"steps": None, "model": None, "parameters": 0, "optimizers": []}
    found["steps"] = record["steps"]
    found["model"] = record["model"]["class"]
    found["parameters"] = sum(
        torch.Size(shape).numel()
        for unit in record["units"]
        for tensor in unit["tensors"]
        for _, shape, _, _ in tensor["parameters"]
    )
    found["optimizers"] = [optimizer["class"] for optimizer in record["optimizers"]]
    if tbw:
        for volume in found["volumes"]:
            volume["endurance_used"] = volume["life_bytes_written"] / (tbw * 1e12)
    return found


def as_text(found: dict[str, Any], tensors: bool) -> str:
    """Return what `inspect` found as a text."""
    lines = ["no durable step but the checkpoints"]
    if found["steps"] is not None:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["written"]))
        optimizers = ", ".join(found["optimizers"]) or "no optimizer yet"
        lines = [
            f"{found['model']}, {found['parameters'] / 1e6:,.1f}M parameters, {optimizers}",
            f"step {found['steps']}, generation {found['generation']}, durable since {written}",
        ]
    held = sum(tensor["bytes"] for tensor in found["tensors"])
    lines.append(f"{len(found['tensors'])} tensors of {format_size(held)}")
    for volume in found["volumes"]:
        free = "unknown" if volume["free_bytes"] is None else format_size(volume["free_bytes"])
        line = (
            f"{volume['path']}: {volume['share']:.0%} of the store, {format_size(volume['reserved_bytes'])} taken, "
            f"{free} free; written in the store's life: {volume['life_bytes_written'] / 1e12:.3f} TB"
        )
        if "endurance_used" in volume:
            line += f", {volume['endurance_used']:.2%} of the drive's rated endurance"
        lines.append(line)
    lines.append(checkpoints_text(found))
    lines += [f"note: {notice}" for notice in found["notices"]]
    if tensors:
        lines += [
            f"  {tensor['name']:<60} {format_size(tensor['bytes']):>12}  in {tensor['extents']} slots"
            for tensor in found["tensors"]
        ]
    return "\n".join(lines)


def checkpoints_text(found: dict[str, Any]) -> str:
    """Return the checkpoints that `inspect` found, a line for each."""
    if not found["checkpoints"]:
        return "no checkpoints"
    return "\n".join(
        f"checkpoint {kept['tag']}: step {kept['steps']}, {format_size(kept['bytes'])}" for kept in found["checkpoints"]
    )


def verify(paths: Sequence[Path]) -> tuple[int, list[str]]:
    """Read everything that a store holds; return how many bytes, and a line for each place that is damaged."""
    kept = KeptStore(list(paths))
    bar: Progress | None = None
    read_bytes = 0

    def progress(done: int, total: int) -> None:
        nonlocal bar, read_bytes
        bar = bar or Progress("verifying", total, unit="B")
        bar.update(done)
        read_bytes = done

    try:
        damaged = kept.verify(progress)
    finally:
        if bar is not None:
            bar.close()
        kept.close()
    lines = []
    for tensor, offset, length, places in damaged:
        where = " and ".join(f"{path} at {position}" for path, position in places)
        lines.append(f"damaged: {tensor}, bytes {offset} to {offset + length}: in {where}")
    return read_bytes, lines


def change_checkpoints(paths: Sequence[Path], *, delete: Sequence[str], restore: str | None) -> None:
    """Delete checkpoints of a store, or go back to one.

    Raises StoreError for one that there is not.
    """
    if not delete and restore is None:
        return
    kept = KeptStore(list(paths))
    try:
        tags = {tag for tag, _, _, _ in kept.snapshots()}
        missing = next((tag for tag in delete if tag not in tags), None)
        for tag in delete if missing is None else [missing]:
            kept.delete_snapshot(tag)
        if restore is not None:
            kept.restore_snapshot(restore)
    finally:
        kept.close()


def export(paths: Sequence[Path], out: Path, *, layout: str, dtype: str | None, host_memory: int | None) -> int:
    """Write what a store holds as `layout`: "huggingface", "torch" or "distributed"; return its step.

    The store is as before. `out` appears whole, or not at all.
    """
    import memascend

    with workspace(out) as work:
        # In place, since nothing is going to be updated.
        resumed = resume(list(paths), host_memory=host_memory, durability="none")
        state = memascend.offload_of(resumed.model)
        try:
            finished = work / "finished"
            with writing(out):
                if layout == "distributed":
                    optimizer = resumed.optimizer if resumed.optimizers else None
                    memascend.save_distributed(resumed.model, optimizer, finished)
                else:
                    memascend.save_pretrained(resumed.model, finished, dtype=dtype)
                if layout == "torch" and resumed.optimizers:
                    torch.save(resumed.optimizer.state_dict(), finished / "optimizer.pt")
                put_in_place(finished, out)
        finally:
            state.close(failed=True)  # nothing has changed, and all of it stays
    return resumed.steps
