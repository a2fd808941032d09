"""Host memory: the plan, limits of this process, pinned tensors, allocators."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked
import pytest
import tiny_models
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import memascend
from memascend.hardware import cgroups, memory_limits
from memascend.layout.units import partition
from memascend.memory_plan import host
from memascend.memory_plan.lines import CHUNK_ELEMENTS_MIN, HEAP_BYTES, Inputs
from memascend.memory_plan.transfers import CHUNK_ELEMENTS_MAX, TRANSFER_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from memascend.layout.units import Unit

MIB = 2**20
KIND = ("pageable", "locked")


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


def huge_bytes() -> int:
    """Return the bytes of the mappings for which this process has asked for huge pages."""
    found = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and "hg" in line.split():
            found += size
    return found


# ---- the plan -----------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
@pytest.mark.parametrize("times", [1, 1.5, 4])
def test_the_plan_is_what_is_reserved(offloaded: Callable[..., nn.Module], architecture: str, times: float) -> None:
    model = tiny_models.build(architecture)
    budget = int(tiny_models.smallest_budget(model) * times)
    made = host.make_plan(partition(model), budget)
    stats = memascend.stats(offloaded(model, host_memory=budget))
    assert stats["host_bytes_reserved"] == made.arena_bytes
    assert made.arena_bytes + made.bookkeeping.total == made.total <= budget
    assert stats["host_bytes_planned"] == made.total


def test_a_plan_says_what_every_line_is_for() -> None:
    made = host.make_plan(partition(tiny_models.build("llama")), 256 * MIB)
    table = made.table()
    for line in made.lines:
        if line.count:
            assert line.note, f"{line.consumer} has no note"
            assert line.consumer in table and line.note in table


def test_transfers_take_a_small_share_of_a_budget_that_is_not_the_least() -> None:
    units = partition(tiny_models.build("llama"))
    shares = []
    for budget in (64 * MIB, 256 * MIB, 1024 * MIB, 4096 * MIB):
        made = host.make_plan(units, budget)
        transfers = made.slots.total + made.staging.total
        assert transfers <= budget * TRANSFER_SHARE or made.chunk_elements == CHUNK_ELEMENTS_MIN
        shares.append(made.chunk_elements)
    assert shares == sorted(shares) and shares[0] == CHUNK_ELEMENTS_MIN < shares[-1]


def test_freed_blocks_have_room_before_weights_are_cached() -> None:
    with torch.device("meta"):
        units = partition(torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(64))))
    tight, roomy = host.make_plan(units, 768 * MIB), host.make_plan(units, 2048 * MIB)
    assert not tight.retain_heap and tight.total > 735 * MIB
    assert roomy.retain_heap and roomy.freed_blocks_bytes == HEAP_BYTES
    assert 1759 * MIB < roomy.total <= 2048 * MIB - HEAP_BYTES
    # Of a device, PyTorch's temporaries are not in host memory.
    assert host.make_plan(units, 2048 * MIB, on_device=True).total > 2015 * MIB


def test_more_threads_have_more_slots_where_there_is_room() -> None:
    units = partition(tiny_models.build("llama"))
    counts = {}
    for threads in (1, 2, 3, 8):
        made = host.make_plan(units, 4096 * MIB, threads=threads)
        assert made.update_threads == threads
        assert made.total <= made.budget and made.chunk_elements == host.make_plan(units, 4096 * MIB).chunk_elements
        assert ("for 8 threads" in made.table()) == (threads == 8)
        counts[threads] = made.slots.count
    assert counts == {1: 8, 2: 8, 3: 9, 8: 24}
    # Whole slots, as many as the transfers' share has room for.
    budget = next(mib * MIB for mib in range(16, 4096) if host.make_plan(units, mib * MIB, threads=8).slots.count > 8)
    assert host.make_plan(units, budget, threads=8).slots.count < 24
    transfers = host.make_plan(units, budget, threads=8)
    assert transfers.slots.total + transfers.staging.total <= budget * TRANSFER_SHARE


def llama_of(layers: int, trained: bool = True) -> list[Unit]:
    model = LlamaForCausalLM(LlamaConfig(**tiny_models.SMALL_DECODER | {"num_hidden_layers": layers}))
    return partition(model.requires_grad_(trained), uploaded=True)


@pytest.mark.parametrize("trained", [False, True])
def test_inputs_of_layers_have_room_where_there_is_room(trained: bool) -> None:
    """Without it the inputs of frozen layers went to the SSD, by chunks as small as a plan may have."""
    units = llama_of(12, trained)
    inputs = Inputs(3 * MIB, per_layer=2)
    made = host.make_plan(units, 1024 * MIB, on_device=True, inputs=inputs)
    nbytes = made.chunk_elements * 4
    assert made.staging_cache.nbytes == nbytes and made.chunk_elements == CHUNK_ELEMENTS_MAX
    gradients = sum(-(-t.numel // made.chunk_elements) for u in units for t in u.tensors if t.trained and not t.packed)
    layer = -(-inputs.nbytes // nbytes) * 2
    assert max(12 * layer, gradients + layer) <= made.staging_cache.count <= 12 * layer + gradients
    # Beside them the weights stay as far as there is room, and the least plan needs none of it.
    least = host.smallest_plan(units, on_device=True, inputs=inputs)
    assert least.total == host.smallest_plan(units, on_device=True).total and least.staging_cache.count == 0
    assert made.total <= made.budget


def test_a_budget_that_changes_keeps_its_inputs() -> None:
    units, inputs = llama_of(12, trained=False), Inputs(MIB)
    made = host.make_plan(units, 64 * MIB, 256 * MIB, on_device=True, inputs=inputs)
    assert host.replan(made, units, 64 * MIB).arena == made.arena
    assert host.replan(made, units, 256 * MIB).arena == made.most.arena


def test_the_least_plan_is_the_same_for_any_number_of_threads() -> None:
    units = partition(tiny_models.build("llama"))
    least = host.smallest_plan(units)
    for threads in (2, 64):
        made = host.smallest_plan(units, threads=threads)
        assert (made.total, made.slots.count, made.overlap_bytes) == (least.total, 8, least.overlap_bytes)


def test_a_budget_that_changes_keeps_its_slots() -> None:
    """The update pipeline is neither grown nor shrunk: the least works with as many slots."""
    units, most = partition(tiny_models.build("llama")), 1024 * MIB
    made = host.make_plan(units, 512 * MIB, most, threads=6)
    assert made.most is not None and made.slots.count == made.most.slots.count == 18
    least = host.replan(made, units, made.smallest_bytes)
    assert least.slots.count == 18 and least.update_threads == 6
    assert host.replan(least, units, most).slots.count == 18
    with pytest.raises(memascend.BudgetError) as caught:
        host.replan(made, units, made.smallest_bytes - 1)
    assert caught.value.smallest_bytes == made.smallest_bytes


def test_a_refusal_names_the_knobs() -> None:
    with pytest.raises(memascend.BudgetError, match=r"To lower it: .*bfloat16"):
        host.make_plan(partition(tiny_models.build("llama", torch.float32)), MIB)
    with pytest.raises(memascend.BudgetError, match=r"To lower it: a smaller model") as caught:
        host.make_plan(partition(tiny_models.build("llama")), MIB)
    assert "bfloat16" not in str(caught.value)


# ---- limits of this process ---------------------------------------------------------------------------------


def test_the_system_bounds_what_is_available() -> None:
    available, why = memory_limits.available_memory()
    assert 0 < available < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert why


def fake_cgroups(root: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_every_cgroup_above_counts_and_page_cache_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    # The groups are files here; test_a_cgroup_below_the_plan has the kernel's own.
    root, limit, usage, cache = (
        (tmp_path, "memory.max", "memory.current", "inactive_file")
        if version == 2
        else (tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    fake_cgroups(
        root,
        {
            f"outer/{limit}": 100 * MIB,
            f"outer/{usage}": 60 * MIB,
            "outer/memory.stat": f"{cache} {20 * MIB}",
            f"outer/inner/{limit}": 90 * MIB if version == 1 else "max",
            f"outer/inner/{usage}": 10 * MIB,
            "outer/inner/memory.stat": f"{cache} 0",
        },
    )
    entry = "0::/outer/inner" if version == 2 else "4:cpu,memory:/outer/inner"
    (tmp_path / "self").write_text(f"{entry}\n")
    real = Path.read_text
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a: real(tmp_path / "self" if str(path) == "/proc/self/cgroup" else path, *a)
    )
    available, why = memory_limits.available_memory()
    assert available == 60 * MIB
    assert "/outer allows" in why


#: Two matrices of 64 MiB each in a model with next to nothing besides: with a gradient for each kept off the SSD, a
#: plan with budget to spare takes four times that, and the smallest one once.
LARGE_VOCABULARY, MATRIX = 65_536, 64 * MIB
#: Few, since products take longest.
TOKENS = 2


@pytest.fixture
def large_model(tmp_path: Path) -> Iterator[Path]:
    config = LlamaConfig(
        vocab_size=LARGE_VOCABULARY,
        hidden_size=MATRIX // 2 // LARGE_VOCABULARY,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=257,
        architectures=["LlamaForCausalLM"],
    )
    folder = tmp_path / "model"
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    yield folder
    # pytest keeps the directories of its last runs.
    shutil.rmtree(folder)


@pytest.mark.root
def test_a_cgroup_below_the_plan(memory_cgroup: Callable[[int], Path], large_model: Path, tmp_path: Path) -> None:
    room = tmp_path / "room"
    (room / "store").mkdir(parents=True)
    (room / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(100)))

    def run(words: list[str], group: Path | None = None) -> subprocess.CompletedProcess[str]:
        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        return subprocess.run(
            [sys.executable, "-P", *words], capture_output=True, text=True, cwd=room, preexec_fn=enter
        )

    def finetune(host_memory: str) -> list[str]:
        words = ["finetune", str(large_model), "--data", "text.txt", "--store", "store", "--host-memory", host_memory]
        words += ["--out", "out", "--steps", "1", "--seq-len", str(TOKENS), "--dtype", "bfloat16", "--bytes"]
        return words

    # Memory of the interpreter and its libraries that the kernel cannot take back.
    script = "import torch, memascend.cli.finetune; from transformers import LlamaForCausalLM;"
    script += "of = lambda key: int(next(l for l in open('/proc/self/status') if l.startswith(key)).split()[1]) << 10;"
    script += "print(of('RssAnon'));"
    # And PyTorch's memory beside the gradient of a matrix: one in float32 where the processor has no bfloat16.
    wide, narrow = LARGE_VOCABULARY, MATRIX // 2 // LARGE_VOCABULARY
    script += f"left, right = torch.zeros({TOKENS}, {wide}), torch.zeros({TOKENS}, {narrow});"
    script += "left, right = left.bfloat16(), right.bfloat16(); open('/proc/self/clear_refs', 'w').write('5');"
    script += "before = of('VmHWM'); product = left.t() @ right; print(of('VmHWM') - before - product.nbytes)"
    baseline, beside = map(int, run(["-c", script]).stdout.split())
    left = 3 * MATRIX + MATRIX // 2

    # A group counts of a forked process only the memory that is allocated in it.
    group = memory_cgroup(left)
    before = sorted(path.name for path in room.rglob("*"))
    entering = "import os, sys; open(sys.argv.pop(1), 'w').write(str(os.getpid()));"
    entering += "from memascend.cli import main; main.run()"
    refused = forked.run(["-P", "-c", entering, group / "cgroup.procs", *finetune("1GiB")], cwd=room)
    assert refused.returncode == 2, refused.stderr
    told = [line for line in refused.stderr.splitlines() if line.startswith("memascend: error: ")]
    assert len(told) == 1 and "Traceback" not in refused.stderr, refused.stderr
    assert f"{group.name} allows " in told[0] and "--host-memory" in told[0]
    assert sorted(path.name for path in room.rglob("*")) == before

    # As much beside the interpreter, with room for PyTorch, holds a plan that fits, and the whole run besides.
    words = ["-m", "memascend", *finetune(f"{MATRIX + 64 * MIB}B")]
    done = run(words, memory_cgroup(baseline + left + max(0, beside)))
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert (room / "out" / "model.safetensors").stat().st_size > 2 * MATRIX
    assert not list((room / "store").iterdir())
    shutil.rmtree(room)


def test_a_limit_on_address_space_refuses_the_plan(tmp_path: Path) -> None:
    script = f"""
import resource, sys, tiny_models, memascend
from memascend.memory_plan.host import make_plan
from memascend.layout.units import partition
model = tiny_models.build("llama")
total = make_plan(partition(model), 2 << 30).total
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + total // 2
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    memascend.offload(model, store={str(tmp_path / "store")!r}, host_memory="2GiB", allocator="pageable")
except memascend.BudgetError as error:
    assert "ulimit -v" in str(error), error
    sys.exit(7)
"""
    done = forked.run(["-c", script], cwd=Path(__file__).parents[1] / "support")
    assert done.returncode == 7, done.stderr
    assert not (tmp_path / "store").exists()


# ---- pinned tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", KIND)
@pytest.mark.parametrize("shape", [(3,), (5, 7), (1, 1, 1), (1 << 20,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.bool])
def test_empty_pinned(allocator: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = memascend.empty_pinned(shape, dtype, allocator=allocator)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.data_ptr() % 4096 == 0
    assert not tensor.any()
    assert tensor.untyped_storage().nbytes() == math.prod(shape) * dtype.itemsize
    tensor.fill_(1)
    assert tensor.all()


def test_empty_pinned_of_nothing_and_of_a_number() -> None:
    assert memascend.empty_pinned((0, 4)).shape == (0, 4)
    assert memascend.empty_pinned(4).shape == (4,)
    assert memascend.empty_pinned(()).shape == ()
    with pytest.raises(ValueError, match="negative"):
        memascend.empty_pinned((2, -1))
    assert memascend.empty_pinned(4).dtype == torch.get_default_dtype()


def test_locked_memory_is_exact_and_given_back() -> None:
    before = status_bytes("VmLck")
    tensor = memascend.empty_pinned(5 * MIB + 1, torch.uint8, allocator="locked")
    assert status_bytes("VmLck") - before == 5 * MIB + 4096
    view = tensor[MIB:]
    del tensor
    assert status_bytes("VmLck") - before == 5 * MIB + 4096, "a view keeps the memory"
    del view
    assert status_bytes("VmLck") == before


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
@pytest.mark.parametrize("allocator", KIND)
def test_arenas_and_pinned_tensors_ask_for_huge_pages(
    allocator: str, offloaded: Callable[..., nn.Module], tmp_path: Path
) -> None:
    before = huge_bytes()
    small = memascend.empty_pinned(MIB, torch.uint8, allocator=allocator)
    assert huge_bytes() == before
    large = memascend.empty_pinned(5 * MIB + 1, torch.uint8, allocator=allocator)
    assert huge_bytes() - before == 5 * MIB + 4096
    assert large.data_ptr() % (2 * MIB) == 0
    del small, large
    assert huge_bytes() == before
    offload = {"allocator": allocator, "host_memory": "64MiB"}
    stats = memascend.stats(offloaded(tiny_models.build("llama"), **offload))
    assert huge_bytes() - before == stats["host_bytes_reserved"]
    offloaded(tiny_models.build("llama"), store=tmp_path / "other", huge_pages=False, **offload)
    assert huge_bytes() - before == stats["host_bytes_reserved"]


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_what_stays_of_a_changing_budget_has_huge_pages(offloaded: Callable[..., nn.Module]) -> None:
    before = huge_bytes()
    model = offloaded(tiny_models.build("llama"), host_memory="64MiB", host_memory_max="128MiB")
    there = huge_bytes() - before
    assert 0 < there <= memascend.stats(model)["host_bytes_reserved"]
    memascend.set_host_memory(model, "96MiB")
    assert huge_bytes() - before == there


def test_pin_memory_copies_values_strides_and_nothing_else() -> None:
    for tensor in (
        torch.randn(3, 5),
        torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(10)[::2],
        torch.arange(4),
        torch.zeros(0, 3),
        torch.tensor(2.5),
        torch.randn(3, requires_grad=True),
    ):
        pinned = memascend.pin_memory(tensor, allocator="locked")
        assert torch.equal(pinned, tensor) and pinned.dtype == tensor.dtype
        assert pinned.stride() == torch.empty_like(tensor).stride()
        assert not pinned.requires_grad
        if tensor.numel():
            assert pinned.data_ptr() != tensor.data_ptr()
    with pytest.raises(ValueError, match="sparse"):
        memascend.pin_memory(torch.eye(3).to_sparse())


def test_pinned_memory_can_be_read_in_a_forked_worker() -> None:
    tensor = memascend.pin_memory(torch.arange(1000), allocator="locked")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if int(tensor[999]) == 999 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_limit_on_locked_memory_names_the_remedy() -> None:
    script = """
import resource, memascend, torch
empty_pinned = memascend.empty_pinned  # imports files that another user may not read
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
import os
if os.geteuid() == 0:
    os.setuid(65534)  # root may lock as much as it likes
try:
    empty_pinned(8 << 20, torch.uint8, allocator="locked")
except memascend.HostMemoryError as error:
    assert "ulimit -l" in str(error) and "8388608" in str(error), error
    empty_pinned(1 << 19, torch.uint8, allocator="locked")
    raise SystemExit(7)
"""
    done = forked.run(["-c", script])
    assert done.returncode == 7, done.stderr


def test_unknown_allocators_are_refused() -> None:
    with pytest.raises(ValueError, match="cuda, registered, locked"):
        memascend.empty_pinned(4, allocator="golden")


def test_a_size_that_no_machine_has_is_an_error() -> None:
    with pytest.raises(memascend.HostMemoryError):
        memascend.empty_pinned(1 << 50, torch.uint8, allocator="pageable")
