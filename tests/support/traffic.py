"""Models made of a configuration alone, their plans by the command, and steps of them whose traffic is counted."""

import json

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

import memascend
from memascend.cli import main

TIED = GPT2Config(architectures=["GPT2LMHeadModel"], vocab_size=2048, n_embd=256, n_layer=4, n_head=4, n_positions=256)
EXPERTS = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"],
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=192,
    moe_intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
    max_position_embeddings=256,
)

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
#: Rates of a GPU, from which `plan` estimates the time of a step.
GIVEN = ["--flops", "70e12", "--pcie", "25e9", "--dram", "40e9", "--ssd", "3e9"]
MODELS = {"llama": SMALL, "gpt2": TIED, "qwen3_moe": EXPERTS}


def plan(capfd, path, *more):
    """Run the command with --json; return its exit code and output."""
    code = main.main(["plan", str(path), "--json", *map(str, more)])
    return code, json.loads(capfd.readouterr().out)


def build(config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def saved(config, folder):
    config.save_pretrained(folder)
    return folder


def settle(state):
    """Wait until nothing moves: a window between two such moments holds whole steps.

    Fetches that the step could not begin, since updates of the backward pass still had the buffers, begin now.
    """
    _wait(state)
    state.streamer.start_next_pass()
    _wait(state)


def _wait(state):
    for cached in state.streamer.cached_units.values():
        for ticket in cached.backward_tickets:
            ticket.wait()
        if cached.ticket is not None:
            cached.ticket.wait()
    for unit in state.units:
        state.runtime.units.wait_unit(unit.index)


def steps(model, optimizer, count, accumulate, batch, tokens, vocabulary):
    state = memascend.offload_of(model)
    before = []
    for step in range(count):
        for micro in range(accumulate):
            generator = torch.Generator().manual_seed(100 * step + micro)
            ids = torch.randint(3, vocabulary, (batch, tokens), generator=generator)
            (model(input_ids=ids, labels=ids).loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        settle(state)
        before.append(memascend.stats(model))
    return before


def assert_measured(found, seen, fewer_reads=0.03, fewer=0.03):
    """Compare the forecast of host memory, store and traffic with a run's, as `traffic.steps` returned them.

    A run may read less than is forecast, by up to `fewer_reads`, and read and write less by up to `fewer`. If it may do
    so without a limit, its store may have less too.
    """
    assert found["host_memory"]["total_bytes"] == seen[-1]["host_bytes_planned"]
    # Between steps the store holds everything but activations.
    space = found["ssd_space"]
    total_bytes = space["total_bytes"] - space["activations_bytes"]
    assert seen[-1]["store_bytes_used"] in (range(total_bytes + 1) if fewer == 1 else [total_bytes])
    for counter, direction in (("ssd_bytes_read", "read"), ("ssd_bytes_written", "written")):
        real = (seen[3][counter] - seen[1][counter]) / 2
        forecast_bytes = found["ssd_traffic"]["planned"][direction]["total_bytes"]
        least = 1 - max(fewer, fewer_reads if direction == "read" else 0)
        assert least * forecast_bytes <= real <= 1.03 * forecast_bytes, direction
