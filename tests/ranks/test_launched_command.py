"""`memascend finetune` that torchrun starts in two processes: the files and records of one process, told once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bit_equality
import forked
import launching
import pytest
import requirements
import tiny_models
import torch
from commands import in_memory, words_of
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

psutil = requirements.package("psutil")

from memascend.cli import main  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

#: `tests/` is the directory of the tests' own modules.
STEPS = 6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=256, layers=1)
    (model.parent / "eval.txt").write_text(tiny_models.TEXT[::-1])
    return model


def words(model_dir: Path, folder: Path, *flags: str, **changed: Any) -> list[str]:
    options: dict[str, Any] = {"dtype": "float32", "lr": 1e-3, "steps": STEPS, "eval_steps": 2} | changed
    if (model_dir.parent / "eval.txt").is_file():
        options["eval"] = model_dir.parent / "eval.txt"
    else:
        del options["eval_steps"]
    found = words_of(
        model_dir, options.pop("out", folder / "out"), options.pop("store", folder / "store{rank}"), **options
    )
    return [*found, "--keep-store", *flags]


@pytest.fixture(scope="module")
def expected(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of one process that takes as many sequences in a step."""
    folder, threads = tmp_path_factory.mktemp("expected"), torch.get_num_threads()
    torch.set_num_threads(1)
    alone = in_memory(words(model_dir, folder, grad_accum=2))
    assert main.main([word for word in alone if word != "--keep-store"]) == 0
    torch.set_num_threads(threads)
    return folder / "out"


def records(out: Path) -> list[dict[str, Any]]:
    """Return the figures of training in the records of steps and evaluations."""
    kept = ("record", "step", "loss", "grad_norm", "lr", "skipped")
    every = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [
        {name: record[name] for name in kept if name in record}
        for record in every
        if record["record"] in ("step", "eval")
    ]


def assert_same(out: Path, expected: Path) -> None:
    assert (
        bit_equality.difference(load_file(out / "model.safetensors"), load_file(expected / "model.safetensors")) is None
    )
    assert records(out) == records(expected)
    assert {file.name for file in out.iterdir()} == {file.name for file in expected.iterdir()}


def lines_of(text: str, begin: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(begin)]


def finetune(folder: Path, given: list[str], python: str = "") -> subprocess.CompletedProcess[str]:
    return launching.run_launched("torchrun", 2, ["-m", "memascend", *given], folder, python)


def test_two_processes_write_what_one_does(model_dir: Path, expected: Path, tmp_path: Path) -> None:
    done = finetune(tmp_path, words(model_dir, tmp_path), sys.executable)
    assert done.returncode == 0, done.stderr[-5000:]
    assert_same(tmp_path / "out", expected)
    (told,) = lines_of(done.stdout, "wrote ")
    assert f"{STEPS} of {STEPS} steps, the best after step" in told
    assert len(lines_of(done.stdout, "kept the store in")) == 1
    notes = lines_of(done.stderr, "memascend: ")
    assert notes and len(set(notes)) == len(notes)
    assert len(lines_of(done.stderr, f"training {STEPS}/{STEPS}")) == 1
    assert "Traceback" not in done.stderr
    # Beside the output there is nothing but the stores, which go on.
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "home") == ["out", "store0", "store1"]
    first = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["settings"]["processes"] == 2
    again = finetune(tmp_path, words(model_dir, tmp_path, "--resume", "--change", steps=STEPS + 2, out=tmp_path / "x"))
    assert again.returncode == 0, again.stderr[-5000:]
    assert f"{STEPS + 2} of {STEPS + 2} steps" in again.stdout


def ranks_with(home: str) -> list[Any]:
    """Return the processes of a launched run that has this HF_HOME, by rank."""
    found: dict[int, Any] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if variables.get("HF_HOME") == home and "RANK" in variables:
                found[int(variables["RANK"])] = process
    return [found[rank] for rank in sorted(found)]


@contextlib.contextmanager
def training(folder: Path, given: list[str]) -> Iterator[tuple[subprocess.Popen[str], list[Any]]]:
    """Launch a run, and yield the launcher and its processes, by rank, in the midst of the training."""
    metrics = folder / "metrics.jsonl"
    words = ["-m", "memascend", *given]
    (_, *command), environment = launching.command_of("torchrun", 2, words, folder, forked.python())
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with forked.Program(command, env=environment, **pipes) as launcher:
        try:
            end = time.monotonic() + 120
            while not metrics.exists() or metrics.read_text().count('"record": "step"') < 2:
                assert launcher.poll() is None, launcher.communicate()[1][-5000:]
                assert time.monotonic() < end, "the run did not begin"
                time.sleep(0.01)
            yield launcher, ranks_with(environment["HF_HOME"])
        finally:
            if launcher.poll() is None:
                launcher.kill()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_killed_process_ends_all_and_the_run_goes_on(
    victim: int, model_dir: Path, expected: Path, tmp_path: Path
) -> None:
    given = words(model_dir, tmp_path, "--metrics", str(tmp_path / "metrics.jsonl"))
    with training(tmp_path, given) as (launcher, processes):
        forked.kill(processes[victim])
        _, err = launcher.communicate(timeout=120)
    assert launcher.returncode != 0 and not (tmp_path / "out").exists()
    (told,) = lines_of(err, "memascend: error: ")
    assert f"rank {victim} does not answer" in told or "the connection to another rank has failed" in told, told
    done = finetune(tmp_path, [*given, "--resume"])
    assert done.returncode == 0, done.stderr[-5000:]
    (tmp_path / "metrics.jsonl").rename(tmp_path / "out" / "metrics.jsonl")
    assert_same(tmp_path / "out", expected)


def test_a_signal_to_one_process_ends_all_after_the_step(model_dir: Path, expected: Path, tmp_path: Path) -> None:
    given = words(model_dir, tmp_path, "--metrics", str(tmp_path / "metrics.jsonl"), eval_steps=100)
    with training(tmp_path, given) as (launcher, processes):
        processes[1].send_signal(signal.SIGTERM)
        out, err = launcher.communicate(timeout=120)
    assert launcher.returncode != 0
    assert len(lines_of(out, "wrote ")) == 1, err
    (told,) = lines_of(err, "memascend: interrupted: ")
    assert "holds the model after step" in told
    assert "--resume goes on with it" in err
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_step_is_left_out_for_the_loss_of_one_process(model_dir: Path, tmp_path: Path) -> None:
    # A token without values, which only one sequence has.
    model = LlamaForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        model.model.embed_tokens.weight[ord("Z")] = float("nan")
    model.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(tiny_models.TEXT[:150] + "Z" + tiny_models.TEXT[150:400])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options: dict[str, Any] = {"data": text, "on_nan": "skip", "schedule": "constant", "optimizer": "apollo"}
    alone = in_memory(words(tmp_path / "model", tmp_path, grad_accum=2, out=tmp_path / "alone", **options))
    assert main.main([word for word in alone if word != "--keep-store"]) == 0
    torch.set_num_threads(threads)
    done = finetune(tmp_path, words(tmp_path / "model", tmp_path, **options))
    assert done.returncode == 0, done.stderr[-5000:]
    skipped = [record for record in records(tmp_path / "alone") if record.get("skipped")]
    assert 0 < len(skipped) < STEPS
    assert len([line for line in done.stderr.splitlines() if "the loss is nan; skipped" in line]) == len(skipped)
    assert records(tmp_path / "out") == records(tmp_path / "alone")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "alone"))
    assert [name for name, value in first.items() if not torch.equal(_bytes(value), _bytes(second[name]))] == []


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def test_what_is_wrong_is_told_once(model_dir: Path, tmp_path: Path) -> None:
    for changed, flags, said in (
        ({"data": tmp_path / "nothing"}, (), "nothing"),
        ({"store": tmp_path / "store"}, (), "write {rank} for its number, as in --store '/nvme{rank}'"),
        ({"durability": "none"}, (), "leave --durability none out, or --eval"),
        ({}, ("--no-such-flag",), "there is no option --no-such-flag"),
    ):
        done = finetune(tmp_path, words(model_dir, tmp_path, *flags, **changed))
        assert done.returncode != 0
        told = [line for line in done.stderr.splitlines() if said in line]
        assert len(told) == 1, done.stderr[-5000:]
        assert not (tmp_path / "out").exists()


def test_processes_with_other_data_do_not_train(model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text((model_dir.parent / "text.txt").read_text()[::-1])
    processes = []
    for rank, data in enumerate((model_dir.parent / "text.txt", other)):
        environment = forked.variables() | {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": "2",
            "RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(29500 + os.getpid() % 2000),
        }
        command = ["-P", "-m", "memascend", *words(model_dir, tmp_path, data=data)]
        processes.append(forked.Program(command, env=environment, stderr=subprocess.PIPE))
    told = "".join(process.communicate(timeout=120)[1] for process in processes)
    assert [process.returncode for process in processes] == [main.BAD_INPUT] * 2, told[-5000:]
    assert told.count("process 1 has other data or options than process 0: give all of them the same files") == 1
