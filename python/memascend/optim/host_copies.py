"""Tensors of a device in host memory, where the kernels are, and back: many at once, with one wait.

Adapters are hundreds of small parameters on the device. A copy that blocks for each gradient and each weight leaves
the device idle and takes longer than the update. So copies go through one piece of page-locked memory: as many tensors
as it holds are copied down one behind another, the caller waits once, works on them, and has them copied back. A larger
tensor is copied by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memascend._memascend import gradient_stats
from memascend.errors import HostMemoryError
from memascend.hardware.pinned import empty_pinned
from memascend.layout.units import DTYPE_NAMES, round_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

#: Bytes of the piece of page-locked memory, at most; it is no larger than what was copied needs.
PIECE_BYTES = 32 << 20
#: Each tensor begins at a multiple of so many bytes.
ALIGNED_BYTES = 64


@dataclass(slots=True)
class Operands:
    """Weight and gradient of an ordinary parameter, which the kernels take contiguous and on the CPU."""

    parameter: nn.Parameter
    #: The parameter's own memory, or a copy if it is not contiguous or not on the CPU.
    weight: torch.Tensor
    gradient: torch.Tensor

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the weight and of the gradient."""
        return self.weight.data_ptr(), self.gradient.data_ptr()

    def copy_back(self) -> None:
        """Enqueue the copy of the updated weight to the parameter, if `weight` is a copy."""
        if self.weight.data_ptr() != self.parameter.data_ptr():
            self.parameter.detach().copy_(self.weight, non_blocking=True)


class HostCopies:
    """Copies of tensors of devices, through a piece of page-locked memory that stays from one step to the next."""

    def __init__(self) -> None:
        """Begin without memory."""
        self._piece = torch.empty(0, dtype=torch.uint8)

    def groups(self, items: Sequence[Sequence[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
        """Yield items in their order, in groups, with contiguous tensors of the CPU for those that each has.

        A contiguous tensor of the CPU is yielded itself. The others have their values until the next group is asked
        for; what writes them to their device has to be enqueued in its current stream by then.
        """
        detached = [[tensor.detach() for tensor in item] for item in items]
        groups = list(_grouped(detached))
        self._reserve(max((size for group in groups if (size := _size(group)) <= PIECE_BYTES), default=0))
        before: Sequence[Sequence[torch.Tensor]] = ()
        for group in groups:
            if len(_devices(before) | _devices(group)) > 1:
                # A stream orders the next copies into the piece after its own copies out of it alone.
                _finish(before)
            yield self._down(group)
            before = group
        _finish(detached)

    def stats(self, gradients: Sequence[torch.Tensor]) -> list[tuple[float, bool]]:
        """Return the sum of squares of each gradient, and whether it is not finite."""
        return [
            gradient_stats(DTYPE_NAMES[gradient.dtype], gradient.numel(), gradient.data_ptr())
            for group in self.groups([(gradient,) for gradient in gradients])
            for (gradient,) in group
        ]

    def operands(self, pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> list[Operands]:
        """Return parameters with their gradients in memory of their own, all at once."""
        copies = (pair for group in self.groups(pairs) for pair in group)
        return [
            Operands(parameter, self._own(weight), self._own(gradient))
            for (parameter, _), (weight, gradient) in zip(pairs, copies, strict=True)
        ]

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        in_piece = tensor.untyped_storage().data_ptr() == self._piece.untyped_storage().data_ptr()
        return tensor.clone() if in_piece else tensor

    def _reserve(self, nbytes: int) -> None:
        """Have a piece of so many bytes, before anything is copied."""
        if nbytes > self._piece.numel():
            self._piece = torch.empty(0, dtype=torch.uint8)  # Free before the larger one is there.
            self._piece = _locked(nbytes)

    def _down(self, group: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        if _size(group) > PIECE_BYTES:
            return [[tensor.cpu().contiguous() for tensor in item] for item in group]
        offset = 0

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal offset
            if tensor.device.type == "cpu":
                return tensor.contiguous()
            part = self._piece[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            offset += _taken((tensor,))
            return part.copy_(tensor, non_blocking=True)

        copies = [[copied(tensor) for tensor in item] for item in group]
        _finish(group)
        return copies


def write_back(copies: Sequence[Operands]) -> None:
    """Write updated weights that are copies to their parameters, and wait for all of them."""
    for operands in copies:
        operands.copy_back()
    _finish([(operands.parameter,) for operands in copies])


def _locked(nbytes: int) -> torch.Tensor:
    """Return page-locked memory, or ordinary memory where the system locks no more: copies block then."""
    try:
        return empty_pinned(nbytes, torch.uint8)
    except HostMemoryError:
        return torch.empty(nbytes, dtype=torch.uint8)


def _taken(item: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the piece that an item takes."""
    return sum(round_up(tensor.nbytes, ALIGNED_BYTES) for tensor in item if tensor.device.type != "cpu")


def _size(group: Sequence[Sequence[torch.Tensor]]) -> int:
    """Return the bytes of the piece that a group takes."""
    return sum(map(_taken, group))


def _grouped(items: Sequence[Sequence[torch.Tensor]]) -> Iterator[Sequence[Sequence[torch.Tensor]]]:
    """Yield groups of items that fit into the piece; one that does not fit is alone."""
    begin = taken = 0
    for index, item in enumerate(items):
        if taken + _taken(item) > PIECE_BYTES and index > begin:
            yield items[begin:index]
            begin, taken = index, 0
        taken += _taken(item)
    if begin < len(items):
        yield items[begin:]


def _devices(items: Sequence[Sequence[torch.Tensor]]) -> set[torch.device]:
    return {tensor.device for item in items for tensor in item if tensor.device.type != "cpu"}


def _finish(items: Sequence[Sequence[torch.Tensor]]) -> None:
    """Wait until what was enqueued on the devices of these tensors has ended."""
    for device in _devices(items):
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
