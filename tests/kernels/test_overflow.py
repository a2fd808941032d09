"""The overflow check: CPU tensors, the CUDA kernels compiled and run on the host, and, marked gpu, on a device."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import needs
import numpy as np
import pytest
import tiny
import torch

import memascend
from memascend import _memascend
from memascend.kernels import launcher
from memascend.optim.overflow import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 65_536
SIZES = (0, 1, 2, 3, 7, 31, 33, 1023, 2048, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 129)
#: Factors of which every product is exact, or rounded, or underflows.
FACTORS = (1.0, 2.0**-16, 1 / 3, 3.5)
MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]


def numbers(numel: int, dtype: torch.dtype, seed: int = 0, offset: int = 0) -> torch.Tensor:
    """Finite values over many magnitudes, `offset` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(numel + offset, generator=generator)
    wide *= 2.0 ** torch.randint(-20, 6, wide.shape, generator=generator)
    return wide.to(dtype)[offset:]


def squares(*tensors: torch.Tensor) -> float:
    """The reference: every square exact, added without rounding."""
    return math.fsum(square for tensor in tensors for square in (tensor.double() ** 2).flatten().tolist())


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a 16-bit type; of fp32 every exponent with awkward mantissas, and both signs."""
    if dtype != torch.float32:
        return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    mantissas = [0, 1, 0x400000, 0x3FFFFF, 0x7FFFFF, 0x7FE000, 0x001000, 0x555555]
    bits = [sign << 31 | exponent << 23 | low for sign in (0, 1) for exponent in range(256) for low in mantissas]
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, a NaN to a NaN, and zeros by their sign."""
    numbers_of_a, numbers_of_b = (torch.where(t.isnan(), 0, t) for t in (a, b))
    return (
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(numbers_of_a, numbers_of_b)
        and torch.equal(numbers_of_a.signbit(), numbers_of_b.signbit())
    )


def unscaled_by_torch(tensors: list[torch.Tensor], factor: float) -> float:
    """Unscale in place as torch's gradient scaler does; return what it found."""
    found = torch.zeros(1, device=tensors[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, torch.full((1,), factor, device=found.device))
    return found.item()


# ---- CPU tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_finite_tensors_have_their_sum_and_nothing_is_found(dtype: torch.dtype, offset: int) -> None:
    for size in SIZES:
        tensor = numbers(size, dtype, size, offset)
        before = tensor.clone()
        result = check(tensor, norm=True)
        assert result.found_inf is False and not result
        assert result.sum_squares == pytest.approx(squares(tensor), rel=1e-13)
        assert result.norm == math.sqrt(result.sum_squares)
        assert torch.equal(tensor, before)
        assert check(tensor).found_inf is False


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_every_pattern_is_judged_as_torch_judges_it(dtype: torch.dtype, norm: bool) -> None:
    patterns = all_patterns(dtype)
    # One at a time, among numbers that are finite.
    for position in (0, 36):
        tensor = numbers(37, dtype)
        for pattern in patterns if dtype == torch.float32 else patterns[::7]:
            tensor[position] = pattern
            assert check(tensor, norm=norm).found_inf == (not torch.isfinite(pattern)), pattern
    finite = patterns[torch.isfinite(patterns)]
    result = check(finite, norm=True)
    assert not result.found_inf and result.sum_squares == pytest.approx(squares(finite), rel=1e-13)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    tensor = numbers(2 * BLOCK + 77, dtype)
    for position in (0, 1, 31, 32, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 76):
        kept = tensor[position].clone()
        tensor[position] = bad
        for threads in (1, 3):
            assert check(tensor, threads=threads).found_inf, position
            result = check([numbers(9, dtype), tensor], norm=True, threads=threads)
            assert result.found_inf and math.isnan(result.sum_squares) and math.isnan(result.norm)
        tensor[position] = kept
    assert not check(tensor).found_inf


def test_a_list_is_the_sum_of_its_tensors_on_any_number_of_threads() -> None:
    tensors = [numbers(size, dtype, seed) for seed, size in enumerate(SIZES) for dtype in DTYPES]
    expected = sum((check(tensor, norm=True).sum_squares for tensor in tensors), 0.0)
    for threads in (1, 2, 3, 8, 33):
        assert check(iter(tensors), norm=True, threads=threads).sum_squares == expected
    assert expected == pytest.approx(squares(*tensors), rel=1e-13)
    foreach = torch.stack(torch._foreach_norm([t.double() for t in tensors if t.numel()])).norm().item()
    assert math.sqrt(expected) == pytest.approx(foreach, rel=1e-13)


def test_the_norm_is_that_of_clipping() -> None:
    parameters = [torch.nn.Parameter(numbers(size, torch.float32, size)) for size in SIZES[1:]]
    for parameter in parameters:
        parameter.grad = numbers(parameter.numel(), torch.float32, parameter.numel() + 1)
    norm = check([p.grad for p in parameters], norm=True).norm
    assert memascend.AdamW(parameters).clip_grad_norm_(1.0).item() == np.float32(norm)


def test_nothing_at_all() -> None:
    for nothing in ([], [torch.empty(0)], [torch.empty(3, 0, dtype=torch.bfloat16)] * 2):
        result = check(nothing, norm=True)
        assert (result.found_inf, result.sum_squares, result.norm) == (False, 0.0, 0.0)
        assert not check(nothing, unscale=2.0).found_inf
    assert check(torch.tensor(3.0), norm=True).norm == 3.0
    assert check([torch.tensor(math.inf)]).found_inf_tensor.item() == 1.0
    assert check([torch.tensor(1.0)]).found_inf_tensor.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype: torch.dtype) -> None:
    base = numbers(6 * 5 * 8, dtype).view(6, 5, 8)
    views = [
        base.transpose(0, 2),
        base[:, 1:3],
        base[:, :, ::2],
        base[2],
        base[0, 0, 0],
        base.view(1, 6, 1, 5, 8).permute(4, 0, 2, 1, 3),
        base[:, :1].expand(6, 7, 8),
        base.as_strided((4, 4), (1, 2)),
    ]
    for view in views:
        assert check(view, norm=True).sum_squares == pytest.approx(squares(view), rel=1e-13)
        if 0 not in [stride for n, stride in zip(view.shape, view.stride(), strict=True) if n > 1]:
            whole, expected = base.clone(), base.clone()
            mine, theirs = (b.as_strided(view.shape, view.stride(), view.storage_offset()) for b in (whole, expected))
            check(mine, unscale=0.5)
            theirs.copy_(theirs * 0.5)
            assert torch.equal(whole, expected), "what lies between the view's elements is left alone"
    # An infinity between the elements of a view is not the view's.
    hole = base.clone()
    hole[:, 0] = math.inf
    assert not check(hole[:, 1:]).found_inf and check(hole).found_inf


# ---- unscaling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unscaling_is_that_of_torch(dtype: torch.dtype, factor: float) -> None:
    finite = all_patterns(dtype)
    finite = finite[torch.isfinite(finite)]
    for tensors in ([finite], [all_patterns(dtype)], [numbers(size, dtype, size, 1) for size in SIZES[1:]]):
        mine, theirs = ([t.clone() for t in tensors] for _ in range(2))
        result = check(mine, norm=True, unscale=factor, threads=2)
        assert result.found_inf == bool(unscaled_by_torch(theirs, factor))
        for a, b in zip(mine, theirs, strict=True):
            assert same(a, b)
        if not result.found_inf and all(bool(t.isfinite().all()) for t in mine):
            assert result.sum_squares == pytest.approx(squares(*mine), rel=1e-13)


def test_the_factor_may_be_a_tensor_and_what_overflows_was_not_found() -> None:
    tensor = torch.full((40,), 60_000.0, dtype=torch.float16)
    result = check(tensor, norm=True, unscale=torch.tensor([2.0], dtype=torch.float64))
    assert not result.found_inf and result.sum_squares == math.inf
    assert torch.isinf(tensor).all()
    with pytest.raises(ValueError, match="one element"):
        check(tensor, unscale=torch.ones(2))


def test_autograd_is_told() -> None:
    weight = torch.ones(8, requires_grad=True)
    product = (weight * weight).sum()
    assert check(weight, norm=True).norm == math.sqrt(8)
    product.backward(retain_graph=True)
    check(weight, unscale=0.5)
    assert torch.equal(weight.detach(), torch.full((8,), 0.5)) and weight.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        inference = torch.ones(3)
    check(inference, unscale=0.5)
    assert inference[0] == 0.5


# ---- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(3, dtype=torch.float64), "dtype float64"),
        (torch.ones(3, dtype=torch.int32), "dtype int32"),
        (torch.ones(3, dtype=torch.complex64), "dtype complex64"),
        (torch.ones(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(3, device="meta"), "on meta"),
        (None, "NoneType"),
        ([1.0], "a list"),
    ],
)
def test_what_cannot_be_checked_is_named(tensor: object, words: str) -> None:
    first = torch.ones(3)
    with pytest.raises(ValueError, match=r"tensors\[1\].*" + words):
        check([first, tensor], unscale=0.5)  # type: ignore[list-item]
    assert torch.equal(first, torch.ones(3)), "nothing was changed"


def test_unscaling_refuses_shared_memory() -> None:
    tensor = torch.ones(100)
    for other in (tensor, tensor[50:], tensor[99:], tensor[::2]):
        with pytest.raises(ValueError, match=r"tensors\[2\] shares memory with tensors\[0\]"):
            check([tensor, torch.ones(1), other], unscale=0.5)
    with pytest.raises(ValueError, match=r"tensors\[0\] is expanded"):
        check(torch.ones(1).expand(5), unscale=0.5)
    assert torch.equal(tensor, torch.ones(100))
    assert not check([tensor, tensor]).found_inf
    check([tensor[:50], tensor[50:]], unscale=0.5)
    assert torch.equal(tensor, torch.full((100,), 0.5))


def test_the_sum_must_have_been_asked_for() -> None:
    with pytest.raises(ValueError, match="norm=True"):
        _ = check(torch.ones(1)).norm
    with pytest.raises(ValueError, match="threads"):
        check(torch.ones(1), threads=0)


# ---- offloaded models ---------------------------------------------------------------------------------------


def test_kept_gradients_are_judged_by_what_was_recorded(offloaded: Callable[..., nn.Module]) -> None:
    model, ordinary = tiny.build("llama"), tiny.build("llama")
    offloaded(model)
    for each in (model, ordinary):
        each(**tiny.batch("llama", 0)).loss.backward()
    extra = numbers(1000, torch.float32)
    kept = check([extra, *(p.grad for p in model.parameters())], norm=True)
    plain = check([extra, *(p.grad for p in ordinary.parameters())], norm=True)
    assert not kept.found_inf and kept.sum_squares == plain.sum_squares > 0
    parameter = next(iter(model.parameters()))
    assert not check(parameter.grad.detach()).found_inf
    with pytest.raises(ValueError, match=r"tensors\[1\] is the gradient of .* cannot be unscaled"):
        check([extra.clone(), parameter.grad], unscale=0.5)
    with pytest.raises(ValueError, match="pass it whole"):
        check(parameter.grad[:1])
    gradient = parameter.grad
    parameter.grad = None
    with pytest.raises(ValueError, match="discarded"):
        check(gradient)


def test_an_overflowed_kept_gradient_is_found(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny.build("llama"))
    (model(**tiny.batch("llama", 0)).loss * math.inf).backward()
    gradients = [p.grad for p in model.parameters()]
    assert check(gradients).found_inf and math.isnan(check(gradients, norm=True).norm)
    # Filled, a marker is what it shows.
    model.zero_grad(set_to_none=False)
    assert check([p.grad for p in model.parameters()], norm=True).norm == 0.0


def test_absent_weights_are_refused(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny.build("llama"))
    with pytest.raises(ValueError, match="weights are not in memory"):
        check(model.parameters())
    memascend.close(model)
    gc.collect()


# ---- memory -------------------------------------------------------------------------------------------------

MEMORY = """
import re, sys
import torch
from pathlib import Path
from memascend.optim.overflow import check

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def growth(call):
    # 5 sets the peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    call()
    return peak() - before

torch.set_num_threads(2)
MIB = 2**20
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    tensor = torch.ones(64 * MIB // dtype.itemsize, dtype=dtype)
    small = tensor[:MIB]
    for options in ({}, {"norm": True}, {"unscale": 1.0, "norm": True}):
        check(small, **options)
        grown = growth(lambda: check(tensor, **options))
        assert grown < MIB, f"{dtype}, {options}: {grown} bytes"
    grown = growth(lambda: torch.isinf(tensor).any() | torch.isnan(tensor).any())
    assert grown > 15 * MIB, f"this would not have noticed {grown} bytes"
    del tensor, small
"""


def test_no_memory_is_taken() -> None:
    """Counted by the kernel, as the process's peak; the Rust tests count what the allocator is asked for."""
    done = subprocess.run([sys.executable, "-P", "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_ends_at_the_first_block() -> None:
    tensor = torch.zeros(100 * BLOCK)
    for position, blocks in ((5, 1), (3 * BLOCK, 4), (None, 100)):
        if position is not None:
            tensor[position] = math.inf
        found, _, read = _memascend.check_overflow([("float32", tensor.numel(), tensor.data_ptr())], False, None, 1)
        assert (found, read) == (position is not None, blocks)
        tensor.zero_()


# ---- the CUDA kernels, without a device ---------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_kernels_compile(architecture: int) -> None:
    with warnings.catch_warnings():
        # CuPy warns when it finds no CUDA toolkit. NVRTC is all that is needed.
        warnings.simplefilter("ignore")
        needs.package("cupy")
        from cupy.cuda import nvrtc

        try:
            nvrtc.getVersion()
        except Exception as error:
            needs.unmet("cupy", f"NVRTC cannot be loaded: {error}")
    program = nvrtc.createProgram(launcher.SOURCE.read_text(), launcher.SOURCE.name, (), ())
    try:
        options = (*launcher.OPTIONS, f"--gpu-architecture=sm_{architecture}")
        nvrtc.compileProgram(program, options)
        assert nvrtc.getProgramLog(program).strip("\0\n ") == ""
        binary = nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    assert binary[:4] == b"\x7fELF"
    for name in launcher.KERNELS:
        assert f"overflow_{name}".encode() in binary


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"memascend\[cuda\]"):
        launcher.check(torch.device("cuda", 0), [], False, None)
    launcher.has_cupy.cache_clear()
    assert not launcher.has_cupy()
    monkeypatch.undo()
    launcher.has_cupy.cache_clear()


def test_cupy_is_given_torchs_stream() -> None:
    cupy = needs.package("cupy")

    class Torchs:
        def __init__(self, handle: int) -> None:
            self.cuda_stream = handle

    for handle, expected in ((0x7F00, 0x7F00), (0, cupy.cuda.runtime.streamLegacy)):
        stream = cupy.cuda.Stream.from_external(launcher._Stream(Torchs(handle)))
        assert stream.ptr == expected
    # What the kernels' parameters are, as wide as CuPy passes them.
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
        """The bits of the blocks' sums of squares, and the flag."""
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

    def convert(self, dtype: torch.dtype, bits: np.ndarray, rounding: bool) -> np.ndarray:
        """The fp32 bits of values, or fp32 bits rounded to a dtype's."""
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
        needs.unmet("compiler", "a C++ compiler compiles the CUDA source for the host, and there is none")
    library = tmp_path_factory.mktemp("host") / "overflow.so"
    shim = Path(__file__).with_name("cuda_on_host.cpp")
    # The source reads 16 bytes at a time, and may fuse what is exact in any case.
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wno-unknown-pragmas"]
    source = f'-DSOURCE="{launcher.SOURCE}"'
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
    """The bits of each block's sum of squares by the CPU's kernels, and 1 if any element is not finite."""
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
        check(tensors, norm=True).norm  # noqa: B018 - compiled now
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000_000)
            for tensor in tensors:
                tensor.fill_(2)
            result = check(tensors, norm=True)
            flag = result.found_inf_tensor
            assert not stream.query(), "the check waited for the stream"
        assert result.sum_squares == 80_000.0, "it ran behind what its stream had still to do"
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
