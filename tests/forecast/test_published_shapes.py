"""`memascend plan` of the published shapes: sums, bytes moved, and what more memory changes."""

from itertools import pairwise
from pathlib import Path

import pytest
from traffic import GIVEN, SMALL, plan, saved

from memascend.cli import main
from memascend.forecast.forecast import forecast
from memascend.forecast.kinds import KINDS
from memascend.hardware.gpu import Rate

CONFIGS = sorted((Path(__file__).parents[2] / "benches" / "configs").glob("*.json"))
PARAMETERS = {
    "gemma-like-4b": 3_880_099_328,
    "gpt2-xl": 1_557_611_200,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.mark.core
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_published_shape_can_be_planned(file):
    found = forecast(file, seq_len=1024, batch_size=1)
    model, host, space = found["model"], found["host_memory"], found["ssd_space"]
    assert model["parameters"] == PARAMETERS[file.stem]
    for lines in (host["lines"], model["units"]):
        assert all(line["total_bytes"] == line["nbytes"] * line["count"] for line in lines)
    assert sum(line["total_bytes"] for line in host["lines"]) == host["total_bytes"] == host["smallest_bytes"]
    assert sum(unit["total_bytes"] for unit in model["units"]) == space["weights_bytes"] >= 2 * model["parameters"]
    moved = found["ssd_traffic"]["planned"]
    for part in (space, moved["read"], moved["written"]):
        assert part["total_bytes"] == sum(part[f"{kind}_bytes"] for kind in KINDS)
    assert space["exp_avg_bytes"] == pytest.approx(4 * model["parameters"], rel=1e-3)
    # The floor and the ceiling of ARCHITECTURE.md; activations come on top.
    activations = space["activations_bytes"] / model["parameters"]
    assert 13.9 < moved["written_bytes_per_parameter"] < 14.01 + activations
    # The head is read by blocks for the loss and for its gradient, beside its update.
    assert 14 < moved["read_bytes_per_parameter"] < 16.4 + activations


@pytest.mark.parametrize(
    ("optimizer", "options", "at_most"),
    [
        ("apollo", {"states": "8bit"}, 15.5),
        ("apollo-mini", {}, 14.5),
        ("apollo", {"master": False, "update": "backward"}, 10.5),
        ("apollo-mini", {"master": False, "update": "backward"}, 8.5),
    ],
)
def test_apollo_moves_few_bytes(optimizer, options, at_most):
    file = next(file for file in CONFIGS if file.stem == "llama-3.1-8b")
    moved = forecast(file, seq_len=128, batch_size=1, optimizer=optimizer, budget=8 << 30, **options)
    planned = moved["ssd_traffic"]["planned"]
    assert planned["read_bytes_per_parameter"] + planned["written_bytes_per_parameter"] <= at_most
    # The largest gradient has 14,336 x 4,096 elements. Two at a time: a number for each channel and rank in the
    # projection and in both moments, for each rank and place in a channel in the random matrix, in whole registers,
    # each channel's sums of squares, and 1 MiB of pieces that are put together.
    ranks, padded = (256, 256) if optimizer == "apollo" else (1, 16)
    projections = moved["pytorch"]["projections_bytes"]
    sums = 14_336 * 8 * 8
    assert projections == 2 * (4 * (14_336 * (3 * ranks + 2) + 4_096 * padded) + sums + 2**20)
    assert moved["pytorch"]["estimated_bytes"] >= moved["pytorch"]["backward_bytes"] + projections


def test_spare_budget_saves_traffic_until_only_durable_steps_move():
    def run(budget, durability="step"):
        return forecast(CONFIGS[0], seq_len=128, batch_size=1, budget=budget, durability=durability)["ssd_traffic"]

    least = forecast(CONFIGS[0], seq_len=128, batch_size=1)["host_memory"]["smallest_bytes"]
    saved = [run(budget)["saved_bytes"] for budget in (least, least + 2**30, least + 2**32, 2**40)]
    assert saved[0] == 0
    assert saved == sorted(set(saved))
    step, third, none = (run(2**40, durability)["planned"] for durability in ("step", "every:3", "none"))
    # The eight chunks of staging that gradients leave to transfers are free all the same.
    assert [moved["read"]["total_bytes"] for moved in (step, third, none)] == [0, 0, 0]
    assert step["written_bytes_per_parameter"] == pytest.approx(12, rel=1e-3)
    assert third["written_bytes_per_parameter"] == pytest.approx(4, rel=1e-3)
    assert none["written"]["total_bytes"] == 0


def test_experts_are_whole_tensors_of_three_dimensions():
    file = next(file for file in CONFIGS if "a3b" in file.stem)
    found = forecast(file, seq_len=128, batch_size=1, compare="zero-infinity")
    assert found["model"]["largest_parameter"] == 128 * 2 * 768 * 2048
    # Embedding, head, four of attention and two of experts; norms and a router of 512 KiB are not swapped.
    assert found["zero_infinity"]["slots"] == 2 + 4 + 2
    assert found["zero_infinity"]["slot_bytes"] == 2 * 128 * 2 * 768 * 2048


def test_a_directory_is_planned_like_its_config(tmp_path, capfd):
    saved(SMALL, tmp_path)
    code, of_directory = plan(capfd, tmp_path, "--seq-len", 64)
    assert code == 0
    _, of_file = plan(capfd, tmp_path / "config.json", "--seq-len", 64)
    assert of_file["model"].pop("path") == f"{of_directory['model'].pop('path')}/config.json"
    for told in (of_file, of_directory):
        assert told.pop("step")["floor_seconds"] > 0, "measured, each time anew"
        assert (
            told.pop("whole")["planned_bytes"] == told["host_memory"]["total_bytes"]
        )  # the remainder is of the moment
    assert of_file == of_directory


@pytest.mark.parametrize("durability", ["step", "every:16", "none"])
@pytest.mark.parametrize("file", [CONFIGS[0], CONFIGS[-1]], ids=lambda file: file.stem)
def test_more_memory_never_moves_more(file, durability):
    points = forecast(file, seq_len=512, batch_size=1, durability=durability, with_curve=True, ssd=Rate(1e9, "given"))
    curve = points["curve"]
    budgets = [point["budget_bytes"] for point in curve]
    assert budgets == sorted(set(budgets)) and len(budgets) > 10
    moved = [point["read_bytes"] + point["written_bytes"] for point in curve]
    # Chunks grow with the budget, and gradients leave eight of them to transfers.
    assert all(after <= before * 1.002 for before, after in pairwise(moved))
    assert [point["seconds_at_least"] for point in curve] == [round(nbytes / 1e9, 3) for nbytes in moved]
    assert curve[0]["bytes_per_parameter"] > 28
    least = {"step": 12, "every:16": 12 / 16, "none": 0}[durability]
    assert curve[-1]["bytes_per_parameter"] == pytest.approx(least, abs=0.01)


def test_the_curve_is_shown_where_it_is_asked_for(tmp_path, capfd):
    folder = saved(SMALL, tmp_path)
    words = ["plan", str(folder), "--seq-len", "64"]
    assert main.main(words) == 0
    assert "More host memory" not in capfd.readouterr().out
    assert main.main([*words, "--curve"]) == 0
    shown = capfd.readouterr().out
    assert "More host memory" in shown and "seconds at least" not in shown and "memascend bench" in shown
    assert main.main([*words, "--curve", "--ssd", "1e9"]) == 0
    assert "seconds at least" in capfd.readouterr().out
    assert main.main([*words, "--ssd", "1e9"]) == 0
    assert "drives not counted" not in capfd.readouterr().out
    code, found = plan(capfd, folder, "--gpu", "8GiB", "--seq-len", 128, "--curve", *GIVEN)
    assert code == 0
    # On a device other resources bind too.
    assert found["curve"][-1]["seconds_at_least"] > 0
