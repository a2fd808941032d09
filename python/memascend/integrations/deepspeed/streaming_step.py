"""The step of an optimizer whose states lie in swap files: read, Adam, write, a chunk at a time.

DeepSpeed reads the masters and both moments of a whole sub-group, updates them and writes them back: 16 bytes of
buffers for each element of the largest sub-group, and a drive that rests while the processor works. Here chunks of all
sub-groups follow one another through slots, so that some are read and some written while one is computed.

Names and contents of the files are DeepSpeed's, so that either can go on from the other's checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

from memascend.forecast.deepspeed.plan import CHUNK, slots
from memascend.integrations.deepspeed import adam
from memascend.integrations.deepspeed.kept import ResidentChunk, spread
from memascend.integrations.deepspeed.pinned import PINNED
from memascend.integrations.deepspeed.streaming_swapper import (
    ALIGNED_PIECES,
    PAGE_ELEMENTS,
    STATES,
    Gradient,
    Slot,
    StreamingSwapper,
    streams,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


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
            self.swapper.slots = [Slot(optimizer.dtype, self.swapper.state_dtypes, read) for _ in range(count)]
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

    def _slot(self, index: int) -> Slot:
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

    def _start_to_read_states(self, chunk: _Chunk, slot: Slot) -> None:
        info = self._info(chunk.sub_group)
        stepped = info.has_state_tensors or chunk.sub_group in self.swapper.stepped
        masters, *moments = zip(slot.states_of(chunk.numel), self._paths(chunk.sub_group), strict=True)
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
        states = slot.states_of(chunk.numel)
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

    def _write_weights(self, chunk: _Chunk, slot: Slot, masters: torch.Tensor) -> None:
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
                    if last - first >= CHUNK // ALIGNED_PIECES:
                        # It lies in memory as it will in the file, so that its pages are written directly.
                        used += (first - place - used) % PAGE_ELEMENTS
                    part = slot.weight.narrow(0, used, last - first)
                    part.copy_(source)
                    used += last - first
                    path = param.nvme_swapper.get_path(param, must_exist=True)
                    slot.writes.async_pwrite(part, path, (first - place) * part.dtype.itemsize)
            place += partition.ds_numel

    def _finish_files(self, chunk: _Chunk, slot: Slot) -> None:
        """After a sub-group's first step, note its moments, in files as long as DeepSpeed's."""
        if chunk.sub_group in self.swapper.stepped or self._info(chunk.sub_group).has_state_tensors:
            return
        numel = chunk.start + chunk.numel
        padding = self.swapper._io_aligned_numel(numel) - numel
        dtype = self.swapper.moment_dtype
        for path in self._paths(chunk.sub_group)[1:] if padding else ():
            slot.writes.async_pwrite(torch.zeros(padding, dtype=dtype), path, numel * dtype.itemsize)
        self.swapper.register_moments(chunk.sub_group, self.optimizer.fp32_partitioned_groups_flat[chunk.sub_group])
