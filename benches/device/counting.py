"""A pytest plugin that counts: collected, passed, failed, skipped and not run, in a file that is whole at any time.

`-p device.counting` with MEMASCEND_COUNTS naming the file.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

#: Characters of a failure that the file holds.
MESSAGE_CHARS = 1500
#: Seconds between two writings of the file, for tests that pass quickly.
WRITE_SECONDS = 0.5


class Counts:
    """The outcome of each test."""

    def __init__(self, path: Path) -> None:
        self.path, self.collected = path, 0
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.messages: dict[str, str] = {}
        self.collection_errors: dict[str, str] = {}
        self.written = 0.0

    def record(self) -> dict[str, Any]:
        """Return the counts, ready for JSON."""
        by_outcome = {
            name: sum(one == name for one in self.outcomes.values()) for name in ("passed", "failed", "skipped")
        }
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:10]
        return {
            "collected": self.collected,
            **by_outcome,
            "not_run": self.collected - len(self.outcomes),
            "collection_errors": self.collection_errors,
            "messages": self.messages,
            "slowest_s": {name: round(spent, 2) for name, spent in slowest},
        }

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.record(), indent=1) + "\n")
        part.replace(self.path)
        self.written = time.monotonic()

    # ---- pytest's hooks -------------------------------------------------------------------------------

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection_errors[report.nodeid] = str(report.longrepr)[-MESSAGE_CHARS:]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = len(session.items)
        self.write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Take the count of a worker: the process that divides the tests collects none."""
        self.collected = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        # A test passes by its call; its fixtures may fail or skip before it, or fail after it.
        if report.when == "call" or report.outcome != "passed":
            if self.outcomes.get(report.nodeid) != "failed":
                self.outcomes[report.nodeid] = report.outcome
            if report.outcome != "passed":
                self.messages[report.nodeid] = str(report.longrepr)[-MESSAGE_CHARS:]
        if report.failed or time.monotonic() - self.written > WRITE_SECONDS:
            self.write()

    def pytest_sessionfinish(self) -> None:
        self.write()


def pytest_configure(config: pytest.Config) -> None:
    """Count in the process that the user started, not in xdist's workers."""
    named = os.environ.get("MEMASCEND_COUNTS")
    if named and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Counts(Path(named)), "memascend-counts")
