"""The names of `import memascend`, which imports this module when one of them is used first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend import optim
from memascend.formats.distributed import load_distributed, save_distributed
from memascend.formats.hugging_face import from_pretrained
from memascend.formats.saving import parameters_of, save_pretrained
from memascend.hardware.pinned import empty_pinned, pin_memory
from memascend.optim import *  # noqa: F403
from memascend.optim.scaler import GradScaler
from memascend.recovery.reshard import reshard
from memascend.recovery.resume import (
    Resumed,
    can_resume,
    checkpoints,
    delete_checkpoint,
    restore_checkpoint,
    resume,
    save_checkpoint,
    track,
)
from memascend.session.api import find_offload, offload, offload_of, set_device_memory, set_host_memory
from memascend.slicing.slices import run_in_slices
from memascend.slicing.tiles import run_in_tiles
from memascend.vocabulary.fused import fuse_loss
from memascend.vocabulary.loss import linear_cross_entropy

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "GradScaler",
    "Resumed",
    "can_resume",
    "checkpoints",
    "close",
    "delete_checkpoint",
    "empty_pinned",
    "find_offload",
    "flush",
    "from_pretrained",
    "fuse_loss",
    "linear_cross_entropy",
    "load_distributed",
    "offload",
    "offload_of",
    "parameters_of",
    "pin_memory",
    "plan_of",
    "reshard",
    "restore_checkpoint",
    "resume",
    "run_in_slices",
    "run_in_tiles",
    "save_checkpoint",
    "save_distributed",
    "save_pretrained",
    "set_device_memory",
    "set_host_memory",
    "stats",
    "track",
]
__all__ += optim.__all__


def stats(model: nn.Module) -> dict[str, Any]:
    """Return the counters of an offloaded model's session, most of them since it was opened.

    - `ssd_bytes_read`, `ssd_bytes_written`, `ssd_requests`: traffic of the store. `store_bytes_used`: its size now.
      `file_bytes_read`: read from the model's own files, for frozen weights.
    - `host_bytes_in_use`, `host_bytes_peak`, `host_bytes_reserved`: leased from the arena now, at the peak, and the
      size of the arena. `host_bytes_waste`: bytes by which leases exceed the requests. `host_bytes_planned`: the arena
      and all other memory in the plan. `host_bytes_budget`: the present ceiling. `host_memory_auto`: whether that
      follows the machine. `host_bytes_outside`, `host_bytes_outside_most`: buffers beside the arena, now and at most.
    - `host_classes_at_peak`: for each size class of units, gradient packs, staging and update pipeline: bytes of a
      buffer, number of buffers, bytes in use at the peak.
    - `pool_hits`, `pool_waits`, `pool_refusals`: leases served at once, leases served after waiting, and requests
      refused because no buffer was free. `fetch_waits`: how often the computation waited for a unit. `parameters`:
      number of elements. `generation`: number of the last durable generation, 0 for none.
    - `layers_kept`, `layers_recomputed`: calls of repeated layers, one for each slice of a batch, whose activations
      stayed in memory for the backward pass, because `host_memory` has room for them, and calls that were computed
      again. `activation_bytes_kept`, `activation_bytes_kept_peak`: bytes of such activations, now and at most.
      `activation_bytes_lent`: bytes that they have in place of weights, gradients and states, see `spare_memory` of
      `memascend.offload`.
    - `seconds`: where the time went, by the resource the program was blocked on: `ssd_read`, `ssd_write`, `h2d`, `d2h`,
      `cpu_update`, and `compute` for the remainder. Their sum is the time since the session was opened.
    - With a device: `device_bytes_budget`, the present ceiling, and `device_bytes_planned`; `device`: `h2d_bytes`,
      `d2h_bytes`, `h2d_copies`, `d2h_copies`, and how often Python (`waits_python`) or a native thread
      (`waits_worker`) waited for the device.
    - Where the store is divided over ranks: `rank`, `ranks`, and `network_bytes_sent`, the weights and gradients that
      this rank has sent to others.
    - `threads`: `torch`, the number that PyTorch computes with; `update`, the number that updates weights; `waits`, how
      PyTorch's wait for each other now ("spin", "yield", or the setting that decides it); `processors`: `logical`,
      `physical` (cores) and `quota` (processors' worth of time that its cgroups allow, or None).
    - `engine`, `direct_io`, `host_allocator`: the mechanisms in use. `host_bytes_in_huge_pages`: of the arena, when
      first asked; None where the system does not tell. `notices`: what the user should know about them.
    - `volumes`: for each volume `path`, `engine`, `features` (of the system, in use or refused), `direct_io`, `share`
      of the store; `queue_depth_mean`, `queue_depth_max`, `busy_seconds` with a request in flight; and for reads and
      writes (`..._read`, `..._written`) `bytes`, `requests`, `failures`, `latency_p50`, `latency_p99`, `latency_max`
      (seconds from submission to completion) and `bytes_per_busy_second`.

    Raises MemascendError for an ordinary or a closed model, as do `plan_of` and `flush`.
    """
    return offload_of(model).stats()


def plan_of(model: nn.Module) -> str:
    """Return the memory plans of an offloaded model, of host and device, as tables with a line per consumer."""
    session = offload_of(model)
    plans = (session.plan, session.device_plan)
    return "\n".join(plan.table() for plan in plans if plan is not None)


def flush(model: nn.Module) -> None:
    """Apply the model's deferred updates, wait for the drives, and commit the step if steps are durable."""
    offload_of(model).flush()


def close(model: nn.Module) -> None:
    """Free the model's host memory and close its store, whose files are removed unless `keep_store` keeps them.

    Does nothing for a closed or an ordinary model. A model that the garbage collector finds unused is closed too, as at
    the end of a program that does not call `close`: a store with a durable step stays, with the last step.
    """
    session = find_offload(model)
    if session is not None:
        session.close()
