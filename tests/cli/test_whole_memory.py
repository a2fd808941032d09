"""The host memory that a run takes in all: said before it begins, and refused where the machine has less."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
from commands import in_memory, listing, words_of

from memascend.cli import main
from memascend.forecast import total_memory

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.core
ALL = "memascend: note: host memory in all: "


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with text beside it."""
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=64)


@pytest.fixture
def room(tmp_path: Path, model_dir: Path) -> Path:
    """A directory with the model, text and a place for the store."""
    shutil.copytree(model_dir, tmp_path / "llama")
    shutil.copy(model_dir.parent / "text.txt", tmp_path)
    (tmp_path / "store").mkdir()
    return tmp_path


def words(room: Path, **changed: Any) -> list[str]:
    return words_of(room / "llama", room / "out", room / "store", dtype="float32", **changed)


@pytest.mark.parametrize("where", ["store", "memory"])
def test_a_batch_that_no_machine_holds_is_refused_at_once(
    room: Path, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    before = listing(room)
    chosen = words(room, batch_size=1_000_000_000)
    assert main.main(chosen if where == "store" else in_memory(chosen)) == main.BAD_INPUT
    err = capfd.readouterr().err
    told = [line for line in err.splitlines() if line.startswith("memascend: error: ")]
    assert len(told) == 1 and "lower --batch-size" in told[0] and "--force" in told[0], err
    assert sum(line.startswith(ALL) for line in err.splitlines()) == 1, err
    assert listing(room) == before


def test_a_small_run_is_not_refused(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(words(room)) == 0
    err = capfd.readouterr().err
    assert sum(line.startswith(ALL) for line in err.splitlines()) == 1, err
    assert "--force" not in err


def test_force_begins_all_the_same(
    room: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limit is only stated: under a real one the kernel may end the run.
    monkeypatch.setattr(total_memory, "available_memory", lambda: (1 << 20, "a stated limit"))
    assert main.main(words(room)) == main.BAD_INPUT
    assert "(a stated limit): give --micro-batch-size" in capfd.readouterr().err
    assert main.main([*words(room), "--force"]) == 0
    err = capfd.readouterr().err
    assert "(a stated limit): give --micro-batch-size" in err and "or the kernel may end the run" in err


def test_a_plan_ends_with_the_sum(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", str(room / "llama"), "--seq-len", "64", "--details"]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("in all: ") and " planned + " in last and "interpreter" in last and "not fit" not in last
    assert main.main(["plan", str(room / "llama"), "--seq-len", "64", "--batch-size", "1000000000", "--details"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith("it does not fit here")


def test_what_is_not_known_is_not_judged(
    room: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(total_memory, "simulate_step", lambda *_, **__: None)
    assert main.main(["plan", str(room / "llama"), "--seq-len", "64", "--batch-size", "1000000000", "--details"]) == 0
    out = capfd.readouterr().out
    assert "PyTorch's, which is not known" in out
    assert "PyTorch's, not known" in out.splitlines()[-1] and "not fit" not in out.splitlines()[-1]
