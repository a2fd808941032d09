"""Gradients of ZeRO-3's offloaded optimizer: checked and summed as they appear, and kept only where they have to be.

The functions here are methods of `DeepSpeedZeroOptimizer_Stage3`, in place of its own by the same names.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage3

from memascend._memascend import (
    check_overflow,
    keep_large_blocks,
    return_large_blocks_to_system,
    trim_heap,
)
from memascend.errors import MemascendError
from memascend.forecast.deepspeed import plan
from memascend.integrations.deepspeed import options as settings
from memascend.integrations.deepspeed.pinned import PINNED

if TYPE_CHECKING:
    from collections.abc import Sequence

Optimizer = stage3.DeepSpeedZeroOptimizer_Stage3

#: The most elements of gradients in host memory that are reduced together. DeepSpeed's default, 500 millions, holds all
#: gradients of many a model back to the end of the backward pass, in three copies.
BUCKET = 1 << 24
#: By how much a process that keeps blocks may grow before malloc's free ones are given back: in a backward pass of 1.0
#: billion parameters they came to 0.8 GB, and giving them back took 9 ms of a step.
GROWTH_BYTES = 256 << 20

_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
_KERNEL_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def applies(optimizer: Any) -> bool:
    """Return whether an optimizer's gradients are kept this way."""
    others = any(getattr(optimizer, name, False) for name in ("zenflow", "use_muon", "super_offload"))
    return optimizer.offload_optimizer and optimizer.device == "cpu" and not others


def _setup_for_real_optimizer(self: Any) -> None:
    if not applies(self):
        ORIGINALS["_setup_for_real_optimizer"](self)
        return
    self._create_fp32_partitions()
    dist.barrier()
    self._create_next_swappable_fp32_groups()
    self.initialize_optimizer_states()
    dist.barrier()
    device = get_accelerator().current_device_name()
    if torch.device(device).type == "cpu":
        self.reduce_bucket_size = min(self.reduce_bucket_size, BUCKET)
    if self.contiguous_gradients:
        for dtype, bucket in self.ipg_buckets.items():
            bucket.buffer = torch.empty(self.reduce_bucket_size, dtype=dtype, device=device)
    # Allocated when gradients are added up over several backward passes, or where there is room; else none is kept.
    self.grad_partitions_flat_buffer = None
    setattr(self, _PARTITIONS, {})
    self._memascend_non_finite = False
    if self.swap_optimizer or self.params_in_nvme_and_cpu:
        decision = self._memascend_plan = plan.decide(_shapes(self), settings.current)
        if dist.get_rank() == 0:
            print(plan.table(decision.lines), file=sys.stderr)
        limit_pool = getattr(getattr(self.fp16_groups[0][0], "nvme_swapper", None), "limit_pool", None)
        if limit_pool is not None:
            limit_pool(plan.pool_bytes(decision.lines))
        if decision.keeps_gradients:
            keep_gradients(self)
        if decision.kept_states:
            self.optimizer_swapper.kept.room_bytes = decision.kept_states
        if settings.current.keep_blocks:
            # Else each temporary of a layer is of new pages, which took a fifth of a step of 0.42 billion parameters.
            keep_large_blocks()
        else:
            return_large_blocks_to_system()


def _shapes(self: Any) -> plan.Shapes:
    """Return the sizes that a plan is made of."""
    sub_groups = [[param.partition_numel() for param in group] for group in self.fp16_groups]
    swapper = getattr(self.fp16_groups[0][0], "nvme_swapper", None)
    offload = getattr(swapper, "swap_config", None)
    # Without the streaming step the swapper is DeepSpeed's own.
    state_bytes = getattr(getattr(self, "optimizer_swapper", None), "state_bytes", None)
    return plan.Shapes(
        params=list(itertools.chain.from_iterable(sub_groups)),
        sub_groups=sub_groups,
        itemsize=self.dtype.itemsize,
        buffer_count=offload.buffer_count if offload is not None else 0,
        buffer_size=offload.buffer_size if offload is not None else 0,
        max_in_cpu=int(self.max_params_in_cpu) if self.params_in_nvme_and_cpu else 1 << 60,
        gradient_itemsize=self.gradient_accumulation_dtype.itemsize,
        accumulates=self.gradient_accumulation_steps > 1,
        swaps_states=self.swap_optimizer,
        streamed_states=state_bytes(self) if state_bytes is not None else 0,
    )


def keep_gradients(self: Any) -> None:
    """Allocate room for the gradients of all parameters, if there is none yet."""
    if self.grad_partitions_flat_buffer is not None:
        return
    params = list(itertools.chain.from_iterable(self.fp16_groups))
    numel = sum(param.partition_numel() for param in params)
    self.grad_partitions_flat_buffer = PINNED.empty(numel, self.gradient_accumulation_dtype)
    numels = [param.partition_numel() for param in params]
    parts = self.grad_partitions_flat_buffer.split(numels)
    setattr(self, _PARTITIONS, {param.ds_id: part for param, part in zip(params, parts, strict=True)})
    if self.micro_step_id > 0:
        # An earlier backward pass was taken for the last one before a step.
        restore = getattr(getattr(self, "optimizer_swapper", None), "read_gradients", None)
        if restore is None or not all(self._swappable_optimizer_subgroup(i) for i in range(len(self.fp16_groups))):
            raise MemascendError(
                "a second backward() before step() adds to gradients that are on their way to the update: set "
                "gradient_accumulation_steps in DeepSpeed's configuration to the number of backward passes"
            )
        restore(self, self.grad_partitions_flat_buffer)


def partition_grads(self: Any, params_to_release: Sequence[Any], grad_partitions: Sequence[torch.Tensor]) -> Any:
    """Add gradients up, or pass them on to the optimizer at once."""
    if not applies(self):
        return ORIGINALS["partition_grads"](self, params_to_release, grad_partitions)
    gradients: dict[int, list[torch.Tensor]] = {}
    offsets: dict[int, list[int]] = {}
    buffers = []
    is_last = self.is_gradient_accumulation_boundary()
    if not is_last or self.micro_step_id > 0:
        keep_gradients(self)
    for param, partition in zip(params_to_release, grad_partitions, strict=True):
        if param.partition_numel() * self._get_param_partition_rank(param) >= param.ds_numel:
            param.grad = None  # This rank has nothing of it.
            continue
        self._offload_boundary_param_ids.add(param.ds_id)
        gradient = partition
        if self.grad_partitions_flat_buffer is not None:
            kept = getattr(self, _PARTITIONS)[param.ds_id].narrow(0, 0, partition.numel())
            if self.micro_step_id == 0:
                kept.copy_(partition)
            else:
                # On the device of the new gradient, where that is not the host: adding is slow there.
                total = kept.to(partition.device)
                total.add_(partition.to(self.gradient_accumulation_dtype).view(kept.shape))
                kept.copy_(total)
            gradient = kept
        buffers.append(gradient)
        if is_last:
            self._offload_grad_partition_at_boundary(param, gradient, gradients, offsets)
        if not get_accelerator().is_synchronized_device() and param.grad is not None:
            param.grad.record_stream(get_accelerator().current_stream())
        param.grad = None
    self._swap_out_offload_fp32_gradients(gradients, offsets)
    if settings.current.keep_blocks:
        trim_heap(True, GROWTH_BYTES)
    return buffers


def _constant_buffered_norm2(self: Any, input: torch.Tensor, buffer_size: int = 250_000_000) -> torch.Tensor:
    """Return the 2-norm in float64, in one pass that also looks for values that are not finite."""
    flat = input.detach().view(-1)
    if flat.device.type != "cpu" or flat.dtype not in _KERNEL_DTYPES:
        return ORIGINALS["_constant_buffered_norm2"](self, input, buffer_size)
    non_finite, sums = _check(flat, norm=True)
    self._memascend_non_finite = getattr(self, "_memascend_non_finite", False) or non_finite
    return torch.tensor(math.sqrt(sums[0]), dtype=torch.float64)


def _check(flat: torch.Tensor, norm: bool) -> tuple[bool, list[float]]:
    given = [(_KERNEL_DTYPES[flat.dtype], flat.numel(), flat.data_ptr())]
    non_finite, sums, _ = check_overflow(given, norm, None, torch.get_num_threads())
    return non_finite, sums


def has_overflow(self: Any, partition_gradients: bool = True) -> bool:
    """Return whether a gradient of any rank has a value that is not finite."""
    if not (partition_gradients and applies(self)):
        return ORIGINALS["has_overflow"](self, partition_gradients)
    flat = self.grad_partitions_flat_buffer
    found = self._memascend_non_finite
    if flat is not None and not found:
        found, _ = _check(flat, norm=False)
    self._memascend_non_finite = False
    overflow = get_accelerator().ByteTensor([found])
    dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.dp_process_group)
    self._model_parallel_all_reduce(tensor=overflow, op=dist.ReduceOp.MAX)
    return bool(overflow[0].item())


def _create_param_groups_fp16_flat_cpu_memory(self: Any) -> None:
    """Allocate weights that stay in memory: of as many whole sub-groups as `max_in_cpu` allows, and no more."""
    total = 0
    for group in self.trainable_param_groups:
        sub_groups = self._create_fp16_sub_groups(group["params"])
        numel = sum(param.partition_numel() for param in group["params"])
        if self.params_in_nvme_and_cpu and total + numel > self.max_params_in_cpu:
            room = max(0, self.max_params_in_cpu - total)
            ends = itertools.accumulate(sum(param.partition_numel() for param in sub_group) for sub_group in sub_groups)
            fitting = max((end for end in ends if end <= room), default=0)
        else:
            fitting = numel
        total += numel
        flat = (
            get_accelerator().pin_memory(torch.empty(fitting, dtype=self.dtype))
            if fitting
            else torch.empty(1, dtype=self.dtype)
        )
        self.param_groups_fp16_flat_cpu_memory.append(flat)


#: The functions above, by the name of the method whose place they take.
METHODS = {
    function.__name__: function
    for function in (
        _setup_for_real_optimizer,
        partition_grads,
        _constant_buffered_norm2,
        has_overflow,
        _create_param_groups_fp16_flat_cpu_memory,
    )
}
#: DeepSpeed's own methods.
ORIGINALS = {name: vars(Optimizer)[name] for name in METHODS}
