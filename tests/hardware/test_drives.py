"""Drives from the user's side: measured, formatted, used raw, several at once, and simulated with faults."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults as faults_module
import pytest
import tiny_models
import torch
from commands import words_of
from faults import MIB
from safetensors.torch import load_file

import memascend
from memascend._memascend import ClosedStore, Volume, device_uuid, format_device
from memascend.cli import main
from memascend.hardware import drives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

DEVICE = 192 * MIB


@pytest.fixture
def device() -> Iterator[faults_module.LoopDevice]:
    """A raw device in memory, not formatted."""
    with faults_module.loop_device(DEVICE) as found:
        yield found


def told(capfd: pytest.CaptureFixture[str], words: list[Any]) -> tuple[int, str, str]:
    """Exit code and output of a command."""
    capfd.readouterr()
    code = main.main([str(word) for word in words])
    return code, *capfd.readouterr()


def refusal(capfd: pytest.CaptureFixture[str], words: list[Any]) -> str:
    """Return the line in which a command refuses."""
    code, out, err = told(capfd, words)
    assert code == 2, err
    assert out == ""
    assert err.splitlines()[-1].startswith("memascend: error: "), err
    return err.splitlines()[-1]


def measured(place: Any, mix: float, **worth: bool) -> dict[str, Any]:
    """Return a measurement as `memascend bench` remembers it."""
    return {
        "place": str(place),
        "identity": drives.identity(place),
        "workloads": {"mix": {"bytes_per_second": mix}},
        "worth_it": [name for name, is_worth_it in worth.items() if is_worth_it],
    }


# ---- memascend bench ----------------------------------------------------------------------------------------


def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = tmp_path / "room"
    room.mkdir()
    (room / "mine").write_text("stays")
    words = ["bench", room, "--size", "16MiB", "--seconds", "0.05"]
    code, out, err = told(capfd, words)
    assert code == 0, err
    for title in ("write, 1 MiB", "read, 1 MiB", "55 % reads, 1 MiB", "random read, 4 KiB", "remembered in"):
        assert title in out
    assert [path.name for path in room.iterdir()] == ["mine"]
    assert drives.remembered_in().is_file()
    found = json.loads(drives.remembered_in().read_text())[drives.identity(room)]
    assert found["engine"] in ("ring", "threads")
    for work in found["workloads"].values():
        assert work["bytes_per_second"] > 0
        assert 0 < work["latency_p50"] <= work["latency_p99"] <= work["latency_max"]
        assert work["cpu_seconds_per_gib"] > 0
    # One drive alone has no share to decide on.
    assert drives.store_options([room]) == ({}, None)
    code, out, _ = told(capfd, [*words, "--json", "--engine", "threads", "--no-remember"])
    assert code == 0
    assert [one["engine"] for one in json.loads(out)] == ["threads"]


def test_polling_is_tried_where_processors_can_be_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "PROCESSORS_TO_SPARE", 1)
    said: list[str] = []
    found = drives.measure(tmp_path, size=4 * MIB, seconds=0.05, engine="ring", progress=said.append)
    assert "with io_poll" in said
    assert "with sq_poll" in said
    # Granted features are measured, refused ones are left out.
    assert set(found["polling"]) <= {"io_poll", "sq_poll"}
    assert said.count("without, once more") == len(found["polling"])
    for gain in found["polling"].values():
        assert set(gain) == {"mix", "random_read"}
        assert all(value > 0 for value in gain.values())
    assert set(found["worth_it"]) == {name for name, gain in found["polling"].items() if gain["mix"] >= 1.05}


def test_what_cannot_be_measured_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "neither a directory nor a block device" in refusal(capfd, ["bench", tmp_path / "missing"])
    file = tmp_path / "file"
    file.write_text("")
    assert str(file) in refusal(capfd, ["bench", file])
    message = refusal(capfd, ["bench", tmp_path, "--size", "900TB"])
    assert "has no room for --size" in message
    assert not list(tmp_path.glob(".memascend-bench.*"))
    assert told(capfd, ["bench", tmp_path, "--seconds", "0"])[0] == 2


def test_memory_that_makes_no_sense_is_forgotten(tmp_path: Path) -> None:
    drives.remembered_in().parent.mkdir(parents=True)
    for text in ("", "[]", "{", '{"x": 1}', json.dumps({drives.identity(tmp_path): {"workloads": {}}})):
        drives.remembered_in().write_text(text)
        assert drives.store_options([tmp_path]) == ({}, None)
    # Written anew, not added to an unreadable file.
    drives.remember([measured(tmp_path, 1e9, io_poll=True)])
    assert drives.store_options([tmp_path]) == ({"io_poll": True}, None)


def test_a_polling_option_is_used_where_every_drive_gains_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drives, "identity", str)
    both = ["/one", "/other"]
    drives.remember([measured("/one", 3e9, io_poll=True, sq_poll=True), measured("/other", 1e9, sq_poll=True)])
    assert drives.store_options(both) == ({"sq_poll": True, "rates": [3e9, 1e9]}, None)
    options, note = drives.store_options([*both, "/third"])
    assert options == {}
    assert note is not None
    assert "`memascend bench /one /other /third`" in note


def test_asked_for_features_are_reported(tmp_path: Path) -> None:
    volume = Volume(tmp_path, engine="ring", sq_poll=True, io_poll=True)
    features = volume.stats()["features"]
    volume.close()
    assert "sq_poll" in features or any(name.startswith("no sq_poll") for name in features)
    assert "io_poll" in features or any(name.startswith("no io_poll") for name in features)
    assert "registered_buffers" in features or any(name.startswith("no registered_buffers") for name in features)


# ---- transfers through leases -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["ring", "threads"])
def test_transfers_through_leases(tmp_path: Path, engine: str) -> None:
    volume = Volume(tmp_path, buffer_bytes=64 << 10, buffer_count=2, engine=engine)
    volume.reserve(1 << 20)
    source, target = volume.lease(64 << 10), volume.lease(64 << 10)
    assert source is not None
    assert target is not None
    assert volume.lease(1) is None
    offsets = [0, 48 << 10, 16 << 10, 512 << 10]
    torch.frombuffer(source, dtype=torch.uint8).copy_(torch.arange(64 << 10) // 7 % 251)
    volume.start("write", offsets, source, 16 << 10).wait()
    volume.start("read", offsets, target, 16 << 10).wait()
    assert bytes(source) == bytes(target)
    stats = volume.stats()
    assert (stats["bytes_read"], stats["bytes_written"]) == (64 << 10, 64 << 10)
    assert (stats["requests_read"], stats["requests_written"]) == (4, 4)
    with pytest.raises(ValueError, match="more than a buffer"):
        volume.start("read", [0] * 5, target, 16 << 10)
    with pytest.raises(ValueError, match="read or write"):
        volume.start("erase", [0], target, 4096)
    with pytest.raises(memascend.StoreError) as caught:
        volume.start("read", [0, 4 << 20], target, 16 << 10).wait()
    error = caught.value
    assert (error.errno, error.operation, error.offset, error.length) == (5, "read", 4 << 20, 16 << 10)
    assert error.filename == str(tmp_path / "memascend.volume")
    assert "made shorter" in error.hint
    assert volume.stats()["failures_read"] == 1
    volume.close()
    volume.close()
    with pytest.raises(RuntimeError, match="closed"):
        volume.stats()
    # The contents of the buffers stay theirs.
    assert bytes(source)[:7] == bytes(7)
    assert list(tmp_path.iterdir()) == []


def test_counters_of_every_volume(tmp_path: Path, offloaded: Callable[..., nn.Module]) -> None:
    places = [tmp_path / "one", tmp_path / "other"]
    model = offloaded(tiny_models.build("llama"), store=places, rates=[3e9, 1e9])
    tiny_models.train(model, "llama", steps=1)
    stats = memascend.stats(model)
    volumes = stats["volumes"]
    assert [volume["path"] for volume in volumes] == [str(place) for place in places]
    assert [volume["share"] for volume in volumes] == [0.75, 0.25]
    for direction in ("read", "written"):
        assert sum(volume[f"bytes_{direction}"] for volume in volumes) == stats[f"ssd_bytes_{direction}"] > 0
        for volume in volumes:
            latencies = [volume[f"latency_{part}_{direction}"] for part in ("p50", "p99", "max")]
            assert latencies == sorted(latencies)
            assert volume[f"failures_{direction}"] == 0
    for volume in volumes:
        assert volume["busy_seconds"] > 0
        assert 0 < volume["queue_depth_mean"] <= volume["queue_depth_max"]


# ---- raw devices --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama over bytes, with text beside it."""
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=256)


def finetune(model_dir: Path, out: Path, *places: Any, **flags: Any) -> list[Any]:
    """Return the arguments of a small run."""
    words = ["finetune", model_dir, "--data", model_dir.parent / "text.txt", "--out", out]
    words += ["--steps", 2, "--seq-len", 32, "--grad-accum", 2, "--dtype", "bfloat16"]
    for place in places:
        words += ["--store", place]
    words += ["--host-memory", "64MiB"] if places else ["--in-memory"]
    return [*words, *(f"--{name.replace('_', '-')}" for name in flags)]


@pytest.mark.root
@pytest.mark.parametrize("sector", [512, 4096])
def test_a_raw_device_from_format_to_reopening(
    tmp_path: Path, model_dir: Path, sector: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with faults_module.loop_device(DEVICE, sector) as device:
        assert "memascend format" in refusal(capfd, finetune(model_dir, tmp_path / "early", device.path))
        code, out, err = told(capfd, ["format", device.path])
        assert code == 0, err
        uuid = device_uuid(device.path)
        assert uuid is not None
        assert f"UUID={uuid}" in out

        code, _, err = told(capfd, finetune(model_dir, tmp_path / "raw", device.path, keep_store=True))
        assert code == 0, err
        assert "direct I/O" in err
        assert told(capfd, finetune(model_dir, tmp_path / "memory"))[0] == 0
        trained = load_file(tmp_path / "raw" / "model.safetensors")
        tiny_models.assert_same_weights(trained, load_file(tmp_path / "memory" / "model.safetensors"))

        device.rename()
        with pytest.raises(memascend.StoreError, match="no device with UUID"):
            ClosedStore(["UUID=00000000-0000-4000-8000-000000000000"])
        store = ClosedStore([f"UUID={uuid}"])
        with pytest.raises(memascend.StoreError, match="in use"):
            ClosedStore([device.path])
        assert "in use" in refusal(capfd, ["format", device.path, "--destroy", device.path])
        kept = {}
        for name, length in store.tensors():
            content = torch.empty(length, dtype=torch.uint8)
            store.read(name, content.data_ptr(), length)
            kept[name] = content.numpy().tobytes()
        for name, value in trained.items():
            found = [tensor for tensor, content in kept.items() if value.view(torch.uint8).numpy().tobytes() in content]
            assert found, f"{name} is not in the kept store"
        del store

        for words in (
            finetune(model_dir, tmp_path / "again", f"UUID={uuid}"),
            ["bench", device.path, "--size", "16MiB", "--seconds", "0.05"],
        ):
            assert re.search("holds (a run of LlamaForCausalLM|the store of an earlier run)", refusal(capfd, words))
        assert uuid in refusal(capfd, ["format", device.path])
        code, out, err = told(capfd, ["format", device.path, "--destroy", device.path])
        assert code == 0, err
        assert f"kept memascend store (UUID {uuid}" in out
        assert device_uuid(device.path) != uuid
        code, out, err = told(capfd, ["bench", device.path, "--size", "16MiB", "--seconds", "0.05"])
        assert code == 0, err
        assert f"blocks of {sector} bytes" in out
        assert told(capfd, finetune(model_dir, tmp_path / "again", device.path))[0] == 0


@pytest.mark.root
def test_formatting_refuses_what_holds_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    assert "not a block device" in refusal(capfd, ["format", file])
    assert "does not exist" in refusal(capfd, ["format", tmp_path / "missing"])
    with faults_module.loop_device(64 * MIB) as device, faults_module.loop_device(64 * MIB) as other:
        faults_module.must(["mkfs.ext4", "-q", "-L", "precious", str(device.path)])
        assert "precious" in refusal(capfd, ["format", device.path])
        message = refusal(capfd, ["format", device.path, "--destroy", other.path])
        assert "another device" in message
        where = tmp_path / "mounted"
        where.mkdir()
        faults_module.must(["mount", str(device.path), str(where)])
        try:
            for words in ([], ["--destroy", device.path]):
                assert str(where) in refusal(capfd, ["format", device.path, *words])
        finally:
            faults_module.must(["umount", str(where)])
        code, out, _ = told(capfd, ["format", device.path, "--destroy", device.path])
        assert code == 0
        assert "precious" in out


@pytest.mark.root
def test_formatting_refuses_data_that_has_no_signature(capfd: pytest.CaptureFixture[str]) -> None:
    with faults_module.loop_device(64 * MIB) as device:
        device.path.write_bytes(b"precious raw data\n" * 1000)
        message = refusal(capfd, ["format", device.path])
        assert 'text at byte 0 ("precious raw data' in message
        assert f"--destroy {device.path}" in message
        with device.path.open("rb") as raw:
            assert raw.read(17) == b"precious raw data"
        code, out, _ = told(capfd, ["format", device.path, "--destroy", device.path])
        assert code == 0
        assert "destroyed: data of an unknown kind (5 of 16384 blocks" in out


@pytest.mark.root
def test_a_store_on_devices_and_a_directory_of_unequal_speed(
    tmp_path: Path, offloaded: Callable[..., nn.Module], device: faults_module.LoopDevice
) -> None:
    with faults_module.loop_device(DEVICE, 4096) as other:
        for one in (device, other):
            format_device(one.path)
        places = [device.path, tmp_path / "directory", f"UUID={device_uuid(other.path)}"]
        drives.remember([measured(place, rate) for place, rate in zip(places, (4e9, 1e9, 3e9), strict=True)])
        expected = tiny_models.train(tiny_models.build("llama"), "llama")
        model = offloaded(tiny_models.build("llama"), store=places)
        tiny_models.assert_same(tiny_models.train(model, "llama"), expected)
        volumes = memascend.stats(model)["volumes"]
        assert [volume["share"] for volume in volumes] == [0.5, 0.125, 0.375]
        written = [volume["bytes_written"] for volume in volumes]
        for volume, part in zip(volumes, written, strict=True):
            assert part / sum(written) == pytest.approx(volume["share"], abs=0.15)


@pytest.mark.root
def test_a_device_without_room_is_named(device: faults_module.LoopDevice, offloaded: Callable[..., nn.Module]) -> None:
    format_device(device.path)
    with faults_module.loop_device(16 * MIB) as small:
        format_device(small.path)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
        with pytest.raises(memascend.StoreError, match="not enough space in /dev/loop") as caught:
            offloaded(model, store=small.path)
        assert caught.value.errno == 28
        offloaded(model, store=device.path)


# ---- the simulated drive ------------------------------------------------------------------------------------


def simulated(monkeypatch: pytest.MonkeyPatch, faults: str) -> dict[str, Any]:
    """Return the options for a drive in memory with these faults."""
    monkeypatch.setenv("MEMASCEND_SIM_FAULTS", faults)
    return {"engine": "sim"}


@pytest.mark.parametrize("seed", range(3))
def test_short_transfers_retries_and_reordering_change_nothing(
    tmp_path: Path, offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    options = simulated(monkeypatch, f"seed={seed},short_one_in=3,again_one_in=4,reorder=9")
    model = tiny_models.build("llama")
    places = [tmp_path / "one", tmp_path / "other"]
    budget = tiny_models.smallest_budget(model) if seed else "256MiB"
    offloaded(model, store=places, host_memory=budget, **options)
    assert memascend.stats(model)["engine"] == "sim"
    tiny_models.assert_same(tiny_models.train(model, "llama"), tiny_models.train(tiny_models.build("llama"), "llama"))


def test_an_error_of_the_drive_ends_training_and_is_never_trained_on(
    offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tiny_models.train(tiny_models.build("llama"), "llama").weights
    failed = 0
    for seed in range(12):
        options = simulated(monkeypatch, f"seed={seed},read_error_one_in=400,write_error_one_in=400,reorder=5")
        model = tiny_models.build("llama")
        try:
            offloaded(model, host_memory=tiny_models.overlapping_budget(model), **options)
            weights = tiny_models.train(model, "llama").weights
        except memascend.StoreError as error:
            failed += 1
            assert error.errno in (5, 28), f"seed {seed}"
            assert error.operation in ("read", "write"), f"seed {seed}"
            assert error.offset is not None, f"seed {seed}"
        else:
            tiny_models.assert_same_weights(weights, expected)
        finally:
            memascend.close(model)
    assert failed > 0, "no seed made a fault"


def test_the_simulated_drive_is_not_among_the_choices(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMASCEND_SIM_FAULTS", raising=False)
    with pytest.raises(ValueError, match="auto, ring or threads"):
        memascend.offload(tiny_models.build("llama"), store=store, host_memory="256MiB", engine="sim")
    assert not os.path.lexists(store)
    monkeypatch.setenv("MEMASCEND_SIM_FAULTS", "nonsense=1")
    with pytest.raises(ValueError, match="nonsense"):
        memascend.offload(tiny_models.build("llama"), store=store, host_memory="256MiB", engine="sim")


# ---- failures -----------------------------------------------------------------------------------------------


def test_a_store_is_cleaned_up_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name / "store").mkdir(parents=True)
    precious = tmp_path / "there" / "store" / "memascend.volume"
    precious.write_text("another user's")
    monkeypatch.chdir(tmp_path / "here")
    model = memascend.offload(tiny_models.build("llama"), store="store", host_memory="256MiB", allocator="pageable")
    monkeypatch.chdir(tmp_path / "there")
    memascend.close(model)
    assert precious.exists()
    assert list((tmp_path / "here" / "store").iterdir()) == []


def test_a_kept_store_survives_a_note_that_cannot_be_read(store: Path) -> None:
    model = memascend.offload(
        tiny_models.build("llama"), store=store, host_memory="256MiB", allocator="pageable", keep_store=True
    )
    memascend.close(model)
    (store / "memascend.json").unlink()
    (store / "memascend.json").mkdir()
    length = (store / "memascend.volume").stat().st_size
    with pytest.raises(memascend.StoreError, match=r"memascend\.json"):
        memascend.offload(tiny_models.build("llama"), store=store, host_memory="256MiB", allocator="pageable")
    assert (store / "memascend.volume").stat().st_size == length


def test_a_store_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    places = [tmp_path / "one", tmp_path / "other"]
    model = memascend.offload(
        tiny_models.build("llama"), store=places, host_memory="256MiB", allocator="pageable", keep_store=True
    )
    (places[1] / "memascend.json.new").mkdir()
    with pytest.raises(memascend.StoreError, match=r"memascend\.json"):
        memascend.close(model)
    (places[1] / "memascend.json.new").rmdir()
    model = memascend.offload(tiny_models.build("llama"), store=places, host_memory="256MiB", allocator="pageable")
    memascend.close(model)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_shallowest_queues_work(offloaded: Callable[..., nn.Module], depth: int) -> None:
    model = offloaded(tiny_models.build("llama"), depth=depth, engine="ring")
    tiny_models.train(model, "llama", steps=1)
    assert memascend.stats(model)["volumes"][0]["queue_depth_max"] >= 1


@pytest.mark.parametrize(("option", "value"), [("depth", 0), ("depth", 1 << 20), ("rates", [1.0, 2.0])])
def test_options_that_make_no_sense_are_refused(store: Path, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        memascend.offload(tiny_models.build("llama"), store=store, host_memory="256MiB", **{option: value})
    assert not os.path.lexists(store)


def test_a_file_that_ends_within_a_block_is_told_from_a_busy_system(tmp_path: Path) -> None:
    for engine in ("ring", "threads"):
        volume = Volume(tmp_path, buffer_count=1, engine=engine)
        volume.reserve(1 << 20)
        os.truncate(tmp_path / "memascend.volume", 5000)
        lease = volume.lease(1 << 20)
        assert lease is not None
        for operation in ("read", "write"):
            with pytest.raises(memascend.StoreError, match="made shorter") as caught:
                volume.start(operation, [0], lease, 1 << 20).wait()
            assert caught.value.errno == 5
        volume.close()


@pytest.mark.root
def test_drives_are_told_apart_on_every_filesystem(tmp_path: Path) -> None:
    found = set()
    for kind in ("ext4", "btrfs", "tmpfs"):
        with faults_module.mounted(
            kind, faults_module.LEAST_BYTES.get(kind, 48 * MIB), tmp_path / f"a {kind} drive"
        ) as drive:
            (drive.path / "folder").mkdir()
            found |= {drives.identity(drive.path / "folder"), drives.identity(drive.path / "to be made")}
    assert len(found) == 3, found
    assert not [name for name in found if name is None or not name.startswith(("ext4 ", "btrfs ", "tmpfs "))]
    assert drives.identity("UUID=0123ABCD-0000-4000-8000-00000000000F").endswith("0123abcd-0000-4000-8000-00000000000f")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory on tmpfs."""
    if not drives.notices_of(["/dev/shm"]):
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_store_in_memory_is_warned_of(
    in_memory: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As it is where no command has run before in this process.
    monkeypatch.setattr(logging.getLogger("memascend"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("memascend"), "handlers", [])
    says = f"{in_memory / 's'} is on tmpfs, which is memory"
    model = memascend.offload(
        tiny_models.build("llama"), store=in_memory / "s", host_memory="64MiB", allocator="pageable", keep_store=True
    )
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
    assert [notice for notice in memascend.stats(model)["notices"] if says in notice]
    tiny_models.step(model, optimizer, "llama", 0)
    memascend.close(model)
    assert caplog.text.count(says) == 1
    code, out, _ = told(capfd, ["inspect", in_memory / "s"])
    assert code == 0 and out.count(f"note: {says}") == 1
    caplog.clear()
    memascend.close(memascend.resume(in_memory / "s", allocator="pageable").model)
    assert caplog.text.count(says) == 1
    caplog.clear()
    alone = tiny_models.build("llama")
    memascend.AdamW(alone.parameters(), lr=1e-3, store=in_memory / "s", allocator="pageable").close()
    assert caplog.text.count(says) == 1
    model_dir = tiny_models.llama_directory(in_memory, hidden=64)
    code, _, err = told(capfd, words_of(model_dir, in_memory / "out", in_memory / "s", steps=1))
    assert code == 0 and err.count(f"memascend: note: {says}") == err.count(says) == 1, err


@pytest.mark.root
def test_a_store_on_a_drive_is_not_warned_of(tmp_path: Path) -> None:
    with faults_module.mounted("ext4", faults_module.LEAST_BYTES["ext4"], tmp_path / "drive") as drive:
        assert drives.notices_of([drive.path, drive.path / "to be made", "UUID=0123ABCD"]) == []


@contextmanager
def measuring(place: Path) -> Iterator[faults_module.Child]:
    """Give a process that is measuring a directory."""
    with faults_module.Child(place, _measure_for_long, place) as child:
        deadline = time.monotonic() + 60
        while not list(place.glob(".memascend-bench.*/memascend.volume")):
            assert time.monotonic() < deadline, child.told()
            time.sleep(0.01)
        yield child


def test_sigterm_leaves_nothing_of_a_measurement(tmp_path: Path) -> None:
    with measuring(tmp_path) as child:
        os.kill(child.pid, signal.SIGTERM)
        ended = child.wait()
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert not list(tmp_path.glob(".memascend-bench.*"))


def test_what_a_killed_measurement_has_left_goes_with_the_next(tmp_path: Path) -> None:
    with measuring(tmp_path) as child:
        # That of a living process stays.
        with drives.scratch(tmp_path) as own:
            assert len(list(tmp_path.glob(".memascend-bench.*"))) == 2 and Path(own).is_dir()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    (left,) = tmp_path.glob(".memascend-bench.*")
    with drives.scratch(tmp_path):
        assert not left.exists()


def _measure_for_long(_pipe: Any, place: Path) -> None:
    sys.argv = ["memascend", "bench", str(place), "--size", "16MiB", "--seconds", "1"]
    main.run()
