"""The instruction set of the kernels can be chosen, or the choice is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys


def start(name: str) -> subprocess.CompletedProcess[str]:
    code = "from memascend._memascend import instruction_set; print(instruction_set())"
    environment = {**os.environ, "MEMASCEND_ISA": name}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_a_named_instruction_set_is_used() -> None:
    done = start("baseline")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "baseline"


def test_an_unknown_instruction_set_is_refused() -> None:
    done = start("avx9")
    assert done.returncode != 0
    assert "MEMASCEND_ISA=avx9: unknown instruction set: use one of avx512, avx2, baseline" in done.stderr
