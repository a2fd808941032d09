"""`memascend plan`: forecasts of traffic and plans against real runs."""

from collections import Counter
from itertools import chain

import pytest
import torch
from tiny_models import smallest_budget
from traffic import EXPERTS, MODELS, SMALL, assert_measured, build, saved, steps

import memascend
from memascend.forecast.forecast import as_text, forecast
from memascend.forecast.replay import Replay
from memascend.forecast.total_memory import CALL_BYTES
from memascend.layout.units import Unit, partition
from memascend.memory_plan.host import smallest_plan
from memascend.memory_plan.lines import Line
from memascend.optim import NAMED


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("spare", "accumulate", "update"),
    [
        (0, 1, "forward"),
        (8 * 2**20, 2, "forward"),
        (2**30, 1, "forward"),
        (0, 1, "backward"),
        (8 * 2**20, 1, "backward"),
    ],
    ids=["least", "some, accumulating", "ample", "least, in the backward pass", "some, in the backward pass"],
)
def test_traffic_and_plan_are_those_of_a_real_run(name, spare, accumulate, update, tmp_path, offloaded):
    config = MODELS[name]
    model = build(config)
    budget = smallest_plan(partition(model), update=update).total + spare
    offloaded(model, host_memory=budget, update=update)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-4)
    seen = steps(model, optimizer, 4, accumulate, 2, 128, config.vocab_size)

    found = forecast(
        saved(config, tmp_path / "config"),
        seq_len=128,
        batch_size=2,
        grad_accum=accumulate,
        budget=budget,
        update=update,
    )
    assert found["host_memory"]["total_bytes"] == memascend.offload_of(model).plan.total
    assert found["host_memory"]["budget_bytes"] == seen[-1]["host_bytes_budget"]
    assert found["model"]["parameters"] == seen[-1]["parameters"]
    # A layer whose update is slow is still in its buffer when it is needed again.
    assert_measured(found, seen, fewer_reads=0.03 if update == "forward" else 0.1)


@pytest.mark.usefixtures("small_experts_in_pieces")
@pytest.mark.parametrize(
    ("spare", "optimizer"),
    [(0, "adamw"), (3 * 2**20, "adamw"), (2**30, "adamw"), (0, "apollo"), (2**30, "apollo-mini")],
)
def test_traffic_of_experts_that_are_read_and_trained_one_by_one(spare, optimizer, tmp_path, offloaded):
    model = build(EXPERTS)
    budget = smallest_plan(partition(model, experts="pieces")).total + spare
    offloaded(model, host_memory=budget, experts="pieces")
    make, _, options = NAMED[optimizer]
    trained = model.parameters()
    if "rank" in options:  # The forecast takes the small matrices of this model for packs that have AdamW.
        experts, others = ([p for p in model.parameters() if (p.ndim == 3) == is_stack] for is_stack in (True, False))
        trained = [{"params": experts, **options}, {"params": others}]
    seen = steps(model, make(trained, lr=1e-4), 4, 1, 2, 128, EXPERTS.vocab_size)
    work = {"seq_len": 128, "batch_size": 2, "budget": budget, "experts": "pieces", "optimizer": optimizer}
    assert_measured(forecast(saved(EXPERTS, tmp_path / "config"), **work), seen)


@pytest.mark.parametrize("spare", [0, 8 * 2**20])
def test_traffic_of_micro_batches_that_go_through_each_layer(spare, tmp_path, offloaded):
    model = build(SMALL)
    budget = smallest_plan(partition(model)).total + spare
    offloaded(model, host_memory=budget, micro_batch_size=1)
    seen = steps(model, memascend.AdamW(model.parameters(), lr=1e-4), 4, 1, 4, 128, SMALL.vocab_size)
    work = {"seq_len": 128, "batch_size": 4, "budget": budget}
    found = forecast(saved(SMALL, tmp_path / "config"), **work, micro_batch_size=1)
    assert_measured(found, seen)
    moved = found["ssd_traffic"]
    assert "4 sequences of 128 tokens, 1 at a time in each layer" in as_text(found)
    plain = forecast(tmp_path / "config", **work | {"batch_size": 1})
    once = plain["ssd_traffic"]
    # Of 8 layers 3 more calls each.
    assert (plain["pytorch"]["calls_bytes"], found["pytorch"]["calls_bytes"]) == (0, 24 * CALL_BYTES)
    assert "calls of layers with slices" in as_text(found)
    for direction in ("read", "written"):
        more, one = ((part["planned"][direction]) for part in (moved, once))
        more, one = (part["total_bytes"] - part["activations_bytes"] for part in (more, one))
        assert one * 0.99 <= more <= one * 1.05


# A slice of 96 tokens is smaller than a chunk of the staging, and takes a whole one.
@pytest.mark.parametrize(("rows", "tokens", "micro"), [(2, 128, None), (4, 96, 1)])
def test_activations_are_those_of_a_real_forward(rows, tokens, micro, tmp_path, offloaded):
    model = build(SMALL)
    # Without buffers to spare, so that the remainder goes to the SSD.
    offloaded(model, host_memory=smallest_budget(model), micro_batch_size=micro)
    memascend.AdamW(model.parameters())
    before = memascend.stats(model)["store_bytes_used"]
    ids = torch.randint(3, SMALL.vocab_size, (rows, tokens))
    loss = model(input_ids=ids, labels=ids).loss
    stashed = memascend.stats(model)["store_bytes_used"] - before
    found = forecast(saved(SMALL, tmp_path / "config"), seq_len=tokens, batch_size=rows, micro_batch_size=micro)
    # Of 16 staging buffers half may keep data.
    each, spare = rows * tokens * 512 * 2, 8 * min(128 * 1024, tokens * 512 * 2)
    assert found["ssd_space"]["activations_bytes"] == 8 * each
    assert found["ssd_traffic"]["planned"]["written"]["activations_bytes"] == 8 * each - spare == stashed
    loss.backward()


@pytest.mark.core
def test_float32_has_no_low_half(tmp_path, offloaded):
    model = build(SMALL, torch.float32)
    offloaded(model, host_memory=smallest_budget(model))
    seen = steps(model, memascend.AdamW(model.parameters(), lr=1e-4), 4, 1, 1, 128, SMALL.vocab_size)
    found = forecast(saved(SMALL, tmp_path / "config"), seq_len=128, batch_size=1, dtype="float32")
    assert found["ssd_space"]["master_low_bytes"] == 0
    assert_measured(found, seen)


def test_rounded_gradients_are_those_of_a_real_run(tmp_path, offloaded):
    model = build(SMALL, torch.float32)
    kept = {"dtype": "float32", "gradients": "bfloat16"}
    found = forecast(saved(SMALL, tmp_path / "config"), seq_len=128, batch_size=1, grad_accum=2, **kept)
    offloaded(model, host_memory=found["host_memory"]["smallest_bytes"], gradients="bfloat16")
    seen = steps(model, memascend.AdamW(model.parameters(), lr=1e-4), 4, 2, 1, 128, SMALL.vocab_size)
    assert_measured(found, seen)
    space, written = found["ssd_space"], found["ssd_traffic"]["planned"]["written"]
    whole = forecast(saved(SMALL, tmp_path / "other"), seq_len=128, batch_size=1, grad_accum=2, dtype="float32")
    assert 2 * space["gradients_bytes"] == whole["ssd_space"]["gradients_bytes"] > 0
    spilled = whole["ssd_traffic"]["planned"]["written"]["gradients_bytes"]
    assert 2 * written["gradients_bytes"] == spilled > 0


@pytest.mark.parametrize(
    ("optimizer", "states", "master"),
    [
        ("adamw", "bfloat16", True),
        ("adamw", "8bit", False),
        ("lion", "8bit", True),
        ("sgd", "float32", True),
        ("apollo", "float32", True),
        ("apollo-mini", "8bit", False),
    ],
)
def test_other_optimizers_and_states_are_those_of_a_real_run(tmp_path, offloaded, optimizer, states, master):
    model = build(SMALL)
    offloaded(model, host_memory=smallest_budget(model))
    make, _, options = NAMED[optimizer]
    options = dict(options)
    projects = "apollo" in optimizer
    trained = memascend.apollo_groups(model, options.pop("rank")) if projects else model.parameters()
    made = make(trained, lr=1e-4, states=states, master=master, **options)
    seen = steps(model, made, 4, 1, 1, 128, SMALL.vocab_size)
    kept = {"optimizer": optimizer, "states": states, "master": master}
    found = forecast(saved(SMALL, tmp_path / "config"), seq_len=128, batch_size=1, **kept)
    assert_measured(found, seen)
    assert ("exp_avg_sq" in as_text(found)) == (optimizer == "adamw" or projects)
    assert ("moments of projected gradients" in as_text(found)) == projects
    assert ("master low halves" in as_text(found)) == master


def test_short_inputs_stay_in_memory(tmp_path):
    found = forecast(saved(SMALL, tmp_path), seq_len=63, batch_size=1)
    assert found["ssd_space"]["activations_bytes"] == 0
    assert forecast(tmp_path, seq_len=64, batch_size=1)["ssd_space"]["activations_bytes"] == 8 * 64 * 512 * 2


def replay(layers, buffers, passes):
    units = [Unit(f"layer {n}", repeated=True, nbytes=4096) for n in range(layers)]
    forward = list(range(layers))
    order = [*forward, *forward[-2::-1]]
    fetched = Replay(units, [Line("weights of layers", 4096, buffers)]).step([order] * passes)
    return Counter(chain(*fetched))


@pytest.mark.parametrize(("layers", "buffers"), [(6, 2), (6, 3), (12, 5), (6, 6)])
def test_the_last_layers_of_the_forward_are_the_first_of_the_backward(layers, buffers):
    fetched = replay(layers, buffers, 1)
    assert fetched == {n: 1 if n >= layers - buffers else 2 for n in range(layers)}
    # Accumulating, a second pass finds as many again.
    passes = replay(layers, buffers, 2).total()
    assert passes == max(layers, 4 * layers - 3 * buffers)
