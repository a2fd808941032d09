"""The methods of DeepSpeed's optimizer that stream the step of swapped states (`streaming_step`)."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero import stage3

from memascend.integrations.deepspeed.streaming_step import StreamedStep
from memascend.integrations.deepspeed.streaming_swapper import STATES, Gradient, applies, in_place_of, streams

__all__ = ["METHODS", "ORIGINALS", "STATES", "Optimizer", "applies", "in_place_of", "streams"]

Optimizer = stage3.DeepSpeedZeroOptimizer_Stage3


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
