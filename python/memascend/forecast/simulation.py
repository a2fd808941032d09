"""PyTorch's memory in a training step, from a run of the model's own code on tensors without memory.

The tensors lie on PyTorch's meta device: operations give shapes, dtypes and lifetimes, and compute nothing. So every
architecture is counted as it is written, with the loss in pieces, the gradients of tables by blocks, and layers that
are recomputed from inputs that wait in the plan's staging. Of layers that are alike two are run, and of a table's
blocks three: no more of them live at once. Memory inside a kernel is not seen (see `LIBRARIES_BYTES`).

Where the run depends on values, it is told: all tokens have labels, all conditions hold, and experts get equal shares.

A formula for each architecture was up to 48% low, and knew two kinds of layers.
"""

from __future__ import annotations

import inspect
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memascend.autograd.recompute import InputStash, Recomputation, StashedInput
from memascend.common.tiles import AUTO
from memascend.common.timeline import Timeline
from memascend.forecast.traffic import divided
from memascend.formats import packed_masks
from memascend.formats.weights import empty_model_of
from memascend.layout.tables import RowBlocks
from memascend.slicing.slices import Slicing
from memascend.slicing.tiles import Tiling
from memascend.vocabulary.gradient import TableGradient
from memascend.vocabulary.logits import deferred_linear
from memascend.vocabulary.lookup import embedding

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from pathlib import Path

    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit

_aten = torch.ops.aten
META = torch.device("meta")
#: Layers of one kind that are run, and blocks of a table.
LAYERS, BLOCKS = 2, 3
#: The most tokens that are run; the memory of more follows from the last doubling.
TOKENS_MAX = 32 * 1024
#: The most slices of a batch that are run, likewise, and with tiles: each takes the time of a step.
SLICES_MAX, TILED_SLICES_MAX = 16, 2
#: The most tiles of a layer's tokens that are run: the tensors of smaller ones are below those of these.
TILES_MAX = 64
#: Memory that the libraries below PyTorch (oneDNN, MKL, OpenMP) keep from their first use on, and use in an operation.
LIBRARIES_BYTES = 18 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The most that lives at once, in bytes: in the forward pass with the loss, and in the backward pass."""

    forward: int
    backward: int
    #: Whether attention had a mask that keeps the documents of a packed sequence apart.
    has_boundaries: bool = False
    #: Repeated layers of the model.
    layers: int = 0


def simulate_step(
    config: Any, directory: Path, dtype: torch.dtype, work: Workload, *, in_memory: bool
) -> StepBytes | None:
    """Run a step of the model of a configuration without memory; None where its code cannot be run so.

    The parameters themselves are not counted, nor are their gradients in memory.
    """
    slices = SLICES_MAX if work.tile_tokens is None else TILED_SLICES_MAX
    rows = slices * (work.micro_batch_size or work.batch_size)
    batch_size = max(1, min(work.batch_size, TOKENS_MAX // work.seq_len, rows))
    try:
        found = _run(config, directory, dtype, work, batch_size, in_memory)
        if batch_size == work.batch_size:
            return found
        half = _run(config, directory, dtype, work, batch_size // 2, in_memory) if batch_size > 1 else StepBytes(0, 0)
    except Exception:  # whatever a model's code says of tensors that have no values
        return None
    times = (work.batch_size - batch_size) / (batch_size - batch_size // 2)
    more = (found.forward - half.forward, found.backward - half.backward)
    forward, backward = found.forward + int(times * more[0]), found.backward + int(times * more[1])
    return StepBytes(forward, backward, found.has_boundaries, found.layers)


def _run(
    config: Any, directory: Path, dtype: torch.dtype, work: Workload, batch_size: int, in_memory: bool
) -> StepBytes:
    model = empty_model_of(config, directory, dtype)
    units = divided(model, ranks=work.ranks, experts=work.experts)
    count = sum(unit.repeated for unit in units)
    text = config.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    # Gradients of experts that are read one by one are made and put aside one by one.
    pieces = {place.shape for unit in units if unit.is_experts for place in unit.places}
    held = _Held(experts, pieces | {torch.Size((n, columns, rows)) for n, rows, columns in pieces})
    if work.recompute:
        _leave_out_layers(model, units)
    _move(model, units, held, in_memory)
    staging = _Staging()
    rows = work.micro_batch_size or work.batch_size
    slicing = Slicing(rows, say=lambda _: None, on_cut=staging.note_parts, tries=False)
    layers = [module for unit in units if unit.repeated for module in unit.modules]
    if work.tile_tokens is not None:
        least = work.seq_len * min(batch_size, rows) // TILES_MAX
        tiling = Tiling(work.tile_tokens if work.tile_tokens == AUTO else max(work.tile_tokens, least), tries=False)
        for part in tiling.parts(model, layers):
            part.forward = tiling.around(part, as_on_meta(part.forward))
    for module in layers:
        if work.recompute:
            _recompute(module, staging)
        module.forward = slicing.around(module, module.forward, module.forward)
    with on_meta(), held:
        ids = torch.zeros(batch_size, work.seq_len, dtype=torch.int64, device=META)
        packed = _positions(model, work, ids)
        with slicing.of_pass((ids,), {}), packed_masks.assumed(packed.get("position_ids")) as asked:
            loss = model(input_ids=ids, labels=ids, use_cache=False, **packed).loss
        forward = held.take_peak()
        # Not `loss.backward()`: function modes would not hold within it.
        torch.autograd.backward(loss)
        return StepBytes(forward, held.take_peak(), asked.masks > 0, count)


def _positions(model: nn.Module, work: Workload, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the positions of packed documents, where a model takes them."""
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return {"position_ids": torch.zeros_like(ids)} if work.boundaries and takes else {}


def _leave_out_layers(model: nn.Module, units: Sequence[Unit]) -> None:
    """Keep the first `LAYERS` layers of each kind, by class and shapes, in each list."""
    kept: dict[Any, int] = {}
    for unit in units:
        if not unit.repeated:
            continue
        path, _, name = unit.name.rpartition(".")
        (module,) = unit.modules
        kind = path, type(module), tuple(parameter.shape for parameter in module.parameters())
        kept[kind] = kept.get(kind, 0) + 1
        if kept[kind] > LAYERS:
            del model.get_submodule(path)._modules[name]


def _move(model: nn.Module, units: Sequence[Unit], held: _Held, in_memory: bool) -> None:
    """Replace parameters and buffers by ones on the meta device, which are not counted."""
    tables = {place.parameter for unit in units if unit.is_table and not unit.is_experts for place in unit.places}
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in moved:
                moved[parameter] = new = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
                held.leave_out(new)
                if parameter in tables:
                    new.__class__ = _TableWeight
                    new.table = _Table(new, held)  # type: ignore[attr-defined]
                if new.requires_grad:
                    new.register_post_accumulate_grad_hook(held.leave_out_gradient if in_memory else _take_gradient)
            module._parameters[name] = moved[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = held.leave_out(buffer.to(META))


def _take_gradient(parameter: torch.Tensor) -> None:
    """Take a gradient over, as `gradients.capture` does."""
    gradient, parameter.grad = parameter.grad, None
    if isinstance(gradient, TableGradient):
        for _ in gradient.blocks():
            pass


# ---- counting ---------------------------------------------------------------------------------------------------


class _Held(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, as long as they live."""

    def __init__(self, experts: int, one_by_one: Container[torch.Size] = ()) -> None:
        """Assume `experts` in a layer. Of tensors of the shapes `one_by_one` an expert's part alone is in memory."""
        super().__init__()
        self._experts, self._one_by_one = experts, one_by_one
        self._now = self._peak = 0
        self._counted: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = self._answer(func, args[0]) if func in _BY_VALUES else func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            # Tensors of other classes (gradients of tables, logits) have no memory.
            if type(tensor) is torch.Tensor:
                self._count(tensor)
        self._peak = max(self._peak, self._now)
        return made

    def _answer(self, func: Any, tensor: torch.Tensor) -> Any:
        """Return the assumed result of an operation that depends on values."""
        if func is _aten._local_scalar_dense.default:
            return tensor.dtype == torch.bool
        indices: dict[str, Any] = {"dtype": torch.int64, "device": META}
        if func is _aten.nonzero.default:
            count = tensor.numel() if tensor.ndim == 1 else max(1, tensor.numel() // self._experts)
            return torch.empty(count, tensor.ndim, **indices)
        return torch.empty_like(tensor.reshape(-1)), torch.empty(tensor.shape, **indices), torch.empty(0, **indices)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._counted:
            nbytes = storage.nbytes() // (len(tensor) if tensor.shape in self._one_by_one else 1)
            self._counted[storage._cdata] = nbytes
            self._now += nbytes
            weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self._now -= self._counted.pop(key)

    def leave_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor no longer."""
        self._count(tensor)
        key = tensor.untyped_storage()._cdata
        self._now -= self._counted[key]
        self._counted[key] = 0
        return tensor

    def leave_out_gradient(self, parameter: torch.Tensor) -> None:
        """Keep a gradient, and count it no longer."""
        if isinstance(parameter.grad, TableGradient):
            _take_gradient(parameter)
        elif parameter.grad is not None:
            self.leave_out(parameter.grad)

    def take_peak(self) -> int:
        """Return the most that was held since the last call."""
        peak, self._peak = self._peak, self._now
        return peak


#: Operations whose results depend on values.
_BY_VALUES = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten._unique2.default}


# ---- differences of the offloaded model -------------------------------------------------------------------------


class _Table:
    """A table whose blocks lie in the plan's buffers."""

    version = 0
    rows_from_host = False

    def __init__(self, weight: torch.Tensor, held: _Held) -> None:
        self.rows, self.width = self.shape = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self._blocks = RowBlocks(self.rows, self.width, weight.itemsize)
        self.block_rows = self._blocks.height
        self._held = held

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        for first, rows in islice(self._blocks, BLOCKS):
            yield first, self._held.leave_out(torch.empty(rows, self.width, dtype=self.dtype, device=META))

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.empty(indices.numel(), self.width, dtype=self.dtype, device=META)


class _TableWeight(nn.Parameter):
    """The weight of a table."""

    table: _Table

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_TABLES:
            return _OF_TABLES[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _apply_head(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    return deferred_linear(input, weight, bias, weight.table)


def _look_up(input: torch.Tensor, weight: Any, padding_idx: int | None = None, *_: Any, **__: Any) -> torch.Tensor:
    return embedding(input, weight, weight.table, padding_idx)


_OF_TABLES: dict[Callable, Callable] = {F.linear: _apply_head, F.embedding: _look_up}


class _Attention(TorchFunctionMode):
    """Has attention run as on the CPU: by the fused kernel, which never has the matrix of weights, where that can."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        attended = _attend(*args, **(kwargs or {})) if func is F.scaled_dot_product_attention else None
        return func(*args, **(kwargs or {})) if attended is None else attended


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    same_widths = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if dropout_p > 0 or query.ndim != 4 or not same_widths or (attn_mask is not None and attn_mask.requires_grad):
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype, device=META)
    attend = _aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


@contextmanager
def on_meta() -> Iterator[None]:
    """Make new tensors on the meta device, and attend as on the CPU."""
    with META, _Attention():
        yield


class _Staging(InputStash):
    """The plan's staging, in which the inputs of recomputed layers wait, not counted."""

    def __init__(self) -> None:
        super().__init__(None, "host", Timeline())  # type: ignore[arg-type]
        self.torch_device = META

    def copy_out(self, tensor: torch.Tensor) -> StashedInput:
        return _Waiting(tensor)


class _Waiting(StashedInput):
    """An input in the staging."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad

    def restore(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=META, requires_grad=self.requires_grad)


def as_on_meta(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `forward` as `on_meta` has it, also in a backward pass.

    There autograd asks for the second run, and function modes do not hold within it.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with on_meta():
            return forward(*args, **kwargs)

    return run


def _recompute(module: nn.Module, staging: InputStash) -> None:
    """Have a layer computed again in the backward pass."""
    forward = as_on_meta(module.forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        return Recomputation(module, forward, args, kwargs, staging).run(args, kwargs)

    module.forward = run
