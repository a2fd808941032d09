"""Checks of JSON values of another origin: which kinds, keys and lengths they have, before they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: The values to allow: a type, None, a list `[of]`, a list of exactly these `(one, another)`, an object with at least
#: these keys `{"key": of}`, one of the classes below, or a function that raises ValueError.
Shape = Any

#: The most dimensions of a tensor, and more than any number of bytes.
DIMENSIONS_MAX, COUNT_MAX = 64, 1 << 63
SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class Each:
    """An object of any keys, whose values are all `of` one shape."""

    of: Shape


@dataclass(frozen=True)
class Either:
    """One shape or the other."""

    one: Shape
    other: Shape


@dataclass(frozen=True)
class Absent:
    """In an object: the key may be missing."""

    of: Shape


def check(value: Any, shape: Shape, where: str) -> None:
    """Raise ValueError, which names the place, where a value does not have a shape."""
    if isinstance(shape, Either):
        try:
            check(value, shape.one, where)
        except ValueError:
            check(value, shape.other, where)
    elif isinstance(shape, Each):
        _expect(isinstance(value, dict), value, "an object", where)
        for key, inner in value.items():
            check(inner, shape.of, f"{where}[{str(key)[:SHOWN_CHARACTERS]!r}]")
    elif isinstance(shape, dict):
        _check_keys(value, shape, where)
    elif isinstance(shape, list):
        _expect(isinstance(value, list), value, "a list", where)
        for index, inner in enumerate(value):
            check(inner, shape[0], f"{where}[{index}]")
    elif isinstance(shape, tuple):
        _expect(isinstance(value, list) and len(value) == len(shape), value, f"a list of {len(shape)}", where)
        for index, (inner, one) in enumerate(zip(value, shape, strict=True)):
            check(inner, one, f"{where}[{index}]")
    elif shape is None:
        _expect(value is None, value, "null", where)
    elif isinstance(shape, type):
        # A bool is an int in Python, and is none in JSON.
        _expect(isinstance(value, shape) and (shape is not int or type(value) is int), value, shape.__name__, where)
    else:
        shape(value, where)


def _check_keys(value: Any, shape: dict[str, Shape], where: str) -> None:
    _expect(isinstance(value, dict), value, "an object", where)
    for key, inner in shape.items():
        optional = isinstance(inner, Absent)
        if key in value:
            check(value[key], inner.of if optional else inner, f"{where}[{key!r}]")
        elif not optional:
            raise ValueError(f"{where}[{key!r}] is missing")


def count(value: Any, where: str) -> None:
    """Expect a number of things: an integer from 0 on."""
    _expect(type(value) is int and 0 <= value < COUNT_MAX, value, "a count", where)


def dimensions(value: Any, where: str) -> None:
    """Expect the shape of a tensor."""
    check(value, [count], where)
    product = 1
    for size in value[:DIMENSIONS_MAX]:
        product *= size
    _expect(len(value) <= DIMENSIONS_MAX and product < COUNT_MAX, value, "the shape of a tensor", where)


def _expect(holds: bool, value: Any, wanted: str, where: str) -> None:
    if not holds:
        shown = repr(value)[:SHOWN_CHARACTERS] if isinstance(value, str | int | float | None) else type(value).__name__
        raise ValueError(f"{where} is {shown}, not {wanted}")
