"""`memascend bench`, `format` and `doctor`."""

from __future__ import annotations

import errno
import json
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from memascend import doctor as doctors
from memascend._memascend import format_device
from memascend.cli.console import quiet_libraries
from memascend.cli.errors import BAD_INPUT, FAILED, note, tell
from memascend.cli.tables import bench_tail, bench_text, gpu_text
from memascend.common.interrupts import Interrupts
from memascend.common.sizes import format_size
from memascend.errors import DataError, StoreError, first_line
from memascend.hardware import drives, gpu

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path


def bench(chosen: argparse.Namespace) -> int:
    """Measure drives and the GPU."""
    if not chosen.places and not chosen.gpu:
        tell("error: nothing to measure: name directories or devices, or give --gpu (see memascend bench --help)")
        return BAD_INPUT
    _check_places(chosen.places)
    measurements: list[dict[str, Any]] = []
    of_gpu: list[dict[str, Any]] = []
    file = None
    if chosen.gpu:
        measured = gpu.measure_gpu(seconds=chosen.seconds, progress=lambda what: tell(f"GPU: {what} ..."))
        of_gpu.append(measured)
        if not chosen.json:
            print(gpu_text(measured), flush=True)
        file = _remembered(chosen, partial(gpu.remember, measured))
    with Interrupts():  # SIGTERM too leaves nothing behind
        for location in chosen.places:
            measured = _measure_drive(chosen, location)
            measurements.append(measured)
            if not chosen.json:
                print(bench_text(measured), flush=True)
            file = _remembered(chosen, partial(drives.remember, [measured])) or file
    if chosen.json:
        print(json.dumps([*measurements, *of_gpu], indent=2))
    else:
        print(bench_tail(measurements, file))
    return 0


def _check_places(places: Sequence[Path]) -> None:
    """Raise, before any is measured, the error of one that cannot be; DataError for one that is named twice."""
    known: dict[str, Path] = {}
    for place in places:
        before = known.setdefault(os.path.realpath(place), place)
        if before is not place:
            raise DataError(f"{place} is {before}, which is named too: a drive is measured once")
        drives.check_place(place)


def _measure_drive(chosen: argparse.Namespace, location: Path) -> dict[str, Any]:
    try:
        return drives.measure(
            location,
            size=chosen.size,
            seconds=chosen.seconds,
            engine=chosen.engine,
            progress=lambda what: tell(f"{location}: {what} ..."),
        )
    except StoreError as error:
        if error.errno != errno.ENOSPC:
            raise
        wanted = format_size(chosen.size)
        raise StoreError(
            error.errno,
            f"{location} has no room for --size {wanted}: free some space, or give a smaller --size",
            location,
        ) from error


def _remembered(chosen: argparse.Namespace, remember: Callable[[], Path]) -> Path | None:
    """Return the file in which a measurement is remembered, or None where it is not."""
    if chosen.no_remember:
        return None
    try:
        return remember()
    except (OSError, RuntimeError) as error:
        note(f"the measurement cannot be remembered: {first_line(error)}")
        return None


def format(chosen: argparse.Namespace) -> int:
    """Prepare a raw device for stores."""
    uuid, data_bytes, destroyed = format_device(chosen.device, chosen.destroy)
    for content in destroyed:
        print(f"destroyed: {content}")
    print(f"formatted {chosen.device}: UUID={uuid}, {data_bytes / 1e9:.1f} GB for data")
    print(f"use it with --store {chosen.device}, or --store UUID={uuid}, which stays right when the name changes")
    return 0


def doctor(chosen: argparse.Namespace) -> int:
    """Say how well this machine is suited."""
    quiet_libraries()
    with Interrupts():  # SIGTERM too leaves nothing behind
        findings = doctors.check(chosen.store, measure=not chosen.no_measure, progress=tell)
    if chosen.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        print(doctors.as_text(findings, shutil.get_terminal_size((100, 24)).columns))
    return FAILED if doctors.has_problem(findings) else 0
