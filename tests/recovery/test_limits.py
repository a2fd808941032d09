"""Limits of the process, a refused io_uring, and filesystems that work."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults
import pytest
import tiny_models
import torch
from commands import command, in_memory, refused, words_of
from safetensors.torch import load_file
from stepped_process import expected_weights, step, weights_equal

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable


MIB = 1 << 20


# ---- limits of the process ----------------------------------------------------------------------------------


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.core
@pytest.mark.parametrize("size", [MIB, 4 * MIB])
def test_a_limit_on_the_size_of_files(tmp_path: Path, model_dir: Path, size: int) -> None:
    # One limit below the weights, one between them and the states.
    store = tmp_path / "store"
    told = refused(tmp_path, words_of(model_dir, tmp_path / "out", store), partial(limit_files, size))
    assert f"{store}/{faults.VOLUME}" in told
    assert "File too large" in told
    assert "ulimit -f" in told


def test_a_limit_on_the_size_of_files_that_the_data_does_not_fit(tmp_path: Path, model_dir: Path) -> None:
    words = in_memory(words_of(model_dir, tmp_path / "out", tmp_path))
    told = refused(tmp_path, words, partial(limit_files, 4 << 10))
    assert f"cannot write {tmp_path}" in told
    assert "File too large" in told
    assert "ulimit -f" in told


def small_files(pipe: Any, store: Path) -> None:
    limit_files(MIB)
    try:
        memascend.offload(tiny_models.build("llama"), store=store, host_memory="64MiB", allocator="pageable")
    except memascend.StoreError as error:
        pipe.send((error.errno, str(error)))


def test_a_limit_on_the_size_of_files_reaches_python(tmp_path: Path) -> None:
    with faults.Child(tmp_path, small_files, tmp_path / "store") as child:
        number, told = child.receive()
        assert child.wait().code == 0
    assert number == errno.EFBIG
    assert "ulimit -f" in told
    assert not (tmp_path / "store").exists()


def raised_limit(pipe: Any, store: Path) -> None:
    model = tiny_models.build("llama")
    memascend.offload(model, store=store, host_memory="64MiB", allocator="pageable")
    used = (store / faults.VOLUME).stat().st_size
    room = used + 4 * (4 << 10)
    failures = 0
    # Each attempt gets a little further: every place where the states can find no room is the last once.
    while True:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        try:
            optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
            break
        except memascend.StoreError as error:
            assert error.errno == errno.EFBIG, error
            failures += 1
            room += 700 << 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    pipe.send((failures, weights_equal(model, 2)))
    memascend.close(model)


def test_states_that_found_no_room_at_first(tmp_path: Path) -> None:
    with faults.Child(tmp_path, raised_limit, tmp_path / "store") as child:
        failures, equal = child.receive()
        assert failures > 20
        assert equal
        assert child.wait().code == 0


# ---- io_uring -----------------------------------------------------------------------------------------------


def io_uring_works(room: Path) -> bool:
    options: dict[str, Any] = {"host_memory": "64MiB", "allocator": "pageable", "engine": "ring"}
    try:
        memascend.close(memascend.offload(torch.nn.Linear(8, 8), store=room / "probe", **options))
    except memascend.StoreError:
        return False
    return True


def test_without_io_uring_the_same_weights_come_out(tmp_path: Path, model_dir: Path) -> None:
    ended = {}
    words = words_of(model_dir, tmp_path / "allowed", tmp_path / "store", steps=3, lr=1e-3)
    with faults.Child(tmp_path, command, words) as child:
        done = child.wait()
        assert done.code == 0, done.err
        ended["allowed"] = done.err
    words = words_of(model_dir, tmp_path / "refused", tmp_path / "store", steps=3, lr=1e-3)
    with faults.Child(tmp_path, command, words, faults.refuse_io_uring) as child:
        done = child.wait()
        assert done.code == 0, done.err
        ended["refused"] = done.err
    said = [line for line in ended["refused"].splitlines() if "io_uring is not" in line]
    assert len(said) == 1, ended["refused"]
    assert said[0].startswith("memascend: note: io_uring is not available: Operation not permitted")
    assert "threads instead" in said[0]
    starts = {
        name: json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])["store"] for name in ended
    }
    assert starts["refused"]["engine"] == "threads"
    if io_uring_works(tmp_path):
        assert starts["allowed"]["engine"] == "ring"
        assert "io_uring is not" not in ended["allowed"]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("allowed", "refused"))
    tiny_models.assert_same_weights(one, other)
    begin = load_file(model_dir / "model.safetensors")
    assert any(not torch.equal(one[name], begin[name]) for name in begin), "nothing was trained"


def engines_without_io_uring(pipe: Any, store: Path) -> None:
    faults.refuse_io_uring()
    model = memascend.offload(tiny_models.build("llama"), store=store, host_memory="64MiB", allocator="pageable")
    stats = memascend.stats(model)
    pipe.send((stats["engine"], stats["notices"]))
    memascend.close(model)
    try:
        memascend.offload(
            tiny_models.build("llama"), store=store, host_memory="64MiB", allocator="pageable", engine="ring"
        )
    except memascend.StoreError as error:
        pipe.send((error.errno, str(error)))


def test_a_refused_io_uring_is_told_in_python(tmp_path: Path) -> None:
    with faults.Child(tmp_path, engines_without_io_uring, tmp_path / "store") as child:
        engine, notices = child.receive()
        assert engine == "threads"
        assert len([notice for notice in notices if "io_uring is not" in notice]) == 1
        # Asked for by name, it is not replaced.
        number, told = child.receive()
        assert number == errno.EPERM and "io_uring" in told
        assert child.wait().code == 0


# ---- filesystems that work ----------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "xfs", "btrfs", "overlay on ext4", "overlay on ramfs"])
def test_other_filesystems_work(drive: Callable[..., faults.Mounted], tmp_path: Path, kind: str) -> None:
    with contextlib.ExitStack() as cleanup:
        below = kind.removeprefix("overlay on ")
        place = drive(below, None if below in ("tmpfs", "ramfs") else faults.LEAST_BYTES[below] + 64 * MIB).path
        if below != kind:
            place = cleanup.enter_context(faults.overlaid(place, tmp_path / "overlay"))
        model = memascend.offload(
            tiny_models.build("llama"), store=place / "store", host_memory="64MiB", allocator="pageable"
        )
        cleanup.callback(memascend.close, model)
        stats = memascend.stats(model)
        assert stats["direct_io"] == takes_direct_io(place)
        notices = [notice for notice in stats["notices"] if "O_DIRECT" in notice and str(place) in notice]
        assert len(notices) == (0 if stats["direct_io"] else 1), stats["notices"]
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            step(model, optimizer, number)
        tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), expected_weights(2))
        memascend.close(model)
        assert not (place / "store").exists()


def takes_direct_io(directory: Path) -> bool:
    probe = directory / "probe"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        assert error.errno == errno.EINVAL
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


@pytest.mark.root
def test_the_command_notes_refused_direct_io(
    drive: Callable[..., faults.Mounted], tmp_path: Path, model_dir: Path
) -> None:
    place = drive("ramfs").path
    with (
        faults.overlaid(place, tmp_path / "overlay") as store,
        faults.Child(tmp_path, command, words_of(model_dir, tmp_path / "out", store / "store")) as child,
    ):
        ended = child.wait()
        assert ended.code == 0, ended.err
        told = [line for line in ended.err.splitlines() if "O_DIRECT" in line]
        assert len(told) == 1 and told[0].startswith("memascend: note: ") and str(store) in told[0]
        assert not (store / "store").exists()
    assert (tmp_path / "out" / "model.safetensors").exists()
