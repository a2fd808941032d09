"""Accelerate's loop over offloaded models: `Accelerator` from here takes the place of `accelerate.Accelerator`.

Of accelerate's private names this module uses `_models`, `_optimizers` and `_schedulers` of `Accelerator`: the lists of
prepared objects. Tested with accelerate 1.15. Where a version has renamed them, `save_state` raises AttributeError.
"""

from __future__ import annotations

import inspect
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DDPCommunicationHookType, DistributedType
except ImportError as error:
    raise ImportError(
        f"memascend.integrations.accelerate needs accelerate ({error}): pip install 'memascend[accelerate]'"
    ) from error

from memascend.autograd.dispatch import refuse_foreign
from memascend.errors import CheckpointError, MemascendError
from memascend.formats.saving import save_pretrained
from memascend.formats.transformers_models import saves_adapters
from memascend.integrations import named_checkpoints as named
from memascend.integrations.launches import check_processes
from memascend.layout.units import raw_tensor_access
from memascend.optim import OffloadedOptimizer
from memascend.optim.scaler import GradScaler
from memascend.ranks.rank_errors import broadcast_from_rank0, raise_on_all_ranks
from memascend.session.api import find_offload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from memascend.ranks.group import Ranks
    from memascend.session.session import Session

_DIVIDED = "memascend.offload divides a model over processes itself: leave it out"
#: The launches that an offloaded model trains over.
_LAUNCHES = (DistributedType.NO, DistributedType.MULTI_CPU)
#: Arguments that divide a model between processes or devices.
_PLUGINS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
)
#: Variables by which `accelerate launch` asks for the same.
_VARIABLES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` for offloaded models, with the same arguments and methods.

    - `prepare` leaves weights and optimizer states where they are.
    - `clip_grad_norm_` clips within the update where all gradients are of one optimizer of memascend.
    - `save_state` keeps a checkpoint in the model's store, under a name, and writes that name to the directory, with
      the states of schedulers, random numbers, samplers and registered objects. `load_state` goes back to it. The
      prepared optimizers and schedulers stay usable; an optimizer of before `prepare` refuses to step.
    - `save_model` writes as `memascend.save_pretrained` does.
    - `free_memory(model)` closes an offloaded model.
    - In several processes that a launcher has started, a model that is offloaded after the Accelerator was made is
      divided over them, and is not wrapped: each has its own batches, and the update takes the mean of their gradients.
      With gradient accumulation, each `backward` sends gradients, in `no_sync` too. `save_state` and `load_state` take
      a directory that all processes see; where one process fails, all raise.

    These raise MemascendError when they are asked for: processes that compute on GPUs, DeepSpeed, FSDP,
    Megatron-LM, FP8, fp16 without a CUDA device.
    """

    scaler: torch.amp.GradScaler | None
    _optimizers: list[AcceleratedOptimizer]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of `accelerate.Accelerator`."""
        _check_arguments(inspect.signature(accelerate.Accelerator).bind(*args, **kwargs).arguments)
        super().__init__(*args, **kwargs)
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if self.distributed_type not in _LAUNCHES or launched > self.num_processes:
            raise MemascendError(
                f"WORLD_SIZE={launched} processes were launched, and distributed_type is {self.distributed_type}: "
                "offloaded models train over several processes on CPUs: use Accelerator(cpu=True), or one process"
            )
        if self.scaler is not None:
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = GradScaler(self.device.type, **options)
        #: Checkpoints' directories before `save_state`, with the names that they give.
        self._before: dict[Path, list[str]] = {}
        #: While a state is saved or loaded: the optimizers that are in stores.
        self._stored: list[AcceleratedOptimizer] = []
        self.register_save_state_pre_hook(self._save_offloaded)
        self.register_load_state_pre_hook(self._load_offloaded)

    # ---- preparing --------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model as accelerate does; an offloaded one stays where it is, and is not wrapped.

        Raises MemascendError for a model that was closed, or computes on another device than the accelerator's, or is
        not divided over the accelerator's processes.
        """
        session = named.open_session(model)
        if self.verify_device_map(model):
            raise MemascendError(
                "the model was loaded with a device_map: leave it out, and use memascend.from_pretrained or "
                "memascend.offload"
            )
        if session is not None:
            computes = session.torch_device
            if computes.type != self.device.type or computes.index not in (None, self.device.index or 0):
                raise MemascendError(
                    f"the model computes on {computes}, and the Accelerator's device is {self.device}: use "
                    + (
                        "Accelerator(cpu=True)"
                        if computes.type == "cpu"
                        else f"memascend.offload(device='{self.device}')"
                    )
                )
            if self.state.dynamo_plugin.use_regional_compilation:
                raise MemascendError(
                    "regional compilation replaces the layers of an offloaded model: call layer.compile() for each "
                    "layer, and leave use_regional_compilation out"
                )
            hook = getattr(self.ddp_handler, "comm_hook", None)
            if hook is not None and hook != DDPCommunicationHookType.NO:
                raise MemascendError(
                    f"DistributedDataParallelKwargs(comm_hook={hook.name}) changes gradients that "
                    "DistributedDataParallel sends, and an offloaded model sends its own, whole: leave it out"
                )
            check_processes(session, self.num_processes, "the Accelerator")
            evaluation_mode = True  # accelerate wraps other models, and does nothing else with them
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer as accelerate does; the states of memascend's stay where they are.

        Raises MemascendError for another optimizer that trains weights on SSD.
        """
        inner = _unwrapped(optimizer)
        if isinstance(inner, OffloadedOptimizer):
            device_placement = False  # accelerate would read all states, and write them again
        else:
            trained = (parameter for group in inner.param_groups for parameter in group["params"])
            refuse_foreign(inner, [parameter for parameter in trained if parameter.requires_grad])
        return super().prepare_optimizer(optimizer, device_placement)

    # ---- gradients --------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients so that their norm is at most `max_norm`; returns the norm before (0-dim).

        Where they are all the gradients of one optimizer of memascend, its `clip_grad_norm_` does so within the update.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self._optimizer_of(parameters) if norm_type == 2 else None
        if optimizer is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return optimizer.clip_grad_norm_(max_norm)

    def _optimizer_of(self, parameters: list[torch.Tensor]) -> OffloadedOptimizer | None:
        """Return the optimizer of memascend that has exactly the gradients of `parameters`."""
        with raw_tensor_access():
            given = {id(parameter) for parameter in parameters if parameter.grad is not None}
            for optimizer in map(_unwrapped, self._optimizers):
                if isinstance(optimizer, OffloadedOptimizer):
                    own = (parameter for group in optimizer.param_groups for parameter in group["params"])
                    if given == {id(parameter) for parameter in own if parameter.grad is not None}:
                        return optimizer
        return None

    # ---- checkpoints ------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Path:
        """Save the run as accelerate does; the class says how an offloaded model is saved.

        Checkpoints that `total_limit` removes go from the store too. Raises as `memascend.save_checkpoint` does.
        """
        ranks = self._ranks()
        with raise_on_all_ranks(ranks, "make the directory of a state", Exception):
            if ranks is not None and output_dir is not None:
                os.makedirs(output_dir, exist_ok=True)
        found = broadcast_from_rank0(ranks, "look for checkpoints", lambda: self._named_by(output_dir))
        self._before = {Path(directory): tags for directory, tags in found.items()}
        with self._without_stored_optimizers(), raise_on_all_ranks(ranks, "save a state", Exception):
            location = Path(super().save_state(output_dir, safe_serialization, **options))
        self._forget(self._before.get(location.absolute(), []))
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Go back to a state that `save_state` saved. Later steps of an offloaded model's run are discarded.

        Raises CheckpointError for a directory that does not fit the prepared objects, StoreError where the store has
        lost the checkpoint.
        """
        with self._without_stored_optimizers(), raise_on_all_ranks(self._ranks(), "load a state", Exception):
            super().load_state(input_dir, load_kwargs, **options)

    def _ranks(self) -> Ranks | None:
        """Return the ranks that offloaded models are divided over; None in one process."""
        every = map(named.ranks_of, self._sessions(self._models).values())
        return next((ranks for ranks in every if ranks is not None), None)

    def _sessions(self, models: list[nn.Module]) -> dict[int, Any]:
        """Return the sessions of the offloaded ones among `models`, by their index there."""
        sessions = ((index, named.open_session(model)) for index, model in enumerate(models))
        return {index: session for index, session in sessions if session is not None}

    def _is_stored(self, optimizer: AcceleratedOptimizer) -> bool:
        """Return whether checkpoints in a store have all of an optimizer."""
        sessions = self._sessions(self._models).values()
        return any(named.belongs_to(_unwrapped(optimizer), session) for session in sessions)

    @contextmanager
    def _without_stored_optimizers(self) -> Iterator[None]:
        """Have accelerate save and load those optimizers only that are not in a store."""
        prepared = self._optimizers
        self._optimizers = [optimizer for optimizer in prepared if not self._is_stored(optimizer)]
        self._stored = [optimizer for optimizer in prepared if self._is_stored(optimizer)]
        try:
            yield
        finally:
            self._optimizers, self._stored = prepared, []

    def _named_by(self, output_dir: str | None) -> dict[str, list[str]]:
        """Return the named checkpoints of the directories that `save_state` may remove or write to."""
        if self.project_configuration.automatic_checkpoint_naming:
            directories = list((Path(self.project_dir) / "checkpoints").glob("*"))
        else:
            directories = [] if output_dir is None else [Path(output_dir)]
        return {
            str(directory.absolute()): [tag for tag in named.read_names(directory).values() if tag is not None]
            for directory in directories
            if named.has_names(directory)
        }

    def _gone(self) -> list[str]:
        """Return the named checkpoints of the directories that `save_state` has removed."""
        return [tag for directory, tags in self._before.items() if not directory.exists() for tag in tags]

    def _forget(self, tags: list[str]) -> None:
        for model in self._models:
            named.forget(model, tags)

    def _save_offloaded(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Save the offloaded models, and leave the others to accelerate."""
        ranks = self._ranks()
        gone = broadcast_from_rank0(ranks, "look for checkpoints that were deleted", self._gone)
        self._forget(gone)  # before, since the store needs their room
        sessions = self._sessions(models)
        kept: dict[Any, str | None] = {}
        for index, session in sessions.items():
            if session not in kept:
                kept[session] = named.keep(session, Path(output_dir).absolute().name)
            # Buffers are each rank's own.
            torch.save(named.state_in_memory(models[index]), _file_of(output_dir, index, session))
        for index in sorted(sessions, reverse=True):
            del weights[index]
        if sessions and (ranks is None or ranks.rank == 0):
            named.write_names(Path(output_dir), {index: (each, kept[each]) for index, each in sessions.items()})

    def _load_offloaded(self, models: list[nn.Module], input_dir: str) -> None:
        """Go back to the checkpoints of the offloaded models, and leave the others to accelerate."""
        sessions = self._sessions(models)
        if not sessions and not named.has_names(Path(input_dir)):
            return
        # As a list: JSON has no numbers as keys.
        found = broadcast_from_rank0(
            self._ranks(), "read a checkpoint", lambda: list(named.read_names(Path(input_dir)).items())
        )
        names: dict[int, str | None] = dict(found)
        if names.keys() != sessions.keys():
            raise CheckpointError(
                f"{input_dir} holds the offloaded models {sorted(names)}, and {sorted(sessions)} were prepared: "
                "prepare the same models in the same order"
            )
        for session in dict.fromkeys(sessions.values()):
            self._go_back(session, next(names[index] for index, other in sessions.items() if other is session))
        for index in sorted(sessions, reverse=True):
            state = torch.load(_file_of(input_dir, index, sessions[index]), map_location="cpu", weights_only=True)
            named.load_state_in_memory(models[index], state)
            del models[index]

    def _go_back(self, session: Any, tag: str | None) -> None:
        """Go back to a named checkpoint, and have the prepared objects use its optimizers."""
        if tag is None:
            return
        optimizers = [optimizer for optimizer in self._stored if named.belongs_to(_unwrapped(optimizer), session)]
        restored = named.go_back(session, tag)
        for prepared in optimizers:
            old = _unwrapped(prepared)
            new = named.successor(old, restored)
            # accelerate's own way to bind it to an optimizer, scaler included
            prepared.__setstate__({**prepared.__getstate__(), "optimizer": new})
            for scheduler in self._schedulers:
                named.follow(scheduler.scheduler, old, new)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights as safetensors; an offloaded one is streamed, as by `memascend.save_pretrained`."""
        if named.open_session(model) is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise ValueError("safe_serialization=False: an offloaded model's weights are written as safetensors")
        if saves_adapters(model):
            raise CheckpointError(
                "save_model writes whole models, and this one's adapters are saved by themselves: use "
                "accelerator.unwrap_model(model).save_pretrained(directory)"
            )
        # Over an existing one, as accelerate does.
        whole = self.unwrap_model(model, keep_torch_compile=False)
        save_pretrained(whole, save_directory, max_shard_size=max_shard_size, overwrite=True)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release all that was prepared. Offloaded models that are given are closed, as by `memascend.close`."""
        sessions = [find_offload(each) for each in objects if isinstance(each, torch.nn.Module)]
        released: list[Any] = super().free_memory(*objects)
        for session in sessions:
            if session is not None:
                session.close()
        return released


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Raise MemascendError for settings that an offloaded model cannot be trained with."""
    for name in _PLUGINS:
        if arguments.get(name) is not None:
            raise MemascendError(f"{name}: {_DIVIDED}")
    for name in _VARIABLES:
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise MemascendError(f"ACCELERATE_USE_{name} is set by accelerate launch: {_DIVIDED}")
    precision = str(arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    if precision == "fp8":
        raise MemascendError("mixed_precision='fp8' replaces layers, whose weights are on SSD: use 'bf16'")
    if precision == "fp16" and (arguments.get("cpu") or not torch.cuda.is_available()):
        raise MemascendError("mixed_precision='fp16' is for a CUDA device: use 'bf16' or 'no'")


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that accelerate's wraps."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _file_of(directory: str, index: int, session: Session) -> Path:
    """Return the file of the parts that an offloaded model has in memory, on this rank."""
    ranks = named.ranks_of(session)
    suffix = f".{ranks.rank}" if ranks is not None and ranks.rank else ""
    return Path(directory) / f"memascend_{index}{suffix}.bin"
