"""The parser of a subcommand: errors in one line, help at a width that fits a page."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from memascend.cli.errors import BAD_INPUT


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # -1e-4 is a value too, which an option refuses by its name: argparse takes it for an option before Python 3.14.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")

    def error(self, message: str) -> NoReturn:
        """End the command with one line."""
        self.exit(BAD_INPUT, f"memascend: error: {message} (see {self.prog} --help)\n")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help at a width that fits a page."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=110)


def subcommand(subcommands: Any, name: str, **texts: str) -> argparse.ArgumentParser:
    """Return the parser of a new subcommand."""
    return subcommands.add_parser(name, formatter_class=Formatter, allow_abbrev=False, **texts)
