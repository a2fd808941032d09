"""Forked programs run as `python` runs them, and find slow modules imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import faults
import forked
import psutil
import pytest
import requirements

requirements.package("transformers")

HEAVY = ("torch._dynamo", "transformers.trainer", "memascend.cli.finetune", "rank_programs", "launched_programs")
MISSING = f"import sys; print([name for name in {HEAVY} if name not in sys.modules])"
pytestmark = pytest.mark.skipif(forked.fresh(), reason="MEMASCEND_FRESH, or a device: no program is forked")


def show(_pipe: Any, code: str) -> None:
    exec(code)


def test_what_takes_seconds_is_imported(tmp_path: Path) -> None:
    assert forked.run(["-c", MISSING]).stdout == "[]\n"
    with faults.Child(tmp_path, show, MISSING) as child:
        assert child.wait(120).out == "[]\n"


#: Words of a program, which is run by both.
PROGRAMS = {
    "code": ["-c", "import sys; print(sys.argv, __name__, sys.stdin.read())", "-a", "b"],
    "file": ["{folder}/program.py", "-a"],
    "module": ["-m", "program", "a"],
    "safe path": ["-P", "-c", "import program"],
    "exit code": ["-c", "raise SystemExit(7)"],
    "told": ["-c", "raise SystemExit('told')"],
    "killed": ["-c", "import os; print('gone'); os.kill(os.getpid(), 9)"],
    "failed": [
        "-c",
        "import atexit, sys; atexit.register(lambda: print(repr(getattr(sys, 'last_exc', sys.last_value)))); 1 / 0",
    ],
    "interrupted": ["-c", "import signal; signal.raise_signal(signal.SIGINT)"],
    "at the end": [
        "-c",
        "import atexit, threading, time; atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('first'))).start()",
    ],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_ends_as_python_does(name: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys\nprint(sys.argv, __name__, __file__, sys.path[0], os.getcwd(), os.environ['WORD'])\n"
        "print('error', file=sys.stderr)"
    )
    words = [word.format(folder=tmp_path) if word.startswith("{") else word for word in PROGRAMS[name]]
    options: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"WORD": name}, "input": "given", "timeout": 120}
    done = forked.run(words, **options)
    expected = subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert done.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


#: Tells the number of its process; ends at SIGTERM by a way of its own.
WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("how", ["asked", "killed", "killed alone"])
def test_signals_reach_it(how: str) -> None:
    with forked.Program(["-c", WAITS], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        number = int(program.stdout.readline())
        if how == "asked":
            program.terminate()
            assert program.wait(60) == 5
        elif how == "killed":
            program.kill()
            assert program.returncode == -signal.SIGKILL
        else:
            os.kill(program.pid, signal.SIGKILL)
            assert program.stdout.read() == ""
            return  # the program may live for a moment more
    assert not Path(f"/proc/{number}").exists()


def test_both_ends_at_once() -> None:
    """The server finds, in one look, that a program has ended and that the process that waited for it has too."""
    code = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(100)"
    with forked.Program(["-c", code], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        number, server = map(int, program.stdout.readline().split())
        os.kill(server, signal.SIGSTOP)
        try:
            os.kill(number, signal.SIGKILL)
            while psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            os.kill(program.pid, signal.SIGKILL)
            program.wait(60)
        finally:
            os.kill(server, signal.SIGCONT)
    assert forked.run(["-c", "print('serves')"], timeout=120).stdout == "serves\n"


def test_each_has_random_numbers_of_its_own() -> None:
    code = "import numpy, random, uuid; print(numpy.random.random(), random.random(), uuid.uuid4())"
    first, second = (forked.run(["-c", code]).stdout.split() for _ in range(2))
    assert len(first) == 3 and not set(first) & set(second)
