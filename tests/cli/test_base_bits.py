"""`--base-bits`: adapters over weights that are quantised as the model is read, and plans of such runs."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import faults
import pytest
import requirements
import tiny_models
from commands import command, in_memory, words_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import memascend
from memascend.cli import adapters, main

if TYPE_CHECKING:
    from pathlib import Path

RUN: dict[str, Any] = {"lora_rank": 4, "steps": 16, "save_every": 2, "lr": 1e-2}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    # Rows are whole blocks of 64: others bitsandbytes' function for AVX-512 dequantises with scales of other blocks.
    return tiny_models.llama_directory(tmp_path, hidden=128, layers=2)


def words(model_dir: Path, out: str, *flags: str, **changed: Any) -> list[str]:
    room = model_dir.parent
    return [*words_of(model_dir, room / out, room / f"store-{out}", **RUN | changed), *flags]


def test_a_killed_run_ends_as_one_over_the_weights_of_bitsandbytes(
    model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    functional = requirements.package("bitsandbytes").functional
    room = model_dir.parent
    checkpoints = room / "store-out" / adapters.FOLDER
    with faults.Child(room, command, words(model_dir, "out", base_bits=4)) as child:
        while not (checkpoints / "checkpoint-4" / "progress.json").exists():
            assert child.alive(), child.wait().err
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert main.main(words(model_dir, "out", "--resume")) == main.BAD_INPUT
    assert "--base-bits is None, but the run in the store has 4" in capfd.readouterr().err
    assert main.main(words(model_dir, "out", "--resume", base_bits=4)) == 0, capfd.readouterr().err
    assert "going on after step" in capfd.readouterr().err
    # The same directory with the values that bitsandbytes makes of its weights.
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="bfloat16")
    for name, value in model.named_parameters():
        if name.endswith("_proj.weight"):
            quantised = functional.quantize_4bit(value.data, compress_statistics=True, quant_type="nf4")
            value.data.copy_(functional.dequantize_4bit(*quantised))
    model.save_pretrained(model_dir)
    assert main.main(words(model_dir, "plain")) == 0, capfd.readouterr().err
    ours, theirs = (load_file(room / out / "adapter_model.safetensors") for out in ("out", "plain"))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_answers_are_those_of_the_quantised_weights(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = model_dir.parent
    (room / "prompts.txt").write_text("7 times\n")
    model = memascend.from_pretrained(model_dir, store=room / "s", host_memory="64MiB", frozen="store", frozen_bits=4)
    memascend.save_pretrained(model, room / "dequantised")
    memascend.close(model)

    def answers(directory: Path, *flags: str) -> str:
        given = ["generate", str(directory), "--prompts", str(room / "prompts.txt"), "--temperature", "0", "--raw"]
        given += ["--max-new-tokens", "24", "--host-memory", "64MiB", "--store", str(room), *flags]
        code, (out, told) = main.main(given), capfd.readouterr()
        assert code == 0, told
        return out

    found = answers(model_dir, "--base-bits", "4")
    assert found == answers(room / "dequantised") != answers(model_dir)
    given = ["generate", str(model_dir), "--prompts", str(room / "prompts.txt"), "--max-new-tokens", "8"]
    assert main.main([*given, "--store", str(room), "--base-bits", "4", "--experts", "pieces"]) == main.BAD_INPUT
    assert "frozen_bits does not work yet with experts='pieces'" in capfd.readouterr().err


def test_options_that_do_not_go_with_it_are_refused(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = words(model_dir, "out", base_bits=4)
    at = given.index("--lora-rank")
    for refused, told in (
        (given[:at] + given[at + 2 :], "--base-bits 4 quantises weights that are not trained: give --lora-rank"),
        (in_memory(given), "--base-bits 4 works only with weights on an SSD: leave it out, or leave out --in-memory"),
        (words(model_dir, "out", base_bits=8, dtype="float32"), "computes in bfloat16: leave out --dtype float32"),
    ):
        assert main.main(refused) == main.BAD_INPUT
        assert told in capfd.readouterr().err


def test_a_plan_has_the_bytes_of_quantised_weights(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def planned(*flags: str) -> dict[str, Any]:
        given = ["plan", str(model_dir), "--seq-len", "32", "--json", "--lora-rank", "4", "--dtype", "bfloat16", *flags]
        assert main.main(given) == 0
        return json.loads(capfd.readouterr().out)

    plain, four, eight = planned(), planned("--base-bits", "4"), planned("--base-bits", "8")
    plans = (plain, four, eight)
    assert [plan["model"]["base_bits"] for plan in plans] == [None, 4, 8]
    space = [plan["ssd_space"]["weights_bytes"] for plan in plans]
    read = [plan["ssd_traffic"]["smallest"]["read"]["weights_bytes"] for plan in plans]
    assert space[1] < space[2] < space[0] and read[1] < read[2] < read[0]
    lines = [line["consumer"] for line in four["host_memory"]["lines"]]
    assert len(lines) == len(plain["host_memory"]["lines"]) + 1  # Windows that files are read through.
    for flags, told in (
        (("--base-bits", "4"), "give --lora-rank too"),
        (("--base-bits", "4", "--lora-rank", "4", "--dtype", "float32"), "leave out --dtype float32"),
    ):
        assert main.main(["plan", str(model_dir), "--seq-len", "32", *flags]) == main.BAD_INPUT
        assert told in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # by PEFT
def test_layers_without_linear_weights_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """GPT-2's are of transformers' Conv1D."""
    config = GPT2Config(vocab_size=258, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    plan = ["plan", str(tmp_path / "gpt2"), "--seq-len", "32", "--lora-rank", "4", "--base-bits", "4"]
    assert main.main(plan) == main.BAD_INPUT
    assert "GPT2LMHeadModel has no linear weights in repeated layers" in capfd.readouterr().err
