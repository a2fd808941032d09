"""Scripts for Accelerate and transformers' Trainer, launched in several processes, have the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import bit_equality
import launching
import pytest
import requirements

requirements.package("accelerate")
requirements.package("transformers")

import launched_programs  # noqa: E402

from memascend.report.run import read_run  # noqa: E402

if TYPE_CHECKING:
    pass

PROGRAM = Path(launched_programs.__file__)


pytestmark = pytest.mark.usefixtures("as_launched")


def launch(launcher: str, ranks: int, program: str, folder: Path, *numbers: int) -> list[Any]:
    return launching.launch(PROGRAM, launcher, ranks, program, folder, *numbers)


@pytest.mark.parametrize(
    ("launcher", "ranks", "accumulate"), [("accelerate", 2, 1), pytest.param("torchrun", 2, 2, marks=pytest.mark.soak)]
)
def test_accelerates_loop_over_processes(launcher: str, ranks: int, accumulate: int, tmp_path: Path) -> None:
    results = launch(launcher, ranks, "loop", tmp_path, accumulate)
    expected = launched_programs.loop_in_one_process(ranks, accumulate)
    assert len(expected["losses"]) == 8 and len(expected["norms"]) == 8 // ranks // accumulate
    for result in results:
        assert result["losses"] == expected["losses"]
        assert result["norms"] == expected["norms"]
        assert result["rate"] == expected["rate"]
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


def test_what_accelerate_refuses_over_processes(tmp_path: Path) -> None:
    for told in launch("torchrun", 2, "refused_by_accelerate", tmp_path):
        assert "make the Accelerator first" in told["alone"]
        assert "add adapters before memascend.offload" in told["added"]
        assert told["unwrapped"] == "True"


@pytest.mark.parametrize(
    ("launcher", "ranks", "accumulate"), [("torchrun", 2, 1), pytest.param("accelerate", 2, 2, marks=pytest.mark.soak)]
)
def test_the_trainer_over_processes(launcher: str, ranks: int, accumulate: int, tmp_path: Path) -> None:
    results = launch(launcher, ranks, "trainer", tmp_path, accumulate)
    expected = launched_programs.trainer_in_one_process(tmp_path / "one", ranks, accumulate)
    assert len(expected["history"]) == launched_programs.STEPS
    for result in results:
        assert result["history"] == expected["history"]
        assert result["evaluated"] == expected["evaluated"]
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
        assert not result["wrapped"]
    assert {path.name for path in tmp_path.glob("metrics*")} == {"metrics.jsonl", "metrics.1.jsonl"}
    figures = read_run(tmp_path / "metrics.jsonl").of_ranks()
    assert len(figures) == ranks
    for of_rank in figures:
        assert of_rank["tokens"] == [2 * 16 * accumulate] * launched_programs.STEPS
        assert all(sent and sent > 0 for sent in of_rank["network_bytes_sent"])


def test_the_trainer_goes_on_over_processes(tmp_path: Path) -> None:
    launch("torchrun", 2, "trainer", tmp_path, 1, 2)
    results = launch("torchrun", 2, "trainer", tmp_path, 1, launched_programs.STEPS, 1)
    expected = launched_programs.trainer_in_one_process(tmp_path / "one", 2, 1)
    for result in results:
        assert result["history"] == expected["history"]
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


def test_what_the_trainer_refuses_over_processes(tmp_path: Path) -> None:
    for told in launch("torchrun", 2, "refused_by_the_trainer", tmp_path):
        assert "the first one writes for all: leave save_on_each_node out" in told["each node"]
        assert "save the model, and upload the directory" in told["hub"]
        assert "make the arguments (TrainingArguments) first" in told["alone"]
        assert "Untested was not tested over several processes" in told["untested"]
