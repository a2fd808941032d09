"""The CUDA device that computes: its memory, and the order of its work.

The native side (`DeviceLink`) owns every stream, event and copy; PyTorch only computes, on a stream of its own. No copy
depends on an order that is not stated, and tests run all of this on a simulated device
(`tests/support/simulated_device.py`).

While models are open, PyTorch's allocator may hold its earlier memory and their budgets (`ComputeDevice.hold`). The
ceiling is in force before device buffers are reserved, is for all open models together, and falls with a model whatever
else of its closing fails. Device buffers are one tensor that fills its segment of the allocator, so that no other
tensor keeps the segment when they go.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend._memascend import cuda_device_count
from memascend.common.sizes import format_size
from memascend.errors import DeviceError
from memascend.hardware.segments import OWN_FROM_BYTES, OWN_SEGMENT_BYTES, Segments
from memascend.kernels import launcher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from memascend._memascend import CudaEvent, DeviceLink, Projection

_log = logging.getLogger("memascend")


class DeviceMemoryPlan(Protocol):
    """The part of a memory plan that a device reads (`memascend.memory_plan.device.DevicePlan`)."""

    @property
    def budget(self) -> int:
        """Bytes that memascend and PyTorch may hold together."""

    def table(self) -> str:
        """Write the plan with a line per consumer."""


class DeviceArray(Protocol):
    """Device memory that offers itself by the protocol of CUDA arrays, version 3."""

    __cuda_array_interface__: dict[str, Any]


class ComputeDevice:
    """A CUDA device, as PyTorch sees it."""

    def __init__(self, device: torch.device) -> None:
        """Take the device; `link` is set once a runtime was made for the device."""
        self.torch_device = device
        self.link: DeviceLink | None = None
        self._plan: DeviceMemoryPlan | None = None

    @property
    def index(self) -> int:
        """Number of the device among those that this process may see."""
        return self.torch_device.index or 0

    @property
    def identity(self) -> str:
        """Identifies the device among all machines."""
        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    @property
    def segments(self) -> Segments | None:
        """How PyTorch's allocator cuts the device's memory; None where a tensor takes its bytes and no more."""
        return Segments.of(torch.cuda.get_device_capability(self.torch_device)[0])

    def stream(self) -> int:
        """Return the handle of the stream that PyTorch computes on in this thread."""
        return torch.cuda.current_stream(self.torch_device).cuda_stream

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device; memory that PyTorch has cached without using it counts as free."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + cached, total

    def current(self) -> AbstractContextManager[Any]:
        """Make the device PyTorch's and CUDA's current one within the context."""
        return torch.cuda.device(self.torch_device)

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Return device memory of PyTorch's allocator, (nbytes,) of uint8.

        Raises torch.OutOfMemoryError if the device, or PyTorch's limit there, leaves less.
        """
        # Another tensor in the rest of the segment would keep the whole segment from going back to the device.
        whole = -(-nbytes // OWN_SEGMENT_BYTES) * OWN_SEGMENT_BYTES if nbytes >= OWN_FROM_BYTES else nbytes
        return torch.empty(whole, dtype=torch.uint8, device=self.torch_device)[:nbytes]

    def empty_cache(self) -> None:
        """Have PyTorch's allocator give memory that it caches without using it back to the device."""
        torch.cuda.empty_cache()

    def hold(self, plan: DeviceMemoryPlan) -> None:
        """Have PyTorch's allocator refuse memory beyond the plan's budget, and log the plan when it does.

        Call it before memory of the plan is reserved: the segments that PyTorch's allocator has then are added to the
        budget. Called again, the plan takes the place of the former one.
        """
        launcher.compiles(self.index)  # compile now rather than in the first backward pass
        held = _held.setdefault(self.torch_device, [])
        if self._plan is not None and self._plan in held:
            held[held.index(self._plan)] = plan
        else:
            if not held:
                self.empty_cache()
                _beside[self.torch_device] = torch.cuda.memory_reserved(self.torch_device)
            held.append(plan)
        self._plan = plan
        self._limit()
        if not _observed and hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):
            _observed.append(True)
            # An error in the backward pass reaches no code of this package that could add the plan.
            with suppress(RuntimeError):  # allocators other than PyTorch's own have no observers
                torch._C._cuda_attach_out_of_memory_observer(_report)

    def release(self) -> None:
        """Lift the limit of `hold`."""
        held = _held.get(self.torch_device, [])
        if self._plan in held:
            held.remove(self._plan)
            self._limit()
        self._plan = None

    def _limit(self) -> None:
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        budgets = sum(plan.budget for plan in _held[self.torch_device])
        share = (budgets + _beside[self.torch_device]) / total if budgets else 1.0
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.torch_device)

    def view(self, owner: DeviceArray) -> torch.Tensor:
        """Return an occupied buffer's bytes (uint8), in a storage that holds `owner` as long as it lives."""
        return torch.as_tensor(owner, device=self.torch_device)

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the device's random numbers. It lies on the host, so nothing is waited for."""
        return torch.cuda.get_rng_state(self.torch_device)

    def set_random_state(self, state: torch.Tensor | None) -> None:
        """Restore the device's random numbers to a result of `random_state`."""
        if state is not None:
            torch.cuda.set_rng_state(state, self.torch_device)

    def block_sums(self, gradient: torch.Tensor) -> BlockSums | None:
        """Start measuring a gradient on the device; None where CuPy, which compiles the kernel, is not installed."""
        if not gradient.numel() or not launcher.compiles(self.index):
            return None
        return BlockSums(gradient)

    def projection(self, gradient: torch.Tensor, projection: Projection) -> torch.Tensor | None:
        """Start projecting a gradient on the device: float32 of the device, (projection.numbers,).

        None where CuPy, which compiles the kernels, is not installed.
        """
        if not launcher.compiles(self.index):
            return None
        numbers = torch.empty(projection.numbers, dtype=torch.float32, device=gradient.device)
        launcher.project(gradient, projection, numbers)
        return numbers

    # ---- order ------------------------------------------------------------------------------------------

    def record(self, stream: int | None = None) -> CudaEvent:
        """Return an event for the end of PyTorch's work so far, on its current stream or on `stream`."""
        assert self.link is not None
        return self.link.record(self.stream() if stream is None else stream)

    def wait(self, event: CudaEvent, stream: int | None = None) -> None:
        """Order later computation, on the current stream or on `stream`, after `event`; the host does not wait."""
        assert self.link is not None
        self.link.wait(self.stream() if stream is None else stream, event)


#: Plans of open models by device; the sum of their budgets limits PyTorch there. Beside it: bytes
#: that PyTorch held before the first of them, and whether the observer is installed.
_held: dict[torch.device, list[DeviceMemoryPlan]] = {}
_beside: dict[torch.device, int] = {}
_observed: list[bool] = []


def _report(device: int, *_: int) -> None:
    for plan in _held.get(torch.device("cuda", device), ()):
        _log.error("cuda:%d has no memory left. %s", device, out_of_memory(plan))


def open_device(device: str | torch.device | ComputeDevice | None) -> ComputeDevice | None:
    """Return the device of that name, or None for the CPU; a `ComputeDevice` is returned as it is.

    Raises:
        DeviceError: there is no such device, or it cannot be used here; the message has the remedy.
        ValueError: it is neither the CPU nor a CUDA device.
    """
    if device is None or isinstance(device, ComputeDevice):
        return device
    try:
        named = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {device!r} is not supported: use 'cuda', 'cuda:0' (any number) or 'cpu'") from None
    if named.type == "cpu":
        return None
    if named.type != "cuda":
        raise ValueError(f"device {device} is not supported: use 'cuda', 'cuda:0' (any number) or 'cpu'")
    devices = cuda_device_count()  # names the missing part: library, driver, device
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "is built without CUDA" if built is None else f"for CUDA {built} finds no device that it can use"
        raise DeviceError(
            f"device {device}: PyTorch {torch.__version__} {why}: install a build of PyTorch that fits the driver, or "
            "compute on the CPU (device='cpu')"
        )
    if torch.version.cuda is None:
        raise DeviceError(
            f"device {device}: this PyTorch is built for ROCm, which memascend does not know: "
            "compute on the CPU (device='cpu')"
        )
    index = torch.cuda.current_device() if named.index is None else named.index
    if index >= devices:
        raise DeviceError(
            f"device {device}: this process sees {devices} CUDA device(s), counted "
            f"from 0: give one of cuda:0 to cuda:{devices - 1}"
        )
    return ComputeDevice(torch.device("cuda", index))


class BlockSums:
    """The sums of squares of a gradient's blocks of 65,536 elements, and whether an element is not finite."""

    def __init__(self, gradient: torch.Tensor) -> None:
        """Launch the kernel on PyTorch's stream."""
        blocks = -(-gradient.numel() // launcher.CHUNK)
        # Shape (blocks + 1,): the flag lies behind the sums, so one copy to the host fetches both.
        self.memory = torch.zeros(blocks + 1, dtype=torch.float64, device=gradient.device)
        launcher.block_sums(gradient, self.memory[:blocks], self.memory[blocks:].view(torch.int32)[:1])

    @property
    def addresses(self) -> tuple[int, int]:
        """Address of the sums, the flag behind them, and how many there are."""
        return self.memory.data_ptr(), self.memory.numel() - 1


def is_autocast(kind: str) -> bool:
    """Return whether computation on a kind of device is autocast now."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def autocast_of(device: torch.device) -> tuple[str, torch.dtype | None, bool]:
    """Return how computation on a device is autocast now, as arguments for `autocast`."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if is_autocast(kind) else None
    return kind, dtype, torch.is_autocast_cache_enabled()


def autocast(kind: str, dtype: torch.dtype | None, cache: bool) -> AbstractContextManager[Any]:
    """Return a context with the autocast state that `autocast_of` returned."""
    if dtype is None:
        return torch.autocast(kind, enabled=False) if is_autocast(kind) else nullcontext()
    return torch.autocast(kind, dtype=dtype, cache_enabled=cache)


@contextmanager
def explained(plan: DeviceMemoryPlan | None) -> Iterator[None]:
    """Add the plan to PyTorch's error when the device's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if plan is not None and not hasattr(error, "__notes__"):
            error.add_note(out_of_memory(plan))
        raise


def out_of_memory(plan: DeviceMemoryPlan) -> str:
    """Return the plan and ways to need less memory, for an error of PyTorch's allocator."""
    return (
        f"memascend's plan of the device's memory, of which {format_size(plan.budget)} may be used:\n{plan.table()}\n"
        "To lower it: a smaller batch or shorter sequences (with gradient accumulation the result is the same); "
        "activations='host' or 'ssd', where the inputs of layers are kept on the device; a loss that does not make all "
        "logits at once (Liger-Kernel's fused linear cross entropy); a larger device_memory"
    )
