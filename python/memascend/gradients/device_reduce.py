"""Gradients that a device makes, on their way to the other ranks: each is copied into a buffer for sending.

The sums are made on the CPU, from the pieces of all ranks, as accumulated gradients are there in one process. Gathering
and adding on the device by NCCL would spare the host's memory the bytes of other ranks; without several devices, no
test could show that this is right.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.gradients.leaving import LeavingGradients
from memascend.gradients.reduce import ReducedGradients, trained_places
from memascend.hardware.pinned import empty_pinned
from memascend.layout.division import part_of, sent_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend._memascend import CudaEvent
    from memascend.hardware.cuda import ComputeDevice
    from memascend.layout.units import ParameterEntry, Unit


class _Copy(NamedTuple):
    """A `DeviceToHostCopy` that ends with an event."""

    done: CudaEvent

    def copied(self) -> bool:
        """Return whether the device memory is no longer read."""
        return self.done.is_done()

    def wait_copied(self) -> None:
        """Wait until the device memory is no longer read."""
        self.done.wait()


class DeviceReducedGradients(ReducedGradients):
    """Joins, in host memory, gradients that a device makes.

    A gradient of the unit that the backward pass uses is copied as soon as it is made, while the device goes on, to
    where its pieces are sent from: page-locked memory for the gradients of one unit, in the order of the ranks and then
    of the parameters. Other gradients wait on the device until their unit is exchanged.
    """

    def __init__(self, *args: Any, device: ComputeDevice, in_flight_bytes: int, allocator: str) -> None:
        """Join gradients as `ReducedGradients` does.

        Gradients on their way from `device` take about `in_flight_bytes` there at most; `allocator` makes the memory
        that they are copied to.
        """
        super().__init__(*args)
        self.device = device
        self.leaving = LeavingGradients(self.timeline, in_flight_bytes)
        #: For each unit: where the piece of each rank and parameter begins that may have a gradient.
        self._begins: dict[Unit, dict[tuple[int, ParameterEntry], int]] = {}
        nbytes = max(map(self._lay_out, self._units), default=0)
        with self.device.current():  # CUDA would make a context on another one.
            #: The pieces of one unit's gradients: (bytes,) of uint8.
            self._sent = empty_pinned(nbytes, torch.uint8, allocator=allocator)
        #: Gradients that are there or on their way, and the end of the copy.
        self._coming: dict[ParameterEntry, CudaEvent] = {}
        #: Gradients that wait on the device, and the event at which each is computed.
        self._waiting: dict[ParameterEntry, tuple[torch.Tensor, CudaEvent]] = {}

    def _lay_out(self, unit: Unit) -> int:
        """Place the pieces of a unit's gradients, and return their bytes."""
        begins, end = self._begins.setdefault(unit, {}), 0
        for rank in range(self.ranks.size):
            for place in trained_places(unit):
                begins[rank, place] = end
                end += sent_bytes(place, rank)
        return end

    def _keep_new(self, place: ParameterEntry, gradient: torch.Tensor) -> None:
        gradient = gradient.contiguous()
        self._new[place] = None
        self._waiting[place] = gradient, self.device.record()
        if place.tensor.unit is self._used:
            self._begin(place)

    def _begin(self, place: ParameterEntry) -> None:
        """Start copying a gradient from the device, of the only unit whose gradients are in `_sent`."""
        assert self.device.link is not None, "the session is open"
        gradient, computed = self._waiting.pop(place)
        begins = self._begins[place.tensor.unit]
        parts = []
        for rank in range(self.ranks.size):
            first, _, count = part_of(place, rank)
            if count:
                source = gradient.data_ptr() + first * gradient.itemsize
                parts.append((source, count * gradient.itemsize, self._sent.data_ptr() + begins[rank, place]))
        done = self.device.link.download(parts, computed)
        self._coming[place] = done
        self.leaving.hold(_Copy(done), computed, (gradient,))

    def _pack(self, places: Sequence[ParameterEntry]) -> torch.Tensor:
        for place in places:
            if place in self._waiting:
                self._begin(place)
        self._wait_there(places)
        end, sent = 0, set(places)
        for (rank, place), begin in self._begins[places[0].tensor.unit].items() if places else ():
            if place in sent:
                if begin != end:
                    # A parameter before it has no gradient here.
                    address = self._sent.data_ptr()
                    ctypes.memmove(address + end, address + begin, sent_bytes(place, rank))
                end += sent_bytes(place, rank)
        for place in places:
            del self._new[place]
        return self._sent[:end]

    def _wait_there(self, places: Sequence[ParameterEntry]) -> None:
        """Wait until the gradients of `places` can be sent."""
        with self.timeline.waiting("d2h"):
            for place in places:
                self._coming.pop(place).wait()
        self.leaving.drop_copied()

    def wait_copied(self) -> None:
        """Wait until no gradient is on its way from the device."""
        self.leaving.wait()

    def close(self) -> None:
        """Wait until no copy reads the device, and give the memory of the copies back."""
        super().close()
        self.leaving.close()
        self._sent = self._sent.new_empty(0)
