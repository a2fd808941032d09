"""`memascend export`, `merge` and `reshard`: the contents of a store or of a directory of adapters in another form."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from memascend.cli.arguments.values import QUANTISED
from memascend.cli.console import quiet_libraries
from memascend.cli.errors import note
from memascend.common.interrupts import Interrupts
from memascend.errors import DataError
from memascend.formats.adapters import is_adapter
from memascend.formats.gguf import FILE_NAME, MODELFILE_NAME
from memascend.hardware.matmul_rates import warn_no_more
from memascend.recovery import export as exports
from memascend.recovery import reshard as divisions

if TYPE_CHECKING:
    import argparse


def export(chosen: argparse.Namespace) -> int:
    """Write a model in another format."""
    if chosen.tokenizer is not None and chosen.format == "distributed":
        raise DataError("--tokenizer is for a model directory: leave it out with --format distributed")
    if chosen.dtype == QUANTISED and chosen.format != "gguf":
        raise DataError(f"--dtype {QUANTISED} is for a file of llama.cpp: give --format gguf too")
    if chosen.dtype is not None and chosen.format == "nf4":
        raise DataError("--format nf4 has bfloat16 beside what is quantised: leave --dtype out")
    quiet_libraries()
    warn_no_more()
    how = exports.Export(
        layout=chosen.format,
        dtype=chosen.dtype,
        host_memory=chosen.host_memory,
        tokenizer=chosen.tokenizer,
        tell=note,
    )
    with Interrupts():  # SIGTERM too leaves nothing behind
        print(f"wrote {chosen.out}: {exports.export(chosen.store, chosen.out, how)}")
    if chosen.format == "gguf":
        file, modelfile = (shlex.quote(str(chosen.out / name)) for name in (FILE_NAME, MODELFILE_NAME))
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", chosen.out.resolve().name).strip("-._") or "model"  # as Ollama has it
        print(f"run it with `llama-cli -m {file}`, or give it to Ollama:")
        print(f"  ollama create {name} -f {modelfile}")
    if chosen.format == "nf4":
        words = f"memascend finetune {shlex.quote(str(chosen.out))} --dequantize --lora-rank 16"
        print(f"train adapters over it with `{words}`")
    return 0


def merge(chosen: argparse.Namespace) -> int:
    """Write the model of some adapters with these merged."""
    if not is_adapter(chosen.adapter):
        raise DataError(f"{chosen.adapter} holds no adapters (adapter_config.json): `memascend export` writes models")
    quiet_libraries()
    warn_no_more()
    how = exports.Export(
        layout="huggingface",
        dtype=chosen.dtype,
        host_memory=chosen.host_memory,
        tokenizer=chosen.tokenizer,
        tell=note,
    )
    with Interrupts():
        print(f"wrote {chosen.out}: {exports.export([chosen.adapter], chosen.out, how)}")
    return 0


def reshard(chosen: argparse.Namespace) -> int:
    """Write stores for another number of processes."""
    with Interrupts():
        steps = divisions.reshard(chosen.store, chosen.to if len(chosen.to) > 1 else chosen.to[0], ranks=chosen.ranks)
    processes = "1 process" if chosen.ranks == 1 else f"{chosen.ranks} processes"
    print(f"wrote {', '.join(map(str, chosen.to))}: the run after step {steps}, for {processes}")
    return 0
