"""A program that computes on two streams: a copy into a buffer waits for both to finish with its bytes."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
from fake_cuda import VARIABLE

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import fake_cuda
    import torch
    from torch import nn

    from memascend.layout.units import Unit


@pytest.fixture
def side(fake: fake_cuda.Fake) -> Iterator[int]:
    """A stream beside the default one."""
    cuda = ctypes.CDLL(os.environ[VARIABLE])
    stream = ctypes.c_void_p()
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), ctypes.c_uint(1)) == 0
    assert stream.value is not None
    yield stream.value
    fake.set("computing", 0)
    assert cuda.cudaStreamDestroy(stream) == 0


class Uses:
    """Uses of units' bytes on the device, each on a stream of its own."""

    def __init__(self, model: nn.Module, fake: fake_cuda.Fake) -> None:
        self.streamer: Any = memascend.offload_of(model).streamer
        self.fake = fake

    def of(self, unit: Unit, stream: int) -> torch.Tensor:
        """Begin a use, and read all bytes."""
        self.fake.set("computing", stream)
        bytes_of_unit = self.streamer.memory.bring(unit)
        self.fake.access(bytes_of_unit.data_ptr(), unit.nbytes, False, "a use")
        return bytes_of_unit


@pytest.mark.parametrize("order", ["at once", "at once, the other first", "one after the other"])
@pytest.mark.parametrize("default_first", [True, False])
def test_a_copy_into_a_buffer_waits_for_both(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, side: int, order: str, default_first: bool
) -> None:
    fresh = tiny_models.build("llama")
    # One buffer, which units take by turns.
    model = on_device(fresh, device_memory=tiny_models.smallest_device_budget(fresh))
    uses = Uses(model, fake)
    one, other, *_ = (unit for unit in memascend.offload_of(model).units if unit.repeated)
    streams = (0, side) if default_first else (side, 0)
    addresses = set()
    for unit in (one, other, one):
        held = [uses.of(unit, streams[0])]
        addresses.add(held[0].data_ptr())
        if order == "one after the other":
            held.clear()
        held.append(uses.of(unit, streams[1]))
        while held:
            held.pop(-1 if order == "at once, the other first" else 0)
    assert len(addresses) == 1, "the units do not share a buffer"
    assert fake.get("races") == 0, fake.text("race")


def test_a_use_on_either_stream_waits_for_the_copy(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, side: int
) -> None:
    fresh = tiny_models.build("llama")
    model = on_device(fresh, device_memory=tiny_models.smallest_device_budget(fresh))
    uses = Uses(model, fake)
    one, other, *_ = (unit for unit in memascend.offload_of(model).units if unit.repeated)
    for stream, unit in ((0, one), (side, one), (side, other), (0, other)):
        uses.of(unit, stream)
    assert fake.get("races") == 0, fake.text("race")
