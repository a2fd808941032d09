"""Two processes at once train adapters over one base directory: each has the bits of memory, and nothing is written."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import faults
import pytest
import quantised_models as models
import requirements
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import memascend
from memascend.formats.nf4 import write_nf4

peft = requirements.package("peft")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
STEPS = 2
#: How a process reads the base.
FILES = {
    "as it is": {"frozen": "files"},
    "quantised": {"frozen": "store", "frozen_bits": "published", "dequantize": True},
    "quantised, all of it in place": {"frozen": "files", "dequantize": True},
    "quantised once by us": {"frozen": "files", "dequantize": True},
}


def adapted(base: nn.Module, seed: int) -> Any:
    torch.manual_seed(seed)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


class Training:
    """Adapters of a seed, and their losses."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed, self.losses = model, seed, []
        self.weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=1e-2)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * self.seed + number)
        ids = torch.randint(0, 96, (2, 16), generator=generator)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def result(self) -> dict[str, Any]:
        return {"losses": self.losses, **{name: value.detach().clone() for name, value in self.weights.items()}}


def train(pipe: Any, directory: Path, room: Path, seed: int, options: dict[str, Any]) -> None:
    """Open the base, and take a step whenever the other process has taken one."""
    store = room / f"store{seed}"
    base = memascend.from_pretrained(
        directory, store=store, host_memory="64MiB", allocator="pageable", fused_loss=False, **options
    )
    training = Training(adapted(base, seed), seed)
    for number in range(STEPS):
        pipe.send("ready")
        assert pipe.recv() == "go"
        training.step(number)
    torch.save(training.result(), room / f"result{seed}")
    pipe.send("ended")
    memascend.close(base)


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Have nothing in a directory be written: by its modes, and for root, who may all the same, by a mount."""
    kept = [(path, path.stat().st_mode) for path in (directory, *directory.iterdir())]
    for path, mode in kept:
        path.chmod(mode & ~0o222)
    mount = ["mount", "--bind", directory, directory], ["mount", "-o", "remount,bind,ro", directory]
    mounted = os.geteuid() == 0 and all(subprocess.run(words).returncode == 0 for words in mount)
    try:
        if mounted:
            with pytest.raises(OSError, match="Read-only file system"):
                (directory / "new").touch()
        yield
    finally:
        if mounted:
            subprocess.run(["umount", directory], check=True)
        for path, mode in kept:
            path.chmod(mode)


def written(form: str, directory: Path) -> Any:
    """Write a base, and return how transformers dequantises it."""
    if form == "as it is":
        models.llama().save_pretrained(directory)
    elif form == "quantised once by us":
        requirements.package("bitsandbytes")
        models.llama().save_pretrained(directory.with_name("plain"))
        write_nf4(directory.with_name("plain"), directory)
    else:
        models.fp8(directory, models.llama())
        return FineGrainedFP8Config(dequantize=True)
    return None


@pytest.mark.parametrize("form", FILES)
def test_two_processes_train_over_one_base(form: str, tmp_path: Path) -> None:
    directory = tmp_path / "base"
    config = written(form, directory)
    files = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in directory.iterdir()}
    with read_only(directory), ExitStack() as processes:
        both = [
            processes.enter_context(faults.Child(tmp_path, train, directory, tmp_path, seed, FILES[form]))
            for seed in (1, 2)
        ]
        for _ in range(STEPS):
            assert [process.receive(120) for process in both] == ["ready"] * 2  # Both have the base open.
            for process in both:
                process.pipe.send("go")
        assert [process.receive(120) for process in both] == ["ended"] * 2
        assert [process.wait().code for process in both] == [0, 0], [process.told() for process in both]
    assert files == {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in directory.iterdir()}
    for seed in (1, 2):
        if form == "as it is":
            base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).train()
        else:
            base = models.dequantised_by_transformers(directory, config)
        expected = Training(adapted(base, seed), seed)
        for number in range(STEPS):
            expected.step(number)
        ours, wanted = torch.load(tmp_path / f"result{seed}"), expected.result()
        assert ours.pop("losses") == wanted.pop("losses")
        assert ours.keys() == wanted.keys() and len(ours) > 0
        assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []
