"""The values of options: a function for each kind, as argparse's `type`, whose error says what is wanted."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memascend.common.choices import parse_held_out
from memascend.common.sizes import AUTO, parse_size
from memascend.common.tiles import parse_tile_tokens
from memascend.options import parse_durability

#: A type of weights that only files of llama.cpp have, and the values of --dtype of an export.
QUANTISED = "q8_0"
WEIGHTS_DTYPES = ("bfloat16", "float16", "float32", QUANTISED)
TEMPERATURE_MIN = 1e-3
#: The most of a whole number: far more than any run has, and a seed for NumPy.
WHOLE_MAX = (1 << 31) - 1
#: The most tokens of a sequence, and processes of a run: plans go through pieces of the first and list the second.
TOKENS_MAX, RANKS_MAX = 1 << 24, 4096


def _number(convert: Callable[[str], Any], accept: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """Return an argparse type: a number that `accept` agrees to."""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not accept(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def _whole(least: int, most: int = WHOLE_MAX) -> Callable[[str], int]:
    """Return an argparse type: a whole number from `least` to `most`, by default the largest that libraries take."""
    number = _number(int, lambda n: n >= least, f"a whole number of at least {least}")

    def parse(text: str) -> int:
        value: int = number(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is too large: the most is {most:,}")
        return value

    return parse


positive, count = _whole(1), _whole(0)
tokens, ranks = _whole(2, TOKENS_MAX), _whole(1, RANKS_MAX)
duration = _number(float, lambda x: 0 < x <= 3600, "a number of seconds above 0, and at most 3600")
positive_rate = _number(float, lambda x: 0 < x <= 1e30, "a number above 0, and at most 1e30")
percentage = _number(float, lambda x: 0 <= x <= 100, "a percentage from 0 to 100")
share = _number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
rate = _number(float, lambda x: x >= 0 and math.isfinite(x), "a number of at least 0")


def path(text: str) -> Path:
    """Return a path. An empty one is no name for the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path names nothing: is a variable of the shell not set?")
    return Path(text)


def temperature(text: str) -> float:
    """Return a temperature of sampling, by which logits are divided; 0 takes the likeliest token."""
    value: float = rate(text)
    if 0 < value < TEMPERATURE_MIN:
        raise argparse.ArgumentTypeError(f"{text} is too small to divide by: give 0, which takes the likeliest token")
    return value


def weights_dtype(text: str) -> str:
    """Return the name of a type that weights are written in; the error for a type of llama.cpp names the tool."""
    if text in WEIGHTS_DTYPES:
        return text
    remedy = ""
    if re.fullmatch(r"i?q\d\w*|tq\d\w*|mxfp4\w*", text.lower()):
        remedy = f": write a file in bfloat16, and run llama.cpp's `llama-quantize model.gguf {text}.gguf {text}`"
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(WEIGHTS_DTYPES)}{remedy}")


def held_out(text: str) -> float | Path:
    """Return a fraction of the documents, or a path."""
    path(text)
    percentage = re.fullmatch(r"(\d+\.?\d*|\.\d+)%", text)
    if percentage is not None and not Path(text).exists():
        if not 0 < float(percentage[1]) < 100:
            raise argparse.ArgumentTypeError(f"{text} is no part of the documents: give between 0% and 100%")
        return float(percentage[1]) / 100
    try:
        return parse_held_out(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def durability(text: str) -> str:
    """Return the text, which says which steps are durable."""
    try:
        parse_durability(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def tile(text: str) -> int | str:
    """Return the tokens of a tile, or "auto"."""
    try:
        return parse_tile_tokens(text) or AUTO
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size_or_auto(text: str) -> int | str:
    """Return a number of bytes, or "auto"."""
    return AUTO if text == AUTO else size(text)


def size(text: str) -> int:
    """Return a number of bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
