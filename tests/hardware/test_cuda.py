"""CUDA memory from Python, without a device: against a runtime that really allocates and keeps books."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake_cuda
import faults
import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.core

#: Both allocators that need CUDA.
KIND = ("cuda", "registered")
PREAMBLE = """
import gc, os, re, sys
from pathlib import Path
import torch
import memascend
from fake_cuda import Fake
torch.set_num_threads(1)
MIB = 2**20

def refused(call):
    try:
        call()
    except (memascend.HostMemoryError, memascend.DeviceError) as error:
        return str(error)
    raise AssertionError("it was not refused")

def status_bytes(field):
    line, = (line for line in open("/proc/self/status") if line.startswith(field + ":"))
    return int(line.split()[1]) << 10
"""


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile the fake runtime's variants, each once."""
    built: dict[tuple[str, ...], Path] = {}

    def get(*definitions: str) -> Path:
        if definitions not in built:
            built[definitions] = fake_cuda.build(tmp_path_factory.mktemp("cudart"), *definitions)
        return built[definitions]

    return get


def alone(script: str, cudart: str | Path | None, *words: object) -> str:
    """Run a script in a process of its own, which searches for its CUDA runtime anew; return its output."""
    environment = {fake_cuda.VARIABLE: None if cudart is None else str(cudart)}
    return faults.run_script(PREAMBLE + script, list(map(str, words)), environment)


# ---- pinned tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", KIND)
def test_pinned_tensors_are_exact_zero_and_given_back(runtime: Callable[..., Path], allocator: str) -> None:
    script = """
fake, allocator = Fake(), sys.argv[1]
for huge_pages in (False, True):
    tensor = memascend.empty_pinned((5 * MIB + 1,), torch.uint8, allocator=allocator, huge_pages=huge_pages)
    assert fake.get("last_bytes") == 5 * MIB + 4096 and fake.live() == 1
    assert tensor.data_ptr() == fake.get("last_address"), "the memory is not the one that CUDA knows"
    assert fake.get("last_flags") == 1, "not for every device"
    assert not tensor.any(), "CUDA does not promise zeros, and empty_pinned does"
    view = tensor.fill_(7)[MIB:]
    del tensor
    assert fake.live() == 1 and (view == 7).all(), "a view keeps the memory"
    del view
    assert fake.live() == 0
assert fake.calls({"cuda": "cudaHostAlloc", "registered": "cudaHostRegister"}[allocator]) == 2
assert fake.calls({"cuda": "cudaHostRegister", "registered": "cudaHostAlloc"}[allocator]) == 0

for tensor in (torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last), torch.randn(6, 4).t(), torch.arange(9)):
    pinned = memascend.pin_memory(tensor, allocator=allocator)
    assert fake.live() == 1 and pinned.data_ptr() == fake.get("last_address")
    assert torch.equal(pinned, tensor) and pinned.stride() == torch.empty_like(tensor).stride()
    del pinned
fake.assert_clean()

calls = fake.get("all_calls")
assert memascend.empty_pinned((0, 3), allocator=allocator).shape == (0, 3)
assert fake.get("all_calls") == calls, "nothing was asked for"
"""
    alone(script, runtime(), allocator)


def test_auto_is_pinned_by_cuda_where_cuda_works(runtime: Callable[..., Path]) -> None:
    """In huge pages, which are registered; without them CUDA allocates."""
    script = """
fake, before = Fake(), status_bytes("VmLck")
tensor = memascend.empty_pinned(4 * MIB, torch.uint8)
assert tensor.data_ptr() % (2 * MIB) == 0, "it cannot lie in huge pages"
assert fake.get("live_registrations") == 1 and status_bytes("VmLck") == before
copy = memascend.pin_memory(torch.arange(5))
assert fake.get("live_registrations") == 2 and copy.tolist() == [0, 1, 2, 3, 4]
small_pages = memascend.empty_pinned(4 * MIB, torch.uint8, huge_pages=False)
assert (fake.get("live_registrations"), fake.get("live_allocations")) == (2, 1)
del tensor, copy, small_pages
fake.assert_clean()
"""
    alone(script, runtime())


@pytest.mark.parametrize("allocator", KIND)
def test_memory_that_cuda_has_not_is_an_error_that_leaves_nothing(runtime: Callable[..., Path], allocator: str) -> None:
    script = """
fake, allocator = Fake(), sys.argv[1]
fake.set("limit", 4 * MIB)
kept = memascend.empty_pinned(MIB, torch.uint8, allocator=allocator)
told = refused(lambda: memascend.empty_pinned(8 * MIB, torch.uint8, allocator=allocator))
assert "8388608 bytes" in told and 'allocator="locked"' in told, told
told = refused(lambda: memascend.pin_memory(torch.ones(8 * MIB), allocator=allocator))
assert "33554432 bytes" in told, told
assert fake.live() == 1 and fake.get("pending_error") == 0
memascend.empty_pinned(3 * MIB, torch.uint8, allocator=allocator)
del kept
fake.assert_clean()
"""
    alone(script, runtime(), allocator)


# ---- training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", KIND)
def test_training_is_the_same_to_the_bit(runtime: Callable[..., Path], tmp_path: Path, allocator: str) -> None:
    script = """
import tiny_models
fake, allocator, folder = Fake(), sys.argv[1], Path(sys.argv[2])
traces = {}
for kind in ("pageable", allocator):
    model = tiny_models.build("llama")
    budget = int(1.5 * tiny_models.smallest_budget(model))
    memascend.offload(model, store=folder / kind, host_memory=budget, allocator=kind, huge_pages=kind != "pageable")
    stats = memascend.stats(model)
    assert stats["host_allocator"] == kind, stats
    assert fake.live() == (kind == allocator), "one arena"
    if kind == allocator:
        assert fake.get("last_bytes") == stats["host_bytes_reserved"]
    traces[kind] = tiny_models.train(model, "llama", steps=2)
    memascend.close(model)
    assert not (folder / kind).exists()
    # What autograd's graphs still hold may only now let go of the arena.
    del model
    gc.collect()
    fake.assert_clean()
tiny_models.assert_same(traces[allocator], traces["pageable"])
"""
    alone(script, runtime(), allocator, tmp_path)


@pytest.mark.parametrize("allocator", KIND)
def test_an_arena_that_cuda_has_not_leaves_model_and_drive_as_they_were(
    runtime: Callable[..., Path], tmp_path: Path, allocator: str
) -> None:
    script = """
import tiny_models
fake, allocator, store = Fake(), sys.argv[1], Path(sys.argv[2]) / "store"
model = tiny_models.build("llama")
before = {name: value.detach().clone() for name, value in model.named_parameters()}
fake.set("limit", MIB)
offload = lambda: memascend.offload(model, store=store, host_memory="64MiB", allocator=allocator)
told = refused(offload)
assert f"{fake.get('last_bytes')} bytes" in told and fake.get("last_bytes") > MIB, told
assert "lower host_memory" in told and 'allocator="locked"' in told, told
fake.assert_clean()
assert not store.exists() and "_memascend" not in model.__dict__
tiny_models.assert_same_weights({name: value.detach() for name, value in model.named_parameters()}, before)

told = refused(lambda: memascend.AdamW(model.parameters(), store=store, allocator=allocator))
assert "lower host_memory" in told, told
fake.assert_clean()
assert not store.exists()

fake.set("limit", 64 * MIB)
offload()
assert fake.live() == 1
memascend.close(model)
fake.assert_clean()
"""
    alone(script, runtime(), allocator, tmp_path)


def test_auto_leaves_cuda_alone_in_training(runtime: Callable[..., Path], tmp_path: Path) -> None:
    script = """
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(torch.bfloat16)
memascend.offload(model, store=sys.argv[1], host_memory="64MiB")
assert memascend.stats(model)["host_allocator"] in ("locked", "pageable"), memascend.stats(model)
memascend.close(model)
assert Fake().get("all_calls") == 0
"""
    alone(script, runtime(), tmp_path / "store")


# ---- no CUDA to be had --------------------------------------------------------------------------------------

#: fault -> (definitions of the fake runtime, or none of it; the error's text)
UNUSABLE: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...]]] = {
    "no device": (("FAKE_DEVICES=0",), ("no CUDA device", "CUDA_VISIBLE_DEVICES", "libcudart")),
    "devices hidden": (("FAKE_COUNT_ERROR=100",), ("no CUDA device", "CUDA_VISIBLE_DEVICES", "libcudart")),
    "too old": (("FAKE_VERSION=11080",), ("CUDA runtime 11.8", "needs 12 or 13", "MEMASCEND_CUDART")),
    "too new": (("FAKE_VERSION=14000",), ("CUDA runtime 14.0", "needs 12 or 13", "MEMASCEND_CUDART")),
    "driver too old": (
        ("FAKE_COUNT_ERROR=35", "FAKE_DRIVER=11040"),
        ("does not fit the CUDA runtime 12.8", "up to 11.4", "update the driver"),
    ),
    "no driver": (("FAKE_COUNT_ERROR=35", "FAKE_DRIVER=0"), ("no driver is loaded", "update the driver")),
    "another library": (("FAKE_WITHOUT_EVENT_QUERY",), ("no function cudaEventQuery", "MEMASCEND_CUDART")),
    "no library": (None, ("/nonexistent/libcudart.so", "MEMASCEND_CUDART", "install PyTorch with CUDA")),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_without_cuda_there_is_a_remedy(runtime: Callable[..., Path], tmp_path: Path, what: str) -> None:
    definitions, says = UNUSABLE[what]
    cudart = "/nonexistent/libcudart.so" if definitions is None else runtime(*definitions)
    script = """
says = [*sys.argv[2:], 'allocator="locked"']
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(torch.bfloat16)
store = Path(sys.argv[1]) / "store"
for allocator in ("cuda", "registered"):
    for call in (
        lambda: memascend.empty_pinned(MIB, torch.uint8, allocator=allocator),
        lambda: memascend.pin_memory(torch.arange(5), allocator=allocator),
        lambda: memascend.offload(model, store=store, host_memory="64MiB", allocator=allocator),
    ):
        told = refused(call)
        assert not [word for word in says if word not in told], told
    assert not store.exists() and "_memascend" not in model.__dict__

before = status_bytes("VmLck")
tensor = memascend.empty_pinned(MIB, torch.uint8, allocator="auto")
assert status_bytes("VmLck") - before == MIB, "auto is locked without CUDA"
if Path(os.environ["MEMASCEND_CUDART"]).exists():
    Fake().assert_clean()
"""
    alone(script, cudart, tmp_path, *says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_the_runtime_that_comes_with_torch_says_what_is_missing() -> None:
    script = """
told = refused(lambda: memascend.empty_pinned(MIB, torch.uint8, allocator="cuda"))
assert 'allocator="locked"' in told, told
if torch.version.cuda:
    # The loader may know the library by a path that leads to the same file in another way.
    named = os.path.realpath(re.search(r"/[^\\s();]*libcudart[^\\s();]*", told)[0])
    assert named in {line.split()[-1] for line in open("/proc/self/maps") if "/libcudart" in line}, told
    assert "driver" in told or "no CUDA device" in told, told
tensor = memascend.empty_pinned(MIB, torch.uint8)
assert not tensor.any() and not tensor.is_pinned()
print(told)
"""
    assert "libcudart" in alone(script, None)


# ---- buffers that a device still uses -----------------------------------------------------------------------

LEASES = """
from memascend._memascend import Runtime, ForTests
from memascend.memory_plan.arena import Arena
fake = Fake()
runtime = Runtime([Path(sys.argv[1])], Arena([("weights", MIB, 1)], [], 65536, 1, 65536, 65536, 1), allocator="cuda")

def free():
    return runtime.memory.lease_unit(MIB) is not None
"""


def test_a_lease_returns_when_its_stream_is_done(runtime: Callable[..., Path], tmp_path: Path) -> None:
    script = """
lease = runtime.memory.lease_unit(MIB)
address = lease.address
tensor = torch.frombuffer(lease, dtype=torch.uint8)
fake.set("busy", 1)
ForTests.return_after(lease, 0x5EA)
assert fake.get("last_stream") == 0x5EA
ForTests.return_after(lease, 0)
assert fake.get("last_stream") == 0 and fake.get("live_events") == 2
del lease
assert not free(), "a tensor holds the buffer"
view = tensor[5:]
del tensor
assert not free(), "a view holds the buffer"
del view
assert not free() and fake.get("live_events") == 2, "the device uses the buffer"
assert fake.get("pending_error") == 0, "not being ready was left as an error"
assert runtime.stats()["host_bytes_in_use"] == 0
fake.set("busy", 0)
lease = runtime.memory.lease_unit(MIB)
assert lease is not None and lease.address == address
assert fake.get("live_events") == 0
# The next use of the buffer has nothing to wait for.
fake.set("busy", 1)
del lease
assert free()
fake.set("busy", 0)
# A stream that is done before the tensor dies keeps nothing.
lease = runtime.memory.lease_unit(MIB)
ForTests.return_after(lease, 1)
del lease
assert free()
runtime.close(False)
del runtime
fake.assert_clean()
"""
    alone(LEASES + script, runtime(), tmp_path / "store")


def test_a_stream_that_failed_keeps_the_buffer_and_says_why(runtime: Callable[..., Path], tmp_path: Path) -> None:
    script = """
lease = runtime.memory.lease_unit(MIB)
for call in ("cudaEventCreateWithFlags", "cudaEventRecord"):
    fake.fail(call, 719)
    told = refused(lambda: ForTests.return_after(lease, 1))
    assert call in told and "cudaErrorLaunchFailure" in told, told
fake.fail("", 0)
assert fake.get("live_events") == 0
del lease
assert free(), "no event was recorded"

lease = runtime.memory.lease_unit(MIB)
ForTests.return_after(lease, 1)
del lease
fake.fail("cudaEventQuery", 719)
told = refused(free)
assert "cudaEventQuery" in told and "unspecified launch failure" in told, told
runtime.close(False)
del runtime
fake.fail("", 0)
# The device may still use the arena, which is better lost than freed.
assert (fake.get("live_allocations"), fake.get("live_events"), fake.get("misuses")) == (1, 0, 0)
"""
    alone(LEASES + script, runtime(), tmp_path / "store")


def test_waiting_for_a_stream_needs_cuda(tmp_path: Path) -> None:
    script = """
from memascend._memascend import Runtime, ForTests
from memascend.memory_plan.arena import Arena
arena = Arena([("weights", MIB, 1)], [], 65536, 1, 65536, 65536, 1)
runtime = Runtime([Path(sys.argv[1])], arena, allocator="pageable")
lease = runtime.memory.lease_unit(MIB)
told = refused(lambda: ForTests.return_after(lease, 0))
assert "/nonexistent/libcudart.so" in told, told
del lease
assert runtime.memory.lease_unit(MIB) is not None
runtime.close(False)
"""
    alone(script, "/nonexistent/libcudart.so", tmp_path / "store")
