"""The threads of an offloaded model: chosen for where it computes, set in one place, and told."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_models
import torch

import memascend
from memascend.hardware import processors, threads, waits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def update_threads() -> int:
    """Return how many threads of this process run the kernels of updates."""
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("memascend-updat") for name in names)


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    monkeypatch.setattr(threads, "processors", lambda: processors.Processors(16, 16))


def test_they_follow_the_cores(offloaded: Callable[..., nn.Module]) -> None:
    before = update_threads()
    model = offloaded(tiny_models.build("llama"), host_memory="1GiB")
    plan, stats = memascend.offload_of(model).plan, memascend.stats(model)
    assert plan.update_threads == stats["threads"]["update"] == update_threads() - before == 4
    assert plan.slots.count == 12 and stats["host_bytes_reserved"] == plan.arena_bytes
    assert stats["threads"]["torch"] == torch.get_num_threads()
    assert set(stats["threads"]["processors"]) == {"logical", "physical", "quota"}


def test_three_quarters_of_them_beside_a_device(on_device: Callable[..., nn.Module]) -> None:
    model = on_device(tiny_models.build("llama"), host_memory="1GiB")
    plan = memascend.offload_of(model).plan
    assert plan.update_threads == 12 and plan.slots.count == 36


def test_one_variable_sets_those_of_every_store(
    offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(threads.VARIABLE, "update=5")
    before = update_threads()
    offloaded(tiny_models.build("llama"))
    assert update_threads() - before == 5
    offloaded(tiny_models.build("llama"), store=tmp_path / "option", compute_threads=2)
    assert update_threads() - before == 7, "the option of a model comes first"
    parameter = torch.nn.Parameter(torch.ones(300_000))
    optimizer = memascend.AdamW([parameter], store=tmp_path / "states", allocator="pageable")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert update_threads() - before == 12
    optimizer.close()


def test_a_wrong_variable_is_refused_before_anything_is_made(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(threads.VARIABLE, "update=all")
    with pytest.raises(ValueError, match="MEMASCEND_THREADS has 'update=all'"):
        memascend.offload(tiny_models.build("llama"), store=store, host_memory="256MiB")
    assert not store.exists()


def test_waits_are_watched_while_a_store_is_open(
    offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not waits.is_gnu(waits.library()):
        pytest.skip("PyTorch's OpenMP is not GNU's")
    monkeypatch.setattr(waits, "LOOK_SECONDS", 0.01)
    for name in waits.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(threads.VARIABLE, "waits=yield")
    torch.set_num_threads(2)
    try:
        model = offloaded(tiny_models.build("llama"))
        deadline = threading.Event()
        while memascend.stats(model)["threads"]["waits"] != "yield":
            deadline.wait(0.01)
        assert waits.state() == "yield"
        memascend.close(model)
        while any(thread.name == "memascend-waits" for thread in threading.enumerate()):
            deadline.wait(0.01)
        assert waits.state() == "as OpenMP does by itself"
    finally:
        torch.set_num_threads(1)
