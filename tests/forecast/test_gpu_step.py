"""`memascend plan --gpu`: operations, copies and the time of a step, from rates."""

from copy import deepcopy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from traffic import EXPERTS, GIVEN, MODELS, SMALL, plan, saved
from transformers import AutoModelForCausalLM

from memascend import BudgetError
from memascend.cli import main
from memascend.forecast.forecast import Gpu, forecast
from memascend.forecast.step_time import step_time
from memascend.hardware import gpu
from memascend.hardware.gpu import Rate
from memascend.layout.units import partition

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
    # A copy: the configuration would have this attention in later tests too.
    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager")
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
