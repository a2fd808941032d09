"""Zeros that take no memory, and the empty models that are made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Llama4ForCausalLM, Llama4TextConfig

from memascend.formats import untouched
from memascend.formats.transformers_models import empty_model
from memascend.formats.untouched import UntouchedZeros


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((4, 5), {}),
        (((4, 5),), {"dtype": torch.bfloat16}),
        ((), {"size": (4, 5), "requires_grad": True}),
        ((4, 5), {"device": "cpu", "dtype": torch.int64}),
        ((4, 5), {"device": "meta"}),
        ((0,), {}),
        ((), {"size": ()}),
    ],
)
def test_zeros_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, args: tuple, kwargs: dict) -> None:
    monkeypatch.setattr(untouched, "UNTOUCHED_FROM_BYTES", 1)
    expected = torch.zeros(*args, **kwargs)
    with UntouchedZeros():
        made = torch.zeros(*args, **kwargs)
        out = torch.ones(3)
        torch.zeros(3, out=out)
    assert (made.shape, made.dtype, made.device, made.requires_grad, made.stride()) == (
        *(expected.shape, expected.dtype, expected.device, expected.requires_grad, expected.stride()),
    )
    assert not out.any()
    if made.device.type == "cpu":
        assert torch.equal(made, expected)
        made.detach().add_(1)
        assert made.detach().sum() == expected.numel()


def test_zeros_that_are_read_take_no_memory() -> None:
    with UntouchedZeros():
        made = torch.zeros(64 << 20, dtype=torch.uint8)
    before = resident_bytes()
    assert not made[::4096].any()
    assert resident_bytes() - before < 32 << 20


def test_an_empty_llama4_takes_no_memory_of_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Llama4TextConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=4096,
        intermediate_size_mlp=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=16,
        architectures=["Llama4ForCausalLM"],
    )
    touched: list[int] = []
    register = nn.Module.register_parameter

    def note(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        touched.append(resident_bytes())
        register(self, name, param)

    monkeypatch.setattr(nn.Module, "register_parameter", note)
    before = resident_bytes()
    model = empty_model(config, Path("."), torch.bfloat16)
    assert isinstance(model, Llama4ForCausalLM) and all(p.is_meta for p in model.parameters())
    # An expert tensor of a layer is 256 MiB.
    assert max(touched) - before < 128 << 20
