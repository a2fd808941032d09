"""Tensors of devices in host memory: the piece of memory that they share is free when it is used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from memascend.optim import host_copies
from memascend.optim.host_copies import HostCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class OnFirst(torch.Tensor):
    """A tensor that says that it is on a device."""

    at = torch.device("cuda", 0)

    @property
    def device(self) -> torch.device:
        return self.at


class OnSecond(OnFirst):
    """A tensor that says that it is on another device."""

    at = torch.device("cuda", 1)


class Streams:
    """Copies to the devices, which run when a device is waited for."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.device, Callable[[], object]]] = []

    def enqueue(self, device: torch.device, copy: Callable[[], object]) -> None:
        self._waiting.append((device, copy))

    def finish(self, items: Sequence[Sequence[torch.Tensor]]) -> None:
        devices = host_copies._devices(items)
        for device, copy in [each for each in self._waiting if each[0] in devices]:
            copy()
            self._waiting.remove((device, copy))


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        ((OnFirst, OnSecond), (32, 32)),
        ((OnFirst, OnSecond, OnFirst), (20, 32, 17)),
        ((OnSecond, torch.Tensor, OnFirst), (32, 32, 32)),
        ((OnFirst, OnSecond, OnFirst), (32, 16, 16)),
        ((OnFirst, OnFirst, OnSecond), (32, 48, 32)),
    ],
)
def test_a_copy_to_one_device_has_ended_before_another_uses_the_memory(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[Any, ...], sizes: tuple[int, ...]
) -> None:
    streams = Streams()
    monkeypatch.setattr(host_copies, "_finish", streams.finish)
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 2 * host_copies.ALIGNED_BYTES)
    values = [torch.full((size,), float(number)) for number, size in enumerate(sizes, 1)]
    tensors = [value.clone().as_subclass(kind) for value, kind in zip(values, kinds, strict=True)]
    numbers = iter(range(len(tensors)))
    for group in HostCopies().groups([(tensor,) for tensor in tensors]):
        for (copy,) in group:
            target = tensors[next(numbers)]
            copy *= 10
            streams.enqueue(target.device, lambda target=target, copy=copy: target.copy_(copy))
    for value, tensor in zip(values, tensors, strict=True):
        if tensor.device.type != "cpu":
            assert torch.equal(tensor.as_subclass(torch.Tensor), 10 * value)
