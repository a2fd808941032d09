"""The phases of a commit: each transition by itself, each other one an error, and the course that a run takes."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from durable_run import LEAST, Run, build

import memascend
from memascend.durability.phases import TRANSITIONS, CommitPhases, Event, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

#: Stands for a native commit.
COMMIT: Any = object()

IDLE, WRITTEN, STEPPED, PARTIAL = Phase.IDLE, Phase.WRITTEN, Phase.STEPPED, Phase.PARTIAL
OWED, DUE, COMMITTING = Phase.OWED, Phase.DUE, Phase.COMMITTING

EVENTS: dict[Event, Callable[[CommitPhases], None]] = {
    Event.WRITE: CommitPhases.write,
    Event.STEP: CommitPhases.step,
    Event.LOAD: CommitPhases.load,
    Event.FORGET: CommitPhases.forget,
    Event.DROP: CommitPhases.drop,
    Event.RECORD: lambda phases: phases.due("record", partial=False),
    Event.START: lambda phases: phases.start(COMMIT),
    Event.FINISH: CommitPhases.finish,
    Event.FAIL: CommitPhases.fail,
    Event.REFUSE: CommitPhases.refuse,
}

#: How to come to each phase.
WAYS: dict[Phase, list[Event]] = {
    IDLE: [],
    WRITTEN: [Event.WRITE],
    STEPPED: [Event.STEP],
    OWED: [Event.LOAD],
    DUE: [Event.STEP, Event.RECORD],
    COMMITTING: [Event.STEP, Event.RECORD, Event.START],
}

#: The phase that follows each phase at each event, once more: IDLE, WRITTEN, STEPPED, PARTIAL, OWED, DUE, COMMITTING.
#: None is an error.
EXPECTED: dict[Event, list[Phase | None]] = {
    Event.WRITE: [WRITTEN, WRITTEN, STEPPED, OWED, OWED, None, None],
    Event.STEP: [STEPPED, STEPPED, STEPPED, OWED, OWED, None, None],
    Event.LOAD: [OWED, OWED, OWED, OWED, OWED, DUE, COMMITTING],
    Event.FORGET: [IDLE, WRITTEN, IDLE, IDLE, IDLE, DUE, COMMITTING],
    Event.DROP: [IDLE, IDLE, IDLE, IDLE, IDLE, IDLE, None],
    Event.RECORD: [DUE, DUE, DUE, DUE, DUE, None, None],
    Event.START: [None, None, None, None, None, COMMITTING, None],
    Event.FINISH: [None, None, None, None, None, None, IDLE],
    Event.FAIL: [None, None, None, None, None, None, DUE],
    Event.REFUSE: [None, None, None, None, None, WRITTEN, None],
}


def phases_in(phase: Phase) -> CommitPhases:
    phases = CommitPhases()
    if phase is PARTIAL:
        phases.due("partial", partial=True)
        phases.start(COMMIT)
        phases.finish()
    else:
        for event in WAYS[phase]:
            EVENTS[event](phases)
    assert phases.phase is phase
    return phases


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.name)
@pytest.mark.parametrize("event", list(Event), ids=lambda event: event.name)
def test_each_event_leads_from_each_phase_to_one_other_or_is_an_error(event: Event, phase: Phase) -> None:
    phases = phases_in(phase)
    before = (phases.phase, phases.record, phases.commit)
    expected = EXPECTED[event][list(Phase).index(phase)]
    if expected is None:
        with pytest.raises(AssertionError, match=f"{phase.name} allows no {event.name}"):
            EVENTS[event](phases)
        assert (phases.phase, phases.record, phases.commit) == before, "nothing has changed"
        return
    EVENTS[event](phases)
    assert phases.phase is expected
    assert (phases.record is not None) == (expected in (DUE, COMMITTING))
    assert (phases.commit is not None) == (expected is COMMITTING)
    assert phases.is_unsaved == (expected in (WRITTEN, STEPPED, OWED))


def test_every_event_has_transitions() -> None:
    assert TRANSITIONS.keys() == EVENTS.keys() == EXPECTED.keys() == set(Event)


@pytest.mark.parametrize(
    ("partial", "meanwhile", "following"),
    [
        (False, [], IDLE),
        (True, [], PARTIAL),
        (False, [Event.LOAD], OWED),
        (True, [Event.LOAD], OWED),
        (True, [Event.FORGET], IDLE),
        (False, [Event.LOAD, Event.FORGET], IDLE),
        (True, [Event.FAIL, Event.START], PARTIAL),
        (False, [Event.LOAD, Event.FAIL, Event.START], OWED),
    ],
)
def test_what_happens_during_a_commit_says_what_follows_it(
    partial: bool, meanwhile: list[Event], following: Phase
) -> None:
    phases = CommitPhases()
    phases.due("record", partial=partial)
    phases.start(COMMIT)
    for event in meanwhile:
        EVENTS[event](phases)
        assert phases.record == "record"
    phases.finish()
    assert phases.phase is following
    assert phases.record is None and phases.commit is None


@pytest.mark.parametrize(("partial", "loads", "following"), [(True, False, WRITTEN), (False, True, OWED)])
def test_a_refused_record_leaves_an_unsaved_state(partial: bool, loads: bool, following: Phase) -> None:
    phases = CommitPhases()
    phases.due("too large", partial=partial)
    if loads:
        phases.load()
    phases.start(COMMIT)
    phases.fail()
    phases.refuse()
    assert (phases.phase, phases.record) == (following, None)


def test_a_run_goes_round_the_phases(tmp_path: Path) -> None:
    model = memascend.offload(build("plain"), store=tmp_path / "s", host_memory="64MiB", **LEAST)
    phases = memascend.offload_of(model).commit_log._phases
    seen: dict[tuple[int, str], Phase] = {}

    def at(step: int, moment: str) -> None:
        seen[step, moment] = phases.phase

    try:
        assert phases.phase is IDLE
        run = Run(model, "plain", at=at).go(2)
        assert seen == {
            (0, "forward 0"): IDLE,
            (0, "backward 0"): IDLE,
            (0, "forward 1"): IDLE,
            (0, "backward 1"): IDLE,
            (0, "step"): STEPPED,
            (1, "forward 0"): COMMITTING,
            (1, "backward 0"): COMMITTING,
            (1, "forward 1"): COMMITTING,
            (1, "backward 1"): COMMITTING,
            (1, "step"): STEPPED,
        }
        memascend.flush(model)
        assert phases.phase is PARTIAL, "schedulers may follow the step"
        generation = memascend.stats(model)["generation"]
        memascend.flush(model)
        assert memascend.stats(model)["generation"] == generation, "nothing has changed since"
        run.go(3, 2)
        assert phases.phase is STEPPED
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        assert phases.phase is OWED
        model(**tiny_models.batch("plain", 6))
        memascend.flush(model)
        assert phases.phase is IDLE, "a pass has followed the loading"
        with torch.no_grad():
            next(iter(model.parameters())).add_(1)
        assert phases.phase is WRITTEN
        memascend.flush(model)
        assert phases.phase is IDLE
    finally:
        memascend.close(model)


class Failing:
    """A runtime whose first commit fails once it is waited for."""

    def __init__(self, runtime: Any, number: int | None = None) -> None:
        self._store, self._fails, self._number = runtime.store, True, number

    @property
    def store(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def commit(self, record: str, tickets: list[Any]) -> Any:
        commit = self._store.commit(record, tickets)
        fails, self._fails = self._fails, False
        return FailedCommit(commit, self._number) if fails else commit


class FailedCommit:
    """A commit that is reported as failed."""

    def __init__(self, commit: Any, number: int | None) -> None:
        self._commit, self._number = commit, number

    def wait(self) -> None:
        self._commit.wait()
        raise memascend.StoreError(self._number, "the commit has failed")


def test_a_commit_before_the_scheduler_is_made_good_after_a_second_try_too(tmp_path: Path) -> None:
    model = memascend.offload(build("plain"), store=tmp_path / "s", host_memory="64MiB", **LEAST)
    generations = memascend.offload_of(model).commit_log
    generations._runtime = Failing(generations._runtime)  # type: ignore[assignment]
    seen: list[Phase] = []

    def at(_step: int, moment: str) -> None:
        if moment == "step":
            with pytest.raises(memascend.StoreError, match="the commit has failed"):
                memascend.flush(model)
            seen.append(generations._phases.phase)
            memascend.flush(model)
            seen.append(generations._phases.phase)

    try:
        Run(model, "plain", at=at).go(1)
        assert seen == [DUE, PARTIAL]
    finally:
        memascend.close(model)


@pytest.mark.parametrize("change", ["write", "load"])
def test_a_state_whose_record_was_refused_is_committed_by_the_next_flush(tmp_path: Path, change: str) -> None:
    model = memascend.offload(build("plain"), store=tmp_path / "s", host_memory="64MiB", **LEAST)
    generations = memascend.offload_of(model).commit_log
    try:
        run = Run(model, "plain").go(1)
        model(**tiny_models.batch("plain", 2))
        memascend.flush(model)
        if change == "write":
            with torch.no_grad():
                next(iter(model.parameters())).add_(1)
        else:
            run.optimizer.load_state_dict(run.optimizer.state_dict())
        generations._runtime = Failing(generations._runtime, errno.EFBIG)  # type: ignore[assignment]
        with pytest.raises(memascend.StoreError, match="the commit has failed"):
            memascend.flush(model)
        refused = memascend.stats(model)["generation"]
        memascend.flush(model)
        assert memascend.stats(model)["generation"] == refused + 1
    finally:
        memascend.close(model)
