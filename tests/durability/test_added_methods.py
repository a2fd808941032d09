"""Each method of PEFT, added after `memascend.offload`: its steps are durable and resumed to the bits of memory.

`adapter_methods.json` has the outcome of each, and `docs/how-to/adapters.md` has the counts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch
from bit_equality import difference
from transformers import LlamaConfig, LlamaForCausalLM

import memascend
from memascend.session.api import find_offload

peft = requirements.package("peft")

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, BEFORE = 4, 2
TWO = ["q_proj", "v_proj"]
CAUSAL = {"task_type": "CAUSAL_LM"}
TARGETS = {"target_modules": TWO}
OUTCOMES = Path(__file__).with_name("adapter_methods.json")
METHODS: dict[str, Callable[[], Any]] = {
    "LORA": lambda: peft.LoraConfig(r=4, **TARGETS, lora_dropout=0.1),
    "LORA, DoRA": lambda: peft.LoraConfig(r=4, **TARGETS, use_dora=True),
    "LORA, PiSSA": lambda: peft.LoraConfig(r=4, **TARGETS, init_lora_weights="pissa"),
    "LORA, biases": lambda: peft.LoraConfig(r=4, **TARGETS, bias="all"),
    "LORA, modules_to_save": lambda: peft.LoraConfig(r=4, **TARGETS, modules_to_save=["lm_head"]),
    "LORA, tokens": lambda: peft.LoraConfig(r=4, **TARGETS, trainable_token_indices=[3, 5]),
    "ADALORA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, **TARGETS),
    "ADAMSS": lambda: peft.AdamssConfig(r=4, num_subspaces=2, **TARGETS),
    "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, **CAUSAL),
    "BEFT": lambda: peft.BeftConfig(**TARGETS),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=8, **TARGETS),
    "C3A": lambda: peft.C3AConfig(block_size=16, **TARGETS),
    "CARTRIDGE": lambda: peft.CartridgeConfig(num_virtual_tokens=4, **CAUSAL),
    "CPT": lambda: peft.CPTConfig(
        cpt_token_ids=[1, 2, 3, 4], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 3, 4], **CAUSAL
    ),
    "DEFT": lambda: peft.DeftConfig(r=4, **TARGETS),
    "DELORA": lambda: peft.DeloraConfig(r=4, **TARGETS),
    "FOURIERFT": lambda: peft.FourierFTConfig(n_frequency=20, **TARGETS),
    "FROD": lambda: peft.FrodConfig(**TARGETS),
    "GLORA": lambda: peft.GloraConfig(r=4, **TARGETS),
    "GRALORA": lambda: peft.GraloraConfig(r=4, **TARGETS),
    "HIRA": lambda: peft.HiraConfig(r=4, **TARGETS),
    "HRA": lambda: peft.HRAConfig(r=4, **TARGETS),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LILY": lambda: peft.LilyConfig(r=4, **TARGETS),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **CAUSAL),
    "LOHA": lambda: peft.LoHaConfig(r=4, init_weights=False, **TARGETS),
    "LOKR": lambda: peft.LoKrConfig(r=4, init_weights=False, **TARGETS),
    "MISS": lambda: peft.MissConfig(r=4, **TARGETS),
    "MULTITASK_PROMPT_TUNING": lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=8, **TARGETS),
    "OSF": lambda: peft.OSFConfig(effective_rank=4, **TARGETS),
    "PEANUT": lambda: peft.PeanutConfig(r=4, **TARGETS),
    "POLY": lambda: peft.PolyConfig(r=4, **TARGETS),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "PSOFT": lambda: peft.PsoftConfig(r=4, **TARGETS),
    "PVERA": lambda: peft.PveraConfig(r=4, target_modules=["q_proj"]),
    "P_TUNING": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=32, **CAUSAL),
    "RANDLORA": lambda: peft.RandLoraConfig(r=4, **TARGETS),
    "ROAD": lambda: peft.RoadConfig(group_size=16, **TARGETS),
    "SHADOW": lambda: peft.ShadowConfig(r=4, **CAUSAL),
    "SHIRA": lambda: peft.ShiraConfig(r=4, random_seed=1, **TARGETS),
    "SUPERTUNING": lambda: peft.SupertuningConfig(**TARGETS),
    "TINYLORA": lambda: peft.TinyLoraConfig(r=2, u=8, **TARGETS),
    "TRAINABLE_TOKENS": lambda: peft.TrainableTokensConfig(token_indices=[3, 5], target_modules=["embed_tokens"]),
    "UNILORA": lambda: peft.UniLoraConfig(r=4, **TARGETS),
    "VBLORA": lambda: peft.VBLoRAConfig(r=4, num_vectors=8, vector_length=16, **TARGETS),
    "VERA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "WAVEFT": lambda: peft.WaveFTConfig(n_frequency=20, **TARGETS),
    "XLORA": lambda: peft.XLoraConfig(hidden_size=64, adapters={}, **CAUSAL),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 128}
    config = LlamaConfig(**tiny_models.SMALL_DECODER | sizes | {"attention_bias": True})
    return LlamaForCausalLM(config).requires_grad_(False).train()


def adapt(model: nn.Module, method: str) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(model, METHODS[method]())


class Loop:
    """Training of the parameters that a method has added, from any step."""

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self.model = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = optimizer or memascend.AdamW(trained, lr=1e-2)
        self.losses: list[float] = []
        if optimizer is None:
            torch.manual_seed(7)

    def go(self, end: int, start: int = 0) -> Loop:
        for number in range(start, end):
            ids = torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(number))
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def results(self, from_step: int = 0) -> dict[str, Any]:
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}
        return {"weights": weights, "states": self.optimizer.state_dict(), "losses": self.losses[from_step:]}


def outcome_of(method: str, tmp_path: Path) -> str:
    """Return "same", or why it is refused, or why it cannot be had in memory."""
    try:
        expected = Loop(adapt(build(), method)).go(STEPS)
    except Exception as error:
        return f"not in memory: {type(error).__name__}: {error}".splitlines()[0]
    store = tmp_path / "store"
    base = memascend.offload(build(), store=store, host_memory="64MiB", durability="step", allocator="pageable")
    try:
        loop = Loop(adapt(base, method)).go(BEFORE)
    except memascend.MemascendError as error:
        find_offload(base).close(failed=True)
        return f"refused: {error}"
    assert memascend.stats(base)["generation"] >= BEFORE - 1, "not durable, and not said so"
    del loop
    find_offload(base).close(failed=True)
    try:
        run = memascend.resume(
            store, model=build(), add_adapters=lambda model: adapt(model, method), allocator="pageable"
        )
    except memascend.MemascendError as error:
        return f"refused: {error}"
    try:
        loop = Loop(run.model, run.optimizer).go(STEPS, run.steps)
        assert difference(loop.results(), expected.results(run.steps)) is None
    finally:
        memascend.close(run.model)
    return "same"


def kind(outcome: str) -> str:
    return outcome.partition(":")[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_resumed_to_the_bits_of_memory_or_refused(method: str, tmp_path: Path) -> None:
    found = outcome_of(method, tmp_path)
    if "ImportError" in found:
        pytest.skip(found)
    assert kind(found) == kind(json.loads(OUTCOMES.read_text())[method]), found


def test_adapters_that_take_over_a_part_of_the_weights(tmp_path: Path) -> None:
    """With them as they were at the start a run cannot go on, and without that it has the bits of memory."""
    expected = Loop(adapt(build(), "LORA, PiSSA")).go(STEPS)
    store = tmp_path / "store"
    base = memascend.offload(build(), store=store, host_memory="64MiB", durability="step", allocator="pageable")
    Loop(adapt(base, "LORA, PiSSA")).go(BEFORE)
    find_offload(base).close(failed=True)
    with pytest.raises(memascend.CheckpointError, match=r"add_adapters has changed model\..*init_lora_weights=False"):
        memascend.resume(store, model=build(), add_adapters=lambda model: adapt(model, "LORA, PiSSA"))

    def add(model: nn.Module) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(r=4, **TARGETS, init_lora_weights=False))

    run = memascend.resume(store, model=build(), add_adapters=add, allocator="pageable")
    loop = Loop(run.model, run.optimizer).go(STEPS, run.steps)
    assert difference(loop.results(), expected.results(run.steps)) is None
    memascend.close(run.model)


def test_every_method_of_peft_is_there() -> None:
    assert {name.partition(",")[0] for name in METHODS} >= {method.name for method in peft.PeftType}
    assert set(METHODS) == set(json.loads(OUTCOMES.read_text()))


def test_the_page_has_the_counts() -> None:
    kinds = [kind(outcome) for outcome in json.loads(OUTCOMES.read_text()).values()]
    counts = [len(kinds), *(kinds.count(one) for one in ("same", "refused", "not in memory"))]
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/adapters.md").read_text()
    said = re.search(r"Of (\d+) methods and variants (\d+) .*?, (\d+) .*?, and (\d+) ", page, re.DOTALL)
    assert said is not None and [int(number) for number in said.groups()] == counts
