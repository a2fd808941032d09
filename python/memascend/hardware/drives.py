"""The rates of drives: measured by `memascend bench`, remembered, and used to give each drive its share of a store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memascend._memascend import Volume, device_uuid
from memascend.common.outputs import clear_away, hidden_directory
from memascend.errors import StoreError, system_line
from memascend.hardware.processors import processors

#: A directory or a raw block device that a store lies on, by its path or as `UUID=...`.
Location = str | os.PathLike[str]

#: Filesystems that hold their files in memory.
IN_MEMORY = ("tmpfs", "ramfs")
#: In the names of directories that are measured in.
SCRATCH = "memascend-bench"
#: Bytes that a step reads, of a hundred that it moves.
STEP_READ_PERCENT = 55
#: Bytes and requests in flight of the large workloads, and requests of the small one.
LARGE, LARGE_DEPTH, SMALL, SMALL_DEPTH = 1 << 20, 32, 4096, 64
#: Name: (reads of a hundred requests, whether offsets are random, bytes of a request, requests in
#: flight)
WORKLOADS = {
    "write": (0, False, LARGE, LARGE_DEPTH),
    "read": (100, False, LARGE, LARGE_DEPTH),
    "mix": (STEP_READ_PERCENT, False, LARGE, LARGE_DEPTH),
    "random_read": (100, True, SMALL, SMALL_DEPTH),
}
#: The gain that an option must bring to be used, since it occupies a processor.
WORTH_A_PROCESSOR = 1.05
#: Options of the engine that are tried where there are enough processors, and the workloads they
#: are judged by.
POLLING = ("io_poll", "sq_poll")
PROCESSORS_TO_SPARE = 4
COMPARED = ("mix", "random_read")
RATE = "bytes_per_second"


def cache_directory() -> Path:
    """Return the directory of files that can be made again: `$XDG_CACHE_HOME/memascend`, else `~/.cache/memascend`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memascend"


def remembered_in() -> Path:
    """Return the file in which measurements are remembered."""
    return cache_directory() / "drives.json"


def is_device(location: Location) -> bool:
    """Return whether a location is a raw block device, by its path or as `UUID=...`.

    Other files cannot lie beside a store there.
    """
    if os.fspath(location).startswith("UUID="):
        return True
    try:
        return stat.S_ISBLK(os.stat(location).st_mode)
    except OSError:
        return False


def keeps_manifest_before(location: Location) -> bool:
    """Return whether a volume has the manifest before the newest, too, to which a rank may have to go back."""
    return not is_device(location)


def identity(location: Location) -> str | None:
    """Return a name of the drive that survives a new device name, or None if nothing is there.

    The name is `UUID=...` of a formatted device; the UUID of a directory's filesystem where udev knows it, else the
    source of the mount. A directory that does not exist yet counts to the filesystem in which it would be made.
    """
    text = os.fspath(location)
    if text.startswith("UUID="):
        return f"UUID={text.removeprefix('UUID=').lower()}"
    try:
        if is_device(location):
            uuid = device_uuid(location)
            return None if uuid is None else f"UUID={uuid}"
        filesystem = mounted(Path(os.path.realpath(location)))
    except (OSError, StoreError):
        return None
    if filesystem is None:
        return None
    kind, source = filesystem
    return f"{kind} {_filesystem_uuid(source) or source}"


def mounted(path: Path) -> tuple[str, str] | None:
    """Return type and source of a path's filesystem: of the last mount on the nearest mount point above it.

    Device numbers do not identify it: Btrfs shows other numbers to stat than in the list of mounts.
    """
    filesystem, nearest = None, -1
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields, _, about = line.partition(" - ")
        mount_point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split()[4]))
        if path.is_relative_to(mount_point) and len(mount_point.parts) >= nearest:
            kind, source = about.split()[:2]
            filesystem, nearest = (kind, source), len(mount_point.parts)
    return filesystem


def notices_of(locations: Sequence[Location]) -> list[str]:
    """Return a notice for each location of a store that is in memory and not on a drive."""
    notices = []
    for location in locations:
        with contextlib.suppress(OSError):
            filesystem = None if is_device(location) else mounted(Path(os.path.realpath(location)))
            if filesystem is not None and filesystem[0] in IN_MEMORY:
                notices.append(
                    f"{os.fspath(location)} is on {filesystem[0]}, which is memory: the store takes memory that no "
                    "budget counts, and is gone when the machine restarts; put it on an SSD"
                )
    return notices


def _filesystem_uuid(source: str) -> str | None:
    links = Path("/dev/disk/by-uuid")
    with contextlib.suppress(OSError):
        for link in links.iterdir():
            if link.resolve() == Path(source).resolve():
                return link.name
    return None


def measure(
    location: Location,
    *,
    size: int = 1 << 30,
    seconds: float = 2.0,
    engine: str = "auto",
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure a directory's drive, or a raw device formatted for memascend.

    In a directory, a temporary file of `size` bytes is written and removed; on a device the data area is used, which
    must not hold a kept store. Each workload runs for `seconds`.

    Returns:
        `place`, `identity`, `engine`, `features`, `direct_io`, `block_bytes`, `notices`; `workloads`: for each of
        `write`, `read`, `mix` (55 % reads), all 1 MiB with 32 in flight, and `random_read`, 4 KiB with 64 in flight:
        bytes_per_second, requests_per_second, latency_p50, latency_p99, latency_max (seconds), cpu_seconds_per_gib;
        `polling`: for each polling option that the drive and the kernel have, the rates of the mix and of random reads
        with the option relative to those without; `worth_it`: the options that speed the mix up by 5 % or more.

    Raises:
        StoreError: the location cannot be used, or a transfer failed.
    """
    with scratch(location) as path:
        with _opened(path, engine) as volume:
            progress(f"writing {size / 1e9:.1f} GB")
            volume.reserve(size)
            _fill(volume, size)
            workloads = {}
            for name in WORKLOADS:
                progress(name.replace("_", " "))
                workloads[name] = _run(volume, name, size, seconds)
            stats = volume.stats()
        polling = _polling_gains(path, size, seconds, workloads, progress) if stats["engine"] == "ring" else {}
    copied = ("engine", "features", "direct_io", "block_bytes", "part_bytes", "notices")
    return {
        "place": os.fspath(location),
        "identity": identity(location),
        **{name: stats[name] for name in copied},
        "size": size,
        "workloads": workloads,
        "polling": polling,
        "worth_it": [option for option, gain in polling.items() if gain["mix"] >= WORTH_A_PROCESSOR],
    }


def _polling_gains(
    path: Location,
    size: int,
    seconds: float,
    workloads: dict[str, dict[str, float]],
    progress: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Return the rates with each polling option that is available, relative to those without."""
    gains = {}
    for option in _polling_options():
        progress(f"with {option}")
        polled = _compared(path, size, seconds, option)
        if polled is None:
            continue
        progress("without, once more")
        again = _compared(path, size, seconds)
        assert again is not None
        # Against the better of two runs without: the rates of a drive vary.
        gains[option] = {name: polled[name][RATE] / max(workloads[name][RATE], again[name][RATE]) for name in COMPARED}
    return gains


def check_place(location: Location) -> None:
    """Raise StoreError for what is neither a device nor a directory."""
    if not is_device(location) and not os.path.isdir(location):
        remedy = "give a directory" if os.path.lexists(location) else "make the directory"
        raise StoreError(2, f"{os.fspath(location)} is neither a directory nor a block device: {remedy}", location)


@contextlib.contextmanager
def scratch(location: Location) -> Iterator[Location]:
    """Give a device as it is, or a temporary directory in a directory, where none of a killed process stays."""
    check_place(location)
    if is_device(location):
        yield location
        return
    clear_away(Path(location))
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(hidden_directory(Path(location), SCRATCH))
        except OSError as error:
            message = f"cannot write in {system_line(error, location)}"
            raise StoreError(error.errno, message, location) from error
        yield folder


@contextlib.contextmanager
def _opened(path: Location, engine: str, **options: bool) -> Iterator[Volume]:
    volume = Volume(path, buffer_bytes=LARGE, buffer_count=max(LARGE_DEPTH, SMALL_DEPTH), engine=engine, **options)
    try:
        yield volume
    finally:
        volume.close()


def _compared(path: Location, size: int, seconds: float, *options: str) -> dict[str, dict[str, float]] | None:
    """Run the workloads that options are judged by, with `options`; None where one of these is not available."""
    with _opened(path, "ring", **dict.fromkeys(options, True)) as volume:
        if not set(options) <= set(volume.stats()["features"]):
            return None
        volume.reserve(size)
        _fill(volume, size)
        return {name: _run(volume, name, size, seconds) for name in COMPARED}


def _fill(volume: Volume, size: int) -> None:
    """Write every byte once: reads of unwritten ranges would not reach the drive."""
    leases = [lease for _ in range(LARGE_DEPTH) if (lease := volume.lease(LARGE)) is not None]
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
    """Return the options of the engine that are worth a try: each keeps a processor busy."""
    return POLLING if processors().threads >= PROCESSORS_TO_SPARE else ()


def _load() -> dict[str, Any]:
    try:
        measurements = json.loads(remembered_in().read_text())
    except (OSError, ValueError, RuntimeError):  # the last: the user has no home directory
        return {}
    return measurements if isinstance(measurements, dict) else {}


def remember(measurements: Sequence[dict[str, Any]]) -> Path:
    """Remember measurements for later stores, and return the file that holds them."""
    remembered = _load()
    for measured in measurements:
        if measured["identity"] is not None:
            remembered[measured["identity"]] = {**measured, "measured": now()}
    return save(remembered_in(), remembered)


def now() -> str:
    """Return the local time, as measurements record it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def save(path: Path, measurements: dict[str, Any]) -> Path:
    """Write a file of measurements in one go, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        json.dump(measurements, file, indent=1)
    os.replace(unfinished, path)
    return path


def rate_of(measured: dict[str, Any]) -> float:
    """Return the bytes per second of the mix that a training step makes."""
    return float(measured["workloads"]["mix"]["bytes_per_second"])


def measured_rates(locations: Sequence[Location] = ()) -> dict[str, float] | None:
    """Return bytes per second of a step's mix by location, or None where one of `locations` was not measured.

    Without locations it is the rate of the drive that was measured, if there is only one.
    """
    remembered = _load()
    try:
        if not locations:
            (measured,) = remembered.values()
            return {measured["place"]: rate_of(measured)}
        # Locations on one drive share its rate.
        names = {identity(location): os.fspath(location) for location in locations}
        return {location: rate_of(remembered[name or ""]) for name, location in names.items()}
    except (KeyError, TypeError, ValueError):
        return None


def store_options(locations: Sequence[Location]) -> tuple[dict[str, Any], str | None]:
    """Return the options of the native store that follow from measurements, and a note for the user, if any."""
    identities = [identity(location) for location in locations]
    remembered = _load()
    try:
        measurements = [remembered[name] for name in identities if name is not None]
        rates = [rate_of(measured) for measured in measurements]
        worth = [measured["worth_it"] for measured in measurements]
        options: dict[str, Any] = {name: True for name in POLLING if worth and all(name in names for names in worth)}
    except (KeyError, TypeError, ValueError):
        measurements, rates, options = [], [], {}
    several_drives = len(set(identities)) > 1
    if len(measurements) == len(locations):
        return (options | {"rates": rates} if several_drives else options), None
    if several_drives:
        names = " ".join(os.fspath(location) for location in locations)
        return {}, f"the drives take equal shares of the store; `memascend bench {names}` measures what each can take"
    return {}, None


def busiest_share(locations: Sequence[Location]) -> float:
    """Return the part (of 1) of a store's bytes that lies on the one of these drives that has the most.

    Shares are as in a new store: by the measured rates, else equal. Locations on one drive add up.
    """
    names = [identity(location) or os.fspath(location) for location in locations]
    rates = store_options(locations)[0].get("rates", [1.0] * len(names))
    shares: dict[str, float] = {}
    for name, rate in zip(names, rates, strict=True):
        shares[name] = shares.get(name, 0.0) + rate
    return max(shares.values()) / sum(shares.values()) if shares else 1.0
