"""Programs with an offloaded model on a device: adapters, the Trainer, resuming, generating, saving, benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch
import trainer_runs
from rehearsed_runs import BUDGETS, Result, assert_same, batch, train
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Offload = Callable[..., nn.Module]

pytestmark = pytest.mark.rehearsal

ROOT = Path(__file__).resolve().parents[2]


def llama() -> nn.Module:
    return tiny_models.build("llama")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft(on_device: Offload) -> None:
    peft = requirements.package("peft")

    def adapted() -> nn.Module:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        return peft.get_peft_model(llama(), config).to(torch.bfloat16)

    expected = train(adapted().cuda(), "llama")
    assert_same(train(on_device(adapted()), "llama"), expected)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_with_workers_that_load(on_device: Offload, tmp_path: Path) -> None:
    arguments: dict[str, Any] = trainer_runs.ARGUMENTS | {
        "use_cpu": False,
        "dataloader_num_workers": 2,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 4,
    }

    def trained(model: nn.Module, folder: Path) -> Result:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        args = TrainingArguments(str(folder), **arguments)
        trainer = Trainer(model, args, train_dataset=trainer_runs.data(), optimizers=(optimizer, None))
        trainer.train()
        entries = trainer_runs.logged(trainer)
        result = Result([torch.tensor(entry["loss"]) for entry in entries])
        result.norms = [torch.tensor(entry["grad_norm"]) for entry in entries]
        return result.of(model)

    expected = trained(trainer_runs.build().cuda(), tmp_path / "resident")
    assert_same(trained(on_device(trainer_runs.build()), tmp_path / "offloaded"), expected)


def test_resuming(tmp_path: Path) -> None:
    resident = llama().cuda()
    optimizer = memascend.AdamW(resident.parameters(), lr=3e-3)
    begun = train(resident, "llama", steps=2, optimizer=optimizer)
    torch.manual_seed(6)
    expected = train(resident, "llama", steps=2, first=2, optimizer=optimizer)

    durable = {"durability": "step", "keep_store": True}
    model = memascend.offload(llama(), store=tmp_path / "store", **BUDGETS | durable)
    assert_same(train(model, "llama", steps=2), begun)
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", **BUDGETS | {"keep_store": False})
    assert resumed.steps == 2
    assert_same(train(resumed.model, "llama", steps=2, first=2, optimizer=resumed.optimizer), expected)
    memascend.close(resumed.model)


def test_generating(on_device: Offload) -> None:
    def generated(model: nn.Module) -> torch.Tensor:
        ids = batch("llama", 0)["input_ids"]
        with torch.no_grad():
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
            )
        return tokens.cpu()

    expected = generated(llama().cuda().eval())
    model = on_device(llama())
    model.eval()
    assert torch.equal(generated(model), expected)
    # Trained after it generated, as if it had not.
    model.train()
    assert_same(train(model, "llama"), train(llama().cuda(), "llama"))


def test_saving(on_device: Offload, tmp_path: Path) -> None:
    model = on_device(llama())
    weights = train(model, "llama").weights
    memascend.save_pretrained(model, tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    tiny_models.assert_same_weights(dict(saved.named_parameters()), weights)
    tiny_models.assert_same_weights({name: model.state_dict()[name].cpu() for name in weights}, weights)


def test_weights_written_and_gradients_read_between_passes(on_device: Offload) -> None:
    def doubled(model: nn.Module) -> Result:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(2.0)
        model(**batch("llama", 0)).loss.backward()
        result = Result(norms=[parameter.grad.float().norm().cpu() for parameter in model.parameters()])
        optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(model(**batch("llama", 1)).loss.detach().cpu())
        return result.of(model)

    expected = doubled(llama().cuda())
    assert_same(doubled(on_device(llama())), expected)


@pytest.mark.timeout(1800)
def test_the_benchmark_of_a_device(tmp_path: Path) -> None:
    """Sections of `benches/gpu.py` with a toy. Its section `exact` has a model that takes a CPU an hour: not here."""
    out = tmp_path / "gpu.json"
    words = ["--only", "copy,plan,step", "--models", "tiny", "--tokens", "64", "--sequence", "64", "--steps", "1"]
    words += ["--warmup", "1", "--host-memory", "256MiB", "--device-memory", "400MiB", "--out", str(out)]
    command = [sys.executable, str(ROOT / "benches" / "gpu.py"), *words, "--workdir", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert rows.keys() == {"copy", "plan", "step"}, done.stderr
    failed = [row for section in rows.values() for row in section if "error" in row or row.get("cut_short")]
    assert not failed, failed
