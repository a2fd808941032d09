"""A store on two volumes beside the same on one: the part `volumes` of io.py."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from _common import markdown
from _io_common import GIB, MIB, Missing, alternate, check_stamp, child, median, ratio, stamp

TWICE_MIN, SUM_MIN = 1.9, 0.95
DEVICE_BYTES = GIB
#: Bytes per second of a direction, on average of both. Far below the rate of a loop device in memory, or the throttle
#: is not the limit.
THROTTLES = {"equal": (400 * 10**6, 400 * 10**6), "3:1": (600 * 10**6, 200 * 10**6)}
TENSOR_BYTES = [mib * MIB for mib in range(8, 65, 8)]
TENSOR_COUNT, IN_FLIGHT, WARM_UP_SECONDS = 16, 8, 1.5
MIX = {"read_percent": 55, "random": False, "request_bytes": MIB, "depth": 32}


def throttles_directory() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        if kind == "cgroup" and "blkio" in options.split(","):
            return Path(point)
    raise Missing("cgroup v1's blkio controller is not mounted")


@contextlib.contextmanager
def loop_devices(directory: Path, count: int) -> Iterator[list[Path]]:
    """Block devices formatted for memascend, on files in `directory`."""
    from memascend._memascend import format_device

    if os.geteuid() != 0:
        raise Missing("loop devices and throttles need root")
    if shutil.which("losetup") is None:
        raise Missing("losetup is not installed (util-linux; on Debian and Ubuntu the package mount)")
    devices: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="io-", dir=directory) as files:
        try:
            for number in range(count):
                file = Path(files) / f"{number}"
                with open(file, "wb") as opened:
                    os.posix_fallocate(opened.fileno(), 0, DEVICE_BYTES)
                command = ["losetup", "--find", "--show", "--direct-io=on", str(file)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    raise Missing(f"no loop device: {done.stderr.strip()}")
                devices.append(Path(done.stdout.strip()))
                format_device(devices[-1], devices[-1])
            yield devices
        finally:
            for device in devices:
                subprocess.run(["losetup", "--detach", str(device)], check=True)


@contextlib.contextmanager
def throttled(devices: Sequence[Path], rates: Sequence[int]) -> Iterator[Path]:
    """Yield a cgroup in which each device gives and takes so many bytes per second."""
    group = throttles_directory() / f"memascend-bench-{os.getpid()}"
    group.mkdir()
    try:
        for device, rate in zip(devices, rates, strict=True):
            number = device.stat().st_rdev
            # In the proportion of the mix: otherwise the queue slowly becomes reads alone, and until then a volume
            # seems faster than it is.
            for direction, percent in (("read", MIX["read_percent"]), ("write", 100 - MIX["read_percent"])):
                line = f"{os.major(number)}:{os.minor(number)} {2 * rate * percent // 100}"
                (group / f"blkio.throttle.{direction}_bps_device").write_text(line)
        yield group
    finally:
        # A process that has just ended may still be listed.
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
        else:
            print(f"could not remove {group}", file=sys.stderr)


def volume_rate(device: Path, seconds: float) -> float:
    """Return the bytes per second of one volume alone."""
    from memascend._memascend import Volume

    volume = Volume(device, buffer_bytes=MIB, buffer_count=MIX["depth"])
    told = volume.measure(**MIX, span_bytes=DEVICE_BYTES // 2, seconds=seconds)
    volume.close()
    return (told["bytes_read"] + told["bytes_written"]) / told["seconds"]


def store_rate(devices: Sequence[str], rates: Sequence[float], seconds: float) -> dict:
    """Return the bytes per second of tensors read and written 55 to 45, some at a time, in the steady state."""
    from memascend._memascend import Runtime
    from memascend.memory_plan.arena import Arena

    classes = [("tensors", max(TENSOR_BYTES), IN_FLIGHT)]
    arena = Arena(classes, [], 64 * 1024, 16, 64 * 1024, 64 * 1024, 1)
    runtime = Runtime(list(devices), arena, rates=list(rates))
    sizes = [TENSOR_BYTES[number % len(TENSOR_BYTES)] for number in range(TENSOR_COUNT)]
    tensors = [
        (runtime.units.add_unit(), [(runtime.store.create_tensor(f"tensor {n}", size), 0, size)])
        for n, size in enumerate(sizes)
    ]
    written: list[int | None] = [None] * TENSOR_COUNT
    moved = {"read": 0, "write": 0}
    running: deque[tuple] = deque()

    def finish_oldest() -> None:
        number, ticket, lease, expected = running.popleft()
        if ticket is None:
            return runtime.units.wait_unit(tensors[number][0])
        ticket.wait()
        if expected is not None:
            check_stamp(memoryview(lease)[: sizes[number]], expected)
        return None

    def begin(turn: int) -> None:
        number = turn % TENSOR_COUNT
        unit, extent = tensors[number]
        while (lease := runtime.memory.lease_unit(sizes[number])) is None:
            finish_oldest()
        if moved["read"] * 45 <= moved["write"] * 55:
            moved["read"] += sizes[number]
            ticket = runtime.units.fetch(unit, extent, lease, [])
            running.append((number, ticket, lease, written[number]))
        else:
            moved["write"] += sizes[number]
            written[number] = turn
            stamp(memoryview(lease)[: sizes[number]], turn)
            runtime.units.write_unit(unit, extent, lease)
            running.append((number, None, None, None))

    def reading() -> tuple[float, int, list[int]]:
        each = [volume["bytes_read"] + volume["bytes_written"] for volume in runtime.stats()["volumes"]]
        return time.perf_counter(), sum(each), each

    turn, first = 0, None
    began = time.perf_counter()
    while True:
        begin(turn)
        turn += 1
        now = time.perf_counter() - began
        if first is None and now >= WARM_UP_SECONDS:
            first = reading()
        if now >= WARM_UP_SECONDS + seconds:
            break
    last = reading()
    while running:
        finish_oldest()
    shares = [volume["share"] for volume in runtime.stats()["volumes"]]
    runtime.close(False)
    elapsed = last[0] - first[0]
    return {
        "bytes_per_second": (last[1] - first[1]) / elapsed,
        "volumes_bytes_per_second": [(b - a) / elapsed for a, b in zip(first[2], last[2], strict=True)],
        "shares": shares,
    }


def child_volumes(job: dict) -> dict:
    devices, seconds = job["devices"], job["seconds"]
    rates = [volume_rate(device, seconds) for device in devices]
    on = {"first": ([devices[0]], [rates[0]]), "second": ([devices[1]], [rates[1]]), "both": (devices, rates)}
    runs = alternate(list(on), job["alternations"], lambda name: store_rate(*on[name], seconds))
    return {"rates": rates, "runs": runs}


def two_volumes(args: argparse.Namespace, _workdir: Path) -> dict:
    throttles_directory()
    rows, misses = [], []
    with loop_devices(args.devices_in, 2) as devices:
        free = [volume_rate(device, 1.0) for device in devices]
        for name, rates in THROTTLES.items():
            with throttled(devices, rates) as group:
                job = {
                    "devices": [str(device) for device in devices],
                    "seconds": args.seconds,
                    "alternations": args.alternations,
                }
                result = child("child_volumes", job, Path(sys.executable), group)
            runs = result["runs"]
            alone = [
                {"bytes_per_second": a["bytes_per_second"] + b["bytes_per_second"]}
                for a, b in zip(runs["first"], runs["second"], strict=True)
            ]
            to_sum = ratio(runs["both"], alone, "bytes_per_second")
            row = {"speeds": name, "throttles": rates, **result, "to_sum": to_sum, "to_mean": 2 * to_sum}
            rows.append(row)
            if min(free) < 2 * max(rates):
                misses.append(f"{name}: a device does {min(free) / 1e6:.0f} MB/s unthrottled: the throttle is no limit")
            if name == "equal" and row["to_mean"] < TWICE_MIN:
                misses.append(f"two equal volumes: {row['to_mean']:.3f} of one, not {TWICE_MIN}")
            if name != "equal" and to_sum < SUM_MIN:
                misses.append(f"volumes of {name}: {to_sum:.3f} of their sum, not {SUM_MIN}")
            print(f"  {name}: done", file=sys.stderr)
    return {
        "devices": f"loop devices on files in {'memory' if on_tmpfs(args.devices_in) else 'a directory'}, "
        "throttled by cgroup v1's blkio",
        "device_bytes": DEVICE_BYTES,
        "unthrottled_bytes_per_second": free,
        "seconds": args.seconds,
        "alternations": args.alternations,
        "rows": rows,
        "misses": misses,
    }


def on_tmpfs(directory: Path) -> bool:
    done = subprocess.run(["stat", "-f", "-c", "%T", str(directory)], capture_output=True, text=True)
    return done.stdout.strip() == "tmpfs"


def report_volumes(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        runs = row["runs"]
        rows.append(
            [
                row["speeds"],
                " and ".join(f"{rate / 1e6:.0f}" for rate in row["throttles"]),
                " and ".join(f"{rate / 1e6:.0f}" for rate in row["rates"]),
                " and ".join(f"{share:.2f}" for share in runs["both"][0]["shares"]),
                *(f"{median(runs[name], 'bytes_per_second') / 1e6:.0f}" for name in ("first", "second", "both")),
                f"{row['to_mean']:.3f}" if row["speeds"] == "equal" else "",
                f"{row['to_sum']:.3f}",
            ]
        )
    header = ["speeds", "throttled to", "measured", "shares", "first", "second", "both", "of one", "of the sum"]
    return markdown(header, rows)
