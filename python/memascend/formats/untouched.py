"""Large tensors of zeros that take no memory before they are written to.

Models are made to be emptied at once. Most make their weights by `torch.empty`, whose memory the system gives when it
is touched. A model that makes them by `torch.zeros` (Llama 4's experts) would take the memory of each.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable

#: Smaller tensors are made as ever.
UNTOUCHED_FROM_BYTES = 1 << 20
#: The keywords of `torch.zeros` that are known here.
_OPTIONS = {"size", "dtype", "device", "requires_grad"}


class UntouchedZeros(TorchFunctionMode):
    """While it is entered, `torch.zeros` makes large tensors on the CPU of fresh memory, which is zero."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch."""
        options = kwargs or {}
        if func is torch.zeros and options.keys() <= _OPTIONS and self._is_on_cpu(options.get("device")):
            shown = torch.empty(*args, **options | {"device": "meta"})
            if shown.nbytes >= UNTOUCHED_FROM_BYTES:
                # Private: shared memory would be taken for reads, too, and be shared with children.
                memory = mmap.mmap(-1, shown.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                fresh = torch.frombuffer(memory, dtype=torch.uint8)
                return fresh.view(shown.dtype).view(shown.shape).requires_grad_(shown.requires_grad)
        return func(*args, **options)

    @staticmethod
    def _is_on_cpu(device: Any) -> bool:
        return torch.device(torch.get_default_device() if device is None else device).type == "cpu"
