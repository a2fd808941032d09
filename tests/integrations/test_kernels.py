"""Kernels that other libraries put into a model: Liger-Kernel's, and transformers' implementations of attention."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch
from processes import run_file
from transformers import LlamaConfig, LlamaForCausalLM

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn


def build(dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    return (
        LlamaForCausalLM(LlamaConfig(**{**tiny_models.SMALL_DECODER, "num_hidden_layers": 2, **options}))
        .to(dtype)
        .train()
    )


def batch(number: int) -> dict[str, torch.Tensor]:
    """Return two sequences of 8 tokens, one of them padded, of the least vocabulary in use here."""
    ids = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(number))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def train(model: nn.Module) -> list[Any]:
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(2):
        loss = model(**batch(number)).loss
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, logits(model), dict(memascend.parameters_of(model))]


def logits(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        result = model(**batch(9)).logits.clone()
    model.train()
    return result


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.isfinite(other).all() and torch.equal(one, other)
    tiny_models.assert_same_weights(ours[-1], theirs[-1])


# ---- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("first", ["offload", "choose"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention(offloaded: Callable[..., nn.Module], implementation: str, first: str, recompute: bool) -> None:
    def chosen(model: Any) -> Any:
        model.set_attn_implementation(implementation)
        return model

    expected = train(chosen(build(torch.bfloat16)))
    model = build(torch.bfloat16)
    model.set_attn_implementation({"eager": "sdpa", "sdpa": "eager"}[implementation])
    if first == "offload":
        model = chosen(offloaded(model, recompute=recompute))
    else:
        model = offloaded(chosen(model), recompute=recompute)
    assert_same(train(model), expected)


@pytest.mark.soak  # compiling its kernel takes half a minute
@pytest.mark.filterwarnings("ignore")
def test_flex_attention(offloaded: Callable[..., nn.Module]) -> None:
    """On the CPU PyTorch has its forward alone."""
    expected, model = build(torch.float32), build(torch.float32)
    for each in (expected, offloaded(model)):
        each.set_attn_implementation("flex_attention")
    assert torch.equal(logits(model), logits(expected))
    for each in (expected, model):
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            train(each)


# ---- Liger-Kernel -------------------------------------------------------------------------------------------------


def test_all_of_liger_kernel(store: Path) -> None:
    """`apply_liger_kernel_to_llama(model=...)` as it is called by default."""
    assert run_file(__file__, store, **requirements.liger_interpreted()).count("same\n") == 2


def main(store: str) -> None:
    """Compare training with Liger's kernels in memory and offloaded, which come before offload or after."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    torch.set_num_threads(1)
    help_interpreter()
    small = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    # Models that are made later have Liger's classes from the start.
    models = [build(torch.float32, **small) for _ in range(3)]
    apply_liger_kernel_to_llama(model=models[0])
    expected = train(models[0])
    for first, model in (("offload", models[1]), ("kernels", models[2])):
        assert "Liger" not in str(model)
        changes = [
            lambda model: memascend.offload(model, store=store, host_memory="64MiB", allocator="pageable"),
            lambda model: apply_liger_kernel_to_llama(model=model),
        ]
        for change in changes if first == "offload" else reversed(changes):
            change(model)
        assert "LigerRMSNorm" in str(model) and "LigerSwiGLUMLP" in str(model)
        assert_same(train(model), expected)
        memascend.close(model)
        print("same")


def help_interpreter() -> None:
    """Give Triton's interpreter features of its compiler that Liger's kernels need: floats as tensors, and rsqrt."""
    import liger_kernel.ops.rms_norm as rms_norm
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_floats(argument: Any) -> Any:
        if type(argument) is float:
            handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = convert_floats
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)


if __name__ == "__main__":
    main(*sys.argv[1:])
