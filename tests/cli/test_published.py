"""Adapters over layers that stay quantised as they are published: runs, and plans of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import faults
import pytest
import quantised_models as models
import requirements
import torch
from commands import command, in_memory, words_of
from safetensors.torch import load_file
from test_records import PLAIN, TALK, lines, write_tokenizer
from transformers import FineGrainedFP8Config, Mxfp4Config

import memascend
from memascend.cli import adapters, main
from memascend.layout import tables

STEPS = 20
RUN: dict[str, Any] = {"lora_rank": 4, "steps": STEPS, "lr": 1e-2, "seq_len": 32}
#: Rows of a table of tokens that is read by blocks, below.
VOCABULARY = 4096


def with_tables() -> None:
    """Have small tables lie in the store, as large ones do."""
    tables.TABLE_BYTES_MIN = 1 << 18


@pytest.fixture
def by_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "TABLE_BYTES_MIN", 1 << 18)


def directories(room: Path, form: str, layers: int = 2) -> tuple[Path, Path]:
    """Write a small model in a form, and as transformers dequantises it in memory, with a tokenizer for chats."""
    packed, plain = room / "packed", room / "plain"
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": layers}
    config: Any
    if form == "mxfp4":
        models.mxfp4(packed, intermediate_size=32, **sizes)
        config = Mxfp4Config(dequantize=True)
    else:
        models.fp8(packed, models.llama(**sizes))
        config = FineGrainedFP8Config(dequantize=True)
    models.dequantised_by_transformers(packed, config).save_pretrained(plain)
    for directory in (packed, plain):
        write_tokenizer(directory, PLAIN)
    return packed, plain


def words(model_dir: Path, out: str, *flags: str, **changed: Any) -> list[str]:
    room = model_dir.parent
    given = RUN | {"data": room / "data.jsonl", "metrics": room / f"{out}.jsonl"} | changed
    return [*words_of(model_dir, room / out, room / f"store-{out}", **given), *flags]


def losses(file: Path) -> dict[int, float]:
    records = map(json.loads, file.read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["record"] == "step"}


@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
def test_a_killed_run_over_chats_ends_as_one_in_memory(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], by_tables: None
) -> None:
    check_killed(*directories(tmp_path, form), capfd)


#: Not those whose scales have all powers of two: products of them are infinite.
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("form", [form for form in models.FORMS if form != "mxfp4-all-powers"])
def test_a_killed_run_over_any_form_ends_as_one_over_its_librarys_weights(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    _, wanted = models.made(form, packed)
    model = models.without_weights(packed)
    for name, value in wanted.items():
        model.get_parameter(name).data.copy_(value.detach())
    model.save_pretrained(plain)
    for directory in (packed, plain):
        write_tokenizer(directory, PLAIN)
    check_killed(packed, plain, capfd)


def check_killed(packed: Path, plain: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Compare a run over a directory, killed and resumed, with one in memory over the dequantised weights."""
    peft = requirements.package("peft")
    room = packed.parent
    lines(room, *({"messages": [{**turn, "content": f"{n}{turn['content']}"} for turn in TALK]} for n in range(40)))
    ours = words(packed, "ours", "--dequantize", save_every=2)
    with faults.Child(room, command, ours, with_tables) as child:
        while not (room / "store-ours" / adapters.FOLDER / "checkpoint-4" / "progress.json").exists():
            assert child.alive(), child.wait().err
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert main.main([*ours, "--resume"]) == 0, capfd.readouterr().err
    told = capfd.readouterr().err
    assert "going on after step" in told
    assert main.main(in_memory(words(plain, "theirs"))) == 0, capfd.readouterr().err
    assert losses(room / "ours.jsonl") == losses(room / "theirs.jsonl")
    assert losses(room / "ours.jsonl").keys() == set(range(1, STEPS + 1))
    mine, other = (load_file(room / out / "adapter_model.safetensors") for out in ("ours", "theirs"))
    assert mine.keys() == other.keys() and all(mine[name].equal(other[name]) for name in mine)
    # PEFT takes the directory.
    base = models.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    loaded = peft.PeftModel.from_pretrained(base, room / "ours")
    assert all(value.equal(mine[name]) for name, value in peft.get_peft_model_state_dict(loaded).items())


@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
def test_a_plan_has_the_bytes_of_published_layers(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], by_tables: None
) -> None:
    packed, plain = directories(tmp_path, form, layers=6)

    def planned(model_dir: Path, *flags: str) -> Any:
        given = ["plan", str(model_dir), "--seq-len", "32", "--lora-rank", "4", "--dtype", "bfloat16", *flags]
        assert main.main(given) == 0, capfd.readouterr().err
        told = capfd.readouterr().out
        # Some libraries print a line when they are imported.
        return json.loads(told[told.index("{\n") :]) if "--json" in flags else told

    ours, theirs = planned(packed, "--json"), planned(plain, "--json")
    assert ours["model"]["published"] and not theirs["model"]["published"]
    of_layers = [
        sum(value.nbytes for name, value in load_file(path / models.WEIGHTS).items() if ".layers." in name)
        for path in (packed, plain)
    ]
    saved = of_layers[1] - of_layers[0]
    space = [plan["ssd_space"]["weights_bytes"] for plan in (ours, theirs)]
    # The store has whole pages of each tensor.
    assert saved <= space[1] - space[0] < saved + 2**17
    reads = [plan["ssd_traffic"]["smallest"]["read"]["weights_bytes"] for plan in (ours, theirs)]
    assert reads[0] / reads[1] == pytest.approx(of_layers[0] / of_layers[1], rel=0.1)
    lines_of = [[line["consumer"] for line in plan["host_memory"]["lines"]] for plan in (ours, theirs)]
    assert set(lines_of[0]) - set(lines_of[1]) == {"windows into files"}
    assert "reads the layers as they are published: the SSD has" in planned(packed, "--details")
    # By the configuration alone, or where experts are read one by one, weights are in 16 bits.
    shutil.copy(packed / "config.json", tmp_path / "config.json")
    assert not planned(tmp_path / "config.json", "--json")["model"]["published"]


@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
def test_answers_are_those_of_the_dequantised_model(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], by_tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, plain = directories(tmp_path, form)
    (tmp_path / "prompts.txt").write_text("7 times\n")
    ways: list[Any] = []
    opening = memascend.from_pretrained

    def opened(path: Path, **options: Any) -> Any:
        ways.append((path, options.get("frozen"), options.get("frozen_bits")))
        return opening(path, **options)

    monkeypatch.setattr(memascend, "from_pretrained", opened)

    def answers(directory: Path, *flags: str) -> Any:
        given = ["generate", str(directory), "--prompts", str(tmp_path / "prompts.txt"), "--temperature", "0", "--raw"]
        given += ["--max-new-tokens", "16", "--host-memory", "64MiB", "--store", str(tmp_path), *flags]
        code, (out, told) = main.main(given), capfd.readouterr()
        return out if code == 0 else told

    wanted = answers(plain)
    ways.clear()
    assert answers(packed) == wanted
    assert ways == [(packed, "files", None)]
    told = answers(packed, "--base-bits", "4")
    assert "--base-bits quantises weights, and those of" in told and "leave it out" in told
