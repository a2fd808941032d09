"""The figures of `memascend plan --ranks` match each rank of a real run: plan, traffic and messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rank_programs
from traffic import EXPERTS, TIED, assert_measured, saved
from transformers import LlamaConfig

from memascend.cli import main
from memascend.forecast.forecast import Gpu, forecast
from memascend.hardware.gpu import Rate

LLAMA_8B = Path(__file__).parents[2] / "benches" / "configs" / "llama-3.1-8b.json"
MODELS = {
    "llama": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    ),
    "gpt2": TIED,
    "qwen3_moe": EXPERTS,
}
GIVEN = ["--flops", "1e12", "--pcie", "1e9", "--dram", "1e9", "--ssd", "1e9"]
CASES = [
    ("llama", 2, 0, 1, "adamw"),
    ("llama", 4, 16 * 2**20, 1, "adamw"),
    ("gpt2", 2, 8 * 2**20, 2, "adamw"),
    pytest.param("gpt2", 4, 0, 1, "adamw", marks=pytest.mark.soak),
    ("qwen3_moe", 2, 0, 1, "adamw"),
    ("llama", 2, 0, 1, "apollo"),
    pytest.param("llama", 4, 0, 2, "apollo-mini", marks=pytest.mark.soak),
    ("gpt2", 4, 8 * 2**20, 1, "apollo"),
]


@pytest.mark.parametrize(("name", "ranks", "spare", "accumulate", "optimizer"), CASES)
def test_the_plan_is_that_of_every_rank_of_a_run(
    name: str, ranks: int, spare: int, accumulate: int, optimizer: str, tmp_path: Path
) -> None:
    config = MODELS[name]
    options: dict[str, Any] = {"seq_len": 128, "batch_size": 2, "grad_accum": accumulate, "ranks": ranks}
    options["optimizer"] = optimizer
    file = saved(config, tmp_path / "config")
    budget = forecast(file, **options)["host_memory"]["smallest_bytes"] + spare
    found = forecast(file, budget=budget, **options)
    given = {"config": config, "budget": budget, "accumulate": accumulate, "optimizer": optimizer}
    results = rank_programs.run("trace", ranks, tmp_path, **given)
    for rank, seen in enumerate(results):
        assert "error" not in seen, seen
        # The first rank has the small tensors, and its traffic is forecast; others may move less.
        assert_measured(found, seen, fewer=0.03 if rank == 0 else 1)
        assert found["model"]["parameters"] == seen[-1]["parameters"]
        sent = seen[3]["network_bytes_sent"] - seen[2]["network_bytes_sent"]
        assert sent == found["network"]["sent_bytes"][rank] > 0


def test_a_rank_keeps_and_moves_its_share_and_what_is_sent_is_received() -> None:
    options: dict[str, Any] = {"seq_len": 512, "batch_size": 1}
    whole = forecast(LLAMA_8B, **options)
    weights = whole["ssd_space"]["weights_bytes"]
    for ranks in (2, 3, 8):
        found = forecast(LLAMA_8B, ranks=ranks, **options)
        kept, moved = found["ssd_space"], found["network"]
        for kind in ("weights", "exp_avg", "gradients"):
            assert kept[f"{kind}_bytes"] * ranks == pytest.approx(whole["ssd_space"][f"{kind}_bytes"], rel=0.03)
        assert sum(moved["sent_bytes"]) == sum(moved["received_bytes"])
        # Of all but the embedding twice, and gradients once.
        assert max(moved["sent_bytes"]) == pytest.approx(3 * weights * (ranks - 1) / ranks, rel=0.1)
        assert moved["busiest_bytes"] == max(*moved["sent_bytes"], *moved["received_bytes"])
        assert not any("backward" in one["change"] for one in found["endurance"]["savings"])


def test_the_table_of_the_page_is_the_commands() -> None:
    lines = (LLAMA_8B.parents[2] / "docs" / "how-to" / "several-machines.md").read_text().splitlines()
    for ranks in (1, 2, 8):
        found = forecast(LLAMA_8B, seq_len=4096, batch_size=1, budget=8 << 30, ranks=ranks)
        moved = sum(found["ssd_traffic"]["planned"][way]["total_bytes"] for way in ("read", "written"))
        cells = [f"{found['ssd_space']['total_bytes'] / 2**30:.0f} GiB", f"{moved / 1e9:.0f} GB, {moved / 5e9:.1f} s"]
        if ranks > 1:
            network = found["network"]
            cells += [f"{max(network['sent_bytes']) / 1e9:.1f} GB"]
            cells += [f"{8 * network['busiest_bytes'] / rate:.1f} s" for rate in (1e9, 10e9, 100e9)]
        assert any(line.startswith(f"| {ranks} | {' | '.join(cells)} |") for line in lines), cells


def _plan(capfd: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main.main(["plan", str(LLAMA_8B), "--ranks", "2", "--dtype", "bfloat16", "--json", *more]) == 0
    return json.loads(capfd.readouterr().out)


def test_seconds_are_bytes_over_rates(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where no drive was measured.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "step" not in _plan(capfd)
    found = _plan(capfd, "--network", "25e9", "--ssd", "5e9")
    network, ssd = (
        next(one for one in found["step"]["resources"] if one["resource"] == name) for name in ("network", "ssd")
    )
    # 25 GbE is 3.125 GB/s.
    assert network["seconds"] == found["network"]["busiest_bytes"] / 3.125e9
    planned = found["ssd_traffic"]["planned"]
    assert ssd["seconds"] == sum(planned[way]["total_bytes"] for way in ("read", "written")) / 5e9
    assert found["step"]["bound_by"].startswith("SSD") and found["step"]["next"].startswith("network")
    assert found["step"]["tokens_per_second_at_most"] == pytest.approx(2 * 512 / ssd["seconds"])
    slow = _plan(capfd, "--network", "1e9")["step"]
    assert slow["bound_by"].startswith("network") and slow["next"] is None


def test_a_gpu_has_pcie_beside_them() -> None:
    rates = {name: Rate(1e9, "given") for name in ("flops", "h2d", "d2h", "dram", "ssd", "network")}
    options: dict[str, Any] = {"seq_len": 512, "batch_size": 1, "gpu": Gpu(24 << 30, rates)}
    alone, shared = (
        {
            one["resource"]: one["amount"]
            for one in forecast(LLAMA_8B, ranks=ranks, **options)["gpu"]["step"]["resources"]
        }
        for ranks in (1, 2)
    )
    assert "network" not in alone and shared["network"] > 0
    # Each rank computes with all weights, and has all gradients of its own batches. One process has the loss in pieces,
    # for which the head is multiplied once more, and copies the rows of the embedding instead of the table.
    assert shared["d2h"] == pytest.approx(alone["d2h"], rel=0.01)
    assert shared["flops"] == pytest.approx(alone["flops"], rel=0.02)
    embedding = 128256 * 4096 * 2
    assert shared["h2d"] == pytest.approx(alone["h2d"] + embedding, rel=0.01)
    assert shared["ssd"] == pytest.approx(alone["ssd"] / 2, rel=0.05)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--network", "25e9"], "--ranks too"),
        (["--ranks", "2", "--ssd", "1e9"], "--network too"),
        (["--ranks", "2", "--update", "backward"], "use forward"),
        (["--ranks", "2", "--gradients", "bfloat16", "--dtype", "float32"], "use auto"),
        (["--ranks", "2", "--gpu", "24GiB", *GIVEN], "Give --network"),
    ],
)
def test_what_cannot_be_planned_says_why(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", str(LLAMA_8B), *words]) != 0
    assert said in capfd.readouterr().err
