"""The buffers of weights in a device's memory, and the end of each use of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.errors import DeviceError

if TYPE_CHECKING:
    from memascend._memascend import CudaEvent
    from memascend.layout.units import Unit
    from memascend.machine.cuda import ComputeDevice
    from memascend.plan.device import DevicePlan


class Buffer:
    """A piece of the device's memory that serves one unit after another."""

    __slots__ = ("address", "arrived", "last_use", "nbytes", "unit", "users")

    def __init__(self, address: int, nbytes: int) -> None:
        """Begin without contents."""
        self.address = address
        self.nbytes = nbytes
        #: Whose bytes are there or on their way, and when they have arrived.
        self.unit: Unit | None = None
        self.arrived: CudaEvent | None = None
        #: Storages over the bytes that live.
        self.users = 0
        #: Done when what was computed with the bytes so far is; what comes into the buffer next waits for it.
        self.last_use: CudaEvent | None = None


class Occupancy:
    """A storage over a buffer's bytes: the tensors of one use hold it, and its end is the end of that use.

    So a buffer is given to another unit only when the last tensor that refers to it is gone, whoever had it, and what
    is copied there waits for no more than what was computed until then.
    """

    def __init__(self, pool: DevicePool, buffer: Buffer) -> None:
        """Begin a use."""
        self.pool = pool
        self.buffer = buffer
        #: Where it is computed with: the end may come in any thread.
        self.stream = pool.device.stream()
        buffer.users += 1
        #: The protocol by which PyTorch takes over device memory of others, version 3.
        self.__cuda_array_interface__ = {
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        self.pool.leave(self.buffer, self.stream)


class DevicePool:
    """The buffers of a device plan: reserved once, never reallocated."""

    def __init__(self, device: ComputeDevice, plan: DevicePlan) -> None:
        """Prepare for them."""
        self.device = device
        self.plan = plan
        #: Whether there is no link any more that could record events.
        self.closed = False
        #: By their bytes.
        self.buffers: dict[int, list[Buffer]] = {line.total // line.count: [] for line in plan.units if line.count}
        self._memory: list[torch.Tensor] = []

    def reserve(self) -> None:
        """Reserve them.

        Raises DeviceError if the device has not the memory.
        """
        for line in self.plan.units:
            if not line.count:
                continue
            each = line.total // line.count
            try:
                memory = torch.empty(line.total, dtype=torch.uint8, device=self.device.torch_device)
            except torch.OutOfMemoryError as error:
                raise DeviceError(
                    f"{self.device.torch_device} has no room for {line.consumer} ({line.count} x {line.nbytes} bytes): "
                    f"another process may use it; lower device_memory or free the device\n{self.plan.table()}"
                ) from error
            self._memory.append(memory)
            self.buffers[each].extend(Buffer(memory.data_ptr() + each * number, each) for number in range(line.count))
        # The memory may have been another tensor's, which is computed with still.
        before = self.device.record()
        for buffer in (buffer for buffers in self.buffers.values() for buffer in buffers):
            buffer.last_use = before

    def use(self, buffer: Buffer) -> torch.Tensor:
        """Return a buffer's bytes (uint8), for what is computed from now on until nothing refers to them."""
        return self.device.view(Occupancy(self, buffer))

    def leave(self, buffer: Buffer, stream: int) -> None:
        """End a use."""
        if buffer.users == 1 and not self.closed:
            # If it cannot be recorded, the buffer stays in use: nobody knows when it is free.
            buffer.last_use = self.device.record(stream)
        buffer.users -= 1

    def free(self) -> None:
        """Give the memory back; where tensors refer to it still, with the last of them."""
        if not any(buffer.users for buffers in self.buffers.values() for buffer in buffers):
            self._memory.clear()
        self.buffers.clear()
