"""The lines of the library and of transformers that the command lets onto the screen."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def show_plans() -> None:
    """Have the host memory plan printed before anything is reserved."""
    logger = logging.getLogger("memascend")
    if not logger.handlers:
        logger.addHandler(_ToStderr())
        logger.setLevel(logging.INFO)
        logger.propagate = False


@contextmanager
def without_plans() -> Iterator[None]:
    """Have no plan printed meanwhile: it is the one that was printed before."""
    logger = logging.getLogger("memascend")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


class _ToStderr(logging.Handler):
    """Writes to the present standard error, not to the one at the handler's creation."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message. The command prints notices by itself."""
        if not getattr(record, "notice", False):
            print(_narrowed(self.format(record)), file=sys.stderr, flush=True)


def _narrowed(text: str) -> str:
    """Put the note at the end of a table's row on a line of its own, where the terminal would break the row."""
    if not sys.stderr.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    lines = []
    for line in text.splitlines():
        row, _, remark = line.rpartition("  ")
        is_broken = len(line) > columns and bool(row.strip())
        lines += [row.rstrip(), f"      {remark}"] if is_broken else [line]
    return "\n".join(lines)


def quiet_libraries() -> None:
    """Have libraries print no warnings, and transformers no bars: the screen is for this command's own lines."""
    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        # DeepSpeed, which libraries import where it is installed, warns that it has looked for a device in vain.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # What libraries will change in each other is nothing that a user of the command can act on.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(accelerate|peft|transformers|trl)\.")
    # TRL says of some trainers that they may change.
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
