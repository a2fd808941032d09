"""`memascend.offload`, and finding the session of a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

from torch.nn.parameter import UninitializedParameter

from memascend.common.sizes import AUTO, parse_size
from memascend.durability.record import source_of
from memascend.errors import MemascendError
from memascend.layout.bits import PUBLISHED
from memascend.layout.division import divide
from memascend.layout.frozen_bits import quantise_units
from memascend.layout.registry import place_of
from memascend.layout.ties import check_shared_memory
from memascend.layout.units import CPU
from memascend.session import rank_checks
from memascend.session.frozen_bits import check_all_frozen, check_beside, check_bits, read_part
from memascend.session.open import open_session, opening
from memascend.session.quantised_files import quantise_beside
from memascend.session.rank_hooks import hooks_for

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memascend.layout.units import ParameterEntry, Unit
    from memascend.options import Activations, Experts, Gradients, RankLocations, SpareFor, Tuning, Update
    from memascend.ranks.group import Ranks
    from memascend.session.compute import ComputeOptions
    from memascend.session.session import Session


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
    if session.closed:
        raise session.closed_error("the model was closed")
    return session


def sessions_of(model: nn.Module) -> list[Session]:
    """Return the sessions that hold parameters of a model, of a part of one, or of a model around one; [] for none.

    Raises MemascendError where one is closed.
    """
    located = (place_of(parameter) for parameter in model.parameters())
    sessions = dict.fromkeys(entry[0] for entry in located if entry is not None)
    own = find_offload(model)
    if own is not None:
        sessions[own] = None
    closed = next((session for session in sessions if session.closed), None)
    if closed is not None:
        raise closed.closed_error("the model was closed")
    return list(sessions)


def refuse_ranks(model: nn.Module, what: str, instead: str) -> None:
    """Raise MemascendError where a model's store is divided over ranks, which `what` does not support yet."""
    for session in sessions_of(model):
        session.refuse_ranks(what, instead)


def set_host_memory(model: nn.Module, host_memory: str | int) -> None:
    """Change the host memory that memascend may hold for an offloaded model, between two passes.

    The model was opened with `host_memory_max`, or with `host_memory="auto"`. With less, states, weights and gradients
    that have no room are written to the SSD, and their memory goes back to the system: when this returns, except for
    the buffers of gradients that wait for their update in the next pass. With more, memory is used as the run comes to
    need it. No bit changes.

    Args:
        model: the offloaded model, not in a pass.
        host_memory: the new ceiling, in bytes or as "8GiB", which stays as it is; or "auto": from the next pass on it
            follows the free memory of the machine, up to `host_memory_max`.

    Raises:
        BudgetError: it is less than the least that works, more than `host_memory_max`, or more than the machine leaves.
        HostMemoryError: the system refuses the memory. The budget stays as it was.
        MemascendError: a pass is under way, or the model was opened without `host_memory_max`.
    """
    session = offload_of(model)
    if host_memory == AUTO:
        session.host_budget.follow_machine()
    else:
        session.host_budget.set(parse_size(host_memory))


def set_device_memory(model: nn.Module, device_memory: str | int) -> None:
    """Change the memory that memascend and PyTorch may hold on an offloaded model's device, between two passes.

    When this returns, the buffers of weights on the device are given back and the buffers of the new budget reserved;
    the next pass copies weights there again. PyTorch's allocator gives back its cache, and is limited to the new
    budget. Host memory, states and the store stay as they are. No bit changes. After an error the budget stays as it
    was, and the run goes on.

    Args:
        model: the offloaded model, not in a pass.
        device_memory: the new ceiling, in bytes or as "10GiB".

    Raises:
        BudgetError: it is less than the least that works, or more than the device has free beside what other programs
            and other tensors hold.
        DeviceError: another program took the memory in the midst of the change.
        MemascendError: a pass is under way, a tensor of the program refers to weights on the device, or the model
            computes on the CPU.
    """
    offload_of(model).set_device_memory(parse_size(device_memory))


def _check_not_offloaded(model: nn.Module) -> None:
    session = find_offload(model)
    if session is not None:
        raise MemascendError(
            "the model was closed: its weights are no longer in it; make it anew, or resume its store"
            if session.closed
            else "the model is offloaded already"
        )


def _check_parameters(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError for a parameter that is neither on the CPU nor on `device`, or cannot be laid out as it is."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet: run one forward pass before memascend.offload")
        if parameter.device.type == "meta":
            raise ValueError(
                f"parameter {name} has no values (it is on meta): memascend.from_pretrained reads those of a directory "
                "into the store without the model in memory"
            )
        if parameter.device not in (CPU, device):
            raise ValueError(
                f"parameter {name} is on {parameter.device}, but the model is to compute on {device}: "
                f"give device='{parameter.device.type}', or move it to the CPU"
            )
        if not parameter.is_contiguous():
            # Another layout may take another kernel, whose sums have another order.
            raise ValueError(
                f"parameter {name} has strides {parameter.stride()}, which memascend does not keep: use "
                "model.to(memory_format=torch.contiguous_format), or parameter.data = parameter.data.contiguous()"
            )
    check_shared_memory(model)


def _read_parameter(place: ParameterEntry, target: torch.Tensor, first_row: int | None = None) -> None:
    """Copy a parameter's values, or the rows from `first_row` on, into `target`."""
    values = place.parameter.data
    if first_row is not None:
        values = values.view(-1, target.shape[-1])[first_row : first_row + len(target)]
    target.copy_(values)


def offload(
    model: nn.Module,
    *,
    store: RankLocations,
    host_memory: str | int | None,
    host_memory_max: str | int | None = None,
    device: str | torch.device | None = None,
    device_memory: str | int | None = None,
    recompute: bool = True,
    activations: Activations | None = None,
    batch_tokens: int | tuple[int, int] | None = None,
    micro_batch_size: int | None = None,
    tile_tokens: int | str | None = None,
    fused_loss: bool | Literal["auto"] = "auto",
    gradients: Gradients = "auto",
    update: Update = "forward",
    experts: Experts = "whole",
    spare_memory: SpareFor = "auto",
    frozen_bits: int | None = None,
    durability: str = "auto",
    keep_store: bool | Literal["replace"] | None = None,
    process_group: Any = None,
    **options: Unpack[Tuning],
) -> nn.Module:
    """Move the parameters of a model from memory to SSD, in place, and return the model.

    Where torch.distributed has a group of several ranks, each rank's store keeps an equal share of every parameter,
    gradient and state, and the ranks train one model on different data. Every rank calls the same functions in the same
    order. N ranks with a batch each give the bits of one process that accumulates N batches, of losses divided by N.

    Args:
        model: parameters in bfloat16, float16 or float32, on the CPU or on `device`. Tied parameters stay tied.
        store: a directory or a raw block device, or several: `"/nvme/run1"`, `["/nvme0/run1", "/nvme1/run1"]`. "{rank}"
            in a path stands for the number of the process.
        host_memory: ceiling of the host memory that memascend holds, in bytes or as "8GiB"; "auto" follows the
            free memory of the machine. None is the least that works.
        host_memory_max: the most that `memascend.set_host_memory` may make of it later, or that "auto" takes.
        device: where the model computes: "cuda", "cuda:1", or the CPU (None).
        device_memory: ceiling of device memory; None is all that is free.
        recompute: recompute the activations of the repeated layers in the backward pass.
        activations: where the inputs of recomputed layers wait: "recompute" (in place), "host" or "ssd".
        batch_tokens: tokens of a batch, or (sequences, length), from which the plan estimates activations.
        micro_batch_size: sequences that a repeated layer computes at once, while its weights are in memory.
        tile_tokens: tokens that an MLP or a norm computes at once, for long sequences, or "auto"; None is all.
        fused_loss: compute the loss in pieces, without the whole head or logits; "auto" does so for large heads.
        gradients: the dtype that gradients are put aside in: "auto" (the weight's) or "bfloat16".
        update: when weights are updated: on the way into the next "forward" pass, or in the "backward" pass.
        experts: how the experts of a mixture are read: "whole", with their layer, or in "pieces", one by one, those
            alone that tokens were routed to.
        frozen_bits: of a model whose parameters are all frozen, quantise the linear weights of the repeated layers to 4
            or 8 bits, as in `memascend.from_pretrained`. Add adapters after it.
        durability: which optimizer steps `memascend.resume` can go on from: "step" (every one), "every:N", "none", or
            "auto": "step" where the volumes have the space, else "none".
        keep_store: True leaves the store's files in place on `close`, False removes them always, None after a run
            without an error. "replace" first deletes the store of an earlier run.
        process_group: the ranks that the store is divided over; None is the group of torch.distributed, if any.
        options: `engine`, `direct`, `rates`, `depth`, `io_poll`, `sq_poll`, `checksums`, `allocator`, `huge_pages` and
            `compute_threads`: how bytes move, by default as the machine and `memascend bench` say.

    `memascend.options.OffloadOptions` describes the cost, the default and the limits of each option, and
    `memascend.options.Tuning` the entries of `options`.

    Raises:
        BudgetError: `host_memory` or `device_memory` is too small; `smallest_bytes` and the message name one that fits.
        DeviceError: the device does not exist or cannot be used; the message names the missing part.
        PinnedMemoryError: the system pins less memory than the smallest plan takes.
        StoreError: a volume cannot be used, is in use, or lacks space.
        RankError: the ranks do different things, or one of them does not answer.
        TypeError: an option that there is none of.
        ValueError: a value that an option does not have, a dtype or device that cannot be trained, or trained
            parameters that share memory but are not tied.
    """
    keywords = locals()
    _check_not_offloaded(model)
    check_bits(frozen_bits, durability, keep_store)
    if str(frozen_bits) == PUBLISHED:
        raise ValueError(
            f"frozen_bits={PUBLISHED!r} reads weights from a model directory's files: use memascend.from_pretrained"
        )
    with opening(offload, keywords) as (chosen, ranks):
        if frozen_bits is not None:
            check_beside(chosen, ranks, frozen_bits)
            check_all_frozen(model, frozen_bits)
            chosen = replace(chosen, durability="none")
        units_of = partial(_divide, model, ranks=ranks, frozen_bits=frozen_bits)
        session = open_session(model, chosen, ranks, units_of, partial(source_of, model))
        try:
            if frozen_bits is not None:
                quantise_beside(session, read_part, lambda done, total: None)
            if ranks is None:
                session.fill(_read_parameter, None)
            else:
                weights = rank_checks.ComparedWeights(_read_parameter)
                session.fill(weights.read, None)
                weights.compare(ranks)
            hooks_for(session).attach()
        except BaseException:
            session.discard()
            raise
    return model


def _divide(model: nn.Module, computing: ComputeOptions, ranks: Ranks | None, frozen_bits: int | None) -> list[Unit]:
    """Divide the model into units, some of them to be quantised to `frozen_bits`, or into the shares of `ranks`."""
    _check_parameters(model, computing.torch_device)
    # Tables are whole over ranks: the rows that a rank reads depend on its data.
    pieces = computing.options.fused_loss if ranks is None else None
    units = computing.partition(model, pieces, ranks is not None)
    if frozen_bits is not None:
        quantise_units(model, units, frozen_bits)
    if ranks is not None:
        rank_checks.compare_layout(ranks, units)
        divide(units, ranks.rank, ranks.size)
    return units
