"""`memascend demo` that is ended by Ctrl-C: its messages are true. The model is tiny; its name is the demo's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import forked
import pytest
import tiny_models
from transformers import AutoModelForCausalLM

from memascend.cli.main import BAD_INPUT, main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=64)


def steps_were_taken(cache: Path) -> bool:
    try:
        return any(file.read_bytes().count(b"\n") > 2 for file in cache.glob("**/metrics.jsonl"))
    except FileNotFoundError:  # a temporary directory that was removed meanwhile
        return False


def interrupted(cache: Path, model_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the demo until it has taken two steps, then send SIGINT, as Ctrl-C does."""
    shutil.copytree(model_dir, cache / "memascend" / "random-llama-100M")
    words = ["demo", "--random", "--steps", "100000", "--seq-len", "32", "--dtype", "float32", *more]
    process = forked.Program(
        ["-P", "-m", "memascend", *words],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        cwd=cache,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 240
        while not steps_were_taken(cache):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the demo did not begin to train"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_a_store_that_cannot_be_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["demo", "--random", "--store", str(tmp_path / "file" / "store")]) == BAD_INPUT
    assert "file/store: Not a directory: give another directory" in capfd.readouterr().err


def test_ctrl_c_says_that_nothing_was_kept(tmp_path: Path, model_dir: Path) -> None:
    done = interrupted(tmp_path, model_dir)
    assert done.returncode == 130, done.stderr
    assert "nothing of it was kept" in done.stdout
    assert "--resume" not in done.stderr + done.stdout, "the store was temporary"
    assert "writing the model" not in done.stderr, "the model is not kept either"
    assert [path.name for path in (tmp_path / "memascend").iterdir()] == ["random-llama-100M"]


def test_ctrl_c_says_where_the_model_is_that_was_kept(tmp_path: Path, model_dir: Path) -> None:
    done = interrupted(tmp_path, model_dir, "--out", "tuned")
    assert done.returncode == 130, done.stderr
    assert "tuned holds the model after step" in done.stdout
    assert "nothing of it was kept" not in done.stdout
    assert "--resume" not in done.stderr + done.stdout, "the store was temporary"
    AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
