"""The buffers of weights in a device's memory, and when each is free for another unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend._memascend import CudaEvent
    from memascend.hardware.cuda import ComputeDevice
    from memascend.layout.units import Unit
    from memascend.memory_plan.device import DevicePlan


class Buffer:
    """A piece of the device's memory that serves one unit after another."""

    __slots__ = ("address", "arrived", "is_coming", "last_uses", "memory", "nbytes", "unit", "users", "using")

    def __init__(self, address: int, nbytes: int, memory: torch.Tensor | None = None) -> None:
        """Describe `nbytes` bytes at `address`, without contents yet; `memory` is given back after their use."""
        self.address = address
        self.nbytes = nbytes
        #: Of a buffer beyond the plan: its memory.
        self.memory = memory
        #: Of a buffer for blocks of tables: whether a block is on its way there that was not used yet.
        self.is_coming = False
        #: The unit whose bytes are there or on their way, and the event of their arrival.
        self.unit: Unit | None = None
        self.arrived: CudaEvent | None = None
        #: Storages over the bytes that are still alive.
        self.users = 0
        #: Streams on which the bytes were used since the last event there was recorded.
        self.using: set[int] = set()
        #: By stream, the end of the computation with the bytes there. The next copy into the buffer waits for all of
        #: these events: a program may compute on several streams.
        self.last_uses: dict[int, CudaEvent] = {}


class Occupancy:
    """One use of a buffer: the storage of its tensors holds this object, so the use ends with the last of them.

    A buffer is given to another unit only after its last tensor is gone. The copy of the other unit waits for the
    computation until then, and for nothing later.
    """

    def __init__(self, pool: DevicePool, buffer: Buffer) -> None:
        """Count a user of `buffer`, on the stream that PyTorch computes on in this thread."""
        self.pool = pool
        self.buffer = buffer
        buffer.users += 1
        # The use may end in another thread, which has another stream.
        buffer.using.add(pool.device.stream())
        #: PyTorch takes over device memory of others by this protocol, version 3.
        self.__cuda_array_interface__ = {
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        self.pool.leave(self.buffer)


class DevicePool:
    """The buffers of one device plan: reserved once, and given back all together."""

    def __init__(self, device: ComputeDevice, plan: DevicePlan, on_freed: Callable[[int], object]) -> None:
        """Have no buffers yet; `reserve` makes the buffers of `plan`.

        `on_freed` is called with the address of memory beyond the plan that is given back.
        """
        self.device = device
        self.plan = plan
        #: Whether the link that records events is gone.
        self.closed = False
        self._lines = [line for line in plan.buffers if line.count]
        #: Buffers by their size in bytes.
        self.buffers: dict[int, list[Buffer]] = {line.total // line.count: [] for line in plan.units if line.count}
        #: Buffers for blocks of tables.
        self.blocks: list[Buffer] = []
        self._on_freed = on_freed
        #: All buffers, one after another, (bytes,) of uint8: PyTorch's allocator rounds one segment up, not many.
        self._memory: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the device that the buffers take now."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def all(self) -> list[Buffer]:
        """All buffers of the plan."""
        return [*(buffer for buffers in self.buffers.values() for buffer in buffers), *self.blocks]

    @property
    def in_use(self) -> list[Buffer]:
        """The buffers to which a tensor refers."""
        return [buffer for buffer in self.all if buffer.users]

    def free_blocks(self) -> list[Buffer]:
        """Return the buffers for blocks of tables that a block can be copied into."""
        return [buffer for buffer in self.blocks if not (buffer.users or buffer.is_coming)]

    def outside(self, nbytes: int) -> Buffer:
        """Return a buffer beyond the plan, which is given back after its use.

        Raises torch.OutOfMemoryError if the device, or the limit there, leaves less.
        """
        memory = self.device.reserve(nbytes)
        buffer = Buffer(memory.data_ptr(), nbytes, memory)
        # The memory may have been another tensor's.
        buffer.last_uses = {self.device.stream(): self.device.record()}
        return buffer

    def reserve(self) -> None:
        """Reserve the device memory of all buffers, unless that was done.

        Raises DeviceError, with nothing reserved, if the device has less memory than the plan takes.
        """
        if self._memory is not None or not self._lines:
            return
        try:
            self._memory = self.device.reserve(self.plan.weights_bytes)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{self.device.torch_device} has no room for the buffers of weights ({self.plan.weights_bytes} bytes): "
                f"another process may use it; lower device_memory or free the device\n{self.plan.table()}"
            ) from error
        address = self._memory.data_ptr()
        for line in self._lines:
            nbytes = line.total // line.count
            made = [Buffer(address + nbytes * number, nbytes) for number in range(line.count)]
            address += nbytes * line.count
            if line is self.plan.blocks:
                self.blocks += made
            else:
                self.buffers[nbytes] += made
        # The memory may have been another tensor's, and computation with that tensor may be under
        # way.
        before = {self.device.stream(): self.device.record()}
        for buffer in self.all:
            buffer.last_uses = dict(before)

    def use(self, buffer: Buffer) -> torch.Tensor:
        """Begin a use of a buffer and return its bytes (uint8); the use ends when no tensor refers to them."""
        # An ordinary tensor in inference mode too: the parameters that show its bytes count writes.
        with torch.inference_mode(False):
            return self.device.view(Occupancy(self, buffer))

    def leave(self, buffer: Buffer) -> None:
        """End a use of `buffer`. With the last one, computation on every stream that had one has to end."""
        if buffer.users == 1 and not self.closed:
            # If recording fails, the buffer stays in use, because the end of the computation is
            # unknown.
            for stream in sorted(buffer.using):
                buffer.last_uses[stream] = self.device.record(stream)
            buffer.using.clear()
        buffer.users -= 1
        self.give_back(buffer)

    def give_back(self, buffer: Buffer) -> None:
        """Give the memory of a buffer beyond the plan back, if nothing uses it any more."""
        if buffer.memory is not None and buffer.unit is None and not buffer.users:
            self._on_freed(buffer.address)
            buffer.memory = None

    def free(self) -> None:
        """Give the memory back, at once or with the last tensor that refers to it."""
        if not self.in_use:
            self._memory = None
        self.buffers.clear()
        self.blocks.clear()
