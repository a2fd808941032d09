"""`memascend report`: a page on a run of `memascend finetune`, whose records it also checks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import commands
import metrics_file
import pytest
import tiny_models
import torch
from torch import nn

import memascend
from memascend.cli import main
from memascend.report import figures
from memascend.report.page import HEAD

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=64)


def records_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_and_its_report(model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = commands.words_of(model_dir, tmp_path / "out", tmp_path / "a", steps=3, dtype="float32")
    assert main.main([*words, "--store", str(tmp_path / "b")]) == 0
    out = tmp_path / "report.html"
    capfd.readouterr()
    assert main.main(["report", str(tmp_path / "out"), "--out", str(out), "--tbw", "600"]) == 0
    assert capfd.readouterr().out == f"wrote {out}: open it in a browser\n"
    page = out.read_text()
    assert page.startswith(HEAD) and page.count("<figure") == 9 and "of 600 TB" in page
    assert "and left out" not in page, "a run of this version records everything"

    start, *steps, end = records_of(tmp_path / "out" / "metrics.jsonl")
    assert [volume["path"] for volume in start["store"]["volumes"]] == [str(tmp_path / "a"), str(tmp_path / "b")]
    plan = start["plan"]["host"]
    assert plan["budget_bytes"] == 64 << 20 and plan["total_bytes"] == start["store"]["host_bytes_planned"]
    assert sum(line["total_bytes"] for line in plan["lines"]) == plan["total_bytes"]
    assert start["forecast"]["ssd_bytes_written"] > 0 and start["forecast"]["host_memory"]["total_bytes"] > 0
    assert start["time"] <= end["time"] and end["store"]["host_classes_at_peak"]
    assert sum(step["ssd_bytes_written"] for step in steps) > 0, "updates run with the next step's forward pass"
    for step in steps:
        assert len(json.dumps(step)) < 1000
        assert sum(volume[0] for volume in step["volumes"]) == step["ssd_bytes_read"]
        assert sum(volume[1] for volume in step["volumes"]) == step["ssd_bytes_written"]
        assert all(0 <= volume[2] <= 1.5 * step["seconds"] + 0.1 for volume in step["volumes"])
        assert sum(step["waited_seconds"].values()) == pytest.approx(step["seconds"], rel=0.2, abs=0.1)
        assert set(step) == set(metrics_file.step(1)), "the files of other tests are like real ones"
        assert step["tokens"] == 32 and step["tokens_per_s"] == pytest.approx(32 / step["seconds"])


def test_a_run_in_memory(model_dir: Path, tmp_path: Path) -> None:
    words = commands.in_memory(commands.words_of(model_dir, tmp_path / "out", tmp_path / "store", dtype="float32"))
    assert main.main(words) == 0
    (start, *steps, end) = records_of(tmp_path / "out" / "metrics.jsonl")
    assert start["store"] == start["plan"] == end["store"] == {} and all(not step["volumes"] for step in steps)
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path / "out" / "metrics.jsonl"), "--out", str(out)]) == 0
    assert "a model in memory is not timed" in out.read_text()


def test_a_meter_counts_any_offloaded_model(offloaded: Callable[..., nn.Module]) -> None:
    """Records of other training loops."""
    model = offloaded(nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))))
    optimizer = memascend.AdamW(model.parameters())
    memascend.flush(model)  # Nothing is on its way while the counters are compared.
    opening, meter = figures.opening(model), figures.Meter(model)
    laps = []
    for _ in range(3):
        model(torch.ones(4, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        laps.append(meter.lap(4))
    memascend.flush(model)
    laps.append(meter.lap(0))
    before, after = opening["store"], memascend.stats(model)
    for name in figures.SSD_COUNTERS:
        assert sum(lap[name] for lap in laps) == after[name] - before[name]
    assert json.loads(json.dumps([opening, *laps]))


def test_records_of_a_run_that_did_not_finish(tmp_path: Path) -> None:
    metrics_file.write(tmp_path / ".out.metrics.jsonl", metrics_file.opening(), metrics_file.step(1))
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path / "out"), "--out", str(out)]) == 0
    assert "not ended, or ended without a word" in out.read_text()


@pytest.mark.parametrize(
    ("run", "words", "told"),
    [
        ("missing", (), "missing does not exist"),
        ("empty", (), "empty has no metrics.jsonl"),
        ("words.txt", (), "words.txt holds no records of a run"),
        ("metrics.jsonl", ("--out", "{room}/words.txt"), "words.txt exists and is no report"),
        ("metrics.jsonl", ("--out", "{room}/no/report.html"), "No such file"),
        ("metrics.jsonl", ("--tbw", "0"), "'0' is not a number above 0"),
    ],
)
def test_bad_input(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], run: str, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "words.txt").write_text("words\n")
    metrics_file.usual(tmp_path / "metrics.jsonl")
    seen = commands.listing(tmp_path)
    assert main.main(["report", str(tmp_path / run), *(word.format(room=tmp_path) for word in words)]) == main.BAD_INPUT
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("memascend: error: ") and told in line
    assert commands.listing(tmp_path) == seen


@pytest.mark.parametrize("run", [".", "/"])
def test_a_folder_without_a_name_beside_it_is_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["report", run, "--out", str(tmp_path / "page.html")]) == main.BAD_INPUT
    assert f"error: {run} has no metrics.jsonl: name a directory" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        ("start", "settings", 5),
        ("start", "settings", {"store": 5, "keep_store": True, "save_every": None, "lora_rank": None}),
        ("end", "evaluations", 5),
        ("end", "evaluations", [1, 2]),
        ("end", "evaluations", None),
        ("end", "steps", "x"),
    ],
)
def test_metrics_of_another_program_are_no_run_that_has_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], record: str, field: str, value: object
) -> None:
    settings = {"store": ["s"], "keep_store": True, "save_every": None, "lora_rank": None}
    records: list[dict[str, Any]] = [
        {"record": "start", "settings": settings},
        {"record": "step", "step": 1, "loss": 1.5},
        {"record": "end", "steps": 1, "steps_planned": 1, "signal_number": None, "evaluations": []},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    assert main.main(["inspect", str(tmp_path)]) == 0
    assert "finished after 1 of 1 steps" in capfd.readouterr().out
    for one in records:
        if one["record"] == record:
            one[field] = value
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    assert main.main(["inspect", str(tmp_path)]) == main.BAD_INPUT
    assert "holds no store" in capfd.readouterr().err
