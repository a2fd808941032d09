"""PEFT's methods over an offloaded model: the bits of memory, whether adapters are added before or after.

LoRA in detail, and frozen weights that are read from files: `tests/session/test_lora.py`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import memascend

peft = requirements.package("peft")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # PEFT 0.21 gives models of transformers 5.24 the keys of a prefix by their old name.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type .*RMSNorm:UserWarning"),
]
TWO = ["q_proj", "v_proj"]
CAUSAL = {"task_type": "CAUSAL_LM"}
METHODS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=TWO, use_dora=True, init_lora_weights=False),
    "dora of an embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], use_dora=True),
    "pissa": lambda: peft.LoraConfig(r=4, target_modules=TWO, init_lora_weights="pissa"),  # reads the weights
    "biases": lambda: peft.LoraConfig(r=4, target_modules=TWO, bias="all"),
    "tokens": lambda: peft.LoraConfig(r=4, target_modules=TWO, trainable_token_indices=[3, 5]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=32, **CAUSAL),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=TWO, init_weights=False),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=32, target_modules=TWO),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
}


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**tiny_models.SMALL_DECODER | {"num_hidden_layers": 2, "attention_bias": True})
    return LlamaForCausalLM(config).to(dtype).train()


def adapt(model: nn.Module, config: Any) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(model, config)


def lora(model: nn.Module, dora: bool = False) -> Any:
    config = peft.LoraConfig(r=4, target_modules=TWO, init_lora_weights=False, use_dora=dora, **CAUSAL)
    return adapt(model, config)


def steps(model: nn.Module, count: int = 2) -> list[torch.Tensor]:
    optimizer = memascend.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    torch.manual_seed(7)
    return [tiny_models.step(model, optimizer, "qwen2", number).clone() for number in range(count)]


def logits(model: nn.Module, **options: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        result = model(**tiny_models.batch("qwen2", 99), **options).logits.clone()
    model.train()
    return result


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, dict):
            tiny_models.assert_same_weights(one, other)
        else:
            assert torch.equal(one, other)


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


@cache
def in_memory(method: str) -> tuple[list[Any], nn.Module]:
    model = adapt(build(), METHODS[method]())
    return trained(model), model


def trained(model: Any) -> list[Any]:
    """Train, and compute with the adapters and without."""
    results = [*steps(model), logits(model)]
    with model.disable_adapter():
        results.append(logits(model))
    return [*results, values(model)]


@pytest.mark.parametrize("first", ["offload", "adapters"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method(offloaded: Callable[..., nn.Module], tmp_path: Path, method: str, first: str) -> None:
    expected, twin = in_memory(method)
    model: Any = build()
    if first == "offload":
        # These keep the whole embedding in the graph.
        budget = "64MiB" if method in ("tokens", "dora of an embedding") else tiny_models.smallest_budget(model)
        model = adapt(offloaded(model, host_memory=budget), METHODS[method]())
    else:
        model = offloaded(adapt(model, METHODS[method]()))
    assert_same(trained(model), expected)

    memascend.save_pretrained(model, tmp_path / "ours")
    twin.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    tiny_models.assert_same_weights(saved(tmp_path / "ours"), saved(tmp_path / "theirs"))
    other = offloaded(build(), store=tmp_path / "other")
    loaded = peft.PeftModel.from_pretrained(other, tmp_path / "ours")
    assert torch.equal(logits(loaded), logits(peft.PeftModel.from_pretrained(build(), tmp_path / "theirs")))


# ---- uses of adapters ---------------------------------------------------------------------------------------------


def several(model: Any) -> list[Any]:
    """Train one, then the other, then both."""
    torch.manual_seed(8)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    results = steps(model)
    model.set_adapter("second")
    results += [*steps(model), logits(model)]
    model.set_adapter("default")
    results.append(logits(model))
    model.base_model.set_adapter(["default", "second"])
    results += [*steps(model), logits(model)]
    model.delete_adapter("second")
    return [*results, *steps(model), values(model)]


def combined(model: Any) -> list[Any]:
    torch.manual_seed(8)
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=TWO, init_lora_weights=False))
    model.add_weighted_adapter(["default", "second"], [0.5, 0.7], "mix", combination_type="linear")
    model.set_adapter("mix")
    return [logits(model), values(model)]


def merged_for_a_while(model: Any) -> list[Any]:
    results = steps(model, 1)
    model.merge_adapter()
    results += [logits(model), values(model)]
    model.unmerge_adapter()
    return [*results, logits(model), *steps(model), values(model)]


def merged(model: Any) -> list[Any]:
    results = steps(model, 1)
    model = model.merge_and_unload(safe_merge=True)
    return [*results, logits(model), values(model)]


def unloaded(model: Any) -> list[Any]:
    results = steps(model, 1)
    model = model.unload()
    return [*results, logits(model), values(model)]


PROGRAMS = [several, combined, merged_for_a_while, merged, unloaded]


@pytest.mark.parametrize("first", ["offload", "adapters"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program(
    offloaded: Callable[..., nn.Module], program: Callable[[Any], list[Any]], dora: bool, first: str
) -> None:
    dtype = torch.bfloat16
    expected = program(lora(build(dtype), dora))
    base = build(dtype)
    if first == "offload":
        model = lora(offloaded(base.requires_grad_(False), host_memory=tiny_models.smallest_budget(base)), dora)
    else:
        # A step of adapters on the store and beside it cannot be durable.
        model = offloaded(lora(base, dora), durability="none")
    assert_same(program(model), expected)


@pytest.mark.parametrize("first", ["offload", "adapters"])
def test_a_merged_model_is_saved_whole(offloaded: Callable[..., nn.Module], tmp_path: Path, first: str) -> None:
    model = lora(offloaded(build())) if first == "offload" else offloaded(lora(build()))
    ours, theirs = model.merge_and_unload(), lora(build()).merge_and_unload()  # type: ignore[operator]
    memascend.save_pretrained(ours, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    tiny_models.assert_same_weights(saved(tmp_path / "ours"), saved(tmp_path / "theirs"))
    ours.save_pretrained(tmp_path / "by itself")
    tiny_models.assert_same_weights(saved(tmp_path / "by itself"), saved(tmp_path / "theirs"))


def test_two_adapters_in_one_batch(offloaded: Callable[..., nn.Module]) -> None:
    def mixed(model: Any) -> torch.Tensor:
        torch.manual_seed(8)
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        return logits(model, adapter_names=["default", "second"])

    assert torch.equal(mixed(lora(offloaded(build()))), mixed(lora(build())))


@pytest.mark.parametrize("recompute", [True, False])
def test_adapters_on_parameters(offloaded: Callable[..., nn.Module], recompute: bool) -> None:
    """PEFT parametrises the weight in each forward, which changes no value; see `test_peft_experts.py`."""
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.down_proj.weight"])
    expected = adapt(build(), config)
    ours = adapt(offloaded(build(), recompute=recompute), config)
    assert_same([*steps(ours), values(ours)], [*steps(expected), values(expected)])


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_merging_into_files_is_refused(tmp_path: Path, store: Path) -> None:
    build().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    base = memascend.from_pretrained(
        tmp_path / "model", store=store, host_memory="64MiB", allocator="pageable", frozen="files", dtype="float32"
    )
    try:
        model = lora(base)
        before = logits(model)
        with pytest.raises(memascend.MemascendError, match=r"own file \(frozen='files'\).*use frozen='store'"):
            model.merge_adapter()
        assert torch.equal(logits(model), before)  # nothing was merged
    finally:
        memascend.close(base)


@pytest.mark.parametrize("method", ["modules_to_save", "layer norms"])
def test_copies_of_modules_on_ssd_are_ordinary_modules(offloaded: Callable[..., nn.Module], method: str) -> None:
    config = (
        peft.LoraConfig(target_modules=TWO, modules_to_save=["lm_head"])
        if method == "modules_to_save"
        else peft.LNTuningConfig(target_modules=["input_layernorm"], **CAUSAL)
    )

    def frozen() -> nn.Module:
        return build().requires_grad_(False)

    expected = adapt(frozen(), config)
    theirs = [*steps(expected), values(expected)]
    for make in (lambda: adapt(offloaded(frozen()), config), lambda: offloaded(adapt(frozen(), config))):
        ours = make()
        assert_same([*steps(ours), values(ours)], theirs)
        memascend.close(ours)


def test_the_copy_of_a_large_head_computes_its_loss_in_pieces(offloaded: Callable[..., nn.Module]) -> None:
    config = peft.LoraConfig(target_modules=TWO, modules_to_save=["lm_head"])

    def large() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"vocab_size": 1 << 16, "hidden_size": 64, "num_hidden_layers": 1}
        return LlamaForCausalLM(LlamaConfig(**tiny_models.SMALL_DECODER | sizes)).requires_grad_(False).train()

    expected = adapt(memascend.fuse_loss(large()), config)
    theirs = [*steps(expected), values(expected)]
    ours = adapt(offloaded(large()), config)
    assert any(unit.is_table for unit in memascend.offload_of(ours).units)
    assert_same([*steps(ours), values(ours)], theirs)


def test_pefts_own_saving_of_trained_biases_has_the_bits_of_memory(
    offloaded: Callable[..., nn.Module], tmp_path: Path
) -> None:
    for name, base in (("in memory", build()), ("on SSD", offloaded(build()))):
        model = adapt(base, METHODS["biases"]())
        steps(model)
        model.save_pretrained(tmp_path / name)
    expected, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("in memory", "on SSD"))
    assert_same([found], [expected])
    assert any(name.endswith("bias") for name in found)
