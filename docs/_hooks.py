"""Hooks of the site's build: the command line's page is made from the argument parser."""

from __future__ import annotations

import argparse
from typing import Any

from memascend.command.arguments import parser as command_parser

MARKER = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of every command where a page has the marker."""
    return markdown.replace(MARKER, commands()) if MARKER in markdown else markdown


def commands() -> str:
    """Return a section for each command, with the help that it prints."""
    parser = command_parser()
    sections = [f"```text\n{parser.format_help().rstrip()}\n```"]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                sections.append(f"## memascend {name}\n\n```text\n{command.format_help().rstrip()}\n```")
    return "\n\n".join(sections)
