"""The values that options take. Nothing heavy is imported here: the command line lists them in its help."""

from __future__ import annotations

from pathlib import Path

#: Where the inputs of recomputed units wait. "recompute": in place. "host": in host memory, and on
#: the SSD once that is full. "ssd": on the SSD.
POLICIES = ("recompute", "host", "ssd")
#: The dtypes that gradients may be put aside in: that of the weight, or bfloat16.
GRADIENTS = ("auto", "bfloat16")
#: When tensors that move alone are updated: on the way into the next forward pass, or in the backward pass as soon as
#: their gradient is made.
UPDATES = ("forward", "backward")


def parse_durability(durability: str) -> int | None:
    """Return the steps between generations: 0 for "none", None for "auto".

    Raises ValueError for anything but "auto", "none", "step" and "every:N".
    """
    if durability in ("auto", "none", "step"):
        return {"auto": None, "none": 0, "step": 1}[durability]
    name, _, number = str(durability).partition(":")
    if name == "every" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise ValueError(f"durability {durability!r} is none of 'auto', 'step', 'every:N' and 'none'")


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
