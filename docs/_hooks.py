"""Hooks of the site's build: the command line's page is made from the argument parser."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from memascend.cli.arguments import parser as command_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKER = "<!-- commands -->"
USAGE_COLUMNS = 80  # what a page shows without scrolling


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put a section for every command where a page has the marker."""
    return markdown.replace(MARKER, "\n".join(commands())) if MARKER in markdown else markdown


def commands() -> Iterator[str]:
    """Yield the lines of all sections: description, usage, a table for each group of arguments."""
    (subparsers,) = (action for action in command_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, parser in subparsers.choices.items():
        parser.formatter_class = partial(argparse.HelpFormatter, width=USAGE_COLUMNS)
        usage = parser.format_usage().removeprefix("usage: ").rstrip()
        aligned = [line.removeprefix(" " * len("usage: ")) for line in usage.splitlines()]
        yield from (f"## memascend {name}", "", parser.description or "", "", "```text", *aligned, "```", "")
        for group in parser._action_groups:
            yield from _table(group, parser._get_formatter())
        yield from (parser.epilog or "", "")


def _table(group: Any, formatter: argparse.HelpFormatter) -> Iterator[str]:
    """Yield the lines of a group's table, --help left out."""
    actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    if actions:
        yield from (f"**{group.title}**", "", group.description or "", "")
        yield from ("| argument | meaning |", "| --- | --- |")
        yield from (f"| {_name(action)} | {_cell(formatter._expand_help(action))} |" for action in actions)
        yield ""


def _name(action: argparse.Action) -> str:
    """Return an argument as it is written, each of its choices apart."""
    values = action.choices or [action.metavar or action.dest]
    value = " / ".join(f"`{choice}`" for choice in values)
    names = ", ".join(action.option_strings)
    if not names:
        return value
    return f"`{names}`" if action.nargs == 0 else f"`{names}` {value}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")
