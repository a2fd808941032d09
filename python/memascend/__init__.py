"""memascend: fine-tune language models larger than your RAM.

Parameters, gradients and optimizer states live on SSD; host memory is one budgeted pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend import overflow
from memascend.common.sizes import format_size, parse_size
from memascend.errors import (
    BudgetError,
    CheckpointError,
    DeviceError,
    HostMemoryError,
    MemascendError,
    PinnedMemoryError,
    StoreError,
)
from memascend.formats.distributed import load_distributed, save_distributed
from memascend.formats.hugging_face import from_pretrained, parameters_of, save_pretrained
from memascend.machine.pinned import empty_pinned, pin_memory
from memascend.offloading.api import find_offload, offload, offload_of
from memascend.optim import SGD, Adam, AdamW, Lion
from memascend.optim.scaler import GradScaler
from memascend.runs.resume import (
    Resumed,
    can_resume,
    checkpoints,
    delete_checkpoint,
    resume,
    save_checkpoint,
    track,
)

if TYPE_CHECKING:
    from torch import nn

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "DeviceError",
    "GradScaler",
    "HostMemoryError",
    "Lion",
    "MemascendError",
    "PinnedMemoryError",
    "Resumed",
    "StoreError",
    "can_resume",
    "checkpoints",
    "close",
    "delete_checkpoint",
    "empty_pinned",
    "flush",
    "format_size",
    "from_pretrained",
    "load_distributed",
    "offload",
    "overflow",
    "parameters_of",
    "parse_size",
    "pin_memory",
    "plan_of",
    "resume",
    "save_checkpoint",
    "save_distributed",
    "save_pretrained",
    "stats",
    "track",
]


def stats(model: nn.Module) -> dict[str, Any]:
    """Return what the store of an offloaded model has done so far.

    - `ssd_bytes_read`, `ssd_bytes_written`, `ssd_requests`: moved since the start. `store_bytes_used`: on SSD now.
      `file_bytes_read`: of frozen weights, from the model's own files.
    - `host_bytes_in_use`, `host_bytes_peak`, `host_bytes_reserved`: leased from the arena now, at most at one time, and
      the arena itself. `host_bytes_waste`: what leases are larger than was asked for. `host_bytes_planned`: the arena
      and all else that memascend keeps. `host_bytes_budget`: what it may.
    - `host_classes_at_peak`: per size class of units, gradient packs, staging and update pipeline (bytes of a buffer,
      buffers, bytes in use when all together were highest).
    - `pool_hits`, `pool_waits`, `pool_refusals`: leases served at once, after waiting, and requests told that nothing
      was free. `fetch_waits`: how often the computation waited for a unit. `parameters`: how many. `generation`: the
      number of the durable step's, 0 for none.
    - `seconds`: where the time since the beginning went, by what the program was blocked on: `ssd_read`, `ssd_write`,
      `h2d`, `d2h`, `cpu_update`, and `compute` for all else; their sum is the time that has passed.
    - With a device: `device_bytes_budget`, `device_bytes_planned`; `device`: `h2d_bytes`, `d2h_bytes`, `h2d_copies`,
      `d2h_copies`, and how often Python (`waits_python`) or a thread of ours (`waits_worker`) had to wait for it.
    - `engine`, `direct_io`, `host_allocator`, `notices`: how it runs here, and what the user should know about it.
    - `volumes`: for each drive `path`, `engine`, `features` (of the system, in use or refused), `direct_io`, `share` of
      the store; and for reads and writes (`..._read`, `..._written`) `bytes`, `requests`, `failures`, `latency_p50`,
      `latency_p99`, `latency_max` (seconds from submission to the end); `queue_depth_mean`, `queue_depth_max`,
      `busy_seconds` with anything in flight, and `bytes_per_busy_second`.
    """
    return offload_of(model).stats()


def plan_of(model: nn.Module) -> str:
    """Return the memory plans of an offloaded model, of host and device, as tables with a line per consumer."""
    state = offload_of(model)
    plans = [state.plan, state.device_plan]
    return "\n".join(plan.table() for plan in plans if plan is not None)


def flush(model: nn.Module) -> None:
    """Apply the model's deferred updates and wait for the store's drives; what is to be durable is, then."""
    offload_of(model).flush()


def close(model: nn.Module) -> None:
    """Free the model's host memory and files. The store's files go unless it was made with keep_store=True.

    Closing twice, or a model that is not offloaded, does nothing.
    """
    state = find_offload(model)
    if state is not None:
        state.close()
