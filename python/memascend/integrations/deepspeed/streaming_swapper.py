"""DeepSpeed's swapper for optimizers whose step is streamed: the files of states and gradients, and no buffers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper

from memascend.forecast.deepspeed.plan import CHUNK
from memascend.integrations.deepspeed import gradients
from memascend.integrations.deepspeed import options as settings
from memascend.integrations.deepspeed.buffers import CastWriter
from memascend.integrations.deepspeed.files import AioHandle
from memascend.integrations.deepspeed.kept import KeptStates, ResidentChunk
from memascend.integrations.deepspeed.pinned import PINNED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Elements to which the places of weights in a slot are aligned, which are whole pages in any dtype.
PAGE_ELEMENTS = 4096
#: The most pieces of a chunk that are aligned; smaller ones are not.
ALIGNED_PIECES = 16
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
        self.slots: list[Slot] = []
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


class Slot:
    """Buffers for a chunk, and the transfers under way with them."""

    def __init__(
        self, weight_dtype: torch.dtype, state_dtypes: Sequence[torch.dtype], gradient_dtypes: set[torch.dtype]
    ) -> None:
        """Allocate the buffers for states, weights, and gradients that are read in these dtypes."""
        # In one piece, so that huge pages hold all but its end.
        narrow = [dtype for dtype in gradient_dtypes if dtype != torch.float32]
        sizes = [(CHUNK, dtype) for dtype in (*state_dtypes, torch.float32, *narrow)]
        parts = PINNED.carve([*sizes, (CHUNK + ALIGNED_PIECES * PAGE_ELEMENTS, weight_dtype)])
        self.states = [parts.pop(0) for _ in state_dtypes]
        self.gradient = parts.pop(0)
        self.weight = parts.pop()
        self.read_gradient = {torch.float32: self.gradient, **dict(zip(narrow, parts, strict=True))}
        self.reads, self.writes = AioHandle(), AioHandle()
        #: The chunk in hand if its states stay in memory, outside `states`.
        self.kept: ResidentChunk | None = None

    def states_of(self, numel: int) -> list[torch.Tensor]:
        """Return the masters and moments of a chunk of so many elements."""
        if self.kept is not None:
            return self.kept.states
        return [buffer.narrow(0, 0, numel) for buffer in self.states]

    def gradient_of(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer that a gradient of a dtype is read into."""
        if dtype not in self.read_gradient:
            self.read_gradient[dtype] = PINNED.empty(CHUNK, dtype)
        return self.read_gradient[dtype]


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
