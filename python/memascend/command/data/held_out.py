"""Data that is held out of the training, to evaluate on: a path of its own, or a fraction of the documents."""

from __future__ import annotations

from pathlib import Path

from memascend.errors import DataError


def parse_held_out(text: str) -> float | Path:
    """Return what is to be held out: a fraction, from a number between 0 and 1, or else a path.

    Raises ValueError for a number that is no such fraction.
    """
    try:
        fraction = float(text)
    except ValueError:
        return Path(text)
    if not 0 < fraction < 1:
        raise ValueError(f"{text} is no fraction between 0 and 1; write a file of that name as ./{text}")
    return fraction


def split(documents: int, fraction: float) -> tuple[range, range]:
    """Return the positions of `documents`, in their seeded order, to train on and to hold out.

    Raises DataError where there are too few documents for one on each side.
    """
    held_out = max(1, round(fraction * documents))
    if held_out >= documents:
        raise DataError(
            f"of {documents} documents, a fraction of {fraction:g} leaves none to train on: give another, or a path"
        )
    return range(documents - held_out), range(documents - held_out, documents)
