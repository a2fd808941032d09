"""Runs of ranks with a device each: killed and resumed, saved, with values that are not finite, and refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import rank_programs

import memascend
from memascend.layout import tables

if TYPE_CHECKING:
    from pathlib import Path

#: The text of each error, by the attempt in `devices_of_ranks.refused`.
SAID = {
    "backend": "use torch.distributed.init_process_group('cpu:gloo,cuda:nccl')",
    "mixed": "rank 1 on the CPU), whose results differ: give device= on all, or on none",
    "shared": "ranks 0, 1 compute on the same device",
    "divided": "done",
    "warning": "ranks 0, 1 share cpu, and slow each other down",
    "device memory": "give device_memory when it is offloaded or resumed",
    "write": "write to weights before memascend.offload",
    "gradient": "clip with optimizer.clip_grad_norm_(...)",
}


@pytest.mark.parametrize("moment", ["commit", "gather"])
def test_a_killed_rank_ends_the_others_and_all_resume(moment: str, tmp_path: Path, library: Path) -> None:
    on_device: dict[str, Any] = {"library": library, "computing": {"device_memory": "least", "activations": "ssd"}}
    first, killed = rank_programs.run(
        "on_device", 2, tmp_path, doing="train_until_lost", victim=1, moment=moment, steps=2, **on_device
    )
    assert killed == -9
    assert "RankError: rank 1 does not answer: rank 0 of 2 was to" in first["error"]
    expected = rank_programs.in_one_process(2, 4)
    for rank, result in enumerate(
        rank_programs.run("on_device", 2, tmp_path, "again", doing="resume", steps=4, **on_device)
    ):
        assert "error" not in result, result
        assert result["steps"] == 1 and result["left"] == "", result["left"]
        assert result["losses"] == {n: expected["losses"][n] for n in range(2 + rank, 8, 2)}
        assert bit_equality.difference(result["norms"], expected["norms"][1:]) is None
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


def test_a_run_of_cpus_goes_on_on_devices(tmp_path: Path, library: Path) -> None:
    rank_programs.run("train", 2, tmp_path, steps=1, offloading={"keep_store": True})
    expected = rank_programs.in_one_process(2, 2)
    for result in rank_programs.run("on_device", 2, tmp_path, "again", doing="resume", library=library, steps=2):
        assert "error" not in result, result
        assert result["steps"] == 1 and result["left"] == "", result["left"]
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


def test_a_loss_in_pieces_of_one_process_has_other_bits_than_ranks(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "TABLE_BYTES_MIN", 1024**2)
    model = rank_programs.offload(rank_programs.build(), tmp_path / "run", keep_store=True, fused_loss="auto")
    rank_programs.Run(model, 1, range(1)).go(1)
    memascend.close(model)
    memascend.reshard(tmp_path / "run" / "store0", tmp_path / "store{rank}", ranks=2)
    for result in rank_programs.run("on_device", 2, tmp_path, doing="resume_with_tables", library=library):
        assert "the run computes its loss in pieces" in result["error"]


def test_checkpoints_are_gone_back_to_on_devices(tmp_path: Path, library: Path) -> None:
    expected = rank_programs.in_one_process(2, 3)
    for result in rank_programs.run("on_device", 2, tmp_path, doing="go_back", library=library):
        assert "error" not in result, result
        assert result["steps"] == 1 and result["left"] == "", result["left"]
        for run in ("first", "again"):
            assert bit_equality.difference(result[run]["weights"], expected["weights"]) is None


def test_an_overflow_on_one_device_is_known_to_all(tmp_path: Path, library: Path) -> None:
    for result in rank_programs.run("on_device", 2, tmp_path, doing="overflow", library=library):
        assert result == {"scale": 128.0, "norm": "nan", "skipped": 1, "same": True, "left": ""}


def test_what_is_saved_from_devices_is_what_cpus_save(tmp_path: Path, library: Path) -> None:
    saved = []
    for name, program in (("cpus", {}), ("devices", {"doing": "save", "library": library})):
        (tmp_path / name).mkdir()
        results = rank_programs.run("on_device" if program else "save", 2, tmp_path / name, least=True, **program)
        assert all(result.get("left", "") == "" and "error" not in result for result in results), results
        saved.append({file.name: file.read_bytes() for file in (tmp_path / name / "out").iterdir()})
    assert saved[0] == saved[1] and len(saved[0]) > 3


def test_what_is_refused_on_devices_says_what_to_do(tmp_path: Path, library: Path) -> None:
    for told in rank_programs.run("on_device", 2, tmp_path, doing="refused", library=library):
        assert told.keys() == SAID.keys() | {"left"} and told["left"] == ""
        unlike = {name: told[name] for name, said in SAID.items() if said not in told[name]}
        assert unlike == {}
