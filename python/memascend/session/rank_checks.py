"""The checks of a session over ranks: the options and weights that ranks compare, and those that they refuse."""

from __future__ import annotations

import hashlib
import os
import sys
import uuid
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from memascend.common.notices import warn_of
from memascend.common.sizes import AUTO
from memascend.errors import CheckpointError, MemascendError, first_line
from memascend.hardware.drives import keeps_manifest_before
from memascend.layout.registry import place_of
from memascend.ranks.membership import Membership
from memascend.session.watched_parameters import wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from memascend.layout.units import ParameterEntry, Unit
    from memascend.options import OffloadOptions
    from memascend.ranks.group import Ranks
    from memascend.session.compute import ComputeOptions

#: Modules that would copy a model to ranks or devices themselves, by name.
_WRAPPERS = frozenset(("DistributedDataParallel", "DataParallel"))


def settle(options: OffloadOptions, frozen: str | None = None) -> OffloadOptions:
    """Return the options of a store that is divided over ranks, with the meaning of "auto" there.

    `store` has the locations of this rank; `frozen` is as in `memascend.from_pretrained`. Raises MemascendError for an
    option that cannot be had there yet.
    """
    durability = "step" if options.durability == "auto" else options.durability
    paths = cast("Sequence[str | os.PathLike[str]]", options.store)
    for refused, option, instead in (
        (options.host_memory == AUTO, "host_memory='auto'", "a size such as '8GiB'"),
        (options.host_memory_max is not None, "host_memory_max", "host_memory alone"),
        (options.fused_loss is True, "fused_loss=True", "fused_loss=False, which is what 'auto' means over ranks"),
        (options.gradients != "auto", f"gradients={options.gradients!r}", "gradients='auto'"),
        (options.update != "forward", f"update={options.update!r}", "update='forward'"),
        (frozen == "files", "frozen='files'", "frozen='store'"),
        (
            durability != "none" and not all(map(keeps_manifest_before, paths)),
            f"durability={durability!r} on a raw block device",
            "directories on filesystems, or durability='none'",
        ),
    ):
        if refused:
            raise MemascendError(f"{option} does not work yet where a store is divided over ranks: use {instead}")
    return replace(options, durability=durability, fused_loss=False)


def begin_run(ranks: Ranks) -> Membership:
    """Begin a run of all ranks."""
    return Membership(ranks, ranks.all_gather_object("offload a model", uuid.uuid4().hex)[0])


@contextmanager
def synchronise_errors(ranks: Ranks | None) -> Iterator[None]:
    """Tell the other ranks of an error that ends the work of this one: they need not wait for it."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            ranks.abort(first_line(error))
        raise


def compare_devices(ranks: Ranks, computing: ComputeOptions) -> None:
    """Compare where the ranks compute: all on CPUs, or each on a device.

    Raises MemascendError on every rank where some compute on a device and others do not, or where two have the same
    device and either would take all that is free there.
    """
    device, limit = computing.device, computing.device_memory
    mine = "" if device is None else f"{device.identity}\n{device.torch_device}\n{'' if limit is None else limit}"
    told = [text.strip(" ").split("\n") for text in ranks.all_gather_object("compare the devices", mine)]
    names = [text[1] if len(text) > 1 else "the CPU" for text in told]
    where = "; ".join(f"rank {rank} on {name}" for rank, name in enumerate(names))
    if len({len(text) for text in told}) > 1:
        raise MemascendError(
            f"some ranks compute on a device and others do not ({where}), whose results differ: give device= on all, "
            "or on none"
        )
    by_device: dict[str, list[int]] = {}
    for rank, (identity, *_) in enumerate(told):
        if identity:  # CPUs have none.
            by_device.setdefault(identity, []).append(rank)
    for sharing in by_device.values():
        if len(sharing) > 1 and not all(told[rank][2] for rank in sharing):
            raise MemascendError(
                f"ranks {', '.join(map(str, sharing))} compute on the same device ({where}): give each a device of its "
                "own, device=f\"cuda:{os.environ['LOCAL_RANK']}\", or device_memory, which divides the device"
            )
        if len(sharing) > 1 and ranks.rank in sharing:
            warn_of(f"ranks {', '.join(map(str, sharing))} share {names[ranks.rank]}, and slow each other down")


def compare_layout(ranks: Ranks, units: Sequence[Unit]) -> None:
    """Raise MemascendError on every rank where the models of two ranks have other parameters."""
    parameters = [
        (f"{place.name} of shape {tuple(place.shape)} in {place.dtype}, {'trained' if tensor.trained else 'frozen'}")
        for unit in units
        for tensor in unit.tensors
        for place in tensor.places
    ]
    digests = ranks.all_gather("compare the models", _digest_of("\n".join(parameters).encode()))
    if (digests == digests[0]).all():
        return
    told = [
        text.splitlines() for text in ranks.all_gather_object("compare the models' parameters", "\n".join(parameters))
    ]
    longest = max(map(len, told))
    first = next(at for at in range(longest) if len({tuple(lines[at : at + 1]) for lines in told}) > 1)
    here = "; ".join(f"rank {rank}: {(lines[first:] or ['none'])[0]}" for rank, lines in enumerate(told))
    raise MemascendError(f"the ranks have other models: parameter {first} is {here}. Make the same model on each")


def compare_checkpoints(ranks: Ranks, fingerprint: bytes, where: Path) -> None:
    """Raise CheckpointError on every rank where one is to read other weights than rank 0."""
    digests = ranks.all_gather("compare the checkpoints", _digest_of(fingerprint)).view(-1).tolist()
    unlike = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if unlike is not None:
        raise CheckpointError(
            f"rank {unlike} has other weights in its {where} than rank 0: give every rank the same checkpoint"
        )


class ComparedWeights:
    """Reads the weights that a store is filled with, and compares them over all ranks."""

    def __init__(self, read: Callable[..., object]) -> None:
        """Read by `read(place, target)`."""
        self._read = read
        self._digests: dict[ParameterEntry, torch.Tensor] = {}

    def read(self, place: ParameterEntry, target: torch.Tensor) -> None:
        """Fill `target`, of the parameter's shape and dtype, and note the digest of its values."""
        self._read(place, target)
        self._digests[place] = _digest_of(target.contiguous().view(-1).view(torch.uint8).numpy())

    def compare(self, ranks: Ranks) -> None:
        """Raise MemascendError on every rank where one has other weights than rank 0."""
        unlike = _first_unlike(ranks, "compare the weights", list(self._digests.values()))
        if unlike is not None:
            rank, name = unlike[0], list(self._digests)[unlike[1]].name
            raise MemascendError(
                f"the model of rank {rank} has other weights than that of rank 0, first {name}: load the same "
                "checkpoint on every rank, or call torch.manual_seed with the same seed before the model is made"
            )


def compare_states(ranks: Ranks, groups: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]) -> None:
    """Raise MemascendError on every rank where one is about to load other states, or options, than rank 0."""
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    values = [*options, *(value for of_parameter in states for _, value in sorted(of_parameter.items()))]
    digests = [
        _digest_of(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        if isinstance(value, torch.Tensor) and value.numel() and not value.is_meta  # In a file: compared before.
        else _digest_of(repr(value).encode())
        for value in values
    ]
    unlike = _first_unlike(ranks, f"compare {len(digests)} states that are loaded", digests)
    if unlike is not None:
        raise MemascendError(
            f"rank {unlike[0]} loads other states or options of the optimizer than rank 0: load the same on every rank"
        )


def _first_unlike(ranks: Ranks, action: str, digests: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the first rank with another digest than rank 0, and the first such digest; None for none."""
    every = ranks.all_gather(action, torch.cat(list(digests)))  # (ranks, digests)
    for rank, of_rank in enumerate(every):
        if (unlike := (of_rank != every[0]).nonzero()).numel():
            return rank, int(unlike[0])
    return None


def _digest_of(values: Any) -> torch.Tensor:
    return torch.tensor([int.from_bytes(hashlib.blake2b(values, digest_size=7).digest(), "little")])


def _refuse_wrapper(wrapper: nn.Module, _: str, module: nn.Module | None) -> None:
    """Raise MemascendError where `wrapper`, which takes `module` in, would divide an offloaded model itself."""
    if type(wrapper).__name__ in _WRAPPERS and module is not None:
        _refuse_offloaded(type(wrapper).__name__, module)


def _refuse_offloaded(wrapper: str, module: nn.Module) -> None:
    if any(place_of(parameter) is not None for parameter in module.parameters()):
        raise MemascendError(wrapped_by(wrapper))


@lru_cache(maxsize=1)
def refuse_wrappers() -> None:
    """Have PyTorch's wrappers for several processes refuse offloaded models, from now on."""
    register_module_module_registration_hook(_refuse_wrapper)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    # The first FSDP has divided the parameters by the time that it takes the module in.
    begin = fsdp.FullyShardedDataParallel.__init__

    @wraps(begin)
    def begin_unless_offloaded(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _refuse_offloaded("FullyShardedDataParallel", module)
        begin(self, module, *args, **kwargs)

    fsdp.FullyShardedDataParallel.__init__ = begin_unless_offloaded
