"""What one optimizer step does to the tensors of the store, as the native executor takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend.units import DTYPE_NAMES

if TYPE_CHECKING:
    from memascend._memascend import Extent, Runtime
    from memascend.units import Place, StoreTensor

MOMENT_BYTES = 4

#: (lr, beta1, beta2, eps, weight_decay, step, grad_scale)
Scalars = tuple[float, float, float, float, float, int, float]


@dataclass(slots=True)
class Segment:
    """Elements of a tensor with the same hyper-parameters: one parameter."""

    start: int
    numel: int
    scalars: Scalars
    #: Addresses of weight and gradient, for a parameter in host memory.
    host: tuple[int, int] | None = None


@dataclass(slots=True)
class Update:
    """The update of one store tensor in one step."""

    tensor: StoreTensor
    segments: list[Segment] = field(default_factory=list)
    #: Take the gradient from the store's keeping; otherwise the segments carry addresses.
    captured: bool = True

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return DTYPE_NAMES[self.tensor.dtype]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.tensor.numel

    @property
    def weight_offset(self) -> int:
        """Byte offset of the weights in their unit."""
        return self.tensor.offset

    @property
    def exp_avg(self) -> Extent | None:
        """Extent of the first moment."""
        return self.tensor.exp_avg

    @property
    def exp_avg_sq(self) -> Extent | None:
        """Extent of the second moment."""
        return self.tensor.exp_avg_sq

    @property
    def low(self) -> Extent | None:
        """Extent of the masters' low halves."""
        return self.tensor.low

    @property
    def initialized(self) -> bool:
        """Whether the states were written before."""
        return self.tensor.initialized

    @property
    def gradient(self) -> int | None:
        """Number of the gradient in the store's keeping."""
        return self.tensor.gradient if self.captured else None


def state_bytes(tensor: StoreTensor) -> int:
    """Bytes on SSD of the states of one tensor: two fp32 moments and, for bf16, the low halves."""
    low = 2 if tensor.dtype.itemsize == 2 else 0
    return tensor.numel * (2 * MOMENT_BYTES + low)


def allocate_states(runtime: Runtime, tensor: StoreTensor) -> None:
    """Make room for the states of a tensor; they begin as zeros without being written."""
    if tensor.exp_avg is not None:
        return
    if tensor.exp_avg_sq is None:
        tensor.exp_avg_sq = runtime.allocate(f"{tensor.name}.exp_avg_sq", tensor.numel * MOMENT_BYTES)
    if tensor.low is None and tensor.dtype.itemsize == 2:
        tensor.low = runtime.allocate(f"{tensor.name}.master_low", tensor.numel * 2)
    # Last, since it is what says that the others are there: each of them may find no room, and be tried again later.
    tensor.exp_avg = runtime.allocate(f"{tensor.name}.exp_avg", tensor.numel * MOMENT_BYTES)


def add_segment(updates: dict[StoreTensor, Update], place: Place, segment: Segment, captured: bool) -> None:
    """Add one parameter's part to the update of its tensor."""
    update = updates.get(place.tensor)
    if update is None:
        update = updates[place.tensor] = Update(place.tensor, captured=captured)
    update.segments.append(segment)
