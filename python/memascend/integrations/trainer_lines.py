"""The lines that a Trainer prints of a step, as long as transformers' own."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, ProgressCallback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: How the names of memascend's figures begin in logs.
PREFIX = "memascend/"


@contextmanager
def figures_not_printed(callbacks: list[Any]) -> Iterator[None]:
    """Have the callbacks that print logs leave out memascend's figures, which the others get."""
    printing = [callback for callback in callbacks if isinstance(callback, PrinterCallback | ProgressCallback)]
    before = [vars(callback).get("on_log") for callback in printing]
    for callback in printing:
        callback.on_log = _without_figures(callback.on_log)
    try:
        yield
    finally:
        for callback, own in zip(printing, before, strict=True):
            if own is None:
                del callback.on_log
            else:
                callback.on_log = own


def _without_figures(on_log: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(on_log)
    def shorter(*others: Any, logs: dict[str, Any] | None = None, **named: Any) -> Any:
        shown = {name: value for name, value in (logs or {}).items() if not name.startswith(PREFIX)}
        return on_log(*others, logs=shown, **named)

    return shorter
