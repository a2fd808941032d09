"""Experts that are read one by one take no more memory than experts that are read with their layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_mixtures import DECODER, batch, build
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from memascend._memascend import PAGE_BYTES
from memascend.errors import BudgetError
from memascend.layout.units import partition, round_up
from memascend.memory_plan.experts import partition_by_plan
from memascend.memory_plan.host import make_plan, smallest_plan
from memascend.memory_plan.in_parts import read_bytes
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from collections.abc import Callable

#: Layers of many small experts, for which buffers and bookkeeping of pieces would take more; and of larger ones.
SMALL: dict[str, Any] = {"hidden_size": 64, "num_experts": 64, "moe_intermediate_size": 8}
LARGE: dict[str, Any] = {"hidden_size": 1024, "num_experts": 16, "moe_intermediate_size": 512}


def mixture(trained: bool = True, **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**DECODER | sizes)).to(torch.bfloat16)
    return model.requires_grad_(trained)


def least(model: nn.Module, experts: str, update: str) -> int:
    return smallest_plan(partition(model, experts=experts), update=update).total


@pytest.mark.parametrize("update", ["forward", "backward"])
@pytest.mark.parametrize("trained", [True, False])
def test_pieces_never_take_more_than_whole_layers(trained: bool, update: str) -> None:
    chosen = set()
    for sizes in (SMALL, LARGE, SMALL | {"num_hidden_layers": 12}, SMALL | {"moe_intermediate_size": 64}):
        model = mixture(trained, **sizes)
        units = partition_by_plan(model, experts="pieces", update=update)
        whole, pieces = (least(model, experts, update) for experts in ("whole", "pieces"))
        assert smallest_plan(units, update=update).total == min(whole, pieces)
        chosen.add((whole > pieces, any(unit.is_experts for unit in units)))
        assert not any(unit.is_experts for unit in partition_by_plan(model, experts="whole", update=update))
    assert chosen == {(True, True), (False, False)}


def test_a_budget_that_is_too_small_names_pieces_only_where_they_take_less() -> None:
    for sizes, names in ((SMALL, False), (LARGE, True)):
        with pytest.raises(BudgetError) as caught:
            make_plan(partition(mixture(False, **sizes)), 1)
        assert ("experts='pieces'" in str(caught.value)) == names


def test_many_small_experts_are_read_with_their_layers(offloaded: Callable[..., nn.Module]) -> None:
    model = build("qwen3_moe")
    expected = build("qwen3_moe")(**batch(0)).loss
    offloaded(model, host_memory=None, experts="pieces")
    session = offload_of(model)
    assert not any(unit.is_experts for unit in session.units)
    assert torch.equal(model(**batch(0)).loss, expected)


@pytest.mark.parametrize(("hidden", "width"), [(128, 104), (72, 104), (64, 8), (256, 128), (40, 24)])
def test_a_buffer_has_room_for_the_pages_of_any_expert_and_no_more(hidden: int, width: int) -> None:
    model = mixture(hidden_size=hidden, moe_intermediate_size=width, num_experts=64, num_hidden_layers=2)
    places = [p for unit in partition(model, experts="pieces") if unit.is_experts for p in unit.places]
    assert places
    for place in places:
        nbytes = place.expert_nbytes
        pages = [
            round_up((number + 1) * nbytes, PAGE_BYTES) - number * nbytes // PAGE_BYTES * PAGE_BYTES
            for number in range(place.shape[0])
        ]
        assert read_bytes(place) == max(pages)
