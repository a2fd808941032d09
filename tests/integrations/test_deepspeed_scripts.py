"""Scripts of transformers' Trainer and of Accelerate with DeepSpeed, unchanged but for how they are started.

Each is run by DeepSpeed alone without offload, with PyTorch's fused AdamW, and by `python -m memascend.deepspeed` with
parameters and optimizer on NVMe. DeepSpeed alone would have to be compiled for that; both have PyTorch's bits.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import deepspeed_run
import pytest
import requirements
import torch

if TYPE_CHECKING:
    from pathlib import Path

for package in ("deepspeed", "accelerate"):
    if importlib.util.find_spec(package) is None:
        requirements.unmet(package, f"{package} is not installed")

TRAINER = """
import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model_dir, config, out = sys.argv[1:]
arguments = TrainingArguments(
    out,
    deepspeed=config,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=4,
    learning_rate=1e-3,
    weight_decay=0.01,
    max_grad_norm=0.0,
    optim="adamw_torch_fused",
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
model = AutoModelForCausalLM.from_pretrained(model_dir)
rows = torch.randint(0, 512, (32, 32), generator=torch.Generator().manual_seed(1))
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train()
trainer.save_state()
"""
ACCELERATE = """
import json
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

model_dir, config, out = sys.argv[1:]
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=True),
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
)
model = AutoModelForCausalLM.from_pretrained(model_dir)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
rows = torch.randint(0, 512, (16, 32), generator=torch.Generator().manual_seed(1))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=1))
losses = []
for row in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=row, labels=row).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses += accelerator.gather(loss.detach().reshape(1)).tolist()
if accelerator.is_main_process:
    with open(f"{out}/losses.json", "w") as file:
        json.dump(losses, file)
"""
SCRIPTS = {"trainer": TRAINER, "accelerate": ACCELERATE}
#: The Trainer fills in "auto" values.
AUTO = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
ZERO = {"stage": 3, "sub_group_size": 1_000_000, "stage3_param_persistence_threshold": 0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "trainer": {
        **dict.fromkeys(AUTO, "auto"),
        "bf16": {"enabled": "auto"},
        "zero_optimization": ZERO | {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    },
    "accelerate": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": ZERO,
    },
}
RANKS = {"trainer": 1, "accelerate": 2}


@pytest.fixture(scope="module", params=RANKS)
def name(request: pytest.FixtureRequest) -> str:
    """The name of a script."""
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a script in both ways; each has a directory of its own."""
    folder = tmp_path_factory.mktemp("scripts")
    torch.manual_seed(0)
    deepspeed_run.build(deepspeed_run.Run(str(folder))).save_pretrained(folder / "model")
    listed = []
    for offloaded in (False, True):
        room = folder / f"{name}{' offloaded' * offloaded}"
        room.mkdir()
        (room / "train.py").write_text(SCRIPTS[name])
        configuration = CONFIGURATIONS[name] | {"steps_per_print": 1000}
        if offloaded:
            nvme = {"device": "nvme", "nvme_path": str(room)}
            offload = {"offload_param": nvme | {"max_in_cpu": 0}, "offload_optimizer": nvme}
            configuration |= {"zero_optimization": configuration["zero_optimization"] | offload}
        (room / "ds_config.json").write_text(json.dumps(configuration))
        words = [*map(str, [room / "train.py", folder / "model", room / "ds_config.json", room])]
        listed.append({"words": words, "ranks": RANKS[name], "launched": offloaded, "folder": str(room)})
    file = folder / "scripts.json"
    file.write_text(json.dumps(listed))
    command = [sys.executable, deepspeed_run.__file__, "--scripts", str(file)]
    done = subprocess.run(command, env=deepspeed_run.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def losses(room: Path) -> list[float]:
    if (room / "losses.json").exists():
        return json.loads((room / "losses.json").read_text())
    history = json.loads((room / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_losses_are_those_without_offload(name: str, folder: Path) -> None:
    expected, found = losses(folder / name), losses(folder / f"{name} offloaded")
    assert found == expected
    # Each update has changed them: no loss is like another.
    assert len(set(found)) == len(found) == (4 if name == "trainer" else 16)
    written = {path.name.split("-")[0] for path in (folder / f"{name} offloaded").rglob("*.swp")}
    assert {"exp_avg", "exp_avg_sq"} <= written
    assert not list((folder / name).rglob("*.swp"))


def test_what_is_in_force_is_told(name: str, folder: Path) -> None:
    told = (folder / f"{name} offloaded" / "stderr-0").read_text()
    assert "streaming step in place of" in told
    assert "host memory for swapping" in told
    assert "memascend" not in (folder / name / "stderr-0").read_text()
