"""`--dequantize`: a run of a quantised model equals a run of the model that transformers dequantises."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import quantised_models as models
import tiny_models
from commands import in_memory, words_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import memascend
from memascend.cli import main
from memascend.errors import CheckpointError
from memascend.forecast.forecast import as_text, forecast
from memascend.integrations.trainer_arguments import open_model
from memascend.integrations.transformers import MemascendArguments

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("changed", [{}, {"lora_rank": 4, "lr": 1e-2}], ids=["whole", "adapters"])
def test_a_run_is_that_of_the_dequantised_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changed: dict[str, Any]
) -> None:
    plain = tiny_models.llama_directory(tmp_path, hidden=64, layers=2)
    packed = models.fp8(tmp_path / "packed", AutoModelForCausalLM.from_pretrained(plain), block=32)
    (packed / "hf_quant_config.json").write_text("{}")
    models.dequantised_by_transformers(packed, FineGrainedFP8Config(dequantize=True)).save_pretrained(plain)
    weights = "adapter_model.safetensors" if changed else models.WEIGHTS

    def run(model_dir: Path, out: str, *flags: str) -> int:
        return main.main([*words_of(model_dir, tmp_path / out, tmp_path / f"store-{out}", **changed), *flags])

    assert run(packed, "refused") == main.BAD_INPUT
    told = capfd.readouterr().err
    assert (
        "FP8 with a scale for blocks of 32x32" in told
        and "--dequantize" in told
        and not (tmp_path / "refused").exists()
    )
    assert run(packed, "ours", "--dequantize") == 0, capfd.readouterr().err
    assert run(plain, "theirs") == 0, capfd.readouterr().err
    ours, theirs = (load_file(tmp_path / out / weights) for out in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    if not changed:
        assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    assert not (tmp_path / "ours" / "hf_quant_config.json").exists()


def test_a_plan_names_the_form_and_is_that_of_the_dequantised_model(tmp_path: Path) -> None:
    plain = tiny_models.llama_directory(tmp_path, hidden=64, layers=2)
    packed = models.fp8(tmp_path / "packed", AutoModelForCausalLM.from_pretrained(plain), block=32)
    nbytes = (packed / models.WEIGHTS).stat().st_size
    plans = {}
    for path in (packed, packed / "config.json", plain):
        plans[path] = forecast(path, seq_len=32, batch_size=1)
        told = as_text(plans[path])
        assert ("FP8" in told and "a run needs --dequantize" in told) == (path != plain)
        source = plans[path]["model"].pop("source")
        form = "FP8 with a scale for blocks of 32x32 (quant_method 'fp8')"
        assert source == (None if path == plain else {"form": form, "bytes": nbytes if path == packed else None})
        assert plans[path]["model"].pop("path") == str(path)
        for part in ("whole", "pytorch"):  # memory of the machine and the interpreter at the moment
            plans[path].pop(part)
    assert plans[packed] == plans[plain] == plans[packed / "config.json"]


def test_the_whole_model_in_memory_is_not_dequantised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = in_memory(words_of(tmp_path, tmp_path / "out", tmp_path / "store"))
    assert main.main([*words, "--dequantize"]) == main.BAD_INPUT
    assert "--dequantize reads the weights into a store" in capfd.readouterr().err


def test_the_arguments_of_a_trainer_say_whether_to_dequantise(tmp_path: Path) -> None:
    packed = models.fp8(tmp_path / "packed", models.llama())
    given: dict[str, Any] = {"output_dir": str(tmp_path / "out"), "host_memory": "64MiB", "use_cpu": True}
    with pytest.raises(CheckpointError, match="FP8 with a scale for blocks of 64x64"):
        open_model(str(packed), MemascendArguments(**given), {})
    model, _ = open_model(str(packed), MemascendArguments(**given, dequantize=True), {})
    assert not hasattr(model.config, "quantization_config")
    memascend.close(model)
