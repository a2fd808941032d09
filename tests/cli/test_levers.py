"""Options of `memascend finetune` beside the training: its samples, and updates in the backward pass."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import metrics_file
import pytest
import tiny_models
from commands import words_of
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from memascend.cli import main
from memascend.cli.jobs import reporting
from memascend.cli.metrics import records_of
from memascend.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=64)


def test_updates_in_the_backward_pass_have_the_same_bits(
    model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for update in ("forward", "backward"):
        words = words_of(model_dir, tmp_path / update, tmp_path / "store", steps=3, update=update)
        assert main.main([*words, "--max-grad-norm", "0"]) == 0
    ends = [load_file(tmp_path / update / "model.safetensors") for update in ("forward", "backward")]
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    steps = [json.loads(line) for line in (tmp_path / "backward" / "metrics.jsonl").read_text().splitlines()]
    assert [one["grad_norm"] for one in steps if one["record"] == "step"] == [None] * 3
    capfd.readouterr()
    for more in ((), ("--max-grad-norm", "0", "--grad-accum", "2"), ("--max-grad-norm", "0", "--on-nan", "skip")):
        words = words_of(model_dir, tmp_path / "none", tmp_path / "store", update="backward")
        assert main.main([*words, *more]) == main.BAD_INPUT
        assert "--update backward applies gradients as they are made" in capfd.readouterr().err


def test_notices_of_the_training_are_printed_once(
    model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As that accumulated gradients move with each pass, which the first step shows."""
    least = tiny_models.smallest_budget(LlamaForCausalLM.from_pretrained(model_dir, dtype="bfloat16"))
    words = words_of(model_dir, tmp_path / "out", tmp_path / "store", host_memory=least, grad_accum=2)
    assert main.main(words) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "are accumulated before a step" in line]
    assert len(told) == 1 and told[0].startswith("memascend: note: ") and "--micro-batch-size" in told[0]


def test_samples_before_and_after_change_no_bit(
    model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = words_of(model_dir, tmp_path / "plain", tmp_path / "store", durability="step")
    assert main.main(words) == 0
    words = words_of(model_dir, tmp_path / "shown", tmp_path / "store", durability="step", sample="ab")
    capfd.readouterr()
    assert main.main(words) == 0
    out = capfd.readouterr().out
    assert out.index("sample before the training:\n  | ") < out.index("sample after the training:\n  | ")
    assert "memascend chat" in out and "memascend generate" in out
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (
        tmp_path / "shown" / "model.safetensors"
    ).read_bytes()


def test_the_records_of_a_run_that_is_going_on_are_found(model_dir: Path, tmp_path: Path) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    assert main.main([*words_of(model_dir, out, store, durability="step"), "--keep-store"]) == 0
    assert records_of(out) == records_of(store) == out / "metrics.jsonl"
    # As they lie while the run goes on, beside the output to come.
    work = tmp_path / ".out.partial-123-abc"
    (work / "kept").mkdir(parents=True)
    (out / "metrics.jsonl").rename(work / "kept" / "metrics.jsonl")
    assert records_of(out) == records_of(store) == work / "kept" / "metrics.jsonl"
    out.rename(tmp_path / "elsewhere")
    assert records_of(out) == work / "kept" / "metrics.jsonl"
    page = tmp_path / "page.html"
    assert main.main(["report", str(store), "--out", str(page)]) == 0 and page.is_file()
    (work / "kept" / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match="does not exist"):
        records_of(out)
    with pytest.raises(DataError, match=r"has no metrics\.jsonl"):
        records_of(store)


def test_a_page_is_written_anew_until_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, page = tmp_path / "metrics.jsonl", tmp_path / "page.html"
    metrics_file.write(file, metrics_file.opening(), metrics_file.step(1))
    pages = []

    def sleep(seconds: float) -> None:
        assert seconds == 7
        pages.append(page.read_text())
        records = [metrics_file.opening(), *(metrics_file.step(number) for number in range(1, 2 + len(pages)))]
        metrics_file.write(file, *records, *([metrics_file.end()] if len(pages) == 2 else []))

    monkeypatch.setattr(reporting.time, "sleep", sleep)
    assert main.main(["report", str(file), "--out", str(page), "--refresh", "7"]) == 0
    assert len(pages) == 2 and all('http-equiv="refresh" content="7"' in one for one in pages)
    assert 'http-equiv="refresh"' not in page.read_text(), "the run has ended"
