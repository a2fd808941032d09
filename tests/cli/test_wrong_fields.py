"""Files beside a model's weights whose fields hold another kind of value: one error names the file and the field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import chat_models
import pytest
from commands import words_of

from memascend.cli.main import BAD_INPUT, main
from memascend.errors import CheckpointError
from memascend.formats.field_kinds import GENERATION, TOKENIZER, check_fields

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    chat_models.folder_of(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a b c " * 50)
    (tmp_path / "prompts.txt").write_text("a b\n")
    return tmp_path / "model"


def change(file: Path, **fields: Any) -> None:
    described = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(described | fields))


def commands(model_dir: Path) -> dict[str, list[str]]:
    """Return the commands that open the model, by name."""
    room = model_dir.parent
    answering = [str(model_dir), "--host-memory", "64MiB", "--store", str(room), "--max-new-tokens", "2"]
    return {
        "finetune": words_of(model_dir, room / "out", room / "store", steps=1),
        "generate": ["generate", *answering, "--prompts", str(room / "prompts.txt")],
        "chat": ["chat", *answering],
    }


def refused(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Return the error of a command that refuses its input."""
    assert main(words) == BAD_INPUT, capfd.readouterr().err
    told = capfd.readouterr().err
    assert told.count("error:") == 1 and "unexpected" not in told, told
    return told.partition("error: ")[2]


@pytest.mark.parametrize("command", ["finetune", "generate", "chat"])
@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("generation_config.json", "eos_token_id", "2"),
        ("generation_config.json", "eos_token_id", [1, "2"]),
        ("generation_config.json", "pad_token_id", {}),
        ("generation_config.json", "temperature", "hot"),
        ("generation_config.json", "max_new_tokens", "many"),
        ("config.json", "eos_token_id", "2"),
        ("config.json", "pad_token_id", [1]),
        ("config.json", "vocab_size", "128"),
        ("config.json", "vocab_size", None),
        ("config.json", "hidden_size", [64]),
        ("config.json", "num_hidden_layers", "2"),
        ("tokenizer_config.json", "eos_token", 5),
        ("tokenizer_config.json", "eos_token", ["a"]),
        ("tokenizer_config.json", "chat_template", 5),
        ("tokenizer_config.json", "model_max_length", "long"),
        ("tokenizer_config.json", "padding_side", 1),
    ],
)
def test_a_field_of_another_kind_is_named(
    model_dir: Path, command: str, file: str, field: str, value: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    change(model_dir / file, **{field: value})
    told = refused(commands(model_dir)[command], capfd)
    assert str(model_dir / file) in told and field in told


def test_null_is_no_value(model_dir: Path) -> None:
    for name, kinds in (("generation_config.json", GENERATION), ("tokenizer_config.json", TOKENIZER)):
        check_fields(dict.fromkeys(kinds), model_dir / name, kinds)
    change(model_dir / "generation_config.json", eos_token_id=None, pad_token_id=None, temperature=None)
    assert main(commands(model_dir)["generate"]) == 0


@pytest.mark.parametrize("value", [[], "text", 5, None])
def test_a_file_without_fields_is_named(model_dir: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json holds no JSON object"):
        check_fields(value, model_dir / "generation_config.json", GENERATION)


def test_an_end_beyond_the_vocabulary_pads_nothing(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(model_dir / "generation_config.json", eos_token_id=[10**9, 95])
    (model_dir.parent / "prompts.txt").write_text("a b\na b c d e f\n")
    assert main(commands(model_dir)["generate"]) == 0, capfd.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_model_without_a_tokenizer_is_no_model_over_bytes(
    model_dir: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model_dir / file).unlink(missing_ok=True)
    words = commands(model_dir)[command]
    assert f"{model_dir} has no tokenizer: give --tokenizer DIR with its files, or --bytes" in refused(words, capfd)
    assert "--bytes needs a vocabulary of 258 tokens, and that of the model has 128" in refused(
        [*words, "--bytes"], capfd
    )
    assert "leave out --bytes or --tokenizer" in refused([*words, "--bytes", "--tokenizer", str(model_dir)], capfd)


@pytest.mark.parametrize("rows", [258, 300])
def test_a_model_over_bytes_answers(tmp_path: Path, rows: int, capfd: pytest.CaptureFixture[str]) -> None:
    """It is known by its vocabulary, or said to be one; `finetune --bytes` says how to talk with it."""
    model = tmp_path / "model"
    chat_models.folder_of(model, vocab_size=rows)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / file).unlink(missing_ok=True)
    (tmp_path / "text.txt").write_text("a b c " * 50)
    (tmp_path / "prompts.txt").write_text("a b\n")
    words = commands(model)
    assert main([*words["finetune"], "--bytes", "--keep-store"]) == 0
    assert f"memascend chat {tmp_path / 'out'} --bytes" in capfd.readouterr().out
    flags = [] if rows == 258 else ["--bytes"]
    for source in ("out", "store"):
        asked = ["generate", str(tmp_path / source), *words["generate"][2:]]
        assert main([*asked, *flags]) == 0, capfd.readouterr().err
        assert json.loads(capfd.readouterr().out)["prompt"] == "a b"
        if flags:
            assert "has no tokenizer" in refused(asked, capfd)
