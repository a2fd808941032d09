"""Data that DeepSpeed's plan keeps in memory, and data that stays there between steps."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import torch

from memascend.errors import BudgetError
from memascend.forecast.deepspeed import plan

if TYPE_CHECKING:
    from pathlib import Path

if importlib.util.find_spec("deepspeed") is None:
    requirements.unmet("deepspeed", "deepspeed is not installed")

# An old DeepSpeed is warned of here, where the filter below does not apply.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from memascend.integrations.deepspeed import buffers, kept, options
    from memascend.integrations.deepspeed.pinned import PINNED

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20
SHAPES = plan.Shapes(
    params=[10 * MIB, 30 * MIB],
    sub_groups=[[10 * MIB, 30 * MIB]],
    itemsize=2,
    buffer_count=5,
    buffer_size=100 * MIB,
    max_in_cpu=0,
    gradient_itemsize=2,
    accumulates=False,
    streamed_states=40 * MIB * 12,
)


def ours(decision: plan.Decision) -> int:
    return sum(line.ours for line in decision.lines)


def test_room_goes_to_gradients_and_then_to_states() -> None:
    least = plan.decide(SHAPES, options.Options())
    assert not least.keeps_gradients and not least.kept_states
    needed = ours(least)
    gradients = 40 * MIB * 2
    before = least
    for host_memory in range(needed, needed + 700 * MIB, 10 * MIB):
        decision = plan.decide(SHAPES, options.Options(host_memory=host_memory))
        assert ours(decision) <= host_memory
        assert decision.keeps_gradients >= before.keeps_gradients
        before = decision
        if decision.kept_states < SHAPES.streamed_states:
            assert ours(decision) == host_memory
    assert before.keeps_gradients and before.kept_states == SHAPES.streamed_states
    with pytest.raises(BudgetError, match=r"host_memory.*lower max_in_cpu"):
        plan.decide(SHAPES, options.Options(host_memory=needed - 1))
    # Where gradients are added up they stay in any case.
    adds_up = plan.decide(replace(SHAPES, accumulates=True), options.Options(host_memory=needed + gradients))
    assert adds_up.keeps_gradients


@pytest.mark.parametrize(
    ("sub_groups", "slots"),
    [
        ([1], 3),
        ([15 * plan.CHUNK], 3),
        ([8 * plan.CHUNK + 1, 7 * plan.CHUNK + 1], 4),
        ([30 * plan.CHUNK], 7),
        ([400 * plan.CHUNK], 8),
    ],
)
def test_slots_grow_with_the_model(sub_groups: list[int], slots: int) -> None:
    assert plan.slots(sub_groups) == slots


@pytest.mark.parametrize("section", ["4GiB", {"memory": "4GiB"}, {"states": "float16"}, {"keep_blocks": "no"}])
def test_a_section_that_says_something_else_is_refused(section: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(section)) if isinstance(section, dict) else "host_memory"):
        options.Options.of({"memascend": section})


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.99, 1.0])
def test_what_stays_is_spread_over_the_step(share: float) -> None:
    sizes = [100] * 97 + [37]
    room = int(share * sum(sizes))
    indices = list(kept.spread(sizes, room))
    bytes_kept = sum(sizes[index] for index in indices)
    assert room - 100 < bytes_kept <= room
    for end in range(1, len(sizes)):
        so_far = sum(sizes[index] for index in indices if index < end)
        assert abs(so_far - share * sum(sizes[:end])) <= 100
    assert list(kept.spread([], room)) == []
    assert len(list(kept.spread(sizes, 2 * sum(sizes)))) == len(sizes)


@pytest.fixture
def chunks(tmp_path: Path) -> Any:
    states = kept.KeptStates()
    for start in (0, 1000):
        paths = [str(tmp_path / name) for name in ("masters", "exp_avg", "exp_avg_sq")]
        states.add("group", kept.ResidentChunk([torch.rand(1000) for _ in paths], paths, start))
    return states


def test_files_have_what_was_written(chunks: Any, tmp_path: Path) -> None:
    changed = chunks.get("group", 1000)
    assert chunks.get("other", 1000) is None and chunks.get("group", 500) is None
    # Nothing in memory is newer than the files.
    chunks.write()
    assert not list(tmp_path.iterdir())
    changed.is_current, changed.is_written = True, False
    chunks.write("other")
    assert not list(tmp_path.iterdir())
    chunks.write("group")
    for state, name in zip(changed.states, ("masters", "exp_avg", "exp_avg_sq"), strict=True):
        stored = torch.from_file(str(tmp_path / name), size=2000)
        assert torch.equal(stored[1000:], state)
        assert not stored[:1000].any()
    assert changed.is_current and changed.is_written
    chunks.hand_over("group")
    assert not changed.is_current


def test_what_could_not_be_written_is_written_later(chunks: Any, tmp_path: Path) -> None:
    chunk = chunks.get("group", 0)
    chunk.is_current, chunk.is_written = True, False
    folder = tmp_path / "exp_avg"
    folder.mkdir()
    with pytest.raises(OSError, match="exp_avg"):
        chunks.write()
    assert chunk.is_current and not chunk.is_written
    folder.rmdir()
    chunks.write()
    assert torch.equal(torch.from_file(str(folder), size=1000), chunk.states[1])


def test_a_pool_gives_free_buffers_up_for_others() -> None:
    before = PINNED.nbytes
    pool = buffers.BufferPool(torch.float32)
    pool.limit_bytes = 4 * 12_000
    large, small = pool.lend(8_000), pool.lend(2_000)
    pool.take_back(large)
    pool.take_back(small)
    del large
    assert pool.nbytes == 40_000
    # There is room for 2,000 elements as it is, and for 4,000 if the largest goes.
    other = pool.lend(2_000)
    assert pool.nbytes == 40_000 and other.data_ptr() == small.data_ptr()
    middle = pool.lend(4_000)
    assert pool.nbytes == PINNED.nbytes - before == 24_000
    # Buffers in use are not refused, however many.
    more = [pool.lend(8_000) for _ in range(2)]
    assert pool.nbytes == 24_000 + 64_000
    for buffer in (other, middle, *more):
        pool.take_back(buffer)
