"""Files of another origin with a value replaced or bytes flipped: read, or refused in one line that names them.

`make fuzz-records` tries more.
"""

from __future__ import annotations

import contextlib
import json
import random
from typing import TYPE_CHECKING, Any

import fuzzing
import pytest
import quantised_models
import requirements
import tiny_models
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import memascend
from memascend import CheckpointError
from memascend.formats.adapters import copied_modules, load_adapters, model_of
from memascend.formats.safetensors import SafetensorsReader
from memascend.formats.weight_files import WeightFiles
from memascend.recovery import running_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")


@contextlib.contextmanager
def refused_in_one_line(change: str, *names: str) -> Iterator[list[str]]:
    """Collect the message of an error that names one of `names`; any other error fails the test with `change`."""
    refused: list[str] = []
    try:
        yield refused
    except CheckpointError as error:
        refused.append(str(error))
        assert any(name in refused[0] for name in names) and "\n" not in refused[0], f"{change}: {refused[0]}"
    except Exception as error:
        raise AssertionError(change) from error


def small_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**tiny_models.SMALLEST_DECODER))


def file_of(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_headers(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.ones(2, 2, 2).half()}
    save_file(tensors, file, metadata={"format": "pt"})
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8:end]), whole[end:]

    def contents() -> Iterator[tuple[str, bytes]]:
        count = fuzzing.tries()
        for change, wrong in fuzzing.replacements(header, count):
            yield change, file_of(wrong, data)
        chosen = random.Random(fuzzing.SEED)
        for number in range(count):
            bytes_ = bytearray(whole[: chosen.choice([len(whole), len(whole), chosen.randrange(len(whole))])])
            for _ in range(chosen.randrange(1, 4) if bytes_ else 0):
                bytes_[chosen.randrange(len(bytes_))] = chosen.randrange(256)
            yield f"seed {fuzzing.SEED}, flipped {number}", bytes(bytes_)

    count = refused = 0
    for change, content in contents():
        file.write_bytes(content)
        count += 1
        with refused_in_one_line(change, str(file)) as told:
            reader = SafetensorsReader(file)
            for name, entry in reader.entries.items():
                assert 8 <= entry.start <= entry.end <= len(content), change
                reader.read(name)
            reader.close()
        refused += len(told)
    assert count // 4 < refused < count


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_files_of_a_model_directory(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    small_model().save_pretrained(folder, **({"max_shard_size": "20KB"} if "index" in name else {}))
    file = folder / name
    whole = json.loads(file.read_text())
    if name == "generation_config.json":
        whole |= {"max_length": 20, "temperature": 0.5, "do_sample": True, "eos_token_id": [2]}
    count, refused = fuzzing.tries(cost=16), 0
    for number, (change, wrong) in enumerate(fuzzing.replacements(whole, count)):
        file.write_text(json.dumps(wrong))
        with refused_in_one_line(change, str(folder)) as told:
            model = memascend.from_pretrained(
                folder, store=tmp_path / f"store{number}", host_memory="64MiB", allocator="pageable", keep_store=False
            )
            memascend.close(model)
        refused += len(told)
        assert not (tmp_path / f"store{number}").exists(), change
    assert refused or name == "generation_config.json"  # transformers takes most values there


QUANTISED: dict[str, Any] = {
    "fp8": lambda folder: quantised_models.fp8(folder, quantised_models.llama()),
    "mxfp4": quantised_models.mxfp4,
    "awq": lambda folder: quantised_models.awq(folder, {}),
    "gptq": lambda folder: quantised_models.gptq(folder, {}),
}


@pytest.mark.parametrize("form", QUANTISED)
def test_descriptions_of_quantised_weights(tmp_path: Path, form: str) -> None:
    QUANTISED[form](tmp_path)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    for change, wrong in fuzzing.replacements(whole["quantization_config"], fuzzing.tries(cost=16)):
        file.write_text(json.dumps(whole | {"quantization_config": wrong}))
        with (
            refused_in_one_line(change, str(tmp_path), "weight_block_size"),
            contextlib.closing(WeightFiles(tmp_path)) as files,
        ):
            for name, entry in files.quantised.entries.items() if files.quantised is not None else ():
                files.quantised.read_into(name, torch.empty(entry.shape))


def test_configurations_of_adapters(tmp_path: Path) -> None:
    peft = requirements.package("peft")
    adapted = peft.get_peft_model(small_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    adapted.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    whole = json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path)}
    count, refused = fuzzing.tries(cost=16), 0
    for change, wrong in fuzzing.replacements(whole, count):
        file.write_text(json.dumps(wrong))
        with refused_in_one_line(change, str(tmp_path)) as told:
            model_of(tmp_path, lambda _: None)
            copied_modules(tmp_path)
            load_adapters(small_model(), tmp_path, trained=True)
        refused += len(told)
    assert refused


def test_manifests_of_a_store_in_use() -> None:
    written = {"number": 3, "tag": "", "time": 9, "state": "{}", "tensors": [["a", 0], ["b", 1]]}
    body = {
        "sequence": 4,
        "volumes": ["/a", "BYTES=2f62", "UUID=x"],
        "stripes": [1, 2, 1],
        "life": [5, 6, 7],
        "versions": [{"ranges": [[0, 4096]]}, {"ranges": [[4096, 512], [8192, 512]]}],
        "current": written,
        "snapshots": [written | {"tag": "kept"}],
    }
    assert running_store._report(running_store._checked(json.dumps(body).encode()) or {})["generation"] == 3
    count, refused = fuzzing.tries(), 0
    for change, wrong in fuzzing.replacements(body, count):
        found = running_store._checked(json.dumps(wrong).encode())
        refused += found is None
        if found is not None:
            try:
                running_store._report(found)
                [
                    running_store.manifest_in(running_store.path_of(volume) / running_store.MANIFEST, tries=1)
                    for volume in found["volumes"]
                ]
            except Exception as error:
                raise AssertionError(change) from error
    assert count // 4 < refused < count
