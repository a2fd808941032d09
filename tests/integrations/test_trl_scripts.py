"""TRL's own scripts, unchanged, over a model on SSD: they write the bits of a model in memory."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import forked
import pytest
import requirements
from bit_equality import differing
from chat_models import folder_of
from safetensors.torch import load_file

if TYPE_CHECKING:
    from pathlib import Path

requirements.package("trl", "datasets")
requirements.package("trl")
requirements.package("peft")

ADAPTER = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
ROWS = {
    "sft": [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(8)],
    "dpo": [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(3 * n)} for n in range(8)],
    "kto": [{"prompt": f"{n}+{n}=", "completion": str(2 * n + n % 2), "label": n % 2 == 0} for n in range(8)],
    "reward": [{"chosen": f"{n}+{n}={2 * n}", "rejected": f"{n}+{n}={3 * n}"} for n in range(8)],
    "grpo": [{"prompt": f"{n}+{n}="} for n in range(8)],
}
OPTIONS = {
    "sft": [],
    "dpo": ADAPTER,
    "kto": ADAPTER,
    "reward": [],
    "grpo": ["--max_completion_length", "4", "--num_generations", "2", "--reward_funcs", "rewards.length"],
}
REWARD = "def length(completions, **others):\n    return [float(len(one)) for one in completions]\n"

#: The same scripts over a model in memory, with our optimizer.
IN_MEMORY = """
import inspect, runpy, sys, torch, transformers, trl
from memascend.integrations.transformers import TrainerMixin
from memascend.integrations.trl_scripts import SCRIPTS

base = getattr(trl, SCRIPTS[sys.argv[1]] + "Trainer")

class InMemory(TrainerMixin, base):
    def __init__(self, *given, **named):
        bound = inspect.signature(base.__init__).bind(self, *given, **named)
        args = bound.arguments["args"]
        args.model_init_kwargs = None
        transformers.set_seed(args.seed)
        rewards = sys.argv[0] == "reward"
        cls = transformers.AutoModelForSequenceClassification if rewards else transformers.AutoModelForCausalLM
        options = {"num_labels": 1} if rewards else {}
        bound.arguments["model"] = cls.from_pretrained(bound.arguments["model"], dtype=torch.bfloat16, **options)
        super().__init__(*bound.args[1:], **bound.kwargs)

setattr(trl, base.__name__, InMemory)
sys.argv = sys.argv[1:]
runpy.run_module("trl.scripts." + sys.argv[0], run_name="__main__")
"""


def run(room: Path, script: str, out: str, *others: str) -> None:
    words = ["--model_name_or_path", str(room / "model"), "--dataset_name", str(room / "data")]
    words += ["--output_dir", str(room / out), "--max_steps", "2", "--per_device_train_batch_size", "2"]
    words += ["--report_to", "none", "--use_cpu", "--save_strategy", "no", "--max_grad_norm", "0", "--bf16", "False"]
    words += ["--gradient_checkpointing", "False", "--dtype", "bfloat16", *OPTIONS[script], *others]
    module = "memascend.integrations.trl_scripts" if "--host_memory" in others else "trl_in_memory"
    environment = forked.variables() | {"PYTHONPATH": os.pathsep.join([str(room), *sys.path])}
    done = forked.run(["-m", module, script, *words], env=environment, cwd=room, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ROWS)
def test_a_script_has_the_bits_of_memory(script: str, tmp_path: Path) -> None:
    folder_of(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[script]))
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "trl_in_memory.py").write_text(IN_MEMORY)
    run(tmp_path, script, "memory")
    run(tmp_path, script, "out", "--host_memory", "128MiB", "--store", str(tmp_path / "store"))
    name = "adapter_model.safetensors" if "--use_peft" in OPTIONS[script] else "model.safetensors"
    assert not differing(load_file(tmp_path / "out" / name), load_file(tmp_path / "memory" / name))
    assert not (tmp_path / "store").exists()


def test_a_script_that_there_is_none_of_is_named() -> None:
    done = forked.run(["-m", "memascend.integrations.trl_scripts", "sftt"], env=forked.variables(), timeout=60)
    assert done.returncode and "give one of TRL's scripts, sft, dpo, kto, reward, grpo" in done.stderr
