"""Stores in unusual places: mounted read-only, copied with holes, in two parts with one missing, not UTF-8."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults
import pytest
import torch
from durable_run import LEAST, Run, build, go_on
from transformers import AutoModelForCausalLM

import memascend
from memascend.cli import main
from memascend.recovery import running_store

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes that are no UTF-8, as Python has them in a path.
BYTES = os.fsdecode(b"\xff\xfe")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A store after two steps, and its weights. Tests work on copies."""
    return train(tmp_path_factory.mktemp("places") / "s")


def train(*volumes: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    model = memascend.offload(build("llama"), store=list(volumes), host_memory="64MiB", keep_store=True, **LEAST)
    Run(model, "llama").go(2)
    weights = dict(memascend.parameters_of(model))
    memascend.close(model)
    return volumes[0], weights


@pytest.fixture
def store(tmp_path: Path, trained: tuple[Path, Any]) -> Path:
    shutil.copytree(trained[0], tmp_path / "s")
    return tmp_path / "s"


@pytest.fixture
def read_only(tmp_path: Path, store: Path) -> Iterator[Path]:
    with contextlib.ExitStack() as cleanup:
        faults.mount(["-o", "bind,ro", str(store)], tmp_path / "snapshot", cleanup)
        yield tmp_path / "snapshot"


def told(capfd: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main.main([str(word) for word in words]) == code, capfd.readouterr().err
    out, err = capfd.readouterr()
    return out if code == 0 else err


@pytest.mark.root
def test_a_store_that_is_mounted_read_only_is_read(
    tmp_path: Path, read_only: Path, trained: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(told(capfd, "inspect", read_only, "--json"))["steps"] == 2
    assert "everything is as it was written" in told(capfd, "verify", read_only)
    told(capfd, "export", read_only, "--out", tmp_path / "out")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(saved.get_parameter(name), value) for name, value in trained[1].items())
    with pytest.raises(memascend.MemascendError, match="Read-only"):
        go_on(read_only, "llama", steps=3, keep_store=True)


@pytest.mark.root
def test_a_run_that_is_resumed_on_a_read_only_mount_is_read_and_says_why_it_cannot_go_on(
    store: Path, read_only: Path
) -> None:
    go_on(store, "llama", steps=4, keep_store=True)  # Now both places of each tensor are there.
    resumed = memascend.resume(read_only, host_memory="64MiB", keep_store=True, **LEAST)
    read = resumed.optimizer.state_dict()["state"]  # Through files beside the store where one can be made.
    assert read and all(state["exp_avg"].any() for state in read.values())
    first = next(resumed.model.parameters())
    with pytest.raises(memascend.MemascendError, match="mounted read-only: mount it writable"), torch.no_grad():
        first.copy_(torch.zeros(first.shape))
        memascend.flush(resumed.model)
    memascend.offload_of(resumed.model).close(failed=True)


@pytest.mark.root
def test_a_run_that_writes_a_store_keeps_readers_of_its_read_only_mount_out(
    tmp_path: Path, read_only: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    resumed = memascend.resume(store, host_memory="64MiB", keep_store=True, **LEAST)
    try:
        assert "in use" in told(capfd, "verify", read_only, code=2)
    finally:
        memascend.close(resumed.model)
    assert "everything is as it was written" in told(capfd, "verify", read_only)


def test_a_copy_with_holes_gets_its_blocks_back(tmp_path: Path, store: Path) -> None:
    file = store / "memascend.volume"
    size = file.stat().st_size
    os.truncate(file, size)
    with open(file, "r+b") as opened:  # The second half becomes a hole, as copying leaves out zeros.
        os.truncate(file, size // 2)
        os.truncate(file, size)
        opened.flush()
    assert file.stat().st_blocks * 512 < size
    with contextlib.suppress(memascend.MemascendError):  # The former content is damaged now.
        memascend.close(memascend.resume(store, host_memory="64MiB", keep_store=True, **LEAST).model)
    assert file.stat().st_blocks * 512 >= size


def test_the_part_of_a_store_that_is_missing_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    (tmp_path / "b").mkdir()  # the place where its drive is mounted
    for command in ("inspect", "verify", "checkpoints"):
        error = told(capfd, command, tmp_path / "a", code=2)
        assert f"whose other part is in {tmp_path}/b, and that is not there: mount its drive" in error
    assert main.main(["inspect", str(tmp_path / "a"), "--json"]) == main.BAD_INPUT
    found = json.loads(capfd.readouterr().out)
    assert found["missing"] and found["steps"] == 2 and len(found["tensors"]) > 5
    assert [volume["path"] for volume in found["volumes"]] == [str(tmp_path / name) for name in "ab"]
    assert main.main(["inspect", str(tmp_path / "a")]) == main.BAD_INPUT
    text = capfd.readouterr().out
    assert "step 2, generation" in text and f"{tmp_path}/b: 50% of the store, not there" in text
    with pytest.raises(memascend.StoreError, match="mount its drive"):
        memascend.can_resume(tmp_path / "a")
    assert "it is empty; mount its drive" in told(capfd, "inspect", tmp_path / "b", code=2)
    (tmp_path / "a" / "memascend.volume").rename(tmp_path / "volume")
    assert "the file memascend.volume beside it is gone" in told(capfd, "inspect", tmp_path / "a", code=2)
    (tmp_path / "volume").rename(tmp_path / "a" / "memascend.volume")
    (tmp_path / "a" / "memascend.json").unlink()
    assert "no manifest (memascend.json)" in told(capfd, "inspect", tmp_path / "a", code=2)
    assert "it does not exist; mount its drive" in told(capfd, "inspect", tmp_path / "c", code=2)


def test_paths_that_are_not_utf8_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    volumes = [tmp_path / f"{name}{BYTES}" for name in "ab"]
    try:
        _, weights = train(*volumes)
    except OSError as error:
        pytest.skip(f"this filesystem takes UTF-8 alone: {error}")
    found = json.loads(told(capfd, "inspect", volumes[0], "--json"))  # The manifest names the other.
    assert [volume["path"] for volume in found["volumes"]] == list(map(str, volumes))
    told(capfd, "export", volumes[1], "--out", tmp_path / f"out{BYTES}")
    (tmp_path / f"out{BYTES}").rename(tmp_path / "out")  # Where safetensors' own library takes no other path.
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(saved.get_parameter(name), value) for name, value in weights.items())
    resumed = memascend.resume(volumes[:1], host_memory="64MiB", keep_store=True, **LEAST)
    report, _ = running_store.live_report(volumes[:1], "1")
    assert [volume["path"] for volume in report["volumes"]] == list(map(str, volumes))
    assert all(volume["reserved_bytes"] for volume in report["volumes"])
    memascend.close(resumed.model)


@pytest.mark.parametrize("name", ["memascend.json", "memascend.json.new", "memascend.lock", "memascend.volume"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(store: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    (store / name).unlink(missing_ok=True)
    os.mkfifo(store / name)
    code = 0 if name == "memascend.json.new" else 2
    told(capfd, "inspect", store, code=code)
    assert running_store.process_using(store) is None
    assert running_store.manifest_in(store / name, tries=1) is None


@pytest.mark.root
@pytest.mark.parametrize("layout", ["huggingface", "torch", "distributed"])
def test_an_export_says_that_there_is_no_space(
    tmp_path: Path, store: Path, layout: str, capfd: pytest.CaptureFixture[str]
) -> None:
    # The weights find room, and the states of the optimizer do not.
    size = 7 << 20 if layout == "torch" else 1 << 20
    with faults.mounted("tmpfs", size, tmp_path / "full") as place:
        error = told(capfd, "export", store, "--out", place.path / "out", "--format", layout, code=2)
        assert "No space left on device" in error and f"cannot write {place.path}/out" in error
        assert not list(place.path.iterdir())
