"""`memascend plan`: forecasts against real runs, sums, bad input."""

import json
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from tiny_models import smallest_budget
from torch.utils.flop_counter import FlopCounterMode
from traffic import EXPERTS, TIED, assert_measured, build, saved, steps
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)

import memascend
from memascend import BudgetError
from memascend.cli import main
from memascend.forecast.forecast import Gpu, as_text, forecast
from memascend.forecast.kinds import KINDS
from memascend.forecast.replay import Replay
from memascend.forecast.step_time import step_time
from memascend.forecast.total_memory import CALL_BYTES
from memascend.hardware import gpu
from memascend.hardware.gpu import Rate
from memascend.layout.units import Unit, partition
from memascend.memory_plan.host import smallest_plan
from memascend.memory_plan.lines import Line
from memascend.optim import NAMED

# Bytes moved do not depend on digits.
pytestmark = pytest.mark.usefixtures("products_in_float32")

CONFIGS = sorted((Path(__file__).parents[2] / "benches" / "configs").glob("*.json"))
PARAMETERS = {
    "gemma-like-4b": 3_880_099_328,
    "gpt2-xl": 1_557_611_200,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-30b-a3b": 30_532_122_624,
}
SMALL = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
MODELS = {"llama": SMALL, "gpt2": TIED, "qwen3_moe": EXPERTS}


def plan(capfd, path, *more):
    """Run the command with --json; return its exit code and output."""
    code = main.main(["plan", str(path), "--json", *map(str, more)])
    return code, json.loads(capfd.readouterr().out)


# ---- the published shapes -----------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_published_shape_can_be_planned(file):
    found = forecast(file, seq_len=1024, batch_size=1)
    model, host, space = found["model"], found["host_memory"], found["ssd_space"]
    assert model["parameters"] == PARAMETERS[file.stem]
    for lines in (host["lines"], model["units"]):
        assert all(line["total_bytes"] == line["nbytes"] * line["count"] for line in lines)
    assert sum(line["total_bytes"] for line in host["lines"]) == host["total_bytes"] == host["smallest_bytes"]
    assert sum(unit["total_bytes"] for unit in model["units"]) == space["weights_bytes"] >= 2 * model["parameters"]
    moved = found["ssd_traffic"]["planned"]
    for part in (space, moved["read"], moved["written"]):
        assert part["total_bytes"] == sum(part[f"{kind}_bytes"] for kind in KINDS)
    assert space["exp_avg_bytes"] == pytest.approx(4 * model["parameters"], rel=1e-3)
    # The floor and the ceiling of ARCHITECTURE.md; activations come on top.
    activations = space["activations_bytes"] / model["parameters"]
    assert 13.9 < moved["written_bytes_per_parameter"] < 14.01 + activations
    # The head is read by blocks for the loss and for its gradient, beside its update.
    assert 14 < moved["read_bytes_per_parameter"] < 16.4 + activations


@pytest.mark.parametrize(
    ("optimizer", "options", "at_most"),
    [
        ("apollo", {"states": "8bit"}, 15.5),
        ("apollo-mini", {}, 14.5),
        ("apollo", {"master": False, "update": "backward"}, 10.5),
        ("apollo-mini", {"master": False, "update": "backward"}, 8.5),
    ],
)
def test_apollo_moves_few_bytes(optimizer, options, at_most):
    file = next(file for file in CONFIGS if file.stem == "llama-3.1-8b")
    moved = forecast(file, seq_len=128, batch_size=1, optimizer=optimizer, budget=8 << 30, **options)
    planned = moved["ssd_traffic"]["planned"]
    assert planned["read_bytes_per_parameter"] + planned["written_bytes_per_parameter"] <= at_most
    # The largest gradient has 14,336 x 4,096 elements. Two at a time: a number for each channel and rank in the
    # projection and in both moments, for each rank and place in a channel in the random matrix, in whole registers,
    # each channel's sums of squares, and 1 MiB of pieces that are put together.
    ranks, padded = (256, 256) if optimizer == "apollo" else (1, 16)
    projections = moved["pytorch"]["projections_bytes"]
    sums = 14_336 * 8 * 8
    assert projections == 2 * (4 * (14_336 * (3 * ranks + 2) + 4_096 * padded) + sums + 2**20)
    assert moved["pytorch"]["estimated_bytes"] >= moved["pytorch"]["backward_bytes"] + projections


def test_spare_budget_saves_traffic_until_only_durable_steps_move():
    def run(budget, durability="step"):
        return forecast(CONFIGS[0], seq_len=128, batch_size=1, budget=budget, durability=durability)["ssd_traffic"]

    least = forecast(CONFIGS[0], seq_len=128, batch_size=1)["host_memory"]["smallest_bytes"]
    saved = [run(budget)["saved_bytes"] for budget in (least, least + 2**30, least + 2**32, 2**40)]
    assert saved[0] == 0
    assert saved == sorted(set(saved))
    step, third, none = (run(2**40, durability)["planned"] for durability in ("step", "every:3", "none"))
    # The eight chunks of staging that gradients leave to transfers are free all the same.
    assert [moved["read"]["total_bytes"] for moved in (step, third, none)] == [0, 0, 0]
    assert step["written_bytes_per_parameter"] == pytest.approx(12, rel=1e-3)
    assert third["written_bytes_per_parameter"] == pytest.approx(4, rel=1e-3)
    assert none["written"]["total_bytes"] == 0


def test_experts_are_whole_tensors_of_three_dimensions():
    file = next(file for file in CONFIGS if "a3b" in file.stem)
    found = forecast(file, seq_len=128, batch_size=1, compare="zero-infinity")
    assert found["model"]["largest_parameter"] == 128 * 2 * 768 * 2048
    # Embedding, head, four of attention and two of experts; norms and a router of 512 KiB are not swapped.
    assert found["zero_infinity"]["slots"] == 2 + 4 + 2
    assert found["zero_infinity"]["slot_bytes"] == 2 * 128 * 2 * 768 * 2048


def test_a_directory_is_planned_like_its_config(tmp_path, capfd):
    saved(SMALL, tmp_path)
    code, of_directory = plan(capfd, tmp_path, "--seq-len", 64)
    assert code == 0
    _, of_file = plan(capfd, tmp_path / "config.json", "--seq-len", 64)
    assert of_file["model"].pop("path") == f"{of_directory['model'].pop('path')}/config.json"
    for told in (of_file, of_directory):
        assert told.pop("step")["floor_seconds"] > 0, "measured, each time anew"
        assert (
            told.pop("whole")["planned_bytes"] == told["host_memory"]["total_bytes"]
        )  # the remainder is of the moment
    assert of_file == of_directory


@pytest.mark.parametrize("durability", ["step", "every:16", "none"])
@pytest.mark.parametrize("file", [CONFIGS[0], CONFIGS[-1]], ids=lambda file: file.stem)
def test_more_memory_never_moves_more(file, durability):
    points = forecast(file, seq_len=512, batch_size=1, durability=durability, with_curve=True, ssd=Rate(1e9, "given"))
    curve = points["curve"]
    budgets = [point["budget_bytes"] for point in curve]
    assert budgets == sorted(set(budgets)) and len(budgets) > 10
    moved = [point["read_bytes"] + point["written_bytes"] for point in curve]
    # Chunks grow with the budget, and gradients leave eight of them to transfers.
    assert all(after <= before * 1.002 for before, after in pairwise(moved))
    assert [point["seconds_at_least"] for point in curve] == [round(nbytes / 1e9, 3) for nbytes in moved]
    assert curve[0]["bytes_per_parameter"] > 28
    least = {"step": 12, "every:16": 12 / 16, "none": 0}[durability]
    assert curve[-1]["bytes_per_parameter"] == pytest.approx(least, abs=0.01)


def test_the_curve_is_shown_where_it_is_asked_for(tmp_path, capfd):
    folder = saved(SMALL, tmp_path)
    words = ["plan", str(folder), "--seq-len", "64"]
    assert main.main(words) == 0
    assert "More host memory" not in capfd.readouterr().out
    assert main.main([*words, "--curve"]) == 0
    shown = capfd.readouterr().out
    assert "More host memory" in shown and "seconds at least" not in shown and "memascend bench" in shown
    assert main.main([*words, "--curve", "--ssd", "1e9"]) == 0
    assert "seconds at least" in capfd.readouterr().out
    assert main.main([*words, "--ssd", "1e9"]) == 0
    assert "drives not counted" not in capfd.readouterr().out
    code, found = plan(capfd, folder, "--gpu", "8GiB", "--seq-len", 128, "--curve", *GIVEN)
    assert code == 0
    # On a device other resources bind too.
    assert found["curve"][-1]["seconds_at_least"] > 0


# ---- against real runs ----------------------------------------------------------------------------------------


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


# ---- a step on a GPU ----------------------------------------------------------------------------------------

RATES = {
    "flops": Rate(1e12, "given"),
    "h2d": Rate(2e9, "given"),
    "d2h": Rate(4e9, "given"),
    "dram": Rate(8e9, "given"),
    "ssd": Rate(1e9, "given"),
    "update": Rate(4e9, "given"),
}


def on_gpu(path, *, memory=8 << 30, activations="recompute", fused_loss=False, **known):
    gpu = Gpu(memory, RATES, activations, fused_loss)
    found = forecast(path, **{"seq_len": 128, "batch_size": 2} | known, gpu=gpu)
    return found, {one["resource"]: one["amount"] for one in found["gpu"]["step"]["resources"]}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_operations_are_those_that_pytorch_counts(name, tmp_path):
    config, tokens = MODELS[name], 2 * 128
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(3, config.vocab_size, (2, 128))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    _, amounts = on_gpu(saved(config, tmp_path), dtype="float32")
    layers = [place for unit in partition(model) if unit.repeated for place in unit.places if len(place.shape) > 1]
    recomputed = 2 * tokens * sum(place.numel for place in layers)
    # Counted without recomputation, and with the masked half of the attention: 12 and not 8 S A.
    attention = 4 * tokens * 128 * config.hidden_size * config.num_hidden_layers
    assert counter.get_total_flops() == amounts["flops"] - recomputed + attention


def test_a_token_is_multiplied_with_the_experts_that_it_is_sent_to(tmp_path):
    config = EXPERTS
    _, amounts = on_gpu(saved(config, tmp_path))
    attention = 2 * 128 * 4 * 32 + 2 * 128 * 2 * 32
    experts = 2 * (3 * 128 * 192) + 128 * 4  # two of four, and the router
    layers = 8 * config.num_hidden_layers * (attention + experts + 128 * 4 * 32)
    assert amounts["flops"] == 256 * (layers + 6 * 128 * 1024)


def test_a_model_that_the_gpu_holds_is_copied_there_once(tmp_path):
    folder = saved(SMALL, tmp_path)
    found, amounts = on_gpu(folder, memory=64 << 30)
    weights = found["ssd_space"]["weights_bytes"]
    assert amounts["h2d"] == amounts["d2h"] == weights
    # So it is read from the SSD once, however little host memory there is. The norms have a buffer of their own.
    norms = next(unit["nbytes"] for unit in found["model"]["units"] if unit["name"] == "small modules")
    assert found["ssd_traffic"]["planned"]["read"]["weights_bytes"] == weights - norms
    _, amounts = on_gpu(folder, memory=64 << 30, grad_accum=3)
    # There is room for the sums of gradients, too: they leave the GPU with the last of three passes.
    assert amounts["h2d"] == weights
    assert amounts["d2h"] == pytest.approx(weights, rel=0.01)  # units have padding, sums have none


def test_the_least_gpu_is_copied_to_for_every_use(tmp_path):
    folder = saved(SMALL, tmp_path)
    with pytest.raises(BudgetError) as refused:
        on_gpu(folder, memory=1 << 20)
    least = refused.value.smallest_bytes
    found, amounts = on_gpu(folder, memory=least)
    sizes = {unit["name"]: unit["nbytes"] for unit in found["model"]["units"]}
    layer, head = sizes["model.layers.0 and 7 like it"], sizes["model.embed_tokens and 1 like it"]
    # One buffer for all: every layer twice, embedding and head once; the norms stay.
    assert amounts["h2d"] == 16 * layer + 2 * head + sizes["small modules"]
    assert found["ssd_traffic"]["smallest"]["read"]["weights_bytes"] <= amounts["h2d"]


def test_inputs_of_layers_go_where_they_are_sent(tmp_path):
    folder, inputs = saved(SMALL, tmp_path), 8 * 256 * 512 * 2
    plain, here = on_gpu(folder)
    assert plain["ssd_space"]["activations_bytes"] == 0
    for policy, spilled in (("host", 0), ("ssd", 2 * inputs)):
        found, there = on_gpu(folder, activations=policy, grad_accum=2, budget=2**30)
        assert there["h2d"] - here["h2d"] == 2 * inputs
        # Inputs with each pass, and gradients once, whose sums stay on the GPU; units have padding, sums have none.
        assert there["d2h"] == pytest.approx(here["d2h"] + 2 * inputs, rel=0.01)
        for direction in ("read", "written"):
            assert found["ssd_traffic"]["planned"][direction]["activations_bytes"] == spilled


def test_larger_batches_are_proposed_where_the_gpu_holds_them(tmp_path):
    folder = saved(SMALL, tmp_path)

    def proposed(**known):
        return {saving["change"]: saving for saving in on_gpu(folder, **known)[0]["endurance"]["savings"]}

    change, sliced = "--batch-size 8 --micro-batch-size 2 --grad-accum 1", {"batch_size": 8, "micro_batch_size": 2}
    for activations in ("ssd", "host"):
        where = {"memory": 192 << 20, "activations": activations}
        found, _ = on_gpu(folder, **where, **sliced)
        assert proposed(**where, grad_accum=4)[change]["step_bytes"] == found["endurance"]["step"]["total_bytes"]
    # The inputs of layers do not fit there.
    assert change not in proposed(memory=192 << 20, grad_accum=4)


def test_updates_in_the_backward_pass_of_a_gpu_put_no_gradients_aside(tmp_path, capfd):
    folder = saved(SMALL, tmp_path)
    (forward, _), (backward, _) = (on_gpu(folder, update=update) for update in ("forward", "backward"))
    written = [found["ssd_traffic"]["planned"]["written"]["gradients_bytes"] for found in (forward, backward)]
    assert written[0] > written[1] == 0
    # Not even in memory.
    assert backward["host_memory"]["total_bytes"] == forward["host_memory"]["total_bytes"]
    read = [found["ssd_traffic"]["planned"]["read"]["weights_bytes"] for found in (forward, backward)]
    weights = forward["ssd_space"]["weights_bytes"]
    # The device has all weights from the forward pass on, so that most of them are read for their updates alone.
    assert weights / 2 < read[1] - read[0] < weights
    words = ["plan", str(folder), "--gpu", "8GiB", "--seq-len", "128", "--update", "backward", *GIVEN]
    assert main.main([*words, "--details"]) == 0
    assert "gradients being applied" not in capfd.readouterr().out


def test_bytes_in_host_memory_by_hand(tmp_path):
    found, amounts = on_gpu(saved(SMALL, tmp_path), dtype="float32", memory=64 << 30, budget=2**31)
    moved, weights = found["ssd_traffic"]["planned"], found["ssd_space"]["weights_bytes"]
    assert amounts["ssd"] == sum(moved[direction]["total_bytes"] for direction in ("read", "written"))
    # The update reads gradient, weight and two moments and writes the last three.
    assert amounts["update"] == 7 * weights
    assert amounts["dram"] == amounts["ssd"] + amounts["h2d"] + amounts["d2h"] + 7 * weights


def test_the_slowest_is_the_floor():
    amounts = {"flops": 3 * 10**12, "ssd": 6 * 10**9, "h2d": 4 * 10**9, "d2h": 4 * 10**9, "dram": 0}
    step = step_time(amounts, RATES, tokens=1200)
    assert [one["seconds"] for one in step["resources"]] == [3, 6, 2, 1, 0]
    assert (step["bound_by"], step["next"], step["times_the_next"]) == ("SSD, read and written", "compute", 2)
    assert (step["floor_seconds"], step["sum_seconds"], step["tokens_per_second_at_most"]) == (6, 12, 200)


GIVEN = ["--flops", "70e12", "--pcie", "25e9", "--dram", "40e9", "--ssd", "3e9"]


def test_the_command_tells_the_time_of_a_step(tmp_path, capfd):
    folder = saved(SMALL, tmp_path)
    words = ["plan", str(folder), "--gpu", "8GiB", "--seq-len", "128", "--activations", "ssd", *GIVEN]
    assert main.main(words) == 0
    assert "with this GPU" in capfd.readouterr().out.splitlines()[1]
    with pytest.MonkeyPatch.context() as patch:
        # Measured beside other programs, it may be the lowest rate.
        patch.setattr(gpu, "measure_update", lambda threads: Rate(1e12, "given"))
        assert main.main([*words, "--details", "--compare", "zero-infinity"]) == 0
    out = capfd.readouterr().out
    for title in ("Host memory", "Device memory, of 8.0 GiB", "Time of an optimizer step", "Beside it"):
        assert title in out
    assert "On top" not in out
    assert "bound by SSD, read and written" in out
    assert not [line for line in out.partition("\n\n")[2].splitlines() if len(line) > 132]
    code, found = plan(capfd, folder, "--gpu", "8GiB", "--seq-len", 128, *GIVEN)
    assert code == 0
    step, memory = found["gpu"]["step"], found["gpu"]["device_memory"]
    rates = {one["resource"]: one["per_second"] for one in step["resources"]}
    assert rates.pop("update") > 0, "measured with the threads that a run would have"
    assert rates == {
        "flops": 70e12,
        "ssd": 3e9,
        "h2d": 25e9,
        "d2h": 25e9,
        "dram": 40e9,
    }
    assert step["floor_seconds"] == max(one["seconds"] for one in step["resources"])
    assert sum(line["total_bytes"] for line in memory["lines"]) == memory["total_bytes"] <= memory["budget_bytes"]
    assert "pytorch" not in found


def test_a_gpu_that_is_too_small_is_refused_with_what_helps(tmp_path, capfd):
    folder = saved(SMALL, tmp_path)
    words = ["plan", str(folder), "--gpu", "64MiB", "--seq-len", "256", *GIVEN]
    assert main.main(words) == main.BAD_INPUT
    err = capfd.readouterr().err
    assert "device_memory" in err
    assert "fewer than 256 tokens" in err


# ---- the command ----------------------------------------------------------------------------------------------


def test_the_tables_show_every_part(tmp_path, capfd):
    saved(SMALL, tmp_path)
    words = ["plan", str(tmp_path), "--host-memory", "256MiB", "--seq-len", "64", "--grad-accum", "2", "--details"]
    assert main.main([*words, "--compare", "zero-infinity"]) == 0
    out = capfd.readouterr().out
    for title in ("LlamaForCausalLM, ", "Host memory", "SSD space", "SSD traffic", "On top", "Beside it"):
        assert title in out
    assert main.main(words) == 0
    assert "ZeRO-Infinity" not in capfd.readouterr().out
    for compared in (words, [*words, "--compare", "zero-infinity"]):
        assert main.main([*compared, "--json"]) == 0
        assert ("zero_infinity" in json.loads(capfd.readouterr().out)) == ("--compare" in compared)
    assert "256.0 MiB" in out
    assert "2 x 1 sequences of 64 tokens" in out
    assert all(len(line) <= 132 for line in out.partition("\n\n")[2].splitlines())


def prepare(room, what):
    """Write a model directory with something wrong; return the arguments and the expected message."""
    config = room / "config.json"
    if what == "missing":
        return [room / "nowhere"], "nowhere does not exist"
    if what == "no config":
        return [room], "has no config.json"
    if what == "not JSON":
        config.write_text("{")
        return [room], "cannot be read as JSON"
    if what == "no model_type":
        config.write_text('{"hidden_size": 64}')
        return [config], "names no model_type"
    if what == "unknown":
        config.write_text('{"model_type": "nonesuch"}')
        return [config], "nonesuch"
    if what == "encoder-decoder":
        saved(T5Config(), room)
        return [room], "no causal language model"
    saved(SMALL, room)
    if what == "too long":
        return [room, "--seq-len", "257"], "257 is more than the model's 256 positions"
    assert what == "too small"
    words = [room, "--seq-len", "64", "--host-memory", "1MiB", "--dtype", "bfloat16"]
    return words, "a host memory budget of 1.0 MiB is too small"


WRONG = ["missing", "no config", "not JSON", "no model_type", "unknown", "encoder-decoder", "too long", "too small"]


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_gets_one_message(tmp_path, capfd, what):
    words, says = prepare(tmp_path, what)
    assert main.main(["plan", *map(str, words)]) == main.BAD_INPUT
    out, err = capfd.readouterr()
    assert out == ""
    assert [says in line for line in err.splitlines() if line.startswith("memascend: error: ")] == [True], err
    assert "Traceback" not in err


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_is_one_json_object(tmp_path, capfd, what):
    words, says = prepare(tmp_path, what)
    assert main.main(["plan", *map(str, words), "--json"]) == main.BAD_INPUT
    out, err = capfd.readouterr()
    told = json.loads(out)
    assert says in told["error"]
    assert "memascend: error" not in err
    if what == "too small":
        assert told["smallest_bytes"] == smallest_budget(LlamaForCausalLM(SMALL).to(torch.bfloat16))
        assert forecast(tmp_path, seq_len=64, batch_size=1, budget=told["smallest_bytes"])
    else:
        assert list(told) == ["error"]


@pytest.mark.parametrize("words", [["--seq-len", "1"], ["--dtype", "float16"], ["--host-memory", "much"]])
def test_usage_errors_name_the_word(tmp_path, capfd, words):
    assert main.main(["plan", str(tmp_path), *words]) == main.BAD_INPUT
    assert words[1] in capfd.readouterr().err
