"""Notices to the user, as records of the package's log."""

from __future__ import annotations

import logging

_log = logging.getLogger("memascend")


def warn_of(notice: str) -> None:
    """Log a notice. The record says that it is one, for programs that show the notices of `memascend.stats`."""
    _log.warning("%s", notice, extra={"notice": True})
