"""The tables of docs/what-works.md: each row's code runs on an offloaded model and in memory."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from differential import Twins

import memascend

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what-works.md"


class Row(NamedTuple):
    """One operation: its code, "same" or "refused", and the remedy."""

    code: str
    result: str
    instead: str


def rows() -> list[Row]:
    """Return the rows of all tables."""
    lines = (line for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in (*lines,))
    return [Row(code.strip("`"), result, rest[0].rstrip(" |") if rest else "") for code, result, *rest in cells]


#: Names that the code of a row takes for granted: two steps, and the gradients of a third.
BEFORE = """\
for number in range(2):
    model(*batch(number)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model(*batch(2)).loss.backward()
layer = model.body.layers[0]
p = layer.up.weight
batch = batch(3)
"""
#: The training that follows.
AFTER = """\
model.zero_grad()
loss = model(*batch).loss
loss.backward()
show(loss)
optimizer.step()
optimizer.zero_grad()
"""


def shown(code: str) -> str:
    """Have the value of a row's last expression compared."""
    *statements, last = code.split("; ")
    is_expression = not re.match(r"with |for |[\w.\[\]]+ = ", last)
    return "\n".join([*statements, f"show({last})" if is_expression else last])


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.code[:60])
def test_a_row(row: Row) -> None:
    with Twins(budget="ample") as twins:
        twins(BEFORE)
        if row.result == "same":
            assert twins(shown(row.code)) == "same"
        else:
            *statements, last = row.code.split("; ")
            twins("\n".join(statements))
            error = twins.ours.run(compile(last, "<row>", "exec"))
            remedy = re.findall("`(.*?)`", row.instead)[0]
            assert error is not None and remedy in str(error), f"{error!r} does not name {remedy}"
            if "by PyTorch too" in row.instead:
                expected = twins.theirs.run(compile(last, "<row>", "exec"))
                assert expected is not None and remedy in str(expected)
            else:
                assert isinstance(error, memascend.MemascendError)
            twins.forget_pass()
        assert twins(AFTER) == "same"


def test_the_tables_are_read() -> None:
    counts = collections.Counter(row.result for row in rows())
    assert set(counts) == {"same", "refused"}
    assert counts["same"] > 60 and counts["refused"] > 10
