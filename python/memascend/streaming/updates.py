"""The updates of one optimizer step to the tensors of the store, as the native executor takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend.layout.units import DTYPE_NAMES, StorePlane

if TYPE_CHECKING:
    from memascend._memascend import ChannelFactors, FactorOptions, Projection, Rule, StepScalars, TensorId
    from memascend.layout.units import StoreTensor


@dataclass(slots=True)
class Segment:
    """Elements of a tensor with the same hyper-parameters: one parameter, or one rank's share of it."""

    start: int
    numel: int
    rule: Rule
    scalars: StepScalars
    #: For each of the rule's planes: the parameter has no such state yet; it begins as zeros,
    #: whatever lies there.
    fresh: list[bool]
    #: Addresses of weight and gradient, for a parameter in host memory.
    host: tuple[int, int] | None = None
    #: The factors of a matrix's channels, which APOLLO finds when the step is carried out.
    factors: ChannelFactors | None = None
    #: Of a parameter that holds experts: those that APOLLO updates, found with their factors.
    parts: list[Segment] | None = None
    #: Which element of the parameter `start` is, for the random numbers of stochastic rounding.
    first_element: int = 0

    @property
    def updated(self) -> list[Segment]:
        """The segments to update: its parts, if it has any, or itself."""
        return [self] if self.parts is None else self.parts


@dataclass(slots=True)
class MeasuredGradient:
    """The source of the factors of a matrix's channels, once a device has measured its gradient."""

    projection: Projection
    #: Where the device has the numbers: float32, (projection.numbers,).
    address: int
    #: Both moments in the store, and whether they were written.
    moments: TensorId
    written: bool
    threads: int
    options: FactorOptions


@dataclass(slots=True)
class TensorUpdate:
    """The update of one store tensor in one step."""

    tensor: StoreTensor
    segments: list[Segment] = field(default_factory=list)
    #: Take the gradient from the store's keeping; otherwise the segments carry addresses.
    captured: bool = True
    #: Whether units that stay in memory are written too; otherwise the next commit writes them.
    write_through: bool = True

    def divide(self) -> None:
        """Have the parts of segments take their places, once they are found."""
        self.segments = [part for segment in self.segments for part in segment.updated]

    @property
    def dtype(self) -> str:
        """Name of the weights' dtype, as the native executor takes it."""
        return DTYPE_NAMES[self.tensor.dtype]

    @property
    def numel(self) -> int:
        """Elements of the tensor, padding included."""
        return self.tensor.numel

    @property
    def weight_offset(self) -> int:
        """Byte offset of the weights in their unit."""
        return self.tensor.offset

    @property
    def planes(self) -> list[StorePlane]:
        """The states that the segments' rules keep; others of the tensor stay as they are."""
        wanted = dict.fromkeys(plane for segment in self.segments for plane in segment.rule.planes)
        return [self.tensor.planes[plane] for plane in wanted]

    @property
    def kept_elements(self) -> int:
        """How many elements, counted from the first, keep their states in memory."""
        return self.tensor.kept_elements

    @property
    def gradient(self) -> int | None:
        """Number of the gradient in the store's keeping."""
        return self.tensor.gradient if self.captured else None

    def started(self) -> None:
        """Note that the native side has taken the update: it writes every state, and later reads find them."""
        for plane in self.planes:
            plane.written = True
