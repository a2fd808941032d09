"""The options of `plan`."""

from __future__ import annotations

import argparse
from typing import Any

from memascend.cli.arguments.parsing import subcommand
from memascend.cli.arguments.shared import (
    DTYPE,
    DTYPES,
    MICRO_BATCH,
    SPARE_TEXT,
    TILE,
    add_adapters,
    add_durability,
    add_optimizer,
)
from memascend.cli.arguments.values import (
    held_out,
    path,
    positive,
    positive_rate,
    ranks,
    rate,
    size,
    size_or_auto,
    tile,
    tokens,
)
from memascend.layout.bits import BITS
from memascend.options import EXPERTS, POLICIES, SPARE_FOR, UPDATES, OffloadOptions


def add_plan(subcommands: Any) -> None:
    """Add the subcommand `plan`."""
    parser = subcommand(
        subcommands,
        "plan",
        help="show the host memory, SSD space and traffic of a run",
        description="Show in a few lines whether fine-tuning MODEL fits, how long a step takes on this machine, and\n"
        "what a run writes; --details shows all of it. Only config.json is read (and --data with the tokenizer),\n"
        "and nothing is written. Without --host-memory the plan is for the smallest budget that works.",
    )
    add = parser.add_argument
    text = "a Hugging Face model directory, the path of a config.json, or the id of a model on the hub (org/name)"
    add("model", type=path, metavar="MODEL", help=text)
    text = "the most host memory to use, such as 8GiB or 500MB; auto: that with which a run would begin here now"
    add("--host-memory", type=size_or_auto, metavar="SIZE", help=text)
    add("--seq-len", type=tokens, default=512, metavar="N", help="tokens per sequence (default: %(default)s)")
    text = "sequences per forward pass (default: %(default)s)"
    add("--batch-size", type=positive, default=1, metavar="N", help=text)
    add("--micro-batch-size", type=positive, metavar="N", help=MICRO_BATCH)
    add("--tile-tokens", type=tile, metavar="N", help=TILE)
    add("--grad-accum", type=positive, default=1, metavar="N", help="forward passes per step (default: %(default)s)")
    text = f"{DTYPE} (default: %(default)s)"
    add("--dtype", choices=DTYPES, default="auto", help=text)
    add_optimizer(parser)
    text = (
        "when weights are updated: on the way into the next forward pass, or in the backward pass, where nothing but "
        "the step uses gradients; see memascend.offload (default: %(default)s)"
    )
    add("--update", choices=UPDATES, default=OffloadOptions.update, help=text)
    text = f"{SPARE_TEXT}; auto is planned as states (default: %(default)s)"
    add("--spare-memory", choices=SPARE_FOR, default=OffloadOptions.spare_memory, help=text)
    text = "as of `memascend finetune`; no memory and no traffic depends on it"
    add("--max-grad-norm", type=rate, metavar="X", help=text)
    add_durability(add)
    text = "count the best model too, which `memascend finetune --eval` keeps in the store; values as there are taken"
    add("--eval", nargs="*", type=held_out, dest="evaluation", metavar="DATA|FRACTION", help=text)
    text = "plan LoRA adapters of this rank, as `memascend finetune` trains them"
    add("--lora-rank", type=positive, metavar="R", help=text)
    text = (
        "read the experts of a mixture with their layer, or one by one, as `memascend finetune` does with --lora-rank "
        "(default: %(default)s)"
    )
    add("--experts", choices=EXPERTS, default=OffloadOptions.experts, help=text)
    add_adapters(add)
    text = "plan them over weights that `memascend finetune --base-bits` quantises"
    add("--base-bits", type=int, choices=BITS, help=text)
    text = "what will be trained on: its tokens are estimated, and the steps, hours and bytes of all are counted"
    add("--data", type=path, nargs="+", action="extend", metavar="PATH", help=text)
    add("--epochs", type=positive, default=1, metavar="N", help="passes over --data (default: %(default)s)")
    text = "optimizer steps of the run, for what it writes in all (default: 1,000 are counted)"
    add("--steps", type=positive, metavar="N", help=text)
    text = "rated endurance of each drive in terabytes written (TBW), to show the share that the run writes"
    add("--tbw", type=positive_rate, metavar="TB", help=text)
    text = "show what more host memory would save, from the least budget to one that keeps everything"
    add("--curve", action="store_true", help=text)
    text = "where the store will be, measured by `memascend bench`; several times for several drives"
    add("--store", type=path, action="append", default=[], metavar="LOCATION", help=text)
    add("--ssd", type=positive_rate, metavar="X", help="bytes per second of the drives, read and written together")
    text = "show every consumer of memory and every kind of bytes too, as tables"
    add("--details", action="store_true", help=text)
    text = "show what ZeRO-Infinity would hold and move beside it, by the formulas of DeepSpeed's source"
    add("--compare", choices=("zero-infinity",), help=text)
    add("--json", action="store_true", help="one JSON object instead of lines; an error is one too")
    _add_ranks(parser)
    deepspeed = parser.add_argument_group(
        "behind DeepSpeed",
        "Shows what ZeRO-3 with offload to NVMe holds in host memory and moves, and what it does with\n"
        "memascend.deepspeed. DeepSpeed is not needed. Of the options above, --dtype, --grad-accum and --ranks\n"
        'stand in for "auto" in its configuration; the section "memascend" there has the others.',
    )
    text = "the JSON file of DeepSpeed's configuration, for a plan of that instead of memascend's own"
    deepspeed.add_argument("--deepspeed", type=path, metavar="FILE", help=text)
    gpu = parser.add_argument_group(
        "computing on a GPU",
        "Plans the GPU's memory too, and predicts the time of a step from the machine's rates, as `memascend\n"
        "bench --gpu` measured them or as given here.",
    )
    add = gpu.add_argument
    add("--gpu", type=size, metavar="SIZE", help="the memory that the GPU has free, such as 24GiB")
    text = "where the inputs of recomputed layers lie: on the GPU, in host memory or on the SSD (default: %(default)s)"
    add("--activations", choices=POLICIES, default="recompute", help=text)
    text = "the loss makes the logits in pieces (Liger-Kernel's fused linear cross entropy)"
    add("--fused-loss", action="store_true", help=text)
    add("--flops", type=positive_rate, metavar="X", help="operations per second of the GPU, such as 70e12")
    add("--pcie", type=positive_rate, metavar="X", help="bytes per second in each direction, such as 25e9")
    add("--dram", type=positive_rate, metavar="X", help="bytes per second of host memory, read and written together")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "over several processes or machines",
        "Shows what each rank holds on its SSD, moves, and sends to the others. --batch-size and --grad-accum are of\n"
        "each rank.",
    ).add_argument
    text = "the number of ranks, over which parameters, gradients and states are divided (default: 1)"
    add("--ranks", type=ranks, metavar="N", help=text)
    text = "bits per second of each rank's network in each direction, such as 25e9 for 25 GbE, for the time of a step"
    add("--network", type=positive_rate, metavar="X", help=text)
