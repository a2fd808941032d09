"""Models made of a configuration alone, and steps of them whose traffic is counted."""

import torch
from transformers import AutoModelForCausalLM

import memascend


def build(config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def saved(config, folder):
    config.save_pretrained(folder)
    return folder


def settle(state):
    """Wait until nothing moves: a window between two such moments holds whole steps."""
    for residency in state.streamer.residencies.values():
        if residency.ticket is not None:
            residency.ticket.wait()
    for unit in state.units:
        state.runtime.wait_unit(unit.index)


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
