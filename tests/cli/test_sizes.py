"""Which models `memascend doctor` says can be trained here: by the counts of `memascend plan`."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from memascend.cli import main
from memascend.doctor import sizes

CONFIGS = Path(__file__).resolve().parents[2] / "benches" / "configs"
Usage = namedtuple("Usage", ("total", "used", "free"))


@pytest.mark.parametrize(
    ("memory", "ssd", "said", "level"),
    [
        (1 << 40, 10**12, ["full: up to Qwen2.5 32B", "adapters: up to Qwen2.5 32B"], "ok"),
        (1 << 30, 10**12, ["full: up to Qwen2.5 14B", "adapters: up to GPT-2 XL (1.6B)"], "ok"),
        (1 << 40, 3 * 10**11, ["full: up to Llama 3.1 8B", "8-bit states: up to Qwen2.5 14B"], "ok"),
        (1 << 28, 10**12, ["full: none of these"], "note"),
    ],
)
def test_the_largest_that_fits_is_named(
    memory: int, ssd: int, said: list[str], level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes.memory_limits, "available_memory", lambda: (memory, "a stated limit"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(ssd, 0, ssd))
    found = sizes.sizes([tmp_path])
    assert all(part in found.text for part in said), found.text
    assert found.level == level
    if memory == 1 << 40:
        assert "SSD for full: Qwen2.5 32B 852.19 GB" in sizes.sizes([]).text


def test_the_numbers_are_those_of_a_plan(capfd: pytest.CaptureFixture[str]) -> None:
    for name, file in (("GPT-2 XL (1.6B)", "gpt2-xl"), ("Llama 3.1 8B", "llama-3.1-8b")):
        words = ["plan", str(CONFIGS / f"{file}.json"), "--dtype", "bfloat16", "--json"]
        for kind, more in (("full", []), ("full with 8-bit states", ["--states", "8bit"])):
            assert main.main([*words, *more]) == 0
            plan = json.loads(capfd.readouterr().out)
            needs = sizes.NEEDS[name][kind]
            assert needs.ssd == plan["ssd_space"]["total_bytes"]
            memory = plan["whole"]["planned_bytes"] + plan["whole"]["pytorch_bytes"]
            assert needs.memory == pytest.approx(memory, rel=0.02)  # another PyTorch holds a little more or less
