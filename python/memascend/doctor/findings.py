"""A line of the doctor's page."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend.common.sizes import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Nothing to do; works, but slower or with less than it could; does not work.
OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """A finding: `level` is "ok", "note" or "problem", and only the first has no remedy."""

    level: str
    subject: str
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    """Return a line on which there is nothing to do."""
    return Finding(OK, subject, text)


def note(subject: str, text: str, remedy: str) -> Finding:
    """Return a line on a feature that works, but not as well as it could."""
    return Finding(NOTE, subject, text, remedy)


def problem(subject: str, text: str, remedy: str) -> Finding:
    """Return a line on a feature that does not work."""
    return Finding(PROBLEM, subject, text, remedy)


def has_problem(findings: Sequence[Finding]) -> bool:
    """Return whether something does not work."""
    return any(finding.level == PROBLEM for finding in findings)


def as_text(findings: Sequence[Finding], columns: int = 100) -> str:
    """Return a page of `columns` characters, a paragraph for each finding."""
    width = max((len(finding.subject) for finding in findings), default=0)
    indent = " " * (len(PROBLEM) + width + 4)
    lines = []
    for finding in findings:
        head = f"{finding.level:<{len(PROBLEM)}}  {finding.subject:<{width}}  "
        text = f"{finding.text}. {finding.remedy}" if finding.remedy else finding.text
        lines.append(
            textwrap.fill(
                text,
                columns,
                initial_indent=head,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    counts = {level: sum(finding.level == level for finding in findings) for level in (PROBLEM, NOTE)}
    lines.append(f"{counted(counts[PROBLEM], 'problem')}, {counted(counts[NOTE], 'note')}")
    return "\n".join(lines)
