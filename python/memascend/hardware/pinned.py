"""Page-locked tensors: exactly as large as asked for, and freed with the tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend._memascend import HostBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence


def empty_pinned(
    shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    allocator: str = "auto",
    huge_pages: bool = True,
) -> torch.Tensor:
    """Return a CPU tensor of zeros in page-locked memory, rounded up to a page (4096 bytes) and no further.

    torch's own pinned memory (`torch.empty(..., pin_memory=True)`) is rounded up to a power of two and kept for reuse
    when the tensor is freed. This memory returns to the system at once: allocate long-lived tensors, not a new one for
    every batch. Memory that CUDA knows ("cuda", "registered") is absent from forked processes: DataLoader workers must
    not touch it. They may read locked and pageable memory.

    Args:
        shape: an extent, or a sequence of them.
        dtype: of the elements (default: `torch.get_default_dtype()`).
        allocator: "cuda" (cudaHostAlloc: `is_pinned()` is true and copies to a device are asynchronous), "registered"
            (ordinary memory, registered with CUDA afterwards), "locked" (mlock: not swapped, but unknown to CUDA),
            "pageable", or "auto": where CUDA works "registered", and "cuda" without huge pages or where nothing can be
            registered; else "locked".
        huge_pages: ask for transparent huge pages, from 2 MiB on; CUDA ("cuda") chooses its own.

    Raises:
        HostMemoryError: CUDA or the system refused; the message has the remedy.
        ValueError: an unknown allocator.
    """
    shape = torch.Size([shape] if isinstance(shape, int) else shape)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"a shape has no negative extents: {tuple(shape)}")
    dtype = dtype or torch.get_default_dtype()
    numel = shape.numel()
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    buffer = HostBuffer(numel * dtype.itemsize, allocator, huge_pages)
    # The tensor's storage is the only owner of the buffer.
    return torch.frombuffer(buffer, dtype=dtype, count=numel).view(shape)


def pin_memory(tensor: torch.Tensor, *, allocator: str = "auto") -> torch.Tensor:
    """Return a copy of `tensor` in page-locked memory, or `tensor` itself if CUDA has it pinned already.

    Shape, dtype, values and memory format stay; the copy does not require gradients. As a DataLoader's collate step:
    `[memascend.pin_memory(t) for t in batch]` in the main process, since pinned memory does not pass between processes.

    Args:
        tensor: dense, on any device.
        allocator: as for `empty_pinned`.

    Raises:
        HostMemoryError, ValueError: as `empty_pinned` does.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"pin_memory takes dense tensors, not {tensor.layout}")
    if tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned():
        return tensor
    like = torch.empty_like(tensor, device="meta")  # torch's own choice of strides
    flat = empty_pinned(like.numel(), tensor.dtype, allocator=allocator)
    return flat.as_strided(like.shape, like.stride()).copy_(tensor.detach())
