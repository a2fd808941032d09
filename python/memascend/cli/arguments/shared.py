"""The options that several subcommands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from memascend.cli.arguments.values import durability, path, positive, share
from memascend.optimizers import OPTIMIZERS
from memascend.options import GRADIENTS, OffloadOptions

#: Values of --dtype.
DTYPES = ("auto", "bfloat16", "float32")
MICRO_BATCH = (
    "sequences of a batch that a layer computes at once: all of them go through it while its weights are in memory, so "
    "that a step moves no more bytes for a larger batch (default: the whole batch)"
)
TILE = (
    "tokens that an MLP or a norm computes at once, for long sequences; auto: one in 32 of a layer's, at least 1,024 "
    "(default: all)"
)
EXPERTS_TEXT = (
    "with --lora-rank: read the experts of a mixture with their layer, or one by one, which takes the memory of an "
    "expert and not of a layer; adapters are then on the other modules"
)
SPARE_TEXT = (
    "use of --host-memory beyond the least, where not all fits: states, weights and gradients stay and are not moved "
    "(states), activations stay and are not computed again, or auto, which tries both and takes the faster"
)
DTYPE = (
    "of the weights; master weights are float32. auto: the checkpoint's where the processor (or device) computes in "
    "it; else float32, and the weights are written in the checkpoint's at the end"
)


def add_durability(add: Callable[..., Any]) -> None:
    """Add the option that says which steps survive a crash."""
    text = (
        "which steps survive a crash or a power cut: step, every:N or none; twice the SSD space, no traffic (default: "
        "auto, which is step where there is the space)"
    )
    add("--durability", help=text, type=durability, default=OffloadOptions.durability, metavar="WHICH")


def add_optimizer(parser: Any) -> None:
    """Add the arguments that choose the optimizer, and how its states and the gradients are kept."""
    add = parser.add_argument
    text = (
        "apollo (rank 256) and apollo-mini take adamw for embeddings, head and norms; sgd has a momentum of 0.9; all "
        "but adamw need other learning rates (default: %(default)s)"
    )
    add("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help=text)
    text = "how the optimizer's states are stored; 8bit is float32 below 64 KiB of weights (default: %(default)s)"
    add("--states", choices=("float32", "bfloat16", "8bit"), default="float32", help=text)
    text = "no float32 master weights: bfloat16 weights are rounded stochastically instead"
    add("--no-master", help=text, action="store_true")
    text = (
        "the dtype that gradients are put aside in; bfloat16 rounds those of a float32 training, on the CPU, for half "
        "of their memory and traffic (default: %(default)s, as they are made)"
    )
    add("--gradients", choices=GRADIENTS, default=OffloadOptions.gradients, help=text)


def add_adapters(add: Callable[..., Any]) -> None:
    """Add the options of adapters beside their rank."""
    text = "with --lora-rank: the scale of the adapters' products, times the rank (default: twice the rank)"
    add("--lora-alpha", type=positive, metavar="A", help=text)
    text = "with --lora-rank: the share of the adapters' inputs that is dropped in training (default: %(default)s)"
    add("--lora-dropout", type=share, default=0.0, metavar="P", help=text)
    text = "with --lora-rank: the modules that get adapters, by the ends of their names (q_proj v_proj)"
    add("--lora-targets", nargs="+", default=[], metavar="NAME", help=text)
    text = "with --lora-rank: weights are divided into sizes and directions, and the adapters are of these (DoRA)"
    add("--dora", action="store_true", help=text)
    text = "with --lora-rank: scale by the root of the rank (rank-stabilised LoRA)"
    add("--rslora", action="store_true", help=text)
    text = "with --lora-rank: modules that are trained whole beside the adapters, in memory (lm_head)"
    add("--modules-to-save", nargs="+", default=[], metavar="NAME", help=text)


def add_stores(parser: argparse.ArgumentParser) -> None:
    """Add the stores that a subcommand looks at."""
    text = "a directory or raw device of a store; the store's others are found from there"
    parser.add_argument("store", type=path, nargs="+", metavar="STORE", help=text)
