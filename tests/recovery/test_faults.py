"""Drives, directories and systems that fail for real: the user's errors, and the files left.

Everything that could hang or be killed by a signal runs in a process of its own.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import faults
import pytest
import tiny_models
import torch
from commands import command, in_memory, listing, refused, the_error, training, words_of
from safetensors.torch import load_file
from stepped_process import LARGE, Stepper, by_steps
from transformers import LlamaForCausalLM

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

MIB = 1 << 20
FILESYSTEMS = ["ext4", "xfs", "btrfs"]
NOBODY = 65534
#: A journal that cannot be written makes the filesystem read-only, and the next write would say so.
NO_JOURNAL = "^has_journal"


def smallest(model_dir: Path) -> int:
    """Return the least budget, with which little stays in memory."""
    return tiny_models.smallest_budget(LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)) + MIB


# ---- a model in a process of its own, a step at a time -------------------------------------------------------


# ---- a full filesystem --------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("room", ["for the weights", "for nothing"])
@pytest.mark.parametrize("kind", FILESYSTEMS)
def test_a_drive_too_small_from_the_start(
    drive: Callable[..., faults.Mounted], tmp_path: Path, model_dir: Path, kind: str, room: str
) -> None:
    place = drive(kind)
    place.fill(leave=4 * MIB if room == "for the weights" else MIB)
    told = refused(tmp_path, words_of(model_dir, tmp_path / "out", place.path / "store"))
    assert "the store takes at least" in told and f"{place.path} has " in told and " free" in told


@pytest.mark.root
@pytest.mark.parametrize("kind", FILESYSTEMS)
def test_a_drive_without_room_for_a_directory(
    drive: Callable[..., faults.Mounted], tmp_path: Path, model_dir: Path, kind: str
) -> None:
    place = drive(kind)
    place.fill()
    told = refused(tmp_path, words_of(model_dir, tmp_path / "out", place.path / "store"))
    assert str(place.path) in told
    assert "space" in told
    assert "may write to" not in told, "it is the space that is missing, not the permission"


#: Files that need room on the drive after the weights, by the next operation.
LATER = {"the states": "optimizer", "a gradient": "backward", "the input of a layer": "forward"}


@pytest.mark.root
@pytest.mark.parametrize("what", LATER)
@pytest.mark.parametrize("kind", FILESYSTEMS)
def test_a_drive_that_another_process_fills(
    drive: Callable[..., faults.Mounted], tmp_path: Path, kind: str, what: str
) -> None:
    place = drive(kind, faults.LEAST_BYTES[kind] + 96 * MIB)
    store = place.path / "store"
    with Stepper(tmp_path, by_steps, store) as child:
        child.must("offload")
        if what == "a gradient":
            child.must("forward")
        if what == "the input of a layer":
            child.must("optimizer")
        ballast = place.fill()
        number, told = child.does(LATER[what], *([LARGE] if what == "the input of a layer" else []))
        assert number == errno.ENOSPC, told
        assert str(place.path) in told
        assert "space" in told
        child.must("weights", 0)
        # Once there is room again, the same process goes on where it was.
        ballast.unlink()
        os.sync()
        if what != "the input of a layer":
            child.must("optimizer")
        child.must("forget")
        child.must("a_step")
        child.must("weights", 1)
        child.ends()
    assert not store.exists()


@pytest.mark.root
@pytest.mark.parametrize("kind", FILESYSTEMS)
def test_a_drive_that_fills_up_in_training(drive: Callable[..., faults.Mounted], tmp_path: Path, kind: str) -> None:
    # Everything was preallocated before the first step, so the others need nothing more.
    place = drive(kind, faults.LEAST_BYTES[kind] + 96 * MIB)
    store = place.path / "store"
    with Stepper(tmp_path, by_steps, store) as child:
        child.must("offload")
        child.must("optimizer")
        child.must("a_step")
        child.must("a_step")
        place.fill()
        number, told = child.does("a_step")
        if kind == "btrfs" and number is not None:
            # It may write every block to a new place, and then find none: that is told, and ends well.
            assert number == errno.ENOSPC, told
            assert f"{store}/memascend." in told
            assert child.does("weights", 3)[0] == errno.ENOSPC, "half an update was passed off as the weights"
        else:
            assert number is None, told
            child.must("a_step")
            child.must("weights", 4)
        child.ends()
    assert not store.exists()


@pytest.mark.root
@pytest.mark.parametrize("kind", FILESYSTEMS)
def test_a_command_whose_drive_fills_up_ends_by_itself(
    drive: Callable[..., faults.Mounted], tmp_path: Path, model_dir: Path, kind: str
) -> None:
    place = drive(kind)
    mine = place.path / "mine.txt"
    mine.write_text("mine")
    words = words_of(model_dir, tmp_path / "out", place.path / "store", host_memory=smallest(model_dir))
    with training(tmp_path, words) as child:
        ballast = place.fill()
        steps = len((tmp_path / "metrics.jsonl").read_bytes().splitlines())
        end = time.monotonic() + 60
        while child.alive() and len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) < steps + 5:
            assert time.monotonic() < end, f"neither steps nor an end: {child.told()}"
            time.sleep(0.01)
        if child.alive():
            # It goes on: then it writes its model when asked to end.
            os.kill(child.pid, signal.SIGINT)
        ended = child.wait()
    if ended.code == 130:
        assert load_file(tmp_path / "out" / "model.safetensors")
    else:
        told = the_error(ended, 1, 2)
        assert kind == "btrfs", f"what was preallocated did not do: {told}"
        assert f"{place.path}/store/memascend." in told and "No space left on device" in told
        assert not (tmp_path / "out").exists()
    assert mine.read_text() == "mine"
    ballast.unlink()
    os.sync()
    assert memascend.can_resume(place.path / "store"), "the last step is durable"


@pytest.mark.root
@pytest.mark.parametrize("what", ["out", "out, in memory", "metrics"])
def test_an_output_without_room_is_named(
    drive: Callable[..., faults.Mounted], tmp_path: Path, model_dir: Path, what: str
) -> None:
    place = drive("ext4")
    words = words_of(model_dir, tmp_path / "out", tmp_path / "store")
    if what == "out, in memory":
        words = in_memory(words)
    if what != "metrics":
        words[words.index("--out") + 1] = str(place.path / "out")
        words += ["--metrics", str(tmp_path / "metrics.jsonl")]
        place.fill(leave=512 << 10)
    else:
        words += ["--metrics", str(place.path / "metrics.jsonl")]
        place.fill()
    before = listing(place.path)
    with faults.Child(tmp_path, command, words) as child:
        told = the_error(child.wait(), 1, 2)
    assert str(place.path) in told
    assert "No space left on device" in told
    after = listing(place.path)
    after.pop("metrics.jsonl", None)
    assert after == before
    # The run itself is not lost.
    assert (tmp_path / "store" / "memascend.json").exists() == (what == "out")


@pytest.mark.root
def test_a_model_that_finds_no_room_can_be_saved_elsewhere(
    drive: Callable[..., faults.Mounted], offloaded: Callable[..., nn.Module], tmp_path: Path
) -> None:
    place = drive("ext4")
    place.fill(leave=MIB)
    model = offloaded(tiny_models.build("llama"))
    with pytest.raises(OSError, match=r"model\.safetensors") as caught:
        memascend.save_pretrained(model, place.path / "out")
    assert caught.value.errno == errno.ENOSPC
    assert list((place.path / "out").iterdir()) == []
    memascend.save_pretrained(model, tmp_path / "out")
    tiny_models.assert_same_weights(
        load_file(tmp_path / "out" / "model.safetensors"), dict(tiny_models.build("llama").named_parameters())
    )


# ---- a drive that fails -------------------------------------------------------------------------------------


@pytest.mark.root
def test_a_device_that_reports_errors(drive: Callable[..., faults.Mounted], tmp_path: Path, model_dir: Path) -> None:
    place = drive("ext4", features=NO_JOURNAL)
    words = words_of(model_dir, tmp_path / "out", place.path / "store", host_memory=smallest(model_dir))
    with training(tmp_path, words) as child:
        place.device.shrink(MIB)
        told = the_error(child.wait(), 1, 2)
    assert f"{place.path}/store/{faults.VOLUME}" in told
    # A block across the end is read as zeros by the loop device, without an error.
    assert (" at offset " in told and "os error 5)" in told) or "are not those that were written" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.root
@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("engine", ["ring", "threads"])
def test_a_device_error_reaches_python(
    drive: Callable[..., faults.Mounted], tmp_path: Path, engine: str, sector: int
) -> None:
    place = drive("ext4", 96 * MIB, sector=sector, features=NO_JOURNAL)
    with Stepper(tmp_path, by_steps, place.path / "store", engine) as child:
        child.must("offload")
        child.must("optimizer")
        child.must("a_step")
        place.device.shrink(MIB)
        number, told = child.does("a_step")
        assert number == errno.EIO or "are not those that were written" in told, told
        assert f"{place.path}/store/{faults.VOLUME}" in told and " at offset " in told
        # It stays failed, and ends.
        assert child.does("a_step")[0] is not None
        child.ends()


def test_a_store_truncated_while_training(tmp_path: Path, model_dir: Path) -> None:
    store = tmp_path / "store"
    words = words_of(model_dir, tmp_path / "out", store, host_memory=smallest(model_dir))
    with training(tmp_path, words) as child:
        os.truncate(store / faults.VOLUME, 4096)
        told = the_error(child.wait(), 1, 2)
    assert f"{store}/{faults.VOLUME}" in told
    assert any(words in told for words in ("truncated", "end of file", "shorter", "are not those")), told
    assert not (tmp_path / "out").exists()


@pytest.mark.core
@pytest.mark.parametrize(
    ("engine", "moment", "lost"),
    [
        ("ring", "between steps", "everything"),
        ("ring", "before the backward pass", "the states"),
        ("threads", "between steps", "the states"),
        ("threads", "before the backward pass", "everything"),
    ],
)
def test_what_a_truncated_store_lost_is_never_trained_on(tmp_path: Path, engine: str, moment: str, lost: str) -> None:
    # A write beyond the end makes the file long again, with zeros where the states were.
    store = tmp_path / "store"
    with Stepper(tmp_path, by_steps, store, engine) as child:
        child.must("offload")
        child.must("optimizer")
        child.must("a_step")
        if moment == "before the backward pass":
            child.must("forward")
        weights = sum(parameter.nbytes for parameter in tiny_models.build("llama").parameters())
        os.truncate(store / faults.VOLUME, 4096 if lost == "everything" else weights + MIB)
        asked = [("a_step",)] if moment == "between steps" else [("backward",), ("update",)]
        answers = [child.does(*words) for words in asked]
        failed = [told for number, told in answers if number is not None]
        assert failed, "zeros were taken for weights or states"
        assert f"{store}/{faults.VOLUME}" in failed[0]
        child.ends()
    assert not store.exists()


def test_a_write_does_not_hide_that_a_store_was_truncated(tmp_path: Path) -> None:
    # Inputs of layers lie behind everything else: putting them aside makes the file as long as it was.
    store = tmp_path / "store"
    with Stepper(tmp_path, by_steps, store) as child:
        child.must("offload")
        child.must("optimizer")
        child.must("a_step", LARGE)
        weights = sum(parameter.nbytes for parameter in tiny_models.build("llama").parameters())
        os.truncate(store / faults.VOLUME, weights + MIB)
        _, told = child.does("a_step", LARGE)
        assert f"{store}/{faults.VOLUME}" in told, "zeros were taken for states"
        child.ends()


@pytest.mark.parametrize("engine", ["ring", "threads"])
def test_a_failed_prefetch_does_not_keep_a_store_open(tmp_path: Path, engine: str) -> None:
    # With room for several units, the first units of the next pass are on their way when the model is closed.
    store = tmp_path / "store"
    with Stepper(tmp_path, by_steps, store, engine, "40MiB") as child:
        child.must("offload")
        child.must("optimizer")
        child.must("a_step")
        child.must("forward")
        os.truncate(store / faults.VOLUME, 4096)
        child.does("backward")
        child.must("step")
        child.ends()
    assert not store.exists()


# ---- a directory that cannot be written ---------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("exists", [True, False])
def test_a_drive_mounted_read_only(
    drive: Callable[..., faults.Mounted], tmp_path: Path, model_dir: Path, exists: bool
) -> None:
    place = drive("ext4")
    store = place.path / "store"
    if exists:
        store.mkdir()
    faults.must(["mount", "-o", "remount,ro", str(place.path)])
    told = refused(tmp_path, words_of(model_dir, tmp_path / "out", store))
    assert str(store) in told
    assert "Read-only file system" in told


@pytest.mark.root
def test_a_directory_that_became_immutable(
    drive: Callable[..., faults.Mounted], tmp_path: Path, model_dir: Path
) -> None:
    store = drive("ext4").path / "store"
    store.mkdir()
    faults.must(["chattr", "+i", str(store)])
    try:
        told = refused(tmp_path, words_of(model_dir, tmp_path / "out", store))
    finally:
        faults.must(["chattr", "-i", str(store)])
    assert str(store) in told
    assert "Operation not permitted" in told


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


@pytest.mark.root
@pytest.mark.parametrize("what", ["store", "out", "model"])
def test_a_directory_of_another_user(model_dir: Path, what: str) -> None:
    # Other users may not even list a temporary directory of pytest.
    with tempfile.TemporaryDirectory() as found:
        top = Path(found)
        top.chmod(0o755)
        shutil.copytree(model_dir.parent, top / "given")
        (top / "given").chmod(0o755)
        (top / "given" / "llama" / "model.safetensors").chmod(0o600 if what == "model" else 0o644)
        mine, theirs = top / "mine", top / "theirs"
        theirs.mkdir(mode=0o755)
        mine.mkdir()
        os.chown(mine, NOBODY, NOBODY)
        if what == "store":
            (theirs / "store").mkdir(mode=0o755)
        store = (theirs if what == "store" else mine) / "store"
        out = (theirs if what == "out" else mine) / "out"
        told = refused(top, words_of(top / "given" / "llama", out, store), become_nobody)
    assert str(top / "given" / "llama" / "model.safetensors" if what == "model" else theirs) in told
    assert "ermission denied" in told
