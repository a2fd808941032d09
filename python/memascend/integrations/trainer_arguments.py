"""The arguments of a Trainer for an offloaded model: where it goes, its optimizer, and refusals."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import transformers
from torch import nn

import memascend
from memascend import optim, optimizers
from memascend.common.tiles import parse_tile_tokens
from memascend.errors import MemascendError
from memascend.formats.hub import download
from memascend.formats.saving import parse_dtype
from memascend.integrations.launches import check_processes
from memascend.layout.experts import fused_experts
from memascend.layout.registry import ranks_of
from memascend.optim import OffloadedOptimizer, apollo_groups
from memascend.options import OPTION_NAMES, REPLACE, OffloadOptions
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend.session.session import Session

_log = logging.getLogger("memascend")

#: Values in `model_init_kwargs` that ask for nothing, by name. TRL's own scripts always give the first two.
_PLAIN_INIT: dict[str, tuple[Any, ...]] = {
    "revision": (None, "main"),
    "trust_remote_code": (None, False),
    "device_map": (None,),
    "quantization_config": (None,),
    "use_cache": (None, False),
}
#: The values of `TrainingArguments.optim` that there is an optimizer for.
OPTIMIZERS: dict[str, tuple[type[OffloadedOptimizer], dict[str, Any]]] = {
    name: (getattr(optim, one.class_name), options)
    for one in optimizers.OPTIMIZERS.values()
    for name, options in one.trainer.items()
}


def _option(name: str, **metadata: Any) -> Any:
    """Return a field for the option of that name, with its default and help, and `metadata` for its argument."""
    option = OffloadOptions.__dataclass_fields__[name]
    return field(default=option.default, metadata={"help": option.metadata["help"], **metadata})


@dataclass
class OffloadArguments:
    """Where the model goes, for a class that derives from `TrainingArguments`; see `memascend.offload`."""

    store: list[str] | None = field(
        default=None,
        metadata={
            "help": "directories or block devices for the model, {rank} for the process; default OUTPUT_DIR/store"
        },
    )
    host_memory: str | None = field(default=None, metadata={"help": "ceiling of host memory, such as 4GiB, or auto"})
    device_memory: str | None = _option("device_memory")
    weights_dtype: str = field(default="bfloat16", metadata={"help": "dtype of the weights of a model given by name"})
    dequantize: bool = field(default=False, metadata={"help": "read quantised weights of a model given by name"})
    frozen: str | None = field(
        default=None, metadata={"help": "freeze a model given by name, under adapters: in the store, or its own files"}
    )
    frozen_bits: int | None = field(
        default=None, metadata={"help": "with frozen='store', quantise the linear weights to 4 or 8 bits"}
    )
    experts: str = _option("experts")
    durability: str = _option("durability")
    recompute: bool = _option("recompute")
    activations: str | None = _option("activations")
    micro_batch_size: int | None = _option("micro_batch_size")
    accumulate_in_layers: bool = field(
        default=False,
        metadata={"help": "take the micro-batches of gradient_accumulation_steps as one batch, layer by layer"},
    )
    tile_tokens: str | None = _option("tile_tokens")
    fused_loss: bool = field(default=True, metadata={"help": "compute the loss in pieces where there is a large head"})
    gradients: str = _option("gradients")
    keep_store: Literal[True, False, "replace"] | None = _option("keep_store", nargs="?", const=True)

    def __post_init__(self) -> None:
        """Make one batch of the micro-batches that would be accumulated, where that is asked for.

        Raises ValueError where `micro_batch_size` is given too.
        """
        arguments: Any = self
        steps = getattr(arguments, "gradient_accumulation_steps", 1)
        if self.accumulate_in_layers and steps > 1:
            if self.micro_batch_size is not None:
                raise ValueError(
                    "accumulate_in_layers=True makes per_device_train_batch_size the micro-batch: leave "
                    "micro_batch_size out"
                )
            self.micro_batch_size = arguments.per_device_train_batch_size
            arguments.per_device_train_batch_size *= steps
            arguments.gradient_accumulation_steps = 1
        inherited = getattr(super(), "__post_init__", None)
        if inherited is not None:
            inherited()


@dataclass
class MemascendArguments(OffloadArguments, transformers.TrainingArguments):
    """`transformers.TrainingArguments`, and where the model goes."""


def open_model(model: Any, args: Any, opened_as: dict[str, Any]) -> tuple[nn.Module, list[Any]]:
    """Return the offloaded model that the arguments describe, and its optimizers: of the run in the store, or `model`.

    `opened_as` are options of `memascend.from_pretrained` for a model of another task than its directory's.

    `model` is the directory or the hub's name of a model, or a model in memory, whose parameters leave it.
    """
    if args.host_memory is None:
        raise ValueError(
            "host_memory is not given: MemascendArguments(host_memory='4GiB') is a ceiling of 4 GiB, and 'auto' "
            "follows the free memory of the machine"
        )
    paths: Any = args.store or [str(Path(args.output_dir) / "store")]
    paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    device = args.device  # initialises the group of several processes
    if args.store is None:
        paths = [f"{paths[0]}{args.process_index}"] if args.world_size > 1 else paths
        Path(paths[0]).mkdir(parents=True, exist_ok=True)
    options = {name: getattr(args, name) for name in OffloadArguments.__dataclass_fields__ if name in OPTION_NAMES}
    options |= {"store": paths, "device": None if device.type == "cpu" else device}
    options["tile_tokens"] = parse_tile_tokens(args.tile_tokens)
    # A run goes on with its own.
    begun = {"fused_loss": "auto" if options.pop("fused_loss") else False, "gradients": options.pop("gradients")}
    in_memory = model if isinstance(model, nn.Module) else None
    if args.keep_store != REPLACE and memascend.can_resume(paths):
        resumed = memascend.resume(model=in_memory, **options)
        try:
            _check_weights_of_run(args, model, resumed.model)
        except ValueError:
            offload_of(resumed.model).close(failed=True)
            raise
        return resumed.model, resumed.optimizers
    options |= begun
    if in_memory is not None:
        if args.frozen is not None:
            raise ValueError(
                f"frozen={args.frozen!r} works only with a model that is given by its name: freeze this one "
                "(model.requires_grad_(False)), and leave frozen out"
            )
        return memascend.offload(in_memory, **options, frozen_bits=args.frozen_bits), []
    directory = model if os.path.isdir(model) else download(str(model))
    options |= {"dequantize": args.dequantize, "frozen": args.frozen, "frozen_bits": args.frozen_bits}
    if args.frozen is not None and args.durability == "auto":
        options["durability"] = "none"  # transformers saves the adapters.
    if opened_as:
        transformers.set_seed(args.seed)  # A new head has the bits that TRL's own has.
    return memascend.from_pretrained(directory, **options, **opened_as, **_init_options(args)), []


def _init_options(args: Any) -> dict[str, Any]:
    """Return how a model that is given by name is opened. Raises ValueError for TRL's other options."""
    given = dict(getattr(args, "model_init_kwargs", None) or {})
    dtype = given.pop("dtype", None) or args.weights_dtype
    attention = given.pop("attn_implementation", None)
    refused = [f"{name}={value!r}" for name, value in given.items() if value not in _PLAIN_INIT.get(name, ())]
    if refused:
        raise ValueError(
            f"model_init_kwargs has {', '.join(refused)}, and only dtype and attn_implementation are taken for a model "
            "that is opened on SSD: open it with memascend.from_pretrained, change it, and give the model"
        )
    return {"dtype": dtype} | ({} if attention is None else {"attn_implementation": attention})


# ---- the optimizer ----------------------------------------------------------------------------------------------


def apollo_groups_with_decay(
    model: nn.Module, weight_decay: float, rank: int, targets: str | list[str] | None = None
) -> list[dict[str, Any]]:
    """Return the groups of `memascend.apollo_groups`, with weights' decay for all parameters but vectors.

    Only the matrices that `targets` names are projected: a regular expression that a module's whole name matches, or
    parts of names, as in `TrainingArguments.optim_target_modules`. None and "all-linear" stand for all. Experts in one
    tensor are of the module that has them; over ranks they take AdamW.
    """
    groups = apollo_groups(model, rank, experts=ranks_of(model.parameters()) is None)
    experts = {id(module) for module, _, _ in fused_experts(model)}
    chosen = {
        id(parameter)
        for name, module in model.named_modules()
        if _is_target(name, module, targets, id(module) in experts)
        for parameter in (module.parameters(recurse=False) if id(module) in experts else [module.weight])
    }
    matrices = [p for group in groups if "rank" in group for p in group["params"] if id(p) in chosen]
    if not matrices:
        raise ValueError(f"optim_target_modules={targets!r} names no matrix of the model: None stands for all")
    taken = {id(parameter) for parameter in matrices}
    rest = [p for group in groups for p in group["params"] if id(p) not in taken]
    parts = [
        {"params": matrices, "rank": rank, "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [part for part in parts if part["params"]]


def _is_target(name: str, module: nn.Module, targets: str | list[str] | None, has_experts: bool) -> bool:
    if not (has_experts or isinstance(getattr(module, "weight", None), nn.Parameter)):
        return False
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(target == "all-linear" or target in name or re.fullmatch(target, name) for target in targets)


def optimizer_of(args: Any) -> tuple[type[OffloadedOptimizer], dict[str, Any]]:
    """Return the optimizer's class and options that `args.optim` and `args.optim_args` name.

    Raises ValueError for an optimizer that there is none for.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIMIZERS:
        raise ValueError(f"optim={name!r} cannot be streamed: choose one of {', '.join(OPTIMIZERS)}")
    optimizer_class, options = OPTIMIZERS[name]
    named = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    own = inspect.signature(optimizer_class).parameters
    options = options | {option: value for option, value in named.items() if option in own}
    return optimizer_class, options | _optim_args(args.optim_args)


def check_optimizer_of_run(args: Any, optimizer: OffloadedOptimizer) -> None:
    """Raise ValueError where the arguments name another optimizer, or other states, than a run that is gone on with.

    Learning rate, betas and the like are the run's, as in a checkpoint of PyTorch's optimizers.
    """
    named, _ = optimizer_of(args)
    name = str(getattr(args.optim, "value", args.optim))
    own: dict[str, Any] = {"states": "float32", "master": True} | OPTIMIZERS[name][1] | _optim_args(args.optim_args)
    own["states"] = str(own["states"]).removeprefix("torch.")
    differing = [
        f"{option}={wanted} (the run: {group[option]})"
        for group in optimizer.param_groups[:1]
        for option, wanted in own.items()
        if group.get(option, wanted) != wanted
    ]
    if type(optimizer) is not named:
        differing.insert(0, f"optim={name!r} (the run: {type(optimizer).__name__})")
    if differing:
        raise ValueError(
            f"the run in the store was begun with another optimizer than the arguments name: {', '.join(differing)}. "
            "Give the run's, or keep_store='replace', which deletes the run and begins anew"
        )


def _check_weights_of_run(args: Any, model: Any, resumed: nn.Module) -> None:
    """Raise ValueError where a model is given by name in another dtype than its run has; name the run's options."""
    session = offload_of(resumed)
    dtypes = {place.dtype for place in session.places}
    wanted = parse_dtype(_init_options(args)["dtype"])
    if not isinstance(model, nn.Module) and wanted not in dtypes:
        stored = str(next(iter(dtypes))).removeprefix("torch.")
        raise ValueError(
            f"the run in the store has weights in {stored}, the arguments say {str(wanted).removeprefix('torch.')}: "
            f"give weights_dtype={stored!r}, or keep_store='replace', which deletes the run and begins anew"
        )
    fused_loss: bool | str = "auto" if args.fused_loss else False
    for name, given, recorded in (
        ("gradients", args.gradients, session.options.gradients),
        ("fused_loss", fused_loss, session.options.fused_loss),
    ):
        if given != recorded and not (session.membership.divides and name == "fused_loss"):  # which ranks go without
            _log.warning("the run in the store goes on with its own %s=%r, not with %r", name, recorded, given)


def _optim_args(given: str | None) -> dict[str, Any]:
    """Parse "name=value,..." of `optim_args`. Raises ValueError for a text that cannot be parsed."""
    options: dict[str, Any] = {}
    for part in (given or "").replace(" ", "").split(",") if given else ():
        name, separator, value = part.partition("=")
        if not separator:
            raise ValueError(f"optim_args {part!r} is not name=value")
        try:
            options[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            options[name] = value
    return options


# ---- refusals ---------------------------------------------------------------------------------------------------


def check(args: Any, session: Session, optimizers: Any) -> None:
    """Raise ValueError where an offloaded model cannot be trained by these arguments."""
    refusals = list(_refusals(args, session))
    optimizer, _ = optimizers or (None, None)
    if optimizer is None:
        optimizer_of(args)  # Raises, naming those that there are.
    elif not isinstance(optimizer, OffloadedOptimizer):
        offloaded = {id(place.parameter) for place in session.places}
        if any(id(parameter) in offloaded for group in optimizer.param_groups for parameter in group["params"]):
            refusals.append(
                f"{type(optimizer).__name__} of PyTorch keeps states in memory and reads whole weights: leave "
                "optimizers= out and give optim=, or use memascend.AdamW, Lion or SGD"
            )
    if refusals:
        raise ValueError("; ".join(refusals))
    if session.options.recompute and (args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)):
        _log.info("activations are recomputed by memascend: gradient_checkpointing is not applied on top")
        args.gradient_checkpointing = args.activation_checkpointing = False


def _refusals(args: Any, session: Session) -> Iterator[str]:
    """Yield the arguments that an offloaded model cannot have, each with its remedy."""
    yield from _refusals_of_place(args, session)
    if args.deepspeed or args.fsdp:
        yield "deepspeed and fsdp divide parameters themselves: leave them out"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size begins anew with weights that were trained: give per_device_train_batch_size"
    if args.bf16_full_eval or args.fp16_full_eval:
        yield "bf16_full_eval and fp16_full_eval convert the whole model: offload it in that dtype instead"
    if args.world_size > 1:
        yield from _refusals_over_processes(args)
    yield from _refusals_of_checkpoints(args, session)


def _refusals_of_place(args: Any, session: Session) -> Iterator[str]:
    """Yield the processes and devices of the arguments that do not fit the model."""
    if args.n_gpu > 1 or (args.world_size > 1 and args.device.type != "cpu"):
        yield (
            "one process trains on one GPU, and several on CPUs: start one process, and show it one GPU "
            "(CUDA_VISIBLE_DEVICES=0), or give use_cpu=True"
        )
    try:
        check_processes(session, args.world_size, "the arguments (TrainingArguments)")
    except MemascendError as error:
        yield str(error)
    if args.device.type != session.torch_device.type:
        where, here = session.torch_device, args.device
        remedy = "use_cpu=True" if where.type == "cpu" else f"a machine or torch with {where}"
        yield f"the model computes on {where}, the Trainer on {here}: give {remedy}, or offload with device='{here}'"
    if args.fp16 and session.torch_device.type == "cpu":
        yield "fp16 is for CUDA devices: give bf16=True"


def _refusals_of_checkpoints(args: Any, session: Session) -> Iterator[str]:
    """Yield the arguments of saving and uploading that a run in a store cannot have."""
    saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
    # Of a frozen model adapters are to be trained, which transformers saves.
    stored = any(place.parameter.requires_grad for place in session.places) and not session.trained_outside()
    if saves and not args.save_only_model and session.commit_log.period == 0 and stored:
        yield (
            "checkpoints need durable steps, and the model is updated in place: offload it with durability='step', or "
            "give save_strategy='no' or save_only_model=True"
        )
    if args.push_to_hub and not args.save_only_model:
        strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
        if strategy != "end":
            yield f"hub_strategy={strategy!r} pushes checkpoints, which are in the store: give hub_strategy='end'"


def _refusals_over_processes(args: Any) -> Iterator[str]:
    """Yield the arguments that several processes cannot have, each with its remedy."""
    if args.push_to_hub:
        yield "push_to_hub does not work yet over several processes: save the model, and upload the directory"
    if args.save_on_each_node:
        yield "over several processes the first one writes for all: leave save_on_each_node out"
    if args.load_best_model_at_end and args.save_only_model:
        yield (
            "save_only_model leaves no checkpoint in the store, from which several processes could load the best one: "
            "leave it out, or give load_best_model_at_end=False"
        )
