"""The tokenizer of a run: as transformers loads it, or bytes on purpose; never bytes unasked."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from datetime import datetime
from pathlib import Path

import pytest
import tiny_models
from commands import in_memory, words_of
from test_records import PLAIN, TALK, lines, write_tokenizer
from transformers import PreTrainedTokenizerFast

from memascend import CheckpointError
from memascend.cli import main
from memascend.cli.data import ByteTokenizer, load_tokenizer
from memascend.cli.data import chat as chat_module
from memascend.cli.data.chat import ChatError
from memascend.cli.data.records import Chat
from memascend.formats.side_files import copy_side_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer", PLAIN)
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "bert", "t5"])
@pytest.mark.parametrize(
    "names", [{}, *({"tokenizer.json": name} for name in ("tekken.json", "sentencepiece.bpe.model", "tiktoken.model"))]
)
def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, folder: Path, kind: str, names: dict[str, str]) -> None:
    """Of some kinds transformers makes a tokenizer without a token where it finds no file."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": kind}))
    for name, other in names.items():
        shutil.copyfile(folder / name, model / other)
    with pytest.raises(CheckpointError, match=r"tokenizer.*give --tokenizer DIR with its files, or --bytes") as caught:
        load_tokenizer(model, 1000)
    assert str(model) in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(load_tokenizer(model, 1000, as_bytes=True), ByteTokenizer)


def test_the_tokenizer_of_another_directory_goes_with_the_model(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models.llama_directory(tmp_path, hidden=64, layers=1)
    (model / "vocab.json").write_text("{}")  # of the tokenizer that is not taken
    words = in_memory(words_of(model, tmp_path / "out", tmp_path / "store", steps=1))
    assert main.main(words) == main.BAD_INPUT
    assert "its tokenizer cannot be loaded" in capfd.readouterr().err
    assert main.main([*words, "--tokenizer", str(folder)]) == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    } <= written and "vocab.json" not in written
    shutil.rmtree(tmp_path / "out")
    capfd.readouterr()
    assert main.main([*words, "--bytes"]) == 0
    assert "training on the bytes of the text, one token each" in capfd.readouterr().err


def test_files_beside_the_tokenizer_stay_where_they_are(tmp_path: Path, folder: Path) -> None:
    for name in ("api_keys.txt", "notes.json", "secret.jinja"):
        (folder / name).write_text("{}")
    (folder / "sentencepiece.bpe.model").write_bytes(b"m")
    (tmp_path / "out").mkdir()
    copy_side_files(folder, tmp_path / "out", lambda line: None)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("chat_template.jinja", "sentencepiece.bpe.model", "tokenizer.json", "tokenizer_config.json")
    }


DATED = "<|im_start|>{{ strftime_now('%d %b %Y, %H:%M:%S.%f') }}\n" + PLAIN


def test_a_template_writes_the_day_on_which_the_run_began(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(folder, DATED)
    chat = load_tokenizer(folder, 258, clock=datetime(2024, 2, 29, 23, 59, 59, 7)).chat
    assert chat is not None
    ids, _ = chat.encode(Chat(TALK), loss_on_all=False)  # by prefixes, and each asks for the time
    text = PreTrainedTokenizerFast.from_pretrained(folder).decode(ids)
    assert text.startswith("<|im_start|>29 Feb 2024, 23:59:59.000007\n<|im_start|>user\n")
    model = tiny_models.llama_directory(tmp_path, hidden=64, layers=1)
    words = words_of(model, tmp_path / "out", tmp_path / "store", data=lines(tmp_path, *[{"messages": TALK}] * 4))
    words += ["--tokenizer", str(folder), "--keep-store", "--no-packing", "--durability", "step", "--seq-len", "128"]
    assert main.main(words) == 0
    shutil.rmtree(tmp_path / "out")
    assert main.main([*words, "--resume", "--change", "--steps", "3"]) == 0, capfd.readouterr().err


HARMFUL = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "did not render it within 1 s",
    "{{ 'a' * 4000000000 }}": "takes more memory than any conversation needs",
    "{{ 'a' * 20000000 }}": "makes 20,000,000 characters of it",
    "{% generation %}{{ 9 ** 9 ** 9 }}{% endgeneration %}": "takes a power",
}


@pytest.mark.parametrize("template", HARMFUL)
def test_templates_are_bounded_in_time_and_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    if "render" in HARMFUL[template]:
        monkeypatch.setattr(chat_module, "SECONDS_MAX", 1.0)
    write_tokenizer(folder, template)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    with pytest.raises((ChatError, CheckpointError), match=HARMFUL[template]):
        chat = load_tokenizer(folder, 258).chat
        assert chat is not None
        chat.encode(Chat(TALK), loss_on_all=True)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before
