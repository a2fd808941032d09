"""The session of one offloaded model: its units on SSD, its memory, and their life from filling to closing.

A session patches no module. `memascend.session.module_hooks` attaches it to the model.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol, cast

from memascend.common.notices import warn_of
from memascend.common.timeline import Timeline
from memascend.durability.commits import CommitLog
from memascend.errors import MemascendError, closed_error, first_line
from memascend.gradients.trained_later import LaterRoom
from memascend.hardware.drives import notices_of
from memascend.hardware.waits import threads_in_use
from memascend.options import parse_durability
from memascend.ranks.membership import ONE_PROCESS
from memascend.session.checkpoints import Checkpoints
from memascend.session.fill import Filling
from memascend.session.host_budget import HostBudget
from memascend.session.parts import find_tensors, make_gradients, make_streamer, open_within_limits, slow_reads
from memascend.session.runtime import close_at_exit, forget, open_holders, open_runtime, store_paths, unused
from memascend.session.sites import site_of
from memascend.slicing.slices import Slicing
from memascend.slicing.tiles import Tiling
from memascend.streaming.experts import ExpertPieces
from memascend.streaming.streamer import use_before_step
from memascend.streaming.tables import OffloadedTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from memascend._memascend import Runtime
    from memascend.durability.protocols import OptimizerProtocol
    from memascend.layout.units import ParameterEntry, Unit
    from memascend.memory_plan.device import DevicePlan
    from memascend.memory_plan.lines import Plan
    from memascend.options import OffloadOptions, StorePaths
    from memascend.ranks.membership import Membership, OneProcess
    from memascend.session.compute import ComputeOptions

_log = logging.getLogger("memascend")


class Attachment(Protocol):
    """The tie between a session and its model."""

    tracked: dict[str, Any]

    def detach(self) -> None:
        """Take every hook out of the model, and have its forward refuse to run."""

    def forget(self) -> None:
        """Give the model of a closed session its own forward back."""

    def saving_names(self) -> AbstractContextManager[Any]:
        """Have autograd save names of weights instead of views of them."""

    def as_pass(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the whole model's parts, as one pass: as its forward is."""


class Session:
    """The offloaded state of one model: its units on SSD, and its budgeted host and device memory."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        plan: Plan,
        computing: ComputeOptions,
        source: dict[str, Any],
        *,
        automatic: bool = False,
        resume: bool = False,
        tag: str | None = None,
        membership: Membership | OneProcess = ONE_PROCESS,
    ) -> None:
        """Create the store for `units`, without contents, or open it to `resume`, with the values of a snapshot `tag`.

        `source` describes how to make the model again, and becomes part of every generation. `automatic` has the budget
        of host memory follow free memory. `membership` says over which ranks the store is divided.
        """
        options = computing.options
        self.membership = membership
        self.model = weakref.ref(model)
        self.units = units
        self.paths = store_paths(cast("StorePaths", options.store))
        self.keep_store = options.keeps_store
        self.device = computing.device
        self.torch_device = computing.torch_device
        self.notices: list[str] = notices_of(self.paths)
        self._tables: dict[ParameterEntry, OffloadedTable] = {}
        self._attachment: Callable[[], Attachment | None] = lambda: None
        self.site = site_of(computing, units, self.model)
        asked = plan.budget
        plan, self.runtime = open_within_limits(plan, units, lambda smaller: self._open(smaller, resume), self.notices)
        try:
            if tag is not None:
                self.runtime.store.load_snapshot(tag)
            find_tensors(self.runtime, units, resume)
            self._make_parts(plan, source)
        except BaseException:
            self.runtime.close(keep=resume)
            raise
        #: The files of frozen weights, which are read in place and not copied to the store.
        self.files = list({file for unit in self.units for file, *_ in unit.outside})
        self.notices += [*self.site.slow_tuning(options.tuning), *slow_reads(options.tuning, self.files)]
        self.site.warn_of_slow(place.dtype for place in self.places)
        close_at_exit(self)
        self.host_budget.nbytes = asked  # Also where the system pins less.
        if automatic:
            self.host_budget.follow_machine()

    def _open(self, plan: Plan, resume: bool) -> Runtime:
        """Create the native side of `plan`."""
        with self.site.current():
            return open_runtime(
                plan,
                self.paths,
                self.options.tuning,
                resume=resume,
                in_place=parse_durability(self.options.durability) == 0,
                replace=self.options.replaces_store,
                device=self.site.index,
            )

    def _make_parts(self, plan: Plan, source: dict[str, Any]) -> None:
        """Make the parts that work on the open store."""
        runtime, units, device, membership = self.runtime, self.units, self.device, self.membership
        self.timeline = Timeline(updating=lambda: runtime.update_seconds)
        self.commit_log = CommitLog(self, runtime, source)
        self.streamer = make_streamer(runtime, units, plan, self.timeline, self.site, membership.ranks, self.commit_log)
        self.turns = self.streamer.turns
        self.pieces = ExpertPieces(self.streamer, [line.nbytes for line in (plan.most or plan).experts])
        self.streamer.pieces = self.pieces
        self.gradients = make_gradients(self.streamer, self.commit_log, units, plan, self.site, membership.ranks)
        self.gradients.later = LaterRoom(self)
        self.inputs = self.site.inputs(runtime, self.timeline)
        self.checkpoints = Checkpoints(runtime, self.streamer, self.commit_log, membership)
        copies = (self.gradients, self.inputs)
        self.host_budget: HostBudget = HostBudget(
            plan,
            units,
            runtime,
            self.streamer,
            copies,
            self.timeline,
            membership,
            self.commit_log,
            self.options.spare_memory,
        )
        self.inputs.kept = self.host_budget.kept
        self.slicing: Slicing | None = None
        if self.options.micro_batch_size is not None:
            self.slicing = Slicing(
                self.options.micro_batch_size, say=self.note, on_cut=self.inputs.note_parts, device=device
            )
        self.tiling: Tiling | None = None
        if self.options.tile_tokens is not None:
            self.tiling = Tiling(self.options.tile_tokens, say=self.note, device=device)

    def note(self, notice: str) -> None:
        """Log a notice, and keep it for `stats`."""
        self.notices.append(notice)
        warn_of(notice)

    @property
    def all_notices(self) -> list[str]:
        """The notices of the store and of the model, in this order."""
        return self.runtime.notices + self.notices

    # ---- properties ---------------------------------------------------------------------------------------

    @property
    def options(self) -> OffloadOptions:
        """The options that open the store again; `store` has the locations of this rank."""
        return self.site.computing.options

    @property
    def plan(self) -> Plan:
        """The present plan of host memory."""
        return self.host_budget.plan

    @property
    def device_plan(self) -> DevicePlan | None:
        """The present plan of device memory, None on the CPU."""
        return self.site.plan

    @property
    def closed(self) -> bool:
        """Whether the session was closed."""
        return self.runtime.closed

    def closed_error(self, message: str) -> MemascendError:
        """Return the error of using a closed session, which says `message`, or that the process is a forked child."""
        return closed_error(self.runtime, message)

    @property
    def in_pass(self) -> bool:
        """Whether a pass, or a part of the model that was called by itself, is under way."""
        return self.streamer.depth > 0

    @property
    def attachment(self) -> Attachment | None:
        """The tie to the model, or None."""
        return self._attachment()

    @property
    def tracked(self) -> dict[str, Any]:
        """The objects whose states belong to every generation, by name (`memascend.track`); none without a model."""
        attachment = self.attachment
        return {} if attachment is None else attachment.tracked

    def attach(self, attachment: Attachment) -> None:
        """Tie the session to its model.

        The reference is weak: every object that may use the model refers to its attachment, so that the collector finds
        when none does.
        """
        self._attachment = weakref.ref(attachment)

    @property
    def gradient_factor(self) -> float:
        """The factor of gradients in an update, which makes the mean of the sum over ranks."""
        return 1.0 / self.membership.size

    @property
    def places(self) -> Iterator[ParameterEntry]:
        """The entries of all parameters, in the order of their bytes."""
        return (place for unit in self.units for place in unit.places)

    # ---- filling the store ------------------------------------------------------------------------------

    def fill(self, read: Callable[..., object], progress: Callable[[int, int], None] | None) -> None:
        """Write every unit to the store.

        Args:
            read: called as `read(place, target)` to fill `target`, a view of the parameter's shape and dtype, and as
                `read(place, target, first_row)` to fill `target`, (n, width), with n rows of a table; rows of
                experts count through all of them.
            progress: called as `progress(bytes_done, bytes_total)` after each unit.
        """
        Filling(self.runtime, self.streamer, self.units).fill(read, progress)
        self.commit_log.changed()

    def read_outside(self, unit: Unit) -> None:
        """Have a unit that is not in the store be read from the `sources` that it has now."""
        self.files = list(dict.fromkeys([*self.files, *(file for file, *_ in unit.outside)]))
        self.runtime.units.read_from_files(unit.index, unit.outside)

    # ---- use --------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Apply deferred updates, wait for the drives, and commit the last step if it is to be durable."""
        with self.turns.take("flush"):
            self.runtime.store.check_room(0)  # Where there is nothing to do, a flush tells of a defect too.
            self.streamer.apply_updates()
            self.commit_log.commit()

    def refuse_ranks(self, what: str, instead: str) -> None:
        """Raise MemascendError for an action that a store divided over ranks does not allow yet."""
        self.membership.refuse(what, instead)

    def refuse_trained_outside(self) -> None:
        """Raise MemascendError over ranks for a trained parameter that is not on the store.

        Its gradients are not added up: each rank would make another parameter of it.
        """
        if outside := self.trained_outside():
            self.refuse_ranks(
                f"training {outside[0]}, which is not on the store,", "add adapters before memascend.offload"
            )

    def save_checkpoint(self, tag: str, keep_last: int | None = None) -> None:
        """Keep the present state under a name; see `memascend.save_checkpoint`."""
        if outside := self.trained_outside():
            raise MemascendError(
                f"{outside[0]} is trained, but not on the store: a checkpoint there would not have it. Save adapters "
                "with model.save_pretrained(directory) and the optimizer with state_dict(), or add them before "
                "memascend.offload"
            )
        self.checkpoints.save(tag, keep_last)

    def trained_outside(self) -> list[str]:
        """Return the names of the model's trained parameters that are not on the store: adapters added later."""
        model = self.model()
        if model is None:
            return []
        offloaded = {id(place.parameter) for place in self.places}
        return [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.numel() and id(parameter) not in offloaded
        ]

    def read_unit(self, unit: Unit) -> torch.Tensor:
        """Return a unit's current bytes (uint8, of `unit.nbytes`). Call `flush` first: deferred updates are missing."""
        return self.streamer.read(unit)

    def plan_changed(self) -> None:
        """Note that a consumer of host memory has been added: drop activations that it leaves no room for."""
        self.host_budget.kept.limit(self.plan.activations_bytes)

    def set_device_memory(self, budget: int) -> None:
        """Change the budget of device memory; see `memascend.set_device_memory`."""
        self.refuse_ranks("another budget of device memory", "give device_memory when it is offloaded or resumed")
        self.site.change(budget, self.streamer, self.inputs)

    def stepped(self, optimizer: OptimizerProtocol) -> None:
        """Note that an optimizer has taken a step, and begin to fetch for the next pass."""
        self.commit_log.stepped(optimizer)
        self.streamer.start_next_pass()

    def stats(self) -> dict[str, Any]:
        """Return counters; see `memascend.stats`."""
        stats = self.runtime.stats()
        stats["host_bytes_budget"] = self.host_budget.nbytes
        stats["host_bytes_planned"] = self.plan.total
        stats["host_memory_auto"] = self.host_budget.follows_machine
        stats["file_bytes_read"] = sum(file.bytes_read for file in self.files)
        stats["parameters"] = sum(place.numel for place in self.places)
        stats["fetch_waits"] = self.streamer.waits
        stats |= self.host_budget.kept.stats()
        stats["activation_bytes_lent"] = self.plan.lent_bytes
        stats["notices"] = self.all_notices
        stats["generation"] = self.runtime.store.generation
        stats["seconds"] = self.timeline.seconds()
        stats["threads"] = threads_in_use(self.plan.update_threads)
        return stats | self.membership.stats() | self.site.stats(self.runtime)

    def table(self, place: ParameterEntry) -> OffloadedTable:
        """Return the weights of a parameter that is a table."""
        if place not in self._tables:
            self._tables[place] = self.site.table(self.streamer, place)
        return self._tables[place]

    def stored_table(self, place: ParameterEntry) -> OffloadedTable:
        """Return the weights of a parameter that is a table, in host memory, wherever the model computes."""
        return OffloadedTable(self.streamer, place)

    def saving_names(self) -> AbstractContextManager[Any]:
        """Have autograd save names of weights instead of views of them."""
        if self.attachment is None:
            raise self.closed_error("the model was closed")
        return self.attachment.saving_names()

    # ---- closing ----------------------------------------------------------------------------------------

    def close(self, failed: bool = False, ended: bool = False, resumes: bool = False) -> None:
        """Free every lease and file handle. The store's files go unless `keep_store` keeps them.

        Unless `keep_store` is False they stay after an error (`failed`, or an exception on its way), where the program
        `ended` without closing, and where there are snapshots. The last step is committed to a store that stays, but
        nothing is after an error. With `resumes` the other ranks close too, and need not hear of it.

        Raises MemascendError while another thread uses the model.
        """
        if self.closed:
            return
        with self.turns.take("close"):
            self._close(failed, ended, resumes)

    def _close(self, failed: bool, ended: bool, resumes: bool) -> None:
        self.host_budget.stop_following()
        failed = failed or sys.exc_info()[0] is not None
        if self.membership.divides and ended and not failed:
            # The other ranks need not be there any more, and may be doing something else.
            _log.warning("the model was not closed: the store keeps the last durable step; use memascend.close(model)")
            failed = True
        if self.streamer.backward_units and not failed:
            _log.warning("%s: the store keeps the last durable step", use_before_step("the model"))
            failed = True
        if failed and not resumes:
            error = sys.exc_info()[1] or getattr(sys, "last_value", None)
            self.membership.abort("it was not closed" if error is None else first_line(error))
        stays = self.keep_store is not False and (
            failed or ended or bool(self.keep_store) or bool(self.checkpoints.tags())
        )
        is_behind = self.commit_log.steps > self.commit_log.durable_steps
        if failed and stays and self.commit_log.period == 0 and self.commit_log.was_restored and is_behind:
            _log.warning("updates in place are not committed after an error: %s", self._what_stays())
        try:
            if stays and not failed:
                self._complete()
        finally:
            try:
                self.commit_log.abandon()
                self._leave_model()
                self.gradients.close()
                self.inputs.close()
                self.streamer.release_all()
            finally:
                try:
                    # A store without a generation holds nothing to go on from. Updates in place may have overwritten
                    # the last one while the snapshots are whole.
                    resumable = self.runtime.store.generation > 0 or bool(self.checkpoints.tags())
                    self.runtime.close(keep=stays and resumable)
                finally:
                    self._free()

    def _complete(self) -> None:
        """Commit the last step to a store that stays."""
        commit_log = self.commit_log
        if commit_log.within_step:
            _log.warning(
                "weights were changed in a pass that no optimizer step has ended, so that the model was closed in the "
                "state of no step: %s",
                self._what_stays(),
            )
            return
        if self.keep_store and not commit_log.has_beside and (outside := self.trained_outside()):
            _log.warning("%s is trained, but not on the store that is kept: save it yourself", outside[0])
        # Steps that were updated in place were never committed.
        if self.keep_store or (commit_log.period == 0 and commit_log.was_restored):
            self.streamer.apply_updates()
            commit_log.keep()
        else:
            self.flush()

    def _what_stays(self) -> str:
        """Describe the contents of the store where nothing more is committed."""
        if self.runtime.store.generation:
            return f"the store keeps step {self.commit_log.durable_steps}"
        tags = self.checkpoints.tags()
        return f"the store keeps its checkpoints alone: {', '.join(tags)}" if tags else "nothing was durable before"

    def _leave_model(self) -> None:
        if self.attachment is not None:
            self.attachment.detach()
        for place in self.places:
            self.gradients.unwatch(place)
            place.parameter.grad = None
            place.binding.unbind()

    def unused(self, attachment: Attachment, model: nn.Module) -> None:
        """Have the session closed: the collector has found that nothing can use its model any more."""
        # The model is whole until then: the collector has cleared no more than the weak references to it.
        self._attachment, self.model = lambda: attachment, weakref.ref(model)
        unused(self)

    def discard(self) -> None:
        """Close a session that was never attached to its model, and remove its store."""
        self.host_budget.stop_following()
        try:
            self.runtime.close(keep=False)
        finally:
            self._free()

    def _free(self) -> None:
        forget(self)
        for unit in (unit for unit in self.units if unit.bits is not None and unit.outside):
            # Their files have no names: the room on the drive is free when nothing has them open.
            unit.sources.clear()
            self.runtime.units.read_from_files(unit.index, [])
            self.files = []
        try:
            self.streamer.free()
        finally:
            # Whatever failed before: other programs of the process are not to be limited by a model that is closed.
            self.site.release()


def open_sessions() -> list[Session]:
    """Return the sessions of this process that are open."""
    return [holder for holder in open_holders() if isinstance(holder, Session)]
