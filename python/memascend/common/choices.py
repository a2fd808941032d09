"""What `--eval` takes. Nothing heavy is imported here, so that help is shown at once."""

from __future__ import annotations

from pathlib import Path


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
