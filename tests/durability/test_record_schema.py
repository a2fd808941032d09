"""Records of another origin: whatever is in one, there is one error, and nothing outside of the store is read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fuzzing
import pytest
from durable_run import LEAST, Run, build

import memascend
from memascend import CheckpointError
from memascend._memascend import ClosedStore
from memascend.cli import main
from memascend.durability.record import parse_record
from memascend.recovery import running_store

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "s"
    model = memascend.offload(build("llama"), store=path, host_memory="64MiB", keep_store=True, **LEAST)
    Run(model, "llama").go(1)
    memascend.close(model)
    return path


@pytest.fixture(scope="module")
def record(store: Path) -> dict[str, Any]:
    kept = ClosedStore([store])
    text = kept.state
    kept.close()
    return json.loads(text or "")


def test_whatever_a_record_holds_there_is_one_error(record: dict[str, Any]) -> None:
    count, refused = fuzzing.tries(), 0
    for change, wrong in fuzzing.replacements(record, count):
        try:
            parse_record(json.dumps(wrong), ["/a/store"])
        except CheckpointError as error:
            refused += 1
            assert "/a/store" in str(error) and "\n" not in str(error)
        except Exception as error:
            raise AssertionError(change) from error
    assert refused > count // 4


def put(store: Path, record: dict[str, Any]) -> None:
    """Write a store's manifest anew with another record."""
    file = store / "memascend.json"
    body = running_store.manifest_in(file)
    assert body is not None
    body["current"]["state"] = json.dumps(record)
    text = json.dumps(body).encode()
    file.write_bytes(b"memascend-store 3 %d %08x\n" % (len(text), running_store._crc32c(text)) + text)


def replaced(*path: Any, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda record: fuzzing.changed(record, path, value)


NO_BYTES = {"!": "tensor", "dtype": "uint8", "shape": [0], "data": ""}
HARMFUL = {
    "another library": (replaced("model", "config", "model_type", value="of nowhere"), "contradicts itself"),
    "code of elsewhere": (
        replaced("model", "implementations", "_attn_implementation", value="someone/kernels"),
        "names code of elsewhere",
    ),
    "sizes": (replaced("model", "config", "hidden_size", value="wide"), "contradicts itself|another model"),
    "rules": (lambda record: of_each_state(record, ["x"]), "contradicts itself"),
    "random numbers": (
        replaced("random", "torch", value={"!": "tensor", "dtype": "uint8", "shape": [0], "data": ""}),
        "",
    ),
    "buffers": (replaced("buffers", 0, 2, value=[1 << 40]), "contradicts itself|memory"),
    "generation": (replaced("model", "generation_config", value={"max_length": {}}), ""),
}


def of_each_state(record: dict[str, Any], arguments: list[Any]) -> dict[str, Any]:
    record = copy.deepcopy(record)
    for state in record["optimizers"][0]["states"].values():
        state[1] = arguments
    return record


@pytest.mark.parametrize("kind", HARMFUL)
def test_a_store_of_another_origin_is_refused_in_one_line(
    tmp_path: Path, store: Path, record: dict[str, Any], kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change, says = HARMFUL[kind]
    put(store, change(record))
    try:
        for words in (["inspect", str(store)], ["export", str(store), "--out", str(tmp_path / "out")]):
            code = main.main(words)
            errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("memascend: error")]
            assert code in (0, main.BAD_INPUT, main.FAILED) and len(errors) == (code != 0)
            assert not any("unexpected" in error for error in errors), errors
        if says:
            assert code != 0
            with pytest.raises((CheckpointError, MemoryError), match=says):
                memascend.resume(store, host_memory="64MiB", **LEAST)
    finally:
        put(store, record)
