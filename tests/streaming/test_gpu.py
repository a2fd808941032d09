"""CUDA memory on a real device: torch's view of it, its cost, and when a buffer may be used again."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_models
import torch

import memascend
from memascend import _memascend
from memascend._memascend import ForTests, Runtime
from memascend.common.timeline import span
from memascend.hardware.segments import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, Segments, taken_bytes
from memascend.kernels import launcher
from memascend.memory_plan.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

pytestmark = pytest.mark.gpu
MIB = 2**20
#: Elements of a gradient that are summed together.
BLOCK = 65_536
#: Both allocators that need CUDA.
KIND = ("cuda", "registered")
#: The system may round a mapping up to a huge page, or a page.
SLACK = 2 * MIB + 4096
#: Keeps a stream busy for so long that a wait for the stream shows.
CYCLES = 500_000_000


def status_bytes(*fields: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = dict(line.split(":", 1) for line in lines)
    return sum(int(pairs[field].split()[0]) << 10 for field in fields if field in pairs)


def held_bytes() -> tuple[int, int]:
    """Return the (resident, pinned) bytes of this process: drivers differ in where they count locked ones."""
    return status_bytes("RssAnon", "RssFile", "RssShmem"), status_bytes("VmPin")


def mapped_bytes(address: int, length: int) -> int:
    """Return the bytes of the mappings that a range lies in, whole, whatever kind of memory they are."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        start, end = (int(part, 16) for part in fields[0].split("-"))
        # Addresses that CUDA only reserved have no permissions.
        if start < address + length and address < end and fields[1][:2] == "rw":
            total += end - start
    return total


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """One-time allocations of CUDA are not for a test to count."""
    for allocator in KIND:
        memascend.empty_pinned(MIB, torch.uint8, allocator=allocator).cuda()
    torch.cuda.synchronize()


# ---- pinned tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", [*KIND, "auto"])
def test_torch_takes_it_for_pinned(allocator: str) -> None:
    tensor = memascend.empty_pinned((3, 1000), allocator=allocator)
    assert tensor.is_pinned() and tensor[1:].is_pinned()
    assert not tensor.any()
    copy = memascend.pin_memory(torch.arange(1000), allocator=allocator)
    assert copy.is_pinned() and torch.equal(copy, torch.arange(1000))
    assert memascend.pin_memory(copy) is copy
    assert not memascend.empty_pinned(4, allocator="locked").is_pinned()
    device = torch.arange(1000, device="cuda")
    assert torch.equal(memascend.pin_memory(device, allocator=allocator), device.cpu())


@pytest.mark.parametrize("allocator", KIND)
def test_copies_are_asynchronous(allocator: str) -> None:
    numel = 256 * MIB // 4
    host = memascend.empty_pinned(numel, torch.float32, allocator=allocator)
    torch.arange(numel, dtype=torch.float32, out=host)
    device = torch.empty(numel, device="cuda")
    stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    # A copy from memory that is not pinned would first wait for the stream's pending work.
    torch.cuda._sleep(CYCLES)
    device.copy_(host, non_blocking=True)
    assert not stream.query(), "the copy to the device waited for the stream"
    stream.synchronize()
    assert torch.equal(device, torch.arange(numel, dtype=torch.float32, device="cuda"))

    back = memascend.empty_pinned(numel, torch.float32, allocator=allocator)
    device.neg_()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    back.copy_(device, non_blocking=True)
    assert not stream.query(), "the copy to the host waited for the stream"
    stream.synchronize()
    assert torch.equal(back, -host)


@pytest.mark.parametrize("allocator", KIND)
@pytest.mark.parametrize("nbytes", [100 * MIB + 1, int(4.01 * 2**30)])
def test_memory_costs_its_size_and_is_given_back(allocator: str, nbytes: int) -> None:
    # A system may put blocks side by side.
    neighbour = memascend.empty_pinned(3 * MIB, torch.uint8, allocator=allocator)
    before = held_bytes()
    tensor = memascend.empty_pinned(nbytes, torch.uint8, allocator=allocator)
    tensor.fill_(1)
    address = tensor.data_ptr()
    assert nbytes <= mapped_bytes(address, nbytes) <= nbytes + SLACK
    costs = [now - then for now, then in zip(held_bytes(), before, strict=True)]
    assert max(costs) <= nbytes + SLACK, f"(resident, pinned) grew by {costs}"
    del tensor
    assert mapped_bytes(address, nbytes) <= SLACK
    assert neighbour.is_pinned()
    left = [now - then for now, then in zip(held_bytes(), before, strict=True)]
    assert max(left) <= SLACK, f"(resident, pinned) stayed higher by {left}"


@pytest.mark.parametrize("allocator", KIND)
def test_a_device_that_this_process_may_not_see_is_an_error(allocator: str) -> None:
    script = f"""
import memascend
try:
    memascend.empty_pinned(4, allocator={allocator!r})
except memascend.HostMemoryError as error:
    assert "CUDA_VISIBLE_DEVICES" in str(error), error
    raise SystemExit(7)
"""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 7, done.stderr


# ---- buffers that a device still uses -----------------------------------------------------------------------


@pytest.mark.parametrize("allocator", KIND)
def test_a_lease_returns_after_the_copy_from_it(store: Path, allocator: str) -> None:
    size = 64 * MIB
    runtime = Runtime([store], Arena([("weights", size, 1)], [], 65_536, 1, 65_536, 65_536, 1), allocator=allocator)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for number in range(3):
        lease = runtime.memory.lease_unit(size)
        assert lease is not None
        tensor = torch.frombuffer(lease, dtype=torch.uint8)
        tensor.fill_(number)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            device.copy_(tensor, non_blocking=True)
        ForTests.return_after(lease, stream.cuda_stream)
        del tensor, lease
        assert runtime.memory.lease_unit(size) is None, "the buffer is free while the device reads it"
        stream.synchronize()
        lease = runtime.memory.lease_unit(size)
        assert lease is not None, "the stream is done"
        torch.frombuffer(lease, dtype=torch.uint8).fill_(255)
        del lease
        assert (device == number).all()
    runtime.close(False)


@pytest.mark.parametrize("allocator", KIND)
def test_training_is_the_same_to_the_bit(offloaded: Callable[..., nn.Module], allocator: str) -> None:
    model = tiny_models.build("llama")
    budget = int(1.5 * tiny_models.smallest_budget(model))
    offloaded(model, host_memory=budget, allocator=allocator, huge_pages=True)
    assert memascend.stats(model)["host_allocator"] == allocator
    tiny_models.assert_same(tiny_models.train(model, "llama"), tiny_models.train(tiny_models.build("llama"), "llama"))
    memascend.close(model)
    gc.collect()


# ---- gradients' blocks --------------------------------------------------------------------------------------


def stats_of_blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return the bits of each block's sum of squares by the CPU's kernels, and whether any element is not finite."""
    parts = [part for part in tensor.flatten().split(BLOCK) if part.numel()]
    name = str(tensor.dtype).removeprefix("torch.")
    found = [_memascend.gradient_stats(name, part.numel(), part.data_ptr()) for part in parts]
    return torch.tensor([total for total, _ in found], dtype=torch.float64).view(torch.int64), any(b for _, b in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_block_sums_are_the_cpus_to_the_bit(dtype: torch.dtype) -> None:
    assert launcher.has_cupy()
    generator = torch.Generator().manual_seed(1)
    for size in (0, 1, 31, 32, 33, 2049, BLOCK - 1, BLOCK, BLOCK + 1, 300 * BLOCK + 4321):
        wide = torch.randn(size, generator=generator) * 2.0 ** torch.randint(-20, 6, (size,), generator=generator)
        for offset in (0, 1):
            host = torch.cat([torch.zeros(offset), wide]).to(dtype)
            for bad in (None, size // 2):
                if bad is not None and size:
                    host[offset + bad] = float("nan")
                device = host.cuda()[offset:]
                sums = torch.full((-(-size // BLOCK),), 1e300, dtype=torch.float64, device="cuda")
                flag = torch.zeros(1, dtype=torch.int32, device="cuda")
                launcher.block_sums(device, sums, flag)
                expected, found = stats_of_blocks(host[offset:])
                assert torch.equal(sums.cpu().view(torch.int64), expected)
                assert flag.item() == found == (bad is not None and size > 0)


@pytest.mark.parametrize("default", [True, False])
def test_block_sums_come_after_what_their_stream_has_to_do(default: bool) -> None:
    gradient = torch.ones(10 * BLOCK, device="cuda")
    sums = torch.zeros(10, dtype=torch.float64, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    launcher.block_sums(gradient, sums, flag)  # compiled now
    stream = torch.cuda.default_stream() if default else torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        gradient.fill_(2)
        launcher.block_sums(gradient, sums, flag)
        assert not stream.query(), "the host waited for the stream"
    stream.synchronize()
    assert sums.tolist() == [4.0 * BLOCK] * 10


# ---- names for profilers ------------------------------------------------------------------------------------


def test_spans_are_in_a_trace_of_the_device() -> None:
    gradient = torch.ones(1000, device="cuda", requires_grad=True)
    threads = []

    def hook(_: torch.Tensor) -> None:
        # In autograd's thread for the device.
        threads.append(threading.get_ident())
        with span("gradient"):
            pass

    gradient.register_post_accumulate_grad_hook(hook)
    # PyTorch 2.11 warns that it clears events between cycles, unless they accumulate.
    with torch.profiler.profile(acc_events=True) as profiler:
        with span("forward"):
            loss = (gradient * 2).sum()
        loss.backward()
        torch.cuda.synchronize()
    assert threads != [threading.get_ident()]
    assert {"memascend: forward", "memascend: gradient"} <= {event.name for event in profiler.events()}


# ---- training -----------------------------------------------------------------------------------------------


def train_on_cuda(model: nn.Module, plain: bool = False) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Train with accumulation and clipping, without both if `plain`; kernels that sum in a fixed order alone."""
    micro_batches = 1 if plain else 2
    optimizer, losses = memascend.AdamW(model.parameters(), lr=3e-3), []
    torch.manual_seed(7)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for step in range(4):
            for micro in range(micro_batches):
                inputs = {name: ids.cuda() for name, ids in tiny_models.batch("llama", 2 * step + micro).items()}
                loss = model(**inputs).loss / micro_batches
                loss.backward()
                losses.append(loss.detach().cpu())
            if not plain:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: weight.cpu() for name, weight in memascend.parameters_of(model)}


@pytest.mark.parametrize("activations", ["recompute", "host", "ssd"])
def test_training_is_that_of_a_model_on_the_device(
    store: Path, monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)
    expected, weights = train_on_cuda(tiny_models.build("llama").cuda())
    model = memascend.offload(
        tiny_models.build("llama"),
        store=store,
        host_memory="64MiB",
        device="cuda",
        device_memory="512MiB",
        activations=activations,
    )
    losses, trained = train_on_cuda(model)
    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
    tiny_models.assert_same_weights(trained, weights)
    stats = memascend.stats(model)
    # Huge pages stay under CUDA's pinning.
    assert stats["host_allocator"] == "registered" and stats["host_bytes_in_huge_pages"] > 0
    memascend.close(model)


@pytest.mark.parametrize("device_memory", ["some", "512MiB"])
def test_weights_are_updated_in_the_backward_pass(store: Path, device_memory: str) -> None:
    expected, weights = train_on_cuda(tiny_models.build("llama").cuda(), plain=True)
    model = tiny_models.build("llama")
    bytes_there: str | int = device_memory
    if device_memory == "some":
        segments = Segments.of(torch.cuda.get_device_capability()[0])
        bytes_there = tiny_models.smallest_device_budget(model, segments=segments) + (64 << 20)
    memascend.offload(
        model, store=store, host_memory="20MiB", device="cuda", device_memory=bytes_there, update="backward"
    )
    losses, trained = train_on_cuda(model, plain=True)
    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
    tiny_models.assert_same_weights(trained, weights)
    assert memascend.offload_of(model).plan.applied.count == 0
    memascend.close(model)


@pytest.mark.filterwarnings("error:.*AccumulateGrad")
@pytest.mark.parametrize("activations", ["recompute", "host"])
def test_training_inside_another_stream_is_the_same(store: Path, activations: str) -> None:
    """On a stream of its own, on the default one again, and on a third: the same bits, and no warning of PyTorch's."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # Else the first test that is warned would be the only one.
    try:
        expected, weights = train_on_cuda(tiny_models.build("llama").cuda())
        model = memascend.offload(
            tiny_models.build("llama"),
            store=store,
            host_memory="64MiB",
            device="cuda",
            device_memory="512MiB",
            activations=activations,
        )
        default = torch.cuda.current_stream()
        for number, stream in enumerate((torch.cuda.Stream(), default, torch.cuda.Stream())):
            stream.wait_stream(default)
            with torch.cuda.stream(stream):
                if number == 0:
                    losses, trained = train_on_cuda(model)
                    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
                    tiny_models.assert_same_weights(trained, weights)
                else:
                    model(**{name: ids.cuda() for name, ids in tiny_models.batch("llama", 0).items()}).loss.backward()
            default.wait_stream(stream)
        memascend.close(model)
    finally:
        torch.set_warn_always(always)


# ---- the allocator's segments, and PyTorch's limit -----------------------------------------------------------


def limit_is_lifted() -> bool:
    """Return whether PyTorch's allocator may have more of the device than any budget of these tests."""
    return torch.cuda.get_per_process_memory_fraction() == 1.0


@pytest.mark.parametrize("nbytes", [512, MIB, MIB + 1, 3 * MIB, 7 * MIB, 10 * MIB - 512, 10 * MIB, 11 * MIB, 33 * MIB])
def test_tensors_take_segments_as_planned(nbytes: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    count = max(1, 64 * MIB // nbytes) if nbytes > MIB else 8
    tensors = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(count)]
    reserved = torch.cuda.memory_reserved() - before
    begun = SMALL_SEGMENT_BYTES if nbytes <= MIB else LARGE_SEGMENT_BYTES if nbytes < 10 * MIB else 0
    assert reserved <= count * taken_bytes(nbytes) + begun
    # Segments that other tensors have begun may hold some of them.
    assert reserved >= count * taken_bytes(nbytes) - 2 * begun
    del tensors


def workspaces_of_the_stand_in() -> list[torch.Tensor]:
    """Return the workspaces of cuBLAS: a device simulated below PyTorch multiplies on the CPU."""
    if "Rehearsal" not in torch.cuda.get_device_name():
        return []
    found = Segments.of(torch.cuda.get_device_capability()[0])
    sizes = 2 * [found.cublas_bytes, found.cublaslt_bytes]
    return [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for nbytes in sizes]


class Plain(torch.nn.Module):
    """Layers without a configuration, with tensors of all sizes of segments."""

    def __init__(self) -> None:
        super().__init__()
        widths = [512, 2048, 512, 4096, 1100, 512]
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


@pytest.mark.parametrize("activations", ["recompute", "host"])
@pytest.mark.parametrize("case", ["plain", "llama", "256 tokens", "1024 tokens"])
def test_the_least_budget_works(store: Path, case: str, activations: str) -> None:
    """With `batch_tokens` for that many, without it for 256 where the model's layers are known."""
    torch.manual_seed(0)
    tokens = int(case.split()[0]) if "tokens" in case else 256
    given = {"batch_tokens": tokens} if "tokens" in case else {}
    model: nn.Module = Plain().bfloat16() if case == "plain" else wide_llama()
    options = {"store": store, "host_memory": "512MiB", "device": "cuda", "activations": activations, **given}
    with pytest.raises(memascend.BudgetError) as refused:
        memascend.offload(model, device_memory=1, **options)
    least = refused.value.smallest_bytes
    memascend.offload(model, device_memory=least, **options)
    try:
        workspaces = workspaces_of_the_stand_in()
        optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
        torch.cuda.reset_peak_memory_stats()
        for step in range(2):
            if case == "plain":
                loss = model(torch.ones(tokens, 512, dtype=torch.bfloat16, device="cuda"))
            else:
                ids = torch.randint(0, 4096, (tokens // 128, 128), generator=torch.Generator().manual_seed(step))
                loss = model(input_ids=ids.cuda(), labels=ids.cuda()).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.isfinite(loss)
        del workspaces
    finally:
        memascend.close(model)
    assert limit_is_lifted()


def wide_llama() -> nn.Module:
    """Return a Llama whose tensors are of all sizes of segments: a vocabulary of 4 MiB, an MLP of 2.75 MiB each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=2816,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def test_a_model_that_does_not_open_leaves_no_limit(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever opening ends: after PyTorch was limited, and where closing fails in turn."""
    from memascend.session.module_hooks import Hooks
    from memascend.streaming.device_cache import DeviceCache

    def fail(*_: object) -> None:
        assert not limit_is_lifted()
        raise OSError("it ends here")

    def broken(*_: object) -> None:
        raise OSError("and so does this")

    for owner, name in ((DeviceCache, "attach"), (Hooks, "_hook_modules")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            patched.setattr(DeviceCache, "free", broken)
            with pytest.raises(OSError, match="and so does this"):
                memascend.offload(
                    tiny_models.build("llama"), store=store, host_memory="64MiB", device="cuda", device_memory="256MiB"
                )
        assert limit_is_lifted()


def test_a_second_model_opens_beside_a_first_that_has_little(store: Path, tmp_path: Path) -> None:
    """PyTorch's limit includes both before the second's buffers are reserved."""
    first, second = tiny_models.build("llama"), torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8)))
    memascend.offload(first, store=store, host_memory="64MiB", device="cuda", device_memory="192MiB")
    memascend.offload(second, store=tmp_path / "second", host_memory="1GiB", device="cuda", device_memory="1GiB")
    assert memascend.offload_of(second).streamer.memory.pool.nbytes > 192 * MIB
    memascend.close(first)
    assert not limit_is_lifted()
    memascend.close(second)
    assert limit_is_lifted()


def test_a_model_that_is_on_the_device_leaves_it(store: Path) -> None:
    model = tiny_models.build("llama").cuda()
    before = torch.cuda.memory_allocated()
    memascend.offload(model, store=store, host_memory="64MiB", device="cuda", device_memory="256MiB")
    model(**tiny_models.batch("llama", 0)).loss.backward()
    memascend.close(model)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # PyTorch's own, kept for the process: 64 MiB on an H100
    assert torch.cuda.memory_allocated() < before
    torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")  # the ceiling was lifted


@pytest.mark.alone
def test_the_device_has_what_a_smaller_budget_gives_back(store: Path) -> None:
    """16 layers of 32 MiB: the driver's own count of free memory follows the budget, and so does PyTorch's limit."""
    torch.manual_seed(0)
    # float32: the stand-in device computes on the processor, where products of bfloat16 may take minutes.
    widths = [(4096, 2048), (2048, 4096)] * 8
    model = torch.nn.Sequential(*(torch.nn.Linear(*width) for width in widths))
    memascend.offload(model, store=store, host_memory="512MiB", device="cuda", device_memory="2GiB")
    optimizer = memascend.SGD(model.parameters(), lr=1e-3)

    def free_after_a_step() -> int:
        model(torch.ones(8, 4096)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.cuda.mem_get_info()[0]

    ample = free_after_a_step()
    memascend.set_device_memory(model, "512MiB")
    assert torch.cuda.mem_get_info()[0] - ample > 200 * MIB
    assert free_after_a_step() - ample > 100 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(768 * MIB, dtype=torch.uint8, device="cuda")
    memascend.set_device_memory(model, "2GiB")
    torch.empty(768 * MIB, dtype=torch.uint8, device="cuda")
    memascend.close(model)


# ---- the benchmark ------------------------------------------------------------------------------------------


def test_the_benchmark_runs(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "benches" / "pinned.py"
    command = [sys.executable, str(script), "--gib", "0.06", "--copy-gib", "0.06", "--repeats", "1"]
    done = subprocess.run([*command, "--json", str(tmp_path / "out.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert {"torch", *KIND} <= {row["allocator"] for row in record["allocations"]}
    assert {(row["allocator"], row["direction"]) for row in record["copies"]} == {
        (allocator, direction) for allocator in KIND for direction in ("to device", "from device")
    }
