"""References of DPO, KTO and GRPO over mixtures and quantised bases: the bits of TRL's trainers in memory."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from typing import TYPE_CHECKING, Any

import faults
import pytest
import quantised_models
import requirements
import small_mixtures
import torch
from bit_equality import differing
from chat_models import tokenizer
from commands import command
from trainer_runs import logged, weights
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

import memascend
from memascend.cli import main
from memascend.cli.recipes import run
from memascend.integrations.transformers import TrainerMixin
from memascend.recovery.resume import read_record
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from pathlib import Path

datasets = requirements.package("trl", "datasets")
trl = requirements.package("trl")
peft = requirements.package("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

PAIRS = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(3 * n)} for n in range(8)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "DPO": PAIRS,
    "KTO": [{"prompt": f"{n}+{n}=", "completion": str(2 * n + n % 2), "label": n % 2 == 0} for n in range(8)],
    "GRPO": [{"prompt": f"{n}+{n}="} for n in range(8)],
}
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}
OF_TRAINER: dict[str, dict[str, Any]] = {
    "DPO": {"max_length": 32},
    "KTO": {"max_length": 32},
    "GRPO": {"beta": 0.1, "num_generations": 2, "max_completion_length": 4},
}
#: Bases whose weights are not those of a dense model in 16 bits, and how they are opened.
BASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},
    "fp8": {"dequantize": True},
    "mxfp4": {"dequantize": True},
}


def directory_of(base: str, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if base == "fp8":
            quantised_models.fp8(path, quantised_models.llama(vocab_size=128))
        elif base == "mxfp4":
            quantised_models.mxfp4(path, vocab_size=128)
        else:
            small_mixtures.build(base, vocab_size=128).save_pretrained(path)
        tokenizer().save_pretrained(path)
    return path


def in_memory(base: str, source: Path) -> Any:
    if base in ("fp8", "mxfp4"):
        config = FineGrainedFP8Config(dequantize=True) if base == "fp8" else Mxfp4Config(dequantize=True)
        return quantised_models.dequantised_by_transformers(source, config)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def trained(
    cls: type, config: type, recipe: str, model: Any, folder: Path, options: dict[str, Any], **named: Any
) -> Any:
    arguments = config(str(folder), **ARGUMENTS | OF_TRAINER[recipe] | options)
    if recipe == "GRPO":
        named["reward_funcs"] = reward
    rows = datasets.Dataset.from_list(ROWS[recipe])
    trainer = cls(model, args=arguments, train_dataset=rows, processing_class=tokenizer(), **named)
    trainer.train()
    return trainer


def classes(recipe: str) -> tuple[type, type, type, type]:
    """Return our trainer and its arguments, and TRL's in memory."""
    from memascend.integrations import trl as ours

    theirs = type("InMemory", (TrainerMixin, getattr(trl, f"{recipe}Trainer")), {})
    names = f"{recipe}Trainer", f"{recipe}Config"
    return *(getattr(ours, name) for name in names), theirs, getattr(trl, names[1])


def untimed(trainer: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in entry.items() if name != "step_time"} for entry in logged(trainer)]


def adapters() -> Any:
    return peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])


def assert_adapters_are_those_of_memory(base: str, recipe: str, room: Path, how: dict[str, Any]) -> None:
    """Train adapters over a base that is opened with the options `how`, and compare with TRL's trainer in memory."""
    source = directory_of(base, room / "base")
    trainer_class, config, theirs, their_config = classes(recipe)
    given = {"peft_config": adapters()}
    expected = trained(theirs, their_config, recipe, in_memory(base, source), room / "in memory", {}, **given)
    options = {"host_memory": "128MiB"} | how
    trainer = trained(trainer_class, config, recipe, str(source), room / "out", options, **given)
    assert untimed(trainer) == untimed(expected)
    ours, wanted = (
        {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
        for model in (trainer.model, expected.model)
    )
    assert wanted and not differing(ours, wanted)
    memascend.close(trainer.model)


SOAK = pytest.mark.soak


@pytest.mark.parametrize("recipe", ["DPO", "KTO", pytest.param("GRPO", marks=SOAK)])
@pytest.mark.parametrize("base", ["qwen3_moe", *(pytest.param(base, marks=SOAK) for base in list(BASES)[1:])])
def test_the_base_of_adapters_is_the_reference(base: str, recipe: str, tmp_path: Path) -> None:
    assert_adapters_are_those_of_memory(base, recipe, tmp_path, {"frozen": "store"} | BASES[base])


@SOAK
@pytest.mark.parametrize(
    "how", [{"frozen": "files"}, {"frozen": "store", "experts": "pieces"}], ids=["files", "pieces"]
)
@pytest.mark.parametrize("base", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_generates_and_compares_however_it_is_read(base: str, how: dict[str, Any], tmp_path: Path) -> None:
    """GRPO generates with the adapters, and compares with the model without them, by experts read one by one."""
    assert_adapters_are_those_of_memory(base, "GRPO", tmp_path, how)


@SOAK
@pytest.mark.parametrize("frozen", ["files", "store", "published", "pieces"])
@pytest.mark.parametrize("recipe", ["DPO", "KTO"])
@pytest.mark.parametrize("base", ["qwen3_moe", "gpt_oss", "fp8", "mxfp4"])
def test_a_second_model_is_the_reference(base: str, recipe: str, frozen: str, tmp_path: Path) -> None:
    quantised = base in ("fp8", "mxfp4")
    if (frozen == "published" and not quantised) or (frozen == "pieces" and quantised):
        pytest.skip("there is no such form")
    source = directory_of(base, tmp_path / "base")
    how: dict[str, Any] = {
        "files": {"frozen": "files"},
        "store": {"frozen": "store"},
        "published": {"frozen": "store", "frozen_bits": "published"},
        "pieces": {"frozen": "store", "experts": "pieces"},
    }[frozen]
    trainer_class, config, theirs, their_config = classes(recipe)
    expected = trained(
        theirs,
        their_config,
        recipe,
        in_memory(base, source),
        tmp_path / "in memory",
        {},
        ref_model=in_memory(base, source),
    )
    (tmp_path / "reference").mkdir()
    reference = memascend.from_pretrained(
        source, store=tmp_path / "reference", host_memory="64MiB", **how | BASES[base]
    )
    options = {"host_memory": "128MiB"} | BASES[base]
    trainer = trained(trainer_class, config, recipe, str(source), tmp_path / "out", options, ref_model=reference)
    assert untimed(trainer) == untimed(expected)
    assert not differing(weights(trainer.model), weights(expected.model))
    memascend.close(trainer.model)
    memascend.close(reference)


def words_of(base: str, recipe: str, source: Path, steps: int, dtype: str = "bfloat16") -> list[str]:
    """Return the arguments of a run of the command, beside `source`."""
    room = source.parent
    data = room / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[recipe]))
    words = ["finetune", str(source), "--task", recipe.lower(), "--data", str(data), "--out", str(room / "out")]
    words += ["--store", str(room / "store"), "--host-memory", "128MiB", "--steps", str(steps), "--batch-size", "2"]
    words += ["--grad-accum", "2", "--lr", "1e-2", "--schedule", "constant", "--seq-len", "32", "--dtype", dtype]
    return [*words, "--dequantize"] if BASES[base] else words


def assert_written_as_in_memory(base: str, recipe: str, source: Path, steps: int) -> None:
    """Compare what the command has written with the run of TRL's trainer in memory."""
    _, _, theirs, their_config = classes(recipe)
    expected = trained(
        theirs,
        their_config,
        recipe,
        in_memory(base, source),
        source.parent / "in memory",
        {"seed": 0, "weight_decay": 0.01, "max_steps": steps},
        ref_model=in_memory(base, source),
    )
    written = AutoModelForCausalLM.from_pretrained(source.parent / "out", dtype=torch.bfloat16)
    assert not differing(weights(written), weights(expected.model))


@SOAK
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("recipe", ["DPO", "KTO"])
@pytest.mark.parametrize("base", ["qwen3_moe", "fp8", "mxfp4"])
def test_the_command_opens_the_reference(
    base: str, recipe: str, lora: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = directory_of(base, tmp_path / "base")
    words = words_of(base, recipe, source, 2) + (["--lora-rank", "4"] if lora else [])
    assert main.main(words) == 0, capfd.readouterr().err
    if lora:
        assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    else:
        assert_written_as_in_memory(base, recipe, source, 2)


@pytest.mark.parametrize("base", ["fp8", pytest.param("mxfp4", marks=SOAK)])
def test_a_killed_run_that_trains_what_was_quantised_ends_as_one_in_memory(
    base: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights are trained, dequantised in the store; the reference is read as it is published."""
    source, steps = directory_of(base, tmp_path / "base"), 8
    words, metrics = words_of(base, "DPO", source, steps), tmp_path / "out" / "metrics.jsonl"
    with faults.Child(tmp_path, command, words) as child:
        while not metrics.exists() or metrics.read_bytes().count(b'"record": "step"') < 3:
            assert child.alive(), child.wait().err
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    done = read_record([tmp_path / "store"])["steps"]
    assert 2 <= done < steps, "it was killed in mid-run"
    published: list[int] = []

    def opened(*arguments: Any, reference: Any = run._reference) -> Any:
        model = reference(*arguments)
        published.append(sum(len(unit.published) for unit in offload_of(model).units))
        return model

    monkeypatch.setattr(run, "_reference", opened)
    assert main.main([*words, "--resume"]) == 0, capfd.readouterr().err
    assert published[0] > 0
    assert_written_as_in_memory(base, "DPO", source, steps)


def test_a_reference_that_is_not_read_in_place_is_copied(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """FP8 is dequantised in place to bfloat16 alone."""
    source = directory_of("fp8", tmp_path / "base")
    assert main.main(words_of("fp8", "DPO", source, 1, "float32")) == 0, capfd.readouterr().err
    assert not list(tmp_path.glob("store-reference/*"))
