"""What of this machine and its software fits memascend, line by line, with remedies.

What can be tried is tried: a ring is opened, memory is locked, a drive is read and written. No model library is
imported.
"""

from __future__ import annotations

from memascend.doctor.checkup import check
from memascend.doctor.findings import Finding, as_text, has_problem

__all__ = ["Finding", "as_text", "check", "has_problem"]
