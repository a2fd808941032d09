"""Enormous numbers: a plan takes no longer for them, and impossible ones are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from traffic import GIVEN, MODELS, SMALL, plan, saved
from transformers import BloomConfig

from memascend._memascend import Projection
from memascend.cli.arguments.values import RANKS_MAX, TOKENS_MAX
from memascend.cli.main import BAD_INPUT, main
from memascend.forecast import simulation, traffic
from memascend.layout.shards import Shard
from memascend.optim.apollo_ranks import SQUARES_BYTES, Division, _length

if TYPE_CHECKING:
    from pathlib import Path


MOST = str((1 << 31) - 1)
#: Runs of the model's code, and passes that are replayed, of a whole plan.
RUNS_MAX, PASSES_MAX = 40, 6000


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets an entry for every run of a model's code and every replayed pass."""
    found: list[str] = []
    run, fetched_by = simulation._run, traffic.Replay._fetched_by

    def counting_run(*arguments: Any) -> Any:
        found.append("run")
        return run(*arguments)

    def counting_pass(*arguments: Any) -> Any:
        found.append("pass")
        return fetched_by(*arguments)

    monkeypatch.setattr(simulation, "_run", counting_run)
    monkeypatch.setattr(traffic.Replay, "_fetched_by", counting_pass)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["--batch-size", MOST],
        ["--batch-size", MOST, "--micro-batch-size", "1"],
        ["--grad-accum", MOST],
        ["--batch-size", MOST, "--grad-accum", MOST],
        ["--batch-size", "4", "--tile-tokens", "1", "--seq-len", "256"],
        ["--lora-rank", "1000000"],
        ["--steps", MOST],
        ["--ranks", str(RANKS_MAX), "--optimizer", "apollo"],
        ["--curve", "--grad-accum", MOST],
        ["--gpu", "8GiB", *GIVEN, "--grad-accum", MOST],
        ["--compare", "zero-infinity", "--grad-accum", MOST, "--batch-size", MOST],
    ],
    ids=" ".join,
)
def test_a_plan_goes_through_no_more_for_them(
    tmp_path: Path, counted: list[str], capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    saved(SMALL, tmp_path)
    assert main(["plan", str(tmp_path), "--seq-len", "64", *words]) == 0, capfd.readouterr().err
    assert "fit" in capfd.readouterr().out.splitlines()[0]
    assert counted.count("run") <= RUNS_MAX
    assert counted.count("pass") <= PASSES_MAX


@pytest.mark.parametrize(("flag", "most"), [("--ranks", RANKS_MAX), ("--seq-len", TOKENS_MAX)])
def test_more_than_is_ever_used_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flag: str, most: int
) -> None:
    saved(BloomConfig(vocab_size=1024, hidden_size=64, n_layer=2, n_head=4), tmp_path)  # without a limit of positions
    assert main(["plan", str(tmp_path), flag, str(most + 1)]) == BAD_INPUT
    assert f"argument {flag}: {most + 1} is too large: the most is {most:,}" in capfd.readouterr().err


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("words", [["--host-memory", "24MiB"], ["--gpu", "1GiB", *GIVEN], ["--ranks", "4"]])
def test_multiplied_passes_move_the_bytes_of_replayed_ones(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    words: list[str],
) -> None:
    saved(MODELS[name], tmp_path)
    words = [*words, "--seq-len", "64", "--dtype", "bfloat16", "--grad-accum", "37"]
    code, multiplied = plan(capfd, tmp_path, *words)
    assert code == 0, multiplied
    monkeypatch.setattr(traffic, "PASSES_MAX", 1000)
    _, replayed = plan(capfd, tmp_path, *words)
    for part in ("ssd_traffic", "network", "endurance", "experts"):
        assert multiplied.get(part) == replayed.get(part), part
    if "gpu" in replayed:
        amounts = [[one["amount"] for one in planned["gpu"]["step"]["resources"]] for planned in (multiplied, replayed)]
        assert amounts[0] == amounts[1]


@pytest.mark.parametrize("shape", [(300, 4000), (4000, 300), (64, 64)])
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_sums_over_ranks_are_those_of_each_pair(shape: tuple[int, int], ranks: int) -> None:
    division = Division(Projection(*shape, 8, 0, 0), 0, Shard.of(shape[0] * shape[1], False, 0, ranks))
    every = range(ranks)

    def turn(source: int, target: int) -> int:
        return _length(division.sent_by_turn(source, target))

    for rank in every:
        others = [other for other in every if other != rank]
        squares = [division.channels[other][1] * SQUARES_BYTES for other in every]
        assert division.sent_bytes(rank) == sum(turn(rank, other) + squares[rank] for other in others)
        assert division.received_bytes(rank) == sum(turn(other, rank) + squares[other] for other in others)
        assert sum(turn(rank, other) for other in division._targets(rank)) == sum(turn(rank, other) for other in every)
        assert sum(turn(other, rank) for other in division._sources(rank)) == sum(turn(other, rank) for other in every)
