"""Device memory of PyTorch's allocator: whole segments, cut into pieces for tensors, and workspaces of cuBLAS.

The constants are from PyTorch 2.8 to 2.13 (`c10/core/AllocatorConfig.h`, `ATen/cuda/CublasHandlePool.cpp`) without
options in `PYTORCH_CUDA_ALLOC_CONF`. The allocator gives a segment back only once no tensor has a piece of it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
#: Every tensor takes a multiple of so many bytes.
BLOCK_BYTES = 512
#: Tensors up to the first size share segments of the second.
SMALL_FROM_BYTES, SMALL_SEGMENT_BYTES = MIB, 2 * MIB
#: Larger ones that are smaller than the first size share segments of the second.
OWN_FROM_BYTES, LARGE_SEGMENT_BYTES = 10 * MIB, 20 * MIB
#: Others have a segment of their own, of a multiple of so many bytes.
OWN_SEGMENT_BYTES = 2 * MIB
#: Threads that multiply matrices, each with workspaces of its own: the one that computes forward, and autograd's.
MULTIPLYING_THREADS = 2
#: Workspaces of cuBLAS: 32 MiB on Hopper and Blackwell, 2 x 4 MiB and 8 x 16 KiB on others; cuBLASLt.
CUBLAS_BYTES_OF_NEW, CUBLAS_BYTES = 32 * MIB, 8 * MIB + 128 * KIB
CUBLASLT_BYTES = MIB
#: Major numbers of the compute capabilities of Hopper and Blackwell.
NEW_CAPABILITIES = (9, 10, 12)
#: Begun segments of either size, whose remainder may not fit a wanted tensor.
SMALL_BEGUN, LARGE_BEGUN = 2, 2


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one device, and the workspaces there."""

    #: Of one thread, in bytes.
    cublas_bytes: int
    cublaslt_bytes: int = CUBLASLT_BYTES

    @staticmethod
    def of(capability_major: int | None = None) -> Segments:
        """Return a device's segments by the major number of its compute capability; the largest, if unknown.

        The environment variables that change the workspaces (CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE) count.
        """
        new = capability_major is None or capability_major in NEW_CAPABILITIES
        sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        cublas = sum(int(kib) * KIB * int(count) for kib, count in sizes)
        given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
        return Segments(
            cublas if sizes else CUBLAS_BYTES_OF_NEW if new else CUBLAS_BYTES,
            int(given) * KIB if given.isdecimal() else CUBLASLT_BYTES,
        )

    @property
    def workspaces_bytes(self) -> int:
        """Bytes that the workspaces of all threads take."""
        return MULTIPLYING_THREADS * (taken_bytes(self.cublas_bytes) + taken_bytes(self.cublaslt_bytes))

    @property
    def begun_bytes(self) -> int:
        """Bytes of begun segments: remainders beside tensors of other sizes serve no tensor."""
        return SMALL_BEGUN * SMALL_SEGMENT_BYTES + LARGE_BEGUN * LARGE_SEGMENT_BYTES


def taken_bytes(nbytes: int) -> int:
    """Return the bytes that a tensor takes of the allocator's segments; of a shared segment, an equal share."""
    block = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
    if block <= SMALL_FROM_BYTES:
        return block
    if block < OWN_FROM_BYTES:
        return LARGE_SEGMENT_BYTES // (LARGE_SEGMENT_BYTES // block)
    return -(-nbytes // OWN_SEGMENT_BYTES) * OWN_SEGMENT_BYTES
