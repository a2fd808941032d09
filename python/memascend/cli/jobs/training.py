"""`memascend finetune` and `demo`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from memascend.cli import distributed
from memascend.cli.console import quiet_libraries, show_plans
from memascend.cli.ended import finished_steps
from memascend.cli.errors import BAD_INPUT, SIGNALLED, note, tell
from memascend.cli.hub import model_directory
from memascend.cli.lora import lone_option, rank_of
from memascend.cli.recipes.conflicts import conflict_of_task, parsed
from memascend.cli.recipes.tasks import OWN, TASKS, Task
from memascend.cli.settings import Result, Settings
from memascend.common.sizes import AUTO, format_size
from memascend.errors import DeviceError
from memascend.hardware.drives import is_device
from memascend.layout.bits import COMPUTED_IN
from memascend.session.compute import ComputeOptions

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

#: The learning rate of adapters, which start at zero.
ADAPTER_RATE = 2e-4
#: The most by which a weight of --weights is above the least: each document of a source is indexed so many times.
WEIGHTS_APART_MAX = 1000


def finetune(chosen: argparse.Namespace) -> int:
    """Fine-tune a model."""
    values = {name: value for name, value in vars(chosen).items() if name not in ("command", "options")}
    task, trainer_options = values.pop("task"), values.pop("trainer_options")
    if task in OWN:
        values["loss_on"] = "completion" if task == "sft" else "all"
    if values["adapter"] is not None and values["lora_rank"] is None:
        values["lora_rank"] = rank_of(values["adapter"])
    if values["lr"] is None:
        values["lr"] = ADAPTER_RATE if values["lora_rank"] else Settings.lr
    if values["tbw_share"] is not None and values["tbw"] is None:
        tell("error: --tbw-share needs the endurance: give --tbw too")
        return BAD_INPUT
    if values["tbw_share"] is None:
        values["tbw_share"] = Settings.tbw_share
    values["report_to"] = values["report_to"] or ()
    values["evaluation"] = values["evaluation"] or ()
    if len(values["evaluation"]) == 1 and isinstance(values["evaluation"][0], float):
        values["evaluation"] = values["evaluation"][0]
    if values["base_bits"] and values["dtype"] == "auto":
        values["dtype"] = COMPUTED_IN
    sample = values.pop("sample")
    if sample is not None and task in TASKS:
        tell(f"error: --sample works only with the tasks sft and pretrain: leave it out with --task {task}")
        return BAD_INPUT
    values["recompute"] = not values.pop("no_recompute")
    values["master"] = not values.pop("no_master")
    values["packing"] = not values.pop("no_packing")
    if values["save_every"] and not values["lora_rank"] and values["durability"] == "auto":
        values["durability"] = "step"  # Refused before the run where there is no room, not at the first checkpoint.
    settings = Settings(**values, processes=distributed.processes())
    if not distributed.is_first():  # The first one writes for all.
        settings = replace(settings, metrics=None, report_to=())
    problem = distributed.conflict(settings) or conflict_of_task(task, settings, trainer_options) or _conflict(settings)
    if problem is not None:
        tell(f"error: {problem}")
        return BAD_INPUT
    quiet_libraries()
    show_plans()
    if task not in TASKS and (steps := finished_steps(settings)) is not None:
        if distributed.is_first():
            print(f"the run has finished: {settings.out} holds the model after {steps} steps")
        return 0
    settings = replace(settings, model_dir=model_directory(settings.model_dir))
    if task in TASKS:
        return _recipe(TASKS[task], settings, trainer_options)
    from memascend.cli.finetune import finetune as train  # Imports transformers' Trainer.

    watch = None
    if sample is not None:
        from memascend.cli.samples import Samples

        watch = Samples(sample, settings)
    with distributed.together():
        result = train(settings, watch)
    print(_summary(settings, result))
    if settings.keeps_out:
        out = shlex.quote(str(settings.out))
        out += " --bytes" if settings.bytes else ""
        print(f"talk with it: memascend chat {out}")
        print(f"or have it answer a file: memascend generate {out} --prompts FILE")
    if settings.store and settings.leaves_store:
        print(f"kept the store in {', '.join(map(str, settings.store))}")
    if result.signal_number is not None:
        tell(f"interrupted: {settings.out} holds the model after step {result.steps}")
        return SIGNALLED + result.signal_number
    return 0


def _recipe(task: Task, settings: Settings, trainer_options: list[str]) -> int:
    """Have a trainer carry out a task, and say what was written."""
    from memascend.cli.recipes.record import is_kept  # Imports transformers' Trainer.
    from memascend.cli.recipes.run import run, steps_of_finished

    if settings.resume and not settings.change and (steps := steps_of_finished(settings.out)) is not None:
        print(f"the run has finished: {settings.out} holds the model after {steps} steps")
        return 0
    where = settings.out if settings.lora_rank else ", ".join(map(str, settings.store))
    try:
        outcome = run(task, settings, parsed(trainer_options))
    except KeyboardInterrupt as interrupt:
        goes_on = f"{where} keeps the last durable step, and the same command with --resume goes on with it"
        tell(f"interrupted: {goes_on if is_kept(settings) else 'before a step was durable'}")
        return SIGNALLED + getattr(interrupt, "signal_number", 2)
    if outcome.signal_number is not None:
        if is_kept(settings):
            note(f"{where} holds the run after step {outcome.steps}: --resume goes on with it")
        tell(f"interrupted: {settings.out} holds the model after step {outcome.steps}")
        return SIGNALLED + outcome.signal_number
    print(f"wrote {settings.out}: --task {task.name}, {outcome.steps} steps")
    if task.name not in ("reward", "classify", "embed"):
        print(f"talk with it: memascend chat {shlex.quote(str(settings.out))}")
    return 0


def _conflict(settings: Settings) -> str | None:
    """Return the reason why the options cannot be used together, or None."""
    if settings.change and not settings.resume:
        return "--change works only with a run that goes on: give --resume too"
    if settings.replace_store and (settings.resume or settings.in_memory):
        return "--replace-store deletes the run in the store and begins anew: leave out --resume and --in-memory"
    if settings.keep_last and not settings.save_every:
        return "--keep-last needs checkpoints: give --save-every too"
    if settings.eval_steps and not settings.evaluation:
        return "--eval-steps needs evaluations: give --eval too"
    if not isinstance(settings.evaluation, float) and any(isinstance(one, float) for one in settings.evaluation):
        return "--eval takes one fraction or files: write a file whose name is a number as ./0.1"
    if settings.boundaries == "on" and not settings.packing:
        return "--boundaries works only with packed documents: leave it out with --no-packing"
    if settings.weights and len(settings.weights) != len(settings.data):
        return f"--weights has {len(settings.weights)} numbers for {len(settings.data)} of --data: give one for each"
    if settings.weights and max(settings.weights) > WEIGHTS_APART_MAX * min(settings.weights):
        return (
            f"--weights: {max(settings.weights):g} is more than {WEIGHTS_APART_MAX:,} times {min(settings.weights):g}, "
            "and documents are taken so many times: give weights nearer to each other, or leave the least source out"
        )
    if settings.weights and isinstance(settings.evaluation, float):
        return "--weights has documents twice, of which a fraction would hold out one: give --eval files"
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
    if settings.dequantize and settings.in_memory:
        return "--dequantize reads the weights into a store: leave it out, or --in-memory"
    if inside := next((path for path in settings.store if _is_within(path, settings.out)), None):
        return f"--store {inside} makes --out {settings.out}, which the model is written to at the end: give another"
    if settings.save_every and (settings.in_memory or settings.durability == "none"):
        return "--save-every keeps durable steps of a store: leave out --in-memory and --durability none"
    if not settings.in_memory:
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


def _summary(settings: Settings, result: Result) -> str:
    """Return one line on a run that has ended."""
    steps = f"{result.steps} of {result.steps_planned} steps"
    if result.steps_skipped:
        steps += f", {result.steps_skipped} of them skipped"
    best = result.evaluations[1:]
    if best and result.signal_number is None:
        steps += f", the best after step {best[0]['step']} (loss {best[0]['loss']:.4f} on held-out data)"
    return (
        f"wrote {settings.out}: {steps}, loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, "
        f"{result.seconds:.1f} s, peak host memory {format_size(result.peak_above_baseline_bytes)} "
        f"above {format_size(result.baseline_rss_bytes)} of imports"
    )


def demo(chosen: argparse.Namespace) -> int:
    """Fine-tune a small model that is brought along."""
    from memascend.cli.demo import demo as show  # Imports transformers' Trainer, which other commands do not need.

    quiet_libraries()
    show_plans()
    return show(
        from_scratch=chosen.random,
        host_memory=chosen.host_memory,
        dtype=chosen.dtype,
        steps=chosen.steps,
        seq_len=chosen.seq_len,
        store=chosen.store,
        out=chosen.out,
        compare=not chosen.no_compare,
    )
