"""Options that a plan or a refusal names are accepted, and have the effect that was named."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
from typing import TYPE_CHECKING, Any

import chat_models
import pytest
import tiny_models
import transformers
from commands import words_of

from memascend.cli.jobs import planning
from memascend.cli.main import BAD_INPUT, main
from memascend.common.sizes import format_least, parse_size
from memascend.hardware import gpu

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, on the layers of GPT-2

SEED = int(os.environ.get("MEMASCEND_SEED", "0"))
PLANS = 3
#: Of the share of the bytes that a lever saves; the shares are rounded.
NEAR = 2e-4
OPTIONS: list[list[str]] = [
    ["--seq-len 32", "--seq-len 64", "--seq-len 1000"],
    ["--batch-size 1", "--batch-size 3", "--batch-size 8"],
    ["--grad-accum 1", "--grad-accum 1", "--grad-accum 2", "--grad-accum 3"],
    ["", "", "--optimizer apollo", "--optimizer lion", "--optimizer sgd", "--optimizer apollo-mini"],
    ["", "--states bfloat16", "--states 8bit"],
    ["", "", "--no-master"],
    ["", "--durability none", "--durability every:4", "--durability step"],
    ["", "--host-memory 10MiB", "--host-memory 20MiB", "--host-memory 40MiB", "--host-memory 1GiB"],
    ["", "", "--micro-batch-size 1"],
    ["--dtype float32", "--dtype bfloat16"],
    ["", "", "", "--update backward"],
    ["", "", "", "--ranks 2"],
    ["", "", "", "--lora-rank 4"],
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    room = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 4096}
    chat_models.folder_of(room / "large", **sizes)
    chat_models.folder_of(room / "small")
    gpt2 = transformers.GPT2Config(vocab_size=512, n_embd=128, n_layer=3, n_head=4)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(room / "gpt2")
    return [str(path) for path in sorted(room.iterdir())]


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan measures the processor again."""
    monkeypatch.setattr(planning, "product_rates", lambda _: (8e9, 3e10))
    monkeypatch.setattr(gpu, "measure_update", lambda _: gpu.Rate(1e9, "given"))


def applied(words: list[str], change: str) -> list[str]:
    """Return a command with the options of a change, which take the place of the same options."""
    words = list(words)
    for option in re.findall(r"--[a-z-]+(?: [^ -][^ ]*)?", re.sub(r"\(.*?\)", "", change)):
        flag, *value = option.split()
        if flag in words:
            begin = words.index(flag)
            taken = 1 + int(begin + 1 < len(words) and not words[begin + 1].startswith("--"))
            del words[begin : begin + taken]
        words += [flag, *value]
    return words


def plan(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    code = main(["plan", *words, "--json"])
    return code, json.loads(capfd.readouterr().out)


def step_tokens(prediction: dict[str, Any]) -> int:
    traffic = prediction["ssd_traffic"]
    product: int = traffic["seq_len"] * traffic["batch_size"] * traffic["grad_accum"]
    return product


@pytest.mark.parametrize("case", [*range(4), *(pytest.param(n, marks=pytest.mark.soak) for n in range(4, 40))])
def test_levers_of_plans(models: list[str], case: int, capfd: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(f"{SEED} {case}")
    tried = accepted = 0
    while accepted < PLANS:
        words = [chance.choice(models)]
        for choice in OPTIONS:
            words += chance.choice(choice).split()
        code, before = plan(words, capfd)
        told = f"seed {SEED}, case {case}: {shlex.join(words)}"
        if code:
            assert code == BAD_INPUT, f"{told}: {before}"
            if "smallest_bytes" in before:
                named = re.search(r"the least is (\S+) \(", before["error"])
                assert named is not None and plan(applied(words, f"--host-memory {named[1]}"), capfd)[0] == 0, told
            continue
        accepted += 1
        written = before["endurance"]["step"]["total_bytes"]
        for lever in before["endurance"]["savings"]:
            code, after = plan(applied(words, lever["change"]), capfd)
            assert code == 0, f"{told}, with {lever['change']}: {after}"
            assert after["endurance"]["step"]["total_bytes"] == lever["step_bytes"], f"{told}, with {lever['change']}"
            share = step_tokens(before) / step_tokens(after)
            saved = 1 - lever["step_bytes"] * share / max(written, 1)
            assert saved == pytest.approx(lever["saved"], abs=NEAR), f"{told}, with {lever['change']}"
            tried += 1
    assert tried, "no lever was named"


@pytest.mark.parametrize("room", [60, 100, 170])
@pytest.mark.parametrize("options", ["", "--grad-accum 2 --batch-size 8", "--host-memory 100MiB --seq-len 1024"])
def test_a_change_with_which_a_run_fits(
    models: list[str], room: int, options: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memascend.forecast import total_memory

    monkeypatch.setattr(total_memory, "available_memory", lambda: (room << 20, "given"))
    words = [models[1], "--dtype", "float32", *options.split()]
    code, before = plan(words, capfd)
    assert code == 0
    change = before.get("fits_with")
    if not before["whole"]["fits"] and change:
        code, after = plan(applied(words, change), capfd)
        assert code == 0, f"{change}: {after}"
        assert after["whole"]["fits"], change


def test_levers_are_accepted_by_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run takes the options that its plan proposes."""
    model = tiny_models.llama_directory(tmp_path, hidden=64)
    (tmp_path / "text.txt").write_text("a b c " * 500)
    code, before = plan([str(model), "--seq-len", "32", "--dtype", "float32", "--host-memory", "20MiB"], capfd)
    assert code == 0 and len(before["endurance"]["savings"]) >= 3
    words = words_of(model, tmp_path / "out", tmp_path / "store", host_memory="20MiB", dtype="float32", steps=1)
    for number, lever in enumerate(before["endurance"]["savings"]):
        again = applied(applied(words, lever["change"]), f"--out {tmp_path / f'out{number}'}")
        assert main(again) == 0, f"{lever['change']}: {capfd.readouterr().err}"


def test_the_least_budget_that_is_named_is_enough(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It was rounded to the nearest tenth, which may be lower."""
    for nbytes in (1, 1023, 1 << 20, (1 << 20) + 1, 15_873_434, 1 << 30, (1 << 30) + 1, 3_333_333_333, 98_765_432_109):
        assert nbytes <= parse_size(format_least(nbytes)) <= nbytes * 1.1 + 1
    model = tiny_models.llama_directory(tmp_path, hidden=64)
    (tmp_path / "text.txt").write_text("a b c " * 500)
    words = words_of(model, tmp_path / "out", tmp_path / "store", host_memory="1MiB", dtype="float32", steps=1)
    assert main(words) == BAD_INPUT
    named = re.search(r"the least is (\S+) \(", capfd.readouterr().err)
    assert named is not None and main(applied(words, f"--host-memory {named[1]}")) == 0, capfd.readouterr().err
