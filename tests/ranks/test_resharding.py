"""Stores of a run that are written anew for another number of ranks: it goes on with the same bits."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING, Any

import bit_equality
import forked
import pytest
import rank_programs
import rank_runs
import torch

import memascend
from memascend._memascend import GRADIENT_BLOCK, ClosedStore
from memascend.cli.main import main
from memascend.layout import tables
from memascend.recovery import reshard as resharding

if TYPE_CHECKING:
    from pathlib import Path

#: Batches of each step, over all ranks.
BATCHES = 4


def files_of(folder: Path, name: str = "store") -> dict[str, str]:
    """Return the digests of the files of stores, but for the locks that killed processes leave."""
    files = [file for store in folder.glob(f"{name}?") for file in store.iterdir() if file.suffix != ".lock"]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int], Any]:
    return {
        (dtype, steps): rank_programs.in_one_process(BATCHES, steps, dtype)
        for dtype in ("float32", "bfloat16")
        for steps in (2, 4)
    }


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [(2, 4, "float32"), (4, 2, "bfloat16"), (2, 1, "float32"), (1, 2, "bfloat16"), (4, 3, "float32")],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    before: int, after: int, dtype: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resharding, "PIECE_ELEMENTS", GRADIENT_BLOCK)  # The largest tensor has four of them.
    options = {"micro": BATCHES // before, "dtype": dtype, "offloading": {"keep_store": True}}
    rank_programs.run("train", before, tmp_path, steps=2, **options)
    files = files_of(tmp_path)
    assert len(files) >= 2 * before
    assert memascend.reshard(tmp_path / "store{rank}", tmp_path / "new{rank}", ranks=after) == 2
    assert files_of(tmp_path) == files
    # Three ranks share no four batches: there the weights alone are compared.
    steps, micro = (4, BATCHES // after) if BATCHES % after == 0 else (2, 1)
    results = rank_programs.run("resume", after, tmp_path, "again", steps=steps, micro=micro, name="new")
    losses: dict[int, float] = {}
    for result in results:
        assert "error" not in result, result
        assert result["steps"] == 2
        assert bit_equality.difference(result["before"], expected[dtype, 2]["weights"]) is None
        assert bit_equality.difference(result["weights"], expected[dtype, steps]["weights"]) is None
        losses |= result["losses"]
    later = {number: loss for number, loss in expected[dtype, steps]["losses"].items() if number >= 2 * BATCHES}
    assert losses == later


def test_the_step_that_all_ranks_have_is_taken(tmp_path: Path) -> None:
    rank_programs.run("train_until_lost", 2, tmp_path, victim=1, moment="meet", steps=2)
    files = files_of(tmp_path)
    # Rank 0 has the second step, and rank 1 has not.
    assert memascend.reshard(tmp_path / "store{rank}", tmp_path / "new{rank}", ranks=1) == 1
    assert {name: digest for name, digest in files_of(tmp_path).items() if name in files} == files
    (result,) = rank_programs.run("resume", 1, tmp_path, "again", steps=2, micro=2, name="new")
    assert bit_equality.difference(result["weights"], rank_programs.in_one_process(2, 2)["weights"]) is None
    for result in rank_programs.run("resume", 2, tmp_path, "as before", steps=2):
        assert result["steps"] == 1


def test_the_command_line_does_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank_programs.run("train", 2, tmp_path, steps=1, offloading={"keep_store": True})
    words = ["reshard", f"{tmp_path}/store{{rank}}", "--to", f"{tmp_path}/new{{rank}}", "--ranks"]
    assert main([*words, "3"]) == 0
    assert "the run after step 1, for 3 processes" in capsys.readouterr().out
    assert [path.name for path in sorted(tmp_path.glob("new*"))] == ["new0", "new1", "new2"]
    assert main([*words, "3"]) == 2
    assert "new0 exists" in capsys.readouterr().err


def stored(store: Path) -> tuple[dict[str, bytes], str]:
    """Return the bytes of all tensors of a store, and its record."""
    with contextlib.closing(ClosedStore([store])) as kept:
        tensors = {}
        for name, nbytes in kept.tensors():
            data = torch.empty(nbytes, dtype=torch.uint8)
            kept.read(name, data.data_ptr(), nbytes)
            tensors[name] = data.numpy().tobytes()
        assert kept.state is not None
        return tensors, kept.state


@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
def test_there_and_back_is_the_same_store(states: str, tmp_path: Path) -> None:
    model = rank_runs.build("bfloat16")
    model.register_buffer("small", torch.arange(3.0))
    model.register_buffer("large", torch.arange(300_000.0))
    model = rank_runs.offload(model, tmp_path, keep_store=True)
    rank_runs.Run(model, 1, range(1), states=states).go(1)
    memascend.close(model)
    memascend.reshard(tmp_path / "store0", tmp_path / "three{rank}", ranks=3)
    memascend.reshard(tmp_path / "three{rank}", tmp_path / "back", ranks=1)
    (tensors, record), (back, record_back) = stored(tmp_path / "store0"), stored(tmp_path / "back")
    assert record_back == record
    # Room for the states of experts that were not used yet is made when they are.
    recorded = [tensor for unit in json.loads(record)["units"] for tensor in unit["tensors"]]
    names = {tensor["name"] for tensor in recorded} | {name for tensor in recorded for name, _, _ in tensor["states"]}
    assert back.keys() == names | {".buffers", ".buffers.large"} < tensors.keys()
    lengths = {name: memoryview(data).nbytes for name, data in tensors.items()}
    assert max(lengths.values()) > 4 * GRADIENT_BLOCK and ".buffers.large" in lengths
    assert [name for name in tensors if name in back and back[name] != tensors[name]] == []


def test_an_interrupted_one_leaves_nothing_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_programs.run("train", 1, tmp_path, steps=1, offloading={"keep_store": True})
    write = resharding._Copied.write

    def interrupted(copied: Any, target: Path, rank: int, *rest: Any) -> None:
        if rank == 1:
            raise KeyboardInterrupt
        write(copied, target, rank, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(resharding._Copied, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memascend.reshard(tmp_path / "store0", tmp_path / "new{rank}", ranks=2)
    assert files_of(tmp_path, "new") == {}
    program = (
        "import os, sys, memascend\n"
        "from memascend.recovery.reshard import _Copied\n"
        "write = _Copied.write\n"
        "_Copied.write = lambda self, target, rank, *rest: os._exit(7) if rank else write(self, target, rank, *rest)\n"
        "memascend.reshard(sys.argv[1], sys.argv[2], ranks=2)\n"
    )
    places = [str(tmp_path / "store0"), str(tmp_path / "new{rank}")]
    assert forked.run(["-c", program, *places]).returncode == 7
    for result in rank_programs.run("resume", 2, tmp_path, "again", steps=2, name="new"):
        assert "the store of rank 1" in result["error"] and "cannot be resumed" in result["error"]
    with pytest.raises(OSError, match="new0 exists: choose another place"):
        memascend.reshard(*places, ranks=2)


def test_what_cannot_be_done_says_what_to_do(tmp_path: Path) -> None:
    rank_programs.run("train", 2, tmp_path, steps=1, offloading={"keep_store": True})
    pattern, new = tmp_path / "store{rank}", tmp_path / "new{rank}"
    with pytest.raises(ValueError, match="0 ranks"):
        memascend.reshard(pattern, new, ranks=0)
    with pytest.raises(OSError, match=r"one place for the stores of 3 ranks: write \{rank\}"):
        memascend.reshard(pattern, tmp_path / "new", ranks=3)
    with pytest.raises(OSError, match="store0 exists"):
        memascend.reshard(pattern, pattern, ranks=2)
    with pytest.raises(memascend.CheckpointError, match=r"the shares of rank 0 of 2: give one place, with \{rank\}"):
        memascend.reshard(tmp_path / "store0", new, ranks=1)
    with pytest.raises(memascend.StoreError, match="holds no store that was kept"):
        memascend.reshard(tmp_path / "nothing{rank}", new, ranks=2)
    command = "memascend reshard STORES --ranks {} --to NEW_STORES"
    with pytest.raises(memascend.CheckpointError, match=command.format(1)):
        memascend.resume(tmp_path / "store0", model=rank_runs.build(), host_memory="64MiB")
    (tmp_path / "store1").rename(tmp_path / "elsewhere")
    with pytest.raises(memascend.CheckpointError, match=r"the store of rank 1 in .* cannot be resumed"):
        memascend.reshard(pattern, new, ranks=1)
    (tmp_path / "elsewhere").rename(tmp_path / "store1")
    for result in rank_programs.run("resume", 3, tmp_path, "more", steps=2):
        assert command.format(3) in result["error"]


def test_a_loss_in_pieces_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "TABLE_BYTES_MIN", 1024**2)
    model = rank_runs.offload(rank_runs.build(), tmp_path / "run", keep_store=True, fused_loss="auto")
    rank_runs.Run(model, 1, range(1)).go(1)
    memascend.close(model)
    memascend.reshard(tmp_path / "run" / "store0", tmp_path / "store{rank}", ranks=2)
    for result in rank_programs.run("resume_with_tables", 2, tmp_path):
        assert "the run computes its loss in pieces" in result["error"]


def test_runs_that_ranks_do_not_do_are_refused(tmp_path: Path) -> None:
    model = rank_runs.offload(rank_runs.build(), tmp_path, keep_store=True, gradients="bfloat16")
    rank_runs.Run(model, 1, range(1)).go(1)
    memascend.close(model)
    with pytest.raises(memascend.CheckpointError, match="gradients aside in bfloat16"):
        memascend.reshard(tmp_path / "store0", tmp_path / "new{rank}", ranks=2)
    assert not list(tmp_path.glob("new*"))
