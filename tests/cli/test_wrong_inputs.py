"""Wrong inputs of a new user: each ends in a sentence that names the option or file and a remedy, and makes nothing."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import chat_models
import pytest
import requirements
from commands import words_of

import memascend
from memascend.cli.data.turns import with_texts
from memascend.cli.main import BAD_INPUT, main
from memascend.errors import CheckpointError, StoreError
from memascend.formats.transformers_models import LAYERS_MAX, read_config
from memascend.ranks.locations import paths_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
LABELLED = {"prompt": "1+1=", "completion": "2", "label": True}


def refusal(capfd: pytest.CaptureFixture[str], words: list[str]) -> str:
    """Return the error of a command that refuses its input."""
    assert main(words) == BAD_INPUT, capfd.readouterr().err
    told = capfd.readouterr().err
    assert told.count("error:") == 1 and "unexpected" not in told, told
    return told.partition("error: ")[2]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    chat_models.folder_of(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a b c " * 50)
    return tmp_path / "model"


def run(model_dir: Path, *others: str, **changed: object) -> list[str]:
    room = model_dir.parent
    return [*words_of(model_dir, room / "out", room / "store", **changed), *others]


@pytest.mark.parametrize("flag", ["--steps", "--grad-accum", "--batch-size", "--seq-len", "--seed", "--warmup-steps"])
def test_a_number_that_no_library_takes(model_dir: Path, flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert f"argument {flag}: {10**30} is too large: the most is" in refusal(capfd, run(model_dir, flag, str(10**30)))


@pytest.mark.parametrize("flag", ["--store", "--out", "--data", "--eval"])
def test_an_empty_path_is_not_the_current_directory(
    model_dir: Path, flag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert f"argument {flag}: an empty path names nothing" in refusal(capfd, run(model_dir, flag, ""))


@pytest.mark.parametrize("path", ["/dev/nvme99n1", "/dev/disk/by-id/nothing"])
def test_a_device_that_is_not_there_is_no_directory_in_memory(
    model_dir: Path, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = run(model_dir)
    words[words.index("--store") + 1] = path
    assert "there is no such device" in refusal(capfd, words)
    assert not os.path.exists(path)
    with pytest.raises(StoreError, match="there is no such device"):
        memascend.resume(path)
    assert paths_of(["/dev/shm/a new directory"]) == ["/dev/shm/a new directory"]


def test_more_layers_than_any_model_has(model_dir: Path) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 10**9}))
    with pytest.raises(CheckpointError, match=f"num_hidden_layers is 1,000,000,000, and no .* {LAYERS_MAX:,} layers"):
        read_config(file, model_dir)


def test_a_section_that_the_architecture_has_not(model_dir: Path) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text_config": {"a": 1}}))
    with pytest.raises(CheckpointError, match="a llama model has no text_config: remove it"):
        read_config(file, model_dir)


def test_an_endurance_beyond_all_numbers(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "argument --tbw: '1e300' is not a number above 0, and at most" in refusal(
        capfd, ["plan", str(model_dir), "--tbw", "1e300"]
    )


def test_folders_that_cannot_be_listed_are_named(
    model_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = model_dir.parent / "data"
    data.mkdir()
    list_folder = os.scandir

    def refuse(path: Any) -> Any:
        if path in (data, str(data)):
            raise PermissionError(errno.EACCES, "Permission denied", str(data))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)
    told = refusal(capfd, run(model_dir, data=data))
    assert f"no text in {data}" in told and f"(folders that cannot be listed: Permission denied): {data}" in told


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (None, "missing"),
        (5, "no text"),
        ({"a": 1}, "no text"),
        ([{"type": "text", "text": "a"}, {"type": "image"}], "a list with other parts than text"),
    ],
)
def test_a_content_that_a_template_would_write_as_python_does(
    model_dir: Path, content: object, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = model_dir.parent / "chats.jsonl"
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    expected = f"chats.jsonl, line 1 has turn 1 ('user'), whose content is {kind}: write a text, or leave the"
    assert expected in refusal(capfd, run(model_dir, data=data))
    asked = ["generate", str(model_dir), "--prompts", str(data), "--store", str(model_dir.parent / "store")]
    assert expected in refusal(capfd, asked)


def test_contents_that_templates_take() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    result = {"role": "tool", "content": {"degrees": 3}}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert with_texts([parts, call, result]) == [{"role": "user", "content": "ab"}, call, result]


@pytest.mark.parametrize(
    ("task", "rows", "problem"),
    [
        ("dpo", [], "is empty: give a file with rows"),
        ("dpo", [PAIR, PAIR | {"chosen": None}], "has no chosen in 1 of 2 rows"),
        (
            "dpo",
            [PAIR | {"prompt": 1}],
            "has a prompt that is no text in every row: --task dpo takes texts, or",
        ),
        ("dpo", [PAIR | {"rejected": [1]}], "has a rejected that is no text in every row"),
        ("kto", [LABELLED | {"label": "maybe"}], "has labels of string: --task kto takes true or false"),
        ("kto", [LABELLED | {"label": label} for label in ("yes", 1)], "has labels of several kinds"),
        (
            "reward",
            [PAIR | {"prompt": [{"role": "user", "content": "1+1="}]}],
            "mixes texts and messages (prompt: messages, chosen: text, rejected: text)",
        ),
        ("kto", [LABELLED] * 4, "--task kto: Actual (not effective) batch size must be > 1"),
    ],
)
def test_rows_that_a_trainer_would_end_in_an_error_for(
    model_dir: Path, task: str, rows: list[dict[str, object]], problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    requirements.package("trl", "datasets")
    data = model_dir.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert problem in refusal(capfd, run(model_dir, data=data, task=task))
    assert not list(model_dir.parent.glob("store*/*"))


def test_a_table_without_rows(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    requirements.package("trl", "datasets")
    data = model_dir.parent / "rows.csv"
    data.write_text("text,label\n")
    assert f"--data {data} has no rows" in refusal(capfd, run(model_dir, data=data, task="classify"))


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("beta=lots", "--trainer-options beta=lots is no number, as its default 0.1 is"),
        ("loss_type=zzz", "--task dpo with --trainer-options loss_type=zzz: Unknown loss type: zzz"),
    ],
)
def test_options_that_a_trainer_refuses(
    model_dir: Path, option: str, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    requirements.package("trl", "datasets")
    data = model_dir.parent / "rows.jsonl"
    data.write_text(json.dumps(PAIR) + "\n")
    assert problem in refusal(capfd, run(model_dir, "--trainer-options", option, data=data, task="dpo"))


@pytest.mark.parametrize("kind", [{"a": 1}, [1]])
def test_a_field_of_text_that_holds_another_kind(
    model_dir: Path, kind: object, capfd: pytest.CaptureFixture[str]
) -> None:
    data = model_dir.parent / "rows.jsonl"
    data.write_text(json.dumps({"text": kind}) + "\n")
    told = "an object" if isinstance(kind, dict) else "a list"
    assert f"line 1 has {told} in field 'text', and no text" in refusal(capfd, run(model_dir, data=data))


def test_weights_that_would_repeat_documents_without_end(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = model_dir.parent / "other.txt"
    other.write_text("d e f " * 50)
    words = [*run(model_dir), "--data", str(other), "--weights", "1e9", "1"]
    assert "--weights: 1e+09 is more than 1,000 times 1" in refusal(capfd, words)


@pytest.mark.parametrize(
    "address", ["https://huggingface.co/org/name", "https://huggingface.co/org/name/tree/main", "hf://org/name"]
)
def test_the_address_of_a_model_is_not_its_name(
    model_dir: Path, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = run(model_dir)
    words[1] = address
    assert refusal(capfd, words).endswith("a model of the hub is named without its address: org/name\n")
    assert main(["plan", address, "--host-memory", "64MiB"]) == BAD_INPUT
    assert capfd.readouterr().err.endswith("without its address: org/name\n")
