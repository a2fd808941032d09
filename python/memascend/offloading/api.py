"""`memascend.offload`, and finding the session of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parameter import UninitializedParameter

from memascend.common.sizes import AUTO, parse_size
from memascend.durable.record import source_of
from memascend.errors import MemascendError, closed_error
from memascend.layout.division import divide
from memascend.layout.ties import check_shared_memory
from memascend.layout.units import CPU, partition
from memascend.machine.threads import update_threads
from memascend.offloading import over_ranks
from memascend.offloading.computing import Computing
from memascend.offloading.locations import paths_of
from memascend.offloading.places import place_of
from memascend.offloading.rank_hooks import hooks_for
from memascend.offloading.session import Session
from memascend.plan.automatic import plan_for
from memascend.ranks.group import Ranks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memascend.layout.units import Place
    from memascend.offloading.locations import RankLocations


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
        raise closed_error(session.runtime, "the model was closed")
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
    closed = next((session for session in sessions if session.runtime.closed), None)
    if closed is not None:
        raise closed_error(closed.runtime, "the model was closed")
    return list(sessions)


def refuse_ranks(model: nn.Module, what: str, instead: str) -> None:
    """Raise MemascendError where a model's store is divided over ranks, of which `what` knows nothing yet."""
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
            follows what the machine leaves, up to `host_memory_max`.

    Raises:
        BudgetError: it is less than the least that works, more than `host_memory_max`, or more than the machine leaves.
        HostMemoryError: the system refuses the memory. The budget is what it was.
        MemascendError: a pass is under way, or the model was opened without `host_memory_max`.
    """
    session = offload_of(model)
    if host_memory == AUTO:
        session.follow_machine()
    else:
        session.set_host_memory(parse_size(host_memory))


def set_device_memory(model: nn.Module, device_memory: str | int) -> None:
    """Change the memory that memascend and PyTorch may hold on an offloaded model's device, between two passes.

    Buffers of weights on the device are given back and those of the new budget reserved, when this returns; the next
    pass copies weights there again. PyTorch's allocator gives back what it has cached, and is limited to the new
    budget. Host memory, states and the store stay as they are. No bit changes. After an error the budget is what it
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
            if session.runtime.closed
            else "the model is offloaded already"
        )


def _check_parameters(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError for a parameter that is neither on the CPU nor on `device`, or cannot be laid out as it is."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet: run one forward pass before memascend.offload")
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


def _read_parameter(place: Place, target: torch.Tensor, first_row: int | None = None) -> None:
    """Copy a parameter's values, or the rows from `first_row` on, into `target`."""
    values = place.parameter.data
    target.copy_(values if first_row is None else values[first_row : first_row + len(target)])


def offload(
    model: nn.Module,
    *,
    store: RankLocations,
    host_memory: str | int,
    host_memory_max: str | int | None = None,
    device: str | torch.device | None = None,
    device_memory: str | int | None = None,
    recompute: bool = True,
    activations: str | None = None,
    batch_tokens: int | tuple[int, int] | None = None,
    micro_batch_size: int | None = None,
    fused_loss: bool | str = "auto",
    gradients: str = "auto",
    update: str = "forward",
    durability: str = "auto",
    keep_store: bool | str | None = None,
    process_group: Any = None,
    **options: Any,
) -> nn.Module:
    """Move the parameters of a model from memory to SSD, in place, and return the model.

    Where torch.distributed has a group of several ranks, each rank's store keeps an equal share of every parameter,
    gradient and state, and the ranks train one model on different data. Every rank calls the same functions in the same
    order. N ranks with a batch each give the bits of one process that accumulates N batches, of losses divided by N.

    Args:
        model: parameters in bfloat16, float16 or float32, on the CPU or on `device`. Tied parameters stay tied.
        store: a directory, or a raw block device formatted by `memascend format` (its path or "UUID=..."). Several on
            different drives are striped: evenly, or by the rates that `memascend bench` has measured. "{rank}" in a
            path stands for the number of the process in its group, 0 in a program by itself. Over ranks a list of lists
            has an entry for each rank, as [["/nvme0"], ["/nvme1"]], and several locations beside each other, one of
            them with "{rank}", are volumes of each rank.
        host_memory: ceiling of the host memory that memascend holds, in bytes or as "8GiB". "auto" follows what the
            machine and its memory cgroups leave, from pass to pass: it leaves room for what a step takes beside it, and
            for other programs, gives back when memory gets short, and takes more when there is more. No bit changes.
        host_memory_max: the most that `memascend.set_host_memory` may make of it later, or that "auto" takes. None
            keeps a size as it is; with "auto" it is what the model can use, or the machine has.
        device: where the model computes: "cuda", "cuda:1", or the CPU (None). Weights are copied to the device as they
            are needed. The model's buffers stay on the device, and inputs on the CPU are copied there.
        device_memory: ceiling of device memory, as `host_memory`. It counts what memascend and PyTorch allocate there,
            not CUDA's own context (0.3 to 0.6 GiB). None is what is free. `memascend.set_device_memory` changes it.
        recompute: recompute the activations of the repeated layers in the backward pass.
        activations: where the inputs of recomputed layers wait. "recompute": in place. "host": in host memory as far
            as `host_memory` has room, and else on the SSD. "ssd": on the SSD. None is "host" on the CPU and
            "recompute" on a device.
        batch_tokens: tokens of a batch (sequences x length), from which the plan estimates activations. A device that
            is too small for them is refused before anything starts. With `micro_batch_size` both as a pair,
            (sequences, length): from one number the plan cannot tell what a micro-batch has.
        micro_batch_size: sequences that a repeated layer computes at once, of a batch that the model is called with as
            a whole. Each layer takes all these slices of the batch while its weights are in memory, in the forward pass
            and in the backward pass, and their gradients are added up before they are put aside: a step moves the bytes
            of one micro-batch's, and of each layer holds the activations of one. The bits are those of
            `memascend.run_in_slices` of the model in memory. The embedding, the last norm and the loss take the whole
            batch. A layer whose rows depend on each other (batch norm), and one with a key-value cache that was asked
            for, runs on the whole batch, and a notice says so. None is the whole batch everywhere.
        fused_loss: compute the loss in pieces, so that neither the head's weights nor the logits are ever whole
            (`memascend.linear_cross_entropy`, which says what differs: roundings of float32). "auto" does so for
            a head of 16 MiB and more that `get_output_embeddings` of a model of transformers names, or that is tied to
            an embedding. True takes large linear layers of other models for heads, too. False computes as PyTorch does,
            bit for bit, with the head whole in memory.
        gradients: the dtype that gradients are put aside in until the update. "auto" is that of the weight. "bfloat16"
            halves the memory and the SSD traffic of float32 weights' gradients, on the CPU, and changes bits: what is
            put aside is rounded to the nearest, ties to even. Each further backward pass adds in float32 to what was
            put aside, and rounds the sum. The update computes in float32 from the rounded values. `parameter.grad`
            shows them, and clipping and the overflow check see them: what rounds to infinity (from 3.396e38 on) is not
            finite. Gradients of bfloat16 weights are so anyway; float16 weights are refused.
        update: when weights are updated, of which the bits are the same either way. "forward": on the way into the next
            forward pass. "backward": in the backward pass, as soon as a gradient is made, which spares the SSD the
            gradients (4 of 30 bytes a parameter) and holds two of them in memory instead; those of a device are applied
            piece by piece as they arrive in host memory. It is for programs in which
            `optimizer.step()` follows each backward pass and nothing asks for gradients in between: from the second
            step on, no clipping, scaler, accumulation or other use of a gradient may begin, nor may options of the
            optimizer change between `backward()` and `step()`; what does is refused with an error that says so. A
            gradient that the program has clipped, read or added to in the first step waits for `step()` as with
            "forward", and so do small tensors and vocabularies that are read by blocks. With nonfinite="propagate".
        durability: "step" makes every optimizer step durable: `memascend.resume` goes on from the last step, whatever
            stopped the run. This takes space for a second copy of weights and states, and no additional traffic.
            "every:N" makes every N-th step durable. "none" updates in place. "auto" is "step" where the volumes have
            the space, else "none".
        keep_store: True leaves the store's files in place on `close`, for a later `resume`. None removes them, except
            after an exception and where there are checkpoints. A program that ends without `close` leaves its last
            step, or, ended by an exception, its last durable one. False removes them always.
            "replace" is None, and first deletes the store of an earlier run that is there, which is refused otherwise.
        process_group: the ranks that the store is divided over: a group of torch.distributed, or a DeviceMesh of one
            dimension. None is the group that is initialised, if any; a group of this process alone divides nothing.
            It has a backend for CPU tensors ("gloo", "cpu:gloo,cuda:nccl"), also where each rank computes on a device
            of its own. Over ranks "auto" means False for `fused_loss` and "step" for `durability`, and options that are
            not done yet are refused.
        options: `engine` ("auto", "ring", "threads"), `direct` (bool), `rates` (bytes per second of each volume, which
            decide its share), `depth` (transfers in flight on each volume), `io_poll`, `sq_poll` (bool, see `memascend
            bench`), `checksums` (bool: check everything that is read), `allocator` ("auto", "cuda", "registered",
            "locked", "pageable"), `huge_pages` (bool, default True: in pages of 2 MiB), `compute_threads` (int: threads
            that update weights; by default they follow the processors, see `MEMASCEND_THREADS` in the documentation).

    Raises:
        BudgetError: `host_memory` or `device_memory` is too small; `smallest_bytes` and the message say what would do.
        DeviceError: the device does not exist or cannot be used; the message says what is missing.
        PinnedMemoryError: the system pins less memory than the smallest plan takes.
        StoreError: a volume cannot be used, is in use, or lacks space.
        RankError: the ranks do different things, or one of them does not answer.
        ValueError: a dtype or device that cannot be trained, or trained parameters that share memory but are not tied.
    """
    _check_not_offloaded(model)
    ranks, paths = Ranks.of(process_group), paths_of(store, process_group)
    if ranks is not None:
        durability = over_ranks.check_options(
            host_memory=host_memory,
            host_memory_max=host_memory_max,
            fused_loss=fused_loss,
            gradients=gradients,
            update=update,
            durability=durability,
            store=paths,
        )
        fused_loss = False
    with over_ranks.telling(ranks):
        computing = Computing.of(
            device,
            device_memory,
            recompute,
            activations,
            batch_tokens,
            fused_loss,
            gradients,
            update,
            micro_batch_size,
        )
        if ranks is not None:
            over_ranks.compare_devices(ranks, computing)
        _check_parameters(model, computing.torch_device)
        # Tables are whole over ranks: what a rank reads of one by rows depends on its data.
        pieces = fused_loss if ranks is None else None
        units = partition(model, computing.torch_device, pieces, gradients, computing.uploads)
        if ranks is not None:
            over_ranks.compare_layout(ranks, units)
            divide(units, ranks.rank, ranks.size)
        on_device = computing.device is not None
        threads = update_threads(on_device, options.get("compute_threads"))
        plan, automatic = plan_for(units, host_memory, host_memory_max, update, on_device, threads)
        session = Session(
            model,
            units,
            plan,
            paths,
            computing=computing,
            keep_store=keep_store,
            durability=durability,
            source=source_of(model),
            options=options,
            automatic=automatic,
            membership=None if ranks is None else over_ranks.join(ranks),
        )
        try:
            if ranks is None:
                session.fill(_read_parameter, None)
            else:
                weights = over_ranks.ComparedWeights(_read_parameter)
                session.fill(weights.read, None)
                weights.compare(ranks)
            hooks_for(session).attach()
        except BaseException:
            session.discard()
            raise
    return model
