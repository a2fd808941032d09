"""Saved steps stay: closing, refused resumes, states too large and copies of volumes take nothing away."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import torch
from durable_run import LEAST, same
from torch import nn

import memascend

if TYPE_CHECKING:
    from pathlib import Path


class Small(nn.Module):
    """A model of two layers that is quick on every processor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def go(model: nn.Module, optimizer: Any, steps: range) -> dict[str, torch.Tensor]:
    """Take steps by number, and return the weights after them."""
    for number in steps:
        model(torch.full((4, 256), 0.1 * (number + 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in memascend.parameters_of(model)}


def in_memory(steps: int) -> dict[str, torch.Tensor]:
    """Return the weights after `steps` steps in memory."""
    model = small()
    return go(model, memascend.AdamW(model.parameters(), lr=1e-2), range(steps))


def begun(store: Any) -> None:
    """Leave a run in `store` after three steps, with a checkpoint "two" of the first two."""
    model = memascend.offload(small(), store=store, host_memory="64MiB", keep_store=True, **LEAST)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    go(model, optimizer, range(2))
    memascend.save_checkpoint(model, "two")
    go(model, optimizer, range(2, 3))
    memascend.close(model)


# ---- closing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("keep_store", [None, True, False])
def test_updates_in_place_leave_checkpoints(tmp_path: Path, keep_store: bool | None, failing: bool) -> None:
    begun(tmp_path / "s")
    resumed = memascend.resume(tmp_path / "s", model=small(), durability="none", keep_store=keep_store, **LEAST)
    go(resumed.model, resumed.optimizer, range(3, 4))
    memascend.flush(resumed.model)  # The third step is overwritten, and no generation is left but the checkpoint.
    assert memascend.stats(resumed.model)["generation"] == 0
    if failing:
        with pytest.raises(ZeroDivisionError):
            try:
                raise ZeroDivisionError
            finally:
                memascend.close(resumed.model)
    else:
        memascend.close(resumed.model)
    if keep_store is False:
        assert not (tmp_path / "s" / "memascend.json").exists()
        return
    resumed = memascend.resume(tmp_path / "s", model=small(), tag="two", **LEAST)
    assert resumed.steps == 2
    same(go(resumed.model, resumed.optimizer, range(2, 4)), in_memory(4))
    memascend.close(resumed.model)


def test_a_store_that_stays_for_its_checkpoints_has_the_last_step(tmp_path: Path) -> None:
    model = memascend.offload(small(), store=tmp_path / "s", host_memory="64MiB", **LEAST)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    go(model, optimizer, range(2))
    memascend.save_checkpoint(model, "two")
    model(torch.full((4, 256), 0.3)).backward()
    optimizer.step()
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "s", model=small(), **LEAST)
    assert resumed.steps == 3
    same(dict(memascend.parameters_of(resumed.model)), in_memory(3))
    memascend.close(resumed.model)


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("end", ["closed", "dropped", "failing"])
def test_updates_in_place_end_with_the_last_step(
    tmp_path: Path, end: str, has_checkpoint: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that stays holds the last step, however its steps were written, or a notice names the step it holds."""
    begun(tmp_path / "s")
    if not has_checkpoint:
        resumed = memascend.resume(tmp_path / "s", model=small(), keep_store=True, **LEAST)
        memascend.delete_checkpoint(resumed.model, "two")
        memascend.close(resumed.model)
    resumed = memascend.resume(tmp_path / "s", model=small(), durability="none", **LEAST)
    go(resumed.model, resumed.optimizer, range(3, 5))
    memascend.flush(resumed.model)
    if end == "closed":
        memascend.close(resumed.model)
    elif end == "failing":
        memascend.offload_of(resumed.model).close(failed=True)
        left = "the store keeps its checkpoints alone: two" if has_checkpoint else "nothing was durable before"
        assert f"updates in place are not committed after an error: {left}" in caplog.text
    del resumed
    gc.collect()
    if not has_checkpoint and end in ("closed", "failing"):
        assert not memascend.can_resume(tmp_path / "s"), "closed in peace, the store goes; and it holds nothing"
        return
    resumed = memascend.resume(tmp_path / "s", model=small(), tag="two" if end == "failing" else None, **LEAST)
    assert resumed.steps == (2 if end == "failing" else 5)
    same(go(resumed.model, resumed.optimizer, range(resumed.steps, 7)), in_memory(7))
    memascend.close(resumed.model)


# ---- going back -------------------------------------------------------------------------------------------------


class OtherBuffers(Small):
    """The same parameters with a buffer that the run never had: refused late, once the store is open."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("more", torch.zeros(3))


class Choosy(memascend.AdamW):
    """An optimizer of the user's own that cannot be made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dept": 7}, TypeError),
        ({"depth": 0}, ValueError),
        ({"durability": "evry:2"}, ValueError),
        ({"allocator": "no such"}, ValueError),
        ({"host_memory": "10KB"}, memascend.BudgetError),
        ({"device": "cuda:77"}, memascend.MemascendError),
        ({"model": OtherBuffers}, memascend.CheckpointError),
        ({"optimizer_classes": {"AdamW": Choosy}}, ZeroDivisionError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_going_back_that_is_refused_gives_up_no_step(
    tmp_path: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    begun(tmp_path / "s")
    options = {"model": Small} | LEAST | options
    with pytest.raises(error):
        memascend.resume(tmp_path / "s", tag="two", **options | {"model": options["model"]()})
    resumed = memascend.resume(tmp_path / "s", model=small(), **LEAST)
    assert resumed.steps == 3
    same(dict(memascend.parameters_of(resumed.model)), in_memory(3))
    memascend.offload_of(resumed.model).close(failed=True)
    # And a restore that is not refused does go back.
    resumed = memascend.resume(tmp_path / "s", model=small(), tag="two", **LEAST)
    memascend.offload_of(resumed.model).close(failed=True)
    resumed = memascend.resume(tmp_path / "s", model=small(), **LEAST)
    assert resumed.steps == 2
    same(go(resumed.model, resumed.optimizer, range(2, 5)), in_memory(5))
    memascend.close(resumed.model)


# ---- states that are too large ------------------------------------------------------------------------------------


class Tracked:
    """An object whose state takes as many bytes as the test says."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"blob": "x" * self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = len(state["blob"])


def test_a_state_that_does_not_fit_is_named_and_the_step_before_stays(tmp_path: Path) -> None:
    model = memascend.offload(small(), store=tmp_path / "s", host_memory="64MiB", **LEAST)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    history = Tracked(3)
    memascend.track(model, small=Tracked(5), history=history)
    go(model, optimizer, range(2))
    memascend.flush(model)
    history.count = 256 << 20
    with pytest.raises(memascend.StoreError, match=r"'history' takes the most: 256.0 MiB") as caught:
        go(model, optimizer, range(2, 3))
    optimizer.zero_grad()  # The step was not taken.
    assert "What was durable before stays" in str(caught.value)
    (tmp_path / "copy").mkdir()
    for file in (tmp_path / "s").iterdir():
        shutil.copy(file, tmp_path / "copy")
    resumed = memascend.resume(tmp_path / "copy", model=small(), **LEAST)
    assert resumed.steps == 2
    memascend.close(resumed.model)
    # Once it is small again, the run is durable as before.
    history.count = 1
    go(model, optimizer, range(2, 3))
    memascend.offload_of(model).close(failed=True)
    resumed = memascend.resume(tmp_path / "s", model=small(), **LEAST)
    assert resumed.steps == 3
    same(dict(memascend.parameters_of(resumed.model)), in_memory(3))
    memascend.close(resumed.model)


# ---- copies of volumes --------------------------------------------------------------------------------------------


def test_a_copy_of_one_of_two_volumes_leaves_the_original_alone(tmp_path: Path) -> None:
    volumes = [tmp_path / "1", tmp_path / "2"]
    begun(volumes)
    copies = [shutil.copytree(volume, tmp_path / f"copy of {volume.name}") for volume in volumes]
    for copy, volume in zip(copies, volumes, strict=True):
        for use in (memascend.resume, memascend.can_resume):
            with pytest.raises(memascend.StoreError, match="it is a copy, or was moved") as caught:
                use(copy)
            assert str(copy) in str(caught.value) and str(volume) in str(caught.value)
    # All of the copies are a run of their own.
    resumed = memascend.resume(copies, model=small(), **LEAST)
    same(go(resumed.model, resumed.optimizer, range(3, 5)), in_memory(5))
    memascend.close(resumed.model)
    resumed = memascend.resume(volumes[1], model=small(), **LEAST)
    assert resumed.steps == 3
    same(go(resumed.model, resumed.optimizer, range(3, 4)), in_memory(4))
    memascend.close(resumed.model)


# ---- flushes that fail --------------------------------------------------------------------------------------------

#: A flush that fails once, as Linux reports it: the next one succeeds, without the lost pages.
FAILING_FLUSH = r"""
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
extern "C" int fdatasync(int file) {
    const char *marker = getenv("FAIL_ONE_FLUSH");
    if (marker && unlink(marker) == 0) { errno = EIO; return -1; }
    return reinterpret_cast<int (*)(int)>(dlsym(RTLD_NEXT, "fdatasync"))(file);
}
"""


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_flush_that_failed_once_ends_what_becomes_durable(tmp_path: Path, engine: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        requirements.unmet("compiler", "there is no g++")
    (tmp_path / "flush.cpp").write_text(FAILING_FLUSH)
    library, marker = tmp_path / "flush.so", tmp_path / "marker"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "flush.cpp", "-ldl"], check=True)
    code = f"""
        import os, pathlib, memascend
        from test_nothing_lost import go, small
        model = memascend.offload(
            small(), store={str(tmp_path / "s")!r}, host_memory="64MiB", engine={engine!r}, allocator="pageable"
        )
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        go(model, optimizer, range(2))
        memascend.flush(model)
        pathlib.Path({str(marker)!r}).touch()
        for number in range(2, 5):
            try:
                go(model, optimizer, range(number, number + 1))
                memascend.flush(model)
            except memascend.StoreError as error:
                print(number, error.errno, memascend.stats(model)["generation"], error)
        print("marker", os.path.exists({str(marker)!r}), flush=True)
        os._exit(0)
    """
    environment = os.environ | {"LD_PRELOAD": str(library), "FAIL_ONE_FLUSH": str(marker)}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    *told, last = done.stdout.splitlines()
    assert last == "marker False", "a flush has failed"
    assert len(told) == 3, done.stdout
    for number, line in enumerate(told, 2):
        assert line.startswith(f"{number} {errno.EIO} {told[0].split()[2]} cannot flush {tmp_path / 's'}"), line
        assert "resume it from its last durable step" in line
    resumed = memascend.resume(tmp_path / "s", model=small(), **LEAST)
    assert resumed.steps == 2
    same(go(resumed.model, resumed.optimizer, range(2, 4)), in_memory(4))
    memascend.close(resumed.model)


# ---- parameters without elements --------------------------------------------------------------------------------


class Hollow(Small):
    """A model with parameters that have no elements, as an adapter of rank 0 leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.hollow = nn.Parameter(torch.empty(0, 256))
        self.idle = nn.Parameter(torch.empty(4, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.hollow.sum()


def test_parameters_without_elements_do_not_keep_a_run_from_being_durable(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Hollow()
    reference = memascend.AdamW(model.parameters(), lr=1e-2)
    expected = go(model, reference, range(4))
    torch.manual_seed(0)
    model = memascend.offload(Hollow(), store=tmp_path / "s", host_memory="64MiB", durability="step", **LEAST)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    go(model, optimizer, range(2))
    memascend.save_checkpoint(model, "two")
    assert not [notice for notice in memascend.stats(model)["notices"] if "durable" in notice]
    memascend.offload_of(model).close(failed=True)
    resumed = memascend.resume(tmp_path / "s", model=Hollow(), **LEAST)
    assert resumed.steps == 2
    same(go(resumed.model, resumed.optimizer, range(2, 4)), expected)
    states = resumed.optimizer.state_dict()
    assert states["param_groups"] == reference.state_dict()["param_groups"]
    for number, state in reference.state_dict()["state"].items():
        same(states["state"][number], state)
    memascend.close(resumed.model)
