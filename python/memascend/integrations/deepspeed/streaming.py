"""The step of an optimizer whose states lie in swap files: read, Adam, write, a chunk at a time.

DeepSpeed reads the masters and both moments of a whole sub-group, updates them and writes them back: 16 bytes of
buffers for each element of the largest sub-group, and a drive that rests while the processor works. Here chunks of all
sub-groups follow one another through slots, so that some are read and some written while one is computed.

Names and contents of the files are DeepSpeed's, so that either can go on from the other's checkpoints.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero import stage3

from memascend.forecast.deepspeed.plan import CHUNK, slots
from memascend.integrations.deepspeed import adam, gradients
from memascend.integrations.deepspeed import options as settings
from memascend.integrations.deepspeed.buffers import CastWriter
from memascend.integrations.deepspeed.files import AioHandle
from memascend.integrations.deepspeed.kept import KeptStates, ResidentChunk, spread
from memascend.integrations.deepspeed.pinned import PINNED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Optimizer = stage3.DeepSpeedZeroOptimizer_Stage3

#: Elements to which the places of weights in a slot are aligned, which are whole pages in any dtype.
_PAGE = 4096
#: The most pieces of a chunk that are aligned; smaller ones are not.
_ALIGNED_PIECES = 16
STATES = ("exp_avg", "exp_avg_sq")


@dataclass
class Gradient:
    """Where the gradient of a sub-group is: in a file, or in memory."""

    path: str | None
    dtype: torch.dtype
    memory: torch.Tensor | None = None


class StreamingSwapper(PartitionedOptimizerSwapper):
    """DeepSpeed's swapper without its buffers.

    Buffers for whole sub-groups are allocated only for calls that ask for whole states: `safe_get_full_optimizer_state`
    and its relatives, and loading a checkpoint.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of DeepSpeed's own swapper."""
        super().__init__(*args, **options)
        self.swap_buffer_manager.keep = False
        self.moment_dtype: torch.dtype = getattr(torch, settings.current.states)
        #: The gradients of the next step, and the step before's for programs that ask for them.
        self.gradients: dict[str, Gradient] = {}
        self.spent: dict[str, Gradient] = {}
        self._gradient_writers: dict[torch.dtype, CastWriter] = {}
        self.slots: list[_Slot] = []
        self.kept = KeptStates()
        #: Sub-groups whose moments lie in files.
        self.stepped: set[int] = set()

    def initialize_parameters(self, parameters: Sequence[Any], src_tensors: Sequence[torch.Tensor]) -> None:
        """Write the masters of sub-groups, from weights in memory."""
        self.kept.forget()
        paths = self._get_swap_paths(parameters=parameters, num_elems=[source.numel() for source in src_tensors])
        writer = CastWriter(self.dtype)
        for path, source in zip(paths, src_tensors, strict=True):
            writer.write(source.detach().view(-1), path)
            self._pad(writer, path, source.numel())
        writer.wait()

    def initialize_from_swapped_fp16_params(
        self,
        fp16_partitions_info: Sequence[Any],
        fp16_num_elems: Sequence[int],
        fp16_pinned_buffers: Sequence[torch.Tensor],
        fp32_parameters: Sequence[Any],
    ) -> None:
        """Write the masters of sub-groups, from the weights' files."""
        self.kept.forget()
        paths = self._get_swap_paths(parameters=fp32_parameters, num_elems=fp16_num_elems)
        writer, reader = CastWriter(self.dtype), AioHandle()
        buffer = torch.empty(0)
        for path, partitions, total in zip(paths, fp16_partitions_info, fp16_num_elems, strict=True):
            offset = 0
            for tensor, numel, source in partitions:
                if source is None:
                    writer.write(tensor.detach().view(-1), path, offset * self.dtype.itemsize)
                else:
                    if buffer.dtype != tensor.dtype or not buffer.numel():
                        buffer = PINNED.empty(CHUNK, tensor.dtype)
                    for start in range(0, numel, CHUNK):
                        part = buffer.narrow(0, 0, min(CHUNK, numel - start))
                        reader.sync_pread(part, source, start * tensor.dtype.itemsize)
                        writer.write(part, path, (offset + start) * self.dtype.itemsize)
                offset += numel
            self._pad(writer, path, total)
        writer.wait()

    def _pad(self, writer: CastWriter, path: str, numel: int) -> None:
        """Make a file as long as DeepSpeed makes it."""
        padding = self._io_aligned_numel(numel) - numel
        if padding:
            writer.write(torch.zeros(padding, dtype=self.dtype), path, numel * self.dtype.itemsize)

    def purge_state(self) -> None:
        """Forget the moments: others are loaded."""
        super().purge_state()
        self.kept.forget()
        self.stepped.clear()

    @property
    def state_dtypes(self) -> list[torch.dtype]:
        """Dtypes of masters and moments, in their files and in memory."""
        return [torch.float32, self.moment_dtype, self.moment_dtype]

    def state_bytes(self, optimizer: Any) -> int:
        """Return the bytes of masters and moments of the sub-groups that are updated in a stream."""
        numels = optimizer.fp16_partitioned_groups_flat_numel
        streamed = sum(int(numel) for index, numel in enumerate(numels) if streams(optimizer, index))
        return streamed * sum(dtype.itemsize for dtype in self.state_dtypes)

    def paths(self, parameter: Any) -> list[str]:
        """Return the files of a sub-group's masters and moments."""
        name = self.parameter_id(parameter)
        suffix = "" if self.moment_dtype == torch.float32 else "-bfloat16"
        prefixes = ["", *(f"{state}{suffix}-" for state in STATES)]
        return [os.path.join(self.swap_folder, f"{prefix}{name}.tensor.swp") for prefix in prefixes]

    def register_moments(self, sub_group: int, parameter: Any) -> None:
        """Note that the files of a sub-group's moments hold them, and let DeepSpeed know if they are as its own."""
        self.stepped.add(sub_group)
        state = self.optimizer.state[parameter]
        for name in STATES:
            state[name] = torch.empty(0, dtype=self.moment_dtype)
        if self.moment_dtype == torch.float32:
            for name in STATES:
                state[name].ds_id = f"{name}-{self.parameter_id(parameter)}"
            self._get_param_swap_info(parameter).add_state_tensors([state[name] for name in STATES])

    def write_gradient(self, parameter: Any, gradient: torch.Tensor, offset: int) -> None:
        """Start to write a part of a sub-group's gradient; it may change when this returns."""
        name = self.parameter_id(parameter)
        path = os.path.join(self.swap_folder, f"{name}_gradient.tensor.swp")
        dtype = gradient.dtype
        self.gradients[name] = Gradient(path, dtype)
        writer = self._gradient_writers.setdefault(dtype, CastWriter(dtype))
        writer.write(gradient.detach().view(-1), path, offset * dtype.itemsize)

    def read_gradients(self, optimizer: Any, flat: torch.Tensor) -> None:
        """Read the gradients that were written so far to their places in `flat`: another is added to them."""
        self.wait_for_gradients()
        place = 0
        for sub_group, numel in enumerate(optimizer.fp16_partitioned_groups_flat_numel):
            found = self.gradients.get(self.parameter_id(optimizer.fp32_partitioned_groups_flat[sub_group]))
            if found is not None and found.path is not None:
                held = min(os.path.getsize(found.path) // found.dtype.itemsize, int(numel))
                AioHandle().sync_pread(flat.narrow(0, place, held), found.path)
            place += int(numel)

    def wait_for_gradients(self) -> None:
        """Wait until gradients are written."""
        for writer in self._gradient_writers.values():
            writer.wait()

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any = None) -> None:
        """Read all states of a sub-group, and its gradient, into buffers of their own."""
        name = self.parameter_id(parameter)
        self.kept.hand_over(name)
        super().swap_in_optimizer_state(parameter, async_parameter)
        gradient = self.gradients.get(name) or self.spent.get(name)
        info = self._get_param_swap_info(parameter)
        if gradient is None or info is None or parameter.grad is not None:
            return
        self.wait_for_gradients()
        whole = torch.zeros(info.numel(), dtype=parameter.dtype)
        if gradient.memory is not None:
            whole.copy_(gradient.memory)
        elif gradient.path is not None and os.path.exists(gradient.path):
            held = min(os.path.getsize(gradient.path) // gradient.dtype.itemsize, info.numel())
            read = torch.empty(held, dtype=gradient.dtype)
            AioHandle().sync_pread(read, gradient.path)
            whole[:held].copy_(read)
        parameter.grad = whole

    def writeback_optimizer_state_and_gradients(
        self, parameter: Any, write_opt_state: bool, write_gradients: bool
    ) -> None:
        """Write the program's changes of a sub-group that was swapped in."""
        info = self._get_param_swap_info(parameter)
        if info is not None and write_gradients and parameter.grad is not None:
            name = self.parameter_id(parameter)
            path = os.path.join(self.swap_folder, f"{name}_gradient.tensor.swp")
            AioHandle().sync_pwrite(parameter.grad, path)
            self.gradients[name] = Gradient(path, parameter.grad.dtype)
        super().writeback_optimizer_state_and_gradients(parameter, write_opt_state, write_gradients=False)


class _Slot:
    """Buffers for a chunk, and the transfers under way with them."""

    def __init__(
        self, weight_dtype: torch.dtype, state_dtypes: Sequence[torch.dtype], gradient_dtypes: set[torch.dtype]
    ) -> None:
        # In one piece, so that huge pages hold all but its end.
        narrow = [dtype for dtype in gradient_dtypes if dtype != torch.float32]
        sizes = [(CHUNK, dtype) for dtype in (*state_dtypes, torch.float32, *narrow)]
        parts = PINNED.carve([*sizes, (CHUNK + _ALIGNED_PIECES * _PAGE, weight_dtype)])
        self.states = [parts.pop(0) for _ in state_dtypes]
        self.gradient = parts.pop(0)
        self.weight = parts.pop()
        self.read_gradient = {torch.float32: self.gradient, **dict(zip(narrow, parts, strict=True))}
        self.reads, self.writes = AioHandle(), AioHandle()
        #: The chunk in hand if its states stay in memory, outside `states`.
        self.kept: ResidentChunk | None = None

    def states_of(self, chunk: _Chunk) -> list[torch.Tensor]:
        if self.kept is not None:
            return self.kept.states
        return [buffer.narrow(0, 0, chunk.numel) for buffer in self.states]

    def gradient_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self.read_gradient:
            self.read_gradient[dtype] = PINNED.empty(CHUNK, dtype)
        return self.read_gradient[dtype]


@dataclass(frozen=True)
class _Chunk:
    sub_group: int
    start: int
    numel: int
    is_last: bool


class StreamedStep:
    """One step of all sub-groups that stream, in order."""

    def __init__(self, optimizer: Any) -> None:
        """Begin; nothing is read yet."""
        self.optimizer = optimizer
        self.swapper: StreamingSwapper = optimizer.optimizer_swapper
        self.swapper.wait_for_gradients()
        self._chunks = list(self._cut())
        if not self.swapper.slots:
            count = slots(map(int, optimizer.fp16_partitioned_groups_flat_numel))
            found = self.swapper.gradients.values()
            read = {gradient.dtype for gradient in found if gradient.path is not None}
            self.swapper.slots = [_Slot(optimizer.dtype, self.swapper.state_dtypes, read) for _ in range(count)]
            self._keep()
        self._read = self._computed = 0
        self.scale: dict[int, Any] = {}

    def _cut(self) -> Iterator[_Chunk]:
        for sub_group in range(len(self.optimizer.fp16_groups)):
            if streams(self.optimizer, sub_group):
                numel = int(self.optimizer.fp16_partitioned_groups_flat_numel[sub_group])
                for start in range(0, numel, CHUNK):
                    count = min(CHUNK, numel - start)
                    yield _Chunk(sub_group, start, count, start + count == numel)

    def _keep(self) -> None:
        """Choose the chunks whose states stay in memory, and allocate it."""
        dtypes = self.swapper.state_dtypes
        per_element = sum(dtype.itemsize for dtype in dtypes)
        for index in spread([chunk.numel * per_element for chunk in self._chunks], self.swapper.kept.room_bytes):
            chunk = self._chunks[index]
            states = [PINNED.empty(chunk.numel, dtype) for dtype in dtypes]
            self.swapper.kept.add(
                self._name(chunk.sub_group), ResidentChunk(states, self._paths(chunk.sub_group), chunk.start)
            )

    def run(self, sub_group: int) -> None:
        """Update one sub-group, and start to read those that follow."""
        scalars = self._begin(sub_group)
        while self._computed < len(self._chunks) and self._chunks[self._computed].sub_group == sub_group:
            while self._read < min(self._computed + len(self.swapper.slots) - 1, len(self._chunks)):
                self._start_to_read(self._read)
                self._read += 1
            self._compute(self._computed, scalars)
            self._computed += 1
        self.optimizer.fp32_partitioned_groups_flat[sub_group].grad = None

    def end(self) -> None:
        """Wait until everything is written; raises the first error."""
        failure = None
        for slot in self.swapper.slots:
            for handle in (slot.reads, slot.writes):
                try:
                    handle.wait()
                except OSError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _begin(self, sub_group: int) -> adam.Scalars:
        """Advance the step number of a sub-group, and return the scalars of its chunks' update."""
        optimizer = self.optimizer.optimizer
        parameter = self.optimizer.fp32_partitioned_groups_flat[sub_group]
        state = optimizer.state[parameter]
        if not state:
            state["step"] = 0
            for name in STATES:
                # The values lie in files from the first step on.
                state[name] = torch.empty(0, dtype=self.swapper.moment_dtype)
        state["step"] += 1
        group = optimizer.param_groups[self.optimizer.sub_group_to_group_id[sub_group]]
        options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        return adam.scalars(
            optimizer.adam_w_mode, state["step"], options, group["bias_correction"], self._gradient_scale(sub_group)
        )

    def _gradient_scale(self, sub_group: int) -> float:
        return float(1.0 / self.scale[sub_group])

    def _info(self, sub_group: int) -> Any:
        return self.swapper._get_param_swap_info(self.optimizer.fp32_partitioned_groups_flat[sub_group])

    def _name(self, sub_group: int) -> str:
        return self.swapper.parameter_id(self.optimizer.fp32_partitioned_groups_flat[sub_group])

    def _paths(self, sub_group: int) -> list[str]:
        return self.swapper.paths(self.optimizer.fp32_partitioned_groups_flat[sub_group])

    def _slot(self, index: int) -> _Slot:
        return self.swapper.slots[index % len(self.swapper.slots)]

    def _start_to_read(self, index: int) -> None:
        chunk, slot = self._chunks[index], self._slot(index)
        slot.writes.wait()
        slot.kept = self.swapper.kept.get(self._name(chunk.sub_group), chunk.start)
        if slot.kept is None or not slot.kept.is_current:
            self._start_to_read_states(chunk, slot)
        gradient = self._gradient(chunk.sub_group)
        if gradient.path is not None:
            read = slot.gradient_of(gradient.dtype).narrow(0, 0, chunk.numel)
            slot.reads.async_pread(read, gradient.path, chunk.start * gradient.dtype.itemsize)

    def _start_to_read_states(self, chunk: _Chunk, slot: _Slot) -> None:
        info = self._info(chunk.sub_group)
        stepped = info.has_state_tensors or chunk.sub_group in self.swapper.stepped
        masters, *moments = zip(slot.states_of(chunk), self._paths(chunk.sub_group), strict=True)
        for buffer, path in (masters, *moments) if stepped else (masters,):
            slot.reads.async_pread(buffer, path, chunk.start * buffer.itemsize)
        for buffer, _ in () if stepped else moments:
            buffer.zero_()

    def _gradient(self, sub_group: int) -> Gradient:
        parameter = self.optimizer.fp32_partitioned_groups_flat[sub_group]
        return self.swapper.gradients[self.swapper.parameter_id(parameter)]

    @torch.no_grad()
    def _compute(self, index: int, scalars: adam.Scalars) -> None:
        chunk, slot = self._chunks[index], self._slot(index)
        slot.reads.wait()
        states = slot.states_of(chunk)
        found, gradient = self._gradient(chunk.sub_group), slot.gradient.narrow(0, 0, chunk.numel)
        if found.memory is not None:
            gradient.copy_(found.memory.narrow(0, chunk.start, chunk.numel))
        elif found.dtype != torch.float32:
            gradient.copy_(slot.gradient_of(found.dtype).narrow(0, 0, chunk.numel))
        adam.step_masters(scalars, (states[0], gradient, *states[1:]))
        if slot.kept is not None:
            slot.kept.is_current, slot.kept.is_written = True, False
        else:
            for buffer, path in zip(states, self._paths(chunk.sub_group), strict=True):
                slot.writes.async_pwrite(buffer, path, chunk.start * buffer.itemsize)
        self._write_weights(chunk, slot, states[0])
        if chunk.is_last:
            self._finish_files(chunk, slot)

    def _write_weights(self, chunk: _Chunk, slot: _Slot, masters: torch.Tensor) -> None:
        """Put the new weights where their parameters are: in memory, or in a file for each."""
        flat = self.optimizer.fp16_partitioned_groups_flat[chunk.sub_group]
        if flat is not None:
            flat.narrow(0, chunk.start, chunk.numel).copy_(masters)
            return
        begin, end, place, used = chunk.start, chunk.start + chunk.numel, 0, 0
        partitions = self.optimizer.fp16_partitioned_groups[chunk.sub_group]
        for param, partition in zip(self.optimizer.fp16_groups[chunk.sub_group], partitions, strict=True):
            first, last = max(begin, place), min(end, place + partition.ds_numel)
            if first < last:
                source = masters.narrow(0, first - begin, last - first)
                if partition.status == PartitionedParamStatus.AVAILABLE:
                    partition.data.narrow(0, first - place, last - first).copy_(source)
                else:
                    if last - first >= CHUNK // _ALIGNED_PIECES:
                        # It lies in memory as it will in the file, so that its pages are written directly.
                        used += (first - place - used) % _PAGE
                    part = slot.weight.narrow(0, used, last - first)
                    part.copy_(source)
                    used += last - first
                    path = param.nvme_swapper.get_path(param, must_exist=True)
                    slot.writes.async_pwrite(part, path, (first - place) * part.dtype.itemsize)
            place += partition.ds_numel

    def _finish_files(self, chunk: _Chunk, slot: _Slot) -> None:
        """After a sub-group's first step, note its moments, in files as long as DeepSpeed's."""
        if chunk.sub_group in self.swapper.stepped or self._info(chunk.sub_group).has_state_tensors:
            return
        numel = chunk.start + chunk.numel
        padding = self.swapper._io_aligned_numel(numel) - numel
        dtype = self.swapper.moment_dtype
        for path in self._paths(chunk.sub_group)[1:] if padding else ():
            slot.writes.async_pwrite(torch.zeros(padding, dtype=dtype), path, numel * dtype.itemsize)
        self.swapper.register_moments(chunk.sub_group, self.optimizer.fp32_partitioned_groups_flat[chunk.sub_group])


def in_place_of(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a maker of a `StreamingSwapper` where that can serve an optimizer, else DeepSpeed's own."""

    def make(**options: Any) -> Any:
        inner = options["optimizer"]
        # With fp32_optimizer_states=False moments have the dtype of the masters, which is float32 too.
        fits = type(inner) is DeepSpeedCPUAdam and options["dtype"] == torch.float32
        return (StreamingSwapper if fits else stock)(**options)

    return make


def applies(optimizer: Any) -> bool:
    """Return whether an optimizer's swapped states are updated in a stream."""
    inner = optimizer.optimizer
    return (
        gradients.applies(optimizer)
        and optimizer.swap_optimizer
        and isinstance(optimizer.optimizer_swapper, StreamingSwapper)
        and type(inner) is DeepSpeedCPUAdam
        and optimizer.master_weights_and_grads_dtype == torch.float32
        and not getattr(optimizer, "torch_autocast_gradscaler", None)
        and optimizer.partial_offload == 1.0
    )


def streams(optimizer: Any, sub_group: int) -> bool:
    """Return whether a sub-group is updated in a stream."""
    return applies(optimizer) and optimizer._swappable_optimizer_subgroup(sub_group)


def initialize_optimizer_states(self: Any) -> None:
    """Prepare sub-groups whose states stay in memory; the others have none before their first step."""
    if not applies(self):
        ORIGINALS["initialize_optimizer_states"](self)
        return
    for sub_group in range(len(self.fp16_groups)):
        if not streams(self, sub_group):
            numel = int(self.fp16_partitioned_groups_flat_numel[sub_group])
            parameter = self.fp32_partitioned_groups_flat[sub_group]
            gradient = torch.zeros(numel, dtype=parameter.dtype, device=self.subgroup_to_device[sub_group])
            parameter.grad = gradient


def _offload_grad_partition_at_boundary(
    self: Any, param: Any, grad_buffer: torch.Tensor, grads: dict[int, Any], offsets: dict[int, Any]
) -> None:
    sub_group, offset, _ = self.grad_position[self.get_param_id(param)]
    if not streams(self, sub_group):
        ORIGINALS["_offload_grad_partition_at_boundary"](self, param, grad_buffer, grads, offsets)
        return
    self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(grad_buffer)
    parameter = self.fp32_partitioned_groups_flat[sub_group]
    total = int(self.fp16_partitioned_groups_flat_numel[sub_group])
    swapper = self.optimizer_swapper
    flat = self.grad_partitions_flat_buffer
    if flat is not None:
        place = sum(int(numel) for numel in self.fp16_partitioned_groups_flat_numel[:sub_group])
        memory = flat.narrow(0, place, total)
        swapper.gradients[swapper.parameter_id(parameter)] = Gradient(None, flat.dtype, memory)
    else:
        swapper.write_gradient(parameter, grad_buffer, offset)


def step(self: Any, closure: Any = None) -> None:
    """Do a step; values in swap files are updated in a stream."""
    if not applies(self):
        ORIGINALS["step"](self, closure)
        return
    self._memascend_step = None
    self._memascend_stepping = True
    try:
        ORIGINALS["step"](self, closure)
    finally:
        running, self._memascend_step = self._memascend_step, None
        self._memascend_stepping = False
        swapper = self.optimizer_swapper
        if running is not None:
            running.end()
        # A skipped step's are still being written, to files that the next ones will have.
        swapper.wait_for_gradients()
        swapper.spent, swapper.gradients = swapper.gradients, {}


def _now_streams(self: Any, sub_group: int) -> bool:
    """Return whether this is a step, and a sub-group has a gradient to be updated with in a stream."""
    if not getattr(self, "_memascend_stepping", False) or not streams(self, sub_group):
        return False
    if self._memascend_step is None:
        fill_missing(self)
        self._memascend_step = StreamedStep(self)
    return True


def fill_missing(self: Any) -> None:
    """Give parameters without a gradient one of zeros, as DeepSpeed's step sees them."""
    swapper = self.optimizer_swapper
    for sub_group, params in enumerate(self.fp16_groups):
        if not streams(self, sub_group):
            continue
        parameter = self.fp32_partitioned_groups_flat[sub_group]
        total = int(self.fp16_partitioned_groups_flat_numel[sub_group])
        name = swapper.parameter_id(parameter)
        if name not in swapper.gradients:
            zeros = torch.zeros((), dtype=self.gradient_accumulation_dtype).expand(total)
            swapper.gradients[name] = Gradient(None, zeros.dtype, zeros)
            continue
        gradient = swapper.gradients[name]
        for param in params:
            if self.get_param_id(param) not in self.norm_for_param_grads:
                _, offset, numel = self.grad_position[self.get_param_id(param)]
                if gradient.memory is not None:
                    gradient.memory.narrow(0, offset, numel).zero_()
                else:
                    swapper.write_gradient(parameter, torch.zeros(numel, dtype=gradient.dtype), offset)


def _prepare_sub_group(self: Any, sub_group_id: int, timer_names: Any) -> None:
    if not _now_streams(self, sub_group_id):
        ORIGINALS["_prepare_sub_group"](self, sub_group_id, timer_names)


def unscale_and_clip_grads(self: Any, sub_group_id: int, total_norm: Any) -> None:
    """Scale a gradient, within the update where that streams."""
    if not _now_streams(self, sub_group_id):
        ORIGINALS["unscale_and_clip_grads"](self, sub_group_id, total_norm)
        return
    # As in DeepSpeed, which takes the norm of scaled gradients.
    scale = self.loss_scale
    if self.clip_grad > 0.0:
        clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
        scale = torch.clamp(clip, min=1.0) * self.loss_scale
    self._memascend_step.scale[sub_group_id] = scale


def _optimizer_step(self: Any, sub_group_id: int) -> None:
    if _now_streams(self, sub_group_id):
        self._memascend_step.run(sub_group_id)
    else:
        ORIGINALS["_optimizer_step"](self, sub_group_id)


def _reassign_or_swap_out_partitioned_parameters(self: Any, sub_group_id: int) -> None:
    if not _now_streams(self, sub_group_id):
        ORIGINALS["_reassign_or_swap_out_partitioned_parameters"](self, sub_group_id)


def _release_sub_group(self: Any, sub_group_id: int, timer_names: Any) -> None:
    if not _now_streams(self, sub_group_id):
        ORIGINALS["_release_sub_group"](self, sub_group_id, timer_names)


def _post_step(self: Any, timer_names: Any) -> None:
    if getattr(self, "_memascend_step", None) is not None:
        # Persistent parameters are gathered from the written values.
        self._memascend_step.end()
    ORIGINALS["_post_step"](self, timer_names)


def checkpoint_event_prologue(self: Any) -> None:
    """Have the swap files hold all states: a checkpoint copies them."""
    if applies(self):
        self.optimizer_swapper.kept.write()
    ORIGINALS["checkpoint_event_prologue"](self)


def reset_swap_buffers(self: Any) -> None:
    """Take the states from the swap files, which a checkpoint has replaced."""
    if applies(self):
        self.optimizer_swapper.kept.forget()
    ORIGINALS["reset_swap_buffers"](self)


METHODS = {
    function.__name__: function
    for function in (
        initialize_optimizer_states,
        _offload_grad_partition_at_boundary,
        step,
        _prepare_sub_group,
        unscale_and_clip_grads,
        _optimizer_step,
        _reassign_or_swap_out_partitioned_parameters,
        _release_sub_group,
        _post_step,
        checkpoint_event_prologue,
        reset_swap_buffers,
    )
}
ORIGINALS = {name: vars(Optimizer)[name] for name in METHODS}
