"""A device on the CPU: its memory is the process's, its streams come from `fake_cudart.c`.

PyTorch computes at once, on the CPU; copies run as late as the simulated streams let them. Every access of the
computation is told to the streams' race detector by `Accesses`, so that a wait that is missing is found whatever came
first in this run. The process's `MEMASCEND_CUDART` has to name the fake before memascend looks for CUDA.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fake_cuda import Fake
from torch.utils._python_dispatch import TorchDispatchMode

import memascend
from memascend._memascend import ForTests, gradient_stats
from memascend.autograd.recompute import DeviceInputStash
from memascend.gradients.device_capture import DeviceCapture
from memascend.hardware.cuda import BlockSums, ComputeDevice
from memascend.kernels.launcher import CHUNK
from memascend.layout.units import DTYPE_NAMES

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from memascend._memascend import Projection
    from memascend.memory_plan.device import DevicePlan
    from memascend.streaming.device_buffers import Occupancy

#: Operations that look at sizes only, though their schemas do not say so.
WITHOUT_DATA = frozenset(("aten::_unsafe_view", "aten::resize_", "aten::set_"))


class SimulatedDevice(ComputeDevice):
    """A device without hardware."""

    def __init__(self, total: int = 1 << 30, identity: str | None = None) -> None:
        """Have `total` bytes of memory, all free; without an `identity` it is a device of this process alone."""
        super().__init__(torch.device("cpu"))
        self._identity = identity or f"simulated in {os.getpid()}"
        self.fake = Fake()
        self.fake.set("device_memory", total)
        self.total = total
        #: The limit of PyTorch's allocator.
        self.limited: int | None = None
        #: Reserved bytes in use, bytes that PyTorch would keep after their use until its cache is emptied, and bytes of
        #: other processes.
        self.live = self.cached = self.others = 0

    @property
    def identity(self) -> str:
        """Identifies the device among the devices of all processes."""
        return self._identity

    @property
    def segments(self) -> None:
        """Return None: a tensor takes its bytes."""
        return None

    def stream(self) -> int:
        """Return the handle of the stream that is computed on."""
        return self.fake.get("computing")

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes; cached ones count as free."""
        return self.total - self.others - self.live, self.total

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Count the bytes as long as the tensor lives; refuse more than there is, or than PyTorch is limited to."""
        limit = self.total if self.limited is None else self.limited
        if nbytes > min(self.memory()[0], limit - self.live):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")
        memory = super().reserve(nbytes)
        self.live += nbytes
        self.cached -= min(self.cached, nbytes)
        weakref.finalize(memory, self._freed, nbytes).atexit = False
        return memory

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes
        self.cached += nbytes

    def empty_cache(self) -> None:
        """Empty the cache."""
        self.cached = 0

    @property
    def taken(self) -> int:
        """Bytes that other processes could not have: live or cached."""
        return self.live + self.cached

    def current(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()

    def hold(self, plan: DevicePlan) -> None:
        """Remember the limit."""
        self.limited = plan.budget

    def release(self) -> None:
        """Forget the limit."""
        self.limited = None

    def view(self, owner: Occupancy) -> torch.Tensor:
        """Return an occupied buffer's bytes (uint8), in a storage that holds `owner` as long as it lives."""
        memory = (ctypes.c_ubyte * owner.buffer.nbytes).from_address(owner.buffer.address)
        # The storage holds `memory`, and that holds the owner.
        memory.owner = owner
        return torch.frombuffer(memory, dtype=torch.uint8)

    def random_state(self) -> torch.Tensor | None:
        """Return None: the random numbers are the host's, which are kept anyway."""
        return None

    def block_sums(self, gradient: torch.Tensor) -> BlockSums | None:
        """Measure a gradient, as the device's kernel does."""
        return SimulatedSums(self.fake, gradient) if gradient.numel() else None

    def projection(self, gradient: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Project a gradient, as the device's kernels do."""
        numbers = torch.zeros(projection.numbers)
        ForTests.write_projected(projection.of(DTYPE_NAMES[gradient.dtype], gradient.data_ptr(), 1), numbers.data_ptr())
        self.fake.access(gradient.data_ptr(), gradient.nbytes, False, "projection")
        self.fake.access(numbers.data_ptr(), numbers.nbytes, True, "projection")
        return numbers


class SimulatedSums(BlockSums):
    """The sums of a gradient's blocks, computed on the CPU in the order of the captures on the host."""

    def __init__(self, fake: Fake, gradient: torch.Tensor) -> None:
        """Compute them, as part of the computing stream."""
        dtype, numel, size = DTYPE_NAMES[gradient.dtype], gradient.numel(), gradient.itemsize
        blocks = -(-numel // CHUNK)
        self.memory = torch.zeros(blocks + 1, dtype=torch.float64)
        flag = self.memory[blocks:].view(torch.int32)
        for block in range(blocks):
            address = gradient.data_ptr() + block * CHUNK * size
            self.memory[block], found = gradient_stats(dtype, min(CHUNK, numel - block * CHUNK), address)
            if found:
                flag[0] = 1
        fake.access(gradient.data_ptr(), gradient.nbytes, False, "block sums")
        fake.access(self.memory.data_ptr(), self.memory.nbytes, True, "block sums")


class Accesses(TorchDispatchMode):
    """While it is entered, tells the computing stream's accesses to the race detector, in backward passes too.

    Memory is written to where it is allocated, by `empty` too: it may have been in use until now, since PyTorch gives
    device memory out again in the order of the computing stream only.

    A tensor that is not contiguous counts with all bytes from its first element to its last. Page-locked memory is the
    host's; other tensors of the host cannot be told from the device's.
    """

    def __init__(self, fake: Fake) -> None:
        """Tell them to `fake`."""
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        accesses = _accesses_of(func)
        if accesses is None:
            return func(*args, **kwargs)
        for number, name, writes in accesses.arguments:
            if number < len(args):
                self._tell(accesses.name, args[number], writes)
            elif name in kwargs:
                self._tell(accesses.name, kwargs[name], writes)
        result = func(*args, **kwargs)
        results = [result] if len(accesses.results) == 1 else result
        for is_new, value in zip(accesses.results, results or (), strict=True):
            if is_new:
                self._tell(accesses.name, value, True)
        return result

    def _tell(self, name: str, value: Any, write: bool) -> None:
        tensors = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, list | tuple) else ()
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu":
                self._fake.access(tensor.data_ptr(), _extent(tensor), write, name)


class _OperationAccesses(NamedTuple):
    """What an operation reads and writes."""

    name: str
    #: The position and name of each argument whose data counts, and whether it is written.
    arguments: tuple[tuple[int, str, bool], ...]
    #: Of each result, whether it has memory of its own.
    results: tuple[bool, ...]


@cache
def _accesses_of(func: Any) -> _OperationAccesses | None:
    """Return the accesses of an operation by its schema, or None where it touches no data."""
    schema = func._schema
    if func.is_view or torch.Tag.inplace_view in func.tags or schema.name in WITHOUT_DATA:
        return None
    # A tensor made like another one does not read it.
    reads = not schema.name.endswith("_like") and not schema.name.startswith("aten::new_")
    arguments = (
        (number, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for number, argument in enumerate(schema.arguments)
    )
    told = tuple(entry for entry in arguments if reads or entry[2])
    return _OperationAccesses(str(func), told, tuple(returned.alias_info is None for returned in schema.returns))


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def captured(model: nn.Module) -> DeviceCapture:
    """Return the capture of the gradients that a device makes of an offloaded model."""
    gradients = memascend.offload_of(model).gradients
    assert isinstance(gradients, DeviceCapture)
    return gradients


def inputs_aside(model: nn.Module) -> DeviceInputStash:
    """Return the inputs of an offloaded model's layers that a device puts aside."""
    inputs = memascend.offload_of(model).inputs
    assert isinstance(inputs, DeviceInputStash)
    return inputs
