"""ZeRO-3's parameter swapper with a size class for each size of parameter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
    AsyncPartitionedParameterSwapper,
    PartitionedParamStatus,
)

from memascend._memascend import return_large_blocks_to_system
from memascend.integrations.deepspeed.buffers import BufferPool, CastWriter
from memascend.integrations.deepspeed.pinned import PINNED

if TYPE_CHECKING:
    import torch


class ParameterSwapper(AsyncPartitionedParameterSwapper):
    """DeepSpeed's swapper over a `BufferPool`.

    DeepSpeed's own allocates `buffer_count` buffers of `buffer_size` elements, each as large as the largest parameter
    has to be, and casts updated weights in a buffer as large as the largest sub-group. Here `buffer_size` means
    nothing, and `buffer_count` only bounds how many parameters are read ahead: one that is needed at once gets a
    buffer in any case.
    """

    def __new__(cls, ds_config: Any, model_dtype: torch.dtype) -> Any:
        """Make DeepSpeed's own swapper where the GPU reads the drive itself."""
        if ds_config.aio_config["use_gds"]:
            return AsyncPartitionedParameterSwapper(ds_config, model_dtype)
        return super().__new__(cls)

    def _configure_aio(self, ds_config: Any) -> None:
        # Until the optimizer is made (gradients.py). Else malloc keeps memory that zero.Init leaves behind: 0.1 GB of a
        # Llama with 0.42 billion parameters.
        return_large_blocks_to_system()
        offload = ds_config.zero_config.offload_param
        tiny = SimpleNamespace(
            zero_config=SimpleNamespace(offload_param=offload.model_copy(update={"buffer_size": 1})),
            aio_config=ds_config.aio_config,
        )
        super()._configure_aio(tiny)
        self.swap_config = offload
        # Attributes that others may ask for.
        self.elements_per_buffer = offload.buffer_size
        self.aligned_elements_per_buffer = self._io_aligned_numel(offload.buffer_size)
        self._pool = BufferPool(self.dtype)
        self._casts = CastWriter(self.dtype)

    def limit_pool(self, nbytes: int) -> None:
        """Have the pool keep no free buffers beyond this many bytes in all."""
        self._pool.limit_bytes = nbytes

    def _lend(self, param: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Give a parameter a buffer: the part for its elements, and all that is read or written."""
        param_id = param.ds_id
        if not self.available_buffer_ids:
            self.available_buffer_ids.append(self.param_buffer_count)
            self.param_buffer_count += 1
        self.param_id_to_buffer_id[param_id] = self.available_buffer_ids.pop()
        numel = self.param_id_to_numel[param_id]
        swap_buffer = self._pool.lend(self._io_aligned_numel(numel))
        self.param_id_to_swap_buffer[param_id] = swap_buffer
        return swap_buffer.narrow(0, 0, numel), swap_buffer

    def _allocate_and_return_buffers_for_swap_in(self, params: list[Any]) -> tuple[list[Any], list[Any]]:
        lent = [self._lend(param) for param in params]
        return [compute for compute, _ in lent], [swap for _, swap in lent]

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Give a parameter of `numel` elements a buffer and return it."""
        self.param_id_to_numel[param.ds_id] = numel
        return self._lend(param)[0]

    def swap_in(self, params: list[Any], async_op: bool = True, swap_in_buffers: Any = None) -> None:
        """Start to read parameters, and wait for them unless `async_op`."""
        if swap_in_buffers is None:
            missing = len(params) - len(self.available_buffer_ids)
            for _ in range(max(missing, 0)):
                self.available_buffer_ids.append(self.param_buffer_count)
                self.param_buffer_count += 1
        super().swap_in(params, async_op, swap_in_buffers)

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Read a parameter into a buffer of the caller's."""
        if not self.available_buffer_ids:
            self.available_buffer_ids.append(self.param_buffer_count)
            self.param_buffer_count += 1
        super().swap_into_buffer(param, dest_buffer)

    def remove_partition_and_release_buffers(self, params: list[Any]) -> None:
        """Take the buffers of parameters back."""
        buffers = [self.param_id_to_swap_buffer.get(param.ds_id) for param in params]
        super().remove_partition_and_release_buffers(params)
        for buffer in buffers:
            if buffer is not None:
                self._pool.take_back(buffer)

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """Return a buffer for the start of an optimizer."""
        return [PINNED.empty(self.aligned_elements_per_buffer, self.dtype)]

    def release_reserved_buffers(self) -> None:
        """Do nothing: the buffer is gone."""

    def reserve_partitioned_swap_space(self, partition_num_elems: list[int]) -> None:
        """Do nothing: updated weights are cast in small parts."""

    def swap_out_partitioned_params(self, dst_fp16_params: list[Any], src_fp32_params: list[torch.Tensor]) -> None:
        """Write updated weights to the files of their parameters."""
        paths = self._get_swap_paths(dst_fp16_params, must_exist=True)
        self.synchronize_writes()
        for source, path in zip(src_fp32_params, paths, strict=True):
            self._casts.write(source.data, path)
        self._casts.wait()
        for param in dst_fp16_params:
            param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE
