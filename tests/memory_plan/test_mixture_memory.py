"""A mixture of experts that trains in a memory cgroup of its least budget and the estimate of PyTorch's memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults
import pytest
import requirements
import small_mixtures
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import memascend
from memascend.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
#: Two layers with 48 MiB of experts each. A batch reaches most of them.
WIDE = {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 2, "num_experts_per_tok": 4}
EXPERTS = 32
TOKENS = 32
LORA = {"r": 4, "target_modules": ["q_proj", "o_proj"], "init_lora_weights": False}
STEPS = 2


def trains(pipe: Any, directory: Path, store: Path, group: Path, experts: str, trained: str) -> None:
    """Send the losses of a run that this process makes in the cgroup, or why it is refused.

    A small step comes before, since libraries allocate memory at their first use.
    """
    step(adapted(small_mixtures.build("qwen3_moe", dtype=torch.float32), trained), 0)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        model = memascend.from_pretrained(
            directory,
            store=store,
            host_memory=None,
            dtype="float32",
            experts=experts,
            frozen="store" if trained == "adapters" else None,
        )
    except memascend.BudgetError as error:
        pipe.send(str(error))
        return
    model = adapted(model.train(), trained)
    pipe.send([step(model, number) for number in range(STEPS)])
    memascend.close(model)


def adapted(model: Any, trained: str) -> Any:
    if trained == "full":
        return model
    import peft

    return peft.get_peft_model(model.requires_grad_(False), peft.LoraConfig(**LORA))


def step(model: Any, number: int) -> float:
    optimizer = memascend.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-3)
    loss = model(**small_mixtures.batch(number, 1, TOKENS)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.root
@pytest.mark.parametrize("trained", ["full", "adapters"])
def test_a_mixture_in_a_cgroup_of_its_least_budget(
    memory_cgroup: Callable[[int], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], trained: str
) -> None:
    requirements.package("peft")
    directory = tmp_path / "model"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**small_mixtures.DECODER | WIDE, num_experts=EXPERTS)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    words = ["plan", str(directory), "--experts", "pieces", "--seq-len", str(TOKENS), "--dtype", "float32", "--json"]
    assert main(words if trained == "full" else [*words, "--lora-rank", "4", "--lora-targets", "q_proj", "o_proj"]) == 0
    out = capfd.readouterr().out  # DeepSpeed may write a line before.
    whole = json.loads(out[out.index("{") :])["whole"]
    limit = whole["planned_bytes"] + whole["pytorch_bytes"]
    group = memory_cgroup(limit)
    with faults.Child(tmp_path, trains, directory, tmp_path / "store", group, "pieces", trained) as child:
        losses = child.receive(300)
        assert child.wait(60).code == 0
    most = group / "memory.max_usage_in_bytes"
    print(f"limit {limit / MIB:.1f} MiB", f"most {int(most.read_text()) / MIB:.1f} MiB" if most.exists() else "")
    assert len(losses) == STEPS and all(0 < loss < 100 for loss in losses)

    group = memory_cgroup(limit)
    with faults.Child(tmp_path, trains, directory, tmp_path / "whole", group, "whole", trained) as child:
        refusal = child.receive(300)
    assert isinstance(refusal, str) and f"{group.name} allows " in refusal, "a layer does not fit"
