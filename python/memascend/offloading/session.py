"""The session of one offloaded model: its units on SSD, its memory, and their life from filling to closing.

A session patches no module. `memascend.offloading.hooks` attaches it to the model.
"""

from __future__ import annotations

import logging
import sys
import weakref
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from memascend._memascend import PAGE_BYTES, STAGING_RESERVE
from memascend.common.graphs import in_backward
from memascend.common.interrupts import uninterrupted
from memascend.common.sizes import format_size
from memascend.common.timeline import Timeline
from memascend.durable.generations import Generations
from memascend.errors import (
    DeviceError,
    HostMemoryError,
    MemascendError,
    PinnedMemoryError,
    StoreError,
    closed_error,
    first_line,
)
from memascend.layout.units import round_up
from memascend.machine.drives import notices_of
from memascend.machine.products import warn_of_slow
from memascend.machine.waits import threads_in_use
from memascend.offloading.activations import InputStash, forget_recomputed
from memascend.offloading.automatic import Watch, growing_alone
from memascend.offloading.downloads import DownloadedGradients
from memascend.offloading.early import EarlyUpdates
from memascend.offloading.early_device import EarlyUpdatesOnDevice
from memascend.offloading.gradients import GradientCapture
from memascend.offloading.joining import JoinedGradients
from memascend.offloading.native import close_at_exit, forget, open_runtime, set_heap, store_paths, unused, warn_of
from memascend.offloading.slices import Slicing
from memascend.plan.automatic import held_by
from memascend.plan.host import Plan, check_available, make_plan, replan
from memascend.residency.device import DeviceStreamer
from memascend.residency.gathering import GatheringStreamer
from memascend.residency.gathering_device import GatheringDeviceStreamer
from memascend.residency.host import PassError, Streamer, early_use
from memascend.residency.states import share_room, stay_whole
from memascend.residency.tables import OffloadedTable
from memascend.residency.tables_device import DeviceTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from memascend._memascend import LeaseBuffer, Runtime
    from memascend.layout.units import Place, Unit
    from memascend.offloading.computing import Computing
    from memascend.options import StorePaths, Tuning
    from memascend.plan.automatic import Change
    from memascend.ranks.membership import Membership

_log = logging.getLogger("memascend")


def stale(subject: str) -> str:
    """Say that weights changed between a forward pass and its backward pass."""
    return (
        f"{subject} changed since the forward pass whose gradients were asked for: call backward() before "
        "optimizer.step(), or run the forward pass again"
    )


class Attachment(Protocol):
    """What ties a session to its model."""

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
        computing: Computing,
        source: dict[str, Any],
        *,
        automatic: bool = False,
        resume: bool = False,
        tag: str | None = None,
        membership: Membership | None = None,
    ) -> None:
        """Create the store for `units`, without contents, or open it to `resume`, with the values of a snapshot `tag`.

        `source` describes how to make the model again, and becomes part of every generation. `automatic` has the budget
        of host memory follow what the machine leaves. `membership` says over which ranks the store is divided.
        """
        self.membership = membership
        self.model = weakref.ref(model)
        self.units = units
        #: What opens the store again as it is; `store` has the locations of this rank.
        self.options = computing.options
        self.paths = store_paths(cast("StorePaths", self.options.store))
        self.keep_store = self.options.keeps_store
        self.device = computing.device
        self.torch_device = computing.torch_device
        self.generations = Generations(self, source)
        self.notices: list[str] = notices_of(self.paths)
        self._tables: dict[Place, OffloadedTable] = {}
        self._attachment: Callable[[], Attachment | None] = lambda: None
        self._computing = computing
        # A model that is on the device now leaves it before training.
        leaving_bytes = sum(place.nbytes for place in self.places if place.parameter.device.type == "cuda")
        self.device_plan = computing.plan(units, getattr(model, "config", None), leaving_bytes)
        self.host_memory = plan.budget
        #: What is known of the machine, where the budget follows it.
        self._watch: Watch | None = None
        self._said_lacking = False
        self.plan, self.runtime = self._open(plan, resume)
        try:
            if tag is not None:
                self.runtime.take_up_snapshot(tag)
            self._find_tensors(resume)
            self.timeline = Timeline(updating=lambda: self.runtime.update_seconds)
            self.streamer = self._make_streamer()
        except BaseException:
            self.runtime.close(keep=resume)
            raise
        in_flight_bytes = 0 if self.device_plan is None else self.device_plan.in_flight_bytes
        early = None
        if self.plan.update == "backward":
            in_flight = self.plan.applied.total
            through = partial(self._writes_through, early=True)
            early = self._make_early(in_flight, through)
        capturing = (self.runtime, self.streamer, self.timeline, self.device, in_flight_bytes, early)
        try:
            self.gradients = self._make_gradients(capturing)
        except BaseException:
            self.runtime.close(keep=resume)
            raise
        if isinstance(early, EarlyUpdatesOnDevice):
            early.hold = self.gradients.hold
        if self.device_plan is not None:
            self.gradients.made_bytes = self.device_plan.made_bytes
        self.streamer.before_write = self.generations.before_write
        self.streamer.on_surprise = self._note_writes
        self.streamer.write_through = self._writes_through
        self.inputs = InputStash(self.runtime, computing.activations, self.timeline, self.device)
        self.slicing: Slicing | None = None
        if self.options.micro_batch_size is not None:
            self.slicing = Slicing(
                self.options.micro_batch_size, say=self._note, on_cut=self.inputs.note_parts, device=self.device
            )
        #: The files of frozen weights, which are read in place and not copied to the store.
        self.files = list({file for place in self.places for file, *_ in place.sources})
        self._note_tuning(self.options.tuning)
        if self.device is None:
            warn_of_slow(place.dtype for place in self.places)
        close_at_exit(self)
        if automatic:
            self.follow_machine()

    def _open(self, plan: Plan, resume: bool) -> tuple[Plan, Runtime]:
        """Create the native side. Where the system pins less memory than `plan` takes, use a smaller plan."""
        in_place = self.generations.period == 0
        index = None if self.device is None else self.device.index
        wanted = plan
        while True:
            try:
                with nullcontext() if self.device is None else self.device.current():
                    runtime = open_runtime(
                        plan,
                        self.paths,
                        self.options.tuning,
                        resume=resume,
                        in_place=in_place,
                        replace=self.options.replaces_store,
                        device=index,
                    )
                break
            except PinnedMemoryError as error:
                if plan.total <= plan.smallest_bytes:
                    raise
                most = None if plan.most is None else plan.most.budget
                half = max(plan.smallest_bytes, plan.total // 2)
                smaller = make_plan(self.units, half, most, plan.update, plan.on_device, plan.update_threads)
                _log.info("%s: trying %s", error, format_size(smaller.total))
                plan = smaller
        if plan is not wanted:
            self.notices.append(
                f"the system pins less host memory than the {format_size(wanted.total)} that were planned: the windows "
                f"are smaller, {format_size(plan.total)} in all (WSL2 pins a part of its memory only; see `memory` in "
                ".wslconfig, or `ulimit -l`)"
            )
            warn_of(self.notices[-1])
        return plan, runtime

    def _find_tensors(self, resume: bool) -> None:
        """Number units and tensors in the store: create the tensors, or find those of a store to `resume`."""
        for unit in self.units:
            unit.index = self.runtime.add_unit()
            self.runtime.read_from_files(unit.index, unit.outside)
            for tensor in unit.tensors:
                if tensor.places[0].sources:
                    continue
                if not resume:
                    tensor.id = self.runtime.create_tensor(tensor.name, tensor.nbytes)
                    continue
                tensor.id = self.runtime.find_tensor(tensor.name)
                if tensor.id is None:
                    raise MemascendError(f"the store has no weights of {tensor.name}")

    def _make_streamer(self) -> Streamer:
        options: dict[str, Any] = {"forget_recomputed": forget_recomputed}
        streaming: tuple[Any, ...] = (self.runtime, self.units, self.plan, self.timeline)
        if self.device is not None and self.device_plan is not None:
            self.device.link = self.runtime.device
            streaming = (*streaming, self.device, self.device_plan)
            if self.membership is not None:
                return GatheringDeviceStreamer(self.membership.ranks, *streaming, **options)
            return DeviceStreamer(*streaming, **options)
        if self.membership is not None:
            return GatheringStreamer(self.membership.ranks, *streaming, **options)
        return Streamer(*streaming, **options)

    def _make_gradients(self, capturing: tuple[Any, ...]) -> GradientCapture:
        if self.membership is None:
            gradients = GradientCapture(*capturing)
            gradients.sums.room = 0 if self.device_plan is None else self.device_plan.sums_bytes
            return gradients
        joined = self.membership.ranks, self.units, *capturing
        if self.device is None:
            return JoinedGradients(*joined)
        return DownloadedGradients(*joined, allocator=self.options.tuning.get("allocator", "auto"))

    def _make_early(self, in_flight_bytes: int, writes_through: Callable[[], bool]) -> EarlyUpdates:
        if self.device is None:
            return EarlyUpdates(self.streamer, self.generations, self.timeline, in_flight_bytes, writes_through)
        assert isinstance(self.streamer, DeviceStreamer), "the model computes on the device"
        return EarlyUpdatesOnDevice(self.streamer, self.generations, self.timeline, self.device, writes_through)

    def _writes_through(self, early: bool = False) -> bool:
        """Whether updates, in the backward pass if `early`, write at once what stays in memory.

        Where only a part stays, the drives have enough to do beside the forward pass: the commit writes it beside the
        backward pass, in which they would be idle.
        """
        tensors = (tensor for unit in self.units for tensor in unit.tensors)
        return self.generations.writes_through(early) and stay_whole(tensors)

    def _note_tuning(self, tuning: Tuning) -> None:
        """Add a notice for each entry that slows this session down."""
        if self.device is not None and tuning.get("allocator") in ("locked", "pageable"):
            self.notices.append(
                f"allocator={tuning['allocator']!r}: every copy to the device and back stops the program until it is "
                "done, which pinned memory ('auto', 'cuda', 'registered') spares"
            )
        if any(not file.direct for file in self.files) and tuning.get("direct", True):
            self.notices.append("the model's files are read through the page cache: their filesystem refuses O_DIRECT")

    def _note(self, notice: str) -> None:
        self.notices.append(notice)
        warn_of(notice)

    @property
    def attachment(self) -> Attachment | None:
        """What ties the session to its model, or None."""
        return self._attachment()

    @property
    def tracked(self) -> dict[str, Any]:
        """The objects whose states belong to every generation, by name (`memascend.track`); none without a model."""
        attachment = self.attachment
        return {} if attachment is None else attachment.tracked

    def attach(self, attachment: Attachment) -> None:
        """Tie the session to its model.

        The reference is weak: what may use the model refers to its attachment, so that the collector finds when nothing
        does.
        """
        self._attachment = weakref.ref(attachment)

    @property
    def gradient_factor(self) -> float:
        """What an update multiplies gradients by: of those that ranks have added up, it takes the mean."""
        return 1.0 if self.membership is None else 1.0 / self.membership.ranks.size

    @property
    def places(self) -> Iterator[Place]:
        """The places of all parameters, in the order of their bytes."""
        return (place for unit in self.units for place in unit.places)

    # ---- filling the store ------------------------------------------------------------------------------

    def fill(self, read: Callable[..., object], progress: Callable[[int, int], None] | None) -> None:
        """Write every unit to the store.

        Args:
            read: called as `read(place, target)` to fill `target`, a view of the parameter's shape and dtype, and as
                `read(place, target, first_row)` to fill `target`, (n, width), with n rows of a table.
            progress: called as `progress(bytes_done, bytes_total)` after each unit.
        """
        stored = [unit for unit in self.units if unit.weights]
        total, done = sum(unit.nbytes for unit in stored), 0
        for unit in stored:
            if self.streamer.is_streamed(unit):
                self._fill_table(unit, read)
                done += unit.nbytes
                if progress is not None:
                    progress(done, total)
                continue
            lease = self._free_lease(unit)
            storage = torch.frombuffer(lease, dtype=torch.uint8)
            storage[: unit.nbytes].zero_()
            for place in unit.places:
                read(place, place.view(storage))
            self.runtime.write_unit(unit.index, unit.weights, lease)
            # Drop our references, so that the write alone holds the buffer: the next unit may be
            # waiting for it.
            del storage, lease
            done += unit.nbytes
            if progress is not None:
                progress(done, total)
        for unit in stored:
            self.runtime.wait_unit(unit.index)
        self.generations.changed()

    def _fill_table(self, unit: Unit, read: Callable[..., object]) -> None:
        """Write a table block by block."""
        (place,), ((tensor_id, _, _),) = unit.places, unit.weights
        lease = self.streamer.lease_block()
        row_bytes = place.shape[1] * place.dtype.itemsize
        for first, count in place.blocks:
            storage = torch.frombuffer(lease, dtype=torch.uint8)
            nbytes = round_up(count * row_bytes, PAGE_BYTES)
            storage[count * row_bytes : nbytes].zero_()
            read(place, storage[: count * row_bytes].view(place.dtype).view(count, -1), first)
            self.runtime.write_part(unit.index, tensor_id, first * row_bytes, nbytes, lease)
            self.runtime.wait_unit(unit.index)

    def _free_lease(self, unit: Unit) -> LeaseBuffer:
        """Lease a buffer for `unit`, waiting for writes under way where all buffers of its size are being written."""
        for written in self.units:
            lease = self.runtime.lease_unit(unit.nbytes)
            if lease is not None:
                return lease
            self.runtime.wait_unit(written.index)
        lease = self.runtime.lease_unit(unit.nbytes)
        assert lease is not None, "the plan holds a buffer for every unit"
        return lease

    # ---- use --------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Apply deferred updates, wait for the drives, and commit what is to be durable."""
        self.streamer.apply_updates()
        self.generations.commit()

    def refuse_ranks(self, what: str, instead: str) -> None:
        """Raise MemascendError for what is not done yet where a store is divided over ranks."""
        if self.membership is not None:
            raise MemascendError(
                f"{what} is not possible yet for a model whose store is divided over {self.membership.ranks.size} "
                f"ranks: {instead}"
            )

    def refuse_trained_outside(self) -> None:
        """Raise MemascendError over ranks for a trained parameter that is not on the store.

        Its gradients are not added up: each rank would make another parameter of it.
        """
        if self.membership is not None and (outside := self.trained_outside()):
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
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: at least the checkpoint that is made is kept")
        if self.generations.period == 0:
            raise MemascendError(
                "with durability='none' weights and states are updated in place, so that no checkpoint can be kept "
                "beside them: use durability='step' or 'every:N', or write them elsewhere (save_pretrained, state_dict)"
            )
        self.streamer.apply_updates()
        self.generations.keep()
        self._keep_under(tag)
        if keep_last is not None:
            self.delete_checkpoints(old_tag for old_tag, _, _ in self.runtime.snapshots()[:-keep_last])

    def _keep_under(self, tag: str) -> None:
        """Keep the durable generation under a name; over ranks, on all of them or on none."""
        failure: StoreError | None = None
        try:
            self.runtime.snapshot(tag)
        except StoreError as error:
            failure = error
        if self.membership is not None:
            text = "" if failure is None else first_line(failure)
            told = [text.strip() for text in self.membership.ranks.texts(f"keep checkpoint {tag}", text)]
            if any(told) and failure is None:
                self.runtime.delete_snapshot(tag)
                why = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
                failure = StoreError(None, f"the checkpoint {tag} could not be kept on every rank: {why}")
        if failure is not None:
            raise failure

    def delete_checkpoints(self, tags: Iterable[str]) -> None:
        """Delete checkpoints in the store. Raises StoreError for a tag that the store does not have."""
        if self.membership is not None:
            # A manifest that is written before all ranks have the generation would take the one before away.
            self.generations.settle()
        for tag in list(tags):
            self.runtime.delete_snapshot(tag)

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

    def set_host_memory(self, budget: int) -> None:
        """Change the budget of host memory, and keep it; see `memascend.set_host_memory`."""
        self._check_elastic()
        plan = replan(self.plan, self.units, budget)
        if plan.total > self.plan.total:
            check_available(plan, self.plan.total)
        self._change_plan(plan)
        self._stop_following()

    def set_device_memory(self, budget: int) -> None:
        """Change the budget of device memory; see `memascend.set_device_memory`."""
        self.refuse_ranks("another budget of device memory", "give device_memory when it is offloaded or resumed")
        streamer, before = self.streamer, self.device_plan
        if before is None or not isinstance(streamer, DeviceStreamer):
            raise MemascendError(
                "the model computes on the CPU and holds no device memory: open it with device='cuda', or use "
                "memascend.set_host_memory"
            )
        streamer.finish_uses()
        self._wait_copied()
        computing = self._computing.with_device_memory(budget)
        plan = computing.plan(self.units, getattr(self.model(), "config", None), streamer.pool.nbytes)
        assert plan is not None
        # An interrupt amid the change would leave the streamer without buffers.
        with uninterrupted():
            try:
                streamer.change_device_plan(plan)
            except DeviceError:
                # Another process was quicker: go on with what there was.
                streamer.change_device_plan(before)
                raise
            self.device_plan, self._computing, self.options = plan, computing, computing.options
            self.gradients.in_flight_bytes, self.gradients.made_bytes = plan.in_flight_bytes, plan.made_bytes
            self.gradients.sums.room = plan.sums_bytes

    def follow_machine(self) -> None:
        """Have the budget of host memory follow what the machine leaves, from pass to pass."""
        self._check_elastic()
        if self._watch is None:
            self._watch = Watch()

    @property
    def follows_machine(self) -> bool:
        """Whether the budget of host memory follows what the machine leaves."""
        return self._watch is not None

    def _stop_following(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def fit_memory(self, grad: bool) -> None:
        """Before a pass of the whole model with or without gradients, change the budget as the machine demands."""
        watch = self._watch
        # A pass within another, or within a backward pass.
        if watch is None or self.streamer.depth or in_backward() or not watch.is_due(grad):
            return
        with growing_alone() as alone:
            change = watch.look(self.plan, grad, self.runtime.leaving_bytes, alone)
            if change is not None:
                self._follow(watch, change)
        if watch.lacking and not self._said_lacking:
            self._said_lacking = True
            warn_of(
                f"host memory is at the least that works, {format_size(self.plan.total)}, and the machine lacks "
                f"{format_size(watch.lacking)} for it and for a step: stop other programs, raise the limit, or lower "
                "the batch size, or the kernel may end the run"
            )
        watch.begin(grad)

    def _follow(self, watch: Watch, change: Change) -> None:
        before, plan = self.plan, replan(self.plan, self.units, change.budget)
        if change.budget >= before.total and held_by(plan) <= held_by(before):
            return  # No whole buffer more.
        try:
            # An interrupt amid the change would leave the streamer with one plan and the pools with another.
            with uninterrupted():
                self._change_plan(plan)
        except PassError as error:
            _log.debug("the host memory stays at %s: %s", format_size(before.total), error)
        except HostMemoryError as error:
            watch.refused()
            _log.info("host memory stays at %s: %s", format_size(before.total), error)
        else:
            if self.plan.total != before.total:
                sizes = (format_size(before.total), format_size(self.plan.total))
                _log.info("host memory %s -> %s (%s)", *sizes, change.reason)

    def _check_elastic(self) -> None:
        self.refuse_ranks("another budget of host memory", "give host_memory when it is offloaded or resumed")
        if self.plan.most is None:
            raise MemascendError(
                "the model was opened with a fixed budget: give host_memory_max beside host_memory, the most that it "
                "may become, or host_memory='auto'"
            )

    def _wait_copied(self) -> None:
        """Wait until nothing is on its way from the device: it takes memory there, and chunks of staging here."""
        self.gradients.wait_copied()
        self.inputs.wait_copied()

    def _change_plan(self, plan: Plan) -> None:
        before = self.plan
        self._wait_copied()
        try:
            self._make_way(plan)
        except PassError:
            self.streamer.follow(before)
            raise
        try:
            self._resize(plan)
        except MemascendError:
            # The system refuses what is more: go on with what there was.
            self._make_way(before)
            self._resize(before)
            raise
        self.host_memory = plan.budget
        set_heap(plan)

    def _make_way(self, plan: Plan) -> None:
        """Let go of what `plan` has no room for."""
        self.streamer.change_plan(plan)
        chunks = plan.staging.count + plan.kept.count - STAGING_RESERVE
        with self.timeline.waiting("ssd_write"):
            self.runtime.spill_gradients(chunks)
        if self.runtime.chunks_in_use > chunks:
            raise PassError(
                "inputs of layers wait in memory for a backward pass: call backward(), or let go of the loss, before "
                "the host memory becomes less"
            )
        self.plan = plan
        tensors = [tensor for unit in self.units for tensor in unit.tensors]
        share_room(plan, tensors)
        tickets = []
        for tensor in tensors:
            planes = [(plane.id, plane.plane.bytes(tensor.kept_elements)) for plane in tensor.planes.values()]
            if planes:
                tickets.append(self.runtime.let_go_states(tensor.unit.index, planes))
        with self.timeline.waiting("ssd_write"):
            for ticket in tickets:
                ticket.wait()

    def _resize(self, plan: Plan) -> None:
        assert plan.most is not None
        # Buffers of one size, in whole pages, are one kind.
        counts = {round_up(line.nbytes, PAGE_BYTES): 0 for line in plan.most.buffers}
        for line in plan.buffers:
            counts[round_up(line.nbytes, PAGE_BYTES)] += line.count
        self.runtime.resize(list(counts.items()), plan.staging.count + plan.kept.count, plan.states.count)

    def stats(self) -> dict[str, Any]:
        """Return counters; see `memascend.stats`."""
        stats = self.runtime.stats()
        stats["host_bytes_budget"] = self.host_memory
        stats["host_bytes_planned"] = self.plan.total
        stats["host_memory_auto"] = self.follows_machine
        stats["file_bytes_read"] = sum(file.bytes_read for file in self.files)
        stats["parameters"] = sum(place.numel for place in self.places)
        stats["fetch_waits"] = self.streamer.waits
        stats["notices"] = self.runtime.notices + self.notices
        stats["generation"] = self.runtime.generation
        stats["seconds"] = self.timeline.seconds()
        stats["threads"] = threads_in_use(self.plan.update_threads)
        if self.membership is not None:
            ranks = self.membership.ranks
            stats |= {"rank": ranks.rank, "ranks": ranks.size, "network_bytes_sent": ranks.sent_bytes}
        if self.device_plan is not None:
            stats["device_bytes_budget"] = self.device_plan.budget
            stats["device_bytes_planned"] = self.device_plan.total
        if self.runtime.device is not None:
            stats["device"] = self.runtime.device.stats()
        return stats

    def table(self, place: Place) -> OffloadedTable:
        """Return the weights of a parameter that is a table."""
        if place not in self._tables:
            streamer = self.streamer
            if isinstance(streamer, DeviceStreamer):
                self._tables[place] = DeviceTable(streamer, place)
            else:
                self._tables[place] = OffloadedTable(streamer, place)
        return self._tables[place]

    def stored_table(self, place: Place) -> OffloadedTable:
        """Return the weights of a parameter that is a table, in host memory, wherever the model computes."""
        return OffloadedTable(self.streamer, place)

    def saving_names(self) -> AbstractContextManager[Any]:
        """Have autograd save names of weights instead of views of them."""
        if self.attachment is None:
            raise closed_error(self.runtime, "the model was closed")
        return self.attachment.saving_names()

    def _note_writes(self, unit: Unit) -> None:
        """Deal with a unit to which its module has written, and might do so again."""
        _log.warning(
            "%s writes to its own weights in its forward: from now on each pass waits there until the step before is "
            "durable",
            unit.name,
        )
        if not self.generations.leave_out():
            return
        # The last update of the unit may have been on its way to the drives while its module wrote.
        for tensor_id, _, nbytes in unit.weights:
            stored = torch.empty(nbytes, dtype=torch.uint8)
            self.runtime.read(tensor_id, stored.data_ptr(), nbytes)  # raises for bytes without their checksum

    # ---- closing ----------------------------------------------------------------------------------------

    def close(self, failed: bool = False, ended: bool = False, resumes: bool = False) -> None:
        """Free every lease and file handle. The store's files go unless `keep_store` keeps them.

        Unless `keep_store` is False they stay after an error (`failed`, or an exception on its way), where the program
        `ended` without closing, and where there are snapshots. The last step is committed to a store that stays, but
        nothing is after an error. With `resumes` the other ranks close too, and need not hear of it.
        """
        if self.runtime.closed:
            return
        self._stop_following()
        failed = failed or sys.exc_info()[0] is not None
        if self.membership is not None and ended and not failed:
            # The other ranks need not be there any more, and may be doing something else.
            _log.warning("the model was not closed: the store keeps the last durable step; use memascend.close(model)")
            failed = True
        if self.streamer.early_units and not failed:
            _log.warning("%s: the store keeps the last durable step", early_use("the model"))
            failed = True
        if self.membership is not None and failed and not resumes:
            error = sys.exc_info()[1] or getattr(sys, "last_value", None)
            self.membership.ranks.leave("it was not closed" if error is None else first_line(error))
        stays = self.keep_store is not False and (
            failed or ended or bool(self.keep_store) or bool(self.runtime.snapshots())
        )
        is_behind = self.generations.steps > self.generations.durable_steps
        if failed and stays and self.generations.period == 0 and self.generations.taken_up and is_behind:
            _log.warning("updates in place are not committed after an error: %s", self._what_stays())
        try:
            if stays and not failed:
                self._complete()
        finally:
            try:
                self.generations.abandon()
                self._leave_model()
                self.gradients.close()
                self.inputs.close()
                self.streamer.release_all()
            finally:
                try:
                    # A store without a generation holds nothing to go on from. Updates in place may have overwritten
                    # the last one while the snapshots are whole.
                    resumable = self.runtime.generation > 0 or bool(self.runtime.snapshots())
                    self.runtime.close(keep=stays and resumable)
                finally:
                    self._free()

    def _complete(self) -> None:
        """Commit the last step to a store that stays."""
        generations = self.generations
        if generations.within_step:
            _log.warning(
                "weights were changed in a pass that no optimizer step has ended, so that the model was closed in the "
                "state of no step: %s",
                self._what_stays(),
            )
            return
        if self.keep_store and (outside := self.trained_outside()):
            _log.warning("%s is trained, but not on the store that is kept: save it yourself", outside[0])
        # Steps that were updated in place were never committed.
        if self.keep_store or (generations.period == 0 and generations.taken_up):
            self.streamer.apply_updates()
            generations.keep()
        else:
            self.flush()

    def _what_stays(self) -> str:
        """Say what the store holds where nothing more is committed."""
        if self.runtime.generation:
            return f"the store keeps step {self.generations.durable_steps}"
        tags = [tag for tag, _, _ in self.runtime.snapshots()]
        return f"the store keeps its checkpoints alone: {', '.join(tags)}" if tags else "nothing was durable before"

    def _leave_model(self) -> None:
        if self.attachment is not None:
            self.attachment.detach()
        for place in self.places:
            self.gradients.unwatch(place)
            place.parameter.grad = None
            place.hide()

    def unused(self, attachment: Attachment, model: nn.Module) -> None:
        """Have the session closed: the collector has found that nothing can use its model any more."""
        # The model is whole until then: the collector has cleared no more than the weak references to it.
        self._attachment, self.model = lambda: attachment, weakref.ref(model)
        unused(self)

    def discard(self) -> None:
        """Close a session that was never attached to its model, and remove its store."""
        self._stop_following()
        try:
            self.runtime.close(keep=False)
        finally:
            self._free()

    def _free(self) -> None:
        forget(self)
        try:
            self.streamer.free()
        finally:
            # Whatever failed before: other programs of the process are not to be limited by a model that is closed.
            if self.device is not None:
                self.device.let_go()
