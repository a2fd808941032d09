"""The options of the subcommands that look at stores: `inspect`, `verify` and `checkpoints`."""

from __future__ import annotations

from typing import Any

from memascend.cli.arguments.parsing import subcommand
from memascend.cli.arguments.shared import add_stores
from memascend.cli.arguments.values import rate


def add_inspect(subcommands: Any) -> None:
    """Add the subcommand `inspect`."""
    parser = subcommand(
        subcommands,
        "inspect",
        help="show what a store holds: steps, tensors, checkpoints, drives and their wear",
        description="Show the contents of a store, or the last durable step of a run that is going on. Only the\n"
        "manifest is read, and nothing is changed. Of the model directory that a run wrote, say how that ended.",
    )
    add_stores(parser)
    text = "rated endurance of each drive in terabytes written (TBW), to show the share that is used"
    parser.add_argument("--tbw", type=rate, metavar="TB", help=text)
    text = "show what would write less, by a forecast for this model and optimizer at the least host memory"
    parser.add_argument("--savings", action="store_true", help=text)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a text")


def add_verify(subcommands: Any) -> None:
    """Add the subcommand `verify`."""
    parser = subcommand(
        subcommands,
        "verify",
        help="read the whole store and check it against its checksums",
        description="Read the whole store, checkpoints too, and compare it with its checksums. Damage makes exit\n"
        "code 1 and is listed with its tensor, file and position. A damaged manifest is written anew.",
    )
    add_stores(parser)


def add_checkpoints(subcommands: Any) -> None:
    """Add the subcommand `checkpoints`."""
    parser = subcommand(
        subcommands,
        "checkpoints",
        help="list, delete or restore the checkpoints in a store",
        description="List the checkpoints in a store, delete some, or go back to one.",
    )
    add_stores(parser)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--delete", metavar="TAG", action="append", default=[], help="delete it; several times for several"
    )
    text = "continue from there: later steps are discarded, unless they are checkpoints too"
    choice.add_argument("--restore", metavar="TAG", help=text)
