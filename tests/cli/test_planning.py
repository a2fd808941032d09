"""`memascend plan` in a few lines: whether a run fits, how long it takes here, and how to have it write less."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import small_mixtures
import tiny_models
from transformers import Qwen3MoeConfig

from memascend.cli import main
from memascend.cli.data_size import count_tokens
from memascend.common.sizes import format_size
from memascend.forecast import forecast, total_memory
from memascend.hardware import memory_limits

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_models.llama_directory(tmp_path, hidden=64)


#: Of a device and its surroundings.
RATES = ("--dram", "1e9", "--pcie", "1e9", "--ssd", "1e9")


def lines(capfd: pytest.CaptureFixture[str], model_dir: Path, *more: str) -> list[str]:
    assert main.main(["plan", str(model_dir), "--seq-len", "64", "--dtype", "float32", *more]) == 0
    return capfd.readouterr().out.splitlines()


def as_json(capfd: pytest.CaptureFixture[str], model_dir: Path, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads("\n".join(lines(capfd, model_dir, "--json", *more)))
    return found


def test_a_plan_is_a_few_lines(
    model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where no drive was measured.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fits, step, run, levers, *named, last = lines(capfd, model_dir, "--ssd", "1e9")
    assert fits.startswith("fits: ") and "host memory" in fits and "of SSD" in fits
    assert step.startswith("a step of 64 tokens: ") and "on this machine's processor" in step and "tokens/s" in step
    assert run.startswith("1,000 steps: ") and " written, " in run and "--data PATH" in run
    assert levers.startswith("largest levers") and len(named) == 3
    assert any("%  --batch-size 8 --micro-batch-size 1 (8 times" in lever for lever in named), named
    assert "--details" in last
    assert "drives not counted" in lines(capfd, model_dir)[1]


def test_rates_of_a_slow_processor_are_no_zeros(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(lines(capfd, model_dir, "--details", "--gpu", "8GiB", "--flops", "1e7", *RATES))
    assert not re.search(r" 0(\.0+)? (TFLOP|tokens)/s", text)
    assert "1e-05 TFLOP/s" in text


def test_a_budget_that_follows_the_machine_is_planned_as_a_run_begins(
    model_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    least = as_json(capfd, model_dir)["host_memory"]["total_bytes"]
    left = 2 * least + (6 << 20)
    monkeypatch.setattr(memory_limits, "memory_bounds", lambda: [memory_limits.Bound(left, 0, "a test")])
    found = as_json(capfd, model_dir, "--host-memory", "auto")["host_memory"]
    assert found["automatic"] and found["budget_bytes"] == left // 2
    told = lines(capfd, model_dir, "--host-memory", "auto")
    assert f"--host-memory auto would begin with {format_size(left // 2)} on this machine now" in told[3]
    given = as_json(capfd, model_dir, "--host-memory", "64MiB")["host_memory"]
    assert given["budget_bytes"] == 64 << 20 and not given["automatic"]
    assert main.main(["plan", str(model_dir), "--host-memory", "auto", "--ranks", "2"]) == main.BAD_INPUT
    assert "with --ranks give a size for each" in capfd.readouterr().err


def test_it_counts_the_steps_of_the_data(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = model_dir.parent / "text.txt"
    tokens = len(data.read_bytes()) + 1  # one for each byte, and the end of the document
    found = as_json(capfd, model_dir, "--data", str(data), "--epochs", "2", "--batch-size", "2")
    assert found["data"] == {"tokens": tokens, "about": "", "epochs": 2, "steps": -(-2 * tokens // 128)}
    assert found["endurance"]["steps"] == found["data"]["steps"] and found["endurance"]["steps_given"]
    assert lines(capfd, model_dir, "--data", str(data))[2].startswith(f"your data, {tokens:,} tokens: ")
    part = as_json(capfd, model_dir, "--data", str(data), "--eval", "0.5")
    assert part["data"]["tokens"] == round(tokens / 2) and part["ssd_space"]["kept_bytes"] > 0


def test_without_a_tokenizer_the_bytes_that_a_run_reads_are_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / ".git").mkdir(parents=True)
    (data / "text.txt").write_text("x" * 400)
    (data / "records.jsonl").write_text(json.dumps({"text": "y" * 389}))
    (data / ".git" / "hidden.txt").write_text("z" * 4000)
    (data / "picture.png").write_bytes(bytes(range(256)) * 16)
    assert count_tokens([data], tmp_path, 1000) == (200, True)


def test_what_does_not_fit_is_told_what_would(
    model_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = ("--batch-size", "16")
    monkeypatch.setattr(forecast, "resident_memory", lambda: 1 << 28)
    whole, eight = (
        as_json(capfd, model_dir, *large, *micro)["whole"]["total_bytes"] for micro in ((), ("--micro-batch-size", "8"))
    )
    assert eight < whole
    monkeypatch.setattr(total_memory, "available_memory", lambda: (eight - (1 << 28), "a stated limit"))
    first = lines(capfd, model_dir, *large)[0]  # of smaller ones more would do
    assert first.startswith("does not fit: ") and "It would with --micro-batch-size 8 (" in first


def test_adapters_write_nothing_and_keep_no_states(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    full, adapters = as_json(capfd, model_dir), as_json(capfd, model_dir, "--lora-rank", "4")
    assert (
        adapters["endurance"]["step"]["total_bytes"]
        == adapters["ssd_traffic"]["planned"]["written"]["activations_bytes"]
    )
    assert adapters["ssd_space"]["exp_avg_bytes"] == 0 < full["ssd_space"]["exp_avg_bytes"]
    assert adapters["ssd_traffic"]["planned"]["read"]["gradients_bytes"] == 0
    assert (
        main.main(
            [
                "plan",
                str(model_dir),
                "--lora-rank",
                "4",
                "--gpu",
                "8GiB",
                "--pcie",
                "1e9",
                "--flops",
                "1e12",
                "--dram",
                "1e9",
                "--ssd",
                "1e9",
                "--seq-len",
                "64",
            ]
        )
        == main.BAD_INPUT
    )
    assert "--lora-rank" in capfd.readouterr().err
    assert main.main(["plan", str(model_dir), "--lora-rank", "4", "--ranks", "2", "--seq-len", "64"]) == main.BAD_INPUT
    assert "--lora-rank works only in one process" in capfd.readouterr().err


def test_the_plan_of_a_mixture_names_the_better_way_to_read_its_experts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a budget the one with the smaller least; within one, the one that moves fewer bytes."""
    sizes = small_mixtures.DECODER | {"hidden_size": 1024, "num_experts": 16, "moe_intermediate_size": 512}
    large = tmp_path / "large"
    Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(large)
    small = tmp_path / "small"
    sizes |= {"moe_intermediate_size": 8, "hidden_size": 64, "num_experts": 64, "num_hidden_layers": 12}
    Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(small)

    def said(model: Path, *more: str) -> str:
        (line,) = (line for line in lines(capfd, model, *more) if line.startswith("experts"))
        return line

    for asked in ("whole", "pieces"):
        found = as_json(capfd, large, "--experts", asked)
        compared = found["experts"]
        assert compared["better"] == "pieces"
        assert compared["pieces"]["smallest_bytes"] < compared["whole"]["smallest_bytes"]
        assert compared[asked]["smallest_bytes"] == found["host_memory"]["total_bytes"]
        traffic = found["ssd_traffic"]["planned"]
        assert compared[asked]["step_bytes"] == sum(traffic[way]["total_bytes"] for way in ("read", "written"))
        assert said(large, "--experts", asked).endswith("The better one is --experts pieces")
    between = str((compared["pieces"]["smallest_bytes"] + compared["whole"]["smallest_bytes"]) // 2)
    within = as_json(capfd, large, "--experts", "pieces", "--host-memory", between)["experts"]
    assert within["whole"]["step_bytes"] is None and within["better"] == "pieces"
    within = as_json(capfd, large, "--host-memory", str(compared["whole"]["smallest_bytes"]))["experts"]
    assert within["whole"]["step_bytes"] < within["pieces"]["step_bytes"] and within["better"] == "whole"
    found = as_json(capfd, small, "--experts", "pieces")
    assert not found["experts"]["pieces"]["is_read_so"] and found["experts"]["better"] == "whole"
    assert found["host_memory"] == as_json(capfd, small)["host_memory"]
    assert "read with their layers" in said(small)
    assert as_json(capfd, tiny_models.llama_directory(tmp_path / "dense", hidden=64))["experts"] is None
