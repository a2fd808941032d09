"""One mixture of experts of transformers, trained offloaded and in memory: whole, and by adapters of PEFT.

Each way of training has an outcome: "same" bits; "refused", with the reason; "not trained", where it cannot be in
memory; "none", where a small model lacks modules for the adapters; or "wrong", also where the frozen model was written
to or experts that are read one by one were in memory as a whole.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import architecture_runs
import bit_equality
import small_models
import transformers
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Way(NamedTuple):
    """A way of training: the trained part, and the option `experts`."""

    trained: str
    experts: str

    def __str__(self) -> str:
        return f"{self.trained}, {self.experts}"


WAYS = [Way(trained, experts) for trained in ("full", "attention", "experts") for experts in ("whole", "pieces")]
#: The least budget.
WHERE = architecture_runs.WHERE | {"host_memory": None}
#: Values of configurations without which a small model has no experts, or cannot be built or trained in memory.
CHANGED: dict[str, dict[str, Any]] = {
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "Dots1ForCausalLM": {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "FlintForCausalLM": {"mlp_only_layers": [0]},
    "Gemma4ForCausalLM": {
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 8, "num_experts": 16, "moe_topk": 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_intermediate_size": 480,
    },
    "NllbMoeForConditionalGeneration": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
}
_ATTENTION = re.compile(r"attn|attention|mixer|mamba", re.IGNORECASE)
#: PEFT takes every `gate_proj` for one of experts, and knows that Mamba's own code reads the weights of the other.
_REFUSED_BY_PEFT = re.compile(r"\.gate_proj$|(mixer|mamba)\.out_proj$")
_HAS_EXPERTS = re.compile(r"class \w*Experts\b|self\.experts\b")
#: The head that is taken of a module of transformers that has several.
_HEADS = ("ForCausalLM", "ForConditionalGeneration", "")


def mixtures(architectures: set[str]) -> list[str]:
    """Return the architectures whose code has experts, one of each module of transformers."""
    found = []
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text()
        if not _HAS_EXPERTS.search(text):
            continue
        classes = set(re.findall(r"^class (\w+)\(", text, re.MULTILINE)) & architectures
        # The longest name is of the part that has the experts, where others are of several models.
        ranked = sorted(classes, key=lambda name: (next(filter(name.endswith, _HEADS)) != _HEADS[0], -len(name), name))
        found += ranked[:1]
    return sorted(found)


def run(pipe: Any, name: str, room: Path) -> None:
    """Send the outcome of each way of training the architecture `name`, and the reason."""
    architecture_runs._keep_quiet()
    pipe.send(outcomes(name, room))


def outcomes(name: str, room: Path) -> dict[str, tuple[str, str]]:
    """Return the outcome of each way of training the architecture `name`, and the reason."""
    try:
        pristine, inputs = architecture_runs.find(getattr(transformers, name), **CHANGED.get(name, {}))
    except (architecture_runs.NotBuiltError, architecture_runs.NotTrainedError) as error:
        return dict.fromkeys(map(str, WAYS), ("not trained", str(error)))
    found, expected = {}, dict[str, Any]()
    for way in WAYS:
        adapted = TARGETS[way.trained](pristine)
        if adapted is not None and not any(adapted.values()):
            found[str(way)] = "none", ""
            continue
        if way.trained not in expected:
            try:
                expected[way.trained] = _trained(copy.deepcopy(pristine), inputs, adapted)
            except Exception as error:
                expected[way.trained] = architecture_runs.reason_of(error)
        if isinstance(in_memory := expected[way.trained], str):
            found[str(way)] = "not trained", in_memory
        else:
            found[str(way)] = _outcome(pristine, inputs, way, in_memory, room)
    return found


def _outcome(
    pristine: nn.Module, inputs: dict[str, Any], way: Way, expected: dict[str, torch.Tensor | None], room: Path
) -> tuple[str, str]:
    adapted, model = TARGETS[way.trained](pristine), copy.deepcopy(pristine)
    try:
        memascend.offload(model.requires_grad_(adapted is None), store=room / "store", experts=way.experts, **WHERE)
        before = memascend.stats(model)["ssd_bytes_written"]
        wrong = bit_equality.differing(_trained(model, inputs, adapted), expected)
        after = memascend.stats(model)
    except memascend.MemascendError as error:
        return "refused", architecture_runs.reason_of(error, room)
    except Exception as error:
        return "wrong", architecture_runs.reason_of(error, room)
    finally:
        memascend.close(model)
    if wrong:
        if bit_equality.differing(_trained(copy.deepcopy(pristine), inputs, adapted), expected):
            return "not trained", "in memory, too, two runs differ"
        return "wrong", architecture_runs.told(wrong, expected)
    if adapted is not None and (written := after["ssd_bytes_written"] - before):
        return "wrong", f"{written} bytes of the frozen model were written"
    # Gradients and adapters of experts are made of all of them.
    if way == Way("attention", "pieces") and (said := [text for text in after["notices"] if "as a whole" in text]):
        return "wrong", said[0]
    return "same", ""


def _on_attention(model: nn.Module) -> dict[str, list[str]]:
    """Return the linear layers of attention, or of its substitute, as a configuration of PEFT has them."""
    return {"target_modules": [name for name in _linear(model) if _ATTENTION.search(name) and "expert" not in name]}


def _on_experts(model: nn.Module) -> dict[str, list[str]]:
    """Return the weights of experts, fused or not, as a configuration of PEFT has them."""
    fused = [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        for parameter, value in module.named_parameters(recurse=False)
        if value.ndim == 3 and ("experts" in name or "Experts" in type(module).__name__)
    ]
    if fused:
        return {"target_parameters": fused}
    return {"target_modules": [name for name in _linear(model) if ".experts." in name]}


def _linear(model: nn.Module) -> list[str]:
    """Return the names of linear layers that PEFT gives adapters."""
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    return [name for name in names if ".experts." in name or not _REFUSED_BY_PEFT.search(name)]


#: The modules with adapters, by the trained part; None where the model itself is trained.
TARGETS: dict[str, Callable[[nn.Module], dict[str, list[str]] | None]] = {
    "full": lambda _model: None,
    "attention": _on_attention,
    "experts": _on_experts,
}


def _trained(
    model: nn.Module, inputs: dict[str, Any], adapted: dict[str, list[str]] | None
) -> dict[str, torch.Tensor | None]:
    """Train two steps, whole or by adapters; return copies of all that was computed, by name."""
    if adapted is None:
        return architecture_runs.train(model, inputs)
    import peft

    architecture_runs.seed(5)
    config = peft.LoraConfig(r=4, init_lora_weights=False, **adapted)
    with_adapters = peft.get_peft_model(model.requires_grad_(False), config).train()
    parameters = {name: value for name, value in with_adapters.named_parameters() if value.requires_grad}
    optimizer = memascend.AdamW(parameters.values(), lr=1e-2)
    seen: dict[str, torch.Tensor | None] = {}
    for step in range(architecture_runs.STEPS):
        architecture_runs.seed(10 + step)
        loss = small_models.loss_of(with_adapters(**architecture_runs.fresh(inputs)))
        loss.backward()
        seen[f"step {step}: loss"] = loss.detach().clone()
        for name, value in parameters.items():
            seen[f"step {step}: gradient of {name}"] = None if value.grad is None else value.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return seen | {name: value.detach().clone() for name, value in parameters.items()}
