"""JSON with one value replaced, for tests of readers of files of another origin.

MEMASCEND_FUZZ says how many replacements a test tries (default: 400), MEMASCEND_SEED which.
"""

from __future__ import annotations

import copy
import os
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Replacements of a value.
WRONG: list[Any] = [None, -1, 1 << 70, 0.5, True, "x", "\0", "\ud83d", [], [[]], {}]
#: Replacements of a record, too, which writes tensors and dictionaries so.
WRONG += [{"!": "tensor"}, {"!": "dict", "items": [1]}]
SEED = int(os.environ.get("MEMASCEND_SEED", "1"))


def tries(cost: int = 1) -> int:
    """Return how many replacements a test tries; one takes `cost` times as long as one of a record."""
    return int(os.environ.get("MEMASCEND_FUZZ", "400")) // cost


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within one."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def changed(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with the value at a path replaced."""
    whole = copy.deepcopy(whole)
    holder: Any = whole
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return whole


def replacements(whole: Any, count: int) -> Iterator[tuple[str, Any]]:
    """Yield copies of JSON with one value replaced, and how to find each again."""
    chosen = random.Random(SEED)
    every = [path for path in places(whole) if path]
    for number in range(count):
        path, value = chosen.choice(every), chosen.choice(WRONG)
        yield f"seed {SEED}, try {number}: {path} = {value!r}", changed(whole, path, value)
