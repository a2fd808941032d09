"""The imports of the command: help, pages and stores are shown without PyTorch, which takes seconds to import."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import metrics_file
import torch

import memascend
from memascend.library import __all__ as of_library

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = ("torch", "transformers", "numpy", "yaml")
#: Runs commands in one process, and names the heavy packages that it has imported after each.
PROGRAM = f"""
import contextlib, io, json, sys
from memascend.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    print(code, *words, *(name for name in {HEAVY} if name in sys.modules), sep="|")
"""


def test_help_pages_and_stores_do_without_pytorch(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    memascend.offload(model, store=tmp_path / "store", host_memory="64MiB", keep_store=True)
    optimizer = memascend.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    memascend.close(model)
    metrics_file.usual(tmp_path / "metrics.jsonl")
    store = str(tmp_path / "store")
    commands = [
        ["--help"],
        *([name, "--help"] for name in ("finetune", "plan", "inspect", "report", "chat", "doctor")),
        ["report", str(tmp_path / "metrics.jsonl"), "--out", str(tmp_path / "page.html")],
        ["inspect", store],
        ["inspect", store, "--json"],
        ["verify", store],
        ["checkpoints", store],
    ]
    done = subprocess.run(  # Of its own: this process has imported PyTorch.
        [sys.executable, "-P", "-c", PROGRAM, str(commands).replace("'", '"')],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["|".join(["0", *words]) for words in commands], done.stderr


def test_all_public_names_are_there() -> None:
    assert all(hasattr(memascend, name) for name in memascend.__all__)
    eager = {name for name in memascend.__all__ if name not in {*of_library, "overflow"}}
    assert all(name.endswith("Error") or name.endswith("_size") for name in eager)
    assert not hasattr(memascend, "no_such_name")
    assert set(memascend.__all__) <= set(dir(memascend))
