"""A panic of the native code is an ordinary error, after which nothing is committed and the last step is whole."""

from __future__ import annotations

import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
from durable_run import LEAST, Run, build, given, same

import memascend
from memascend.errors import DefectError

if TYPE_CHECKING:
    from collections.abc import Callable

BINDINGS = Path(__file__).resolve().parents[2] / "crates" / "memascend-py" / "src"
#: No unit and no byte of one has such a number.
NOWHERE = 1 << 40


def in_a_call(runtime: Any) -> None:
    """Panic with a lock held, which is poisoned by it."""
    runtime.units.wait_unit(NOWHERE)


def in_a_thread(runtime: Any) -> None:
    """Panic in the thread that reads units: their buffer is too short."""
    name = runtime.store.tensor_names()[0]
    lease = runtime.memory.lease_outside(4096)
    runtime.units.fetch(runtime.units.add_unit(), [(runtime.store.find_tensor(name), NOWHERE, 4096)], lease, []).wait()


def in_a_value(runtime: Any) -> None:
    """Panic in a function that cannot fail otherwise."""
    runtime.units.fetch(runtime.units.add_unit(), [], None, []).is_group_ready(0)


PLACES = {"cell.rs": in_a_call, "thread memascend-executor": in_a_thread, "handles.rs": in_a_value}


@pytest.mark.parametrize("place", PLACES)
def test_a_panic_is_an_error_and_the_last_step_is_whole(tmp_path: Path, place: str) -> None:
    expected = Run(build("normed"), "normed").go(2).state()
    model = memascend.offload(build("normed"), store=tmp_path / "s", host_memory="64MiB", keep_store=True, **LEAST)
    run = Run(model, "normed").go(2)
    memascend.flush(model)
    runtime = memascend.offload_of(model).runtime
    commit = runtime.store.commit
    with pytest.raises(DefectError, match=re.escape(place)) as caught:
        PLACES[place](runtime)
    assert isinstance(caught.value, memascend.MemascendError) and isinstance(caught.value, Exception)
    assert "github.com" in str(caught.value) and "memascend.resume" in str(caught.value)
    refused: list[Callable[[], object]] = [
        lambda: run.go(3, 2),
        lambda: memascend.flush(model),
        lambda: memascend.save_checkpoint(model, "after"),
        lambda: commit("{}", []).wait(),
        lambda: memascend.stats(model),
    ]
    for use in refused:
        with pytest.raises(DefectError, match=re.escape(place)):
            use()
    with pytest.raises(DefectError):
        memascend.close(model)
    assert runtime.closed
    resumed = memascend.resume(tmp_path / "s", model=given("normed"), **LEAST)
    assert resumed.steps == 2
    same(Run(resumed.model, "normed", resumed.optimizer).state(), expected)
    memascend.close(resumed.model)


def test_a_commit_of_what_a_panic_has_ended_is_none(tmp_path: Path) -> None:
    model = memascend.offload(
        tiny_models.build("llama"), store=tmp_path / "s", host_memory="64MiB", keep_store=True, **LEAST
    )
    runtime = memascend.offload_of(model).runtime
    before = runtime.store.generation
    lease, name = runtime.memory.lease_outside(4096), runtime.store.tensor_names()[0]
    ticket = runtime.units.fetch(
        runtime.units.add_unit(), [(runtime.store.find_tensor(name), NOWHERE, 4096)], lease, []
    )
    with pytest.raises(DefectError, match="memascend-executor"):
        # Refused where the thread has ended already, else by the wait for the ticket.
        runtime.store.commit("{}", [ticket]).wait()
    assert runtime.store.generation == before
    with pytest.raises(DefectError):
        memascend.close(model)


def test_a_defect_is_the_same_in_another_process() -> None:
    error = pickle.loads(pickle.dumps(DefectError("index out of bounds")))
    assert error.what == "index out of bounds" and str(error).count("a defect of memascend") == 1


def test_everything_that_python_calls_is_guarded() -> None:
    found = 0
    for path in BINDINGS.rglob("*.rs"):
        lines = path.read_text().splitlines()
        for above, line in pairwise(lines):
            if line.strip() in ("#[pymethods]", "#[pyfunction]"):
                found += 1
                assert above == "#[guarded]", f"{path.name}: {line} without #[guarded]"
    assert found > 35
