"""Where the stores of ranks lie, by patterns and lists, and stores of several volumes that go back to a common step."""

from __future__ import annotations

import hashlib
import os
from functools import partial, partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import rank_programs
import rank_runs

import memascend
from memascend.ranks.locations import locations_of
from memascend.recovery import common_generation

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("store", "rank", "ranks", "expected"),
    [
        ("/a", 0, 1, ["/a"]),
        ("/a{rank}/b", 2, 3, ["/a2/b"]),
        (Path("/a"), 1, 2, [Path("/a")]),
        (["/a"], 1, 2, ["/a"]),  # one place, on a machine of each rank
        (["/a", "/b"], 0, 1, ["/a", "/b"]),
        (["/a{rank}", "/b{rank}"], 1, 2, ["/a1", "/b1"]),
        ([["/a"], ["/b"]], 1, 2, ["/b"]),
        (["/a", ["/b", "/c"]], 0, 2, ["/a"]),
        (["/a", ["/b", "/c"]], 1, 2, ["/b", "/c"]),
        ([["/a{rank}"]] * 2, 1, 2, ["/a1"]),
        ([["/a", "/b"]], 0, 1, ["/a", "/b"]),
    ],
)
def test_each_rank_has_its_locations(store: Any, rank: int, ranks: int, expected: list[Any]) -> None:
    assert locations_of(store, rank, ranks) == expected


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (["/a", "/b"], r"give a list for each rank, as \[\[/a\], \[/b\]\], or \{rank\}"),
        (["/a", "/b", "/c"], "a location for each rank or volumes of every rank"),
        ([["/a"]], "entries for 1 ranks, of which there are 2"),
        ([["/a"], ["/b"], ["/c"]], "entries for 3 ranks, of which there are 2"),
        ([[], ["/b"]], r"store has \[\] for rank 0"),
        ([[["/a"]], ["/b"]], "give a location, or a list of locations"),
    ],
)
def test_a_list_that_could_mean_either_is_refused(store: Any, said: str) -> None:
    with pytest.raises(memascend.MemascendError, match=said):
        locations_of(store, 0, 2)


def volumes_of(folder: Path) -> list[list[str]]:
    """Return two directories for each of two ranks, by no pattern."""
    volumes = [[folder / "one" / "a", folder / "two" / "a"], [folder / "one" / "b", folder / "two" / "b"]]
    for volume in (volume for of_rank in volumes for volume in of_rank):
        volume.mkdir(parents=True)
    return [list(map(str, of_rank)) for of_rank in volumes]


def test_ranks_of_several_volumes_train_and_go_back(tmp_path: Path) -> None:
    stores = volumes_of(tmp_path)
    expected = rank_programs.in_one_process(2, 3)
    for result in rank_programs.run("go_back", 2, tmp_path, store=stores):
        assert "error" not in result, result
        for run in ("first", "again"):
            assert bit_equality.difference(result[run]["weights"], expected["weights"]) is None
    for result in rank_programs.run("resume", 2, tmp_path, "to two", steps=3, tag="two", store=stores):
        assert result["steps"] == 2
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
    # For other ranks, each with one place or two.
    new = [str(tmp_path / "n0"), [str(tmp_path / "n1"), str(tmp_path / "m1")]]
    assert memascend.reshard(stores, new, ranks=2) == 3
    assert memascend.reshard([stores[0][1], stores[1][0]], tmp_path / "whole", ranks=1) == 3
    assert all((tmp_path / name).is_dir() for name in ("n0", "n1", "m1"))
    with pytest.raises(OSError, match="whole exists"):
        memascend.reshard(stores, [tmp_path / "whole"], ranks=1)
    with pytest.raises(OSError, match="x is given twice"):
        memascend.reshard(stores, [tmp_path / "x", [tmp_path / "x"]], ranks=2)
    with pytest.raises(memascend.MemascendError, match="entries for 1 ranks"):
        memascend.reshard(stores, [tmp_path / "x"], ranks=2)
    for result in rank_programs.run("resume", 2, tmp_path, "resharded", steps=3, store=new):
        assert bit_equality.difference(result["before"], expected["weights"]) is None


def test_a_rank_of_several_volumes_goes_back_to_what_the_others_have(tmp_path: Path) -> None:
    stores = volumes_of(tmp_path)
    rank_programs.run("train_until_lost", 2, tmp_path, victim=1, moment="meet", steps=2, store=stores)
    assert memascend.reshard(stores, tmp_path / "whole", ranks=1) == 1
    expected = rank_programs.in_one_process(2, 3)
    # One of a rank's volumes finds the other.
    for result in rank_programs.run("resume", 2, tmp_path, "again", steps=3, store=[[b] for _, b in stores]):
        assert "error" not in result, result
        assert result["steps"] == 1
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


# ---- the generation before, of a store of two volumes --------------------------------------------------------


@pytest.fixture
def volumes(tmp_path: Path) -> list[Path]:
    """Volumes of a store with the second and the third step."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    model = rank_runs.offload(rank_runs.build(), tmp_path, keep_store=True, store=paths)
    rank_runs.Run(model, 1, range(1)).go(3)
    memascend.close(model)
    return paths


def steps_in(volumes: list[Path]) -> list[int]:
    told = common_generation._look(volumes)
    assert "error" not in told, told
    return [steps for _, steps, _ in told["generations"]]


def files_of(volumes: list[Path]) -> dict[str, str]:
    files = [file for volume in volumes for file in volume.iterdir() if file.suffix != ".lock"]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def cut_short(volume: Path) -> None:
    """Leave a volume as where the next manifest was being written when the process was killed."""
    before = volume / common_generation.BEFORE
    before.write_bytes(before.read_bytes()[:100])


def not_yet(volume: Path) -> None:
    """Leave a volume as where the process was killed when only the other volume had the newest manifest."""
    os.replace(volume / common_generation.BEFORE, volume / common_generation.MANIFEST)


def tried_twice(volume: Path) -> None:
    """Leave a volume as where the commit of a generation has failed on the other one, and was tried again."""
    (volume / common_generation.BEFORE).write_bytes((volume / common_generation.MANIFEST).read_bytes())


def nothing(_: Path) -> None:
    """Leave a volume as it is after a commit."""


@pytest.mark.parametrize("state", [nothing, cut_short, not_yet, tried_twice])
@pytest.mark.parametrize("which", [0, 1])
def test_the_step_before_is_found_on_any_volume(which: int, state: Callable[[Path], None], volumes: list[Path]) -> None:
    state(volumes[which])
    newest, before = steps_in(volumes)
    assert before < newest == 3
    files = files_of(volumes)
    assert steps_in(volumes) == [newest, before] and files_of(volumes) == files
    assert steps_in(volumes[which:][:1]) == [newest, before]
    # It is gone back to, and the newest is not found again by any volume.
    generation = common_generation._look(volumes)["generations"][1][0]
    for volume in volumes:
        if common_generation._number(volume / common_generation.MANIFEST) > generation:
            common_generation._give_up(volume, generation)
    assert steps_in(volumes)[0] == before


def test_a_look_that_is_interrupted_changes_nothing(volumes: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cut_short(volumes[1])
    found = steps_in(volumes)
    assert len(found) == 2
    interrupted = 0
    for number in range(100):
        calls = 0

        def counted(do: Any, *paths: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > number:  # noqa: B023
                raise KeyboardInterrupt
            return do(*paths, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "link", partial(counted, os.link))
            patch.setattr(os, "replace", partial(counted, os.replace))
            patch.setattr(Path, "unlink", partialmethod(partial(counted, Path.unlink)))
            try:
                steps_in(volumes)
            except KeyboardInterrupt:
                interrupted += 1
            else:
                break
        assert steps_in(volumes) == found, number
    assert interrupted > 5
