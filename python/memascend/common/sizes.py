"""Sizes in bytes, read from text and written as text, and numbers of things."""

from __future__ import annotations

import re

#: In the place of a size: as much as the machine leaves.
AUTO = "auto"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNITS |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # as Kubernetes writes them


def parse_size(text: str | int) -> int:
    """Turn "8GiB", "500 MB" or a number of bytes into bytes.

    Raises ValueError with the accepted forms.
    """
    if isinstance(text, int):
        value = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"{text!r} is not a size: write bytes, or a number with MB, GB, MiB or GiB, as in 8GiB")
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    if value <= 0:
        raise ValueError(f"a size must be greater than zero, not {text!r}")
    return value


def format_size(nbytes: float) -> str:
    """Write bytes with a binary unit: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def format_least(nbytes: int) -> str:
    """Write bytes as an option takes them, not smaller: a budget that is rounded down would be refused."""
    unit, name = next(((size, name) for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB")) if nbytes >= size), (1, ""))
    return f"{-(-nbytes * 10 // unit) / 10:g}{name}"


def format_decimal(nbytes: float) -> str:
    """Write bytes with a decimal unit, as drives are rated: 1.50 TB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes / 10**6:.2f} MB"


def format_rating(nbytes: float) -> str:
    """Write the bytes that a drive is rated for as its maker does: 600 TB."""
    return f"{nbytes / 10**12:g} TB" if nbytes >= 10**12 else format_decimal(nbytes)


def format_figure(value: float) -> str:
    """Write a figure with three digits, or as a whole number from 100 on: 0.434, 1,774."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_share(share: float) -> str:
    """Write how much of something a share is: "0.25% of", or "1,250 times" where it is more than ten of them."""
    return f"{share:.2%} of" if share < 10 else f"{format_figure(share)} times"


def counted(number: int, noun: str) -> str:
    """Write a number of things, whose plural ends in s: 1 thread, 2,000 threads."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
