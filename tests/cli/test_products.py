"""Products of bfloat16 that are kept compiled: the command bounds their number, and with it their memory."""

from __future__ import annotations

import atexit
import os

import pytest
import torch
from faults import run_script

from memascend.cli import main as command

#: Prints by how many bytes a process grows with products of ever other numbers of rows.
PROGRAM = """
import torch
from memascend.hardware.memory_limits import anonymous_memory

weight = torch.randn(512, 256).bfloat16()
torch.nn.functional.linear(torch.randn(600, 256).bfloat16(), weight)
before = anonymous_memory()
for rows in range(1, 193):
    torch.nn.functional.linear(torch.randn(rows, 256).bfloat16(), weight)
print(anonymous_memory() - before)
"""


@pytest.mark.parametrize("given", [None, *command.PRODUCTS_VARIABLES])
def test_the_command_bounds_them_unless_the_user_has(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    for name in command.PRODUCTS_VARIABLES:
        monkeypatch.setenv(name, "7")  # The test puts back what there was.
        if name != given:
            monkeypatch.delenv(name)
    monkeypatch.setattr(command, "main", lambda: 0)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit):
        command.run()
    for name in command.PRODUCTS_VARIABLES:
        assert os.environ[name] == ("7" if name == given else str(command.PRODUCTS_KEPT))


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN does not multiply bfloat16 here")
def test_their_memory_is_bounded() -> None:
    bounded, by_itself = (
        int(run_script(PROGRAM, [], dict.fromkeys(command.PRODUCTS_VARIABLES, kept)))
        for kept in (str(command.PRODUCTS_KEPT), None)
    )
    assert 0 < bounded < by_itself * 0.6
