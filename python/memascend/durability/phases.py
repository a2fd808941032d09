"""The phases of a commit, as a state machine: how the store's last record relates to the state of the run.

A run without surprises goes round: IDLE, a step makes it STEPPED, the next pass records the step (DUE), the end of that
pass starts the native commit (COMMITTING), and the step after it waits for the end of the commit (IDLE). The program
may write weights, load states, or ask for a commit at any time, which the other phases express.

`CommitPhases` knows no session, store or thread. It holds the record and the native commit only in the phases that have
one, and raises AssertionError for an event that the present phase does not allow: a defect of the caller.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from memascend._memascend import Commit


class Phase(Enum):
    """How the last record relates to the state of the run."""

    #: Nothing has changed since the last record, or nothing was recorded and no step was taken.
    IDLE = auto()
    #: The program has written to weights, or the last record was refused. The next recorded step, or `flush`, commits
    #: the run's state.
    WRITTEN = auto()
    #: A step was taken. The next pass records it if the step is to be durable.
    STEPPED = auto()
    #: The last record was made before schedulers had followed the step. The next pass records the step again.
    PARTIAL = auto()
    #: States were loaded, or a partial record is out of date. The next pass makes a record, whatever the step.
    OWED = auto()
    #: A record is made. The commit starts once all updates of its step have been submitted.
    DUE = auto()
    #: The native commit is under way.
    COMMITTING = auto()


class Event(Enum):
    """A change of phase."""

    #: The program has written to weights.
    WRITE = auto()
    #: An optimizer has taken a step.
    STEP = auto()
    #: Weights or states were loaded.
    LOAD = auto()
    #: The step counts no more: the present state takes its place.
    FORGET = auto()
    #: The step is not to be committed at all.
    DROP = auto()
    #: A record is made.
    RECORD = auto()
    #: The native commit begins.
    START = auto()
    #: The generation is durable.
    FINISH = auto()
    #: The commit has failed, or its end was waited for without the other ranks: the record is due again.
    FAIL = auto()
    #: The record cannot be committed, whatever the drives do.
    REFUSE = auto()


_SETTLED = (Phase.IDLE, Phase.WRITTEN, Phase.STEPPED, Phase.PARTIAL, Phase.OWED)

#: The phase that follows each phase at each event. An event without an entry is an error. FINISH and REFUSE lead to
#: another phase than here where something has happened since the record was made.
TRANSITIONS: dict[Event, dict[Phase, Phase]] = {
    Event.WRITE: {
        Phase.IDLE: Phase.WRITTEN,
        Phase.WRITTEN: Phase.WRITTEN,
        Phase.STEPPED: Phase.STEPPED,
        Phase.PARTIAL: Phase.OWED,
        Phase.OWED: Phase.OWED,
    },
    Event.STEP: {
        Phase.IDLE: Phase.STEPPED,
        Phase.WRITTEN: Phase.STEPPED,
        Phase.STEPPED: Phase.STEPPED,
        Phase.PARTIAL: Phase.OWED,
        Phase.OWED: Phase.OWED,
    },
    Event.LOAD: {**dict.fromkeys(_SETTLED, Phase.OWED), Phase.DUE: Phase.DUE, Phase.COMMITTING: Phase.COMMITTING},
    Event.FORGET: {
        **dict.fromkeys(_SETTLED, Phase.IDLE),
        Phase.WRITTEN: Phase.WRITTEN,
        Phase.DUE: Phase.DUE,
        Phase.COMMITTING: Phase.COMMITTING,
    },
    Event.DROP: dict.fromkeys((*_SETTLED, Phase.DUE), Phase.IDLE),
    Event.RECORD: dict.fromkeys(_SETTLED, Phase.DUE),
    Event.START: {Phase.DUE: Phase.COMMITTING},
    Event.FINISH: {Phase.COMMITTING: Phase.IDLE},
    Event.FAIL: {Phase.COMMITTING: Phase.DUE},
    # The run keeps a state that no record has: `flush` tries again, a pass by itself does not.
    Event.REFUSE: {Phase.DUE: Phase.WRITTEN},
}


class _State(NamedTuple):
    """All that `CommitPhases` holds. It is replaced as one, so that no signal finds half of a transition."""

    phase: Phase = Phase.IDLE
    #: The phase that follows the commit of `record`.
    after: Phase = Phase.IDLE
    record: str | None = None
    commit: Commit | None = None


class CommitPhases:
    """The present phase, with the record and the native commit of the phases that have them."""

    def __init__(self) -> None:
        """Begin with nothing to commit."""
        self._state = _State()

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self._state.phase

    @property
    def record(self) -> str | None:
        """The record that is to be committed or is being committed, None in other phases."""
        return self._state.record

    @property
    def commit(self) -> Commit | None:
        """The native commit under way, None in other phases."""
        return self._state.commit

    @property
    def is_unsaved(self) -> bool:
        """Whether the run has a state that no record has."""
        return self.phase in (Phase.WRITTEN, Phase.STEPPED, Phase.OWED)

    def write(self) -> None:
        """Note that the program has written to weights. No record may wait for its commit."""
        self._state = _State(self._following(Event.WRITE))

    def step(self) -> None:
        """Note a step. No record may wait for its commit."""
        self._state = _State(self._following(Event.STEP))

    def load(self) -> None:
        """Note that weights or states were loaded: they need a record of their own."""
        self._state = self._state._replace(phase=self._following(Event.LOAD), after=Phase.OWED)

    def forget(self) -> None:
        """Have the next record describe the present state, and not the last step's. A record that waits stays."""
        self._state = self._state._replace(phase=self._following(Event.FORGET), after=Phase.IDLE)

    def drop(self) -> None:
        """Discard a record that waits, and the step that it describes. A commit under way cannot be discarded."""
        self._state = _State(self._following(Event.DROP))

    def due(self, record: str, *, partial: bool) -> None:
        """Have a record committed; if `partial`, it has to be made again when schedulers have followed its step."""
        after = Phase.PARTIAL if partial else Phase.IDLE
        self._state = _State(self._following(Event.RECORD), after, record)

    def start(self, commit: Commit) -> None:
        """Note that the native commit of the record has begun."""
        self._state = self._state._replace(phase=self._following(Event.START), commit=commit)

    def finish(self) -> None:
        """Note that the record is durable."""
        self._following(Event.FINISH)
        self._state = _State(self._state.after)

    def fail(self) -> None:
        """Note that the record has to be committed again."""
        self._state = self._state._replace(phase=self._following(Event.FAIL), commit=None)

    def refuse(self) -> None:
        """Discard a record that no commit can take. The state that it described is still unsaved."""
        following = self._following(Event.REFUSE)
        self._state = _State(Phase.OWED if self._state.after is Phase.OWED else following)

    def _following(self, event: Event) -> Phase:
        following = TRANSITIONS[event].get(self.phase)
        if following is None:
            raise AssertionError(f"a commit in the phase {self.phase.name} allows no {event.name}")
        return following
