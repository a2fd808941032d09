"""Checks this machine and its software for memascend, and prints a line for each finding, with remedies.

Features are tried, not assumed: a ring is opened, memory is locked, a drive is read and written. No model library is
imported.
"""

from __future__ import annotations

from memascend.doctor.checkup import check
from memascend.doctor.findings import Finding, as_text, has_problem

__all__ = ["Finding", "as_text", "check", "has_problem"]
