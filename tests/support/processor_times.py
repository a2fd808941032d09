"""A pytest plugin that writes what each test takes of the processors: `-p processor_times`, for `tests/rotate.py`.

A line of JSON for each test in the file MEMASCEND_TIMES: its name, seconds of this process and of those that it has
waited for, and whether it is marked `core`. Other work on the machine changes seconds of the clock far more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The file that is written to.
VARIABLE = "MEMASCEND_TIMES"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began = _seconds()
    result = yield
    line = [
        item.nodeid.removeprefix("tests/"),
        round(_seconds() - began, 3),
        item.get_closest_marker("core") is not None,
    ]
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return result


def _seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
