"""A description of the machine: `python -m device.environment --out environment.json`, with `benches` on PYTHONPATH.

Holds no path of the machine, no host name and no serial number, so that the file can be sent on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

from _common import machine, mem_available, versions

PACKAGES = ("torch", "transformers", "memascend", "numpy", "safetensors", "cupy-cuda13x", "cupy-cuda12x", "triton")
PACKAGES += ("deepspeed", "pytest", "nvidia-cufile", "nvidia-cuda-nvrtc", "nvidia-cublas")
#: Queries of nvidia-smi for the link, the clocks and the power: now, and at most.
QUERY = ("name", "driver_version", "memory.total", "memory.used", "pcie.link.gen.current", "pcie.link.gen.max")
QUERY += ("pcie.link.width.current", "pcie.link.width.max", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
QUERY += ("temperature.gpu", "persistence_mode", "compute_mode", "mig.mode.current", "ecc.mode.current")
HUGE = Path("/sys/kernel/mm/transparent_hugepage")
DEVICE_QUEUE = ("rotational", "logical_block_size", "physical_block_size", "max_sectors_kb", "max_segments")
DEVICE_QUEUE += ("nr_requests", "scheduler", "write_cache")


def output(*command: str) -> str | None:
    """Return the output of a command, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def gpus() -> list[dict[str, str]] | None:
    """Return the driver's description of each GPU."""
    told = output("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader")
    if told is None:
        return None
    rows = [[field.strip() for field in line.split(",")] for line in told.splitlines() if line.strip()]
    return [dict(zip(QUERY, row, strict=False)) for row in rows]


def torch_device() -> dict[str, Any]:
    """Return PyTorch's description of device 0."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": None, "cuda": torch.version.cuda}
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    names = ("name", "major", "minor", "multi_processor_count", "L2_cache_size", "total_memory")
    found = {name: getattr(properties, name, None) for name in names}
    return {"gpu": found, "free_bytes": free, "total_bytes": total, "cuda": torch.version.cuda, "count": count_gpus()}


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def memory() -> dict[str, Any]:
    """Return sizes and rules of host memory: huge pages, limits of locked memory and of process groups."""
    names = ("MemTotal", "MemAvailable", "HugePages_Total", "Hugepagesize", "AnonHugePages", "SwapTotal")
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    ceilings = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return {
        "meminfo": {name: lines[name].strip() for name in names if name in lines},
        "available_bytes": mem_available(),
        "memlock_bytes": [None if value == resource.RLIM_INFINITY else value for value in limit],
        "transparent_huge_pages": {name: text(HUGE / name) for name in ("enabled", "shmem_enabled", "defrag")},
        "cgroup_limit": next((found for found in map(text, map(Path, ceilings)) if found), None),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
    }


def drive(place: Path) -> dict[str, Any]:
    """Return filesystem, room and queue of the drive under a directory."""
    usage = shutil.disk_usage(place)
    found: dict[str, Any] = {"total_bytes": usage.total, "free_bytes": usage.free}
    number = place.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if device.exists():
        resolved = device.resolve()
        disk = resolved.parent if (resolved / "partition").is_file() else resolved
        found["device"] = disk.name
        found["queue"] = {name: text(disk / "queue" / name) for name in DEVICE_QUEUE}
        found["model"] = text(disk / "device" / "model")
    return found


def io_uring() -> dict[str, Any]:
    """Return whether io_uring works here, and the system's error."""
    from memascend._memascend import FileEngine

    engine = FileEngine()
    return {"disabled": text(Path("/proc/sys/kernel/io_uring_disabled")), "engine": engine.name, "note": engine.notice}


def tools() -> dict[str, bool]:
    """Return which programs of CUDA are there."""
    return {name: shutil.which(name) is not None for name in ("nvidia-smi", "nvcc", "ncu", "nsys", "compute-sanitizer")}


def environment(store: Path) -> dict[str, Any]:
    """Return everything; a part that cannot be read holds the error."""
    parts = {
        "machine": lambda: machine(store),
        "processors": lambda: {"usable": len(os.sched_getaffinity(0)), "lscpu": cpu()},
        "kernel": lambda: {"release": platform.release(), "load": os.getloadavg()},
        "memory": memory,
        "drives": lambda: {"store": drive(store), "shm": drive(Path("/dev/shm"))},
        "io_uring": io_uring,
        "gpus": gpus,
        "torch": torch_device,
        "tools": tools,
        "versions": lambda: versions(*PACKAGES),
    }
    found: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:  # the rest of the description is worth having
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    return found


def cpu() -> dict[str, str]:
    """Return model, caches and topology of the processor, as lscpu names them."""
    wanted = ("Architecture", "Model name", "Thread(s) per core", "Core(s) per socket", "Socket(s)", "CPU max MHz")
    wanted += ("L1d cache", "L2 cache", "L3 cache", "NUMA node(s)", "Hypervisor vendor", "Flags")
    pairs = [line.split(":", 1) for line in (output("lscpu") or "").splitlines() if ":" in line]
    found = {key.strip(): value.strip() for key, value in pairs if key.strip() in wanted}
    flags = found.pop("Flags", "").split()
    return found | {"vectors": " ".join(flag for flag in flags if flag.startswith(("avx", "amx", "sse4")))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path(), help="a directory on the drive to describe")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = environment(args.store)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for name in ("gpus", "torch", "memory", "io_uring", "versions"):
        print(f"{name}: {json.dumps(found[name])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
