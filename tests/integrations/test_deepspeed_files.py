"""Files and page-locked memory behind DeepSpeed's operators."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import types
from pathlib import Path
from typing import Any

import deepspeed_run
import faults
import pytest
import torch
from deepspeed_parts import MIB, STREAMS, installed_version

import memascend

pytestmark = pytest.mark.filterwarnings("ignore")


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_options_are_kept(deepspeed: types.ModuleType) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    made = AsyncIOBuilder().load().aio_handle(1 << 17, 64, True, True, 4)
    assert made.get_block_size() == 1 << 17
    assert made.get_queue_depth() == 64
    assert made.get_single_submit() is made.get_overlap_events() is True
    assert made.get_intra_op_parallelism() == 4
    assert made.get_alignment() == 2048


@pytest.mark.parametrize("seed", range(3))
def test_transfers_at_any_offset(handle: Any, tmp_path: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def any_of(most: int) -> int:
        # Short ones, whole pages, and anything.
        most = (16, 4096, 70_000, most)[int(torch.randint(4, (), generator=generator))]
        value = int(torch.randint(most, (), generator=generator))
        return value // 4096 * 4096 if torch.rand((), generator=generator) < 0.3 else value

    file = tmp_path / "file"
    expected = bytearray()
    for turn in range(60):
        offset = min(any_of(3_000_000), len(expected)) if turn % 3 else any_of(3_000_000)
        data = random_bytes(any_of(2_000_000) + 3, seed=turn)[turn % 3 :]
        if turn % 2:
            assert handle.sync_pwrite(data, str(file), offset) == 1
        else:
            assert handle.async_pwrite(data, file, offset) == 0
            assert handle.wait() == 1
        expected.extend(bytes(max(0, offset + data.numel() - len(expected))))
        expected[offset : offset + data.numel()] = data.numpy().tobytes()
        at = min(any_of(len(expected)), len(expected) - 1)
        found = torch.zeros(len(expected) - at, dtype=torch.uint8)
        assert handle.sync_pread(found, str(file), at) == 1
        assert found.numpy().tobytes() == expected[at:]
    assert file.read_bytes() == expected


def test_every_way_to_start_a_transfer(handle: Any, tmp_path: Path) -> None:
    data = torch.arange(5000, dtype=torch.float32)
    path = str(tmp_path / "file")
    assert handle.write(data, path, True) == 0
    assert handle.pwrite(data + 1, path, True, False) == 1
    assert handle.pwrite(data + 2, path, False, True, file_offset=20_000) == 0
    assert handle.pwrite(data + 3, path, False, **{"async": True}, file_offset=40_000) == 0
    assert handle.wait() == 2
    assert handle.wait() == 0
    found = torch.zeros(15_000)
    assert handle.read(found, path, True) == 0
    assert torch.equal(found, torch.cat([data + 1, data + 2, data + 3]))
    found.zero_()
    assert handle.pread(found[:5000], path, True, False, 20_000) == 1
    assert handle.async_pread(found[5000:10_000], path, 0) == 0
    assert handle.pread(found[10_000:], path, True, True, 40_000) == 0
    assert handle.wait() == 2
    assert torch.equal(found, torch.cat([data + 2, data + 1, data + 3]))
    with open(path, "r+b") as file:
        assert handle.async_pwrite(data, fd=file.fileno()) == 0
        assert handle.async_pwrite(data, file.fileno(), 20_000) == 0
        assert handle.wait() == 2
    handle.read(found, path, False)
    assert torch.equal(found, torch.cat([data, data, data + 3]))
    for wrong in (lambda: handle.pread(found, path, True), lambda: handle.async_pwrite(found)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="negative"):
        handle.async_pread(found, path, -1)
    assert handle.wait() == 0


def test_the_functions_of_the_operator(deepspeed: types.ModuleType, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    operator = AsyncIOBuilder().load()
    data, found = torch.arange(1000.0), torch.zeros(1000)
    assert operator.aio_write(data, str(tmp_path / "file"), 1 << 20, 8, False, False, False) == 0
    assert operator.aio_read(found, str(tmp_path / "file"), 1 << 20, 8, False, False, False) == 0
    assert torch.equal(found, data)
    assert operator.deepspeed_memcpy(found, data + 1) == 0
    assert torch.equal(found, data + 1)


def test_tensors_that_are_not_contiguous(handle: Any, tmp_path: Path) -> None:
    whole = torch.arange(600.0).reshape(20, 30)
    for number, view in enumerate((whole.t(), whole[::2], whole[:, 3:7], whole[3:4].expand(5, 30))):
        path = str(tmp_path / str(number))
        assert handle.sync_pwrite(view, path) == 1
        assert Path(path).read_bytes() == view.contiguous().numpy().tobytes()
    target = torch.zeros(20, 30)
    handle.async_pread(target[:, ::3], str(tmp_path / "0"))
    assert handle.wait() == 1
    assert torch.equal(target[:, ::3].reshape(-1), whole.t().reshape(-1)[:200])
    assert not target[:, 1::3].any()
    # A leaf that needs a gradient, and one in bfloat16.
    handle.sync_pread(torch.nn.Parameter(torch.zeros(30, 20)), str(tmp_path / "0"))
    weight = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    handle.sync_pwrite(torch.full((10,), 2.0, dtype=torch.bfloat16), str(tmp_path / "half"))
    handle.sync_pread(weight, str(tmp_path / "half"))
    assert weight.detach().eq(2.0).all()


def test_validation_finds_other_bytes(handle: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = random_bytes(10_000)
    expected = data.numpy().tobytes()
    handle.pwrite(data, str(path), True, True)
    while not path.exists() or path.read_bytes() != expected:
        time.sleep(0.001)
    data[5000] ^= 1
    with pytest.raises(memascend.StoreError, match=str(path)):
        handle.wait()
    assert handle.wait() == 0


def test_transfers_of_the_same_bytes_keep_their_order(handle: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    size = 2 * MIB
    found = [torch.zeros(size, dtype=torch.uint8) for _ in range(20)]
    handle.async_pwrite(torch.full((size,), 255, dtype=torch.uint8), path)
    for number, target in enumerate(found):
        # Over the end of one write and the beginning of another.
        handle.async_pread(target, path, 0)
        handle.async_pwrite(torch.full((size,), number, dtype=torch.uint8), path)
        handle.async_pwrite(torch.full((MIB,), 100 + number, dtype=torch.uint8), path, MIB + 1000)
    handle.async_pread(torch.zeros(10), str(tmp_path / "file"), MIB)
    # Those that were waited for early are counted too.
    assert handle.wait() == 62
    assert found[0].eq(255).all()
    for number, target in enumerate(found[1:]):
        assert target[: MIB + 1000].eq(number).all()
        assert target[MIB + 1000 :].eq(100 + number).all()
    # So are their failures kept.
    missing = str(tmp_path / "missing" / "file")
    for _ in range(3):
        handle.async_pwrite(found[0], missing)
    with pytest.raises(memascend.StoreError, match=missing):
        handle.wait()
    assert handle.wait() == 0


def test_several_handles_and_threads(deepspeed: types.ModuleType, tmp_path: Path) -> None:
    from memascend.integrations.deepspeed.files import AioHandle

    shared = AioHandle()
    failures: list[str] = []
    waited = []

    def work(number: int) -> None:
        own = AioHandle()
        path = str(tmp_path / f"own{number}")
        for turn in range(20):
            data = random_bytes(100_000 + turn, seed=number * 100 + turn)
            own.async_pwrite(data, path, turn * 3)
            shared.async_pwrite(data, str(tmp_path / f"shared{number}-{turn}"))
            if own.wait() != 1:
                failures.append(f"{number} {turn}: count")
            found = torch.zeros_like(data)
            own.sync_pread(found, path, turn * 3)
            if not torch.equal(found, data):
                failures.append(f"{number} {turn}: bytes")
            if turn % 5 == 4:
                waited.append(shared.wait())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waited.append(shared.wait())
    assert failures == []
    assert sum(waited) == 80
    for number in range(4):
        for turn in range(20):
            data = random_bytes(100_000 + turn, seed=number * 100 + turn)
            assert (tmp_path / f"shared{number}-{turn}").read_bytes() == data.numpy().tobytes()


def test_a_handle_that_is_dropped_ends_its_transfers(deepspeed: types.ModuleType, tmp_path: Path) -> None:
    from memascend.integrations.deepspeed.files import AioHandle

    data = random_bytes(32 * MIB)
    expected = data.clone()
    handle = AioHandle()
    for number in range(4):
        handle.async_pwrite(data, str(tmp_path / str(number)))
    handle.async_pread(torch.empty(100), str(tmp_path / "missing"))
    del handle
    gc.collect()
    # Nothing reads it any more.
    data.zero_()
    for number in range(4):
        assert (tmp_path / str(number)).read_bytes() == expected.numpy().tobytes()


def test_errors_name_the_file_and_others_go_on(handle: Any, tmp_path: Path) -> None:
    data, found = random_bytes(50_000), torch.zeros(50_000, dtype=torch.uint8)
    missing = tmp_path / "no such folder" / "file"
    present = tmp_path / "file"
    present.write_bytes(data.numpy().tobytes())
    handle.async_pread(found, str(present))
    handle.async_pwrite(data, str(missing))
    handle.async_pwrite(data, str(tmp_path / "other"))
    with pytest.raises(memascend.StoreError, match=str(missing)) as caught:
        handle.wait()
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(missing)
    # All others have ended, and the next are not troubled.
    assert torch.equal(found, data)
    assert (tmp_path / "other").read_bytes() == data.numpy().tobytes()
    assert handle.wait() == 0
    assert handle.sync_pread(found, str(present)) == 1
    # Transfers that would have followed a failed one are forgotten.
    strided = torch.zeros(2, 50_000, dtype=torch.uint8)[:, ::2]
    handle.async_pread(strided, str(missing))
    handle.pwrite(data, str(missing), True, True)
    with pytest.raises(memascend.StoreError, match=str(missing)):
        handle.wait()
    found.zero_()
    assert handle.sync_pread(found, str(present)) == 1
    assert torch.equal(found, data)
    assert not strided.any()
    # A file that is shorter than the tensor, before and after it was opened.
    for _ in range(2):
        with pytest.raises(memascend.StoreError, match="shorter") as caught:
            handle.sync_pread(torch.zeros(50_001, dtype=torch.uint8), str(present))
        assert caught.value.filename == str(present)
    os.truncate(present, 49_999)
    with pytest.raises(memascend.StoreError, match="shorter") as caught:
        handle.sync_pread(found, str(present))
    assert caught.value.filename == str(present)
    with pytest.raises(memascend.StoreError) as caught:
        handle.sync_pread(found, str(tmp_path))
    assert caught.value.filename == str(tmp_path)


@pytest.mark.root
def test_a_full_drive_is_told_with_its_remedy(
    deepspeed: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from memascend.integrations.deepspeed import files

    def fill(path: str) -> None:
        handle = files.AioHandle()
        data = random_bytes(64 * MIB)
        handle.async_pwrite(data, path)
        with pytest.raises(memascend.StoreError, match=path) as caught:
            handle.wait()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == path
        assert caught.value.hint
        # Room again: the same file and handle go on.
        os.truncate(path, 0)
        assert handle.sync_pwrite(data[:MIB], path) == 1
        assert Path(path).read_bytes() == data[:MIB].numpy().tobytes()

    with faults.mounted("ext4", faults.LEAST_BYTES["ext4"], tmp_path / "drive") as drive:
        # An engine of its own, so that it closes the file.
        with monkeypatch.context() as patch:
            patch.setattr(files, "_engine", None)
            fill(str(drive.path / "file"))
        gc.collect()


@pytest.mark.root
def test_a_drive_that_fails_is_told_with_its_remedy(
    deepspeed: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from memascend.integrations.deepspeed import files
    from memascend.integrations.deepspeed.pinned import PINNED

    def fail(path: str, device: faults.LoopDevice) -> None:
        handle = files.AioHandle()
        # Whole pages of memory and of the file: they do not pass through the kernel's cache.
        data = PINNED.empty(MIB, torch.uint8)
        handle.sync_pwrite(data, path)
        os.sync()
        device.shrink(0)
        for start in (handle.async_pread, handle.async_pwrite):
            start(data, path)
            with pytest.raises(memascend.StoreError, match=path) as caught:
                handle.wait()
            assert caught.value.errno == errno.EIO
            assert caught.value.filename == path
            assert "dmesg" in caught.value.hint
            assert handle.wait() == 0

    with faults.mounted("ext4", faults.LEAST_BYTES["ext4"], tmp_path / "drive") as drive:
        assert drive.device is not None
        with monkeypatch.context() as patch:
            patch.setattr(files, "_engine", None)
            fail(str(drive.path / "file"), drive.device)
        gc.collect()


@pytest.fixture
def pins(deepspeed: types.ModuleType) -> Any:
    if not STREAMS:
        pytest.skip(f"DeepSpeed {installed_version} has no operator for pinned memory")
    from deepspeed.ops.op_builder import PinMemoryBuilder

    return PinMemoryBuilder().load().pin_handle()


def test_views_of_pinned_memory_are_pinned(pins: Any, handle: Any) -> None:
    from memascend.integrations.deepspeed.pinned import PINNED

    held = PINNED.nbytes
    tensor = pins.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.float16))
    assert (tensor.dtype, tensor.numel(), tensor.any().item()) == (torch.float16, 1000, False)
    assert PINNED.nbytes == held + 2000
    for view in (tensor, tensor[500:], tensor[-1:], tensor.view(torch.uint8), tensor.reshape(10, 100).t(), tensor.data):
        assert pins.is_pinned(view)
        # Known to all handles of the process.
        assert handle.is_pinned(view)
    assert not pins.is_pinned(torch.zeros(1000, dtype=torch.float16))
    assert not pins.is_pinned(tensor.clone())
    assert not pins.is_pinned(torch.empty(3, device="meta"))
    # A view keeps it.
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert pins.is_pinned(view)
    del view
    gc.collect()
    assert PINNED.nbytes == held
    assert pins.new_cpu_locked_tensor(0, torch.empty(0)).numel() == 0


def test_pinned_tensors_of_one_piece(pins: Any) -> None:
    from memascend.integrations.deepspeed.pinned import PINNED

    held = PINNED.nbytes
    sizes = [(3, torch.float32), (5000, torch.bfloat16), (4096, torch.uint8), (7, torch.float32)]
    parts = PINNED.carve(sizes)
    assert PINNED.nbytes == held + 4096 + 3 * 4096 + 4096 + 4096
    assert [(part.numel(), part.dtype) for part in parts] == sizes
    assert [part.data_ptr() - parts[0].data_ptr() for part in parts] == [0, 4096, 16384, 20480]
    assert all(part.data_ptr() % 4096 == 0 and pins.is_pinned(part) for part in parts)
    del parts
    gc.collect()
    assert PINNED.nbytes == held


def test_pinned_memory_is_given_up_once(pins: Any) -> None:
    from memascend.integrations.deepspeed.pinned import PINNED

    held = PINNED.nbytes
    tensors = [pins.new_cpu_locked_tensor(5000, torch.empty(0)) for _ in range(3)]
    tensors[1].fill_(3.0)
    assert pins.free_cpu_locked_tensor(tensors[1][1:]) is False
    assert pins.free_cpu_locked_tensor(tensors[1]) is True
    assert pins.free_cpu_locked_tensor(tensors[1]) is False
    assert not pins.is_pinned(tensors[1])
    assert pins.is_pinned(tensors[0])
    assert pins.is_pinned(tensors[2])
    # No reference is left over.
    assert tensors[1].eq(3.0).all()
    assert pins.free_cpu_locked_tensor_by_ptr(tensors[2].data_ptr()) is True
    assert pins.free_cpu_locked_tensor_by_ptr(tensors[2].data_ptr()) is False
    assert pins.free_cpu_locked_tensor(torch.zeros(3)) is False
    assert PINNED.nbytes == held + 20_000
    del tensors
    gc.collect()
    assert PINNED.nbytes == held


def test_freed_memory_goes_back_to_the_system(pins: Any) -> None:
    before = deepspeed_run.memory("VmRSS")
    tensor = pins.new_cpu_locked_tensor(64 * MIB, torch.empty(0, dtype=torch.uint8)).fill_(1)
    assert deepspeed_run.memory("VmRSS") > before + 56 * MIB
    pins.free_cpu_locked_tensor(tensor)
    del tensor
    gc.collect()
    assert deepspeed_run.memory("VmRSS") < before + 8 * MIB
