"""CUDA kernels of overflow checks and projections: compiled by CuPy, launched on torch's current stream.

The kernels are source (`formats.cu`, `overflow.cu` and `projection.cu`, compiled as one), so the wheel holds nothing
per architecture. They include no header, so that `tests/kernels/cuda_on_host.cpp` can run the very source on the CPU.
The overflow check's sums have an order of their own (256 threads to a chunk), independent of grid and alignment, which
is not the CPU's; block sums and projections have the CPU's bits. CuPy has NVRTC flush denormals to zero, so sums and
products in float32 are PTX instructions that do not.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import GRADIENT_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memascend._memascend import Projection

_log = logging.getLogger("memascend")
#: In this order they are one source.
SOURCES = tuple(Path(__file__).with_name(name) for name in ("formats.cu", "overflow.cu", "projection.cu"))
OPTIONS = ("--std=c++17",)
KERNELS = (
    *(f"overflow_{name}" for name in ("find", "sum", "unscale", "unscale_sum", "total", "block_sums")),
    *(f"projection_{name}" for name in ("matrix", "product", "sums")),
)
#: As in the source: elements of a chunk, threads of a block, lanes of a partial sum.
CHUNK, THREADS, LANES = GRADIENT_BLOCK, 256, 32
#: Blocks per multiprocessor: more than are resident at once, so that none runs dry at the end.
BLOCKS_PER_PROCESSOR = 16
#: Numbers of the dtypes in a row.
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: Device memory of a row: address, elements, first chunk, dtype.
ROW = 4
#: CUDA's handle of the legacy default stream.
LEGACY_STREAM = 1
#: As in `projection.cu`: channels and ranks of a block of threads, and sums of a channel of consecutive elements.
SIDE, SUMS = 64, 8


def source() -> str:
    """Return the CUDA source of all kernels."""
    return "\n".join(path.read_text() for path in SOURCES)


def _extra() -> str:
    """Return the extra with the CuPy of the CUDA that PyTorch was built for."""
    built_for = getattr(torch.version, "cuda", None) or ""
    return "cuda12" if built_for.startswith("12.") else "cuda13"


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"checking CUDA tensors needs CuPy: pip install 'memascend[{_extra()}]', for the CUDA of your PyTorch"
        ) from error
    return cupy


@cache
def has_cupy() -> bool:
    """Return whether CuPy is installed, finds NVRTC, and its CUDA is not too new for the driver."""
    try:
        cupy = _cupy()
        cupy.cuda.nvrtc.getVersion()
        return cupy.cuda.runtime.getDeviceCount() > 0
    except (ImportError, RuntimeError):  # CuPy's own errors are RuntimeErrors
        return False


@cache
def compiles(device: int) -> bool:
    """Return whether the kernels compile for a device; log the reason if CuPy is installed and they do not."""
    if not has_cupy():
        return False
    try:
        _functions(device)
    except Exception as error:  # NVRTC and the driver raise several kinds for a device too new or too old
        first = str(error).strip().partition("\n")[0]
        _log.warning("gradients are checked by the CPU: CuPy cannot compile for cuda:%d: %s", device, first)
        return False
    return True


class _Stream:
    """One of torch's streams, under the protocol by which CuPy accepts streams of other libraries."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the stream's handle."""
        # torch's 0 is the legacy default stream. CuPy's 0 is the thread's stream under
        # CUPY_CUDA_PER_THREAD_DEFAULT_STREAM, and would not be ordered after torch's launches.
        return 0, self.stream.cuda_stream or LEGACY_STREAM


@contextmanager
def _launching_on(device: torch.device, stream: torch.cuda.Stream) -> Iterator[dict[str, Any]]:
    """Give the kernels of a device; launches within the block go to `stream`."""
    cupy = _cupy()
    functions = _functions(device.index)
    with cupy.cuda.Device(device.index), cupy.cuda.Stream.from_external(_Stream(stream)):
        yield functions


@cache
def _functions(device: int) -> dict[str, Any]:
    """Compile the kernels for a device, once per process."""
    cupy = _cupy()
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=source(), options=OPTIONS)
        return {name: module.get_function(name) for name in KERNELS}


def rows(tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[int, int, int, int]], int]:
    """Return a table row for each tensor that is not empty, and the number of chunks of all."""
    table, chunks = [], 0
    for tensor in tensors:
        numel = tensor.numel()
        if numel:
            table.append((tensor.data_ptr(), numel, chunks, DTYPES[tensor.dtype]))
            chunks += -(-numel // CHUNK)
    return table, chunks


class Checked:
    """Results of a launched check: scalars on a device, valid once its stream has reached that point."""

    def __init__(self, flag: torch.Tensor, total: torch.Tensor | None, stream: torch.cuda.Stream) -> None:
        """Take a float32 flag and a float64 sum of squares (None: not summed), which `stream` will have written."""
        self._flag, self._total = flag, total
        self._written = torch.cuda.Event()
        self._written.record(stream)

    def _ordered(self, tensor: torch.Tensor) -> torch.Tensor:
        # The reader's stream may be another one, which knows nothing of the check's kernels.
        stream = torch.cuda.current_stream(tensor.device)
        self._written.wait(stream)
        tensor.record_stream(stream)
        return tensor

    @property
    def flag(self) -> torch.Tensor:
        """1.0 if an element is infinite or NaN, float32, for launches on the current stream of its device."""
        return self._ordered(self._flag)

    @property
    def total(self) -> torch.Tensor | None:
        """The sum of squares, float64, for launches on the current stream of its device; None if none was asked for."""
        return None if self._total is None else self._ordered(self._total)


def check(
    device: torch.device, tensors: Sequence[torch.Tensor], norm: bool, unscale: float | torch.Tensor | None
) -> Checked:
    """Launch a check of dense tensors of one device on its current stream, without waiting."""
    _cupy()  # raises first if CuPy is missing
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        flag = torch.zeros((), dtype=torch.float32, device=device)
        total = torch.zeros((), dtype=torch.float64, device=device) if norm else None
        table, chunks = rows(tensors)
        if not table:
            return Checked(flag, total, stream)
        # Both tables may be dropped at the end: torch keeps pinned memory until its copies are
        # done, and reuses device memory in the stream's order.
        pinned = torch.empty((len(table), ROW), dtype=torch.int64, pin_memory=True)  # (rows, ROW)
        pinned.numpy()[:] = table
        on_device = pinned.to(device, non_blocking=True)
        arguments = [on_device.data_ptr(), len(table), chunks, flag.data_ptr()]
        partial_sums = factor = None
        if total is not None:
            partial_sums = torch.empty(chunks, dtype=torch.float64, device=device)  # (chunks,)
            arguments.append(partial_sums.data_ptr())
        if unscale is not None:
            factor = _factor(unscale, device)
            arguments.append(factor.data_ptr())
        for tensor in tensors:
            tensor.record_stream(stream)
        name = "_".join(["unscale"] * (unscale is not None) + ["sum"] * norm) or "find"
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        grid = min(chunks, processors * BLOCKS_PER_PROCESSOR)
        # CuPy passes Python's integers as 64 bits, so the kernels take 64-bit integers.
        with _launching_on(device, stream) as functions:
            functions[f"overflow_{name}"]((grid,), (THREADS,), tuple(arguments))
            if total is not None and partial_sums is not None:
                summing = (partial_sums.data_ptr(), chunks, flag.data_ptr(), total.data_ptr())
                functions["overflow_total"]((1,), (THREADS,), summing)
        return Checked(flag, total, stream)


def block_sums(tensor: torch.Tensor, sums: torch.Tensor, flag: torch.Tensor) -> None:
    """Launch the sums of squares of a gradient's blocks on torch's current stream, without waiting.

    Each sum has the bits of the CPU's kernels for the block (`_memascend.gradient_stats`).

    Args:
        tensor: a contiguous float32, float16 or bfloat16 tensor of a CUDA device, of any shape. Nothing is launched for
            an empty one.
        sums: float64 of that device, contiguous, shape (blocks of 65,536 elements in `tensor`, the last one maybe
            shorter,): the sum of squares of each, infinite or NaN where an element is.
        flag: int32 of that device, shape (1,), cleared by the caller: set to 1 if an element is infinite or NaN.

    Raises:
        ImportError: CuPy is not installed; ask `has_cupy` before.
    """
    numel, device = tensor.numel(), tensor.device
    blocks = -(-numel // CHUNK)
    assert tensor.is_contiguous() and sums.is_contiguous()
    assert (sums.dtype, sums.shape, sums.device) == (torch.float64, (blocks,), device)
    assert (flag.dtype, flag.shape, flag.device) == (torch.int32, (1,), device)
    if not blocks:
        return
    stream = torch.cuda.current_stream(device)
    for used in (tensor, sums, flag):
        used.record_stream(stream)
    arguments = (tensor.data_ptr(), numel, DTYPES[tensor.dtype], sums.data_ptr(), flag.data_ptr())
    with _launching_on(device, stream) as functions:
        functions["overflow_block_sums"]((blocks,), (LANES,), arguments)


def project(gradient: torch.Tensor, projection: Projection, numbers: torch.Tensor) -> None:
    """Launch the projection of a gradient on torch's current stream, without waiting.

    The result has the bits of the CPU's kernels (`ForTests.write_projected`).

    Args:
        gradient: a contiguous float32, float16 or bfloat16 tensor of a CUDA device, of the projection's elements.
        projection: rows, columns, rank and the key of the random matrix, which takes (smaller side) x rank float32 of
            that device until the launches have run.
        numbers: float32 of that device, contiguous, shape (projection.numbers,): the projected gradient, (channels,
            rank), and behind it each channel's sum of squares, the bits of a float64 as two numbers.

    Raises:
        ImportError: CuPy is not installed; ask `has_cupy` before.
    """
    device, rank, channels = gradient.device, projection.rank, projection.channels
    depth = min(projection.rows, projection.columns)
    assert gradient.is_contiguous() and gradient.numel() == projection.rows * projection.columns
    assert (numbers.dtype, numbers.shape, numbers.device) == (torch.float32, (projection.numbers,), device)
    stream = torch.cuda.current_stream(device)
    matrix = torch.empty(depth * rank, dtype=torch.float32, device=device)  # (depth, rank)
    for used in (gradient, numbers, matrix):
        used.record_stream(stream)
    # CuPy takes a Python integer as one with a sign.
    key = projection.key - (1 << 64) * (projection.key >> 63)
    matrix_at, numbers_at = matrix.data_ptr(), numbers.data_ptr()
    of_gradient = (gradient.data_ptr(), DTYPES[gradient.dtype], projection.rows, projection.columns)
    sums_at = numbers_at + channels * rank * numbers.itemsize
    with _launching_on(device, stream) as functions:
        for name, grid, arguments in launches_of_projection(
            of_gradient, rank=rank, key=key, matrix=matrix_at, projected=numbers_at, sums=sums_at
        ):
            functions[name]((grid,), (THREADS,), arguments)


def launches_of_projection(
    gradient: tuple[int, int, int, int], *, rank: int, key: int, matrix: int, projected: int, sums: int
) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return name, blocks of threads and arguments of each launch of a projection, in their order.

    `gradient` is its address, the number of its dtype, rows and columns; the others are addresses.
    """
    _, _, rows, columns = gradient
    channels, depth = max(rows, columns), min(rows, columns)
    tiles = -(-channels // SIDE) * -(-rank // SIDE)
    threads = channels * (SUMS if rows >= columns else 1)
    return [
        ("projection_matrix", -(-depth * rank // THREADS), (key, depth, rank, matrix)),
        ("projection_product", tiles, (*gradient, rank, matrix, projected)),
        ("projection_sums", -(-threads // THREADS), (*gradient, sums)),
    ]


def _factor(unscale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(unscale, torch.Tensor) and unscale.device.type == "cuda":
        return unscale.detach().to(device, torch.float32, non_blocking=True)
    # A fill kernel, rather than a copy from memory that is not pinned.
    return torch.full((), float(unscale), dtype=torch.float32, device=device)
