"""Wrong inputs and ends of `chat`, `generate`, `export` and `merge`: a sentence with its remedy, nothing half done."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import chat_models
import faults
import pytest
import torch
from commands import command, listing, words_of
from gguf_models import write_adapters, write_model
from safetensors.torch import load_file, save_file
from test_wrong_inputs import refusal

from memascend.cli.main import BAD_INPUT, FAILED, main
from memascend.common import outputs
from memascend.errors import OutputError, system_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def room(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", "qwen2")
    (tmp_path / "prompts.txt").write_text("see\nrows\nthe drive\n")
    (tmp_path / "text.txt").write_text("a b c " * 50)
    return tmp_path


def generate(room: Path, model: str = "model", prompts: str = "prompts.txt", *others: str) -> list[str]:
    words = ["generate", str(room / model), "--prompts", str(room / prompts), "--max-new-tokens", "4"]
    return [*words, "--store", str(room), *others]


def stores(room: Path, task: str = "sft") -> Path:
    """Return the store of a run of a chat model."""
    chat_models.folder_of(room / "chat")
    data = room / "text.txt"
    if task == "reward":
        data = room / "pairs.jsonl"
        pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
        data.write_text("".join(json.dumps(pair) + "\n" for _ in range(4)))
    words = words_of(room / "chat", room / "trained", room / "kept", data=data, task=task, dtype="float32")
    assert main([*words, "--keep-store"]) == 0
    return room / "kept"


def damaged(path: Path) -> None:
    """Make a weight of a file no number."""
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if tensors[name].ndim == 2)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, path, {"format": "pt"})


# ---- the source -----------------------------------------------------------------------------------------------


def test_a_second_model_is_not_left_out_unasked(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = refusal(capfd, ["chat", str(room / "model"), str(room / "other"), "--store", str(room)])
    assert f"{room / 'model'} is no store: leave out {room / 'other'}" in told


def test_a_store_of_another_kind_of_model_is_named(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    store = stores(room, "reward")
    capfd.readouterr()
    told = refusal(capfd, generate(room, "kept"))
    assert f"{store} holds a LlamaForSequenceClassification, which is no causal language model" in told
    told = refusal(capfd, ["export", str(store), "--out", str(room / "out"), "--format", "gguf"])
    assert told.startswith(f"{store} holds a LlamaForSequenceClassification") and "partial" not in told


@pytest.mark.parametrize("name", ["answers", "answers/model.gguf"])
def test_a_file_of_llama_cpp_is_named(room: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    (room / "answers").mkdir()
    (room / "answers" / "model.gguf").touch()
    assert f"llama-cli -m {room}/answers/model.gguf" in refusal(capfd, generate(room, name))


def test_a_file_in_the_place_of_a_directory(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "it is a file; give the directory of a store" in refusal(capfd, generate(room, "prompts.txt"))
    words = ["chat", str(room / "model"), "--store", str(room / "text.txt")]
    assert f"--store {room / 'text.txt'}: File exists" in refusal(capfd, words)


@pytest.mark.root
def test_a_directory_of_another_user(room: Path) -> None:
    os.chmod(room / "model", 0o700)
    words = ["export", str(room / "model"), "--out", str(room / "out")]
    with faults.Child(room, command, words, become_nobody) as child:
        ended = child.wait()
    assert ended.code == BAD_INPUT and "Errno" not in ended.err, ended.err
    assert "this user may not" in ended.err


def become_nobody() -> None:
    os.setuid(65534)


@pytest.mark.parametrize("verb", ["chat", "generate", "export"])
def test_a_tokenizer_of_another_model(room: Path, verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its tokens were looked up beyond the embedding, or it was exported without a word."""
    store = stores(room)
    capfd.readouterr()
    words = {
        "chat": ["chat", str(store), "--store", str(room)],
        "generate": generate(room, "kept"),
        "export": ["export", str(store), "--out", str(room / "out")],
    }[verb]
    words += ["--tokenizer", str(room / "model")]
    if verb == "chat":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO("see\n"))
            assert main(words) == 0
        told = capfd.readouterr().err
    else:
        told = refusal(capfd, words)
    assert "the model's vocabulary ends at 127" in told
    assert not (room / "out").exists()


def test_a_tokenizer_that_cannot_be_loaded_is_not_exported(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = stores(room)
    capfd.readouterr()
    (room / "model" / "tokenizer.json").write_text("{")
    words = ["export", str(store), "--out", str(room / "out"), "--tokenizer", str(room / "model")]
    assert f"{room / 'model'}: its tokenizer cannot be loaded" in refusal(capfd, words)
    assert not (room / "out").exists()


# ---- values that are no numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_model_that_gives_no_numbers_does_not_answer(
    room: Path, temperature: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged(room / "model" / "model.safetensors")
    told = refusal(capfd, generate(room, "model", "prompts.txt", "--temperature", temperature))
    assert "the model gives no numbers for the next token (NaN)" in told


@pytest.mark.parametrize("dtype", ["float32", "q8_0"])
def test_weights_that_are_no_numbers_are_not_exported(
    room: Path, dtype: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    damaged(room / "model" / "model.safetensors")
    words = ["export", str(room / "model"), "--out", str(room / "out"), "--format", "gguf", "--dtype", dtype]
    assert "has weights that are infinite or no numbers" in refusal(capfd, words)
    assert not (room / "out").exists()


@pytest.mark.parametrize("what", ["weights", "scale", "another model"])
def test_adapters_that_would_spoil_a_model(room: Path, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    shutil.rmtree(room / "model")
    made, _ = write_model(room / "model", "qwen2")
    write_adapters(made, room / "model", room / "adapters")
    file = room / "adapters" / "adapter_config.json"
    config = json.loads(file.read_text())
    if what == "weights":
        damaged(room / "adapters" / "adapter_model.safetensors")
        expected = "holds weights that are infinite or no numbers"
    elif what == "scale":
        config["lora_alpha"] = float("nan")
        expected = "(lora_alpha) is no finite number"
    else:
        from transformers import LlamaForSequenceClassification

        chat_models.folder_of(room / "classes", LlamaForSequenceClassification)
        config |= {"base_model_name_or_path": str(room / "classes"), "task_type": "CAUSAL_LM"}
        expected = "they are of a causal language model, and the model is a LlamaForSequenceClassification"
    file.write_text(json.dumps(config))
    assert expected in refusal(capfd, ["merge", str(room / "adapters"), "--out", str(room / "out")])
    assert not (room / "out").exists()


def test_a_pointer_of_git_lfs_is_named(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (room / "model" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    assert "run `git lfs pull` in its directory" in refusal(capfd, generate(room))


# ---- prompts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("p.txt", b"caf\xe9\n", "cannot be read as text in UTF-8"),
        ("p.jsonl", b'{"prompt": "\\ud800"}\n', "p.jsonl, line 1 has half of a character"),
        ("p.jsonl", b"[" * 100_000 + b"\n", 'p.jsonl, line 1: neither {"prompt": "..."}'),
        ("p.json", b'[{"prompt": "see"}]\n', "is a table, whose lines are no prompts"),
        ("p.csv", b"prompt\nsee\n", "is a table, whose lines are no prompts"),
        ("p.txt", b"x" * 2000 + b"\n", "the model's 256 positions: shorten it\n"),
    ],
)
def test_prompts_that_are_refused(
    room: Path, name: str, content: bytes, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (room / name).write_bytes(content)
    assert problem in refusal(capfd, generate(room, "model", name))


@pytest.mark.parametrize("name", ["p.jsonl", "p.JSONL", "p.txt"])
def test_what_prompts_hold(room: Path, name: str) -> None:
    """A mark of the byte order is no part of a text, and only a line feed ends a line."""
    text = "see\u2028rows\x0cthe drive"
    line = text if name == "p.txt" else json.dumps({"prompt": text}, ensure_ascii=False)
    (room / name).write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n")
    assert main(generate(room, "model", name, "--out", str(room / "a.jsonl"))) == 0
    (answer,) = (room / "a.jsonl").read_text().split("\n")[:-1]
    assert json.loads(answer)["messages"] == [{"role": "user", "content": text}]


def test_a_line_that_is_no_text_does_not_end_a_conversation(
    room: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for lines, told in (
        (b"caf\xe9\nsee\n", "no text in this terminal's encoding"),
        (b"see\n" * 60 + b"\n", "--context"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
        words = ["--max-new-tokens", "4", "--temperature", "0", "--context", "60", "--store", str(room)]
        assert main(["chat", str(room / "model"), *words]) == 0
        out, err = capfd.readouterr()
        assert told in err and out.strip(), err
    assert "GFLOP/s" not in err, "no option of this command changes the type of the weights"


def test_a_closed_standard_input(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", str(room / "model"), "--store", str(room)]) == 0


# ---- the output -----------------------------------------------------------------------------------------------


class _Gone(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, "standard output"), (errno.EPIPE, "the reader of this command's output")]
)
def test_a_standard_output_that_takes_nothing(
    room: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, expected: str
) -> None:
    monkeypatch.setattr("sys.stdout", _Gone(number))
    assert main(generate(room)) == FAILED
    told = capfd.readouterr().err.splitlines()[-1]
    assert expected in told and "Errno" not in told


def test_errors_of_the_system_have_a_remedy() -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "a/b")
    assert system_line(error) == (
        "a/b: Permission denied (this user may not: change its permissions, or choose another place)"
    )
    assert system_line(OSError("other")) == "other"
    assert system_line(OSError(errno.EIO, "Input/output error"), "x") == "x: Input/output error"


def test_the_path_of_a_gguf_file_may_be_no_text(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    for name in ("my model", "model\udcff"):
        out = room / name
        assert main(["export", str(room / "model"), "--out", str(out), "--format", "gguf"]) == 0
        assert (out / "model.gguf").is_file()
    assert f"llama-cli -m '{room}/my model/model.gguf'" in capfd.readouterr().out


@pytest.mark.parametrize("path", ["no/out", "text.txt/out"])
def test_a_folder_that_is_not_there(room: Path, path: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(room / "model"), "--format", "gguf", "--out", str(room / path)]
    told = refusal(capfd, words)
    assert "or choose another place" in told or "give a path below a directory" in told
    assert f"--out {room / path} cannot be written: " in refusal(
        capfd, generate(room, "model", "prompts.txt", "--out", str(room / path))
    )


@pytest.mark.root
def test_drives_without_room(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with faults.mounted("tmpfs", 1 << 20, room / "drive") as drive:
        drive.fill()
        words = ["chat", str(room / "model"), "--base-bits", "4", "--store", str(drive.path)]
        assert f"{drive.path} has no room for a copy of the weights" in refusal(capfd, words)
        out = drive.path / "a.jsonl"
        told = refusal(capfd, generate(room, "model", "prompts.txt", "--out", str(out)))
        assert f"cannot write --out {out}.partial: No space left on device (free space there" in told
        told = refusal(capfd, ["export", str(room / "model"), "--format", "gguf", "--out", str(drive.path / "out")])
        assert f"cannot write {drive.path / 'out'}: No space left on device (free space there" in told
        assert [path.name for path in drive.path.iterdir()] == ["ballast"]


@pytest.mark.root
def test_a_store_for_a_copy_that_cannot_be_written(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.ExitStack() as cleanup:
        faults.mount(["-o", "bind,ro", str(room)], room.parent / f"{room.name} read only", cleanup)
        place = room.parent / f"{room.name} read only"
        told = refusal(capfd, ["chat", str(room / "model"), "--store", str(place)])
        assert f"--store {place}: Read-only file system" in told and "--out" not in told
    place.rmdir()


def test_an_output_is_written_by_one_process(room: Path) -> None:
    with outputs.workspace(room / "out"), pytest.raises(OutputError, match=f"written by process {os.getpid()}"):
        outputs.workspace(room / "out").__enter__()
    with outputs.workspace(room / "out"):
        pass


def until(condition: Callable[[], Any], child: faults.Child) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert child.alive() and time.monotonic() < end, child.told()
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_answers_that_are_not_all_there_are_under_no_whole_name(room: Path, number: signal.Signals) -> None:
    (room / "prompts.txt").write_text("see\nrows\n" * 200)
    words = [*generate(room), "--batch-size", "2", "--temperature", "0", "--out", str(room / "a.jsonl")]
    partial = room / "a.jsonl.partial"
    with faults.Child(room, command, words) as child:
        until(lambda: partial.exists() and partial.read_bytes().count(b"\n") > 2, child)
        with faults.Child(room, command, words) as other:
            ended = other.wait(120)
        assert ended.code == BAD_INPUT and "is being written by another process" in ended.err, ended.err
        os.kill(child.pid, number)
        ended = child.wait(120)
    assert ended.code == (-number if number == signal.SIGKILL else 128 + number), ended.err
    assert not (room / "a.jsonl").exists() and partial.read_bytes().count(b"\n") > 2
    if number != signal.SIGKILL:
        assert f"of 400 answers are in {partial}" in ended.err
        assert not list(room.glob(".answers*"))
    (room / "prompts.txt").write_text("see\n")
    assert main(words) == 0  # The same command begins anew.
    assert (room / "a.jsonl").read_text().count("\n") == 1 and not partial.exists()


def test_an_export_that_is_terminated_leaves_nothing(room: Path) -> None:
    pytest.importorskip("gguf")
    before = listing(room)
    words = ["export", str(room / "model"), "--out", str(room / "out"), "--format", "gguf"]
    with faults.Child(room, slow_export, words) as child:
        until(lambda: list(room.glob(".out.partial-*/finished")), child)
        os.kill(child.pid, signal.SIGTERM)
        ended = child.wait(120)
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert listing(room) == before
    assert main(words) == 0


def slow_export(pipe: Any, words: list[str]) -> None:
    """Run the command, whose every piece of a tensor takes a while."""
    from memascend.formats.gguf import file

    check = file._check_values

    def slow(name: str, piece: torch.Tensor, in_float16: bool) -> None:
        time.sleep(0.1)
        check(name, piece, in_float16)

    file._check_values = slow
    command(pipe, words)
