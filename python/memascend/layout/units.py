"""The layout of a model: units of parameters that move together, and the bytes of each unit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from memascend._memascend import GRADIENT_BLOCK, PAGE_BYTES
from memascend.layout.bits import quantised_nbytes
from memascend.layout.experts import find_experts
from memascend.layout.parameter_state import Binding, GradientState, OptimizerState
from memascend.layout.quantised import check_not_quantised
from memascend.layout.tables import RowBlocks, find_heads, find_tables, find_tables_in_layers, repeats

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence, Set

    from memascend._memascend import ExternalFile, Packing, Plane, TensorId
    from memascend.layout.shards import Shard

#: Parameters below this size are packed with their neighbours and move as one tensor.
PACK_BELOW_BYTES = 64 * 1024
#: The most elements of a pack, so that a pack is one chunk of an update.
PACK_ELEMENTS_MAX = GRADIENT_BLOCK
#: Members of a pack begin at multiples of this many elements: 64 bytes of bf16.
PACK_ALIGN_ELEMENTS = 32
#: Modules outside the repeated layers whose own parameters are smaller than this share one unit.
SMALL_MODULE_BYTES = 1024 * 1024

#: Within this context PyTorch dispatches to no tensor subclass: a proxy for an absent parameter is its NaN.
raw_tensor_access = torch._C.DisableTorchFunctionSubclass

CPU = torch.device("cpu")
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ParameterEntry:
    """Where one parameter lies: elements `start ..` of a store tensor. It never changes, but leads to what does."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    numel: int
    tensor: StoreTensor
    start: int
    binding: Binding
    gradient: GradientState
    states: OptimizerState

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter of the model."""
        return self.binding.parameter

    @property
    def nbytes(self) -> int:
        """Size of the parameter in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def offset(self) -> int:
        """Its first byte in its unit."""
        return self.tensor.begin + self.start * self.dtype.itemsize

    @property
    def bits(self) -> int | None:
        """The bits that its values are quantised to as the model is opened; None where they stay."""
        unit = self.tensor.unit
        return unit.bits if self in unit.quantised else None

    @property
    def stored(self) -> tuple[int, int, int]:
        """The first of its elements in the store, the same counted in the tensor there, and the number of them."""
        shard = self.tensor.shard
        return (0, self.start, self.numel) if shard is None else shard.part(self.start, self.numel)

    @property
    def blocks(self) -> RowBlocks:
        """The blocks of rows of a table; those of experts lie one behind the other."""
        width = self.shape[-1]
        return RowBlocks(self.numel // width, width, self.dtype.itemsize)

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one of the experts that the parameter holds."""
        return self.nbytes // self.shape[0]

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """Return the parameter's values, of its shape and dtype, within its unit's bytes (uint8)."""
        return storage[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)

    def bind(self, storage: torch.Tensor) -> None:
        """Bind the parameter to its values in its unit's bytes (uint8)."""
        # A view made in inference mode would not count writes.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            self.binding.bind(self.view(storage))


@dataclass(slots=True, eq=False)
class StorePlane:
    """One array of a tensor's states on SSD."""

    plane: Plane
    #: The plane's name and number in the store.
    name: str
    id: TensorId
    #: Whether it was written; an unwritten plane is zeros.
    written: bool = False


@dataclass(slots=True, eq=False)
class StoreTensor:
    """Parameters that share one extent each for weights, gradient and states: a large one, or a pack of small ones."""

    name: str
    dtype: torch.dtype
    unit: Unit
    packed: bool
    #: Whether its parameters were trainable when it was laid out: the plan holds buffers for
    #: gradients only then.
    trained: bool = True
    #: Whether they were frozen when the run began, and have been trained since: the store has them among the frozen
    #: ones. And whether their gradients lie beside the arena, because the plan has no buffer for them.
    trained_later: bool = False
    gradient_outside: bool = False
    offset: int = 0
    numel: int = 0
    places: list[ParameterEntry] = field(default_factory=list)
    gradient: int | None = None
    #: The number of the weights in the store, if they are there.
    id: TensorId | None = None
    #: The optimizer's states.
    planes: dict[Plane, StorePlane] = field(default_factory=dict)
    #: How many elements, counted from the first, keep their states in memory from one step to the next.
    kept_elements: int = 0
    #: The share of this rank, where the store is divided over ranks: `numel`, `nbytes` and `offset` are the share's.
    shard: Shard | None = None
    #: The dtype in which the gradient is stored; autograd makes it in the weights' dtype.
    gradient_dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        """Store the gradient as autograd makes it."""
        self.gradient_dtype = self.dtype

    @property
    def begin(self) -> int:
        """The first byte in the unit of all ranks' shares together."""
        shard = self.shard
        return self.offset if shard is None else self.offset - shard.rank * shard.elements * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes, rounded up to whole pages."""
        return round_up(self.numel * self.dtype.itemsize, PAGE_BYTES)

    @property
    def gradient_nbytes(self) -> int:
        """Size of the stored gradient in bytes, rounded up to whole pages."""
        return round_up(self.numel * self.gradient_dtype.itemsize, PAGE_BYTES)


@dataclass(slots=True, eq=False)
class Unit:
    """Parameters that are loaded and evicted together."""

    name: str
    #: Whether it is one of several alike that run one after another: a decoder layer.
    repeated: bool
    #: Whether it is in use while other units are: its module runs around theirs, or one module
    #: needs several units.
    held: bool = False
    #: Whether it is a table (`memascend.layout.tables`) and nothing else.
    is_table: bool = False
    #: Whether it is used within a layer that has a unit of its own: experts and tables.
    in_layer: bool = False
    #: Of a table: whether hidden states are multiplied by it, so that it is read by blocks; otherwise it is looked up
    #: only. And whether its blocks and rows go on to a device.
    is_head: bool = False
    is_uploaded: bool = False
    #: Of a table: whether it is experts (experts, rows, columns), which are read one by one, and never whole.
    is_experts: bool = False
    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[StoreTensor] = field(default_factory=list)
    nbytes: int = 0
    index: int = -1
    #: The bits that some of its weights are quantised to as the model is opened, and which weights. All of the unit is
    #: then in a file beside the store (`layout.frozen_bits`).
    bits: int | None = None
    quantised: Set[ParameterEntry] = frozenset()
    #: Of frozen weights that are not on the store: the pieces that each is read from, one behind the other: file,
    #: offset there, length in bytes here, and how the file has it, where that is quantised.
    sources: dict[ParameterEntry, Sequence[tuple[ExternalFile, int, int, Packing | None]]] = field(default_factory=dict)
    #: Of weights that are quantised in the model's own files: the bytes that each takes there with its scales.
    published: dict[ParameterEntry, int] = field(default_factory=dict)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of its weights on the SSD: this rank's share, where the store is divided over ranks."""
        if self.bits is not None:
            return sum(quantised_nbytes(p.numel, p.bits) if p.bits else p.nbytes for p in self.places)
        if self.published:
            return sum(self.published.get(place, place.nbytes) for place in self.places)
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def in_store(self) -> bool:
        """Whether its weights are in the store, and not in files outside, which are only read."""
        return self.bits is None and not self.sources

    @property
    def read_only(self) -> str:
        """Why weights that are not in the store cannot be written, and the remedy: the end of a sentence on one."""
        if self.bits is not None:
            return f"lies beside the store as it was quantised (frozen_bits={self.bits}): leave frozen_bits out"
        if self.published:
            return (
                "is read from the model's own file as it is published (frozen='files' or frozen_bits='published'), "
                "which stays as it is: use frozen='store' without frozen_bits"
            )
        return "is read from the model's own file (frozen='files'), which stays as it is: use frozen='store'"

    @property
    def weights(self) -> list[tuple[TensorId, int, int]]:
        """Number in the store, offset in the unit and bytes of each tensor's weights."""
        return [(tensor.id, tensor.offset, tensor.nbytes) for tensor in self.tensors if tensor.id is not None]

    @property
    def outside(self) -> list[tuple[ExternalFile, int, int, int, Packing | None]]:
        """File, position there, offset and bytes in the unit of each piece of weights that is in no store."""
        found = []
        for place in self.places:
            offset = place.offset
            for file, position, nbytes, packing in self.sources.get(place, ()):
                found.append((file, position, offset, nbytes, packing))
                offset += nbytes
        return found

    @property
    def places(self) -> Iterator[ParameterEntry]:
        """The entries of all parameters, in the order of their bytes."""
        return (place for tensor in self.tensors for place in tensor.places)


def absent_like(shape: torch.Size, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """Return a tensor of `shape` whose every value is NaN and which occupies one element."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def lay_out(unit: Unit, named: Iterable[tuple[str, nn.Parameter]], device: torch.device = CPU) -> None:
    """Give every parameter its entry in `unit`: large ones page-aligned, small ones packed behind them.

    Frozen ones are packed apart, so that updates do not rewrite them. The tensors that absent parameters hold are on
    `device`.

    Raises ValueError for a dtype that cannot be trained.
    """
    #: The packs that are still filled, by dtype and whether they are trained.
    open_packs: dict[tuple[torch.dtype, bool], StoreTensor] = {}
    packs: list[StoreTensor] = []
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
            pack = open_packs.get((dtype, trained))
            if pack is None or pack.numel + numel > PACK_ELEMENTS_MAX:
                pack = StoreTensor(f"{unit.name}.packed{len(packs)}", dtype, unit, packed=True, trained=trained)
                open_packs[dtype, trained] = pack
                packs.append(pack)
            tensor = pack
            start = pack.numel
            pack.numel = round_up(start + numel, PACK_ALIGN_ELEMENTS)
        absent = absent_like(parameter.shape, dtype, device)
        state = Binding(parameter, absent), GradientState(absent), OptimizerState()
        place = ParameterEntry(name, parameter.shape, dtype, numel, tensor, start, *state)
        tensor.places.append(place)
    unit.tensors.extend(packs)
    _assign_offsets(unit)


def _assign_offsets(unit: Unit) -> None:
    """Put the tensors of `unit` behind one another, each on a page boundary."""
    for tensor in unit.tensors:
        tensor.offset = unit.nbytes
        unit.nbytes += tensor.nbytes


def partition(
    model: nn.Module,
    device: torch.device = CPU,
    fused_loss: bool | str | None = "auto",
    gradients: str = "auto",
    uploaded: bool = False,
    experts: str = "whole",
) -> list[Unit]:
    """Divide the parameters of `model`, which computes on `device`, into units, in the order of their registration.

    Every element of an outermost ModuleList or Sequential is a unit of its own (a decoder layer), and so is every
    table, but for those within layers where no table is read by blocks. Every other module with parameters of its own
    is one, small ones together. A tied parameter belongs to the first. `fused_loss` says which tables are read by
    blocks (`find_tables`); None is none. `gradients` is as in `memascend.offload`. `uploaded` says whether the model
    computes on a CUDA device. `experts`: "pieces" makes units of experts that are read one by one (`find_experts`),
    "whole" leaves them with their layers.

    Raises ValueError for a dtype that cannot be trained, quantised weights among them, or whose gradients cannot be
    stored in the dtype that is asked for, and where no experts can be read one by one.
    """
    check_not_quantised(model)
    # The layout of a store depends neither on the device nor on how the loss is computed.
    pieces = find_experts(model) if experts == "pieces" else set()
    in_layers = find_tables_in_layers(model)
    apart = pieces if fused_loss is None else pieces | in_layers
    divider = _Divider(device, find_tables(model, True) - in_layers, apart)
    divider.visit(model, "")
    units = divider.finish()
    tables = find_tables(model, fused_loss) if fused_loss is not None else set()
    heads = find_heads(model, fused_loss) if fused_loss is not None else set()
    for unit in units:
        unit.is_experts = any(place.parameter in pieces for place in unit.places)
        unit.is_table = unit.is_experts or any(place.parameter in tables for place in unit.places)
        unit.is_head = unit.is_table and any(place.parameter in heads for place in unit.places)
        unit.is_uploaded = unit.is_table and uploaded
    _mark_held_together(model, units)
    if gradients == "bfloat16":
        _round_gradients(units)
    return units


def _round_gradients(units: Sequence[Unit]) -> None:
    """Store gradients in bfloat16. Raises ValueError for a float16 weight, which would lose accuracy."""
    for tensor in (tensor for unit in units for tensor in unit.tensors):
        if tensor.trained and tensor.dtype == torch.float16:
            raise ValueError(
                f"gradients='bfloat16' is for weights in float32 (those in bfloat16 have such gradients anyway), but "
                f"{tensor.places[0].name} is in float16: leave it out, or train in float32"
            )
        if tensor.dtype == torch.float32:
            tensor.gradient_dtype = torch.bfloat16


class _Divider:
    """Collects units while the modules of a model are visited in order."""

    def __init__(self, device: torch.device, tables: Set[torch.Tensor], within_layers: Set[torch.Tensor]) -> None:
        self._device = device
        #: Parameters that are units by themselves.
        self._tables = tables
        #: Parameters within layers that are units by themselves.
        self._within_layers = within_layers
        self._units: list[Unit] = []
        #: Identities of the parameters that belong to a unit already.
        self._taken: set[int] = set()
        self._small = Unit("small modules", repeated=False)
        self._small_parameters: list[tuple[str, nn.Parameter]] = []

    def visit(self, module: nn.Module, prefix: str) -> None:
        """Divide a module, whose name in the model is `prefix`, and the modules inside it."""
        direct = self._take(module, prefix, recurse=False)
        for name, parameter in direct:
            if parameter in self._tables:
                unit = Unit(name.removesuffix(".weight"), repeated=False)
                self._add(unit, module, [(name, parameter)])
        direct = [(name, parameter) for name, parameter in direct if parameter not in self._tables]
        if sum(parameter.numel() * parameter.element_size() for _, parameter in direct) >= SMALL_MODULE_BYTES:
            unit = Unit(prefix or "root module", repeated=False, held=any(module.children()))
            self._add(unit, module, direct)
        elif direct:
            self._small.modules.append(module)
            self._small_parameters.extend(direct)
        layers = repeats(module)
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if not layers:
                self.visit(child, path)
            elif parameters := self._take(child, path, recurse=True):
                together = [(name, parameter) for name, parameter in parameters if parameter not in self._within_layers]
                if together:
                    self._add(Unit(path, repeated=True), child, together)
                for name, parameter in parameters:
                    if parameter in self._within_layers:
                        unit = Unit(name.removesuffix(".weight"), repeated=False, in_layer=bool(together))
                        self._add(unit, child, [(name, parameter)])

    def finish(self) -> list[Unit]:
        """Return all units, the one of small modules last."""
        if self._small_parameters:
            lay_out(self._small, self._small_parameters, self._device)
            self._units.append(self._small)
        self._small.held = any(any(module.children()) for module in self._small.modules)
        return self._units

    def _take(self, module: nn.Module, prefix: str, recurse: bool) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of a module that belong to no unit yet; empty parameters belong to none."""
        parameters = []
        for name, parameter in module.named_parameters(prefix=prefix, recurse=recurse):
            if id(parameter) not in self._taken and parameter.numel() > 0:
                self._taken.add(id(parameter))
                parameters.append((name, parameter))
        return parameters

    def _add(self, unit: Unit, module: nn.Module, parameters: list[tuple[str, nn.Parameter]]) -> None:
        unit.modules.append(module)
        lay_out(unit, parameters, self._device)
        self._units.append(unit)


def _mark_held_together(model: nn.Module, units: Sequence[Unit]) -> None:
    """Mark units as held where one module needs several of them at once: its parameters are tied to theirs."""
    unit_of = {place.parameter: unit for unit in units for place in unit.places}
    repeated = {module: unit for unit in units if unit.repeated for module in unit.modules}
    for module in model.modules():
        parameters = module.parameters(recurse=module in repeated)
        units_needed = {unit_of[parameter] for parameter in parameters if parameter in unit_of}
        units_needed = {unit for unit in units_needed if not unit.is_table}
        if len(units_needed) > 1:
            for unit in units_needed - {repeated.get(module)}:
                unit.held = True
