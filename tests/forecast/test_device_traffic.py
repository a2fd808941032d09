"""`memascend plan --gpu` against real runs on a simulated device: its plan, and device and SSD traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
from traffic import build, saved, steps
from transformers import LlamaConfig

import memascend
from memascend.forecast.forecast import Gpu, forecast
from memascend.hardware.gpu import NAMES, Rate
from memascend.layout.units import partition
from memascend.memory_plan.host import smallest_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn


SMALL = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
#: One micro-batch.
SEQUENCES, LENGTH = 1, 64


RUNS = [
    (0, 1, "ssd", "forward"),
    (4 << 20, 2, "recompute", "forward"),
    (0, 1, "ssd", "backward"),
    (64 << 20, 1, "recompute", "backward"),
]
RUN_NAMES = ["least", "some, accumulating", "least, in the backward pass", "ample, in the backward pass"]


@pytest.mark.parametrize(("spare", "accumulate", "activations", "update"), RUNS, ids=RUN_NAMES)
def test_copies_and_traffic_are_those_of_a_real_run(
    tmp_path: Path, on_device: Callable[..., nn.Module], spare: int, accumulate: int, activations: str, update: str
) -> None:
    compare(tmp_path, on_device, spare, accumulate, activations, update)


@pytest.mark.usefixtures("small_tables")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("spare", "accumulate", "activations", "update"), [*RUNS, (64 << 20, 2, "recompute", "forward")]
)
def test_tables_are_copied_as_is_forecast(
    tmp_path: Path,
    on_device: Callable[..., nn.Module],
    spare: int,
    accumulate: int,
    activations: str,
    update: str,
    tied: bool,
) -> None:
    """By rows and by blocks; with the largest budget the head has a buffer on the device."""
    config = LlamaConfig.from_dict(SMALL.to_dict() | {"tie_word_embeddings": tied})
    state = compare(tmp_path, on_device, spare, accumulate, activations, update, config)
    assert len(state.device_plan.whole_tables) == (spare == 64 << 20)


def compare(
    tmp_path: Path,
    on_device: Callable[..., nn.Module],
    spare: int,
    accumulate: int,
    activations: str,
    update: str,
    config: LlamaConfig = SMALL,
) -> Any:
    model, tokens = build(config), SEQUENCES * LENGTH
    known: dict[str, Any] = {"tokens": tokens, "config": config, "activations": activations}
    device_memory = tiny_models.smallest_device_budget(model, **known) + spare
    host_memory = smallest_plan(partition(model, uploaded=True)).total + (4 << 20)
    on_device(
        model,
        device_memory=device_memory,
        host_memory=host_memory,
        batch_tokens=tokens,
        activations=activations,
        update=update,
    )
    optimizer = memascend.AdamW(model.parameters(), lr=1e-4)
    state = memascend.offload_of(model)

    def step() -> dict[str, Any]:
        stats = steps(model, optimizer, 1, accumulate, SEQUENCES, LENGTH, config.vocab_size)[-1]
        return stats | state.runtime.device.stats()

    step()  # which carries no updates
    if update == "backward":
        step()  # which applies the updates of the first step, and gradients that it makes
    before, after = step(), step()
    rates = {name: Rate(1.0, "given") for name in NAMES}
    gpu = Gpu(device_memory * 16 // 15 + 1, rates, activations, segments=None)
    found = forecast(
        saved(config, tmp_path / "config"),
        seq_len=LENGTH,
        batch_size=SEQUENCES,
        grad_accum=accumulate,
        budget=host_memory,
        gpu=gpu,
        update=update,
    )
    assert found["gpu"]["device_memory"]["total_bytes"] == state.device_plan.total
    assert found["host_memory"]["total_bytes"] == state.plan.total
    predicted = {one["resource"]: one["amount"] for one in found["gpu"]["step"]["resources"]}
    moved = found["ssd_traffic"]["planned"]
    predicted |= {direction: moved[direction]["total_bytes"] for direction in ("read", "written")}
    counters = {"h2d": "h2d_bytes", "d2h": "d2h_bytes", "read": "ssd_bytes_read", "written": "ssd_bytes_written"}
    for resource, counter in counters.items():
        # Where copies are slow, one or two layers are still in their buffers when they are needed again (1.5% each).
        rel = 0.05 if resource == "read" else 0.03
        assert predicted[resource] == pytest.approx(after[counter] - before[counter], rel=rel), resource
    return state
