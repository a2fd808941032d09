"""The kernel, the memory and the processors of this machine."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memascend._memascend import FileEngine, HostBuffer, instruction_set
from memascend.common.sizes import format_size
from memascend.doctor.findings import Finding, note, ok, problem
from memascend.errors import MemascendError
from memascend.hardware import matmul_rates, memory_limits, threads, waits
from memascend.hardware.processors import processors

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes that are page-locked to find out whether that works: more than the 8 MiB that many systems allow.
LOCKED_BYTES = 64 << 20
#: Less than this leaves no room for a model beside PyTorch.
SMALL_BYTES = 4 << 30
#: Threads that spin for less lose little of the time that others need.
SPINNING_SECONDS = 0.001
#: Which memory gets huge pages: "always [madvise] never", with the choice in brackets.
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def system() -> Iterator[Finding]:
    """Yield the findings on the kernel and the machine."""
    yield from _kernel()
    yield _io_uring()
    yield _locked_memory()
    yield _memory()
    yield _huge_pages()
    yield from _swap()
    yield from _processor()
    yield _gpu()


def _kernel() -> Iterator[Finding]:
    name = os.uname()
    if name.sysname != "Linux":
        yield problem("system", name.sysname, "memascend needs Linux")
        return
    yield ok("kernel", f"{name.release}, {name.machine}")
    if "microsoft" in name.release.lower():
        yield note(
            "WSL",
            "the Windows Subsystem for Linux: CUDA pins only a part of the memory, and /mnt/c is a network filesystem",
            "Put stores on the Linux side, in a directory of your home",
        )


def _io_uring() -> Finding:
    try:
        FileEngine(engine="ring")
    except (MemascendError, OSError) as error:
        return note(
            "io_uring",
            f"refused ({error}): threads move bytes in its place, with more processor time",
            "Ask for kernel.io_uring_disabled=0, and in a container for a seccomp profile that allows io_uring "
            "(Docker: --security-opt seccomp=FILE)",
        )
    filtered = _status("Seccomp") not in ("", "0")
    return ok("io_uring", "available" + (", within a seccomp filter" if filtered else ""))


def _status(name: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "")


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
    try:
        HostBuffer(LOCKED_BYTES, "locked", False)
    except (MemascendError, OSError, MemoryError) as error:
        return note(
            "page-locked memory",
            f"{format_size(LOCKED_BYTES)} cannot be locked ({error}); ulimit -l is {limit}: the kernel may swap the "
            "pool out, and transfers take more processor time",
            "Raise it: ulimit -l unlimited, LimitMEMLOCK=infinity of a service, --ulimit memlock=-1 of Docker",
        )
    return ok("page-locked memory", f"works; ulimit -l is {limit}")


def _memory() -> Finding:
    left, why = memory_limits.available_memory()
    text = f"{format_size(memory_limits.total_memory())}, of which a process can have {format_size(left)} ({why})"
    if left < SMALL_BYTES:
        return note(
            "memory", text, "Give the container more, or close other programs: PyTorch alone takes about 0.7 GB"
        )
    return ok("memory", text)


def _huge_pages() -> Finding:
    try:
        chosen = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = "not in this kernel"
    if chosen in ("always", "madvise"):
        return ok("huge pages", f"{chosen}: buffers have them, those pinned for a device too")
    return note(
        "huge pages",
        f"{chosen or 'unknown'}: memory is locked more slowly, and the drives of virtual machines can be slower",
        f"echo madvise > {HUGE_PAGES}, as root",
    )


def _swap() -> Iterator[Finding]:
    swaps = [line.split() for line in Path("/proc/swaps").read_text().splitlines()[1:]]
    if swaps:
        names = ", ".join(fields[0] for fields in swaps)
        yield note(
            "swap",
            f"{names}: memory that is not page-locked may be swapped out, so that a run slows down before it fails",
            "Turn it off for a run (swapoff), or keep it on another drive than the store",
        )


def _processor() -> Iterator[Finding]:
    yield ok("processor", f"{processors().text()}; kernels for {instruction_set()}")
    yield _threads()
    yield _waits()
    if matmul_rates.is_slow(torch.bfloat16):
        yield note(
            "bfloat16", matmul_rates.rates_text(torch.bfloat16), "Train in float32: --dtype auto does, by this figure"
        )
    else:
        yield ok("bfloat16", matmul_rates.rates_text(torch.bfloat16))


def _threads() -> Finding:
    here, compute = processors(), torch.get_num_threads()
    update, beside_device = threads.update_threads(False), threads.update_threads(True)
    text = (
        f"PyTorch computes with {compute}, {update} {'update' if update > 1 else 'updates'} weights ({beside_device} "
        "where a GPU computes), and one moves the bytes of each volume"
    )
    if compute > here.threads:
        return note(
            "threads",
            f"{text}; {compute} take turns on {here.threads}, and each loop waits for the last of them",
            f"torch.set_num_threads({here.threads}), or OMP_NUM_THREADS={here.threads}; the command line does so",
        )
    return ok("threads", text)


def _waits() -> Finding:
    if torch.get_num_threads() == 1:
        return ok("waits", "PyTorch's one thread waits for no other")
    library, spinning = waits.library(), waits.spin_seconds()
    name = "an unknown OpenMP" if library is None else library.name
    text = f"PyTorch's threads spin for {spinning * 1000:.1f} ms before they sleep ({name})"
    if given := waits.set_by_user():
        return ok("waits", f"{text}, as {', '.join(given)} says")
    if waits.is_gnu(library):
        return ok("waits", f"{text}; beside busy programs, memascend has them sleep at once")
    if spinning < SPINNING_SECONDS:
        return ok("waits", text)
    return note(
        "waits",
        f"{text}: beside busy programs a step takes many times as long",
        "export OMP_WAIT_POLICY=passive before Python starts, where other programs use the machine",
    )


def _gpu() -> Finding:
    built_for = getattr(torch.version, "cuda", None)
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return ok("GPU", f"{device.name}, {format_size(device.total_memory)}, CUDA {built_for}")
    if not Path("/proc/driver/nvidia").exists():
        return ok("GPU", "none: models are computed on the processor")
    return note(
        "GPU",
        f"a driver is loaded, but PyTorch (CUDA {built_for}) finds no device: models are computed on the processor",
        "Install a build of PyTorch that fits the driver (nvidia-smi shows its CUDA version)",
    )
