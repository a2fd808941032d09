"""Drives that are full, forbidden or hold another store: the errors, and the files left."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import faults
import pytest
import tiny_models
import torch
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# ---- drives -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """Mount a filesystem of some MiB; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(kind: str, mebibytes: int) -> Path:
        where = tmp_path / f"{kind}{len(mounted)}"
        where.mkdir()
        if kind == "tmpfs":
            command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(where)]
        elif kind == "ramfs":
            command = ["mount", "-t", "ramfs", "ramfs", str(where)]
        else:
            image = tmp_path / "image"
            image.write_bytes(b"")
            os.truncate(image, mebibytes << 20)
            faults.must(["mkfs.ext4", "-q", "-m", "0", str(image)])
            command = ["mount", "-o", "loop", str(image), str(where)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            faults.unavailable(f"cannot mount here: {done.stderr.strip()}")
        mounted.append(where)
        return where

    yield mount
    for where in mounted:
        subprocess.run(["umount", str(where)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_drive_is_known_before_training(
    small_drive: Callable[[str, int], Path], offloaded: Callable[..., nn.Module], kind: str
) -> None:
    model = tiny_models.build("llama")
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    size = sum(value.nbytes for value in weights.values())
    drive = small_drive(kind, (size >> 20) + (8 if kind == "ext4" else 3))
    # Room for the weights, not for the states.
    offloaded(model, store=drive / "store")
    with pytest.raises(memascend.StoreError, match=str(drive)) as caught:
        memascend.AdamW(model.parameters())
    assert caught.value.errno == errno.ENOSPC
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), weights)
    memascend.close(model)
    assert not (drive / "store").exists()
    # Not even for the weights: the model stays as it was.
    larger = tiny_models.build("llama", torch.float32)
    before = {name: value.detach().clone() for name, value in larger.named_parameters()}
    with pytest.raises(memascend.StoreError, match=str(drive)) as caught:
        memascend.offload(larger, store=drive / "store", host_memory="256MiB", allocator="pageable")
    assert caught.value.errno == errno.ENOSPC
    assert not (drive / "store").exists()
    tiny_models.assert_same_weights({name: value.detach() for name, value in larger.named_parameters()}, before)
    assert "_memascend" not in larger.__dict__
    # States alone.
    with pytest.raises(memascend.StoreError, match=str(drive)) as caught:
        memascend.AdamW(larger.parameters(), store=drive / "store", allocator="pageable")
    assert caught.value.errno == errno.ENOSPC
    assert not (drive / "store").exists()


@pytest.mark.root
def test_a_filesystem_without_direct_io(
    small_drive: Callable[[str, int], Path], offloaded: Callable[..., nn.Module]
) -> None:
    drive = small_drive("ramfs", 0)
    model = offloaded(tiny_models.build("llama"), store=drive / "store")
    stats = memascend.stats(model)
    assert not stats["direct_io"]
    assert any("O_DIRECT" in notice and str(drive) in notice for notice in stats["notices"])
    tiny_models.assert_same(tiny_models.train(model, "llama"), tiny_models.train(tiny_models.build("llama"), "llama"))


def test_buffered_when_asked(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("llama"), direct=False)
    assert memascend.stats(model)["direct_io"] is False
    notices = memascend.stats(model)["notices"]
    assert not [notice for notice in notices if "O_DIRECT" in notice], "what was asked for needs no notice"


@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.timeout(60)
def test_a_drive_that_fails_in_training(
    offloaded: Callable[..., nn.Module], store: Path, engine: str, recompute: bool
) -> None:
    model = tiny_models.build("llama")
    offloaded(model, engine=engine, recompute=recompute, host_memory=tiny_models.smallest_budget(model))
    optimizer = memascend.AdamW(model.parameters())
    tiny_models.step(model, optimizer, "llama", 0)
    optimizer.flush()
    os.truncate(store / faults.VOLUME, 4096)
    with pytest.raises(memascend.StoreError, match=faults.VOLUME):
        for number in range(1, 4):
            tiny_models.step(model, optimizer, "llama", number)
            optimizer.flush()
    # It stays failed, and closes.
    with pytest.raises(memascend.MemascendError):
        for _ in range(2):
            dict(memascend.parameters_of(model))
    memascend.close(model)
    assert not store.exists()


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for bad in (file, file / "below", Path("/proc/memascend")):
        with pytest.raises(memascend.StoreError, match=str(bad)) as caught:
            memascend.offload(tiny_models.build("llama"), store=bad, host_memory="256MiB", allocator="pageable")
        assert caught.value.errno
    assert file.read_text() == "mine"
    directory = tmp_path / "d"
    with pytest.raises(memascend.StoreError, match="twice"):
        memascend.offload(
            tiny_models.build("llama"), store=[directory, directory], host_memory="256MiB", allocator="pageable"
        )
    assert not directory.exists()
    with pytest.raises(memascend.StoreError, match="at least one"):
        memascend.offload(tiny_models.build("llama"), store=[], host_memory="256MiB", allocator="pageable")


def test_files_of_others_in_the_directory_stay(offloaded: Callable[..., nn.Module], store: Path) -> None:
    store.mkdir()
    (store / "notes.txt").write_text("mine")
    memascend.close(offloaded(tiny_models.build("llama")))
    assert [file.name for file in store.iterdir()] == ["notes.txt"]
