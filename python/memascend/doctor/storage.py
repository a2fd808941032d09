"""The drives of a store: filesystem, room, direct I/O, wear and speed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend._memascend import Volume
from memascend.common.sizes import format_size
from memascend.doctor.findings import Finding, note, ok, problem
from memascend.errors import MemascendError, StoreError, first_line
from memascend.hardware import drives

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Filesystems on which a store is slow or misleading, and why.
PITFALLS = {
    **dict.fromkeys(drives.IN_MEMORY, "it is memory: a store there takes memory that no budget counts"),
    "overlay": "the layers of a container: slower, and gone with the container",
    "btrfs": "stores are made without copy-on-write, so that its checksums do not cover them",
    "zfs": "it caches and compresses data in memory that no budget counts",
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse.sshfs", "fuse.rclone", "ceph", "drvfs"),
        "a network filesystem: the network limits every step, and a flush may not reach the drive",
    ),
}
#: Bytes and seconds of a measurement: ten seconds for each drive.
MEASURED_BYTES, MEASURED_SECONDS = 1 << 30, 1.5
#: Wear of the drive's rated writes, and degrees Celsius, from which a line is a note.
WORN_PERCENT, HOT_CELSIUS = 80, 70
#: A model of a billion parameters with durable steps takes 26 GB.
SMALL_BYTES = 26 * 10**9


def storage(location: drives.Location, measure: bool = True) -> Iterator[Finding]:
    """Yield the findings on a directory or a raw device, which is written to and left as it was."""
    name = os.fspath(location)
    try:
        if not drives.is_device(location):
            yield from _filesystem(name)
        try:
            yield from _direct(location)
        except StoreError as error:
            if error.errno not in (errno.EEXIST, errno.EBUSY):
                raise
            measure = False
            yield _of_a_run(name, is_running=error.errno == errno.EBUSY)
        yield from _health(location)
        if measure:
            yield _speed(location)
    except (MemascendError, OSError) as error:
        yield problem(
            name, first_line(error), "Give a directory with write permission, or a device formatted by memascend"
        )


def _of_a_run(name: str, is_running: bool) -> Finding:
    """Return the line on a device with a store of ours, which is not written to."""
    if is_running:
        return note(
            name, "a run is using it: nothing was tried on it", "Look at the run: memascend report --refresh 30"
        )
    return note(
        name,
        "holds the store of an earlier run: it was left as it is, and nothing was tried on it",
        f"`memascend inspect {name}` shows the run, and `memascend finetune ... --resume` goes on with it; "
        f"`memascend format {name}` deletes it",
    )


def _filesystem(name: str) -> Iterator[Finding]:
    usage = shutil.disk_usage(name)
    kind, source = drives.mounted(Path(os.path.realpath(name))) or ("?", "?")
    text = f"{kind} on {source}, {format_size(usage.free)} of {format_size(usage.total)} free"
    if kind in PITFALLS:
        yield note(name, f"{text}; {PITFALLS[kind]}", "ext4 or XFS on an SSD, or a raw device, has none of that")
    elif usage.free < SMALL_BYTES:
        yield note(name, text, "Durable training takes 26 bytes of space for each parameter (memascend plan shows it)")
    else:
        yield ok(name, text)


def _direct(location: drives.Location) -> Iterator[Finding]:
    name = os.fspath(location)
    with drives.scratch(location) as path:
        volume = Volume(path, buffer_bytes=1 << 20, buffer_count=2)
        try:
            stats = volume.stats()
        finally:
            volume.close()
    engine = f"{stats['engine']} ({', '.join(stats['features'])})" if stats["features"] else stats["engine"]
    if stats["direct_io"]:
        yield ok(name, f"direct I/O in blocks of {stats['block_bytes']} bytes; engine {engine}")
    else:
        yield note(
            name,
            f"no direct I/O, engine {engine}: the page cache copies everything that is moved",
            "Use a filesystem that has O_DIRECT, such as ext4 or XFS",
        )
    for notice in stats["notices"]:
        yield note(name, notice, "See docs/how-to/drives.md")


def _health(location: drives.Location) -> Iterator[Finding]:
    name, disk = os.fspath(location), disk_of(location)
    if disk is None:
        return
    about = Path("/sys/block") / disk
    model = _read(about / "device" / "model") or disk
    if _read(about / "queue" / "rotational") == "1" and not disk.startswith(("loop", "vd", "dm-", "md")):
        yield note(name, f"{model} is a hard disk", "Put the store on an SSD: a step moves 30 bytes a parameter")
    health = smart(disk)
    worn, celsius = health.get("percentage_used"), health.get("temperature")
    if worn is None and celsius is None:
        yield ok(name, f"{model}; wear and temperature are not readable (smartctl, as root, tells them)")
        return
    text = f"{model}, {worn}% of its rated writes used, {celsius} degrees Celsius"
    if (worn or 0) >= WORN_PERCENT:
        yield note(name, text, 'Move fewer bytes: states="8bit", durability="every:16", or another drive')
    elif (celsius or 0) >= HOT_CELSIUS:
        yield note(name, text, "Cool it: hot drives throttle themselves")
    else:
        yield ok(name, text)


def disk_of(location: drives.Location) -> str | None:
    """Return the name in /sys/block of the disk that a directory or device lies on, or None."""
    try:
        status = os.stat(location)
    except OSError:
        return None
    device = status.st_rdev if drives.is_device(location) else status.st_dev
    try:
        found = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:
        return None  # No block device: Btrfs and network filesystems have numbers of their own.
    if (found / "partition").exists():
        found = found.parent
    return found.name


def smart(disk: str) -> dict[str, Any]:
    """Return `percentage_used` and `temperature` of a disk, as far as they can be read."""
    command = shutil.which("smartctl")
    if command is None:
        return {}
    try:
        run = subprocess.run(
            [command, "--json", "--all", f"/dev/{disk}"], capture_output=True, text=True, timeout=10, check=False
        )
        told = json.loads(run.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    log = told.get("nvme_smart_health_information_log", {})
    celsius = told.get("temperature", {}).get("current", log.get("temperature"))
    return {"percentage_used": log.get("percentage_used"), "temperature": celsius}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _speed(location: drives.Location) -> Finding:
    measured = drives.measure(location, size=MEASURED_BYTES, seconds=MEASURED_SECONDS)
    rates = {name: measured["workloads"][name]["bytes_per_second"] / 1e9 for name in ("write", "read", "mix")}
    seconds = 30 / rates["mix"]
    return ok(
        os.fspath(location),
        f"writes {rates['write']:.2f}, reads {rates['read']:.2f}, both by turns {rates['mix']:.2f} GB/s: a step of a "
        f"billion parameters at the least budget moves 30 GB in {seconds:.0f} s",
    )
