"""The values of `--eval`, and names like a misspelt one; without heavy imports, so that help is shown at once."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def parse_held_out(text: str) -> float | Path:
    """Parse the value of `--eval`: a fraction to hold out, from a number between 0 and 1, or else a path.

    Raises ValueError for a number that is no such fraction.
    """
    try:
        fraction = float(text)
    except ValueError:
        return Path(text)
    if not 0 < fraction < 1:
        raise ValueError(f"{text} is not a fraction between 0 and 1; for a file of that name write ./{text}")
    return fraction


def meant(name: str, names: Iterable[str]) -> str:
    """Return a question for the one of `names` that is like `name`, or nothing."""
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.7)
    return f": did you mean {near[0]}?" if near else ""
