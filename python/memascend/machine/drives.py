"""What drives can do: measured by `memascend bench`, remembered, and used to give each its share of a store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memascend._memascend import Volume, device_uuid
from memascend.errors import StoreError

Place = str | os.PathLike[str]

#: What one step reads of a hundred bytes that it moves.
STEP_READ_PERCENT = 55
#: Bytes and requests in flight of the large workloads, and requests of the small one.
LARGE, LARGE_DEPTH, SMALL, SMALL_DEPTH = 1 << 20, 32, 4096, 64
#: name: (reads of a hundred requests, random places, bytes of a request, requests in flight)
WORKLOADS = {
    "write": (0, False, LARGE, LARGE_DEPTH),
    "read": (100, False, LARGE, LARGE_DEPTH),
    "mix": (STEP_READ_PERCENT, False, LARGE, LARGE_DEPTH),
    "random_read": (100, True, SMALL, SMALL_DEPTH),
}
#: What a feature that occupies a processor has to bring to be used.
WORTH_A_PROCESSOR = 1.05
#: Options of the engine that are worth a try if there are processors enough, and what they are judged by.
POLLING = ("io_poll", "sq_poll")
PROCESSORS_TO_SPARE = 4
COMPARED = ("mix", "random_read")
RATE = "bytes_per_second"


def cache_directory() -> Path:
    """Where memascend keeps what it can make again: `$XDG_CACHE_HOME/memascend`, else `~/.cache/memascend`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memascend"


def remembered_in() -> Path:
    """Return the file in which measurements are remembered."""
    return cache_directory() / "drives.json"


def is_device(place: Place) -> bool:
    """Whether a store's place is a raw block device, by its path or as `UUID=...`."""
    if os.fspath(place).startswith("UUID="):
        return True
    try:
        return stat.S_ISBLK(os.stat(place).st_mode)
    except OSError:
        return False


def identity(place: Place) -> str | None:
    """What stays the same of a drive when its name changes, or None if nothing is there.

    `UUID=...` of a formatted device; the UUID of a directory's filesystem where udev knows it, else what is mounted
    there. A directory that does not exist yet lies where it would be made.
    """
    text = os.fspath(place)
    if text.startswith("UUID="):
        return f"UUID={text.removeprefix('UUID=').lower()}"
    try:
        if is_device(place):
            uuid = device_uuid(place)
            return None if uuid is None else f"UUID={uuid}"
        mounted = _mounted(Path(os.path.realpath(place)))
    except (OSError, StoreError):
        return None
    if mounted is None:
        return None
    kind, source = mounted
    return f"{kind} {_filesystem_uuid(source) or source}"


def _mounted(path: Path) -> tuple[str, str] | None:
    """Type and source of the filesystem that a path lies in: of the mounts above it the nearest, and of those the last.

    Device numbers would not do: Btrfs shows others to stat than in the list of mounts.
    """
    found, nearest = None, -1
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields, _, mounted = line.partition(" - ")
        where = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split()[4]))
        if path.is_relative_to(where) and len(where.parts) >= nearest:
            kind, source = mounted.split()[:2]
            found, nearest = (kind, source), len(where.parts)
    return found


def _filesystem_uuid(source: str) -> str | None:
    links = Path("/dev/disk/by-uuid")
    with contextlib.suppress(OSError):
        for link in links.iterdir():
            if link.resolve() == Path(source).resolve():
                return link.name
    return None


def measure(
    place: Place,
    *,
    size: int = 1 << 30,
    seconds: float = 2.0,
    engine: str = "auto",
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure a directory's drive, or a raw device formatted for memascend.

    A file of `size` bytes is written into a temporary directory there and removed; on a device its data area is used,
    which must not hold a kept store. Each workload runs for `seconds`.

    Returns:
        `place`, `identity`, `engine`, `features`, `direct_io`, `block_bytes`, `notices`; `workloads`: for each of
        `write`, `read`, `mix` (55 % reads), all 1 MiB with 32 in flight, and `random_read`, 4 KiB with 64 in flight:
        bytes_per_second, requests_per_second, latency_p50, latency_p99, latency_max (seconds), cpu_seconds_per_gib;
        `polling`: of the options that the drive and the kernel have, the mix and random reads with each, relative
        to without; `worth_it`: those of them that bring 5 % or more of the mix.

    Raises:
        StoreError: the place cannot be used, or a transfer failed.
    """
    with _place_to_write(place) as path:
        with _opened(path, engine) as volume:
            progress(f"writing {size / 1e9:.1f} GB")
            volume.reserve(size)
            _fill(volume, size)
            workloads = {}
            for name in WORKLOADS:
                progress(name.replace("_", " "))
                workloads[name] = _run(volume, name, size, seconds)
            found = volume.stats()
        polling = {}
        for option in _polling_options() if found["engine"] == "ring" else ():
            progress(f"with {option}")
            polled = _compared(path, size, seconds, option)
            if polled is None:
                continue
            progress("without, once more")
            again = _compared(path, size, seconds)
            assert again is not None
            # Against the better of both: drives have their moments.
            polling[option] = {
                name: polled[name][RATE] / max(workloads[name][RATE], again[name][RATE]) for name in COMPARED
            }
    kept = ("engine", "features", "direct_io", "block_bytes", "part_bytes", "notices")
    return {
        "place": os.fspath(place),
        "identity": identity(place),
        **{name: found[name] for name in kept},
        "size": size,
        "workloads": workloads,
        "polling": polling,
        "worth_it": [option for option, gain in polling.items() if gain["mix"] >= WORTH_A_PROCESSOR],
    }


@contextlib.contextmanager
def _place_to_write(place: Place) -> Iterator[Place]:
    if is_device(place):
        yield place
        return
    if not os.path.isdir(place):
        raise StoreError(2, f"{os.fspath(place)} is neither a directory nor a block device", place)
    try:
        folder = tempfile.mkdtemp(prefix=".memascend-bench-", dir=place)
    except OSError as error:
        message = f"cannot write in {os.fspath(place)}: {error.strerror}"
        raise StoreError(error.errno, message, place) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: Place, engine: str, **options: bool) -> Iterator[Volume]:
    volume = Volume(path, buffer_bytes=LARGE, buffer_count=max(LARGE_DEPTH, SMALL_DEPTH), engine=engine, **options)
    try:
        yield volume
    finally:
        volume.close()


def _compared(path: Place, size: int, seconds: float, *options: str) -> dict[str, dict[str, float]] | None:
    """Run the workloads that options are judged by, with these; None where one of them is not to be had."""
    with _opened(path, "ring", **dict.fromkeys(options, True)) as volume:
        if not set(options) <= set(volume.stats()["features"]):
            return None
        volume.reserve(size)
        _fill(volume, size)
        return {name: _run(volume, name, size, seconds) for name in COMPARED}


def _fill(volume: Volume, size: int) -> None:
    """Write all of it once: what was never written is not read from the drive."""
    batch = 16
    leases = [volume.lease(LARGE) for _ in range(2 * batch)]
    running: list[Any] = []
    for index, offset in enumerate(range(0, size - LARGE + 1, LARGE)):
        if len(running) == len(leases):
            running.pop(0).wait()
        running.append(volume.start("write", [offset], leases[index % len(leases)], LARGE))
    for transfers in running:
        transfers.wait()
    volume.flush()


def _run(volume: Volume, name: str, size: int, seconds: float) -> dict[str, float]:
    percent, random, request_bytes, depth = WORKLOADS[name]
    before = _cpu_seconds()
    measured = volume.measure(
        read_percent=percent, random=random, request_bytes=request_bytes, depth=depth, span_bytes=size, seconds=seconds
    )
    moved = measured["bytes_read"] + measured["bytes_written"]
    return {
        "bytes_per_second": moved / measured["seconds"],
        "requests_per_second": measured["requests"] / measured["seconds"],
        "latency_p50": measured["latency_p50"],
        "latency_p99": measured["latency_p99"],
        "latency_max": measured["latency_max"],
        "cpu_seconds_per_gib": (_cpu_seconds() - before) / (moved / 2**30),
    }


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _polling_options() -> tuple[str, ...]:
    """Options of the engine that are worth a try: each keeps a processor busy."""
    return POLLING if len(os.sched_getaffinity(0)) >= PROCESSORS_TO_SPARE else ()


def _load() -> dict[str, Any]:
    try:
        found = json.loads(remembered_in().read_text())
    except (OSError, ValueError, RuntimeError):  # the last: nobody's home
        return {}
    return found if isinstance(found, dict) else {}


def remember(measurements: Sequence[dict[str, Any]]) -> Path:
    """Keep measurements for the stores to come, and return the file they are kept in."""
    path = remembered_in()
    found = _load()
    for measured in measurements:
        if measured["identity"] is not None:
            found[measured["identity"]] = {**measured, "measured": now()}
    return save(path, found)


def now() -> str:
    """Return the time as measurements tell it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def save(path: Path, found: dict[str, Any]) -> Path:
    """Write a file of measurements in one go, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        json.dump(found, file, indent=1)
    os.replace(unfinished, path)
    return path


def rate_of(measured: dict[str, Any]) -> float:
    """Bytes per second of the mix that a training step makes."""
    return float(measured["workloads"]["mix"]["bytes_per_second"])


def measured_rates(places: Sequence[Place] = ()) -> dict[str, float] | None:
    """Return bytes per second of a step's mix by place, or None where one of `places` was not measured.

    Without places it is the drive that was measured, if it is the only one.
    """
    found = _load()
    try:
        if not places:
            (only,) = found.values()
            return {only["place"]: rate_of(only)}
        # Places on one drive share what it can do.
        names = {identity(place): os.fspath(place) for place in places}
        return {place: rate_of(found[name]) for name, place in names.items()}
    except (KeyError, TypeError, ValueError):
        return None


def store_options(places: Sequence[Place]) -> tuple[dict[str, Any], str | None]:
    """Return options of the native store that follow from what was measured, and what to tell the user, if anything."""
    identities = [identity(place) for place in places]
    found = _load()
    try:
        known = [found[name] for name in identities if name is not None]
        rates = [rate_of(measured) for measured in known]
        options = {name: True for name in POLLING if known and all(name in one["worth_it"] for one in known)}
    except (KeyError, TypeError, ValueError):
        known, rates, options = [], [], {}
    different = len(set(identities)) > 1
    if len(known) == len(places):
        if different:
            return {**options, "rates": rates}, None
        return options, None
    if different:
        names = " ".join(os.fspath(place) for place in places)
        return {}, f"the drives take equal shares of the store; `memascend bench {names}` measures what each can take"
    return {}, None
