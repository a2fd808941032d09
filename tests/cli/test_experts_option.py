"""`--experts pieces`: adapters beside experts that are read one by one, and answers of such a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch
from commands import in_memory, words_of
from safetensors.torch import load_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from memascend.cli import adapters
from memascend.cli.answers import generate, sources
from memascend.cli.changes import find_changes
from memascend.cli.lora import Adapters
from memascend.cli.main import BAD_INPUT, main
from memascend.cli.settings import Settings
from memascend.errors import BudgetError, DataError
from memascend.layout.experts import adapted_experts
from memascend.layout.units import partition
from memascend.memory_plan.host import smallest_plan

requirements.package("peft")

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
RUN: dict[str, Any] = {"lora_rank": 4, "steps": 3, "lr": 1e-2}
CONFIG: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 256,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 257,
    "eos_token_id": 256,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Write a mixture over bytes, each expert by itself."""
    path = tmp_path / "mixture"
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(path)
    (tmp_path / "text.txt").write_text(tiny_models.TEXT)
    return path


def words(model_dir: Path, out: str, *flags: str, **changed: Any) -> list[str]:
    run = {name: value for name, value in (RUN | changed).items() if value is not None}
    return [*words_of(model_dir, model_dir.parent / out, model_dir.parent / "store", **run), *flags]


def results(out: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [r["loss"] for r in records if r["record"] == "step"], load_file(out / "adapter_model.safetensors")


def least(experts: str) -> int:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).to(torch.bfloat16).requires_grad_(False)
    return smallest_plan(partition(model, experts=experts)).total


def test_a_run_has_the_bits_of_memory_within_a_budget_that_no_layer_fits(
    model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    room, targets = model_dir.parent, ("--lora-targets", "q_proj", "o_proj")
    budget = (least("pieces") + least("whole")) // 2
    assert main(words(model_dir, "out", *targets, host_memory=budget)) == BAD_INPUT
    assert "--experts pieces" in capfd.readouterr().err
    assert main(words(model_dir, "out", *targets, "--experts", "pieces", host_memory=budget)) == 0, capfd.readouterr()
    assert main(in_memory(words(model_dir, "memory", *targets))) == 0
    losses, weights = results(room / "out")
    expected, wanted = results(room / "memory")
    assert losses == expected and len(losses) == RUN["steps"]
    tiny_models.assert_same_weights(weights, wanted)
    plan = ["plan", str(model_dir), "--seq-len", "32", "--lora-rank", "4", "--host-memory", str(budget), *targets]
    assert main(plan) == BAD_INPUT
    assert "--experts pieces" in capfd.readouterr().err
    assert main([*plan, "--experts", "pieces"]) == 0


def test_adapters_are_at_every_linear_layer_but_experts() -> None:
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 64}
    deepseek = {name: value for name, value in CONFIG.items() if name not in ("num_experts", "head_dim")}
    for make, config in (
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**CONFIG)),
        (MixtralForCausalLM, MixtralConfig(**CONFIG)),
        (DeepseekV3ForCausalLM, DeepseekV3Config(**deepseek | latent | groups | {"num_key_value_heads": 4})),
    ):
        with torch.device("meta"):
            model, beside = make(config), make(config)
        adapted = adapters._adapted(beside, Adapters(rank=4, experts="pieces"), low_cpu_mem_usage=True)
        assert not adapted_experts(adapted)
        named = {name for name, value in adapted.named_parameters() if value.requires_grad}
        assert any("self_attn" in name for name in named) and not any(".experts." in name for name in named)
        whole = adapters._adapted(model, Adapters(rank=4), low_cpu_mem_usage=True)
        others = {name for name, value in whole.named_parameters() if value.requires_grad and ".experts." not in name}
        assert named == others, "what is not of experts has adapters as before"


@pytest.mark.parametrize(
    ("flags", "changed", "told"),
    [
        ([], {"lora_rank": None}, "--experts pieces is for experts that are not trained: give --lora-rank too"),
        (["--in-memory"], {}, "--experts pieces reads experts from an SSD: leave it out, or leave out --in-memory"),
        ([], {"base_bits": 4}, "--experts pieces does not work yet with --base-bits: leave one of them out"),
        (["--tile-tokens", "8"], {}, "experts='pieces' and tile_tokens do not work together yet"),
        (
            ["--lora-targets", "q_proj", "gate_proj", "up_proj", "down_proj"],
            {},
            "of all experts of a layer at once, and --experts pieces reads them one by one",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    model_dir: Path, capfd: pytest.CaptureFixture[str], flags: list[str], changed: dict[str, Any], told: str
) -> None:
    given = words(model_dir, "out", *flags, "--experts", "pieces", **changed)
    if "--in-memory" in given:
        given.remove("--in-memory")
        given = in_memory(given)
    assert main(given) == BAD_INPUT
    assert told in capfd.readouterr().err
    assert not (model_dir.parent / "out").exists()


def test_a_model_without_experts_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    llama = tiny_models.llama_directory(tmp_path, hidden=64, layers=2)
    for given in (
        words(llama, "out", "--experts", "pieces"),
        ["plan", str(llama), "--seq-len", "32", "--lora-rank", "4", "--experts", "pieces"],
    ):
        assert main(given) == BAD_INPUT
        assert "has no experts that can be read one by one" in capfd.readouterr().err


def test_a_run_goes_on_with_the_experts_as_they_were_read(tmp_path: Path) -> None:
    settings = Settings(model_dir=tmp_path, data=[tmp_path], out=tmp_path / "out", lora_rank=4, experts="pieces")
    with pytest.raises(DataError, match="--experts is pieces, but the run in the store has whole"):
        find_changes({name: value for name, value in settings.decisive.items() if name != "experts"}, settings)


@pytest.mark.parametrize(
    "flags", [(), ("--experts", "pieces"), ("--experts", "whole")], ids=["auto", "pieces", "whole"]
)
def test_answers_within_a_budget_that_no_layer_fits(
    model_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(generate, "token_bytes", lambda source: 1)  # The budget is the model's.
    room, budget = model_dir.parent, (least("pieces") + least("whole")) // 2
    (room / "prompts.txt").write_text("see\n")
    out = room / "answers.jsonl"
    given = ["generate", str(model_dir), "--prompts", str(room / "prompts.txt"), "--out", str(out), "--raw"]
    given += ["--max-new-tokens", "6", "--temperature", "0", "--host-memory", str(budget), "--store", str(room)]
    code = main([*given, *flags])
    told = capfd.readouterr().err
    if "whole" in flags:
        assert code == BAD_INPUT and "--experts pieces" in told
        return
    assert code == 0, told
    assert ("read one by one (--experts pieces), since a layer" in told) == (not flags)
    model = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    ids = torch.tensor([list(b"see")])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=257)[0, 3:]
    answer = json.loads(out.read_text())
    assert answer["answer"] == bytes(int(i) for i in expected if i < 256).decode(errors="replace")


def test_adapters_on_experts_answer_with_all_of_them(model_dir: Path) -> None:
    import peft

    model = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    model.name_or_path = str(model_dir)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    peft.get_peft_model(model, config).save_pretrained(model_dir.parent / "adapters")
    source = sources.source_of([model_dir.parent / "adapters"])
    room = sources.DividedBudget((least("pieces") + least("whole")) // 2, 1, 0)
    with (
        pytest.raises(DataError, match="has adapters on all experts of a layer at once"),
        sources.opened(source, room, sources.Opening(model_dir.parent, "pieces")),
    ):
        pass
    with pytest.raises(BudgetError), sources.opened(source, room, sources.Opening(model_dir.parent)):
        pass
