"""The simulated streams and device: late where they may be, and a wait that is left out is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from simulated_streams import alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.core


# ---- the device ---------------------------------------------------------------------------------------------

DEVICE = """
import gc, threading
import torch
from types import SimpleNamespace
from simulated_device import Accesses, SimulatedDevice
torch.set_num_threads(1)
torch.manual_seed(5)
device = SimulatedDevice(total=7 * MIB)

class Bytes:
    # The bytes of a tensor, as the scripts take memory.
    def __init__(self, tensor):
        self.tensor = tensor

    def __len__(self):
        return self.tensor.nbytes

def address(memory):
    return memory.tensor.data_ptr() if isinstance(memory, Bytes) else ctypes.addressof(memory)
"""


def test_accesses_are_seen_in_forward_and_backward(cudart: Path) -> None:
    script = """
fake.set("lazy", 1)
stream = Stream()
new, buffer = torch.randn(2, 8, 8), torch.zeros(8, 8)

def step(forward_waits, backward_waits):
    # One buffer holds the weight of the forward pass, then that of the backward pass.
    stream.wait(Event(COMPUTE))
    stream.copy(Bytes(buffer), Bytes(new[0]))
    arrived = stream.record()
    x = torch.ones(4, 8, requires_grad=True)
    with Accesses(fake):
        if forward_waits:
            wait(COMPUTE, arrived)
        y = x @ buffer
        forward = raced()
        stream.wait(Event(COMPUTE))
        stream.copy(Bytes(buffer), Bytes(new[1]))
        arrived = stream.record()
        assert raced() == 0
        if backward_waits:
            wait(COMPUTE, arrived)
        y.sum().backward()
    backward = raced()
    right = torch.equal(x.grad, torch.ones(4, 8) @ new[1].t()) and torch.equal(y.detach(), torch.ones(4, 8) @ new[0])
    arrived.wait()
    stream.wait(Event(COMPUTE))
    return forward, backward, right

assert step(True, True) == (0, 0, True)
assert step(False, True) == (1, 0, False)
assert step(True, False) == (0, 1, False)
assert fake.text("race").count("aten.mm.default") == 2, fake.text("race")
"""
    alone(DEVICE + script, cudart)


def test_what_an_operation_reads_and_writes(cudart: Path) -> None:
    script = """
stream, beside = Stream(), memory(b" ", 64)

def accesses(operation, tensor):
    # A copy from the tensor races with what writes to it, a copy into it with whatever uses it.
    found = set()
    for kind in ("writes", "uses"):
        if kind == "writes":
            stream.copy(beside, Bytes(tensor), 2)
        else:
            stream.copy(Bytes(tensor), beside)
        with Accesses(fake):
            operation(tensor)
        if raced():
            found.add(kind)
        stream.record().wait()
        Event(COMPUTE).wait()
    return found

def fresh():
    return torch.randn(4, 4)

for expected, operations in (
    ([], (
        lambda t: t.view(2, 8).t().expand(3, 8, 2)[1].unsqueeze(0).detach(),
        lambda t: t.split(2),
        lambda t: torch.ops.aten._unsafe_view(t, (16,)),
        lambda t: torch.empty_like(t).shape,
        lambda t: torch.zeros_like(t),
        lambda t: t.new_full((3,), 7.0),
        lambda t: t.reshape(16).data_ptr(),
    )),
    (["uses"], (
        lambda t: t @ fresh(),
        lambda t: t.t().contiguous(),
        lambda t: torch.cat([fresh(), t]),
        lambda t: fresh().copy_(t),
        lambda t: t[1].sum().item(),
        lambda t: torch._foreach_mul([fresh(), t], 2.0),
        lambda t: torch.add(fresh(), t, out=fresh()),
        lambda t: torch.nn.functional.scaled_dot_product_attention(*[t.view(1, 1, 4, 4)] * 3),
    )),
    (["writes", "uses"], (
        lambda t: t.add_(1.0),
        lambda t: t[2].zero_(),
        lambda t: t.copy_(fresh()),
        lambda t: torch._foreach_add_([fresh(), t], 1.0),
        lambda t: torch.add(fresh(), fresh(), out=t),
    )),
):
    for number, operation in enumerate(operations):
        assert accesses(operation, fresh()) == set(expected), (expected, number, fake.text("race"))

# A result is written, where there is one, and memory that is allocated.
for operation, expected in ((torch.exp, 1), (torch.ones_like, 1), (lambda t: t.view(2, 8), 0), (torch.empty_like, 1)):
    given = fresh()
    with Accesses(fake):
        result = operation(given)
    stream.copy(Bytes(result), beside)
    assert raced() == expected, fake.text("race")
    stream.record().wait()
    Event(COMPUTE).wait()
"""
    alone(DEVICE + script, cudart)


def test_a_view_of_a_buffer_holds_its_owner(cudart: Path) -> None:
    script = """
left = []

class Owner:
    def __init__(self, memory):
        self.buffer = SimpleNamespace(address=memory.data_ptr(), nbytes=memory.nbytes)

    def __del__(self):
        left.append(self.buffer.address)

memory = torch.zeros(MIB, dtype=torch.uint8)
view = device.view(Owner(memory))
assert view.shape == (MIB,) and view.dtype == torch.uint8 and view.data_ptr() == memory.data_ptr()
view[5] = 7
assert memory[5] == 7 and not left
weight = view[: 4 * 64].view(torch.float32).view(8, 8).requires_grad_()
del view
loss = (torch.ones(8, 8, requires_grad=True) @ weight).sum()
del weight
gc.collect()
assert not left, "the graph refers to the bytes"
# The last to let go may be any thread.
held = [loss]
del loss
thread = threading.Thread(target=held.clear)
thread.start()
thread.join()
assert left == [memory.data_ptr()]

assert device.memory() == (7 * MIB, 7 * MIB) and device.index == 0 and device.stream() == COMPUTE
assert device.random_state() is None
device.release()
assert device.limited is None
"""
    alone(DEVICE + script, cudart)


def test_block_sums_add_up_to_what_a_capture_measures(cudart: Path) -> None:
    script = """
from memascend._memascend import gradient_stats
names = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
stream = Stream()
for dtype, name in names.items():
    for numel in (1, 65_536, 65_537, 200_003):
        for spoilt in (False, True):
            gradient = torch.randn(numel).to(dtype)
            if spoilt:
                gradient[numel // 2] = float("inf")
            sums = device.block_sums(gradient)
            place, count = sums.addresses
            assert place == sums.memory.data_ptr() and count == -(-numel // 65_536)
            total = 0.0
            for value in (ctypes.c_double * count).from_address(place):
                total += value
            flag = ctypes.c_uint32.from_address(place + 8 * count).value
            assert (total, bool(flag)) == gradient_stats(name, numel, gradient.data_ptr()), (dtype, numel, spoilt)
            assert spoilt == bool(flag)
assert device.block_sums(torch.empty(0)) is None

stream.copy(memory(b" ", 8 * (count + 1)), Bytes(sums.memory), 2)
assert raced() == 1, "the sums are computed on the device"
wait_for = Event(COMPUTE)
stream.wait(wait_for)
stream.copy(Bytes(gradient), Bytes(gradient.clone()))
assert raced() == 0
device.block_sums(gradient)
assert raced() == 1, "the gradient is read"
"""
    alone(DEVICE + script, cudart)
