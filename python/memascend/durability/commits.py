"""Which states of a run are durable: a step of the optimizer makes a generation, committed beside the training.

A step's updates run with the next forward pass, into extents that no durable generation needs. Once the last update has
been submitted, a native thread waits for the writes, flushes the drives and writes the manifest, while the backward
pass computes. The next step waits for that commit. A generation is the tensors on the SSD and one JSON text, the
record (`memascend.durability.record`).

Between the beginning of a pass and the step that ends it, weights and states belong to the step before, while
buffers, random numbers and tracked objects are on their way to the next. A commit in between takes all of them from the
step before (`memascend.durability.step_snapshot`).

Updates of a step that is to be durable write resident data at once (`writes_through`), beside the forward pass, if all
states are resident; where some are read there, the drives have enough to do, and the commit writes resident data beside
the backward pass. Other steps leave it to the next commit.

Over ranks each rank commits to its own store; then the ranks wait for each other (`CommitLog.wait_committed`), and only
after that do updates write over the generation before, whose manifest lies beside the new one until the next commit. A
rank that was quicker goes back to it (`memascend.recovery.common_generation`). A manifest for another reason (a
checkpoint that is kept, deleted or restored) is only written while all ranks have the same generation, since it takes
the place of the one before.
"""

from __future__ import annotations

import errno
import json
import logging
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from memascend.common.interrupts import uninterrupted
from memascend.common.sizes import format_size
from memascend.durability import exact_json
from memascend.durability.added import AddedParameters, Copies, copied_bytes
from memascend.durability.model_buffers import ModelBuffers
from memascend.durability.optimizers import JoinedOptimizers
from memascend.durability.phases import CommitPhases, Phase
from memascend.durability.record import random_states, record_text, restore_random_states
from memascend.durability.step_snapshot import StepSnapshot
from memascend.errors import MemascendError, StoreError
from memascend.layout.units import raw_tensor_access
from memascend.options import parse_durability
from memascend.streaming.resident_states import stay_whole

if TYPE_CHECKING:
    from memascend._memascend import Runtime
    from memascend.durability.protocols import OptimizerProtocol, SessionProtocol
    from memascend.layout.units import Unit
    from memascend.streaming.streamer import Streamer

#: The tracked object whose state is taken at once when a step is taken. The states of the others
#: are taken when the next pass begins, after schedulers and scalers have followed the step.
_TAKEN_WITH_THE_STEP = "data"

_log = logging.getLogger("memascend")


class CommitLog:
    """The commits of one offloaded model: when a step becomes a generation of its store."""

    def __init__(self, session: SessionProtocol, runtime: Runtime, source: dict[str, Any]) -> None:
        """Commit to the store of `runtime` as the session's `durability` says, after the updates of its streamer.

        `source` describes how to make the model again. Raises ValueError for an unknown `durability`.
        """
        self._session_reference = weakref.ref(session)
        self._runtime = runtime
        #: Steps between generations; 0 for none; None until it is known whether the volumes have
        #: room for a second copy of weights and states.
        self.period = parse_durability(session.options.durability)
        self._source = source
        self._optimizers = JoinedOptimizers()
        #: States of a resumed run whose objects have not been given to `track` yet.
        self.unclaimed_states: dict[str, Any] = {}
        #: The record of a resumed run, until its first step.
        self._resumed: dict[str, Any] | None = None
        #: Optimizer steps in the life of the run, and those in the generation committed last, or
        #: being committed.
        self.steps = 0
        self._committed_steps = 0
        #: The optimizer whose step was counted since the last pass began.
        self._counted: weakref.ref[OptimizerProtocol] | None = None
        #: The state of the last step.
        self._step_snapshot: StepSnapshot | None = None
        #: The state of the tracked data as it was given to `track`, before the first step.
        self._first_data: Any = None
        #: Whether the store held a generation or snapshots when it was opened.
        self.was_restored = False
        #: Whether weights have changed since a pass began that no step has ended, so that they belong to no step.
        self.within_step = False
        self._buffers = ModelBuffers(session, runtime)
        self._added = AddedParameters(session, runtime)
        #: Whether generations have parameters that were added to the model, with their states.
        self.has_beside = False
        self._phases = CommitPhases()

    @property
    def durable_steps(self) -> int:
        """Steps in the generation that was committed last."""
        return self._committed_steps

    # ---- the contents of a generation ---------------------------------------------------------------------

    @property
    def _session(self) -> SessionProtocol:
        session = self._session_reference()
        assert session is not None, "the session outlives its generations"
        return session

    @property
    def _streamer(self) -> Streamer:
        return self._session.streamer

    @property
    def _tracked(self) -> dict[str, Any]:
        return self._session.tracked

    @property
    def optimizers(self) -> list[OptimizerProtocol]:
        """The optimizers that train the model, the oldest first."""
        return self._optimizers.living

    def join(self, optimizer: OptimizerProtocol) -> None:
        """Include an optimizer in every generation from now on."""
        self._optimizers.join(optimizer)

    def leave(self, optimizer: OptimizerProtocol) -> None:
        """Leave out an optimizer that has taken no step: another one has its parameters."""
        self._optimizers.leave(optimizer)

    def track(self, objects: dict[str, Any]) -> None:
        """Include the states of `objects` in every generation, and load the states that a resumed run has for them.

        Raises TypeError for an object without `state_dict` and `load_state_dict`, MemascendError for a state that a
        record cannot hold.
        """
        for name, tracked in objects.items():
            if not all(callable(getattr(tracked, method, None)) for method in ("state_dict", "load_state_dict")):
                raise TypeError(f"{name} is a {type(tracked).__name__} without state_dict() and load_state_dict()")
            exact_json.encode(tracked.state_dict(), name)  # Raises now for a state that no record can hold.
        for name, tracked in objects.items():
            if name in self.unclaimed_states:
                tracked.load_state_dict(self.unclaimed_states[name])
                del self.unclaimed_states[name]
            self._tracked[name] = tracked
            self._note_tracked(name, tracked)
        if self._resumed is not None:
            # Undo changes since the program resumed: a new scheduler, for example, sets the
            # learning rate.
            restore_random_states(self._resumed["random"])
            self._optimizers.restore_groups(self._resumed["optimizers"])

    def _note_tracked(self, name: str, tracked: Any) -> None:
        """Add the state of an object that is tracked from now on to the state of the last step."""
        moment = self._step_snapshot
        state = exact_json.encode(tracked.state_dict(), name)
        if name == _TAKEN_WITH_THE_STEP:
            if moment is None:
                self._first_data = state
            elif moment.data is None:
                moment.data = state
        if moment is not None and moment.tracked is not None:
            moment.tracked[name] = moment.data if name == _TAKEN_WITH_THE_STEP else state

    def decide(self, optimizer: OptimizerProtocol, missing_bytes: int, spare_bytes: int) -> bool:
        """Return whether tensors get a second slot, so that steps are durable, and settle `period`.

        Args:
            optimizer: the optimizer that makes room for its states.
            missing_bytes: bytes that its states and gradients take in the store beyond the present tensors.
            spare_bytes: bytes that second slots take in addition.

        Raises StoreError where the volumes have no room, MemascendError where `durability` cannot be had.
        """
        session = self._session
        alone, recordable = optimizer.trains_only(session), optimizer.can_be_recorded(session)
        goes_on = bool(self._runtime.store.generation)
        if not recordable and (self.period or (self.period is None and goes_on)):
            optimizer.describe(session)  # Raises, naming the reason.
        if self.period is None and not alone and not goes_on:
            self.period = 0
            remedy = ": durability='step' makes them durable" if recordable else ""
            session.notices.append(
                f"{type(optimizer).__name__} also trains parameters outside of the store: its steps are not durable, "
                f"and a run that is killed cannot be resumed (durability='none'){remedy}"
            )
        if self.period is None:
            self.period = self._period_with_room(missing_bytes, spare_bytes)
        return self.period > 0

    def join_beside(self, optimizer: OptimizerProtocol) -> bool:
        """Include an optimizer of parameters that were added to the model, and return whether its steps are durable.

        They are where `durability` asks for it, and in a run that goes on: "auto" leaves adapters to the program, which
        saves them. Raises StoreError where the volumes have no room, MemascendError where `durability` cannot be had.
        """
        if not self.period and not self._runtime.store.generation:
            return False
        if not optimizer.can_be_recorded(self._session):
            if parse_durability(self._session.options.durability):
                optimizer.describe(self._session)  # Raises, naming the reason.
            self._session.notices.append(
                f"{type(optimizer).__name__} also trains parameters that are not of the offloaded model: its steps are "
                "not durable"
            )
            return False
        nbytes = copied_bytes(self._session)
        if self.decide(optimizer, nbytes, nbytes):
            self._runtime.store.check_room(2 * nbytes)
        self.join(optimizer)
        self.has_beside = True
        return True

    def check_beside(self, optimizer: OptimizerProtocol) -> None:
        """Raise MemascendError where durable steps are asked for, and no parameter of the model is trained.

        So it is with prompt tuning: `optimizer` trains parameters of PEFT's wrapper.
        """
        session, model = self._session, self._session.model()
        if not parse_durability(session.options.durability) or model is None:
            return
        with raw_tensor_access():
            trains = any(parameter.requires_grad for parameter in model.parameters())
        if not trains:
            raise MemascendError(
                f"durability={session.options.durability!r} has nothing to make durable: no parameter of the offloaded "
                f"model is trained, and {type(optimizer).__name__} trains others, such as those of PEFT's wrapper "
                "around a model (prompt tuning, p-tuning, prefix tuning): leave durability out, and save them and the "
                "optimizer's state_dict() yourself"
            )

    def restore_beside(self, record: dict[str, Any]) -> Copies:
        """Load the values that a record has of parameters added to the model, and return their states."""
        return self._added.restore(record.get("added", []))

    def _period_with_room(self, missing_bytes: int, spare_bytes: int) -> int:
        session = self._session
        try:
            self._runtime.store.check_room(missing_bytes + spare_bytes)
        except StoreError:
            if self._runtime.store.generation:  # Updates in place would write over this generation.
                raise
            self._runtime.store.check_room(missing_bytes)
            session.notices.append(
                f"the store has no room for {format_size(spare_bytes)} more, which a second copy of weights and states "
                "would take: they are updated in place, and a run that is killed cannot be resumed "
                "(durability='none')"
            )
            return 0
        return 1

    # ---- the course of a step -----------------------------------------------------------------------------

    def writes_through(self, in_backward: bool = False) -> bool:
        """Return whether updates, in the backward pass if `in_backward`, write resident data at once.

        Where only a part is resident, the drives have enough to do beside the forward pass: the commit writes it beside
        the backward pass, in which they would be idle.
        """
        tensors = (tensor for unit in self._session.units for tensor in unit.tensors)
        return self.makes_durable(in_backward) and stay_whole(tensors)

    def makes_durable(self, in_backward: bool = False) -> bool:
        """Return whether the last step is to be durable; with `in_backward`, the step after its updates."""
        if in_backward:
            return self._wanted(ahead=1)
        return bool(self.period) and (self._phases.record is not None or self._needs_record())

    def allows_in_backward(self, optimizer: OptimizerProtocol) -> bool:
        """Return whether updates may begin in the middle of a pass: `settle` would apply none of the last step."""
        stepped_since = self._counted is not None and self._counted() is optimizer
        return not stepped_since and self._phases.phase is not Phase.DUE

    def stepped(self, optimizer: OptimizerProtocol) -> None:
        """Note that a step was taken: its generation is committed with the next pass."""
        self._resumed = None
        if self._counted is None or self._counted() is optimizer:
            self.steps += 1  # Steps of other optimizers before the next pass belong to the same step of the run.
            self._counted = weakref.ref(optimizer)
        may_be_kept = self._may_be_kept()
        self._optimizers.stepped(optimizer, holds=may_be_kept)
        self.within_step = False
        if may_be_kept:
            self._step_snapshot = self._take_snapshot()
            self._phases.step()
        else:
            self._step_snapshot = None
            self._phases.forget()

    def begin(self, late: bool = False) -> None:
        """Note that a pass begins. If a generation is due, record its state before the pass changes it.

        `late` says that the program has used weights since the step: buffers are taken as they were then.
        """
        self._counted = None
        self.begin_part(late)
        if self._needs_record():
            self._phases.due(self._record(), partial=False)

    def begin_part(self, late: bool = False) -> None:
        """Note that a part of the model is about to run: the state of the last step is taken before.

        Steps of other optimizers that follow still belong to the same step of the run.
        """
        moment = self._step_snapshot
        if moment is None:
            if not self._may_be_kept():
                return
            # Before the first step: there is nothing new to commit.
            moment = self._step_snapshot = self._take_snapshot()
        elif moment.passed:
            return
        elif not late:
            moment.buffers = self._buffers.changed()
        moment.tracked = self._tracked_states(moment)
        self._optimizers.note_options()
        moment.passed = True

    def start(self) -> None:
        """Start committing the generation that is due, once all updates of its step have been submitted."""
        record = self._phases.record
        if record is None or self._phases.phase is not Phase.DUE:
            return
        if not self._streamer.deferred():
            with uninterrupted():
                self._phases.start(self._runtime.store.commit(record, self._streamer.tickets()))

    def wait_committed(self, optimizer: OptimizerProtocol | None = None) -> None:
        """Wait until the generation that is due is durable: the next updates may overwrite the one before it.

        `optimizer` is about to step, or to begin training a parameter. Raises StoreError if the generation could not be
        committed; the next call tries again, unless the generation's record is too large.
        """
        # On every rank, although only those with deferred updates need their buffers for them below.
        self._streamer.forget_last_use()
        if self.period and optimizer is not None and self._counted is not None and self._counted() is optimizer:
            # No pass of the whole model since its last step: the training loop calls parts of the
            # model.
            self._streamer.apply_updates()
            self.begin(late=True)
        if self._phases.phase is Phase.DUE:
            self._streamer.apply_updates()
            self.start()
        commit = self._phases.commit
        if commit is not None:
            try:
                with self._session.timeline.waiting("ssd_write"):
                    commit.wait()
            except MemascendError as error:
                self._phases.fail()
                if isinstance(error, StoreError) and error.errno == errno.EFBIG and error.operation is None:
                    self._refuse_record(error)
                raise
            # Until every rank has the generation, any of them may have to go back to the one before.
            self._session.membership.barrier(f"have generation {self._runtime.store.generation} on every rank")
            self._phases.finish()
            self._committed_steps = self.steps

    def _refuse_record(self, error: StoreError) -> None:
        """Discard a record that does not fit into the manifest, and raise an error that names the largest part.

        The generation before it stays. Later steps have records of their own.
        """
        record = self._phases.record
        assert record is not None
        tracked = json.loads(record)["tracked"]
        self._phases.refuse()
        if self._step_snapshot is not None:
            self._step_snapshot.tracked = None  # The program may make them smaller.
        if tracked:
            sizes = {name: len(exact_json.as_json(state)) for name, state in tracked.items()}
            name, size = max(sizes.items(), key=lambda item: item[1])
            told = f"{error}. Of what memascend.track was given, {name!r} takes the most: {format_size(size)}"
            raise StoreError(error.errno, told, error.filename) from error

    def commit(self) -> None:
        """Make the present state of the run a durable generation. Apply all updates before."""
        self.wait_committed()
        if self.period and (self._phases.is_unsaved or self.steps != self._committed_steps):
            self.keep()

    def keep(self) -> None:
        """Commit a generation even if nothing changed: the store is to be kept, or a snapshot made.

        In a pass that no step has ended yet, it is the state of the step before. Where the program has written to
        weights since the pass began, it wants those: then the present state is committed.
        """
        self.wait_committed()
        if self.within_step:
            self._drop_snapshot()
        moment, stepped = self._step_snapshot, self._step_snapshot is not None and self._resumed is None
        if moment is None:
            moment = self._step_snapshot = self._take_snapshot()
        elif not moment.passed:
            moment.buffers = self._buffers.changed()
        # Schedulers may follow the step only after a partial record. Their new states are committed with the next pass.
        self._phases.due(self._record(), partial=stepped and not moment.passed)
        self.wait_committed()
        if moment.passed and self._buffers.changed() is not None:
            _log.warning(
                "a pass with gradients has changed buffers of the model and no optimizer step has followed: the store "
                "has them as they were after step %d",
                self.steps,
            )

    def changed(self) -> None:
        """Note that weights or states were loaded: they are committed with the next pass, or by `flush`."""
        if self.period and self._runtime.store.generation:
            moment = self._take_snapshot()
            self._phases.load()
            self._step_snapshot = moment
        elif self._step_snapshot is not None and self._step_snapshot.passed:
            self._drop_snapshot()
        self._optimizers.forget_options()

    def _drop_snapshot(self) -> None:
        """Have the next commit take the present state, and not the state of the last step."""
        self._phases.forget()
        self._step_snapshot, self.within_step = None, False
        self._optimizers.forget_options()

    def before_write(self) -> None:
        """Wait until no generation is due: the program is about to change weights beside a step.

        The change becomes durable with the next step, or by `flush`.
        """
        if self.period:
            self.wait_committed()
        if self._step_snapshot is not None and self._step_snapshot.passed:
            # Weights that nothing but the program trains are as it leaves them.
            self.within_step = bool(self._optimizers) and self.steps > 0
            if not self.within_step:
                self._drop_snapshot()
        if self.period:
            self._phases.write()

    def note_surprise(self, unit: Unit) -> None:
        """Commit no generation whose weights a module has changed in its forward without a sign of it before.

        Raises StoreError where the store has the unit's weights neither as they were nor as they are.
        """
        _log.warning(
            "%s writes to its own weights in its forward: from now on each pass waits there until the step before is "
            "durable",
            unit.name,
        )
        if not self.skip_commit():
            return
        # The last update of the unit may have been on its way to the drives while its module wrote.
        for tensor_id, _, nbytes in unit.weights:
            stored = torch.empty(nbytes, dtype=torch.uint8)
            # Raises for bytes without their checksum.
            self._runtime.store.read(tensor_id, stored.data_ptr(), nbytes)

    def skip_commit(self) -> bool:
        """Commit no generation of the last step, since its weights were changed before that was done.

        Returns whether the step had been committed by then, or was being committed.
        """
        committing = self._phases.phase is Phase.COMMITTING
        if committing or not self.period or self.steps == self._committed_steps:
            self.wait_committed()
            return bool(self.period)
        self._phases.drop()
        self._drop_snapshot()
        self.within_step = True
        return False

    def abandon(self) -> None:
        """Wait for the end of a commit under way, even if it fails."""
        commit = self._phases.commit
        if commit is not None:
            with suppress(MemascendError):  # The generation before it stays.
                commit.wait()
                self._committed_steps = self.steps
            self._phases.fail()

    def restore(self, record: dict[str, Any]) -> None:
        """Go on from the record of a store."""
        self.was_restored = True
        self.steps = self._committed_steps = record["steps"]
        self.unclaimed_states = record["tracked"]
        self._resumed = {"random": record["random"], "optimizers": record["optimizers"]}
        self._buffers.restore(record["buffers"])
        data = exact_json.encode(self.unclaimed_states.get(_TAKEN_WITH_THE_STEP), _TAKEN_WITH_THE_STEP)
        self._step_snapshot = StepSnapshot(random=record["random"], data=data, buffers=None)

    def _wanted(self, ahead: int = 0) -> bool:
        """Return whether a generation is due after so many steps more."""
        return bool(self.period) and self.steps + ahead - self._committed_steps >= (self.period or 1)

    def _needs_record(self) -> bool:
        """Return whether the next pass is to record the last step."""
        phase = self._phases.phase
        return phase in (Phase.PARTIAL, Phase.OWED) or (phase is Phase.STEPPED and self._wanted())

    def _may_be_kept(self) -> bool:
        """Return whether a step may become a generation, if only because the store is to stay when it is closed."""
        return self.period != 0 or bool(self._session.keep_store) or self.was_restored

    # ---- the record ---------------------------------------------------------------------------------------

    def _take_snapshot(self) -> StepSnapshot:
        """Return the state that has to be taken at the step itself, since the next batch changes it."""
        data = self._tracked.get(_TAKEN_WITH_THE_STEP)
        if self.steps == 0 and self._first_data is not None:
            state = self._first_data
        else:
            state = None if data is None else exact_json.encode(data.state_dict(), _TAKEN_WITH_THE_STEP)
        return StepSnapshot(random=random_states(), data=state, buffers=self._buffers.changed())

    def _tracked_states(self, moment: StepSnapshot) -> dict[str, Any]:
        """Return the states of tracked objects by name, as `exact_json.encode` does."""
        names = [name for name in self._tracked if name != _TAKEN_WITH_THE_STEP]
        states = exact_json.encode(
            self.unclaimed_states | {name: self._tracked[name].state_dict() for name in names}, "the run"
        )
        if _TAKEN_WITH_THE_STEP in self._tracked:
            states[_TAKEN_WITH_THE_STEP] = moment.data
        return states

    def _record(self) -> str:
        """Write changed weights and buffers to the store and return the record of the last step."""
        self._streamer.clean()
        moment = self._step_snapshot or self._take_snapshot()
        self._buffers.write(moment.buffers)
        moment.buffers = None
        added = self._added.write(self._optimizers.living)
        return record_text(
            steps=self.steps,
            source=self._source,
            options=self._session.options,
            units=self._session.units,
            buffers=self._buffers.described,
            optimizers=self._optimizers.describe(self._session),
            random_numbers=moment.random,
            tracked=self._tracked_states(moment) if moment.tracked is None else moment.tracked,
            added=added,
            ranks=self._session.membership.described,
        )
