"""The CUDA kernels of overflow checks and projections: compiled, run on the host, and, marked gpu, on a device."""

from __future__ import annotations

import ctypes
import inspect
import json
import math
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import requirements
import torch
from overflow_cases import BLOCK, DTYPES, FACTORS, SIZES, all_patterns, numbers, same, squares, unscaled_by_torch

from memascend import _memascend
from memascend._memascend import ForTests
from memascend.kernels import launcher
from memascend.optim.overflow import check

ROOT = Path(__file__).resolve().parents[2]


# ---- the CUDA kernels, without a device ---------------------------------------------------------------------


#: Options that CuPy appends for every program.
CUPYS = ("-ftz=true",)


def compiled(architecture: str, *options: str) -> tuple[bytes, str, str]:
    """Return (binary, PTX, the compiler's notes) of the kernels for an architecture."""
    with warnings.catch_warnings():
        # CuPy warns when it finds no CUDA toolkit. NVRTC is all that is needed.
        warnings.simplefilter("ignore")
        requirements.package("cupy")
        from cupy.cuda import nvrtc

        try:
            nvrtc.getVersion()
        except Exception as error:
            requirements.unmet("cupy", f"NVRTC cannot be loaded: {error}")
    program = nvrtc.createProgram(launcher.source(), "memascend.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*launcher.OPTIONS, f"--gpu-architecture={architecture}", *options, *CUPYS))
        log = nvrtc.getProgramLog(program).strip("\0\n ")
        if architecture.startswith("compute"):
            ptx = nvrtc.getPTX(program)
            return b"", ptx.decode() if isinstance(ptx, bytes) else ptx, log
        return nvrtc.getCUBIN(program), "", log
    finally:
        nvrtc.destroyProgram(program)


#: Bytes of shared memory of the kernels that keep more than sums there.
SHARED = {"projection_product": 16 * (66 + 64) * 4, "overflow_block_sums": 8 * 32 * 16 + 256}


def test_denormals_are_not_flushed() -> None:
    """As on the CPU. No instruction of the kernels is one that flushes them."""
    _, ptx, _ = compiled("compute_90")
    assert ".entry overflow_unscale" in ptx
    assert not re.findall(r"\S*\.ftz\S*", ptx)


def test_cupy_appends_what_is_appended_here() -> None:
    requirements.package("cupy")
    from cupy.cuda import compiler

    assert "options += ('-ftz=true',)" in inspect.getsource(compiler._compile_with_cache_cuda)


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_the_kernels_compile_without_spills(architecture: int) -> None:
    binary, _, notes = compiled(f"sm_{architecture}", "--ptxas-options=-v")
    assert binary[:4] == b"\x7fELF"
    compilations = notes.split("Compiling entry function '")[1:]
    found = {properties.partition("'")[0]: properties for properties in compilations}
    assert found.keys() == set(launcher.KERNELS)
    for name, properties in found.items():
        assert name.encode() in binary
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in properties, (name, properties)
        (registers,) = map(int, re.findall(r"Used (\d+) registers", properties))
        # Three blocks of 256 threads on a processor at least.
        assert registers <= 80, (name, registers)
        shared = int((re.findall(r"(\d+) bytes smem", properties) or ["0"])[0])
        assert shared <= SHARED.get(name, 2100), (name, shared)
    assert "warning" not in notes


def test_vectors_are_loaded_from_global_memory() -> None:
    """Not by loads that find out where an address lies, which PTX writes without a state space."""
    _, ptx, _ = compiled("compute_90")
    accesses = re.findall(r"\b((?:ld|st)\.\S*v4\.\S+)", ptx)
    assert len(accesses) > 100
    assert all(".global." in access or ".shared." in access for access in accesses), set(accesses)


@pytest.mark.parametrize(("rows", "columns"), [(64, 16), (128, 300), (4, 100)])
def test_stores_of_a_projection_have_banks_of_their_own(rows: int, columns: int) -> None:
    """Where channels are rows, and where they are columns: 32 threads store to 32 banks at once."""
    constants = {name: value for name, value in re.findall(r"\b(SIDE|DEEP|STEP) = ([^,;]+)[,;]", launcher.source())}
    side, deep = int(constants["SIDE"]), int(constants["DEEP"])
    assert constants["STEP"] == "SIDE + 32 / DEEP"
    step = side + 32 // deep
    for first in range(0, deep * side, 32):
        threads = range(first, first + 32)
        if rows < columns:
            stores = [(at // side, at % side) for at in threads]
        else:
            stores = [(at % deep, at // deep) for at in threads]
        assert len({(down * step + beside) % 32 for down, beside in stores}) == 32


@pytest.mark.parametrize(("built_for", "extra"), [("12.4", "cuda12"), ("13.2", "cuda13"), (None, "cuda13")])
def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, built_for: str | None, extra: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(ImportError, match=rf"memascend\[{extra}\]"):
        launcher.check(torch.device("cuda", 0), [], False, None)
    launcher.has_cupy.cache_clear()
    assert not launcher.has_cupy()
    monkeypatch.undo()
    launcher.has_cupy.cache_clear()


def test_cupy_is_given_torchs_stream() -> None:
    cupy = requirements.package("cupy")

    class Torchs:
        def __init__(self, handle: int) -> None:
            self.cuda_stream = handle

    for handle, expected in ((0x7F00, 0x7F00), (0, cupy.cuda.runtime.streamLegacy)):
        stream = cupy.cuda.Stream.from_external(launcher._Stream(Torchs(handle)))
        assert stream.ptr == expected
    # Types of the kernels' parameters, as wide as CuPy passes them.
    from cupy._core._scalar import CScalar

    assert {CScalar(number).dtype for number in (0, 1, 2**31, 2**47)} == {np.dtype(np.int64)}


class Host:
    """The kernels compiled for the host from the source that ships, and called as `launcher.check` calls them."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.atomics = 0

    def check(
        self, tensors: list[torch.Tensor], norm: bool = False, unscale: float | None = None, grid: int = 3
    ) -> tuple[bool, float | None]:
        table, chunks = launcher.rows(tensors)
        rows = np.array(table, dtype=np.int64).reshape(-1, launcher.ROW)
        flag = np.zeros(1, np.float32)
        slots, total = np.full(max(chunks, 1), 1e300), np.zeros(1)
        factor = None if unscale is None else np.array([unscale], np.float32)

        def pointer(array: np.ndarray | None) -> ctypes.c_void_p:
            return ctypes.c_void_p(None if array is None else array.ctypes.data)

        self.atomics = self._library.check(
            pointer(rows),
            ctypes.c_ulonglong(len(rows)),
            ctypes.c_ulonglong(chunks),
            ctypes.c_uint(grid),
            pointer(flag),
            pointer(slots),
            pointer(total if norm else None),
            pointer(factor),
        )
        assert flag[0] in (0.0, 1.0)
        return bool(flag[0]), float(total[0]) if norm else None

    def block_sums(self, tensor: torch.Tensor) -> tuple[np.ndarray, int]:
        """Return the bits of the blocks' sums of squares, and the flag."""
        blocks = -(-tensor.numel() // BLOCK)
        sums, flag = np.full(blocks + 1, 1e300), np.zeros(1, np.int32)
        self._library.block_sums(
            ctypes.c_ulonglong(tensor.data_ptr()),
            ctypes.c_ulonglong(tensor.numel()),
            ctypes.c_ulonglong(launcher.DTYPES[tensor.dtype]),
            ctypes.c_void_p(sums.ctypes.data),
            ctypes.c_void_p(flag.ctypes.data),
        )
        assert sums[blocks] == 1e300, "nothing is written behind the sums"
        return sums[:blocks].view(np.uint64), int(flag[0])

    def project(self, gradient: torch.Tensor, projection: _memascend.Projection) -> torch.Tensor:
        """Return the result of `launcher.project` for a gradient, (rows, columns)."""
        depth = min(gradient.shape)
        matrix = torch.full((depth * projection.rank + 1,), 1e30)
        numbers = torch.full((projection.numbers + 1,), 1e30)
        of_gradient = (gradient.data_ptr(), launcher.DTYPES[gradient.dtype], *gradient.shape)
        sums = numbers.data_ptr() + projection.channels * projection.rank * 4
        launches = launcher.launches_of_projection(
            of_gradient,
            rank=projection.rank,
            key=projection.key,
            matrix=matrix.data_ptr(),
            projected=numbers.data_ptr(),
            sums=sums,
        )
        assert launches[0][2] == (projection.key, depth, projection.rank, matrix.data_ptr())
        given = (*of_gradient, projection.rank, projection.key, matrix.data_ptr(), numbers.data_ptr(), sums)
        words = (ctypes.c_ulonglong * len(given))(*given)
        for number, (_, grid, _) in enumerate(launches):
            self._library.project(words, ctypes.c_uint(number), ctypes.c_uint(grid))
        assert float(matrix[-1]) == float(numbers[-1]) == float(torch.tensor(1e30)), "nothing is written behind them"
        return numbers[:-1]

    def convert(self, dtype: torch.dtype, bits: np.ndarray, rounding: bool) -> np.ndarray:
        """Return the fp32 bits of values, or fp32 bits rounded to a dtype's."""
        source, target = np.ascontiguousarray(bits, np.uint32), np.empty(bits.size, np.uint32)
        self._library.convert(
            ctypes.c_ulonglong(launcher.DTYPES[dtype]),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_void_p(target.ctypes.data),
            ctypes.c_size_t(bits.size),
            int(rounding),
        )
        return target


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        requirements.unmet("compiler", "a C++ compiler compiles the CUDA source for the host, and there is none")
    library = tmp_path_factory.mktemp("host") / "overflow.so"
    shim = Path(__file__).with_name("cuda_on_host.cpp")
    (library.parent / "memascend.cu").write_text(launcher.source())
    # The source reads 16 bytes at a time. Inexact operations are fused only where the source says so.
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wno-unknown-pragmas"]
    flags += ["-ffp-contract=off"]
    source = f'-DSOURCE="{library.parent / "memascend.cu"}"'
    subprocess.run([compiler, *flags, source, str(shim), "-o", str(library)], check=True)
    return Host(library)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_sum_every_size_and_alignment(host: Host, dtype: torch.dtype) -> None:
    for size in (1, 3, 8, 9, 255 * 8 + 5, 2048 * 4 + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 2047):
        aligned = numbers(size, dtype, size)
        found, total = host.check([aligned], norm=True)
        assert not found and total == pytest.approx(squares(aligned), rel=1e-13)
        assert not host.check([aligned])[0]
        for offset in (1, 3):
            shifted = torch.empty(size + offset, dtype=dtype)[offset:].copy_(aligned)
            assert shifted.data_ptr() % 16
            assert host.check([shifted], norm=True) == (False, total), "the sum does not depend on the alignment"


def test_the_kernels_sum_lists_on_any_grid(host: Host) -> None:
    tensors = [numbers(size, dtype, seed) for seed, size in enumerate(SIZES) for dtype in DTYPES]
    results = {host.check(tensors, norm=True, grid=grid) for grid in (1, 2, 7, 64)}
    assert len(results) == 1, "the sum does not depend on the grid"
    found, total = results.pop()
    assert not found and total == pytest.approx(squares(*tensors), rel=1e-13)
    # More slots than the threads that add them.
    many = [numbers(3, torch.float32, seed) for seed in range(600)]
    assert host.check(many, norm=True)[1] == pytest.approx(squares(*many), rel=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_judge_every_pattern(host: Host, dtype: torch.dtype) -> None:
    patterns = all_patterns(dtype)
    finite = patterns[torch.isfinite(patterns)]
    found, total = host.check([finite], norm=True)
    assert not found and total == pytest.approx(squares(finite), rel=1e-13)
    tensor = numbers(64, dtype)
    for offset in (0, 1):
        # In the first half of a word, in the second, and in the elements behind the last vector.
        for position in (10, 11, 62 - offset):
            view = tensor[offset : 63 + offset]
            for pattern in patterns[:: len(patterns) // 512 + 1]:
                view[position] = pattern
                assert host.check([view], grid=1)[0] == (not torch.isfinite(pattern)), pattern
            view[position] = 0
    bad = patterns[~torch.isfinite(patterns)]
    for pattern in (bad[0], bad[-1], bad[len(bad) // 2]):
        tensor[17] = pattern
        found, total = host.check([numbers(5, dtype), tensor], norm=True)
        assert found and math.isnan(total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_convert_exactly(host: Host, dtype: torch.dtype) -> None:
    patterns = all_patterns(dtype)
    bits = patterns.view(torch.int32 if dtype == torch.float32 else torch.int16).numpy()
    bits = bits.astype(np.int64).astype(np.uint32) & (0xFFFFFFFF if dtype == torch.float32 else 0xFFFF)
    widened = torch.from_numpy(host.convert(dtype, bits, False).view(np.float32))
    assert same(widened, patterns.float())
    # Every fp32 exponent, and the neighbourhood of every rounding boundary of the 16-bit types.
    generator = np.random.default_rng(1)
    wide = np.concatenate(
        [
            all_patterns(torch.float32).view(torch.int32).numpy().view(np.uint32),
            generator.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32),
            *(
                generator.integers(0, 2**19, 100_000, dtype=np.uint64).astype(np.uint32) * 2**13 + np.uint32(d % 2**32)
                for d in (-1, 0, 1, 0x1000, 0xFFF, 0x1001)
            ),
            *((np.arange(2**16, dtype=np.uint32) << 16) + np.uint32(d) for d in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)),
        ]
    )
    rounded = host.convert(dtype, wide, True)
    values = torch.from_numpy(wide.view(np.float32))
    mine = (
        torch.from_numpy(rounded.view(np.int32)).to(torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)
    )
    assert same(mine, values.to(dtype))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_unscale_as_the_cpu_does(host: Host, dtype: torch.dtype, factor: float) -> None:
    patterns = all_patterns(dtype)
    tensors = [numbers(size, dtype, size, size % 3) for size in SIZES]
    for source in (tensors, [patterns], [patterns[1:]]):
        mine, theirs, sums = (
            [t.clone() if t.data_ptr() % 16 == 0 else torch.cat([t[:1], t])[1:] for t in source] for _ in range(3)
        )
        expected = check(theirs, norm=True, unscale=factor)
        assert host.check(mine, unscale=factor)[0] == expected.found_inf
        found, total = host.check(sums, norm=True, unscale=factor)
        assert found == expected.found_inf
        assert total == pytest.approx(expected.sum_squares, rel=1e-13, nan_ok=True)
        for a, b, c in zip(mine, theirs, sums, strict=True):
            assert same(a, b) and same(c, b)


def test_a_found_flag_stops_the_chunks_after_it(host: Host) -> None:
    tensor = torch.zeros(40 * BLOCK)
    tensor[::BLOCK] = math.nan
    assert host.check([tensor], grid=4)[0] and host.atomics == 1, "the others saw the flag before they began"
    result, _ = host.check([tensor], unscale=1.0, grid=4)
    assert result and host.atomics == 40, "what is unscaled is unscaled to the end, and each chunk says so once"


def stats_of_blocks(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """Return the bits of each block's sum of squares by the CPU's kernels, and 1 if any element is not finite."""
    found = [
        _memascend.gradient_stats(str(part.dtype).removeprefix("torch."), part.numel(), part.data_ptr())
        for part in tensor.flatten().split(BLOCK)
        if part.numel()
    ]
    return np.array([total for total, _ in found], np.float64).view(np.uint64), int(any(bad for _, bad in found))


def assert_same_sums(mine: tuple[np.ndarray, int], theirs: tuple[np.ndarray, int]) -> None:
    assert mine[1] == theirs[1]
    np.testing.assert_array_equal(mine[0], theirs[0])


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sums_are_the_cpus_to_the_bit(host: Host, dtype: torch.dtype, offset: int) -> None:
    # In tiles of 1,024 or 2,048 elements: whole ones, with rows behind them, with a part of a row.
    for size in (0, 1, 31, 32, 33, 1023, 1024, 1025, 2048, 2049, 5000, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 4321):
        tensor = numbers(size, dtype, size, offset)
        result = host.block_sums(tensor)
        assert_same_sums(result, stats_of_blocks(tensor))
        assert not result[1]
        # A sum in another order has other bits: so this compares the order too.
        if size == 5 * BLOCK + 4321:
            reversed_rows = tensor[: 5 * BLOCK].view(5, -1).flip(1).contiguous()
            assert (host.block_sums(reversed_rows)[0] != result[0][:5]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sums_of_every_pattern_and_of_extremes(host: Host, dtype: torch.dtype) -> None:
    patterns = all_patterns(dtype)
    assert_same_sums(host.block_sums(patterns), stats_of_blocks(patterns))
    finite = patterns[torch.isfinite(patterns)]
    assert_same_sums(host.block_sums(finite), stats_of_blocks(finite))
    assert not host.block_sums(finite)[1]
    largest = torch.full((2 * BLOCK,), torch.finfo(dtype).max, dtype=dtype)
    assert_same_sums(host.block_sums(largest), stats_of_blocks(largest))
    assert not host.block_sums(largest)[1], "the squares of finite elements do not overflow"
    for bad in (math.inf, -math.inf, math.nan):
        for position in (0, 31, 32, 2047, 2048, BLOCK - 1, BLOCK, BLOCK + 2999):
            tensor = numbers(BLOCK + 3000, dtype)
            tensor[position] = bad
            result = host.block_sums(tensor)
            assert result[1] == 1
            assert_same_sums(result, stats_of_blocks(tensor))
            sums = result[0].view(np.float64)
            assert [math.isfinite(s) for s in sums] == [position >= BLOCK, position < BLOCK]


SHAPES = [(1, 1), (3, 5), (5, 3), (64, 64), (65, 17), (17, 130), (200, 96), (96, 200), (257, 33)]


def projected_on_host(gradient: torch.Tensor, projection: _memascend.Projection) -> torch.Tensor:
    """Return the projection by the CPU's kernels, as bits."""
    numbers = torch.empty(projection.numbers)
    ForTests.write_projected(
        projection.of(str(gradient.dtype).removeprefix("torch."), gradient.data_ptr(), 1), numbers.data_ptr()
    )
    return numbers.view(torch.int32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_projections_are_the_cpus_to_the_bit(host: Host, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, columns = shape
    gradient = numbers(rows * columns, dtype, rows).view(rows, columns)
    gradient[rows // 2, columns // 2] = -0.0 if rows * columns > 1 else 1.5
    for rank, seed in ((1, 3), (4, 2**63 + 5), (70, 11)):
        projection = _memascend.Projection(rows, columns, rank, seed, 2)
        mine = host.project(gradient, projection)
        assert torch.equal(mine.view(torch.int32), projected_on_host(gradient, projection))
        assert mine[: projection.channels * rank].abs().max() > 0


def test_the_random_matrix_is_the_cpus_to_the_bit(host: Host) -> None:
    # Of a gradient that picks one element of each channel, the projection is the matrix itself. Ranks enough for both
    # branches of the quantile function, and for its tails.
    depth, rank = 96, 2048
    gradient = torch.eye(depth)
    projection = _memascend.Projection(depth, depth, rank, 7, 0)
    mine = host.project(gradient, projection)[: depth * rank]
    assert torch.equal(mine, torch.tensor(ForTests.random_matrix(projection)))
    deviations = mine * rank**0.5
    assert deviations.abs().max() > 4, "there are tails"


# ---- on a device --------------------------------------------------------------------------------------------


@pytest.mark.gpu
class TestDevice:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("offset", [0, 1, 3])
    def test_sizes_and_alignments(self, dtype: torch.dtype, offset: int) -> None:
        tensors = [numbers(size + offset, dtype, size).cuda()[offset:] for size in (*SIZES, 5 * 10**6 + 3)]
        for tensor in tensors:
            result = check(tensor, norm=True)
            reference = float((tensor.double() ** 2).sum())
            assert not result.found_inf and result.sum_squares == pytest.approx(reference, rel=1e-12)
        result = check(tensors, norm=True)
        assert result.sum_squares == check(tensors, norm=True).sum_squares, "the same to the bit"
        foreach = torch.stack(torch._foreach_norm([t.double() for t in tensors if t.numel()])).norm().item()
        assert result.norm == pytest.approx(foreach, rel=1e-12)
        plain = torch.stack([n.double() for n in torch._foreach_norm([t for t in tensors if t.numel()])]).norm()
        assert result.norm == pytest.approx(plain.item(), rel=1e-2 if dtype != torch.float32 else 1e-5)

    @pytest.mark.parametrize("shape", [*SHAPES, (1024, 2816), (4096, 1024)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_projections(self, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        rows, columns = shape
        gradient = numbers(rows * columns, dtype, rows).view(rows, columns)
        for rank in (1, 70, 256):
            projection = _memascend.Projection(rows, columns, rank, 2**63 + rank, 2)
            mine = torch.empty(projection.numbers, device="cuda")
            launcher.project(gradient.cuda(), projection, mine)
            assert torch.equal(mine.cpu().view(torch.int32), projected_on_host(gradient, projection))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_host_has_the_same_sum(self, host: Host, dtype: torch.dtype) -> None:
        tensors = [numbers(size, dtype, size) for size in SIZES]
        assert check([t.cuda() for t in tensors], norm=True).sum_squares == host.check(tensors, norm=True)[1]

    @pytest.mark.parametrize("factor", FACTORS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_unscaling(self, dtype: torch.dtype, factor: float) -> None:
        finite = all_patterns(dtype)
        finite = finite[torch.isfinite(finite)]
        for tensors in ([finite], [all_patterns(dtype)], [numbers(size, dtype, size, 1) for size in SIZES[1:]]):
            mine = [t.cuda() for t in tensors]
            theirs = [t.cuda() for t in tensors]
            result = check(mine, norm=True, unscale=torch.tensor(factor, device="cuda"))
            assert result.found_inf == bool(unscaled_by_torch(theirs, factor))
            for a, b in zip(mine, theirs, strict=True):
                assert same(a.cpu(), b.cpu())
            again = [t.cuda() for t in tensors]
            assert check(again, unscale=factor).found_inf == result.found_inf
            assert all(same(a.cpu(), b.cpu()) for a, b in zip(again, mine, strict=True))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_pattern(self, dtype: torch.dtype) -> None:
        patterns = all_patterns(dtype)
        tensor = numbers(101, dtype).cuda()
        for pattern in patterns[:: len(patterns) // 300 + 1].tolist():
            tensor[50] = pattern
            assert check(tensor).found_inf == (not math.isfinite(pattern)), pattern
            assert bool(check(tensor).found_inf_tensor.item()) == (not math.isfinite(pattern))

    def test_nothing_waits_before_it_is_asked(self) -> None:
        tensors = [torch.ones(1000, device="cuda") for _ in range(20)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # The kernels are compiled and loaded now, and memory for the stream is allocated.
            torch.cuda._sleep(1)
            check([tensor.fill_(1) for tensor in tensors], norm=True).norm  # noqa: B018
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)
            for tensor in tensors:
                tensor.fill_(2)
            result = check(tensors, norm=True)
            flag = result.found_inf_tensor
            assert not stream.query(), "the check waited for the stream"
        # Read on another stream than it was launched on.
        assert result.sum_squares == 80_000.0, "it was read before its stream had written it"
        assert flag.device.type == "cuda" and flag.item() == 0.0

    def test_lists_of_both_devices(self) -> None:
        host, device = numbers(1000, torch.float32), numbers(2000, torch.bfloat16).cuda()
        result = check([host, device], norm=True)
        assert result.sum_squares == pytest.approx(squares(host, device.cpu()), rel=1e-12)
        assert result.found_inf_tensor.device == device.device
        host[5] = math.inf
        result = check([host, device])
        assert result.found_inf_tensor.item() == 1.0 and result.found_inf
        host[5], device[7] = 0, math.nan
        result = check([host, device], norm=True)
        assert result.found_inf and math.isnan(result.norm)

    def test_the_benchmark_runs(self, tmp_path: Path) -> None:
        run_benchmark(tmp_path)


def run_benchmark(tmp_path: Path) -> dict:
    script = ROOT / "benches" / "overflow.py"
    command = [sys.executable, str(script), "--elements", "1", "--repeats", "1", "--gpu-gib", "0.01"]
    done = subprocess.run([*command, "--json", str(tmp_path / "out.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "out.json").read_text())


def test_the_benchmark_runs(tmp_path: Path) -> None:
    record = run_benchmark(tmp_path)
    assert {row["dtype"] for row in record["cpu"]} == {"float32", "float16", "bfloat16"}
    assert all(row["check"] > 0 and row["norm"] > 0 and row["isinf_isnan"] > 0 for row in record["cpu"])
