"""Every option of every command stands in a page that shows the command, beside the reference that is generated."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from memascend.cli.arguments import parser

ROOT = Path(__file__).parents[2]
#: The page that is made from the parser itself.
GENERATED = "command-line.md"
PAGES = {
    path: path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.name != GENERATED
}
(SUBPARSERS,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))


def said(option: str, text: str) -> bool:
    return re.search(rf"{re.escape(option)}(?![\w-])", text) is not None


@pytest.mark.parametrize("command", SUBPARSERS.choices)
def test_options_stand_in_a_page_of_their_command(command: str) -> None:
    pages = {path: text for path, text in PAGES.items() if f"memascend {command}" in text}
    assert pages, f"no page shows `memascend {command}`"
    options = [flag for flag in SUBPARSERS.choices[command]._option_string_actions if flag.startswith("--")]
    assert options
    missing = [flag for flag in options if flag != "--help" and not any(said(flag, text) for text in pages.values())]
    assert not missing, f"say what these are for in a page that shows `memascend {command}`: {missing}"


def test_an_option_is_looked_for_whole() -> None:
    assert said("--lora-rank", "give `--lora-rank 8`, or less")
    assert not said("--lora", "give `--lora-rank 8`, or less")
    assert not said("--rank", "over `--ranks`")
