"""The rates of a GPU and of host memory: measured by `memascend bench --gpu`, used by `memascend plan --gpu`.

No rate is assumed. A rate that was neither measured nor given is an error that says how to measure it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import Rule, StepScalars, step_host
from memascend.common.sizes import counted, format_size
from memascend.errors import HostMemoryError, UnmeasuredError
from memascend.hardware import drives
from memascend.hardware.cuda import open_device
from memascend.hardware.pinned import empty_pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from memascend.hardware.drives import Location

#: Bytes of a copy between host and device, and the least where the system pins less (WSL2).
COPY_BYTES, COPY_BYTES_MIN = 256 << 20, 16 << 20
#: Rows and columns of the square matrices that are multiplied.
MATRIX_ORDER = 8192
#: Copies or products between two looks at the clock.
BATCH = 8
#: Bytes of each of the two arrays that a copy in host memory goes between: more than any cache
#: holds.
HOST_BYTES = 512 << 20
#: Elements of an update that is timed: more bytes than most caches hold. Bytes that AdamW moves for each bfloat16
#: weight: weight, low half and two moments read and written, and the gradient read.
UPDATE_ELEMENTS, UPDATE_BYTES = 1 << 22, 2 * (2 + 2 + 4 + 4) + 2
#: Kinds of page-locked memory that are compared. By how much copies have to be faster from memory of CUDA's own than
#: from memory in huge pages that is registered with CUDA, from which drives move more bytes a second.
PINNED_KINDS, PINNED_GAIN = ("registered", "cuda"), 1.1
#: The resource of each rate, and the option that gives it.
NAMES = {
    "flops": ("the GPU's arithmetic", "--flops"),
    "h2d": ("copies to the GPU", "--pcie"),
    "d2h": ("copies from the GPU", "--pcie"),
    "dram": ("host memory", "--dram"),
    "ssd": ("the drives", "--ssd"),
}


@dataclass(frozen=True)
class Rate:
    """Operations or bytes per second, and where the number comes from."""

    per_second: float
    source: str


# ---- measured -----------------------------------------------------------------------------------------------


def measure_gpu(*, seconds: float = 2.0, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure the CUDA device that PyTorch uses by default, and host memory; each rate for `seconds`.

    Returns:
        `gpu` (its name), `memory_bytes`; bytes per second `h2d` and `d2h` (pinned memory, 256 MiB at a time, one
        direction at a time); `pinned`, the same two rates for each kind of memory that memascend pins (`allocator` of
        `memascend.offload`); `dram` (see `measure_host_memory`); `flops`: floating-point operations per second of a
        product of square matrices of 8,192 rows in `bfloat16` and `float32`, as PyTorch is set up to compute them.

    Raises:
        DeviceError: there is no CUDA device that can be used.
        HostMemoryError: the system pins no memory.
    """
    opened = open_device("cuda")
    assert opened is not None
    device = opened.torch_device
    rates: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device), "memory_bytes": opened.memory()[1]}
    for name, direction in (("h2d", "to"), ("d2h", "from")):
        progress(f"copies {direction} the GPU")
        rates[name] = _copy_rate(device, seconds, name, _pinned())
    rates["pinned"] = {kind: _rates_of_kind(device, seconds / 4, kind, progress) for kind in PINNED_KINDS}
    rates["flops"] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        progress(f"products of {name} matrices")
        rates["flops"][name] = _product_rate(device, seconds, dtype)
    progress("host memory")
    rates["dram"] = measure_host_memory(seconds=seconds)
    return rates


def _rates_of_kind(
    device: torch.device, seconds: float, kind: str, progress: Callable[[str], None]
) -> dict[str, float]:
    """Return the rates of copies between the device and one kind of memory; {} where the system pins too little."""
    progress(f"copies of {kind} memory")
    try:
        memory = empty_pinned(COPY_BYTES, torch.uint8, allocator=kind)
    except HostMemoryError:
        return {}
    return {name: _copy_rate(device, seconds, name, memory) for name in ("h2d", "d2h")}


def _copy_rate(device: torch.device, seconds: float, direction: str, source: torch.Tensor) -> float:
    target = torch.empty_like(source, device=device)
    if direction == "d2h":
        source, target = target, source
    copies = _per_second(lambda: target.copy_(source, non_blocking=True), seconds, partial(_finish, device))
    return source.nbytes * copies


def _product_rate(device: torch.device, seconds: float, dtype: torch.dtype) -> float:
    left, right, product = (torch.randn(MATRIX_ORDER, MATRIX_ORDER, device=device).to(dtype) for _ in range(3))
    products = _per_second(lambda: torch.mm(left, right, out=product), seconds, partial(_finish, device))
    return 2 * MATRIX_ORDER**3 * products


def _finish(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def measure_host_memory(*, size: int = HOST_BYTES, seconds: float = 1.0) -> float:
    """Return the bytes per second, read and written together, of copies of `size` bytes by PyTorch's threads.

    This is the Copy of McCalpin's STREAM: the read of a cache line before it is written to is not counted.
    """
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    return 2 * size * _per_second(lambda: target.copy_(source), seconds)


@cache
def measure_update(threads: int, *, seconds: float = 0.3) -> Rate:
    """Measure how many bytes per second `threads` threads read and write when they update weights by AdamW.

    Once a process: further plans have the same rate.
    """
    planes = [torch.zeros(UPDATE_ELEMENTS, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.int16)]
    weight, gradient = (torch.ones(UPDATE_ELEMENTS, dtype=torch.bfloat16) for _ in range(2))
    rule = Rule("adamw", "float32", "bfloat16", True)
    scalars = StepScalars.adamw(
        1e-3, (0.9, 0.999), 1e-8, 0.01, 1, decoupled=True, grad_scale=1.0, maximize=False, seed=0
    )
    addresses = [plane.data_ptr() for plane in planes]
    updates = _per_second(
        lambda: step_host(rule, UPDATE_ELEMENTS, weight.data_ptr(), addresses, gradient.data_ptr(), scalars, threads),
        seconds,
    )
    return Rate(UPDATE_BYTES * UPDATE_ELEMENTS * updates, f"measured just now, {counted(threads, 'thread')}")


def _per_second(work: Callable[[], Any], seconds: float, finish: Callable[[], None] = lambda: None) -> float:
    """Return how often per second `work` completes when it is repeated; `finish` waits for its end."""
    work()
    finish()
    began, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds or not done:
        for _ in range(BATCH):
            work()
        finish()
        done += BATCH
    return done / passed


def _pinned() -> torch.Tensor:
    nbytes = COPY_BYTES
    while True:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            nbytes //= 2
            if nbytes < COPY_BYTES_MIN:
                raise HostMemoryError(
                    f"the system pins not even {format_size(2 * nbytes)} of host memory, so that copies cannot be "
                    f"measured: raise the limit on locked memory (`ulimit -l`; under WSL2 `memory` in .wslconfig): "
                    f"{error}"
                ) from error


# ---- remembered ---------------------------------------------------------------------------------------------


def remembered_in() -> Path:
    """Return the file that holds the last measurement of a GPU."""
    return drives.cache_directory() / "gpu.json"


def remember(measured: dict[str, Any]) -> Path:
    """Save the result of `measure_gpu`, in place of the last measurement, and return the file."""
    return drives.save(remembered_in(), {**measured, "measured": drives.now()})


def _remembered() -> dict[str, Any]:
    try:
        measured = json.loads(remembered_in().read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: the user has no home directory
        return {}
    return measured if isinstance(measured, dict) else {}


def preferred_pinned() -> str | None:
    """Return the kind of page-locked memory that copies showed to be the faster one by far, or None.

    None leaves the choice to the native side (`kinds_for_a_device` in `crates/memascend-mem/src/allocator/pinned.rs`),
    which prefers memory in huge pages.
    """
    measured = _remembered().get("pinned")
    seconds = {}
    for kind in PINNED_KINDS:
        rates = measured.get(kind) if isinstance(measured, dict) else None
        given = [rates.get(name) for name in ("h2d", "d2h")] if isinstance(rates, dict) else []
        values = [float(value) for value in given if isinstance(value, int | float) and value > 0]
        if len(values) != 2:
            return None
        # Each byte of a step goes either way about as often.
        seconds[kind] = sum(1 / value for value in values)
    return "cuda" if seconds["registered"] > PINNED_GAIN * seconds["cuda"] else None


def rate_of_drives(given: float | None, stores: Sequence[Location]) -> Rate | None:
    """Return the rate of the drives of `stores`, or of the only one that was measured: a given one first, or None."""
    if given is not None:
        return Rate(given, "given")
    measured = drives.measured_rates(stores)
    if measured is None:
        return None
    return Rate(sum(measured.values()), f"{', '.join(measured)}: reads and writes mixed")


def rates_for(dtype: str, given: dict[str, float | None], stores: Sequence[Location] = ()) -> dict[str, Rate]:
    """Return the rates that a step passes through, by the keys of `NAMES`.

    A given rate comes before a measured one. Host memory is measured now if it was not measured before. The drives
    belong to `stores`, or are the only one that was measured.

    Args:
        dtype: "bfloat16" or "float32", of the products.
        given: rates by the keys of `NAMES`; None where there is none.
        stores: directories or devices of the store.

    Raises:
        UnmeasuredError: a rate is not known; the message says how to measure it.
    """
    rates = {name: Rate(value, "given") for name, value in given.items() if value is not None}
    rates = rates | _remembered_rates(dtype) | rates
    ssd = rate_of_drives(given["ssd"], stores)
    if ssd is not None:
        rates["ssd"] = ssd
    # Host memory comes last: measuring takes a second, which an error about other rates would
    # waste.
    missing = [name for name in NAMES if name not in rates and name != "dram"]
    if missing:
        raise UnmeasuredError(_how_to_measure(missing, stores))
    if "dram" not in rates:
        rates["dram"] = Rate(measure_host_memory(), "measured just now")
    return rates


def _remembered_rates(dtype: str) -> dict[str, Rate]:
    """Return the rates of a device and of host memory that `memascend bench --gpu` measured here."""
    measured = _remembered()
    source = f"{measured.get('gpu')}, {str(measured.get('measured'))[:10]}"
    flops = measured.get("flops")
    values = {"flops": flops.get(dtype) if isinstance(flops, dict) else None}
    values |= {name: measured.get(name) for name in ("h2d", "d2h", "dram")}
    return {
        name: Rate(float(value), source)
        for name, value in values.items()
        if isinstance(value, int | float) and value > 0
    }


def _how_to_measure(missing: Sequence[str], stores: Sequence[Location]) -> str:
    """Say which rates are not known, and the command that measures them."""
    rates_of = ", ".join(NAMES[name][0] for name in missing)
    options = ", ".join(dict.fromkeys(NAMES[name][1] for name in missing))
    words, several = ["memascend bench"], ""
    if missing != ["ssd"]:
        words.append("--gpu")
    if "ssd" in missing:
        words += [os.fspath(place) for place in stores] or ["DIR"]
        several = "" if stores else " and name the drives with --store"
    return (
        f"not known: the rates of {rates_of}. Run `{' '.join(words)}` on the machine that is going to "
        f"compute{several}, or give {options}"
    )
