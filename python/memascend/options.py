"""The options of `memascend.offload`, `from_pretrained` and `resume`: each is declared, documented and checked here.

The public functions name them again as keywords, for editors and `help`; a test compares names, types and defaults.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, get_args

from memascend.common.sizes import AUTO, parse_size
from memascend.common.tiles import check_tile_tokens

if TYPE_CHECKING:
    import torch

#: One directory or raw block device, or several.
StorePaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
#: The locations of the stores of all ranks: by a pattern, the volumes of each, or a list with an entry for each rank.
RankLocations = StorePaths | Sequence[StorePaths]
#: Where the inputs of recomputed layers wait. "recompute": in place. "host": in host memory, and on the SSD once that
#: is full. "ssd": on the SSD.
Activations = Literal["recompute", "host", "ssd"]
#: The dtype in which gradients are stored until the update: the dtype of the weight, or bfloat16.
Gradients = Literal["auto", "bfloat16"]
#: When tensors that move alone are updated: on the way into the next forward pass, or in the backward pass as soon as
#: their gradient is made.
Update = Literal["forward", "backward"]
#: How the experts of layers are read: each layer's as a whole, or one by one.
Experts = Literal["whole", "pieces"]
#: The use of host memory beyond the least.
SpareFor = Literal["auto", "states", "activations"]
POLICIES: tuple[Activations, ...] = get_args(Activations)
GRADIENTS: tuple[Gradients, ...] = get_args(Gradients)
UPDATES: tuple[Update, ...] = get_args(Update)
EXPERTS: tuple[Experts, ...] = get_args(Experts)
SPARE_FOR: tuple[SpareFor, ...] = get_args(SpareFor)
#: The value of `keep_store` that deletes the store of an earlier run.
REPLACE: Literal["replace"] = "replace"
#: The options that change bits: a resumed run goes on with the values in its record.
RECORDED = ("recompute", "fused_loss", "gradients", "micro_batch_size", "tile_tokens")


class Tuning(TypedDict, total=False):
    """How bytes move between the drives and memory. No bit of a result depends on it.

    The others follow from the machine and from the measurements of `memascend bench`.
    """

    engine: Literal["auto", "ring", "threads"]
    """How requests reach the kernel: by io_uring ("ring"), or by threads that read and write. "auto" is "ring" where
    the system allows it."""
    direct: bool
    """Read and write past the page cache (O_DIRECT) where the filesystem can; True by default. False fills the page
    cache, beside the budget."""
    rates: Sequence[float]
    """Bytes per second of each volume, which decide its share of a new store. By default those that `memascend bench`
    has measured, or else equal shares."""
    depth: int
    """Transfers in flight on each volume at most; 128 by default."""
    io_poll: bool
    """Poll for the ends of requests, on drives with queues for it: lower latency for a busy processor. Off, unless
    `memascend bench` has found it worth it."""
    sq_poll: bool
    """Have a thread of the kernel take requests: fewer system calls for a busy processor. Off, unless `memascend bench`
    has found it worth it."""
    checksums: bool
    """Check everything that is read against its checksum; True by default."""
    allocator: Literal["auto", "cuda", "registered", "locked", "pageable"]
    """Where buffers lie. "cuda" and "registered" are pinned for a device, "locked" is in RAM for good, "pageable" is
    ordinary memory. "auto" is pinned for a device, and else locked where the system allows it."""
    huge_pages: bool
    """Ask for pages of 2 MiB for the buffers; True by default."""
    compute_threads: int
    """Threads that update weights. By default they follow the processors; see `MEMASCEND_THREADS`."""


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """Where a model goes, in which memory, and how it computes: the arguments of `offload` beside the model."""

    store: RankLocations
    """A directory, or a raw block device formatted by `memascend format` (its path or "UUID=..."). Several on different
    drives are striped: evenly, or by the rates that `memascend bench` has measured. "{rank}" in a path stands for the
    number of the process in its group, 0 in a program by itself. Over ranks a list of lists has an entry for each rank,
    as [["/nvme0"], ["/nvme1"]], and several locations beside each other, one of them with "{rank}", are volumes of each
    rank."""
    host_memory: str | int | None
    """Ceiling of the host memory that memascend holds, in bytes or as "8GiB". None is the least that works. "auto"
    follows the memory that the machine and its cgroups leave, from pass to pass: it leaves room for the rest of a step
    and for other programs, gives back when memory gets short, and takes more when there is more. No bit changes. Memory
    beyond the least holds weights and states between steps, which then do not move."""
    host_memory_max: str | int | None = None
    """The most that `memascend.set_host_memory` may make of `host_memory` later, or that "auto" takes. None keeps a
    size as it is; with "auto" it is the most that the model can use, or that the machine has. Addresses are reserved
    for it, no memory."""
    device: str | torch.device | None = None
    """Where the model computes: "cuda", "cuda:1", or the CPU (None). Weights are copied to the device as they are
    needed. The model's buffers stay on the device, and inputs on the CPU are copied there."""
    device_memory: str | int | None = field(default=None, metadata={"help": "ceiling of device memory"})
    """Ceiling of device memory, in bytes or as "10GiB". It counts the allocations of memascend and PyTorch there, not
    CUDA's own context (0.3 to 0.6 GiB). None is all that is free. `memascend.set_device_memory` changes it."""
    recompute: bool = field(default=True, metadata={"help": "recompute activations in the backward pass"})
    """Recompute the activations of the repeated layers in the backward pass: it computes their forward passes a second
    time, and memory holds the activations of one layer at a time. Where `host_memory` has room beyond weights and
    states, the activations of as many layers as fit stay there and are not computed again, with the same bits: in one
    process on the CPU, from the second pass on. False keeps all activations, beside `host_memory`."""
    activations: Activations | None = field(default=None, metadata={"help": "where inputs of layers wait"})
    """Where the inputs of recomputed layers wait. "recompute": in place. "host": in host memory as far as `host_memory`
    has room, and else on the SSD. "ssd": on the SSD. None is "host" on the CPU and "recompute" on a device."""
    batch_tokens: int | tuple[int, int] | None = None
    """Tokens of a batch (sequences x length), from which the plan estimates activations. A device that is too small for
    them is refused before anything starts. With `micro_batch_size` both as a pair, (sequences, length): from one number
    the plan cannot tell the size of a micro-batch."""
    micro_batch_size: int | None = field(
        default=None,
        metadata={"help": "sequences of a batch that a layer computes at once; default all"},
    )
    """Sequences that a repeated layer computes at once, of a batch that the model is called with as a whole. Each layer
    takes all these slices of the batch while its weights are in memory, in the forward pass and in the backward pass,
    and their gradients are added up before they are put aside: a step moves the bytes of one micro-batch's, and of each
    layer holds the activations of one. The bits are those of `memascend.run_in_slices` of the model in memory. The
    embedding, the last norm and the loss take the whole batch. A layer whose rows depend on each other (batch norm),
    and one with a key-value cache that was asked for, runs on the whole batch, and a notice says so. None is the whole
    batch everywhere."""
    tile_tokens: int | str | None = field(
        default=None, metadata={"help": "tokens that an MLP or a norm computes at once, or auto; default all"}
    )
    """Tokens that an MLP or a norm computes at once, for long sequences: its intermediate tensors are those of a tile,
    and not of the sequence, in the forward pass and in the backward pass, which computes a tile once more. "auto" is
    one in 32 of the tokens that a layer computes, rounded up to a power of two, and at least 1,024. The bits are those
    of `memascend.run_in_tiles` of the model in memory; the gradients of weights are added up over tiles in float32, and
    differ from those without tiles by roundings. A part that does not work token by token, as a trial with 256 tokens
    shows, runs on the whole sequence; a notice names layers of which nothing runs on tiles. Tokens that meet only over
    longer distances are not noticed. None is the whole sequence everywhere."""
    fused_loss: bool | Literal["auto"] = "auto"
    """Compute the loss in pieces, so that neither the head's weights nor the logits are ever whole
    (`memascend.linear_cross_entropy`, which says how results differ: roundings of float32). "auto" does so for a head
    of 16 MiB and more that `get_output_embeddings` of a model of transformers names, or that is tied to an embedding.
    True takes large linear layers of other models for heads, too. False computes as PyTorch does, bit for bit, with the
    head whole in memory. Over ranks "auto" means False."""
    gradients: Gradients = field(default="auto", metadata={"help": "dtype that gradients are put aside in"})
    """The dtype in which gradients are stored until the update. "auto" is the dtype of the weight. "bfloat16" halves
    the memory and the SSD traffic of float32 weights' gradients, on the CPU, and changes bits: the stored gradient is
    rounded to the nearest, ties to even. Each further backward pass adds to it in float32, and rounds the sum. The
    update computes in float32 from the rounded values. `parameter.grad` shows them, and clipping and the overflow check
    see them: a value that rounds to infinity (from 3.396e38 on) is not finite. Gradients of bfloat16 weights are so
    anyway; float16 weights are refused."""
    update: Update = "forward"
    """When weights are updated; the bits are the same either way. "forward": on the way into the next forward pass.
    "backward": in the backward pass, as soon as a gradient is made, which spares the SSD the gradients (4 of 30 bytes a
    parameter) and holds two of them in memory instead; gradients of a device are applied piece by piece as they arrive
    in host memory. It is for programs in which `optimizer.step()` follows each backward pass and nothing asks for
    gradients in between: from the second step on, no clipping, scaler, accumulation or other use of a gradient may
    begin, nor may options of the optimizer change between `backward()` and `step()`; each of these is refused with an
    error that says so. A gradient that the program has clipped, read or added to in the first step waits for `step()`
    as with "forward", and so do small tensors and vocabularies that are read by blocks. With nonfinite="propagate"."""
    experts: Experts = field(
        default="whole", metadata={"help": "read experts of a mixture with their layer, or in pieces: one by one"}
    )
    """How the experts of a mixture are read; the bits are the same either way. "whole": with their layer, which has to
    fit in memory. "pieces": one by one, those alone that tokens were routed to, so that the least `host_memory` is set
    by an expert and by the rest of a layer. Gradients of trained experts are made and put aside one by one too, and
    updates pass through memory in chunks, whatever `update` says. Experts that would take more memory so, because they
    are many and small, are read with their layers. It is for experts that transformers keeps fused, with
    `experts_implementation` "grouped_mm" or "eager"; on the CPU, in one process, from the store. Memory beyond the
    least keeps a part of the experts. What needs all experts of a tensor at once (reading or writing it, adapters that
    are added to it later) takes it whole, beyond the budget, and a warning says so."""
    spare_memory: SpareFor = field(
        default="auto", metadata={"help": "use of host memory beyond the least: states, activations or auto"}
    )
    """The use of `host_memory` beyond the least, where not all fits; the bits are the same with any. "states":
    gradients, weights and states, in that order, stay in memory and are not moved. "activations": layers keep their
    results first, and do not compute them again in the backward pass; the others have the rest, and more bytes are
    read and written. "auto" tries both in the first steps, and stays with the faster; it tries nothing where not
    every step is durable, since states that stay are not written there. For runs of one process on the CPU, with
    recomputation and a fixed `host_memory`; elsewhere it is for states."""
    durability: str = field(default="auto", metadata={"help": "auto, step, every:N or none"})
    """"step" makes every optimizer step durable: `memascend.resume` goes on from the last step, whatever stopped the
    run. This takes space for a second copy of weights and states, and no additional traffic. "every:N" makes every N-th
    step durable. "none" updates in place. "auto" is "step" where the volumes have the space, else "none"; over ranks it
    is "step"."""
    keep_store: bool | Literal["replace"] | None = field(
        default=None,
        metadata={
            "help": "True keeps the store when the model is closed; replace deletes an earlier run's and begins anew"
        },
    )
    """True leaves the store's files in place on `close`, for a later `resume`. None removes them, except after an
    exception and where there are checkpoints. A program that ends without `close` leaves its last step, or, ended by an
    exception, its last durable one. False removes them always. "replace" is None, and first deletes the store of an
    earlier run that is there, which is refused otherwise."""
    process_group: Any = None
    """The ranks that the store is divided over: a group of torch.distributed, or a DeviceMesh of one dimension. None is
    the group that is initialised, if any; a group of this process alone divides nothing. It has a backend for CPU
    tensors ("gloo", "cpu:gloo,cuda:nccl"), also where each rank computes on a device of its own. Options that are not
    done yet over ranks are refused."""
    tuning: Tuning = field(default_factory=Tuning)
    """How bytes move; the functions take its entries as keywords."""

    def __post_init__(self) -> None:
        """Check the values as far as they can be checked without the model and the machine.

        Raises ValueError for a value that an option does not have, or values that contradict each other.
        """
        if self.activations is not None:
            _check_among("activations", self.activations, POLICIES)
        _check_among("gradients", self.gradients, GRADIENTS)
        _check_among("update", self.update, UPDATES)
        _check_among("experts", self.experts, EXPERTS)
        _check_among("spare_memory", self.spare_memory, SPARE_FOR)
        if self.experts == "pieces" and self.tile_tokens is not None:
            raise ValueError("experts='pieces' and tile_tokens do not work together yet: leave one of them out")
        if self.activations not in (None, "recompute") and not self.recompute:
            raise ValueError(
                f"activations={self.activations!r} is for the inputs of recomputed layers: leave recompute=True"
            )
        if self.batch_tokens is not None and min(pair_of(self.batch_tokens)) < 1:
            raise ValueError(f"batch_tokens={self.batch_tokens}: a batch has at least one token")
        if self.fused_loss not in (True, False, "auto"):
            raise ValueError(f"fused_loss={self.fused_loss!r} is not one of True, False and 'auto'")
        if not (self.keep_store is None or self.keep_store == REPLACE or isinstance(self.keep_store, bool)):
            raise ValueError(f"keep_store={self.keep_store!r} is not one of True, False, None and 'replace'")
        check_micro_batch_size(self.micro_batch_size)
        check_tile_tokens(self.tile_tokens)
        parse_durability(self.durability)
        for size in (self.host_memory_max, self.device_memory, None if self.host_memory == AUTO else self.host_memory):
            if size is not None:
                parse_size(size)

    @classmethod
    def of(cls, function: Callable[..., Any], keywords: Mapping[str, Any]) -> Self:
        """Return the options among the local variables `keywords` of a public function, `options` among them.

        Raises TypeError for one in `options` that `function` does not have.
        """
        tuning = tuning_of(function.__name__, keywords["options"], keywords)
        return cls(**{name: keywords[name] for name in OPTION_NAMES if name in keywords}, tuning=tuning)

    @property
    def replaces_store(self) -> bool:
        """Whether the store of an earlier run is deleted first."""
        return self.keep_store == REPLACE

    @property
    def keeps_store(self) -> bool | None:
        """Whether the store stays when it is closed; None where that depends on how the run ends."""
        return None if self.keep_store == REPLACE else self.keep_store

    @property
    def recorded(self) -> dict[str, Any]:
        """The options of `RECORDED`, as the record of a run has them."""
        return {name: getattr(self, name) for name in RECORDED}


#: The names of the options, without `tuning`.
OPTION_NAMES = tuple(option.name for option in fields(OffloadOptions) if option.name != "tuning")
TUNING_NAMES = tuple(Tuning.__annotations__)


def tuning_of(name: str, given: Mapping[str, Any], others: Iterable[str] = ()) -> Tuning:
    """Return the keywords `given` to the function or class `name` as `Tuning`; `others` are those it has beside them.

    Raises TypeError for another, with the one that was probably meant.
    """
    unknown = next((option for option in given if option not in TUNING_NAMES), None)
    if unknown is not None:
        remedy = meant(unknown, {*TUNING_NAMES, *others}) or f"; those of a store are {', '.join(TUNING_NAMES)}"
        if unknown in RECORDED:
            remedy = ": a run goes on with its own, which its results depend on"
        raise TypeError(f"{name} has no option {unknown!r}{remedy}")
    return Tuning(**given)  # type: ignore[typeddict-item]


def parse_durability(durability: str) -> int | None:
    """Return after how many optimizer steps one is durable: 0 for never, None for "auto".

    Raises ValueError for anything but "auto", "step", "every:N" and "none".
    """
    if durability in ("auto", "none", "step"):
        return {"auto": None, "none": 0, "step": 1}[durability]
    name, _, number = str(durability).partition(":")
    if name == "every" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise ValueError(f"durability {durability!r} is not one of 'auto', 'step', 'every:N' and 'none'")


def check_micro_batch_size(rows: int | None) -> None:
    """Raise ValueError for a size that no micro-batch has."""
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"micro_batch_size={rows!r} is not a whole number of at least 1 sequence")


def pair_of(batch_tokens: int | tuple[int, int]) -> tuple[int, int]:
    """Return sequences and their length; one number is taken for one sequence."""
    return (1, batch_tokens) if isinstance(batch_tokens, int) else batch_tokens


def meant(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean ...?" with the one of the `known` names that is nearest, or "" where none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return f": did you mean {near[0]!r}?" if near else ""


def _check_among(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")
