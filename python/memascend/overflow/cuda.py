"""The overflow check on CUDA devices: compiles the kernels and launches them on torch's current stream."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("--std=c++17",)
#: As in the source: elements of a chunk, threads of a block.
CHUNK, THREADS = 65_536, 256
#: Blocks per multiprocessor: more than are resident at once, so that none runs dry at the end.
BLOCKS_PER_PROCESSOR = 16
#: Numbers of the dtypes in a row.
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: Device memory of a row: address, elements, first chunk, dtype.
ROW = 4


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "checking CUDA tensors needs CuPy: pip install 'memascend[cuda]' "
            "(or cupy-cuda12x, if that is the CUDA of your torch)"
        ) from error
    return cupy


@cache
def _functions(device: int) -> dict[str, Any]:
    """Compile the kernels for a device, once."""
    cupy = _cupy()
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS)
        names = ("find", "sum", "unscale", "unscale_sum", "total")
        return {name: module.get_function(f"overflow_{name}") for name in names}


def rows(tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[int, int, int, int]], int]:
    """Return the table of tensors that are not empty, and how many chunks they have."""
    table, chunks = [], 0
    for tensor in tensors:
        numel = tensor.numel()
        if numel:
            table.append((tensor.data_ptr(), numel, chunks, DTYPES[tensor.dtype]))
            chunks += -(-numel // CHUNK)
    return table, chunks


def check(
    device: torch.device, tensors: Sequence[torch.Tensor], norm: bool, unscale: float | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch a check of dense tensors of one device on its current stream, and wait for nothing.

    Returns tensors of the device: 1.0 or 0.0 (float32) for found or not, and the sum of squares (float64) if `norm`.
    """
    cupy = _cupy()
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        flag = torch.zeros((), dtype=torch.float32, device=device)
        total = torch.zeros((), dtype=torch.float64, device=device) if norm else None
        table, chunks = rows(tensors)
        if not table:
            return flag, total
        # torch keeps pinned memory until the copies from it are done, and reuses device memory in the stream's order:
        # both may be dropped here.
        pinned = torch.empty((len(table), ROW), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = table
        on_device = pinned.to(device, non_blocking=True)
        arguments = [on_device.data_ptr(), len(table), chunks, flag.data_ptr()]
        slots = factor = None
        if norm:
            slots = torch.empty(chunks, dtype=torch.float64, device=device)
            arguments.append(slots.data_ptr())
        if unscale is not None:
            factor = _factor(unscale, device)
            arguments.append(factor.data_ptr())
        for tensor in tensors:
            tensor.record_stream(stream)
        functions = _functions(device.index)
        name = "_".join(["unscale"] * (unscale is not None) + ["sum"] * norm) or "find"
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        grid = min(chunks, processors * BLOCKS_PER_PROCESSOR)
        with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(stream.cuda_stream, device.index):
            functions[name]((grid,), (THREADS,), tuple(arguments))
            if norm:
                functions["total"]((1,), (THREADS,), (slots.data_ptr(), chunks, flag.data_ptr(), total.data_ptr()))
    return flag, total


def _factor(unscale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(unscale, torch.Tensor) and unscale.device.type == "cuda":
        return unscale.detach().to(device, torch.float32, non_blocking=True)
    # Filled by a kernel, so that nothing is copied from memory that is not pinned.
    return torch.full((), float(unscale), dtype=torch.float32, device=device)
