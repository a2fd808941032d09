"""The same command with --resume, whatever ended the run before: a signal, SIGKILL, or its last step."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import chat_models
import faults
import pytest
import requirements
import tiny_models
from commands import command, listing, words_of

from memascend.cli import main
from memascend.common import outputs

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 40
#: Instants at which each signal ends a run: one, and ten in `make soak`.
INSTANTS = -(-int(os.environ.get("MEMASCEND_KILLS", "6")) // 6)
#: Seconds that a run may take, on a machine that is busy with others.
WAIT = 600
SHORT: dict[str, Any] = {"steps": 12, "batch_size": 1}
#: Files of a model directory that name its place.
_OF_ITS_OWN = {"metrics.jsonl", "training_args.bin"}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_models.llama_directory(tmp_path, hidden=64)


def words(model_dir: Path, out: str = "out", store: str = "store", **changed: Any) -> list[str]:
    room = model_dir.parent
    return words_of(model_dir, room / out, room / store, **{"steps": STEPS, "batch_size": 1} | changed)


def records(file: Path) -> list[dict[str, Any]]:
    lines = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [json.loads(line) for line in lines]


def metrics_of(room: Path, named: bool) -> Path | None:
    """Return the metrics of a run that is going on, once they are there."""
    pattern = "metrics.jsonl" if named else ".out.partial-*/kept/metrics.jsonl"
    return next(iter(room.glob(pattern)), None)


def end_by(number: signal.Signals, arguments: list[str], room: Path, steps: int, named: bool) -> faults.Ended:
    """Run a command, and end it by a signal after so many more steps."""
    with faults.Child(room, command, arguments) as child:
        first = None
        while True:
            assert child.alive(), child.wait().err
            file = metrics_of(room, named)
            done = 0
            with suppress(FileNotFoundError):  # A run that goes on takes up the file of the one before.
                done = sum(record["record"] == "step" for record in records(file)) if file is not None else 0
            first = done if first is None and file is not None else first
            if first is not None and done >= first + steps:
                break
            time.sleep(0.005)
        os.kill(child.pid, number)
        return child.wait()


@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["in --out", "--metrics"])
def test_it_goes_on_after_every_kind_of_end(model_dir: Path, capfd: pytest.CaptureFixture[str], named: bool) -> None:
    """Ended by SIGTERM, Ctrl-C and SIGKILL in turn, the command ends with the bits of the run that nothing ended."""
    room = model_dir.parent
    chosen = {"metrics": room / "metrics.jsonl"} if named else {}
    again = [*words(model_dir, **chosen), "--resume"]
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        ended = end_by(number, again, room, 2, named)
        assert ended.code == (-number if number == signal.SIGKILL else 128 + number), ended.err
        # The model so far stays through SIGKILL, and is replaced when a signal ends the run again.
        assert (room / "out" / "config.json").is_file(), ended.err
    assert main.main(again) == 0, capfd.readouterr().err
    assert main.main(words(model_dir, "whole", "store2")) == 0, capfd.readouterr().err
    assert not (room / "out" / "interrupted.json").exists()
    files = {name for name in listing(room / "whole") if name != "metrics.jsonl"}
    assert files == {name for name in listing(room / "out") if name != "metrics.jsonl"}
    assert all((room / "out" / name).read_bytes() == (room / "whole" / name).read_bytes() for name in files)
    taken = [
        one["step"] for one in records(room / ("" if named else "out") / "metrics.jsonl") if one["record"] == "step"
    ]
    assert taken == list(range(1, STEPS + 1))
    assert not [path.name for path in room.iterdir() if path.name.startswith(".out")]


@dataclass
class Whole:
    """A run that nothing ended, in `out` beside its model, and the seconds that it took in a process of its own."""

    room: Path
    chosen: dict[str, Any]
    seconds: float = 0.0

    def words(self, folder: Path) -> list[str]:
        """Return the command of the same run in `folder`."""
        return words_of(self.room / "llama", folder / "out", folder / "store", **SHORT | self.chosen)


#: Options of the runs beside those of text alone, and the rows of their data.
PREFERENCES = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(3 * n)} for n in range(8)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}+{n}="}, {"role": "assistant", "content": str(2 * n)}]}
    for n in range(60)
]
RUNS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "orpo": ({"task": "orpo"}, PREFERENCES),
    "dpo": ({"task": "dpo"}, PREFERENCES),
    "chats": ({}, CHATS),
    "adapters": ({"lora_rank": 4, "save_every": 3}, CHATS),
}
OF_SOAK = [pytest.param(name, marks=pytest.mark.soak) for name in ("dpo", "chats", "adapters")]


@pytest.fixture(scope="module", params=["sft", "orpo", *OF_SOAK])
def whole(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Whole:
    run = Whole(tmp_path_factory.mktemp("whole"), {})
    if request.param == "sft":
        tiny_models.llama_directory(run.room, hidden=64)
    else:
        options, rows = RUNS[request.param]
        if "task" in options:
            requirements.package("trl", "datasets")
        if "lora_rank" in options:
            requirements.package("peft")
        chat_models.folder_of(run.room / "llama")
        (run.room / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.chosen = options | {"data": run.room / "rows.jsonl"}
    with faults.Child(run.room, command, ["--version"]) as child:
        child.wait()  # from here on processes begin at once
    begun = time.monotonic()
    with faults.Child(run.room, command, run.words(run.room)) as child:
        assert child.wait(WAIT).code == 0, child.told()
    run.seconds = time.monotonic() - begun
    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_ended_at_any_instant_it_comes_to_the_same_end(whole: Whole, number: signal.Signals) -> None:
    """The same command with --resume, also where the signal came before the first step, or after the last."""
    seed = os.environ.get("MEMASCEND_SEED", "0")
    chance = random.Random(f"{seed} {number.name}")
    codes = []
    expected = listing(whole.room / "out")
    for instant in range(INSTANTS):
        folder = whole.room / f"{number.name}-{instant}"
        folder.mkdir()
        again = [*whole.words(folder), "--resume"]
        after = chance.uniform(0, whole.seconds)
        with faults.Child(whole.room, command, again) as child:
            end = time.monotonic() + after
            while child.alive() and time.monotonic() < end:
                time.sleep(0.001)
            if child.alive():
                os.kill(child.pid, number)
            ended = child.wait(WAIT)
        told = f"seed {seed}, {number.name} {instant} after {after:.3f} s"
        codes.append(ended.code)
        assert ended.code in (0, -number, 128 + number) and "Traceback" not in ended.err, f"{told}: {ended.err}"
        with faults.Child(whole.room, command, again) as child:
            ended = child.wait(WAIT)
        assert ended.code == 0, f"{told}: {ended.err}"
        written = listing(folder / "out")
        assert written.keys() == expected.keys(), told
        for name in written.keys() - _OF_ITS_OWN:
            assert written[name] == expected[name], f"{told}: {name}"
        taken = [one["step"] for one in records(folder / "out" / "metrics.jsonl") if one["record"] == "step"]
        assert taken == list(range(1, SHORT["steps"] + 1)), told
        shutil.rmtree(folder)
    print(f"{number.name}: exit codes {codes}, seed {seed}")


def test_a_finished_run_says_so(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    again = [*words(model_dir, steps=2), "--resume"]
    assert main.main(again) == 0
    before = listing(model_dir.parent)
    capfd.readouterr()
    assert main.main(again) == 0
    assert f"the run has finished: {model_dir.parent / 'out'} holds the model after 2 steps" in capfd.readouterr().out
    assert listing(model_dir.parent) == before
    # Without --resume, and for a run with another store, it is a model like any other.
    for other in (words(model_dir, steps=2), [*words(model_dir, store="store2", steps=2), "--resume"]):
        assert main.main(other) == main.BAD_INPUT
        assert f"--out {model_dir.parent / 'out'} already exists" in capfd.readouterr().err
    assert listing(model_dir.parent) == before


def test_what_a_run_has_not_written_is_never_replaced(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = model_dir.parent
    again = [*words(model_dir), "--resume"]
    assert end_by(signal.SIGTERM, again, room, 1, False).code == 128 + signal.SIGTERM
    (room / "out").rename(room / "mine")
    (room / "out").mkdir()
    (room / "out" / "precious").write_text("another program's")
    assert main.main(again) == main.BAD_INPUT
    assert "already exists" in capfd.readouterr().err
    assert (room / "out" / "precious").read_text() == "another program's"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_directory_takes_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    if not at_once:
        monkeypatch.setattr(outputs, "_EXCHANGE", 1 << 30)  # As of a filesystem that cannot exchange names.
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    outputs.put_in_place(tmp_path / "new", tmp_path / "out", replaces=True)
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert (tmp_path / "new" / "file").read_text() == "out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_finished_run_has_written_is_said(
    model_dir: Path, capfd: pytest.CaptureFixture[str], kept: bool
) -> None:
    room = model_dir.parent
    assert main.main([*words(model_dir, steps=3), *(["--keep-store"] if kept else [])]) == 0
    capfd.readouterr()
    assert main.main(["inspect", str(room / "out")]) == 0
    told = capfd.readouterr().out
    assert f"{room / 'out'}: the model of a run that finished after 3 of 3 steps, the last of loss" in told
    assert f"its store in {room / 'store'} {'was left there' if kept else 'was removed'}" in told
    assert main.main(["inspect", str(room / "out"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 3
    assert main.main(["inspect", str(room / "store")]) == (0 if kept else main.BAD_INPUT)
    assert ("`memascend inspect OUT` says what it wrote" in capfd.readouterr().err) != kept
