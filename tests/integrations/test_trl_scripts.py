"""TRL's own scripts, unchanged, over a model on SSD: what they write has the bits of a model in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import forked
import needs
import pytest
from bits import differing
from chat_models import folder_of
from safetensors.torch import load_file

if TYPE_CHECKING:
    from pathlib import Path

needs.package("trl", "datasets")
needs.package("trl")
needs.package("peft")

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


def run(room: Path, script: str, out: str, *others: str) -> None:
    words = ["--model_name_or_path", str(room / "model"), "--dataset_name", str(room / "data")]
    words += ["--output_dir", str(room / out), "--max_steps", "2", "--per_device_train_batch_size", "2"]
    words += ["--report_to", "none", "--use_cpu", "--save_strategy", "no", "--max_grad_norm", "0", "--bf16", "False"]
    words += ["--gradient_checkpointing", "False", "--dtype", "bfloat16", *OPTIONS[script], *others]
    module = "memascend.integrations.trl_scripts" if "--host_memory" in others else "trl_in_memory"
    environment = forked.variables() | {"PYTHONPATH": os.pathsep.join([str(room), *sys.path])}
    command = [sys.executable, "-m", module, script, *words]
    done = subprocess.run(command, env=environment, cwd=room, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ROWS)
def test_a_script_has_the_bits_of_memory(script: str, tmp_path: Path) -> None:
    folder_of(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[script]))
    (tmp_path / "rewards.py").write_text(REWARD)
    # The optimizer is ours over a model in memory too.
    (tmp_path / "trl_in_memory.py").write_text(
        "import runpy, sys, trl\n"
        "from memascend.integrations.transformers import TrainerMixin\n"
        "from memascend.integrations.trl_scripts import SCRIPTS\n"
        "name = SCRIPTS[sys.argv[1]] + 'Trainer'\n"
        "setattr(trl, name, type(name, (TrainerMixin, getattr(trl, name)), {}))\n"
        "module = 'trl.scripts.' + sys.argv.pop(1)\n"
        "runpy.run_module(module, run_name='__main__')\n"
    )
    run(tmp_path, script, "memory")
    run(tmp_path, script, "out", "--host_memory", "128MiB", "--store", str(tmp_path / "store"))
    name = "adapter_model.safetensors" if "--use_peft" in OPTIONS[script] else "model.safetensors"
    assert not differing(load_file(tmp_path / "out" / name), load_file(tmp_path / "memory" / name))
    assert not list((tmp_path / "store").glob("*")) or "--use_peft" in OPTIONS[script]


def test_a_script_that_there_is_none_of_is_named() -> None:
    command = [sys.executable, "-m", "memascend.integrations.trl_scripts", "sftt"]
    done = subprocess.run(command, env=forked.variables(), capture_output=True, text=True, timeout=60)
    assert done.returncode and "give one of TRL's scripts, sft, dpo, kto, reward, grpo" in done.stderr
