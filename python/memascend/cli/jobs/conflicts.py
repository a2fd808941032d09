"""Options of `memascend finetune` that cannot be used together, with the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.cli.lora import lone_option, rank_of
from memascend.common.sizes import AUTO
from memascend.errors import DeviceError
from memascend.hardware.drives import is_device
from memascend.layout.bits import COMPUTED_IN
from memascend.session.compute import ComputeOptions

if TYPE_CHECKING:
    from pathlib import Path

    from memascend.cli.settings import Settings

#: The most by which a weight of --weights is above the least: each document of a source is indexed so many times.
WEIGHTS_APART_MAX = 1000


def conflict_of(settings: Settings) -> str | None:
    """Return the reason why the options cannot be used together, or None."""
    for found_by in (_of_the_run, _of_the_data, _of_the_base, _of_the_store, _of_the_memory):
        if problem := found_by(settings):
            return problem
    return None


def _of_the_run(settings: Settings) -> str | None:
    if settings.change and not settings.resume:
        return "--change works only with a run that goes on: give --resume too"
    if settings.replace_store and (settings.resume or settings.in_memory):
        return "--replace-store deletes the run in the store and begins anew: leave out --resume and --in-memory"
    if settings.keep_last and not settings.save_every:
        return "--keep-last needs checkpoints: give --save-every too"
    return None


def _of_the_data(settings: Settings) -> str | None:
    if settings.eval_steps and not settings.evaluation:
        return "--eval-steps needs evaluations: give --eval too"
    if not isinstance(settings.evaluation, float) and any(isinstance(one, float) for one in settings.evaluation):
        return "--eval takes one fraction or files: write a file whose name is a number as ./0.1"
    if settings.boundaries == "on" and not settings.packing:
        return "--boundaries works only with packed documents: leave it out with --no-packing"
    if not settings.weights:
        return None
    if len(settings.weights) != len(settings.data):
        return f"--weights has {len(settings.weights)} numbers for {len(settings.data)} of --data: give one for each"
    if max(settings.weights) > WEIGHTS_APART_MAX * min(settings.weights):
        return (
            f"--weights: {max(settings.weights):g} is more than {WEIGHTS_APART_MAX:,} times {min(settings.weights):g}, "
            "and documents are taken so many times: give weights nearer to each other, or leave the least source out"
        )
    if isinstance(settings.evaluation, float):
        return "--weights has documents twice, of which a fraction would hold out one: give --eval files"
    return None


def _of_the_base(settings: Settings) -> str | None:
    if problem := _conflict_of_adapters(settings):
        return problem
    if settings.lora_rank and (settings.keep_store or settings.durability != "auto"):
        return "--keep-store and --durability need a model that is trained itself: leave them out with --lora-rank"
    if settings.lora_rank and any(map(is_device, settings.store)):
        return "adapters are kept in files: with --lora-rank, --store takes directories"
    if settings.base_bits and (problem := _conflict_of_base(settings)):
        return f"--base-bits {settings.base_bits} {problem}"
    if settings.experts == "pieces" and (problem := _conflict_of_experts(settings)):
        return f"--experts pieces {problem}"
    if settings.update == "backward" and (problem := _conflict_of_updates(settings)):
        return f"--update backward applies gradients as they are made: {problem}"
    return None


def _of_the_store(settings: Settings) -> str | None:
    if settings.dequantize and settings.in_memory:
        return "--dequantize reads the weights into a store: leave it out, or --in-memory"
    if inside := next((path for path in settings.store if _is_within(path, settings.out)), None):
        return f"--store {inside} makes --out {settings.out}, which the model is written to at the end: give another"
    if settings.save_every and (settings.in_memory or settings.durability == "none"):
        return "--save-every keeps durable steps of a store: leave out --in-memory and --durability none"
    return None


def _of_the_memory(settings: Settings) -> str | None:
    if settings.in_memory:
        return _of_memory_alone(settings)
    needed = (("--store", settings.store), ("--host-memory", settings.host_memory))
    missing = [flag for flag, value in needed if not value]
    if missing:
        return f"give {' and '.join(missing)}, or --in-memory for a model that fits"
    try:
        computing = ComputeOptions.of(settings.offload_options)
        computing.experts(settings.processes > 1)
        computing.lends(settings.host_memory == AUTO, settings.processes > 1)
    except ValueError as error:  # options that do not go together
        return str(error)
    except DeviceError as error:
        return f"--device {settings.device} cannot be used here: leave it out to compute on the CPU ({error})"
    return None


def _of_memory_alone(settings: Settings) -> str | None:
    if settings.store or settings.host_memory:
        return "--in-memory uses no store and no budget: leave out --store and --host-memory"
    if settings.resume:
        return "--resume goes on with the run in a store: without --store there is none"
    if settings.device_memory or settings.activations or settings.spare_memory != "auto":
        return (
            "--device-memory, --activations and --spare-memory work only with a model in a store: leave them out with "
            "--in-memory"
        )
    return None


def _conflict_of_adapters(settings: Settings) -> str | None:
    """Return why the options of adapters cannot be used together with others, or None."""
    alone = lone_option(settings)
    if alone and settings.lora_rank is None:
        return f"{alone} works only with adapters: give --lora-rank too"
    if settings.adapter is not None and (alone or settings.lora_rank != rank_of(settings.adapter)):
        return f"--adapter has the options of its adapters: leave out {alone or '--lora-rank'}"
    return None


def _conflict_of_base(settings: Settings) -> str | None:
    """Return the reason why a quantised base cannot be used with the other options, or None."""
    for refused, instead in (
        (not settings.lora_rank, "quantises weights that are not trained: give --lora-rank too"),
        (settings.in_memory, "works only with weights on an SSD: leave it out, or leave out --in-memory"),
        (settings.dtype != COMPUTED_IN, f"computes in {COMPUTED_IN}: leave out --dtype {settings.dtype}"),
    ):
        if refused:
            return instead
    return None


def _conflict_of_experts(settings: Settings) -> str | None:
    """Return the reason why experts cannot be read one by one with the other options, or None."""
    for refused, instead in (
        (not settings.lora_rank, "is for experts that are not trained: give --lora-rank too"),
        (settings.in_memory, "reads experts from an SSD: leave it out, or leave out --in-memory"),
        (settings.base_bits, "does not work yet with --base-bits: leave one of them out"),
    ):
        if refused:
            return instead
    return None


def _conflict_of_updates(settings: Settings) -> str | None:
    """Return the option that updates in the backward pass exclude, with its remedy, or None."""
    for refused, instead in (
        (settings.max_grad_norm, "give --max-grad-norm 0, since they cannot be clipped"),
        (settings.grad_accum > 1, "give --grad-accum 1, and a larger --batch-size with --micro-batch-size"),
        (settings.on_nan == "skip", "leave out --on-nan skip, since a step cannot be left out"),
        (settings.lora_rank, "adapters are in memory: leave it out with --lora-rank"),
        (settings.in_memory, "a model in memory is updated by the step: leave it out with --in-memory"),
    ):
        if refused:
            return instead
    return None


def _is_within(path: Path, folder: Path) -> bool:
    """Return whether a directory is `folder`, or a folder in it."""
    return not is_device(path) and path.absolute().is_relative_to(folder.absolute())
