"""The arguments of the `memascend` command: `parser` returns them all.

Each module has the options of some subcommands, under the name of the module of `memascend.cli.jobs` that runs
them; `shared` has the options that several have, `values` the kinds of their values.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import memascend
from memascend.cli.arguments import answering, machines, planning, reporting, stores, training, writing
from memascend.cli.arguments.parsing import Parser
from memascend.common.choices import meant


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
    whole = Parser(
        prog="memascend",
        description="Fine-tune language models larger than memory, from SSD.",
        allow_abbrev=False,
    )
    text = "show the version, and what this machine has: instruction set, io_uring, CUDA"
    whole.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=text)
    subcommands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    training.add_finetune(subcommands)
    planning.add_plan(subcommands)
    stores.add_inspect(subcommands)
    stores.add_verify(subcommands)
    stores.add_checkpoints(subcommands)
    writing.add_export(subcommands)
    writing.add_merge(subcommands)
    answering.add_generate(subcommands)
    answering.add_chat(subcommands)
    writing.add_reshard(subcommands)
    reporting.add_report(subcommands)
    machines.add_bench(subcommands)
    machines.add_format(subcommands)
    machines.add_doctor(subcommands)
    training.add_demo(subcommands)
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
