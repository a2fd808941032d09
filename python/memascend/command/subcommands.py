"""What each subcommand of `memascend` does with its arguments."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memascend import doctor
from memascend._memascend import format_device
from memascend.command import launched
from memascend.command.arguments import QUANTISED, parser
from memascend.command.dtypes import choose_dtype
from memascend.command.ended import ended_run, ended_text, finished_steps
from memascend.command.exits import BAD_INPUT, FAILED, SIGNALLED, explain, note, tell
from memascend.command.hub import CONFIG_FILES, model_directory
from memascend.command.metrics import records_of
from memascend.command.screen import quiet_libraries, show_plans
from memascend.command.settings import Result, Settings
from memascend.command.tables import bench_tail, bench_text, gpu_text, savings_text
from memascend.common.interrupts import Interrupts
from memascend.common.sizes import format_size
from memascend.errors import BudgetError, DataError, DeviceError, StoreError, UnmeasuredError
from memascend.forecast.deepspeed import forecast as deepspeed_plan
from memascend.forecast.forecast import Gpu, as_text, forecast
from memascend.forecast.of_store import savings_of_store
from memascend.formats.config import load_bare_config
from memascend.formats.gguf import FILE_NAME, MODELFILE_NAME
from memascend.machine import drives, gpu
from memascend.machine.threads import update_threads
from memascend.offloading.computing import Computing
from memascend.report.page import page_of, write_page
from memascend.report.run import read_run
from memascend.runs import inspect
from memascend.runs.export import Export, export
from memascend.runs.reshard import reshard

#: The learning rate of adapters, which start at zero.
ADAPTER_RATE = 2e-4


def _finetune(chosen: argparse.Namespace) -> int:
    values = {name: value for name, value in vars(chosen).items() if name not in ("command", "options")}
    if values["lr"] is None:
        values["lr"] = ADAPTER_RATE if values["lora_rank"] else Settings.lr
    if values["tbw_share"] is not None and values["tbw"] is None:
        tell("error: --tbw-share is of the endurance that --tbw gives: give that too")
        return BAD_INPUT
    if values["tbw_share"] is None:
        values["tbw_share"] = Settings.tbw_share
    values["report_to"] = values["report_to"] or ()
    values["evaluation"] = values["evaluation"] or ()
    if len(values["evaluation"]) == 1 and isinstance(values["evaluation"][0], float):
        values["evaluation"] = values["evaluation"][0]
    values["recompute"] = not values.pop("no_recompute")
    values["master"] = not values.pop("no_master")
    values["packing"] = not values.pop("no_packing")
    if values["save_every"] and not values["lora_rank"] and values["durability"] == "auto":
        values["durability"] = "step"  # Refused before the run where there is no room, not at the first checkpoint.
    settings = Settings(**values, processes=launched.processes())
    if not launched.is_first():  # The first one writes for all.
        settings = replace(settings, metrics=None, report_to=())
    problem = launched.conflict(settings) or _conflict(settings)
    if problem is not None:
        tell(f"error: {problem}")
        return BAD_INPUT
    quiet_libraries()
    show_plans()
    if (steps := finished_steps(settings)) is not None:
        if launched.is_first():
            print(f"the run has finished: {settings.out} holds the model after {steps} steps")
        return 0
    settings = replace(settings, model_dir=model_directory(settings.model_dir))
    from memascend.command.finetune import finetune  # Imports transformers' Trainer, which other commands do not need.

    with launched.together():
        result = finetune(settings)
    print(_summary(settings, result))
    if settings.keeps_out:
        print(f"talk with it: memascend chat {shlex.quote(str(settings.out))}")
    if settings.store and settings.leaves_store:
        print(f"kept the store in {', '.join(map(str, settings.store))}")
    if result.signal_number is not None:
        tell(f"interrupted: {settings.out} holds the model after step {result.steps}")
        return SIGNALLED + result.signal_number
    return 0


def _conflict(settings: Settings) -> str | None:
    """The reason why the options cannot be used together, or None."""
    if settings.change and not settings.resume:
        return "--change is of a run that goes on: give --resume too"
    if settings.replace_store and (settings.resume or settings.in_memory):
        return "--replace-store deletes the run in the store and begins anew: leave out --resume and --in-memory"
    if settings.keep_last and not settings.save_every:
        return "--keep-last is of the checkpoints of --save-every: give that too"
    if settings.eval_steps and not settings.evaluation:
        return "--eval-steps is of the evaluations of --eval: give that too"
    if not isinstance(settings.evaluation, float) and any(isinstance(one, float) for one in settings.evaluation):
        return "--eval takes one fraction or files: write a file whose name is a number as ./0.1"
    if settings.lora_rank and (settings.keep_store or settings.durability != "auto"):
        return "--keep-store and --durability are of a model that is trained itself: leave them out with --lora-rank"
    if settings.lora_rank and any(path.is_block_device() for path in settings.store):
        return "adapters are kept in files: with --lora-rank, --store takes directories"
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
            return f"{' and '.join(missing)} needed (or --in-memory, for a model that fits)"
        try:
            Computing.of(settings.offload_options)
        except ValueError as error:  # options that do not go together
            return str(error)
        except DeviceError as error:
            return f"--device {settings.device} cannot be used here: leave it out to compute on the CPU ({error})"
        return None
    if settings.store or settings.host_memory:
        return "--in-memory uses no store and no budget: leave out --store and --host-memory"
    if settings.resume:
        return "--resume goes on with the run in a store: without --store there is none"
    if settings.device_memory or settings.activations:
        return "--device-memory and --activations are of a model in a store: leave them out with --in-memory"
    return None


def _is_within(path: Path, folder: Path) -> bool:
    """Whether a directory is `folder`, or a folder in it."""
    return not path.is_block_device() and path.absolute().is_relative_to(folder.absolute())


def _summary(settings: Settings, result: Result) -> str:
    """One line on a run that has ended."""
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


def _demo(chosen: argparse.Namespace) -> int:
    from memascend.command.demo import demo  # Imports transformers' Trainer, which other commands do not need.

    quiet_libraries()
    show_plans()
    return demo(
        from_scratch=chosen.random,
        host_memory=chosen.host_memory,
        dtype=chosen.dtype,
        steps=chosen.steps,
        seq_len=chosen.seq_len,
        store=chosen.store,
        out=chosen.out,
        compare=not chosen.no_compare,
    )


def _plan(chosen: argparse.Namespace) -> int:
    quiet_libraries()
    try:
        if chosen.deepspeed is not None:
            return _plan_deepspeed(chosen)
        chosen.model = model_directory(chosen.model, CONFIG_FILES)
        device = None if chosen.gpu is None else torch.device("cuda")
        choice = choose_dtype(chosen.dtype, chosen.model, load_bare_config(chosen.model), device)
        prediction = forecast(
            chosen.model,
            seq_len=chosen.seq_len,
            batch_size=chosen.batch_size,
            grad_accum=chosen.grad_accum,
            micro_batch_size=chosen.micro_batch_size,
            tile_tokens=chosen.tile_tokens,
            dtype=choice.dtype,
            dtype_reason=choice.reason,
            budget=chosen.host_memory,
            optimizer=chosen.optimizer,
            states=chosen.states,
            master=not chosen.no_master,
            gradients=chosen.gradients,
            update=chosen.update,
            durability=chosen.durability,
            kept=1 if chosen.evaluation else 0,
            gpu=_gpu(chosen, choice.dtype),
            with_curve=chosen.curve,
            ssd=_ssd(chosen),
            steps=chosen.steps,
            tbw=chosen.tbw,
            busiest_share=drives.busiest_share(chosen.store),
            ranks=chosen.ranks or 1,
            network=_network(chosen),
        )
    except Exception as error:
        if not chosen.json:
            raise
        code, message = explain(error)
        failure: dict[str, Any] = {"error": message}
        if isinstance(error, BudgetError):
            failure["smallest_bytes"] = error.smallest_bytes
        print(json.dumps(failure))
        return code
    print(json.dumps(prediction, indent=2) if chosen.json else as_text(prediction))
    return 0


def _plan_deepspeed(chosen: argparse.Namespace) -> int:
    left_out = vars(parser().parse_args(["plan", str(chosen.model)]))
    given = [name for name, value in vars(chosen).items() if value != left_out[name]]
    others = [name for name in given if name not in ("deepspeed", "ranks", "dtype", "grad_accum", "json")]
    if others:
        raise DataError(
            f"--{others[0].replace('_', '-')} is not of a plan with --deepspeed: leave it out. memascend's options are "
            f'those of the section "memascend" in {chosen.deepspeed}'
        )
    prediction = deepspeed_plan.forecast(
        model_directory(chosen.model, CONFIG_FILES),
        chosen.deepspeed,
        ranks=chosen.ranks or 1,
        dtype=None if chosen.dtype == "auto" else chosen.dtype,
        passes=chosen.grad_accum,
    )
    print(json.dumps(prediction, indent=2) if chosen.json else deepspeed_plan.as_text(prediction))
    return 0


def _gpu(chosen: argparse.Namespace, dtype: str) -> Gpu | None:
    """The GPU to plan for, with its rates, or None.

    Raises UnmeasuredError, naming the command to run, where a rate is unknown.
    """
    if chosen.gpu is None:
        flags = [name for name in ("flops", "pcie", "dram") if getattr(chosen, name) is not None]
        if flags or chosen.fused_loss:
            raise DataError(f"--{flags[0] if flags else 'fused-loss'} is about a GPU: give --gpu too")
        return None
    given = {"flops": chosen.flops, "h2d": chosen.pcie, "d2h": chosen.pcie, "dram": chosen.dram, "ssd": chosen.ssd}
    rates = gpu.rates_for(dtype, given, chosen.store)
    rates["update"] = gpu.measure_update(update_threads(beside_device=True))
    if (network := _network(chosen)) is not None:
        rates["network"] = network
    elif (chosen.ranks or 1) > 1:
        raise UnmeasuredError(
            "not known: the rate of the network between the ranks. Give --network, as 25e9 for 25 GbE"
        )
    return Gpu(chosen.gpu, rates, activations=chosen.activations, fused_loss=chosen.fused_loss)


def _ssd(chosen: argparse.Namespace) -> gpu.Rate | None:
    """The rate of the drives for --curve, given or measured before, or None."""
    if chosen.ssd is not None and not chosen.curve and chosen.gpu is None and chosen.network is None:
        raise DataError("--ssd is for the time of a step: give --curve, --gpu or --network too")
    return gpu.rate_of_drives(chosen.ssd, chosen.store)


def _network(chosen: argparse.Namespace) -> gpu.Rate | None:
    """The rate of the network between the ranks, in bytes per second, or None."""
    if chosen.network is None:
        return None
    if (chosen.ranks or 1) == 1:
        raise DataError("--network is between ranks: give their number with --ranks too")
    return gpu.Rate(chosen.network / 8, f"given: {chosen.network / 1e9:g} Gbit/s")


def _inspect(chosen: argparse.Namespace) -> int:
    run = ended_run(chosen.store[0]) if len(chosen.store) == 1 else None
    if run is not None:
        print(json.dumps(run, indent=2) if chosen.json else ended_text(chosen.store[0], run))
        return 0
    try:
        contents = inspect.inspect(chosen.store, tbw=chosen.tbw)
    except StoreError as error:
        if "holds no store that was kept" not in str(error):
            raise
        raise StoreError(
            error.errno,
            f"{error}; a run that has finished removes its store unless --keep-store is given: `memascend inspect OUT` "
            "says what it wrote",
            error.filename,
        ) from None
    if chosen.savings:
        quiet_libraries()
        contents["savings"] = savings_of_store(contents["recipe"])
    if chosen.json:
        print(json.dumps(contents, indent=2))
        return 0
    print(inspect.as_text(contents, tensors=chosen.tensors))
    if chosen.savings:
        print(savings_text(contents["savings"]))
    return 0


def _verify(chosen: argparse.Namespace) -> int:
    read_bytes, damages = inspect.verify(chosen.store)
    for damage in damages:
        print(damage)
    if damages:
        tell(f"error: {len(damages)} places are not as they were written")
        return FAILED
    print(f"verified {format_size(read_bytes)}: everything is as it was written")
    return 0


def _checkpoints(chosen: argparse.Namespace) -> int:
    inspect.change_checkpoints(chosen.store, delete=chosen.delete, restore=chosen.restore)
    print(inspect.checkpoints_text(inspect.inspect(chosen.store)))
    return 0


def _export(chosen: argparse.Namespace) -> int:
    if chosen.tokenizer is not None and chosen.format == "distributed":
        raise DataError("--tokenizer is for a model directory: leave it out with --format distributed")
    if chosen.dtype == QUANTISED and chosen.format != "gguf":
        raise DataError(f"--dtype {QUANTISED} is for a file of llama.cpp: give --format gguf too")
    quiet_libraries()
    how = Export(
        layout=chosen.format,
        dtype=chosen.dtype,
        host_memory=chosen.host_memory,
        tokenizer=chosen.tokenizer,
        tell=note,
    )
    print(f"wrote {chosen.out}: {export(chosen.store, chosen.out, how)}")
    if chosen.format == "gguf":
        print(f"run it with `llama-cli -m {chosen.out / FILE_NAME}`, or give it to Ollama:")
        print(f"  ollama create {chosen.out.name} -f {chosen.out / MODELFILE_NAME}")
    return 0


def _asked(chosen: argparse.Namespace) -> Any:
    from memascend.command.answers.generate import Asked  # Imports transformers, which other commands do not need.

    quiet_libraries()
    return Asked(
        model=chosen.model,
        host_memory=chosen.host_memory,
        store=chosen.store,
        tokenizer=chosen.tokenizer,
        new_tokens=chosen.max_new_tokens,
        temperature=chosen.temperature,
        seed=chosen.seed,
        raw=chosen.raw,
    )


def _generate(chosen: argparse.Namespace) -> int:
    asked = _asked(chosen)
    from memascend.command.answers.generate import generate

    with Interrupts():  # SIGTERM too leaves nothing behind
        generate(asked, chosen.prompts, chosen.out, chosen.batch_size)
    return 0


def _chat(chosen: argparse.Namespace) -> int:
    asked = _asked(chosen)
    from memascend.command.answers.chat import chat

    with Interrupts():
        chat(asked, chosen.context)
    return 0


def _reshard(chosen: argparse.Namespace) -> int:
    steps = reshard(chosen.store, chosen.to if len(chosen.to) > 1 else chosen.to[0], ranks=chosen.ranks)
    processes = "1 process" if chosen.ranks == 1 else f"{chosen.ranks} processes"
    print(f"wrote {', '.join(map(str, chosen.to))}: the run after step {steps}, for {processes}")
    return 0


def _report(chosen: argparse.Namespace) -> int:
    page = page_of(read_run(records_of(chosen.run)), chosen.tbw)
    write_page(page, chosen.out)
    print(f"wrote {chosen.out}: open it in a browser")
    return 0


def _bench(chosen: argparse.Namespace) -> int:
    if not chosen.places and not chosen.gpu:
        tell("error: nothing to measure: name directories or devices, or give --gpu (see memascend bench --help)")
        return BAD_INPUT
    measurements: list[dict[str, Any]] = []
    of_gpu: list[dict[str, Any]] = []
    file = None
    if chosen.gpu:
        measured = gpu.measure_gpu(seconds=chosen.seconds, progress=lambda what: tell(f"GPU: {what} ..."))
        of_gpu.append(measured)
        if not chosen.json:
            print(gpu_text(measured), flush=True)
        file = _remembered(chosen, partial(gpu.remember, measured))
    with Interrupts():  # SIGTERM too leaves nothing behind
        for location in chosen.places:
            measured = _measure_drive(chosen, location)
            measurements.append(measured)
            if not chosen.json:
                print(bench_text(measured), flush=True)
            file = _remembered(chosen, partial(drives.remember, [measured])) or file
    if chosen.json:
        print(json.dumps([*measurements, *of_gpu], indent=2))
    else:
        print(bench_tail(measurements, file))
    return 0


def _measure_drive(chosen: argparse.Namespace, location: Path) -> dict[str, Any]:
    return drives.measure(
        location,
        size=chosen.size,
        seconds=chosen.seconds,
        engine=chosen.engine,
        progress=lambda what: tell(f"{location}: {what} ..."),
    )


def _remembered(chosen: argparse.Namespace, remember: Callable[[], Path]) -> Path | None:
    """The file in which a measurement is remembered, or None where it is not."""
    if chosen.no_remember:
        return None
    try:
        return remember()
    except (OSError, RuntimeError) as error:
        note(f"the measurement cannot be remembered: {error}")
        return None


def _format(chosen: argparse.Namespace) -> int:
    uuid, data_bytes, destroyed = format_device(chosen.device, chosen.destroy)
    for content in destroyed:
        print(f"destroyed: {content}")
    print(f"formatted {chosen.device}: UUID={uuid}, {data_bytes / 1e9:.1f} GB for data")
    print(f"use it with --store {chosen.device}, or --store UUID={uuid}, which stays right when the name changes")
    return 0


def _doctor(chosen: argparse.Namespace) -> int:
    quiet_libraries()
    with Interrupts():  # SIGTERM too leaves nothing behind
        findings = doctor.check(chosen.store, measure=not chosen.no_measure, progress=tell)
    if chosen.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        print(doctor.as_text(findings, shutil.get_terminal_size((100, 24)).columns))
    return FAILED if doctor.has_problem(findings) else 0


#: Each takes the arguments and returns the exit code.
SUBCOMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "finetune": _finetune,
    "plan": _plan,
    "inspect": _inspect,
    "verify": _verify,
    "checkpoints": _checkpoints,
    "export": _export,
    "generate": _generate,
    "chat": _chat,
    "reshard": _reshard,
    "report": _report,
    "bench": _bench,
    "format": _format,
    "doctor": _doctor,
    "demo": _demo,
}
