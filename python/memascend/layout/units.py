"""What moves together: the parameters of a model divided into units, and each unit laid out in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend._memascend import GRADIENT_BLOCK, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memascend._memascend import Capture, ExternalFile, Plane, Rule, TensorId

#: Parameters below this size are packed with their neighbours and move as one tensor.
PACK_BELOW_BYTES = 64 * 1024
#: A pack is closed when it reaches this many elements, so that it is one chunk of an update.
PACK_ELEMENTS_MAX = GRADIENT_BLOCK
#: Members of a pack begin at multiples of this many elements: 64 bytes of bf16.
PACK_ALIGN_ELEMENTS = 32
#: Modules outside the repeated layers whose own parameters are smaller than this share one unit.
SMALL_MODULE_BYTES = 1024 * 1024

CPU = torch.device("cpu")
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple."""
    return -(-value // multiple) * multiple


@dataclass(slots=True, eq=False, weakref_slot=True)
class Place:
    """Where one parameter is: elements `start ..` of a store tensor, bytes `offset ..` of its unit."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    numel: int
    tensor: StoreTensor
    start: int
    offset: int
    #: What the parameter shows while it is not resident: its shape and dtype, and NaN for every value.
    absent: torch.Tensor
    #: What `parameter.grad` shows while its gradient is kept by memascend.
    marker: torch.Tensor
    #: Of a frozen weight that is not on the store: the file that it is read from, and at which byte it begins there.
    source: tuple[ExternalFile, int] | None = None
    #: Optimizer steps taken on the parameter: a graph made before one of them is out of date.
    version: int = 0
    #: Of gradients kept by memascend: whether there is one, how many were taken over, and how often they were added to.
    held: bool = False
    captured: int = 0
    added: int = 0
    sum_squares: float = 0.0
    non_finite: bool = False
    #: While the gradient is on its way from a device: what `sum_squares` and `non_finite` will come from.
    capturing: Capture | None = None
    #: The optimizer whose states are on the store (a weak reference), how it keeps them, and which of them it has made.
    owner: Any = None
    rule: Rule | None = None
    made: set[Plane] = field(default_factory=set)
    hooks: list = field(default_factory=list)
    #: How often `absent` and `marker` had been written to when that was last looked into; of a parameter on a device,
    #: whose values cannot be read without waiting for it.
    seen: list[int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.numel * self.dtype.itemsize

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """Return the parameter's values, of its shape and dtype, within its unit's bytes (uint8)."""
        return storage[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)

    def hide(self) -> None:
        """Have the parameter show NaN."""
        self.parameter.data = self.absent
        if self.seen is not None:
            self.seen[0] = self.parameter._version

    def weight_written(self) -> float | None:
        """Return what somebody filled the absent weight with (`zero_()`, say), or None; it is NaN again after."""
        # The parameter has its own count of writes, whatever its data.
        return self._written(self.absent, 0, self.parameter)

    def gradient_written(self) -> float | None:
        """Return what the marker was filled with, as `zero_grad(set_to_none=False)` does, or None; NaN again after."""
        return self._written(self.marker, 1, self.marker)

    def untouched(self, is_gradient: bool) -> bool:
        """Whether nobody has written to the marker, or to the absent weight: they stand for what is elsewhere."""
        if self.seen is not None:
            return (self.marker if is_gradient else self.parameter)._version == self.seen[is_gradient]
        return math.isnan((self.marker if is_gradient else self.absent).as_strided((), ()).item())

    def _written(self, shown: torch.Tensor, which: int, counted: torch.Tensor) -> float | None:
        if self.seen is not None:
            if counted._version == self.seen[which]:
                return None
            self.seen[which] = counted._version
        element = shown.as_strided((), ())
        value = element.item()
        if math.isnan(value):
            return None
        element.fill_(math.nan)
        return value


@dataclass(slots=True, eq=False)
class StorePlane:
    """One array of a tensor's states on SSD."""

    plane: Plane
    #: Its name in the store, and its number there.
    name: str
    id: TensorId
    #: Whether it was written; before, it is zeros.
    written: bool = False


@dataclass(slots=True, eq=False)
class StoreTensor:
    """Parameters whose weights, gradient and states each lie in one piece: one large one, or a pack of small ones."""

    name: str
    dtype: torch.dtype
    unit: Unit
    packed: bool
    #: Whether its parameters were to be trained when it was laid out: only then does the plan hold what that takes.
    trained: bool = True
    offset: int = 0
    numel: int = 0
    places: list[Place] = field(default_factory=list)
    gradient: int | None = None
    #: The number of the weights in the store; of a unit whose weights are there.
    id: TensorId | None = None
    #: The optimizer's states.
    planes: dict[Plane, StorePlane] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, whole pages."""
        return round_up(self.numel * self.dtype.itemsize, PAGE_BYTES)


@dataclass(slots=True, eq=False)
class Unit:
    """Parameters that move together."""

    name: str
    #: One of several like it that run one after another: a decoder layer.
    repeated: bool
    #: It is in use while other units are: its module runs around theirs, or one module needs several.
    held: bool = False
    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[StoreTensor] = field(default_factory=list)
    nbytes: int = 0
    index: int = -1

    @property
    def weights(self) -> list[tuple[TensorId, int, int]]:
        """Number in the store, offset in the unit and bytes of each tensor's weights."""
        return [(tensor.id, tensor.offset, tensor.nbytes) for tensor in self.tensors if tensor.id is not None]

    @property
    def outside(self) -> list[tuple[ExternalFile, int, int, int]]:
        """File, position there, offset in the unit and bytes of each weight that is not on the store."""
        return [(*place.source, place.offset, place.nbytes) for place in self.places if place.source is not None]

    @property
    def places(self) -> Iterator[Place]:
        """All parameters, in the order of their bytes."""
        return (place for tensor in self.tensors for place in tensor.places)


def absent_like(shape: torch.Size, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """Return a tensor of `shape` whose every value is NaN and which occupies one element."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def lay_out(unit: Unit, named: Iterable[tuple[str, nn.Parameter]], device: torch.device = CPU) -> None:
    """Give every parameter its place in `unit`: large ones page-aligned, small ones packed behind them.

    Frozen ones are packed apart, so that no update writes them again. What stands for parameters while they are not
    there is on `device`.

    Raises ValueError for a dtype that cannot be trained.
    """
    packs: dict[tuple[torch.dtype, bool], StoreTensor] = {}
    small: list[StoreTensor] = []
    for name, parameter in named:
        dtype, numel, trained = parameter.dtype, parameter.numel(), parameter.requires_grad
        if dtype not in DTYPE_NAMES:
            raise ValueError(
                f"parameter {name} has dtype {str(dtype).removeprefix('torch.')}, which memascend cannot train: "
                "convert the model to torch.bfloat16, torch.float16 or torch.float32"
            )
        if numel * dtype.itemsize >= PACK_BELOW_BYTES:
            tensor = StoreTensor(name, dtype, unit, packed=False, trained=trained, numel=numel)
            unit.tensors.append(tensor)
            start = 0
        else:
            tensor = packs.get((dtype, trained))
            if tensor is None or tensor.numel + numel > PACK_ELEMENTS_MAX:
                tensor = StoreTensor(f"{unit.name}.packed{len(small)}", dtype, unit, packed=True, trained=trained)
                packs[dtype, trained] = tensor
                small.append(tensor)
            start = tensor.numel
            tensor.numel = round_up(start + numel, PACK_ALIGN_ELEMENTS)
        tensor.places.append(
            Place(
                name,
                parameter,
                parameter.shape,
                dtype,
                numel,
                tensor,
                start,
                offset=0,
                absent=absent_like(parameter.shape, dtype, device),
                marker=absent_like(parameter.shape, dtype, device),
            )
        )
    unit.tensors.extend(small)
    for tensor in unit.tensors:
        tensor.offset = unit.nbytes
        unit.nbytes += tensor.nbytes
        for place in tensor.places:
            place.offset = tensor.offset + place.start * tensor.dtype.itemsize


def partition(model: nn.Module, device: torch.device = CPU) -> list[Unit]:
    """Divide the parameters of `model`, which computes on `device`, into units, in the order of their registration.

    Every element of an outermost ModuleList or Sequential is a unit of its own (a decoder layer); every other
    module with parameters of its own is one, small ones together. A tied parameter belongs to the first.
    """
    units: list[Unit] = []
    taken: set[int] = set()
    small = Unit("small modules", repeated=False, held=False)

    def own(module: nn.Module, prefix: str, recurse: bool) -> list[tuple[str, nn.Parameter]]:
        named = []
        for name, parameter in module.named_parameters(prefix=prefix, recurse=recurse):
            if id(parameter) not in taken and parameter.numel() > 0:
                taken.add(id(parameter))
                named.append((name, parameter))
        return named

    def add(unit: Unit, module: nn.Module, named: list[tuple[str, nn.Parameter]]) -> None:
        unit.modules.append(module)
        lay_out(unit, named, device)
        units.append(unit)

    def visit(module: nn.Module, prefix: str) -> None:
        direct = own(module, prefix, recurse=False)
        if direct:
            if sum(parameter.numel() * parameter.element_size() for _, parameter in direct) < SMALL_MODULE_BYTES:
                small.modules.append(module)
                small_named.extend(direct)
            else:
                add(Unit(prefix or "root module", repeated=False, held=any(module.children())), module, direct)
        repeats = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if repeats:
                named = own(child, path, recurse=True)
                if named:
                    add(Unit(path, repeated=True), child, named)
            else:
                visit(child, path)

    small_named: list[tuple[str, nn.Parameter]] = []
    visit(model, "")
    if small_named:
        lay_out(small, small_named, device)
        units.append(small)
    small.held = any(any(module.children()) for module in small.modules)
    _mark_held_together(model, units)
    return units


def _mark_held_together(model: nn.Module, units: Sequence[Unit]) -> None:
    """Mark the units that one module needs several of at once, because parameters are tied across them."""
    owner = {place.parameter: unit for unit in units for place in unit.places}
    repeated = {module: unit for unit in units if unit.repeated for module in unit.modules}
    for module in model.modules():
        parameters = module.parameters(recurse=module in repeated)
        together = {owner[parameter] for parameter in parameters if parameter in owner}
        if len(together) > 1:
            for unit in together - {repeated.get(module)}:
                unit.held = True
