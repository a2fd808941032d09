"""Ids of the hub in the place of a model directory."""

from __future__ import annotations

import shutil
import time
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
import tiny_models
from commands import in_memory, words_of

from memascend.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REPOSITORY = {
    "config.json": True,
    "model.safetensors": True,
    "tokenizer.json": True,
    "chat_template.jinja": True,
    "pytorch_model.bin": False,
    "modeling.py": False,
    "original/model.safetensors": False,
    "consolidated.safetensors": False,
    "README.md": False,
}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an empty cache of the hub."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def hub(model_dir: Path, asked: list[dict[str, Any]]) -> Callable[..., str]:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append({"id": repo_id, **options})
        return str(model_dir)

    return snapshot_download


def test_a_model_is_downloaded(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model_dir = tiny_models.llama_directory(elsewhere, hidden=64, layers=1)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub(model_dir, asked))
    words = in_memory(words_of(model_dir, elsewhere / "out", elsewhere / "store", steps=1))
    words[1] = "org/small-model_1.0"
    assert main.main(words) == 0
    assert "org/small-model_1.0 is no directory: taking it from the Hugging Face hub" in capfd.readouterr().err
    assert asked[0]["id"] == "org/small-model_1.0"
    taken = [
        name
        for name in REPOSITORY
        if any(fnmatch(name, pattern) for pattern in asked[0]["allow_patterns"])
        and not any(fnmatch(name, pattern) for pattern in asked[0]["ignore_patterns"])
    ]
    assert taken == [name for name, wanted in REPOSITORY.items() if wanted]
    assert main.main(["plan", "org/small-model_1.0", "--json", "--seq-len", "32"]) == 0
    assert asked[1]["allow_patterns"] == ["config.json"]
    # A directory of that name comes first.
    shutil.copytree(model_dir, elsewhere / "cwd" / "org" / "small-model_1.0")
    assert main.main(["plan", "org/small-model_1.0", "--json", "--seq-len", "32"]) == 0 and len(asked) == 2


def test_a_hub_out_of_reach_is_told_soon(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    assert main.main(["plan", "org/model"]) == main.BAD_INPUT
    assert time.monotonic() - began < 20
    told = capfd.readouterr().err
    errors = [line for line in told.splitlines() if line.startswith("memascend: error: ")]
    assert (
        len(errors) == 1
        and "org/model is no directory, and cannot be downloaded from the Hugging Face hub" in errors[0]
    )
    assert "Traceback" not in told


@pytest.mark.parametrize("path", ["/no/such/model", "model", "../org/model", "a/b/c", "./org"])
def test_other_paths_are_no_ids(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub(elsewhere, asked))
    assert main.main(["plan", path]) == main.BAD_INPUT
    assert asked == []
