"""The instruction set of the kernels can be chosen, or the choice is refused by name; results are the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import kernel_digests
import pytest


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


@pytest.mark.core
@pytest.mark.parametrize("name", ["avx512", "avx2", "baseline"])
def test_kernels_return_the_recorded_bits(name: str) -> None:
    environment = {**os.environ, "MEMASCEND_ISA": name}
    command = [sys.executable, "-P", kernel_digests.__file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if f"MEMASCEND_ISA={name}: this processor lacks it" in done.stderr:
        pytest.skip(f"this processor has no {name}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f", {name}: 152 of 152 digests are equal" in done.stdout


def test_a_difference_from_the_record_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (name, digest), *others = json.loads(kernel_digests.RECORD.read_text()).items()
    monkeypatch.setattr(kernel_digests, "digests", lambda: {name: digest[::-1], **dict(others)})
    monkeypatch.setattr(sys, "argv", ["kernel_digests.py"])
    assert kernel_digests.main() == 1
    different, summary = capsys.readouterr().out.splitlines()
    assert different.startswith(f"{name}: {digest[::-1]}, and {digest} in ")
    assert "151 of 152" in summary
