"""Working on a store without training: inspect it, verify it, change its checkpoints."""

from __future__ import annotations

import errno
import math
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend._memascend import ClosedStore
from memascend.common.progress import Progress
from memascend.common.sizes import format_decimal, format_size
from memascend.durability.outline import parse_outline, what_it_has
from memascend.errors import StoreError
from memascend.hardware.drives import notices_of
from memascend.recovery.running_store import live_report, process_using, report_without_volume

if TYPE_CHECKING:
    from collections.abc import Sequence


def inspect(paths: Sequence[Path], tbw: float | None = None) -> dict[str, Any]:
    """Return the contents of a store, as values that JSON can hold.

    Of a run that is going on it is the last durable step, and a notice says so. `missing` is the error of opening a
    store whose other volume is gone, where the report is from the manifest that is left; else it is None.
    `step_bytes` counts its weights,
    states and buffers by kind, which a step writes where nothing stays in memory; gradients and activations that pass
    through the store are counted in the life of the volumes alone. `recipe` is the argument of `forecast.of_store`.

    Args:
        paths: the volumes of the store, at least one.
        tbw: terabytes that each drive is rated to be written in its life; adds `endurance_used` to each volume.

    Raises StoreError for a store that cannot be opened, CheckpointError for one whose record cannot be read.
    """
    missing: str | None = None
    try:
        with closing(ClosedStore(list(paths))) as store:
            report = store.report() | {"state": store.state, "snapshots": store.snapshots()}
            notices = store.notices
    except StoreError as error:
        process = _user_of_store(error)
        found = report_without_volume(paths) if process is None else None
        if process is not None:
            report, notices = live_report(paths, process)
        elif found is not None:
            report, notices = found
            missing = str(error)
        else:
            raise
    state, snapshots = report.pop("state"), report.pop("snapshots")
    # A run that updated in place and was killed leaves nothing but checkpoints.
    record = parse_outline(state, paths) if state is not None else None
    report["missing"] = missing
    there = [volume["path"] for volume in report["volumes"] if volume["free_bytes"] is not None or missing is None]
    report["notices"] = notices + notices_of(there)
    report["checkpoints"] = [
        {"tag": tag, "generation": generation, "bytes": nbytes, "steps": parse_outline(text, paths)["steps"]}
        for tag, generation, nbytes, text in snapshots
    ]
    if record is None:
        report |= {"steps": None, "model": None, "parameters": 0, "optimizers": [], "step_bytes": {}, "recipe": None}
        return report
    report["steps"] = record["steps"]
    report["model"] = record["model"]["class"]
    report["parameters"] = sum(
        math.prod(shape)
        for unit in record["units"]
        for tensor in unit["tensors"]
        for _, shape, _, _ in tensor["parameters"]
    )
    report["optimizers"] = [optimizer["class"] for optimizer in record["optimizers"]]
    report["step_bytes"] = _step_bytes(record, report["tensors"])
    report["recipe"] = _recipe(record)
    if tbw:
        for volume in report["volumes"]:
            volume["endurance_used"] = volume["life_bytes_written"] / (tbw * 1e12)
    return report


def last_record(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the outline of the last durable step's record in a store, also of one that a run is using.

    Raises StoreError where there is none.
    """
    try:
        with closing(ClosedStore(list(paths))) as store:
            state = store.state
    except StoreError as error:
        process = _user_of_store(error)
        if process is None:
            raise
        state = live_report(paths, process)[0]["state"]
    return parse_outline(state, paths)


def _step_bytes(record: dict[str, Any], tensors: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the bytes of a generation by kind: weights, planes by their names, moments, buffers."""
    kinds: dict[str, str] = {}
    for tensor in (tensor for unit in record["units"] for tensor in unit["tensors"]):
        kinds |= {tensor["name"]: "weights" if tensor["trained"] or tensor["states"] else "frozen"}
        kinds |= {name: plane for name, plane, _ in tensor["states"]}
        kinds |= {name: "moments" for _, name, _ in tensor["moments"]}
    found: dict[str, int] = {}
    for tensor in tensors:
        beside = "added parameters" if tensor["name"].startswith(".added") else "buffers"
        kind = kinds.get(tensor["name"], beside)
        if kind != "frozen":  # No step writes it.
            found[kind] = found.get(kind, 0) + tensor["bytes"]
    return found


def _recipe(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the inputs of a forecast of the run, or None for a model that is not transformers' or has no optimizer.

    Sizes of a step are known of a run of the command line; a loop of the user's own does not record them.
    """
    config = record["model"].get("config")
    if config is None or len(record["optimizers"]) != 1:
        return None
    (optimizer,) = record["optimizers"]
    settings = record["tracked"].get("progress", {}).get("settings", {})
    dtypes = [tensor["dtype"] for unit in record["units"] for tensor in unit["tensors"]]
    return {
        "config": config | {"architectures": [record["model"]["class"]]},
        "dtype": max(set(dtypes), key=dtypes.count),
        "optimizer": optimizer["class"],
        "states": optimizer["defaults"].get("states", "float32"),
        "master": optimizer["defaults"].get("master", True),
        "gradients": record["gradients"],
        "step": {name: settings[name] for name in ("seq_len", "batch_size", "grad_accum") if name in settings},
    }


def _user_of_store(error: StoreError) -> str | None:
    """Return the number of the process that uses the store, if `error` names one."""
    return process_using(Path(error.filename)) if error.errno == errno.EBUSY and error.filename else None


def _idle_store(paths: Sequence[Path]) -> ClosedStore:
    """Open a store.

    Raises StoreError for one that cannot be opened, with the remedy where a run is going on.
    """
    try:
        return ClosedStore(list(paths))
    except StoreError as error:
        process = _user_of_store(error)
        if process is None:
            raise
        raise StoreError(
            error.errno,
            f"{error.filename}: a run is going on (process {process}), which writes over what is not in use any more: "
            "wait for its end; until then `memascend inspect` shows its last durable step",
            error.filename,
        ) from None


def as_text(report: dict[str, Any], tensors: bool) -> str:
    """Return the report of `inspect` as text, with a line for each tensor if `tensors`."""
    lines = ["no durable step but the checkpoints"]
    if report["steps"] is not None:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["written"]))
        optimizers = ", ".join(report["optimizers"]) or "no optimizer yet"
        lines = [
            f"{report['model']}, {report['parameters'] / 1e6:,.1f}M parameters, {optimizers}",
            f"step {report['steps']}, generation {report['generation']}, durable since {written}",
        ]
    total_bytes = sum(tensor["bytes"] for tensor in report["tensors"])
    lines.append(f"{len(report['tensors'])} tensors of {format_size(total_bytes)}")
    for volume in report["volumes"]:
        free = "unknown" if volume["free_bytes"] is None else format_size(volume["free_bytes"])
        there = f"{format_size(volume['reserved_bytes'])} taken, {free} free"
        if report["missing"] is not None and not volume["reserved_bytes"]:
            there = "not there"
        line = (
            f"{volume['path']}: {volume['share']:.0%} of the store, {there}; "
            f"written in the store's life: {volume['life_bytes_written'] / 1e12:.3f} TB"
        )
        if "endurance_used" in volume:
            line += f", {volume['endurance_used']:.2%} of the drive's rated endurance"
        lines.append(line)
    if report["step_bytes"]:
        kinds = ", ".join(f"{kind} {format_decimal(nbytes)}" for kind, nbytes in report["step_bytes"].items())
        total = format_decimal(sum(report["step_bytes"].values()))
        lines.append(f"a step writes {total} where nothing stays in memory: {kinds}; and gradients that find no room")
    lines.append(checkpoints_text(report))
    lines += [f"note: {notice}" for notice in report["notices"]]
    if tensors:
        lines += [
            f"  {tensor['name']:<60} {format_size(tensor['bytes']):>12}  in {tensor['extents']} slots"
            for tensor in report["tensors"]
        ]
    return "\n".join(lines)


def checkpoints_text(report: dict[str, Any]) -> str:
    """Return the checkpoints in the report of `inspect`, a line for each."""
    if not report["checkpoints"]:
        return "no checkpoints"
    return "\n".join(
        f"checkpoint {checkpoint['tag']}: step {checkpoint['steps']}, {format_size(checkpoint['bytes'])}"
        for checkpoint in report["checkpoints"]
    )


def verify(paths: Sequence[Path]) -> tuple[int, list[str]]:
    """Read everything that a store holds; return the bytes read, and a line for each damaged range or manifest.

    A damaged manifest is written anew if the store is whole by another one.
    """
    bar: Progress | None = None
    read_bytes = 0

    def progress(done: int, total: int) -> None:
        nonlocal bar, read_bytes
        bar = bar or Progress("verifying", total, unit="B")
        bar.update(done)
        read_bytes = done

    with closing(_idle_store(paths)) as store:
        try:
            damaged = store.verify(progress)
        finally:
            if bar is not None:
                bar.close()
        lines = _mended(store, paths, is_whole=not damaged)
    for tensor, offset, length, copies in damaged:
        where = " and ".join(f"{path} at {position}" for path, position in copies)
        lines.append(f"damaged: {tensor}, bytes {offset} to {offset + length}: in {where}")
    return read_bytes, lines


def _mended(store: ClosedStore, paths: Sequence[Path], is_whole: bool) -> list[str]:
    """Write damaged manifests of a store anew if its contents are `is_whole`, and return a line for each."""
    if not store.damaged_manifests:
        return []
    taken = f"of another volume was taken, which has {what_it_has(store, paths)}"
    if store.is_older:
        taken = f"before it was taken, which has {what_it_has(store, paths)}: the last commit is lost"
    end = "it stays as it is, since other damage was found"
    if is_whole:
        try:
            store.mend_manifests()
            end = "it is written anew"
        except StoreError as error:
            end = f"it could not be written anew: {error}"
    return [f"damaged: the manifest {file}: the one {taken}; {end}" for file in store.damaged_manifests]


def change_checkpoints(paths: Sequence[Path], *, delete: Sequence[str], restore: str | None) -> None:
    """Go back to the checkpoint `restore` of a store, then delete the checkpoints `delete`.

    Raises StoreError for a checkpoint that the store does not have. If any is missing, nothing has changed.
    """
    if not delete and restore is None:
        return
    with closing(_idle_store(paths)) as store:
        tags = {tag for tag, _, _, _ in store.snapshots()}
        missing = next((tag for tag in delete if tag not in tags), None)
        if missing is not None:
            store.delete_snapshot(missing)  # Raises, naming the tag.
        if restore is not None:
            store.restore_snapshot(restore)
        for tag in delete:
            store.delete_snapshot(tag)
