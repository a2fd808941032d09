"""Options of adapters: those that PEFT makes of them in memory, trained further, merged, planned, or refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import peft
import pytest
import tiny_models
import torch
from commands import in_memory, words_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from memascend.cli import main
from memascend.cli.changes import find_changes
from memascend.cli.settings import Settings
from memascend.errors import DataError
from memascend.forecast import forecast

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT

RUN: dict[str, Any] = {"steps": 3, "lr": 1e-2, "lora_rank": 4}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_models.llama_directory(tmp_path, hidden=64, layers=2)


def words(model_dir: Path, out: str, *more: str, **changed: Any) -> list[str]:
    run = {name: value for name, value in (RUN | changed).items() if value is not None}
    return [*words_of(model_dir, model_dir.parent / out, model_dir.parent / "store", **run), *more]


def run(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(words) == 0, capfd.readouterr().err


def results(out: Path) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the loss of each step, the adapters, and their configuration."""
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["record"] == "step"]
    return losses, load_file(out / "adapter_model.safetensors"), json.loads((out / "adapter_config.json").read_text())


def assert_same(ours: Path, theirs: Path) -> None:
    (losses, adapters, config), (expected, in_memory, its_config) = results(ours), results(theirs)
    assert losses == expected and len(losses) == RUN["steps"]
    tiny_models.assert_same_weights(adapters, in_memory)
    assert config == its_config


@pytest.mark.parametrize(
    ("options", "made"),
    [
        (
            ["--lora-alpha", "3", "--lora-dropout", "0.2", "--lora-targets", "q_proj", "v_proj"],
            {"lora_alpha": 3, "lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj"]},
        ),
        (["--dora", "--rslora"], {"use_dora": True, "use_rslora": True, "lora_alpha": 8}),
    ],
    ids=["scale and targets", "DoRA"],
)
def test_options_have_the_bits_of_peft_in_memory(
    model_dir: Path, capfd: pytest.CaptureFixture[str], options: list[str], made: dict[str, Any]
) -> None:
    room = model_dir.parent
    run(words(model_dir, "out", *options), capfd)
    run(in_memory(words(model_dir, "memory", *options)), capfd)
    assert_same(room / "out", room / "memory")
    config = results(room / "out")[2]
    config["target_modules"] = sorted(config["target_modules"])
    assert config | made == config and config["r"] == 4
    named = {name.split(".")[-3] for name in results(room / "out")[1] if "lora_A" in name}
    assert "target_modules" not in made or named == set(made["target_modules"])


def test_copies_of_modules_are_trained_and_trained_further(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room, options = model_dir.parent, ("--modules-to-save", "lm_head", "--lora-targets", "q_proj")
    run(words(model_dir, "out", *options), capfd)
    run(in_memory(words(model_dir, "memory", *options)), capfd)
    assert_same(room / "out", room / "memory")
    assert any("lm_head" in name for name in results(room / "out")[1])
    further = ["--adapter", str(room / "out")]
    run(words(model_dir, "further", *further, lora_rank=None), capfd)
    run(in_memory(words(model_dir, "again", *further, lora_rank=None)), capfd)
    assert_same(room / "further", room / "again")
    run(["merge", str(room / "further"), "--out", str(room / "merged")], capfd)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    merged = peft.PeftModel.from_pretrained(base, room / "further").merge_and_unload().state_dict()
    tiny_models.assert_same_weights(load_file(room / "merged" / "model.safetensors"), merged)
    unknown = words(model_dir, "other", "--modules-to-save", "nothing")
    assert main.main(in_memory(unknown)) == main.BAD_INPUT
    assert "--modules-to-save 'nothing': no module of the model has that name" in capfd.readouterr().err


def test_adapters_are_trained_further_and_merged(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = model_dir.parent
    run(words(model_dir, "first", "--lora-alpha", "5", "--lora-targets", "q_proj", "o_proj"), capfd)
    further = ["--adapter", str(room / "first")]
    run(words(model_dir, "out", *further, lora_rank=None), capfd)
    run(in_memory(words(model_dir, "memory", *further, lora_rank=None)), capfd)
    assert_same(room / "out", room / "memory")
    (first, before, its_config), (losses, after, config) = results(room / "first"), results(room / "out")
    assert losses[0] < first[0], "it begins where the others ended"
    assert (config["r"], config["lora_alpha"]) == (its_config["r"], its_config["lora_alpha"]) == (4, 5)
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)

    merge = ["merge", str(room / "out"), "--out"]
    run([*merge, str(room / "merged")], capfd)
    assert "with the adapters of" in capfd.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    expected = peft.PeftModel.from_pretrained(base, room / "out").merge_and_unload().state_dict()
    tiny_models.assert_same_weights(load_file(room / "merged" / "model.safetensors"), expected)
    assert expected["lm_head.weight"].dtype == torch.bfloat16
    assert main.main([*merge, str(room / "merged")]) != 0, "it exists"
    capfd.readouterr()
    assert main.main(["merge", str(model_dir), "--out", str(room / "none")]) == main.BAD_INPUT
    assert "holds no adapters" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--dora"], "--dora works only with adapters: give --lora-rank too"),
        (["--lora-rank", "4", "--lora-targets", "q_proj", "nothing"], "--lora-targets 'nothing': no module of"),
        (["--lora-rank", "4", "--lora-targets", ".*q_proj"], "--lora-targets '.*q_proj': no module of"),
        (["--lora-rank", "4", "--lora-targets", "self_attn"], "--lora-targets self_attn: PEFT adds adapters to linear"),
        (["--lora-rank", "4", "--modules-to-save", "layers", "--in-memory"], "--modules-to-save layers: No modules"),
        (["--lora-rank", "4", "--modules-to-save", "", "--in-memory"], "--modules-to-save '': no module of"),
        (["--adapter", "{model}"], "holds no adapters of LoRA: give a directory that PEFT wrote"),
    ],
)
def test_what_does_not_go_together_is_said(
    model_dir: Path, capfd: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    given = words(model_dir, "out", *(word.replace("{model}", str(model_dir)) for word in options), lora_rank=None)
    assert main.main(in_memory(given[:-1]) if given[-1] == "--in-memory" else given) == main.BAD_INPUT
    assert problem in capfd.readouterr().err


def test_adapters_of_embeddings_go_on_over_weights_that_are_only_read(
    model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """PEFT's files have such embeddings whole, which a checkpoint would write to the model."""
    room = model_dir.parent
    run(words(model_dir, "first", "--lora-targets", "embed_tokens", "lm_head"), capfd)
    first = results(room / "first")[1]
    assert first and all("lora" in name for name in first)
    run(words(model_dir, "out", "--adapter", str(room / "first"), lora_rank=None), capfd)
    assert results(room / "out")[1].keys() == first.keys()


def test_what_peft_does_not_make_for_experts_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "moe"
    tiny_models.build("qwen3_moe", torch.bfloat16).save_pretrained(directory)
    plan = ["plan", str(directory), "--seq-len", "32", "--lora-rank", "4"]
    run([*plan, "--lora-targets", "q_proj", "gate_proj", "up_proj"], capfd)  # of experts that are fused
    assert main.main([*plan, "--dora"]) == main.BAD_INPUT
    assert "PEFT does not make such adapters for this model: lora.ParamWrapper" in capfd.readouterr().err


def remade(adapters: Path, **changed: Any) -> Path:
    """Have the configuration of adapters say something else."""
    path = adapters / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return adapters


def test_adapters_that_do_not_fit_are_refused(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = model_dir.parent

    def copy(name: str) -> Path:
        return shutil.copytree(room / "first", room / name)

    run(in_memory(words(model_dir, "first", "--lora-targets", "q_proj", "v_proj")), capfd)
    tied = shutil.copytree(model_dir, room / "tied")
    described = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(described))
    remade(copy("copies"), modules_to_save=["lm_head"], base_model_name_or_path=str(tied))
    (copy("damaged") / "adapter_model.safetensors").write_bytes(b"none")
    (copy("empty") / "adapter_model.safetensors").unlink()
    quantised = shutil.copytree(model_dir, room / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantised / "config.json").write_text(json.dumps(config))
    for adapters, told in (
        (remade(copy("fewer"), target_modules=["q_proj"]), "which adapter_config.json has no place for"),
        (remade(copy("more"), target_modules=["q_proj", "v_proj", "o_proj"]), "their file has no base_model"),
        (remade(copy("foreign"), target_modules=["c_attn"]), "do not fit the model: Target modules"),
        (remade(copy("larger"), r=8), "do not fit the model: size mismatch for"),
        (room / "damaged", "holds weights that cannot be read"),
        (room / "empty", "holds no weights of adapters"),
    ):
        merge = ["merge", str(adapters), "--out", str(room / "merged")]
        for given in (words(model_dir, "out", "--adapter", str(adapters), lora_rank=None), merge):
            assert main.main(given) == main.BAD_INPUT
            assert told in capfd.readouterr().err
    assert main.main(["merge", str(room / "copies"), "--out", str(room / "merged")]) == main.BAD_INPUT
    assert "holds copies of whole modules (lm_head), and the embedding and the head" in capfd.readouterr().err
    remade(room / "first", base_model_name_or_path=str(quantised))
    assert main.main(["merge", str(room / "first"), "--out", str(room / "merged")]) == main.BAD_INPUT
    assert "whose weights are quantised" in capfd.readouterr().err
    assert not (room / "merged").exists() and not (room / "out").exists()


def test_runs_from_before_the_options_had_none(tmp_path: Path) -> None:
    settings = Settings(model_dir=tmp_path, data=[tmp_path], out=tmp_path / "out", lora_rank=4)
    options = ("lora_alpha", "lora_dropout", "lora_targets", "dora", "rslora", "modules_to_save", "adapter")
    before = {name: value for name, value in settings.decisive.items() if name not in options}
    assert find_changes(before, settings) == {}
    for changed in ({"dora": True}, {"lora_alpha": 3}, {"lora_targets": ["q_proj"]}, {"adapter": tmp_path}):
        with pytest.raises(DataError, match="needs the same"):
            find_changes(before, replace(settings, **changed))


def test_plans_count_the_adapters_described(
    model_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "resident_memory", lambda: 1 << 28)

    def planned(*options: str) -> int:
        run(["plan", str(model_dir), "--seq-len", "32", "--json", "--lora-rank", "4", *options], capfd)
        total: int = json.loads(capfd.readouterr().out)["whole"]["total_bytes"]
        return total

    targets = ("--lora-targets", "q_proj", "v_proj")
    # A head of 258 x 64, with gradients and moments in float32.
    assert planned(*targets, "--modules-to-save", "lm_head") - planned(*targets) == 258 * 64 * 16
    assert planned(*targets) < planned(*targets, "--dora") < planned("--dora")
    assert main.main(["plan", str(model_dir), "--seq-len", "32", "--dora"]) == main.BAD_INPUT
    assert "--dora works only with adapters: give --lora-rank too" in capfd.readouterr().err
