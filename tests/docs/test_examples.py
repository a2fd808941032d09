"""The programs of examples/ run as a reader would run them: without arguments, offline, on tiny models."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked
import pytest
import requirements
from simulated_device import Accesses, SimulatedDevice

from memascend.cli.arguments import parser

if TYPE_CHECKING:
    import fake_cuda

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.name for kind in ("*.py", "*.sh") for path in EXAMPLES.glob(kind))


def run(name: str) -> str:
    """Run an example as a program, and return its output."""
    command = ["sh" if name.endswith(".sh") else forked.python(), str(EXAMPLES / name)]
    # The command is that beside the interpreter.
    path = os.pathsep.join([os.path.dirname(forked.python()), os.environ["PATH"]])
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)$", output, flags=re.MULTILINE)]


def assert_learned(output: str) -> None:
    assert len(losses(output)) == 8
    assert losses(output)[-1] < losses(output)[0]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an example find its neighbours, and no arguments, in this process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["example"])


@pytest.mark.usefixtures("program")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["train_loop.py", "lora.py", "encoder_own_loss.py"])
def test_it_learns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "lora.py":
        requirements.package("peft")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert_learned(capsys.readouterr().out)


def test_a_killed_run_goes_on_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # The process that it starts anew has PyTorch's own products, and so has to have the program.
    monkeypatch.setenv("MEMASCEND_FRESH", "1")
    output = run("resume_after_kill.py")
    # Commits run beside the next step: the third's may not have ended when the fourth is killed.
    # Without the first line, something else has killed it (a lack of memory), after whatever step.
    assert "killed in step 4" in output and "exit code -9" in output, output
    assert re.search(r"^resumed after step [23]$", output, flags=re.MULTILINE), output
    assert "the same, bit for bit" in output, output


@pytest.mark.usefixtures("program")
def test_the_gpu_run_on_a_simulated_device(fake: fake_cuda.Fake, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_run = importlib.import_module("gpu_run")
    with Accesses(fake):
        gpu_run.main(SimulatedDevice())
    output = capsys.readouterr().out
    assert_learned(output)
    assert "MB to the device" in output


@pytest.mark.gpu
def test_the_gpu_run() -> None:
    assert_learned(run("gpu_run.py"))


def test_the_command_line() -> None:
    output = run("command_line.sh")
    told = ("Written by a run of 4 steps", "4 of 4 steps", "step 4, generation", "everything is as it was written")
    assert [text for text in told if text not in output] == []
    assert "report.html: open it" in output and "the model after step 4" in output


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells of code run in order; an installation is left out, and commands go through the command's parser."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "finetune.ipynb").read_text())
    assert notebook["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "clear the outputs"
    names: dict[str, Any] = {"__name__": "__main__"}
    commands = []
    for number, cell in enumerate(cells):
        if cell.startswith("!"):
            words = shlex.split(cell.removeprefix("!").format(**names))
            commands.append(parser().parse_args(words[1:]).command)
        elif not cell.startswith("%pip install"):
            exec(compile(cell, f"cell {number}", "exec"), names)
    assert commands == ["plan"]
    assert names["losses"][-1] < names["losses"][0] and len(names["losses"]) == names["STEPS"]
    assert f"resumed after step {names['STEPS']}" in capsys.readouterr().out
    assert (tmp_path / "tuned" / "model.safetensors").is_file()


def test_the_image_runs_the_command_as_an_ordinary_user() -> None:
    instructions = [
        line.split(maxsplit=1)
        for line in (EXAMPLES.parent / "Dockerfile").read_text().splitlines()
        if re.match(r"[A-Z]+ ", line)
    ]
    last = dict(instructions)
    assert last["USER"] == "memascend" and last["ENTRYPOINT"] == '["memascend"]'
    # Commands after the user's change run as that user.
    assert [name for name, _ in instructions].index("USER") > max(
        number for number, (name, _) in enumerate(instructions) if name == "RUN"
    )


def test_the_image_is_built_from_the_sources_of_the_wheel() -> None:
    """Those that the Makefile's own wheel is built from, and nothing that .dockerignore leaves out."""
    root = EXAMPLES.parent
    lines = (root / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if re.match(r"COPY (?!--from)", line) for name in line.split()[1:-1]}
    made = re.search(
        r"^SOURCES := (.*?)\\\n +\$\(shell find (\S+) (\S+) ", (root / "Makefile").read_text(), re.MULTILINE
    )
    assert made is not None
    sources = {*re.sub(r"\$\(wildcard (\S+)\)", r"\1", made[1]).split(), made[2], made[3]}
    assert copied == sources and all((root / name).exists() for name in copied)
    ignored = (root / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*" and {line[1:] for line in ignored if line.startswith("!")} == copied
    stages = [line.split() for line in lines if line.startswith("FROM ")]
    assert [stage[-1] for stage in stages[:-1]] == ["wheel"] and "COPY --from=wheel" in "\n".join(lines)


def test_every_example_is_short_and_run() -> None:
    assert len(NAMES) == 6
    source = Path(__file__).read_text()
    for name in NAMES:
        assert len((EXAMPLES / name).read_text().splitlines()) <= 60, name
        assert f'"{name}"' in source
