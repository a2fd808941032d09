"""`memascend plan`."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import torch

from memascend.cli.arguments import parser
from memascend.cli.arguments.training import BOUNDARIES_TOKENS_MAX
from memascend.cli.console import quiet_libraries
from memascend.cli.data_size import count_tokens
from memascend.cli.dtypes import choose_dtype
from memascend.cli.errors import explain
from memascend.cli.hub import CONFIG_FILES, model_directory
from memascend.cli.lora import Adapters, lone_option
from memascend.cli.space import free_bytes
from memascend.common.progress import USUAL_COLUMNS
from memascend.common.sizes import AUTO, counted
from memascend.errors import BudgetError, DataError, UnmeasuredError
from memascend.forecast.deepspeed import forecast as deepspeed_plan
from memascend.forecast.forecast import Gpu, as_text, forecast
from memascend.forecast.headline import headline
from memascend.forecast.text import curve_text, zero_infinity_text
from memascend.formats.config import limits, load_bare_config
from memascend.formats.weights import empty_model_of
from memascend.hardware import drives, gpu
from memascend.hardware.matmul_rates import product_rates
from memascend.hardware.threads import torch_threads, update_threads
from memascend.layout.bits import COMPUTED_IN

if TYPE_CHECKING:
    import argparse


def plan(chosen: argparse.Namespace) -> int:
    """Show the needs of a run."""
    quiet_libraries()
    try:
        if chosen.deepspeed is not None:
            return _plan_deepspeed(chosen)
        if chosen.host_memory == AUTO and (chosen.ranks or 1) > 1:
            raise DataError("--host-memory auto works only in one process: with --ranks give a size for each")
        if chosen.update == "backward" and (chosen.grad_accum > 1 or chosen.lora_rank is not None):
            instead = "adapters are in memory: leave it out" if chosen.lora_rank else "give --grad-accum 1"
            raise DataError(f"--update backward applies gradients as they are made: {instead}")
        chosen.model = model_directory(chosen.model, CONFIG_FILES)
        device = None if chosen.gpu is None else torch.device("cuda")
        config = load_bare_config(chosen.model)
        named = COMPUTED_IN if chosen.base_bits and chosen.dtype == "auto" else chosen.dtype
        choice = choose_dtype(named, chosen.model, config, device)
        data = _data(chosen, config)
        prediction = forecast(
            chosen.model,
            seq_len=chosen.seq_len,
            batch_size=chosen.batch_size,
            grad_accum=chosen.grad_accum,
            micro_batch_size=chosen.micro_batch_size,
            tile_tokens=chosen.tile_tokens,
            boundaries=chosen.seq_len <= BOUNDARIES_TOKENS_MAX,  # as `finetune` packs documents by itself
            dtype=choice.dtype,
            dtype_reason=choice.reason,
            budget=chosen.host_memory,
            optimizer=chosen.optimizer,
            states=chosen.states,
            master=not chosen.no_master,
            gradients=chosen.gradients,
            update=chosen.update,
            durability=chosen.durability,
            kept=1 if chosen.evaluation is not None and chosen.lora_rank is None else 0,
            gpu=_gpu(chosen, choice.dtype),
            with_curve=chosen.curve,
            ssd=_ssd(chosen),
            steps=chosen.steps or (None if data is None else data["steps"]),
            tbw=chosen.tbw,
            busiest_share=drives.busiest_share(chosen.store),
            ranks=chosen.ranks or 1,
            network=_network(chosen),
            adapters_bytes=_adapters_bytes(chosen, config, choice.dtype),
            experts=chosen.experts,
            spare_memory=chosen.spare_memory,
            processor=_processor(chosen, choice.dtype),
            base_bits=chosen.base_bits,
            compare=chosen.compare,
        )
        if data is not None:
            prediction["data"] = data
    except Exception as error:
        if not chosen.json:
            raise
        code, message = explain(error)
        failure: dict[str, Any] = {"error": message}
        if isinstance(error, BudgetError):
            failure["smallest_bytes"] = error.smallest_bytes
        print(json.dumps(failure))
        return code
    print(json.dumps(prediction, indent=2) if chosen.json else _text(chosen, prediction))
    return 0


def _text(chosen: argparse.Namespace, prediction: dict[str, Any]) -> str:
    """Return the plan in a few lines, and the tables that were asked for."""
    lines = [_wrapped(line) for line in headline(prediction, free_bytes(chosen.store))]
    if chosen.details:
        return "\n".join(lines) + "\n\n" + as_text(prediction)
    tables = [curve_text(prediction["curve"])] if chosen.curve else []
    tables += [zero_infinity_text(prediction)] if "zero_infinity" in prediction else []
    return "\n\n".join(["\n".join([*lines, "--details shows the tables behind this"]), *tables])


def _wrapped(line: str) -> str:
    """Return a line within the width of the terminal, if it is written to one."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size((USUAL_COLUMNS, 24)).columns
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _data(chosen: argparse.Namespace, config: Any) -> dict[str, Any] | None:
    """Return the `tokens` of --data that are trained on, `about` where they are estimated, and their `steps`."""
    if chosen.data is None:
        return None
    folder = chosen.model if chosen.model.is_dir() else chosen.model.parent
    tokens, estimated = count_tokens(chosen.data, folder, limits(config)[0])
    if chosen.evaluation and isinstance(chosen.evaluation[0], float):
        tokens = round(tokens * (1 - chosen.evaluation[0]))
    per_step = chosen.seq_len * chosen.batch_size * chosen.grad_accum * (chosen.ranks or 1)
    steps = math.ceil(tokens * chosen.epochs / per_step)
    return {"tokens": tokens, "about": "about " if estimated else "", "epochs": chosen.epochs, "steps": steps}


def _adapters_bytes(chosen: argparse.Namespace, config: Any, dtype: str) -> int | None:
    """Return the memory of adapters with their gradients and states, or None without --lora-rank."""
    if chosen.lora_rank is None:
        if alone := lone_option(chosen):
            raise DataError(f"{alone} works only with adapters: give --lora-rank too")
        return None
    from memascend.cli import adapters  # Imports transformers' Trainer.

    folder = chosen.model if chosen.model.is_dir() else chosen.model.parent
    empty = empty_model_of(config, folder, getattr(torch, dtype))
    return adapters.memory_bytes(empty, Adapters.of(chosen))


def _processor(chosen: argparse.Namespace, dtype: str) -> dict[str, gpu.Rate] | None:
    """Return the rates of this machine's processor, measured now, where a run computes on it."""
    if chosen.gpu is not None or (chosen.ranks or 1) > 1:
        return None
    threads = torch_threads()
    rate, _ = product_rates(getattr(torch, dtype))
    update = gpu.measure_update(update_threads(beside_device=False))
    return {"flops": gpu.Rate(rate * threads, f"measured just now, {counted(threads, 'thread')}"), "update": update}


def _plan_deepspeed(chosen: argparse.Namespace) -> int:
    left_out = vars(parser().parse_args(["plan", str(chosen.model)]))
    given = [name for name, value in vars(chosen).items() if value != left_out[name]]
    others = [name for name in given if name not in ("deepspeed", "ranks", "dtype", "grad_accum", "json", "details")]
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
    """Return the GPU to plan for, with its rates, or None.

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
    """Return the rate of the drives, given or measured before, or None."""
    if chosen.ssd is not None and (chosen.ranks or 1) > 1 and chosen.network is None and not chosen.curve:
        raise DataError("--ssd is for the time of a step: over ranks give --network too")
    return gpu.rate_of_drives(chosen.ssd, chosen.store)


def _network(chosen: argparse.Namespace) -> gpu.Rate | None:
    """Return the rate of the network between the ranks, in bytes per second, or None."""
    if chosen.network is None:
        return None
    if (chosen.ranks or 1) == 1:
        raise DataError("--network is between ranks: give their number with --ranks too")
    return gpu.Rate(chosen.network / 8, f"given: {chosen.network / 1e9:g} Gbit/s")
