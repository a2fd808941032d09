"""Reading metrics files: of this version and of older ones, unfinished, resumed, damaged."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import metrics_file
import pytest

from memascend.errors import DataError
from memascend.report.run import number, read_run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_series(file: Path) -> None:
    run = read_run(metrics_file.usual(file, steps=40))
    assert run.steps == list(range(1, 41)) and run.evaluations == {20: 4.0, 40: 4.0}
    assert run.column("loss") == [metrics_file.step(number)["loss"] for number in range(1, 41)]
    assert run.waited()["SSD read"] == [0.5] * 40
    assert run.volumes == list(metrics_file.VOLUMES)
    assert run.moved("busy_seconds") == {"/nvme0/run": [0.5] * 40, "/nvme1/run": [0.25] * 40}
    assert run.end["record"] == "end" and run.unreadable == 0


def test_a_resumed_run_keeps_its_volumes_apart(file: Path) -> None:
    moved = metrics_file.opening("resume", store={"volumes": [{"path": "/nvme1/run"}, {"path": "/nvme2/run"}]})
    metrics_file.write(file, metrics_file.opening(), metrics_file.step(1), moved, metrics_file.step(2))
    run = read_run(file)
    assert len(run.openings) == 2 and run.opening == moved and not run.end
    mib = float(metrics_file.MIB)
    assert run.moved("bytes_read") == {
        "/nvme0/run": [60 * mib, None],
        "/nvme1/run": [40 * mib, 60 * mib],
        "/nvme2/run": [None, 40 * mib],
    }


def test_what_is_damaged_is_left_out(file: Path) -> None:
    lines = [
        "[" * 100_000,
        "5",
        '{"record": 5}',
        '{"record": "step", "step": true}',
        '{"record": "step", "step": -1}',
        '{"record": "step", "step": 1e300}',
        json.dumps(
            metrics_file.step(2, loss=math.nan, lr=math.inf, tokens_per_s="fast", seconds=True, volumes=[[1], 5])
        ),
        '{"record": "step", "step": 3, "loss": 1' + "0" * 400 + "}",
        '{"record": "step", "step": 4, "loss": 1' + "0" * 5000 + "}",
        "x" * (5 << 20),
        '{"record": "step", "step": 5, "lo',
    ]
    metrics_file.write(file, "", metrics_file.opening(), metrics_file.step(1), *lines)
    run = read_run(file)
    assert list(run.records) == [1, 2, 3] and run.unreadable == 7
    assert run.column("loss") == [metrics_file.step(1)["loss"], None, None]
    for name in ("lr", "tokens_per_s", "seconds"):
        assert run.column(name)[1] is None
    assert run.moved("bytes_read")["/nvme0/run"][1] == 1.0 and run.moved("bytes_written")["/nvme0/run"][1] is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no records of a run"),
        ("words\n\0\xff", "holds no records of a run"),
        ('{"a": 1}\n', "holds no records of a run"),
        (json.dumps(metrics_file.opening()) + "\n", "holds no step yet"),
    ],
)
def test_files_without_a_run_are_refused(file: Path, text: str, told: str) -> None:
    file.write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=told):
        read_run(file)


def test_numbers() -> None:
    values = [1, 2.5, True, "3", None, math.nan, -math.inf, [4], 10**400]
    assert [number(value) for value in values] == [1.0, 2.5, None, None, None, None, None, None, None]
