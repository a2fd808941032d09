"""Which dtype the processor computes in, and the choice and message by it: with and without its bfloat16."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import forked
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from memascend.cli import main
from memascend.cli.dtypes import choose_dtype
from memascend.hardware import matmul_rates

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.own_products
#: With these, PyTorch multiplies bfloat16 as on a processor without AVX-512.
WITHOUT_AVX512 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def run(*words: Any, slow: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, whose bfloat16 is `slow`."""
    variables = os.environ | (WITHOUT_AVX512 if slow else {})
    return forked.run(["-P", *words], env=variables, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in bfloat16, with text beside it."""
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=64)


def finetune(model_dir: Path, room: Path, *more: Any, out: str = "out") -> list[Any]:
    """Return the words of a small run with the default dtype."""
    text = model_dir.parent / "text.txt"
    words = ["-m", "memascend", "finetune", model_dir, "--data", text, "--out", room / out]
    return [*words, "--steps", "2", "--seq-len", "32", "--lr", "1e-3", *more]


def in_store(room: Path) -> list[Any]:
    (room / "store").mkdir(exist_ok=True)
    return ["--store", room / "store", "--host-memory", "64MiB"]


def record(folder: Path, name: str) -> dict[str, Any]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return next(line for line in lines if line["record"] == name)


@pytest.mark.core
def test_without_bfloat16_a_run_is_in_float32_and_written_in_the_dtype_of_the_checkpoint(
    model_dir: Path, tmp_path: Path
) -> None:
    done = run(*finetune(model_dir, tmp_path, *in_store(tmp_path)))
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "training in float32" in line]
    assert len(told) == 1 and "GFLOP/s" in told[0] and "written in bfloat16" in told[0], done.stderr
    assert record(tmp_path / "out", "start")["settings"]["dtype"] == "float32"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights and all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    start = load_file(model_dir / "model.safetensors")
    assert any(not torch.equal(weights[name], start[name]) for name in start)

    # The same in memory, to the bit.
    done = run(*finetune(model_dir, tmp_path, "--in-memory", out="memory"))
    assert done.returncode == 0, done.stderr
    whole = load_file(tmp_path / "memory" / "model.safetensors")
    assert all(torch.equal(whole[name], weights[name]) for name in weights), "the run in memory differs"


def test_a_resumed_run_keeps_its_dtype_on_another_processor(model_dir: Path, tmp_path: Path) -> None:
    begun = run(*finetune(model_dir, tmp_path, *in_store(tmp_path), "--keep-store"))
    assert begun.returncode == 0, begun.stderr
    again = run(*finetune(model_dir, tmp_path, *in_store(tmp_path), "--resume", out="again"), slow=False)
    assert again.returncode == 0, again.stderr
    assert record(tmp_path / "again", "resume")["settings"]["dtype"] == "float32"
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(tensor.dtype == torch.bfloat16 for tensor in second.values())
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.core
def test_a_plan_says_which_dtype_and_why(model_dir: Path) -> None:
    def plan(*more: str) -> dict[str, Any]:
        done = run("-m", "memascend", "plan", model_dir, "--json", "--seq-len", "64", *more)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)["model"]

    chosen, named = plan(), plan("--dtype", "bfloat16")
    assert chosen["dtype"] == "float32" and "GFLOP/s" in chosen["dtype_reason"]
    assert named["dtype"] == "bfloat16" and named["dtype_reason"] is None


WARNED = """
import torch, memascend
for _ in range(2):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).to(getattr(torch, {dtype!r}))
    memascend.close(memascend.offload(model, store={store!r}, host_memory="32MiB"))
"""


@pytest.mark.parametrize(("dtype", "warnings"), [("bfloat16", 1), ("float32", 0)])
def test_a_model_in_a_slow_dtype_warns_once(tmp_path: Path, dtype: str, warnings: int) -> None:
    done = run("-c", WARNED.format(dtype=dtype, store=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "GFLOP/s" in line]
    assert len(told) == warnings, done.stderr
    assert all("dtype='float32'" in line and "dtype='bfloat16'" in line for line in told)


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize(
    ("stored", "chosen"),
    [
        ("bfloat16", {True: ("bfloat16", None), False: ("float32", "bfloat16")}),
        ("float16", {True: ("bfloat16", "float16"), False: ("float32", "float16")}),
        ("float32", {True: ("float32", None), False: ("float32", None)}),
    ],
)
def test_what_is_chosen_for_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, able: bool, stored: str, chosen: dict[bool, Any]
) -> None:
    rates = {torch.bfloat16: (2.0 if able else 0.4, 1.0), torch.float16: (0.1, 1.0)}
    monkeypatch.setattr(matmul_rates, "product_rates", rates.__getitem__)
    choice = choose_dtype("auto", tmp_path, LlamaConfig(dtype=stored))
    assert (choice.dtype, choice.saved) == chosen[able]
    assert choice.reason is not None and stored in choice.reason
    assert choose_dtype("bfloat16", tmp_path, LlamaConfig(dtype=stored)).dtype == "bfloat16"


def test_a_configuration_without_a_dtype_is_of_that_of_its_weights(tmp_path: Path) -> None:
    config = LlamaConfig()
    assert choose_dtype("auto", tmp_path, config).dtype == "float32"  # as transformers takes it
    weights = {"a": torch.zeros(8, dtype=torch.float16), "b": torch.zeros(2), "c": torch.zeros(99, dtype=torch.int64)}
    save_file(weights, tmp_path / "model.safetensors")
    assert choose_dtype("auto", tmp_path, config).saved == "float16"


def test_a_gpu_is_not_asked_of_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matmul_rates, "product_rates", {torch.bfloat16: (0.1, 1.0)}.__getitem__)
    choice = choose_dtype("auto", tmp_path, LlamaConfig(dtype="bfloat16"), torch.device("cuda"))
    if not torch.cuda.is_available():
        assert (choice.dtype, choice.saved) == ("bfloat16", None)


def test_the_measurement_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    assert all(rate > 0 for rate in matmul_rates.product_rates.__wrapped__(torch.bfloat16))
    assert torch.get_num_threads() == before


def test_help_names_the_default(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["finetune", "--help"]) == 0
    assert "(default: auto)" in capfd.readouterr().out
