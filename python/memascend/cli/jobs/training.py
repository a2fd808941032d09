"""`memascend finetune` and `demo`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memascend.cli import distributed
from memascend.cli.console import quiet_libraries, show_plans
from memascend.cli.ended import finished_steps
from memascend.cli.errors import BAD_INPUT, SIGNALLED, note, tell
from memascend.cli.hub import model_directory
from memascend.cli.jobs.conflicts import conflict_of
from memascend.cli.lora import rank_of
from memascend.cli.recipes.conflicts import conflict_of_task, parsed
from memascend.cli.recipes.tasks import OWN, TASKS, Task
from memascend.cli.settings import Result, Settings
from memascend.common.sizes import format_size
from memascend.layout.bits import COMPUTED_IN

if TYPE_CHECKING:
    import argparse

#: The learning rate of adapters, which start at zero.
ADAPTER_RATE = 2e-4


def finetune(chosen: argparse.Namespace) -> int:
    """Fine-tune a model."""
    values = {name: value for name, value in vars(chosen).items() if name not in ("command", "options")}
    task, trainer_options, sample = (values.pop(name) for name in ("task", "trainer_options", "sample"))
    if values["tbw_share"] is not None and values["tbw"] is None:
        return _refused("--tbw-share needs the endurance: give --tbw too")
    if sample is not None and task in TASKS:
        return _refused(f"--sample works only with the tasks sft and pretrain: leave it out with --task {task}")
    if task in OWN:
        values["loss_on"] = "completion" if task == "sft" else "all"
    settings = Settings(**_with_defaults(values), processes=distributed.processes())
    if not distributed.is_first():  # The first one writes for all.
        settings = replace(settings, metrics=None, report_to=())
    conflicts = distributed.conflict, partial(conflict_of_task, task, trainer_options=trainer_options), conflict_of
    if problem := next(filter(None, (found_by(settings) for found_by in conflicts)), None):
        return _refused(problem)
    quiet_libraries()
    show_plans()
    if task not in TASKS and (steps := finished_steps(settings)) is not None:
        if distributed.is_first():
            print(f"the run has finished: {settings.out} holds the model after {steps} steps")
        return 0
    settings = replace(settings, model_dir=model_directory(settings.model_dir))
    return _recipe(TASKS[task], settings, trainer_options) if task in TASKS else _own_loop(settings, sample)


def _refused(problem: str) -> int:
    tell(f"error: {problem}")
    return BAD_INPUT


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of settings, with those that follow from others."""
    values = dict(values)
    if values["adapter"] is not None and values["lora_rank"] is None:
        values["lora_rank"] = rank_of(values["adapter"])
    if values["lr"] is None:
        values["lr"] = ADAPTER_RATE if values["lora_rank"] else Settings.lr
    if values["tbw_share"] is None:
        values["tbw_share"] = Settings.tbw_share
    values["report_to"] = values["report_to"] or ()
    values["evaluation"] = values["evaluation"] or ()
    if len(values["evaluation"]) == 1 and isinstance(values["evaluation"][0], float):
        values["evaluation"] = values["evaluation"][0]
    if values["base_bits"] and values["dtype"] == "auto":
        values["dtype"] = COMPUTED_IN
    for name in ("recompute", "master", "packing"):
        values[name] = not values.pop(f"no_{name}")
    if values["save_every"] and not values["lora_rank"] and values["durability"] == "auto":
        values["durability"] = "step"  # Refused before the run where there is no room, not at the first checkpoint.
    return values


def _own_loop(settings: Settings, sample: Any) -> int:
    """Train with the loop of the command, and name the outputs."""
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
