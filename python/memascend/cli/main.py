"""The `memascend` command: arguments in, one clear line out when something is wrong with them."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from memascend.cli import distributed, subcommands
from memascend.cli.arguments import check_names, flags_of, parser
from memascend.cli.errors import BAD_INPUT, FAILED, SIGNALLED, explain, tell
from memascend.cli.options import with_options
from memascend.errors import DataError

__all__ = ["BAD_INPUT", "FAILED", "SIGNALLED", "main", "run"]

#: Products of bfloat16 are compiled for each number of rows, and kept: 1,024 of them by oneDNN, which reads the first
#: variable, and as many by PyTorch's layer above it, which reads the second, both at the first product. The experts of
#: a mixture get another number of tokens in every step. A layer of a model that is no mixture has about 30 products.
PRODUCTS_KEPT, PRODUCTS_VARIABLES = 64, ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. An error is one line, never a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    with distributed.first_speaks(list(words[:1]) == ["finetune"]):
        return _main(words)


def _main(words: Sequence[str]) -> int:
    try:
        whole = parser()
        check_names(whole, words)
        chosen = whole.parse_args(with_options(words, flags_of(whole, "finetune")))
    except SystemExit as leave:  # --help, --version, or a usage error that was printed
        return leave.code if isinstance(leave.code, int) else FAILED
    except DataError as error:
        tell(f"error: {error}")
        return BAD_INPUT
    try:
        return subcommands.run(chosen)
    except KeyboardInterrupt as interrupt:
        with distributed.one_speaks():
            tell("interrupted: what was begun is abandoned")
        return SIGNALLED + getattr(interrupt, "signal_number", 2)
    except Exception as error:  # the one place where errors become lines
        if os.environ.get("MEMASCEND_TRACEBACK") == "1":
            traceback.print_exc()
        code, message = explain(error)
        with distributed.one_speaks():
            tell(f"error: {message}")
        return code


def _open_streams() -> None:
    """Lead standard streams that were closed before the command began (`>&-`) to /dev/null.

    Else the next file that is opened, a store perhaps, gets the number of one of them, and the lines of libraries. A
    character of a path that the terminal's encoding lacks is escaped, and ends no command.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the stream's number, which is the lowest that is free.
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def run() -> NoReturn:
    """Run the command as a process of its own.

    All files are closed and written when `main` returns. The interpreter is not finalised on the way out: with the
    state that an interrupted backward pass leaves in PyTorch, finalisation has crashed after the run's last line.
    """
    _open_streams()
    for name in PRODUCTS_VARIABLES:
        os.environ.setdefault(name, str(PRODUCTS_KEPT))
    code = main()
    # Ctrl-C while libraries end would print a traceback below the run's last line.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # the stream's reader is gone, or it was closed
            code = code or FAILED
    os._exit(code)
