"""A store in the place of which an earlier run's is, or which another process has: messages and behaviour."""

from __future__ import annotations

import errno
import gc
import subprocess
from typing import TYPE_CHECKING, Any

import forked
import pytest
import torch
from small_net import Net, assert_same, step
from torch import nn

import memascend
from memascend.errors import BudgetError, HostMemoryError
from memascend.session import runtime

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def begin(store: Path, **options: Any) -> tuple[Net, memascend.AdamW]:
    torch.manual_seed(0)
    model = memascend.offload(Net(), store=store, **{"host_memory": "64MiB", "allocator": "pageable"} | options)
    return model, memascend.AdamW(model.parameters(), lr=1e-2)


def collect() -> None:
    gc.collect()
    runtime.close_unused()  # waits for the thread that closes


def test_a_store_that_was_left_is_described_with_what_to_do(store: Path) -> None:
    model, optimizer = begin(store)
    step(model, optimizer)
    memascend.save_checkpoint(model, "first")
    step(model, optimizer)
    del model, optimizer
    for _ in range(2):
        with pytest.raises(memascend.StoreError) as caught:
            begin(store)
        message = str(caught.value)
        assert caught.value.errno == errno.EEXIST and caught.value.filename == str(store)
        assert message.startswith(f"{store} holds a run of Net after step 2, written 20")
        assert "with checkpoint first: to go on with it, use memascend.resume (" in message
        assert "to delete it and begin anew, give keep_store='replace' (--replace-store)" in message
        assert "keep_store=False" in message
        assert "interrupted" not in message and "\n" not in message
    torch.manual_seed(0)
    resumed = memascend.resume(store, model=Net(), host_memory="64MiB")
    assert resumed.steps == 2
    memascend.close(resumed.model)


def test_a_damaged_store_is_refused_and_replaced(store: Path) -> None:
    model, optimizer = begin(store, keep_store=True)
    step(model, optimizer)
    memascend.close(model)
    for name in ("memascend.json", "memascend.json.spare"):
        if (store / name).exists():
            (store / name).write_bytes(b"{")
    with pytest.raises(memascend.StoreError, match="the store of an earlier run: to go on"):
        begin(store)
    model, optimizer = begin(store, keep_store="replace")
    step(model, optimizer)
    memascend.close(model)
    assert not store.exists() or not any(store.iterdir())


def test_a_replaced_run_leaves_nothing_in_the_new_one(store: Path) -> None:
    model, optimizer = begin(store, keep_store="replace")  # where nothing is, it is as None
    step(model, optimizer, 5)
    memascend.save_checkpoint(model, "old")
    memascend.close(model)
    model, optimizer = begin(store, keep_store="replace")
    assert memascend.checkpoints(model) == []
    torch.manual_seed(0)
    expected = Net()
    in_memory = memascend.AdamW(expected.parameters(), lr=1e-2)
    for seed in range(2):
        assert torch.equal(step(model, optimizer, seed), step(expected, in_memory, seed))
    assert_same(expected, model)
    memascend.close(model)
    assert not store.exists() or not any(store.iterdir())


def test_what_is_in_use_is_not_replaced(store: Path) -> None:
    model, optimizer = begin(store)
    step(model, optimizer)
    with pytest.raises(memascend.StoreError, match="in use by this very process"):
        begin(store, keep_store="replace")
    step(model, optimizer)
    memascend.close(model)


@pytest.mark.parametrize("keep_store", ["replace", False])
def test_a_function_tried_again_with_a_smaller_batch_begins_anew(store: Path, keep_store: Any) -> None:
    from accelerate.utils import find_executable_batch_size

    tried = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> list[torch.Tensor]:
        tried.append(batch_size)
        model, optimizer = begin(store, keep_store=keep_store)
        losses = [step(model, optimizer, seed) for seed in range(2)]
        if batch_size > 2:
            model.itself = [model]  # a cycle, as models have them
            raise RuntimeError("CUDA out of memory.")
        memascend.close(model)
        return losses

    losses = train()
    assert tried[0] == 4 and tried[-1] == 2 and len(tried) > 2
    torch.manual_seed(0)
    expected = Net()
    optimizer = memascend.AdamW(expected.parameters(), lr=1e-2)
    assert all(torch.equal(loss, step(expected, optimizer, seed)) for seed, loss in enumerate(losses))


@pytest.mark.parametrize(
    "lacking",
    [
        lambda: memascend.StoreError(errno.ENOSPC, "no space", "/elsewhere"),
        lambda: HostMemoryError("no memory"),
        lambda: BudgetError("no memory", 1),
    ],
    ids=["space", "memory", "budget"],
)
def test_what_a_model_in_a_cycle_has_is_freed_for_the_next(store: Path, lacking: Callable[[], Exception]) -> None:
    collect()
    model, optimizer = begin(store)
    cycle: list[Any] = [model]
    cycle.append(cycle)
    gc.disable()
    try:
        del model, optimizer, cycle
        tried = []

        def open_store() -> str:
            tried.append(store.exists())
            if store.exists():
                raise lacking()
            return "opened"

        assert runtime.when_free(open_store) == "opened"
        assert tried == [True, False]
    finally:
        gc.enable()
        collect()


def test_nothing_is_tried_again_where_nothing_can_be_freed() -> None:
    collect()
    tried = []

    def open_store() -> None:
        tried.append(1)
        raise memascend.StoreError(errno.ENOSPC, "no space", "/elsewhere")

    with pytest.raises(memascend.StoreError, match="no space"):
        runtime.when_free(open_store)
    assert tried == [1]


def test_what_keep_store_cannot_mean_is_refused(store: Path) -> None:
    with pytest.raises(ValueError, match="keep_store='yes' is not one of True, False, None and 'replace'"):
        begin(store, keep_store="yes")
    assert not store.exists()
    model, optimizer = begin(store, keep_store=True)
    step(model, optimizer)
    memascend.close(model)
    with pytest.raises(ValueError, match="deletes the run that is to be resumed"):
        memascend.resume(store, model=Net(), host_memory="64MiB", keep_store="replace")
    memascend.close(memascend.resume(store, model=Net(), host_memory="64MiB").model)


def test_a_missing_folder_above_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(memascend.StoreError, match=f"{tmp_path}/drive does not exist; mount.*mkdir -p") as caught:
        begin(tmp_path / "drive" / "runs" / "store")
    assert caught.value.errno == errno.ENOENT
    assert not (tmp_path / "drive").exists()


def test_processes_that_share_a_store_are_told_of_the_rank(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"""
import os
from memascend._memascend import Volume
volume = Volume({str(store)!r})
print(os.getpid(), flush=True)
input()
"""
    with forked.Program(["-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        number = int(other.stdout.readline())
        with pytest.raises(memascend.StoreError, match=f"in use by process {number}") as caught:
            begin(store)
        assert "{rank}" not in str(caught.value)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(memascend.StoreError, match=f"in use by process {number}") as caught:
            begin(store)
        assert "2 processes were launched: to divide one model over them, call torch.distributed" in str(caught.value)
        assert f"store='{store}{{rank}}'" in str(caught.value)
        other.communicate("\n")


def test_a_plain_module_is_described_by_its_class(store: Path) -> None:
    torch.manual_seed(0)
    model = memascend.offload(nn.Sequential(nn.Linear(8, 8)), store=store, host_memory="64MiB", keep_store=True)
    memascend.close(model)
    with pytest.raises(memascend.StoreError, match="holds a run of Sequential after step 0"):
        begin(store)
