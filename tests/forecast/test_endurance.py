"""The writes of a run: against real runs, against the drives' rating, and savings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
from commands import words_of
from traffic import build, saved, steps
from transformers import LlamaConfig

import memascend
from memascend.cli import main, writes
from memascend.common.sizes import format_decimal
from memascend.forecast.forecast import forecast
from memascend.forecast.kinds import KINDS
from memascend.hardware import drives

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

LLAMA_8B = Path(__file__).parents[2] / "benches" / "configs" / "llama-3.1-8b.json"
SMALL = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


def endurance_of(**options: Any) -> dict[str, Any]:
    found: dict[str, Any] = forecast(LLAMA_8B, **{"seq_len": 512, "batch_size": 1} | options)["endurance"]
    return found


@pytest.mark.core
def test_the_sum_of_a_run() -> None:
    found = endurance_of(steps=200, tbw=600.0, busiest_share=0.5)
    step = found["step"]
    assert step["total_bytes"] == sum(step[f"{kind}_bytes"] for kind in KINDS)
    assert found["begin_bytes"] == pytest.approx(2 * 8_030_261_248, rel=1e-3)
    assert found["total_bytes"] == found["begin_bytes"] + 200 * step["total_bytes"]
    assert (found["rated_bytes"], found["steps_given"]) == (600 * 10**12, True)
    assert found["rating_used"] == pytest.approx(found["total_bytes"] / 2 / 600e12)
    unknown = endurance_of()
    assert (unknown["steps"], unknown["steps_given"]) == (1000, False)
    assert unknown["rated_bytes"] is unknown["rating_used"] is None


def test_what_would_write_less() -> None:
    def written(**options: Any) -> int:
        total: int = endurance_of(**options)["step"]["total_bytes"]
        return total

    budget = 8 << 30
    now = endurance_of(budget=budget)
    savings = {saving["change"]: saving for saving in now["savings"]}
    # Each equals a plan with that option.
    options: dict[str, dict[str, Any]] = {
        "--states 8bit": {"states": "8bit"},
        "--states bfloat16": {"states": "bfloat16"},
        "--optimizer apollo": {"optimizer": "apollo"},
        "--update backward --max-grad-norm 0 (without clipping)": {"update": "backward"},
    }
    for change, chosen in options.items():
        assert savings[change]["step_bytes"] == written(budget=budget, **chosen), change
        share = 1 - savings[change]["step_bytes"] / now["step"]["total_bytes"]
        assert savings[change]["saved"] == pytest.approx(share, abs=1e-4)
    larger = {change: saving["budget_bytes"] for change, saving in savings.items() if saving["budget_bytes"]}
    seldom = [change for change in larger if change.endswith(" --durability every:16")]
    assert len(larger) >= 2 and len(seldom) == 1, "states do not stay below the whole of the model"
    for change, nbytes in larger.items():
        durability = "every:16" if change in seldom else "auto"
        assert savings[change]["step_bytes"] == written(budget=nbytes, durability=durability), change
        assert str(nbytes >> 20) in change
    assert savings[seldom[0]]["saved"] > 0.9
    # Options in use are not proposed.
    done = endurance_of(budget=budget, states="8bit", update="backward", durability="none")["savings"]
    assert not any(word in saving["change"] for saving in done for word in ("states", "update", "durability"))
    assert not any("update" in saving["change"] for saving in endurance_of(grad_accum=2)["savings"])
    assert endurance_of(budget=1 << 40, durability="none")["savings"] == []
    # Micro-batches that go through each layer while it is in memory come first.
    accumulating, sliced = endurance_of(grad_accum=4), {"batch_size": 4, "micro_batch_size": 1}
    found = {saving["change"]: saving for saving in accumulating["savings"]}
    assert found["--batch-size 4 --micro-batch-size 1 --grad-accum 1"]["step_bytes"] == written(**sliced)
    # So do more tokens in a step, which then are fewer.
    more = now["savings"][[saving["steps_share"] for saving in now["savings"]].index(1 / 8)]
    assert more["change"] == "--batch-size 8 --micro-batch-size 1 (8 times the tokens a step)"
    assert more["step_bytes"] == written(budget=budget, batch_size=8, micro_batch_size=1)
    assert more["saved"] == pytest.approx(1 - more["step_bytes"] / 8 / now["step"]["total_bytes"], abs=1e-4)
    for savings_of in (now, accumulating):
        shares = [saving["saved"] for saving in savings_of["savings"]]
        assert shares == sorted(shares, reverse=True), "the largest come first"


@pytest.mark.parametrize(("durability", "update"), [("step", "forward"), ("every:2", "forward"), ("step", "backward")])
def test_it_is_what_a_real_run_writes(
    tmp_path: Path, offloaded: Callable[..., torch.nn.Module], durability: str, update: str
) -> None:
    model = build(SMALL)
    budget = 256 << 20  # Everything stays in memory.
    count = 6
    found = forecast(
        saved(SMALL, tmp_path / "config"),
        seq_len=64,
        batch_size=1,
        budget=budget,
        durability=durability,
        update=update,
        steps=count,
    )["endurance"]
    offloaded(model, host_memory=budget, durability=durability, update=update)
    assert memascend.stats(model)["ssd_bytes_written"] == found["begin_bytes"]
    optimizer = memascend.AdamW(model.parameters(), lr=1e-4)
    steps(model, optimizer, count, 1, 1, 64, SMALL.vocab_size)
    optimizer.flush()
    written = memascend.stats(model)["ssd_bytes_written"]
    period = 2 if durability == "every:2" else 1
    # A commit may be a step away: of the last two steps one or none is written by then.
    slack = found["step"]["total_bytes"] * period
    assert abs(written - found["total_bytes"]) <= slack
    assert found["step"]["total_bytes"] == pytest.approx(12 * found["begin_bytes"] / 2 / period, rel=0.02)


# ---- the command line -------------------------------------------------------------------------------------------


def test_a_plan_shows_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(saved(SMALL, tmp_path)), "--seq-len", "64", "--details"]
    assert main.main(words) == 0
    shown = capfd.readouterr().out
    assert "Written by a run of 1,000 steps; --steps N" in shown and "--tbw TB: the share" in shown
    assert main.main([*words, "--steps", "500", "--tbw", "0.1"]) == 0
    shown = capfd.readouterr().out
    assert "Written by a run of 500 steps\n" in shown and "% of the 100.00 GB that a drive is rated for\n" in shown
    assert "Options that write less" in shown and "--states bfloat16" in shown
    assert main.main([*words, "--steps", "2000000", "--tbw", "0.001"]) == 0
    shown = capfd.readouterr().out
    assert "% of" not in shown.splitlines()[2] and " times its rated 1.00 GB" in shown
    assert " times the 1.00 GB that a drive is rated for" in shown
    stores = [word for name in ("a", "b") for word in ("--store", str(tmp_path / name))]
    assert main.main([*words, "--tbw", "0.1", *stores]) == 0
    assert "the busiest takes" not in capfd.readouterr().out, "both are on one drive"


def test_shares_of_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"a": "one", "b": "two", "c": "two", "d": None}
    monkeypatch.setattr(drives, "identity", names.__getitem__)
    assert drives.busiest_share([]) == drives.busiest_share(["a"]) == drives.busiest_share(["b", "c"]) == 1
    assert drives.busiest_share(["a", "b", "c"]) == pytest.approx(2 / 3)
    assert drives.busiest_share(["a", "d"]) == 0.5
    monkeypatch.setattr(drives, "store_options", lambda locations: ({"rates": [3e9, 1e9]}, None))
    assert drives.busiest_share(["a", "b"]) == 0.75


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with text beside it."""
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=64)


def lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if "the run will write" in line]


def test_a_run_begins_with_it(model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = words_of(model_dir, tmp_path / "out", tmp_path / "store", durability="step")
    assert main.main([*words, "--tbw", "0.001", "--keep-store"]) == 0
    (line,) = lines(capfd.readouterr().err)
    assert "in 2 steps" in line and "of the 1.00 GB that a drive is rated for" in line and "--tbw-share" not in line
    opening = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    found = opening["forecast"]["endurance"]
    assert format_decimal(found["total_bytes"]) in line
    assert opening["forecast"]["ssd_bytes_written"] == found["step"]["total_bytes"]
    # A run that goes on has written its weights, and keeps its states.
    more = words_of(model_dir, tmp_path / "more", tmp_path / "store", durability="step", steps=6)
    assert main.main([*more, "--resume", "--change", "--tbw", "0.001", "--tbw-share", "0"]) == 0
    (line,) = lines(capfd.readouterr().err)
    assert f"will write {format_decimal(4 * found['step']['total_bytes'])} in 4 steps" in line
    assert "more than --tbw-share 0%" in line and "--durability every:16 saves" in line and "--states" not in line


def test_what_a_run_of_epochs_writes_is_warned_of(
    model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "CHANGES_TOLD", 2)
    words = words_of(model_dir, tmp_path / "out", tmp_path / "store", durability="every:2")
    at = words.index("--steps")
    words[at : at + 2] = ["--epochs", "1"]
    assert main.main([*words, "--tbw", "0.0001", "--tbw-share", "1.5"]) == 0
    (line,) = lines(capfd.readouterr().err)
    named = [part.split(" saves ")[0] for part in line.split("more than --tbw-share 1.5%: ")[1].split(", ")]
    assert named == ["--batch-size 8 --micro-batch-size 1 (8 times the tokens a step)", "--durability every:16"]


def test_a_share_needs_a_rating(model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = words_of(model_dir, tmp_path / "out", tmp_path / "store")
    assert main.main([*words, "--tbw-share", "5"]) == main.BAD_INPUT
    assert "give --tbw too" in capfd.readouterr().err
    assert main.main([*words, "--tbw", "1", "--tbw-share", "101"]) == main.BAD_INPUT
    assert "'101' is not a percentage" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_more_memory_than_the_machine_has_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = writes.for_steps(endurance_of(tbw=1.0), 10, begins=True)
    monkeypatch.setattr(writes, "CHANGES_TOLD", 99)
    monkeypatch.setattr(writes, "total_memory", lambda: 1 << 40)
    assert "--host-memory" in (writes.text_of(found, 1.0, begins=True) or "")
    monkeypatch.setattr(writes, "total_memory", lambda: 1)
    text = writes.text_of(found, 1.0, begins=True) or ""
    assert "--host-memory" not in text and "--states 8bit saves" in text
    assert "take fewer --steps" in (writes.text_of(found | {"savings": []}, 1.0, begins=True) or "")
    # Without a rating, the usual rating of drives is named, where that is worth a line.
    usual = writes.text_of(endurance_of(), 20.0, begins=True) or ""
    assert "18.76% of what a drive rated for 600 TB takes" in usual and "saves" not in usual
    assert "--states 8bit saves" in (writes.text_of(endurance_of(), 10.0, begins=True) or "")
    assert writes.text_of(writes.for_steps(endurance_of(), 10, begins=True), 1.0, begins=True) is None
