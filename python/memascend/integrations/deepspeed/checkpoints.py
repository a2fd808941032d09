"""Checkpoints of an optimizer whose states lie in swap files: all of it is loaded again.

DeepSpeed copies the swap files to a checkpoint and back. The rest is in the ZeRO checkpoint, which it does not
load with an optimizer on NVMe: numbers of steps, the loss scale, and the masters and moments of sub-groups that are too
small to be swapped. A new engine then does not know either that the files hold moments, and begins with zeros.
"""

from __future__ import annotations

import os
from typing import Any

from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, LOSS_SCALER, OPTIMIZER_STATE_DICT
from deepspeed.runtime.engine import DeepSpeedEngine

from memascend.errors import MemascendError
from memascend.integrations.deepspeed import streaming


def load_checkpoint(
    self: Any,
    load_dir: str,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> tuple[Any, Any]:
    """Load a checkpoint, with the parts of a streamed optimizer that are not in its swap files."""
    loaded = ORIGINALS["load_checkpoint"](
        self,
        load_dir,
        tag,
        load_module_strict,
        load_optimizer_states,
        load_lr_scheduler_states,
        load_module_only,
        custom_load_fn,
    )
    wanted = load_optimizer_states and not load_module_only and not self.load_universal_checkpoint()
    if loaded[0] is None or not wanted or not _streams(self.optimizer):
        return loaded
    if self.seq_dp_world_size != self.loaded_checkpoint_dp_world_size:
        raise MemascendError(
            f"the checkpoint in {load_dir} is of {self.loaded_checkpoint_dp_world_size} processes and this run has "
            f"{self.seq_dp_world_size}: start as many, or convert it to a universal checkpoint"
        )
    if tag is None:
        with open(os.path.join(load_dir, "latest")) as file:
            tag = file.read().strip()
    ranks = self._get_all_zero_checkpoints(load_dir, tag)
    if ranks is not None:
        self.optimizer.checkpoint_event_prologue()
        restore(self.optimizer, ranks[dist.get_rank(group=self.optimizer.dp_process_group)])
        self.optimizer.checkpoint_event_epilogue()
    return loaded


def _streams(optimizer: Any) -> bool:
    return isinstance(optimizer, streaming.Optimizer) and streaming.applies(optimizer)


def restore(optimizer: Any, saved: dict[str, Any]) -> None:
    """Restore the part in a ZeRO checkpoint of an optimizer whose swap files are in place."""
    swapper = optimizer.optimizer_swapper
    states = saved[OPTIMIZER_STATE_DICT]["state"].values()
    # Of moments that were in swap files no elements are saved, but their dtype. A file alone says nothing: it may be
    # left over from another run in the same folder.
    swapped = [state[name] for state in states for name in streaming.STATES if name in state and not len(state[name])]
    for dtype in {moments.dtype for moments in swapped} - {swapper.moment_dtype}:
        raise MemascendError(
            f'the moments of this checkpoint are not in {swapper.moment_dtype} but in {dtype}: set "states" of '
            '"memascend" in DeepSpeed\'s configuration to what it was when the checkpoint was saved (without it: '
            "float32)"
        )
    optimizer.loss_scaler = saved[LOSS_SCALER]
    optimizer.dynamic_loss_scale, optimizer.overflow = saved["dynamic_loss_scale"], saved["overflow"]
    optimizer._set_fp32_optimizer_param_groups()
    optimizer.optimizer.load_state_dict(saved[OPTIMIZER_STATE_DICT])
    optimizer._clear_fp32_optimizer_param_groups()
    swapper.purge_state()
    masters = zip(optimizer.fp32_partitioned_groups_flat, saved[FP32_FLAT_GROUPS], strict=True)
    for sub_group, (parameter, saved_parameter) in enumerate(masters):
        if not streaming.streams(optimizer, sub_group):
            parameter.data.copy_(saved_parameter.data)
            # DeepSpeed has taken these weights from the masters that were there before.
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
            continue
        state = optimizer.optimizer.state[parameter]
        if all(name in state for name in streaming.STATES):
            swapper.register_moments(sub_group, parameter)


#: The function above, by the name of the method of `DeepSpeedEngine` whose place it takes.
METHODS = {"load_checkpoint": load_checkpoint}
#: DeepSpeed's own.
ORIGINALS = {name: vars(DeepSpeedEngine)[name] for name in METHODS}
