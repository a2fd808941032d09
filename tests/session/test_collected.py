"""Models that nothing refers to any more: the collector closes them, as the end of a program would."""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
from typing import TYPE_CHECKING, Any

import faults
import pytest
import torch
from processes import forget_earlier, native_threads, native_threads_end, open_files, python
from simulated_device import SimulatedDevice
from torch import nn

import memascend
from memascend.errors import MemascendError
from memascend.session import runtime

if TYPE_CHECKING:
    from pathlib import Path

    import fake_cuda

X = torch.linspace(-1, 1, 4 * 256).reshape(4, 256)


@pytest.fixture(autouse=True)
def _earlier() -> None:
    forget_earlier()


class Net(nn.Module):
    """Layers, and buffers that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        self.norm = nn.BatchNorm1d(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(x)).square().sum()


def offload(store: Path, model: nn.Module | None = None, **options: Any) -> nn.Module:
    options = {"host_memory": "64MiB", "allocator": "pageable"} | options
    return memascend.offload(Net() if model is None else model, store=store, **options)


def train(model: nn.Module, steps: int = 2) -> memascend.AdamW:
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(X).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def collect() -> None:
    gc.collect()
    runtime.close_unused()  # waits for the thread that closes


def assert_free(store: Path) -> None:
    assert not open_files(store)
    assert native_threads_end()


@pytest.mark.parametrize("trained", [True, False])
def test_the_store_of_a_collected_model_goes(store: Path, trained: bool) -> None:
    model = offload(store, Net().requires_grad_(trained))
    assert open_files(store) and native_threads()
    del model
    collect()
    assert not store.exists()
    assert_free(store)


def test_a_model_in_a_cycle_is_found_by_the_collector_alone(store: Path) -> None:
    model = offload(store)
    cycle: dict[str, Any] = {"model": model}
    cycle["cycle"] = cycle
    model.cycle = cycle
    del model, cycle
    runtime.close_unused()
    assert store.exists()
    collect()
    assert not store.exists()
    assert_free(store)


def kept_as_reference(store: Path, **options: Any) -> None:
    """Compare the contents of a store with two steps in memory, then with a third one on both sides."""
    reference, again = Net(), Net()
    optimizer = train(reference)
    resumed = memascend.resume(store, model=again, allocator="pageable", **options)
    try:
        assert resumed.steps == 2
        for mine, other in ((resumed.optimizer, again), (optimizer, reference)):
            other(X).backward()
            mine.step()
        for name, expected in reference.state_dict().items():
            assert torch.equal(again.state_dict()[name], expected), name
    finally:
        memascend.close(again)


@pytest.mark.parametrize("optimizer_lives", [True, False])
def test_a_collected_model_leaves_its_last_step(store: Path, optimizer_lives: bool) -> None:
    model = offload(store)
    optimizer: memascend.AdamW | None = train(model)  # the updates of the last step are deferred still
    if not optimizer_lives:
        optimizer = None
    del model
    collect()
    assert (store / faults.VOLUME).exists()
    assert_free(store)
    kept_as_reference(store)
    if optimizer is not None:
        optimizer.step()  # nothing to do


def test_keep_store_is_honoured(store: Path) -> None:
    model = offload(store, keep_store=False)
    train(model)
    del model
    collect()
    assert not store.exists()
    model = offload(store, keep_store=True, durability="none")
    train(model)
    del model
    collect()
    kept_as_reference(store)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_part_of_a_model_keeps_it_open(store: Path, recompute: bool) -> None:
    expected = Net().layers(X).detach()
    model = offload(store, recompute=recompute)
    part = model.layers
    loss = model(X)
    del model
    collect()
    assert torch.equal(part(X).detach(), expected)
    del part
    collect()
    assert store.exists(), "a graph of the model still needs its weights"
    loss.backward()
    del loss
    collect()
    assert not store.exists()


def test_parameters_of_a_collected_model_are_refused(store: Path) -> None:
    model = offload(store)
    parameters = list(model.parameters())
    del model
    collect()
    for parameter in parameters:
        with pytest.raises(MemascendError, match="closed"):
            parameter.isnan()


def test_collected_in_the_middle_of_other_code(store: Path, tmp_path: Path) -> None:
    other = offload(tmp_path / "other")
    expected = Net()(X)
    model = offload(store)
    train(model)
    gone = [model]
    del model

    def interrupt(*_: Any) -> None:
        gone.clear()
        with torch.device("meta"), torch.inference_mode():  # state that another thread does not see
            gc.collect()

    other.layers[1].register_forward_hook(interrupt)
    try:
        assert torch.equal(other(X), expected)
        runtime.close_unused()
        kept_as_reference(store)
    finally:
        memascend.close(other)


def test_a_cell_that_runs_again(store: Path) -> None:
    def cell() -> nn.Module:
        return offload(store, Net())

    gc.disable()
    try:
        model = cell()
        with pytest.raises(memascend.StoreError, match=r"by this very process.*memascend\.close\(model\)") as caught:
            cell()
        assert caught.value.errno == errno.EBUSY and caught.value.filename == str(store)
        with pytest.raises(memascend.StoreError, match="by this very process"):
            memascend.resume(store, model=Net())
        del caught
        model = Net()  # the first one is garbage now, which no collector has seen
        offload(store, model)
        memascend.close(model)
    finally:
        gc.enable()
    assert not store.exists()


def test_an_optimizer_of_this_process_has_the_store(store: Path) -> None:
    optimizer = memascend.AdamW(nn.Linear(256, 256).parameters(), store=store, allocator="pageable")
    train_one = optimizer.param_groups[0]["params"][0]
    train_one.grad = torch.ones_like(train_one)
    optimizer.step()
    with pytest.raises(memascend.StoreError, match="by this very process"):
        offload(store)


def test_what_cannot_be_closed_is_told(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = offload(store)
    train(model)
    session = memascend.offload_of(model)

    def fail() -> None:
        raise MemascendError("the drive is gone")

    session.streamer.apply_updates = fail  # type: ignore[method-assign]
    del model, session
    with caplog.at_level(logging.WARNING, "memascend"):
        collect()
    assert "the drive is gone" in caplog.text
    assert_free(store)


def test_a_closed_model_is_collected_in_silence(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(runtime._thread, "start_new_thread", lambda *_: told.append(_))
    model = offload(store)
    memascend.close(model)
    del model
    gc.collect()
    assert not told and not runtime._used_holders


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_closes_nothing(store: Path) -> None:
    model = offload(store)
    train(model)
    memascend.flush(model)
    child = os.fork()
    if child == 0:
        del model
        gc.collect()
        runtime.close_unused()
        os._exit(0 if (store / faults.VOLUME).exists() and not runtime._unused_holders else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    memascend.stats(model)
    train(model, 1)
    memascend.close(model)


@pytest.mark.parametrize("thread", ["starts", "cannot start"])
def test_collected_just_before_the_program_ends(store: Path, thread: str) -> None:
    done = python(f"""
        import gc, torch, memascend
        from memascend.session import runtime
        if {thread != "starts"}:
            def refuse(*_):
                raise RuntimeError("can't start new thread")
            runtime._thread.start_new_thread = refuse
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
        memascend.offload(model, store={str(store)!r}, host_memory="64MiB", allocator="pageable")
        optimizer = memascend.AdamW(model.parameters())
        model(torch.ones(4, 256)).sum().backward()
        optimizer.step()
        del model
        gc.collect()
    """)
    # A temporary directory in memory is warned of.
    assert done.returncode == 0 and not re.sub(r".* is on tmpfs, .*\n", "", done.stderr), done.stderr
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    assert memascend.resume(store, model=model, allocator="pageable").steps == 1
    memascend.close(model)


def test_a_collected_model_leaves_its_device(fake: fake_cuda.Fake, store: Path) -> None:
    model = offload(store, device=SimulatedDevice(), device_memory="1GiB", allocator="auto")
    optimizer = train(model)
    assert memascend.stats(model)["device"]["h2d_copies"]
    del model
    collect()
    del optimizer
    gc.collect()
    fake.assert_clean()
    assert_free(store)
    assert (store / faults.VOLUME).exists()
