"""Files beside the weights: copied to --out, but not from anywhere that a link may lead to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import tiny_models

from memascend.cli import main
from memascend.cli.errors import note
from memascend.formats.side_files import copy_side_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "id_rsa"
    file.write_text("precious")
    return file


def copied(model_dir: Path, out: Path) -> dict[str, str]:
    out.mkdir(exist_ok=True)
    copy_side_files(model_dir, out, note)
    assert not any(file.is_symlink() for file in out.iterdir())
    return {file.name: file.read_text() for file in out.iterdir()}


def test_links_out_of_a_model_are_not_followed(tmp_path: Path, secret: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    (model / "original").mkdir(parents=True)
    (model / "vocab.txt").write_text("words")
    (model / "original" / "tokenizer.model").write_text("pieces")
    (model / "tokenizer.model").symlink_to("original/tokenizer.model")
    (model / "merges.txt").symlink_to(secret)
    (model / "tokenizer_extra.json").symlink_to("../id_rsa")
    (model / "chat_template.jinja").symlink_to("merges.txt")
    (tmp_path / "aside").symlink_to(tmp_path)
    (model / "vocab_by.txt").symlink_to("../aside/id_rsa")
    (model / "vocab_gone.txt").symlink_to("nowhere")
    assert copied(model, tmp_path / "out") == {"vocab.txt": "words", "tokenizer.model": "pieces"}
    told = capfd.readouterr().err.splitlines()
    for name in ("merges.txt", "tokenizer_extra.json", "chat_template.jinja", "vocab_by.txt"):
        assert f"memascend: note: {model / name} was not copied: it is a link to {secret}, outside" in "\n".join(told)
    assert len(told) == 4
    # The model's own path may lead through links.
    (tmp_path / "link").symlink_to(model)
    assert copied(tmp_path / "link", tmp_path / "again").keys() == {"vocab.txt", "tokenizer.model"}


def test_links_of_hugging_faces_cache_are_followed(
    tmp_path: Path, secret: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "hub" / "models--someone--model"
    snapshot, blobs = repository / "snapshots" / "0a1b", repository / "blobs"
    for folder in (snapshot, blobs, tmp_path / "hub" / "models--other--model" / "blobs"):
        folder.mkdir(parents=True)
    (blobs / "f00d").write_text("words")
    (tmp_path / "hub" / "models--other--model" / "blobs" / "f00d").write_text("of another")
    (snapshot / "vocab.txt").symlink_to("../../blobs/f00d")
    (snapshot / "vocab_other.txt").symlink_to("../../../models--other--model/blobs/f00d")
    (snapshot / "merges.txt").symlink_to(secret)
    (blobs / "beef").symlink_to(secret)
    (snapshot / "tokenizer_more.json").symlink_to("../../blobs/beef")
    assert copied(snapshot, tmp_path / "out") == {"vocab.txt": "words"}
    assert capfd.readouterr().err.count("was not copied") == 3
    # A model in a subfolder of its repository; what lies beside it there is no file of this model.
    (snapshot / "sub").mkdir()
    (snapshot / "sub" / "vocab.txt").symlink_to("../../../blobs/f00d")
    (snapshot / "sub" / "merges.txt").symlink_to(secret)
    (snapshot / "notes.txt").write_text("of the folder above")
    (snapshot / "sub" / "vocab_above.txt").symlink_to("../notes.txt")
    assert copied(snapshot / "sub", tmp_path / "of sub") == {"vocab.txt": "words"}
    assert capfd.readouterr().err.count("was not copied") == 2
    # The same layout under other names is no cache, so that nothing is taken from beside a model.
    os.rename(repository, tmp_path / "plain")
    assert copied(tmp_path / "plain" / "snapshots" / "0a1b", tmp_path / "again") == {}


def test_a_run_leaves_linked_secrets_out(tmp_path: Path, secret: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_models.llama_directory(tmp_path, hidden=64)
    (model / "merges.txt").symlink_to(secret)
    words = ["finetune", model, "--data", tmp_path / "text.txt", "--in-memory", "--bytes", "--out", tmp_path / "out"]
    assert main.main([*map(str, words), "--steps", "1", "--seq-len", "16"]) == 0, capfd.readouterr().err
    assert "merges.txt was not copied" in capfd.readouterr().err
    assert b"precious" not in b"".join(file.read_bytes() for file in (tmp_path / "out").iterdir())
