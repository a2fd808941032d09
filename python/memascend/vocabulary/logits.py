"""Logits that are computed only if a program reads them.

A `DeferredLogits` is what a head returns: a tensor of shape, dtype, device and autograd history of the logits, without
memory for them. An operation on logits before the loss (scaling, a soft cap, conversion, views and slices of the
leading dimensions) gives another one, which remembers its parent. `torch.nn.functional.cross_entropy` of it is the loss
in pieces. Any other function first computes the logits, by blocks of the table, and runs on them.

PyTorch's autograd records every function on them, as it does for any tensor: operations arrive below it
(`__torch_dispatch__`). So gradients of whatever a program does are right by construction. One thing differs: the loss
in pieces makes no gradient of the logits, so a program that wants it (`retain_grad`, `register_hook`) asks before the
loss, which then runs on computed logits.

The remembered steps refer to no tensor: a tanh saves its result, and would hold its own node, with the
graph behind it, for ever.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memascend.common.graphs import outside_of_graphs
from memascend.errors import MemascendError
from memascend.hardware.cuda import autocast, is_autocast
from memascend.vocabulary.chunked_loss import Recipe
from memascend.vocabulary.gradient import LinearSource, gradient_of
from memascend.vocabulary.logit_transforms import Convert, Divide, Multiply, Step, Tanh
from memascend.vocabulary.loss import check_version, differentiable_once, loss_in_pieces, product_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.vocabulary.tables import Table

_aten = torch.ops.aten


@dataclass(slots=True)
class _Head:
    """Inputs of the logits of one call of a head."""

    table: Table
    #: As the program gave them, with their history: (..., width), (rows, width), (rows,).
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    version: int
    hidden_version: int
    #: All logits that were derived, so that they can be computed before one is written to.
    derived: weakref.WeakSet[_LogitContents] = field(default_factory=weakref.WeakSet)

    def check(self) -> None:
        """Raise MemascendError if hidden states or weights have changed."""
        check_version(self.version, self.table)
        if _version(self.hidden) != self.hidden_version:
            raise MemascendError(
                "the hidden states of a head were written to in place after the head was called, and its logits are "
                "computed when they are read: read the logits before, or offload the model with fused_loss=False"
            )

    @torch.no_grad()
    def compute(self) -> torch.Tensor:
        """Compute the logits (..., rows) in one read of the table."""
        self.check()
        hidden = self.hidden.detach().reshape(-1, self.table.width).to(self.dtype)
        bias = None if self.bias is None else self.bias.detach().to(self.dtype)
        logits = torch.empty(hidden.shape[0], self.table.rows, dtype=self.dtype, device=hidden.device)
        for first, block in self.table.blocks():
            rows = slice(first, first + block.shape[0])
            logits[:, rows] = F.linear(hidden, block.to(self.dtype), None if bias is None else bias[rows])
        return logits.view(*self.hidden.shape[:-1], self.table.rows)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(slots=True, eq=False, weakref_slot=True)
class _LogitContents:
    """The values of logits, computed or not. It refers to no tensor with a node of autograd that may save them."""

    head: _Head
    dtype: torch.dtype
    parent: _LogitContents | None = None
    #: The operation that gives them from the parent's, with its other arguments.
    operation: tuple[Callable, tuple, dict[str, Any]] | None = None
    #: The values once they were computed.
    result: torch.Tensor | None = None
    #: The hooks that a program has registered, and whether it asked for the gradient.
    hooks: Any = None
    retains_grad: bool = False

    @property
    def is_watched(self) -> bool:
        """Whether a program waits for the gradient of these logits."""
        return self.retains_grad or bool(self.hooks)

    @torch.no_grad()
    def compute(self) -> torch.Tensor:
        """Return the values, an ordinary tensor without history; views share memory."""
        if self.result is None:
            if self.parent is None or self.operation is None:
                self.result = self.head.compute()
            else:
                func, args, kwargs = self.operation
                self.result = func(self.parent.compute(), *args, **kwargs)
                self.parent = self.operation = None
        return self.result


class _Whole(torch.autograd.Function):
    """The logits of a head: deferred forward, and computed gradients backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, head: _Head
    ) -> torch.Tensor:
        """Return deferred logits."""
        ctx.save_for_backward(hidden)
        ctx.table, ctx.dtype, ctx.version = head.table, head.dtype, head.version
        ctx.bias_dtype = None if bias is None else bias.dtype
        return DeferredLogits.of_head(head)

    @staticmethod
    def backward(ctx: Any, grad_logits: torch.Tensor) -> Any:
        """Multiply a gradient of whole logits by the table, block by block."""
        with torch.no_grad():
            gradients = _Whole._gradients(ctx, grad_logits)
        return *differentiable_once(*gradients), None

    @staticmethod
    def _gradients(ctx: Any, grad_logits: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        table = ctx.table
        check_version(ctx.version, table)
        flat_grad = grad_logits.reshape(-1, table.rows)
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            exact = torch.promote_types(ctx.dtype, torch.float32)
            total = torch.zeros(flat_grad.shape[0], table.width, dtype=exact, device=hidden.device)
            for first, block in table.blocks():
                total += flat_grad[:, first : first + block.shape[0]] @ block.to(ctx.dtype)
            grad_hidden = total.to(hidden.dtype).view(hidden.shape)
        if ctx.needs_input_grad[1]:
            flat_hidden = hidden.detach().reshape(-1, table.width).to(ctx.dtype)
            grad_weight = gradient_of(table, LinearSource(flat_hidden, flat_grad, table.dtype))
        if ctx.needs_input_grad[2]:
            grad_bias = flat_grad.sum(0).to(ctx.bias_dtype)
        return grad_hidden, grad_weight, grad_bias


class DeferredLogits(torch.Tensor):
    """Logits that are computed when they are read; see the module."""

    _contents: _LogitContents

    @staticmethod
    def _make(contents: _LogitContents, like: torch.Tensor) -> DeferredLogits:
        """Make logits with the shape and strides of `like`, a tensor without memory."""
        logits = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, like.shape, strides=like.stride(), dtype=contents.dtype, device=contents.head.hidden.device
        )
        logits._contents = contents
        contents.head.derived.add(contents)
        return logits

    @staticmethod
    def of_head(head: _Head) -> DeferredLogits:
        """Return the logits that a head itself gives."""
        shape = (*head.hidden.shape[:-1], head.table.rows)
        with _disable_current_modes():  # that count operations, or their memory: this is neither
            like = torch.empty(shape, device="meta")
        return DeferredLogits._make(_LogitContents(head, head.dtype), like)

    def _derive(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> DeferredLogits:
        """Return the deferred result of an operation."""
        shape = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        meta = {name: value for name, value in kwargs.items() if name != "device"}
        like = func(shape, *args, **meta)
        contents = _LogitContents(self._contents.head, like.dtype, self._contents, (func, args, kwargs))
        return DeferredLogits._make(contents, like)

    @property
    def is_computed(self) -> bool:
        """Whether its values are in memory."""
        return self._contents.result is not None

    def computed(self) -> torch.Tensor:
        """Return the values, an ordinary tensor without history; views of computed logits share their memory."""
        return self._contents.compute()

    @classmethod
    @outside_of_graphs
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the loss in pieces where the function is the loss."""
        if is_answered_elsewhere(cls, types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = _loss(*args, **kwargs)
            if loss is not None:
                return loss
        if func in _WITHOUT_HISTORY:
            args, kwargs = pytree.tree_map(
                lambda leaf: leaf.computed() if isinstance(leaf, DeferredLogits) else leaf, (args, kwargs)
            )
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func in _WATCHING:
                (logits, *_) = args
                logits._contents.hooks, logits._contents.retains_grad = logits._backward_hooks, logits.retains_grad
            return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Remember supported steps; run everything else on the values."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredLogits) and not first.is_computed and _remembered(func, first, args[1:], kwargs):
            return first._derive(func, args[1:], kwargs)
        # In inference mode functions arrive that autograd would have taken apart.
        if isinstance(first, DeferredLogits) and not first.is_computed and func._can_decompose():
            return func.decompose(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DeferredLogits)]
        written = func._schema.is_mutable
        wrappers: dict[int, DeferredLogits] = {}
        for leaf in leaves:
            # Logits derived before this write have the values of before.
            for relative in list(leaf._contents.head.derived) if written else ():
                relative.compute()
            wrappers[id(leaf.computed())] = leaf
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.computed() if isinstance(leaf, DeferredLogits) else leaf, (args, kwargs)
        )
        result = func(*args, **kwargs)
        return pytree.tree_map(lambda leaf: wrappers.get(id(leaf), leaf), result) if written else result

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self._with_memory().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        """Return the values as lists."""
        return self.computed().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._with_memory())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self.requires_grad:
            raise RuntimeError(  # PyTorch's own words
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
            )
        if id(self) not in memo:
            memo[id(self)] = self.computed().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._with_memory().__reduce_ex__(protocol)

    def _with_memory(self) -> torch.Tensor:
        """Return an ordinary tensor of the values, a leaf."""
        return self.computed().detach().requires_grad_(self.requires_grad)


_T = torch.Tensor
#: Functions that want an address, or the values apart from history: a program that keeps them may change the weights.
_WITHOUT_HISTORY = frozenset(
    (
        *(getattr(_T, name) for name in ("data_ptr", "untyped_storage", "storage", "share_memory_", "detach")),
        *(_T.__dlpack__, _T.__dlpack_device__, torch.detach, vars(torch._C.TensorBase)["data"].__get__),
    )
)
#: Functions by which a program asks for the gradient of logits.
_WATCHING = frozenset((_T.register_hook, _T.retain_grad))


# ---- remembered steps -----------------------------------------------------------------------------------------------


def is_answered_elsewhere(cls: type, types: Sequence[type]) -> bool:
    """Return whether a function on `types` belongs to a class other than `cls`, with values elsewhere."""
    return any(
        not issubclass(kind, cls) and not getattr(kind, "answers_last", False) and _answer_of(kind) is not _DEFAULT
        for kind in types
    )


def _answer_of(kind: type) -> Any:
    return getattr(kind.__torch_function__, "__func__", None)  # type: ignore[attr-defined]


_DEFAULT = _answer_of(torch.Tensor)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _of_leading_dimension(logits: DeferredLogits, args: tuple, kwargs: dict[str, Any]) -> bool:
    dimension = args[0] if args else kwargs.get("dim", 0)
    return not kwargs and dimension % logits.ndim != logits.ndim - 1


def _remembered(func: Any, logits: DeferredLogits, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether an operation is one that models do before the loss."""
    if func in (_aten.mul.Tensor, _aten.div.Tensor):
        return not kwargs and len(args) == 1 and _is_number(args[0]) and logits.dtype.is_floating_point
    if func in (_aten.tanh.default, _aten.alias.default, _aten.detach.default):
        return True
    if func is _aten.clone.default:
        # `contiguous()` asks for an order of elements; `clone()` keeps the values of now.
        return kwargs == {"memory_format": torch.contiguous_format}
    if func is _aten._to_copy.default:
        dtype, device = kwargs.get("dtype") or logits.dtype, kwargs.get("device")
        same_device = device is None or torch.device(device) == logits.device
        return dtype.is_floating_point and same_device and set(kwargs) <= {"dtype", "device", "memory_format"}
    if func in (_aten.slice.Tensor, _aten.select.int):
        return _of_leading_dimension(logits, args, kwargs)
    if func in (_aten.view.default, _aten._unsafe_view.default):
        return bool(args[0]) and args[0][-1] == logits.shape[-1]
    return False


def _step(operation: tuple[Callable, tuple, dict[str, Any]], dtype: torch.dtype) -> Step | None:
    """Return the step of an operation on the logits' values, or None for one that moves them only."""
    func, args, kwargs = operation
    if func is _aten.mul.Tensor:
        return Multiply(args[0])
    if func is _aten.div.Tensor:
        return Divide(args[0])
    if func is _aten.tanh.default:
        return Tanh()
    if func is _aten._to_copy.default and kwargs.get("dtype") not in (None, dtype):
        return Convert(dtype, kwargs["dtype"])
    return None


def _retrace(logits: DeferredLogits) -> tuple[torch.Tensor, tuple[Step, ...]] | None:
    """Return the hidden states (N, width) of logits (N, rows), with history, and the steps that were taken.

    None if they were computed, or history was cut, or a program waits for a gradient on the way.
    """
    chain: list[tuple[tuple[Callable, tuple, dict[str, Any]], torch.dtype]] = []
    origin = logits._contents
    while origin.parent is not None:
        if origin.is_watched:
            return None
        assert origin.operation is not None
        chain.append((origin.operation, origin.parent.dtype))
        origin = origin.parent
    if origin.result is not None or origin.is_watched:
        return None
    hidden, steps = origin.head.hidden, []
    for operation, dtype in reversed(chain):
        func, args, _ = operation
        step = _step(operation, dtype)
        if step is not None:
            steps.append(step)
        elif func is _aten.detach.default:
            return None
        elif func in (_aten.slice.Tensor, _aten.select.int):
            hidden = func(hidden, *args)
        elif func in (_aten.view.default, _aten._unsafe_view.default):
            hidden = hidden.reshape(*args[0][:-1], hidden.shape[-1])
    return hidden, tuple(steps)


def _loss(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Return the cross entropy in pieces, or None where it is not of deferred logits (N, rows) and labels (N,)."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("none", "mean", "sum")
    if not plain or not isinstance(input, DeferredLogits) or input.is_computed:
        return None
    if input.ndim != 2 or target.ndim != 1 or target.dtype != torch.int64 or target.device != input.device:
        return None
    if input.shape[0] != target.shape[0] or not 0 <= label_smoothing <= 1 or isinstance(target, DeferredLogits):
        return None
    retraced = _retrace(input)
    head = input._contents.head
    if retraced is None or (torch.is_grad_enabled() and _is_cut(input)):
        return None
    head.check()
    hidden, steps = retraced
    kind = input.device.type
    autocasts = is_autocast(kind) and input.dtype != torch.float64
    if autocasts and input.dtype != torch.float32:
        steps = (*steps, Convert(input.dtype, torch.float32))  # as autocast does
    recipe = Recipe(head.dtype, steps, label_smoothing)
    with autocast(kind, None, False):
        loss = loss_in_pieces(hidden, head.weight, head.bias, head.table, target, recipe, ignore_index, reduction)
    return loss.to(torch.float32 if autocasts else input.dtype)


def _is_cut(logits: DeferredLogits) -> bool:
    """Return whether the logits have no history although the head's inputs have one."""
    head = logits._contents.head
    inputs = (head.hidden, head.weight, head.bias)
    return not logits.requires_grad and any(tensor is not None and tensor.requires_grad for tensor in inputs)


def deferred_linear(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, table: Table
) -> DeferredLogits:
    """Return the logits that `torch.nn.functional.linear` gives, deferred.

    `weight` is the parameter that gets the gradient; its values are read from `table`.
    """
    if hidden.shape[-1] != table.width:
        raise RuntimeError(
            f"hidden states of shape {tuple(hidden.shape)} do not fit a head of {table.rows} rows and width "
            f"{table.width}"
        )
    dtype = product_dtype(hidden, table)
    # Of an offloaded bias there are values only while the head's module runs.
    bias = None if bias is None else bias.clone()
    head = _Head(table, hidden, weight, bias, dtype, table.version, _version(hidden))
    return _Whole.apply(hidden, weight, bias, head)
