"""Checkpoints of the Trainer and of Accelerate over processes: as one process saves them, and the same bits after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import requirements
import torch

requirements.package("accelerate")
requirements.package("transformers")

import launched_programs  # noqa: E402
import launching  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from memascend.integrations.named_checkpoints import read_names  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Collection

PROGRAM = Path(launched_programs.__file__)


pytestmark = pytest.mark.usefixtures("as_launched")


def launch(program: str, folder: Path, *numbers: int) -> list[Any]:
    return launching.launch(PROGRAM, "torchrun", 2, program, folder, *numbers)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    result = launched_programs.saving_in_one_process(tmp_path_factory.mktemp("one"), 2)
    torch.set_num_threads(before)
    return result


def assert_same(results: list[Any], expected: dict[str, Any], folder: Path, left: Collection[str] = ()) -> None:
    """Compare a run with a run of one process; `left` are names that may be in the stores without a directory."""
    names = {f"checkpoint-{expected['best']}", f"checkpoint-{launched_programs.STEPS}"}
    for result in results:
        assert result["history"] == expected["history"]
        assert result["best"] == expected["best"] < launched_programs.STEPS
        assert result["directory"] == f"checkpoint-{expected['best']}" == expected["directory"]
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
        assert names <= set(result["tags"]) <= names.union(left) and result["tags"] == results[0]["tags"]
    assert not list(folder.glob("elsewhere/checkpoint-*")) and not (folder / "elsewhere" / "final").exists()
    directories = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert directories == sorted(names)
    for name in directories:
        assert read_names(folder / name) == {0: name}
        assert not list((folder / name).glob("*safetensors"))
    final = dict(LlamaForCausalLM.from_pretrained(folder / "final", dtype="auto").named_parameters())
    assert bit_equality.difference({name: value.detach() for name, value in final.items()}, expected["weights"]) is None


def test_the_trainer_saves_and_goes_back_to_the_best(expected: dict[str, Any], tmp_path: Path) -> None:
    assert_same(launch("saving_trainer", tmp_path), expected, tmp_path)
    # From a checkpoint that the run has passed: all later steps are given up.
    assert_same(launch("saving_trainer", tmp_path, expected["best"]), expected, tmp_path)


#: Every process at every event; all but two in `make soak`, since each takes half a minute of two processors.
ALWAYS = {("on_save", 1), ("in the store", 0)}
KILLS = [
    pytest.param(event, victim, id=f"{name}-{victim}", marks=[] if (name, victim) in ALWAYS else [pytest.mark.soak])
    for event, name in enumerate(launched_programs.EVENTS)
    for victim in (0, 1)
]


@pytest.mark.parametrize(("event", "victim"), KILLS)
def test_a_process_is_killed_as_the_trainer_saves(
    event: int, victim: int, expected: dict[str, Any], tmp_path: Path
) -> None:
    words = [str(PROGRAM), "saving_trainer", str(tmp_path), *map(str, (-1, victim, 3, event))]
    done = launching.run_launched("torchrun", 2, words, tmp_path)
    assert done.returncode != 0 and not (tmp_path / "saving_trainer.0").exists()
    # As in one process: killed after the directory of a checkpoint was deleted, and before its name was.
    assert_same(launch("saving_trainer", tmp_path, 0), expected, tmp_path, left={"checkpoint-2"})


def test_where_the_first_process_cannot_write_all_raise(tmp_path: Path) -> None:
    first, second = launch("saving_where_rank_0_cannot", tmp_path)
    assert "File exists" in first["checkpoint-2"] and "File exists" in first["final"]
    assert "rank 0 could not write a checkpoint: " in second["checkpoint-2"]
    assert "rank 0 could not make the directory of the model: " in second["final"]


# Without a victim all is saved and loaded that is after a kill too.
@pytest.mark.parametrize("victim", [0, *(pytest.param(other, marks=pytest.mark.soak) for other in (-1, 1))])
def test_accelerates_states_are_saved_and_loaded(victim: int, tmp_path: Path) -> None:
    expected = launched_programs.states_in_one_process(2)
    if victim >= 0:
        words = [str(PROGRAM), "states", str(tmp_path), str(victim)]
        assert launching.run_launched("torchrun", 2, words, tmp_path).returncode != 0
    for rank, result in enumerate(launch("states", tmp_path)):
        assert result["own"] == rank
        first = result["before"]["losses"]
        assert first == expected["losses"][4 if victim >= 0 else 0 :]
        assert result["losses"] == first + expected["losses"][6:]
        assert result["rate"] == expected["rate"]
        for weights in (result["weights"], result["before"]["weights"]):
            assert bit_equality.difference(weights, expected["weights"]) is None
        assert result["tags"] == 2 and result["directories"] == ["checkpoint_1", "checkpoint_2"]
