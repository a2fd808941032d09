"""The simulated streams: late where they may be, and a wait that is left out is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from simulated_streams import alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.core


# ---- streams ------------------------------------------------------------------------------------------------


def test_a_copy_runs_at_once_or_when_it_is_waited_for(cudart: Path) -> None:
    script = """
stream = Stream()
stream.copy(target, source)
assert target.raw == source.raw and fake.get("pending") == 0
assert stream.record().is_done()

fake.set("lazy", 1)
stream.copy(target, other)
assert target.raw == source.raw and fake.get("pending") == 1
done = stream.record()
stream.copy(source, other)
done.wait()
assert target.raw == other.raw and fake.get("syncs") == 1
assert source.raw == b"s" * 64 and fake.get("pending") == 1, "more ran than was waited for"
done.wait()
assert done.is_done() and fake.get("syncs") == 1
late = stream.record()
wait(COMPUTE, late)
assert source.raw == other.raw and fake.get("pending") == 0
last = memory(b"u")
stream.copy(target, last)
fake.set("lazy", 0)
assert target.raw == last.raw, "the end of being lazy leaves something undone"
assert (fake.get("h2d_copies"), fake.get("h2d_bytes"), fake.get("d2h_copies")) == (4, 256, 0)
assert fake.get("pageable_copies") == 4
del stream, done, late
fake.assert_clean()
"""
    alone(script, cudart)


def test_a_stream_that_sleeps_is_not_done_until_it_is_waited_for(cudart: Path) -> None:
    script = """
before, stream, other = Event(COMPUTE), Stream(), Stream()
cuda.fake_sleep(ctypes.c_void_p(COMPUTE))
after = Event(COMPUTE)
assert before.is_done()
assert not after.is_done() and not after.is_done(), "asking woke it"
stream.wait(after)
behind = stream.record()
assert not behind.is_done(), "a stream that waits for one that sleeps is done"
assert other.record().is_done()
behind.wait()
assert after.is_done() and Event(COMPUTE).is_done()
del before, after, behind, stream, other
fake.assert_clean()
"""
    alone(script, cudart)


def test_copies_are_left_out(cudart: Path) -> None:
    script = """
stream = Stream()
for skip, expected in ((0, "sss"), (2, "sts"), (2**64 - 1, "ttt")):
    fake.set("skip_copy", skip)
    found = ""
    for number in range(3):
        target = memory(b"t")
        stream.copy(target, source)
        found += target.raw[:1].decode()
    assert found == expected, (skip, found)
fake.set("skip_copy", 0)
stream.copy(target, source)
assert target.raw == source.raw
stream.record().wait()
del stream
"""
    alone(script, cudart)


def test_waiting_runs_what_is_needed_in_other_streams(cudart: Path) -> None:
    script = """
fake.set("lazy", 1)
streams = [Stream() for _ in range(3)]
memories = [memory(b"%d" % number) for number in range(4)]
events = []
for number, stream in enumerate(streams):
    if events:
        stream.wait(events[-1])
    stream.copy(memories[number + 1], memories[number])
    events.append(stream.record())
# A wait is for what the event had marked then, and an event may be gone before what waits for it.
events[0].record(streams[2].handle)
del events[1:2]
assert [memory[0] for memory in memories] == [b"0", b"1", b"2", b"3"]
events[-1].wait()
assert [memory[0] for memory in memories] == [b"0"] * 4
assert fake.get("pending") == 1, "the record without a waiter"
del events, streams, stream
fake.assert_clean(early_reuses=1)
"""
    alone(script, cudart)


@pytest.mark.parametrize("lateness", [0, 20])
def test_asking_goes_on_in_an_order_that_the_seed_chooses(cudart: Path, lateness: int) -> None:
    script = f"""
lateness = {lateness}
fake.set("lazy", 1)
fake.set("lateness", lateness)

def order(seed):
    fake.set("seed", seed)
    streams = [Stream() for _ in range(3)]
    targets = [memory(b"-") for _ in streams]
    for stream, to in zip(streams, targets):
        stream.copy(to, source)
    events = [stream.record() for stream in streams]
    seen, asked = [], 0
    while not all([event.is_done() for event in events]):
        asked += 1
        assert asked < 1000, "it does not end"
        seen += [number for number, to in enumerate(targets) if to.raw == source.raw and number not in seen]
        assert asked * len(events) > lateness or not seen, "it ran too early"
    return tuple(seen)

orders = [order(seed) for seed in range(20)]
assert orders == [order(seed) for seed in range(20)], "the seed does not decide"
assert len(set(orders)) > 2, orders

# The computing stream's events are late too, as are those of streams that run at once.
# They are not late for a stream that has waited for them already.
fake.set("lazy", 0)
stream, to = Stream(), memory(b"-")
stream.copy(to, source)
done = stream.record()
assert to.raw == source.raw and done.is_done() == (lateness == 0)
del stream, done
access(source, write=False)
first = Event(COMPUTE)
assert first.is_done() == (lateness == 0)
second = Event(COMPUTE)
second.wait()
assert first.is_done() and second.is_done()
del first, second
fake.assert_clean()
"""
    alone(script, cudart)


def test_misuse_is_counted_and_said(cudart: Path) -> None:
    script = """
fake.set("lazy", 1)
seen = 0

def misused(says):
    global seen
    assert fake.get("misuses") == seen + 1, fake.text("misuse")
    seen += 1
    assert says in fake.text("misuse").splitlines()[-1], fake.text("misuse")

# Host memory goes while a copy uses it, and after one that the host does not know to be done.
stream, there = Stream(), memory(b" ", 4096)
for known in (True, False):
    pinned = ctypes.c_void_p()
    assert call("cudaHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(4096), ctypes.c_uint(1))
    host = (ctypes.c_char * 4096).from_address(pinned.value)
    host.value = b"new"
    stream.copy(there, host)
    done = stream.record()
    wait(COMPUTE, done)
    if known:
        done.wait()
    call("cudaFreeHost", pinned.value)
    if not known:
        misused("cudaFreeHost: the host does not know that a copy to the device")
assert fake.get("pageable_copies") == 0 and fake.get("pending") == 0

# The second device's streams take none of the first's events.
assert call("cudaSetDevice", ctypes.c_int(1)) and cuda.cudaSetDevice(ctypes.c_int(2)) == 101
device = ctypes.c_int()
assert call("cudaGetDevice", ctypes.byref(device)) and device.value == 1
elsewhere = Stream()
elsewhere.record()
call("cudaSetDevice", ctypes.c_int(0))
event = Event()
assert cuda.cudaEventRecord(ctypes.c_void_p(event.handle), ctypes.c_void_p(elsewhere.handle)) == 400
misused("cudaSetDevice was left out")

gone = elsewhere.handle
del elsewhere
assert cuda.cudaStreamWaitEvent(ctypes.c_void_p(gone), ctypes.c_void_p(event.handle), 0) == 400
misused("cudaStreamWaitEvent")
assert cuda.cudaStreamDestroy(ctypes.c_void_p(gone)) == 400
misused("cudaStreamDestroy")
blocking = make("cudaStreamCreateWithFlags", 0)
misused("cudaStreamCreateWithFlags")
call("cudaStreamDestroy", blocking)

free, total = ctypes.c_size_t(), ctypes.c_size_t()
fake.set("device_memory", 5 * MIB)
call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
assert free.value == total.value == 5 * MIB
cuda.cudaGetLastError()
"""
    alone(script, cudart)


# ---- races --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [0, 1])
def test_what_no_wait_orders_is_a_race(cudart: Path, lazy: int) -> None:
    script = f"""
fake.set("lazy", {lazy})
up, down = Stream(), Stream()

# A copy and what is computed from it.
up.copy(target, source)
wait(COMPUTE, up.record())
access(target, write=False)
assert raced() == 0
up.copy(target, source)
assert raced() == 1, "it was read still"
assert "a copy to the device" in fake.text("race") and "an access (stream 0" in fake.text("race"), fake.text("race")
up.wait(Event(COMPUTE))
up.copy(target, source)
assert raced() == 0
access(target, write=False, offset=63)
assert raced() == 1, "one byte is enough"

# Reading at once is no race, writing is; bytes beside it are none of it.
up.wait(Event(COMPUTE))
up.copy(other, source)
down.wait(up.record())
wait(COMPUTE, up.record())
down.copy(target, other, 2)
raced()
access(other, write=False)
assert raced() == 0
access(other, write=True)
assert raced() == 1

# Order goes through streams, and through the host.
relay = Stream()
relay.wait(down.record())
wait(COMPUTE, relay.record())
access(target, write=True)
assert raced() == 0
for ask in (False, True):
    down.wait(Event(COMPUTE))
    down.copy(target, other, 2)
    access(target, write=False, nbytes=8)
    assert raced() == 1, "the host knows what it did not ask for"
    down.wait(Event(COMPUTE))
    down.copy(target, other, 2)
    done = down.record()
    if ask:
        while not done.is_done():
            pass
    else:
        done.wait()
    access(target, write=True)
    assert raced() == 0

# What one access covers of another, the rest of that one still counts for.
up.wait(Event(COMPUTE))
up.copy(target, source)
done = up.record()
middle = (ctypes.c_char * 16).from_buffer(target, 24)
up.copy(middle, (ctypes.c_char * 16).from_buffer(source))
wait(COMPUTE, done)
access(target, write=False, nbytes=24)
access(target, write=False, offset=40)
assert raced() == 0
access(target, write=False, nbytes=25)
assert raced() == 1

# The next stream in a destroyed one's place is not taken for it.
handle = up.handle
del up
again = Stream()
assert again.handle != handle
Event(COMPUTE).wait()
again.copy((ctypes.c_char * 8).from_buffer(target, 30), (ctypes.c_char * 8).from_buffer(source))
assert raced() == 1
again.record().wait()
place = again.handle
del again
assert Stream().handle == place, "the host knows that nothing goes on there"
"""
    alone(script, cudart)


def test_a_wait_is_left_out_and_no_other(cudart: Path) -> None:
    script = """
fake.set("lazy", 1)

def run(skip):
    first, sources, found = fake.get("waits"), [memory(value) for value in (b"1", b"2", b"3")], []
    access(target, write=True)
    target[:] = b"t" * 64
    fake.set("skip_wait", skip)
    stream = Stream()
    for new in sources:
        stream.wait(Event(COMPUTE))
        stream.copy(target, new)
        done = stream.record()
        wait(COMPUTE, done)
        access(target, write=False)
        found.append((target.raw == new.raw, raced()))
        wait(COMPUTE, done)
    done.wait()
    redundant = [fake.wait_was_redundant(number) for number in range(first + 1, fake.get("waits") + 1)]
    return found, redundant

USEFUL = [False, False, True] * 3
assert run(0) == ([(True, 0)] * 3, USEFUL)
for skip in range(1, 10):
    found, redundant = run(skip)
    number, which = divmod(skip - 1, 3)
    expected = [(True, 0)] * 3
    if which == 0:
        # The copy may come before what is computed: the clocks know, though values do not.
        expected[number] = (True, 1)
    elif which == 1:
        expected[number] = (False, 1)
        # The wait after it orders what it would have.
        assert not redundant.pop(3 * number + 2)
        redundant.insert(3 * number + 2, True)
    assert (found, redundant) == (expected, USEFUL), (skip, found, redundant)

# A wait of the host's, left out: it reads what is not there yet.
stream = Stream()
for skip in (0, 1, 2):
    fake.set("skip_sync", skip)
    for number, new in enumerate((memory(b"4"), memory(b"5"))):
        stream.copy(target, new, 2)
        done = stream.record()
        done.wait()
        assert (target.raw == new.raw) == (number + 1 != skip), (skip, number)
        Event(stream.handle).wait()
        fake.set("skip_sync", skip - number - 1 if skip > number + 1 else 0)
"""
    alone(script, cudart)


def test_a_wait_is_used_where_it_orders_what_would_race(cudart: Path) -> None:
    script = """
up, down, relay = Stream(), Stream(), Stream()

def used():
    first, used.seen = used.seen, fake.get("waits")
    return [fake.wait_was_used(number) for number in range(first + 1, used.seen + 1)]
used.seen = 0

# The second wait comes too late to be of use, and the third is for bytes that are not read.
up.copy(target, source)
done = up.record()
wait(COMPUTE, done)
wait(COMPUTE, done)
access(target, write=False, nbytes=1)
up.copy(other, source)
wait(COMPUTE, up.record())
access(source, write=False)
assert used() == [True, False, False]
# The third wait is of use as soon as the bytes are read, and so are all waits on the way.
access(other, write=False)
assert fake.wait_was_used(3)
down.copy(target, other, 2)
raced()
down.wait(Event(COMPUTE))
down.copy(target, other, 2)
relay.wait(down.record())
up.wait(relay.record())
assert used() == [True, False, False]
up.copy(other, source)
assert used() == [] and [fake.wait_was_used(number) for number in (4, 5, 6)] == [True, True, True]
assert raced() == 0
# What the host knew before needs no wait.
done = up.record()
done.wait()
wait(COMPUTE, done)
access(other, write=True)
assert used() == [False] and fake.wait_was_redundant(7)
"""
    alone(script, cudart)


def test_the_host_has_to_know_before_it_uses_pinned_memory(cudart: Path) -> None:
    script = """
pinned = ctypes.c_void_p()
call("cudaHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(4096), ctypes.c_uint(1))
host = (ctypes.c_char * 64).from_address(pinned.value + 128)
stream = Stream()
for kind, races in ((1, {False: 0, True: 1}), (2, {False: 1, True: 1})):
    for write, expected in races.items():
        pair = (target, host) if kind == 1 else (host, target)
        access(host, write=True)
        assert raced() == 0, "what is copied afterwards comes after"
        stream.wait(Event(COMPUTE))
        stream.copy(*pair, kind)
        wait(COMPUTE, stream.record())
        access(host, write=write)
        assert raced() == expected, "the computing stream knows, and the host does not"
        stream.record().wait()
        access(host, write=write)
        assert raced() == 0
assert fake.text("race").count("an access (host)") == 3
call("cudaFreeHost", pinned.value)
assert fake.get("misuses") == 0
"""
    alone(script, cudart)
