"""The options of `generate` and `chat`."""

from __future__ import annotations

import argparse
from typing import Any

from memascend.cli.arguments.parsing import subcommand
from memascend.cli.arguments.values import count, path, positive, size_or_auto, temperature, tokens
from memascend.common.sizes import AUTO
from memascend.layout.bits import BITS
from memascend.options import EXPERTS


def add_generate(subcommands: Any) -> None:
    """Add the subcommand `generate`."""
    parser = subcommand(
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
    parser.add_argument("--prompts", type=path, required=True, metavar="FILE", help=text)
    text = "a JSON line for each answer, in the order of the prompts (default: standard output)"
    parser.add_argument("--out", type=path, metavar="FILE", help=text)
    text = "sequences that are answered at once (default: as many as a quarter of the memory has keys and values for)"
    parser.add_argument("--batch-size", type=positive, metavar="N", help=text)
    _add_answers(parser, new_tokens=256)


def add_chat(subcommands: Any) -> None:
    """Add the subcommand `chat`."""
    parser = subcommand(
        subcommands,
        "chat",
        help="talk with a model in a store, adapters or a model directory",
        description="Answer what is typed, within a budget of host memory. A model that is larger than the budget is\n"
        "read from the SSD for every token; before it begins, a line says how long that takes.",
    )
    _add_answers(parser, new_tokens=512)
    text = "tokens of a conversation, for which keys and values are counted (default: %(default)s)"
    parser.add_argument("--context", type=tokens, default=4096, metavar="N", help=text)


def _add_answers(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    """Add the options that the commands that answer have in common."""
    text = (
        "a model directory, the id of a model on the hub (org/name), a directory of adapters, or the directories or "
        "raw devices of a store that no run is using"
    )
    parser.add_argument("model", type=path, nargs="+", metavar="MODEL", help=text)
    add = parser.add_argument
    text = "the most host memory to use for the model and for keys and values (default: auto, as much as is free)"
    add("--host-memory", type=size_or_auto, default=AUTO, metavar="SIZE", help=text)
    text = "where a copy goes of weights that cannot be read as they are (default: the cache directory); it is removed"
    add("--store", type=path, metavar="DIR", help=text)
    add("--tokenizer", type=path, metavar="DIR", help="where the tokenizer is (default: beside the model)")
    text = "the model was trained on the bytes of text (`memascend finetune --bytes`), and needs no tokenizer"
    add("--bytes", action="store_true", help=text)
    text = "the most tokens of an answer (default: %(default)s)"
    add("--max-new-tokens", type=positive, default=new_tokens, metavar="N", help=text)
    text = "0 takes the most likely token; more, one by chance (default: as the model's generation_config.json says)"
    add("--temperature", type=temperature, metavar="X", help=text)
    add("--seed", type=count, default=0, metavar="N", help="of what is chosen by chance (default: %(default)s)")
    add("--raw", action="store_true", help="continue texts, also where the model has a chat template")
    text = (
        "read the experts of a mixture with their layer, or those alone that a token is sent to (default: with their "
        "layer, where the memory holds one)"
    )
    add("--experts", choices=EXPERTS, help=text)
    text = (
        "quantise the linear weights of a model directory, as `memascend finetune --base-bits` does under adapters: a "
        "token reads 3.9 or 2.0 times fewer bytes of them"
    )
    add("--base-bits", type=int, choices=BITS, help=text)
