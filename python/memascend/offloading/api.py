"""`memascend.offload`, and finding the session of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.common.sizes import parse_size
from memascend.durable.record import source_of
from memascend.errors import MemascendError
from memascend.layout.units import CPU, partition
from memascend.offloading.computing import Computing
from memascend.offloading.hooks import Hooks
from memascend.offloading.session import Session
from memascend.plan.host import make_plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memascend.offloading.native import StorePaths


def find_offload(model: nn.Module) -> Session | None:
    """Return the session of a model, or of the model that it wraps, as PEFT's do; None for an ordinary model."""
    sessions = (module.__dict__.get("_memascend") for module in model.modules())
    return next((session for session in sessions if session is not None), None)


def offload_of(model: nn.Module) -> Session:
    """Return the session of a model, or of the model that it wraps.

    Raises MemascendError for an ordinary or a closed model.
    """
    session = find_offload(model)
    if session is None:
        raise MemascendError("the model is not offloaded: use memascend.offload or memascend.from_pretrained")
    if session.runtime.closed:
        raise MemascendError("the model was closed")
    return session


def _check_not_offloaded(model: nn.Module) -> None:
    session = find_offload(model)
    if session is not None:
        raise MemascendError(
            "the model was closed: its weights are no longer in it; make it anew, or resume its store"
            if session.runtime.closed
            else "the model is offloaded already"
        )


def _check_devices(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError for a parameter that is neither on the CPU nor on `device`."""
    for name, parameter in model.named_parameters():
        if parameter.device not in (CPU, device):
            raise ValueError(
                f"parameter {name} is on {parameter.device}, but the model is to compute on {device}: "
                f"give device='{parameter.device.type}', or move it to the CPU"
            )


def offload(
    model: nn.Module,
    *,
    store: StorePaths,
    host_memory: str | int,
    device: str | torch.device | None = None,
    device_memory: str | int | None = None,
    recompute: bool = True,
    activations: str | None = None,
    batch_tokens: int | None = None,
    durability: str = "auto",
    keep_store: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Move the parameters of a model in memory to SSD, in place, and return the model.

    Args:
        model: parameters in bfloat16, float16 or float32, on the CPU or on `device`. Tied parameters stay tied.
        store: a directory or a raw block device formatted by `memascend format` (its path or "UUID=..."), or several on
            different drives, over which the bytes are striped: evenly, or as `memascend bench` has measured them.
        host_memory: ceiling of what memascend holds in host memory, as bytes or "8GiB".
        device: where the model computes: "cuda", "cuda:1", or the CPU (None). Weights come to the device as they are
            needed, the model's buffers stay there, and inputs on the CPU are copied there.
        device_memory: ceiling of device memory, as `host_memory`: of what memascend keeps there and of all that PyTorch
            allocates there, without CUDA's own context (0.3 to 0.6 GiB). None is what is free.
        recompute: compute the activations of the repeated layers again in the backward pass.
        activations: where the inputs of these layers wait for it: "recompute", where they are; "host", in host memory
            as far as `host_memory` has room, and else on the SSD; "ssd", all of them on the SSD. None is "host" on the
            CPU and "recompute" on a device.
        batch_tokens: tokens of a batch (sequences x length), for the plan's estimate of activations: a device that is
            too small for them is refused before anything starts.
        durability: "step" makes every step of an optimizer durable: whatever stops the run, `memascend.resume` goes on
            from the last one. It takes room for a second copy of weights and states, and no traffic. "every:N" does so
            for every N-th step; "none" updates in place. "auto" is "step" where the volumes have the room.
        keep_store: leave the store's files in place on close, to be resumed. By default `close` removes them, but not
            while an exception is on its way, nor where there are checkpoints; a program that ends without `close`
            leaves its last durable step. False removes them in any of these cases.
        options: `engine` ("auto", "ring", "threads"), `direct` (bool), `rates` (bytes per second of each place, which
            decide on its share), `depth` (transfers in flight on each), `io_poll`, `sq_poll` (bool, see `memascend
            bench`), `checksums` (bool: check everything that is read), `allocator` ("auto", "cuda", "registered",
            "locked", "pageable"), `huge_pages` (bool), `compute_threads` (int).

    Raises:
        BudgetError: `host_memory` or `device_memory` is too small; the message and `smallest_bytes` say what would do.
        DeviceError: there is no such device, or it cannot be used; the message says what is missing.
        PinnedMemoryError: the system pins not even the least that works.
        StoreError: a directory cannot be used, is in use, or has not the room.
        ValueError: a dtype or device that cannot be trained.
    """
    _check_not_offloaded(model)
    budget = parse_size(host_memory)
    computing = Computing.of(device, device_memory, recompute, activations, batch_tokens)
    _check_devices(model, computing.torch_device)
    units = partition(model, computing.torch_device)
    session = Session(
        model,
        units,
        make_plan(units, budget),
        store,
        computing=computing,
        keep_store=keep_store,
        durability=durability,
        source=source_of(model),
        options=options,
    )
    try:
        session.fill(lambda place, target: target.copy_(place.parameter.data), None)
        Hooks(session).attach()
    except BaseException:
        session.discard()
        raise
    return model
