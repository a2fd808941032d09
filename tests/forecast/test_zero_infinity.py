"""ZeRO-Infinity's host memory and traffic by DeepSpeed's formulas, against worked examples."""

import json
from pathlib import Path

import pytest
import torch

from memascend.forecast import zero_infinity
from memascend.forecast.forecast import forecast

CONFIGS = sorted((Path(__file__).parents[2] / "benches" / "configs").glob("*.json"))


@pytest.mark.parametrize("prefix", ["llama-3.1-8b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"])
def test_the_pool_has_a_slot_for_embedding_head_and_seven_matrices(prefix):
    file = next(file for file in CONFIGS if file.stem == prefix)
    config = json.loads(file.read_text())
    zero = forecast(file, seq_len=128, batch_size=1, compare="zero-infinity")["zero_infinity"]
    assert zero["slots"] == 2 + 7
    assert zero["parameter_pool_bytes"] == 9 * 2 * config["vocab_size"] * config["hidden_size"]
    assert zero["ratio"] > 10


def test_the_pools_of_four_models_are_empty_by_the_cited_share():
    wasted = [
        forecast(file, seq_len=128, batch_size=1, compare="zero-infinity")["zero_infinity"]["parameter_pool_waste"]
        for file in CONFIGS
        if file.stem.startswith(("llama", "qwen2.5"))
    ]
    assert len(wasted) == 4
    assert 100 * sum(wasted) / 4 == pytest.approx(72.7, abs=0.05)


def test_defaults_of_the_parameter_pool():
    # buffer_count 5, buffer_size 1e8 elements of two bytes, a multiple of 1024 bytes.
    assert zero_infinity.default_parameter_pool_bytes(50_000_000, 2) == 5 * 2 * 100_000_256
    assert zero_infinity.default_parameter_pool_bytes(128_256 * 4096, 2) == 5 * 2 * 128_256 * 4096


def test_only_parameters_of_a_mebibyte_are_swapped():
    assert not zero_infinity.is_swapped(2**19 - 1, 2)
    assert zero_infinity.is_swapped(2**19, 2)
    assert zero_infinity.in_flight_slots([2**20, 100], [[2**20, 2**20, 7], [2**20]], 2) == 1 + 2
    assert zero_infinity.in_flight_slots([2**20], [], 2) == 1


def test_sub_groups_close_when_they_are_full():
    assert zero_infinity.largest_sub_group([4, 3, 9, 1, 1], sub_group_size=6) == [9]
    assert zero_infinity.largest_sub_group([4, 1, 9, 1, 1], sub_group_size=6) == [4, 1, 9]
    assert zero_infinity.largest_sub_group([4, 3]) == [4, 3]
    assert zero_infinity.largest_sub_group([]) == []


def test_optimizer_swap_buffers():
    assert zero_infinity.optimizer_swap_bytes(1000) == 4 * 4 * 1024
    assert zero_infinity.optimizer_swap_bytes(1024, pipelined=True) == 2 * zero_infinity.optimizer_swap_bytes(1024)


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 1.25), (torch.float16, 1.5)])
def test_the_overflow_check_takes_what_pytorch_allocates(dtype, times):
    gradients = torch.zeros(1 << 20, dtype=dtype)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=activities, acc_events=True) as profile:
        torch.isinf(gradients)
    allocated = [event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 4096]
    predicted = zero_infinity.overflow_check_bytes(1 << 20, dtype.itemsize)
    assert predicted == times * gradients.nbytes
    # Scalars of a few bytes come and go inside the same calls.
    assert sum(allocated) == pytest.approx(predicted, rel=1e-4)


@pytest.mark.parametrize(("asked", "pinned"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (3 << 30, 4 << 30)])
def test_pinned_memory_comes_in_powers_of_two(asked, pinned):
    assert zero_infinity.pinned_bytes(asked) == pinned


def test_traffic_is_the_38_bytes_that_were_measured():
    assert zero_infinity.ssd_traffic_bytes(1000, 2) == (20_000, 18_000)
    assert zero_infinity.ssd_traffic_bytes(1000, 2, grad_accum=4) == (32_000, 18_000)
    assert zero_infinity.gradient_buffer_bytes(1000, 4) == 4000
    assert zero_infinity.write_back_bytes([512, 513], 2) == 1024 + 2048
