"""Run tests in several processes, which are forked once all tests are collected.

`--workers N` (conftest.py; `make test` and `make check` give it): PyTorch, transformers and the tests are imported and
collected once. pytest-xdist does so in each of its processes, which costs each of them as long as fifty tests.
A process in which CUDA has begun cannot be forked: tests of devices run with pytest-xdist.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The number of a worker, in its environment.
VARIABLE = "MEMASCEND_TEST_WORKER"


def run(session: pytest.Session, count: int) -> None:
    """Run all tests of a session in `count` processes. Raises as pytest's own loop does."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.showfspath = False
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all workers
    loop = _Loop(session, count)
    try:
        loop.serve()
    finally:
        loop.stop()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


class Shares:
    """Which worker runs which tests: at first neighbours, so that fixtures of a file are made once."""

    def __init__(self, files: Sequence[str], count: int) -> None:
        #: The file of each test.
        self._files = files
        ends = [len(files) * number // count for number in range(count + 1)]
        self.left = [deque(range(first, end)) for first, end in itertools.pairwise(ends)]

    def take(self, worker: int) -> int | None:
        """Return a worker's next test, or None where none is left."""
        if not self.left[worker]:
            self._divide(max(self.left, key=len), self.left[worker])
        return self.left[worker].popleft() if self.left[worker] else None

    def give_back(self, worker: int, tests: Sequence[int]) -> None:
        """Have tests that a worker has not begun be run by the next one of its number."""
        self.left[worker].extendleft(reversed(tests))

    def drop(self) -> None:
        """Have no further test begin."""
        for tests in self.left:
            tests.clear()

    def _divide(self, source: deque[int], to: deque[int]) -> None:
        """Move the second half of the tests left, from where a file begins if there is such a place."""
        whole = list(source)
        begins = [at for at in range(1, len(whole)) if self._files[whole[at]] != self._files[whole[at - 1]]]
        at = min(begins, key=lambda begin: abs(2 * begin - len(whole))) if begins else len(whole) // 2
        to.extend(whole[at:])
        for _ in whole[at:]:
            source.pop()


# ---- the process that collects -------------------------------------------------------------------------------


@dataclass
class _Worker:
    number: int
    process: int
    #: Of that process: it can be read once that has ended.
    handle: int
    connection: Connection
    #: Tests that it has been given and has not finished.
    given: deque[int] = field(default_factory=deque)


class _Loop:
    """Starts the workers, hands out tests, and reports the results."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session, self._hook = session, session.config.hook
        self._shares = Shares([str(item.path) for item in session.items], count)
        self._workers: list[_Worker] = []
        for number in range(count):
            self._start(number)

    def serve(self) -> None:
        """Return once all workers have ended."""
        while self._workers:
            ready = set(wait([one for worker in self._workers for one in (worker.connection, worker.handle)]))
            for worker in [*self._workers]:
                ended = worker.handle in ready
                if worker.connection in ready or ended:
                    self._read(worker, to_the_end=ended)
                if ended:
                    self._bury(worker)
            if self._session.shouldfail or self._session.shouldstop:
                self._shares.drop()

    def stop(self) -> None:
        """Kill the workers that run."""
        for worker in self._workers:
            os.kill(worker.process, signal.SIGKILL)
            self._wait_for(worker)
        self._workers.clear()

    def _start(self, number: int) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            for connection in (ours, *(worker.connection for worker in self._workers)):
                connection.close()
            _work(self._session, number, theirs)
        theirs.close()
        self._workers.append(_Worker(number, process, os.pidfd_open(process), ours))

    def _read(self, worker: _Worker, to_the_end: bool) -> None:
        """Do what a worker asks for: one thing, or all that it has asked for before its end."""
        try:
            while worker.connection.poll():
                self._do(worker, *worker.connection.recv())
                if not to_the_end:
                    return
        except (EOFError, ConnectionError):  # the handle tells of the end
            if not to_the_end:
                wait([worker.handle])

    def _do(self, worker: _Worker, kind: str, told: Any) -> None:
        if kind == "next":
            test = self._shares.take(worker.number)
            if test is not None:
                worker.given.append(test)
            worker.connection.send(test)
        elif kind == "finished":
            item = self._session.items[worker.given.popleft()]
            self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        elif kind == "report":
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=told)
            self._hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            text, about = told
            message = warnings.WarningMessage(UserWarning(text), UserWarning, "", 0)
            self._hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **about})
        else:
            raise AssertionError(told)

    def _bury(self, worker: _Worker) -> None:
        """Report the test in which a worker has ended, and start another one for the rest."""
        self._workers.remove(worker)
        code = self._wait_for(worker)
        if code == 0:  # nothing is left, or the run stops
            return
        assert worker.given, f"worker {worker.number} ended with {code} beside its tests"
        item = self._session.items[worker.given.popleft()]
        self._shares.give_back(worker.number, worker.given)
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"worker {worker.number} ended with {code} in this test",
            when="call",
        )
        self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self._start(worker.number)

    def _wait_for(self, worker: _Worker) -> int:
        _, status = os.waitpid(worker.process, 0)
        os.close(worker.handle)
        worker.connection.close()
        return os.waitstatus_to_exitcode(status)


# ---- a worker ------------------------------------------------------------------------------------------------


class _Teller:
    """Hands on the calls of hooks in a worker."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        #: Earlier warnings are told to every plugin that comes later.
        self.begun = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if not self.begun:
            return
        text = f"{warning_message.filename}:{warning_message.lineno}: {warning_message.category.__name__}: "
        about = {"when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", (text + str(warning_message.message), about)))


def _work(session: pytest.Session, number: int, connection: Connection) -> NoReturn:
    """Run tests in this process, which is the worker's own, until none is left."""
    code = 1
    try:
        _prepare(session.config, number)
        teller = _Teller(session.config, connection)
        session.config.pluginmanager.register(teller)
        teller.begun = True
        _run_tests(session, connection)
        # Errors of finalizers that no test has been told of.
        session.config.hook.pytest_unconfigure(config=session.config)
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run_tests(session: pytest.Session, connection: Connection) -> None:
    def following() -> int | None:
        connection.send(("next", None))
        return connection.recv()

    # A test is torn down as far as the next one does not need it.
    test, then = following(), None
    while test is not None and not (session.shouldfail or session.shouldstop):
        then = following()
        nextitem = None if then is None else session.items[then]
        session.config.hook.pytest_runtest_protocol(item=session.items[test], nextitem=nextitem)
        connection.send(("finished", None))
        test = then


def _prepare(config: pytest.Config, number: int) -> None:
    """Have this process write to no file that others write to."""
    os.environ[VARIABLE] = str(number)
    # Plugins that write files do so in the process that collects.
    config.workerinput = {"workerid": str(number)}  # type: ignore[attr-defined]
    # The files in which output is captured: of these a forked process would share even the position.
    capturing = config.pluginmanager.get_plugin("capturemanager")
    if capturing is not None:
        capturing.stop_global_capturing()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.close(silent)
    if capturing is not None:
        capturing.start_global_capturing()
        capturing.suspend_global_capture()
    temporary = config._tmp_path_factory  # type: ignore[attr-defined]
    temporary._basetemp = temporary.getbasetemp() / f"worker-{number}"
    temporary._basetemp.mkdir(mode=0o700, exist_ok=True)
