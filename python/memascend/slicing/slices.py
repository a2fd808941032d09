"""Layers on slices of a batch: all micro-batches go through a layer while its weights are in memory.

The model is called once, with the whole batch. Each repeated layer runs on slices of it, the last slice first: autograd
goes through the calls of a layer in the opposite order, so that it adds up the gradients of the slices from the first
to the last, as a program does that accumulates micro-batches. It adds them before the gradient of a weight is taken
over, which thus is put aside once.

Nothing here knows of stores: a model in memory runs with the same slices (`run_in_slices`), and gives the same bits.

Slices run from the last to the first because autograd runs the latest calls first. A tensor that several layers get
(encoder states) is put aside once, by the tensor and the number of the slice. Whether a layer may be cut is not read
from its code but tried on two rows (`trial`). A cache that was not asked for is copied for each slice, as each
micro-batch would begin with an empty one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from memascend.autograd.kv_caches import asks_for_cache
from memascend.common.graphs import in_backward
from memascend.common.notices import warn_of
from memascend.errors import MemascendError
from memascend.layout.units import partition
from memascend.options import check_micro_batch_size
from memascend.slicing.calls import Call, Outputs
from memascend.slicing.collectors import Collected, collected_kinds
from memascend.slicing.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch import nn

    from memascend.hardware.cuda import ComputeDevice
    from memascend.slicing.trial import Joins

#: Arguments of models of transformers whose first dimension is the batch.
_OF_BATCH = ("input_ids", "inputs_embeds", "decoder_input_ids", "input_features", "input_values", "labels")


def first_tensor(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor that has the size of a batch: the first tensor with dimensions, or the ids."""
    named = (kwargs.get(name) for name in _OF_BATCH)
    leaves = (leaf for value in (*args, *named, *kwargs.values()) for leaf in pytree.tree_leaves(value))
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), None)


def rows_of(args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Return how many rows the batch has that a model is called with."""
    first = first_tensor(args, kwargs)
    return None if first is None else len(first)


class Slicing:
    """Runs the repeated layers of one model on slices of its batch."""

    def __init__(
        self,
        rows: int,
        *,
        say: Callable[[str], None] = warn_of,
        between: Callable[[nn.Module], None] = lambda module: None,
        on_cut: Callable[[torch.Tensor, Sequence[torch.Tensor]], None] = lambda whole, parts: None,
        device: ComputeDevice | None = None,
        tries: bool = True,
    ) -> None:
        """Run on slices of `rows`.

        Args:
            rows: sequences of a micro-batch.
            say: called with a notice where a layer runs on the whole batch all the same.
            between: called with a layer after each of its calls.
            on_cut: called with a tensor that was cut, and its slices.
            device: where the model computes.
            tries: whether a layer is tried first; otherwise its outputs are joined by their shapes, which is right for
                hidden states.
        """
        self.rows = rows
        self._say, self._between, self._on_cut, self._device, self._tries = say, between, on_cut, device, tries
        #: Rows of the batch of the pass under way, and of the last pass, whose layers a backward pass may call again.
        self._batch: int | None = None
        self._last: int | None = None
        self._caching = False
        #: The finding of the first call of each kind: how its outputs are joined, or why it is not cut.
        self._tried: dict[Hashable, Joins | str] = {}
        self._layouts: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        self._said: set[str] = set()

    @contextmanager
    def of_pass(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        """Enclose a call of the whole model with these arguments."""
        before = self._batch, self._caching
        self._batch, self._caching = rows_of(args, kwargs), asks_for_cache(args, kwargs)
        self._last = self._batch
        try:
            yield
        finally:
            self._batch, self._caching = before

    def around(self, module: nn.Module, layer: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `layer`, the forward of `module`, with slices of its arguments.

        `plain` computes the same as `layer`, for a trial without gradients the first time.
        """

        @wraps(layer)
        def sliced(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._run(module, layer, plain, args, kwargs)
            finally:
                self._between(module)

        return sliced

    def _run(
        self,
        module: nn.Module,
        layer: Callable[..., Any],
        plain: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        rows = self._batch
        if rows is None and in_backward():
            rows = self._last
        if rows is None or rows <= self.rows:
            return layer(*args, **kwargs)
        call = Call(args, kwargs, rows)
        times = call.times
        if times > 1:  # several choices, images or the like for each row of the batch
            call = Call(args, kwargs, times * rows)
        # Entries of a cache would have to be joined, object by object.
        if call.has_cache and (self._caching or not torch.is_grad_enabled()):
            if self._caching and torch.is_grad_enabled():
                self._say_whole(module, "a cache was asked for (use_cache=True, or one was given)")
            return layer(*args, **kwargs)
        joins = self._joins(module, plain, call)
        if isinstance(joins, str):
            self._say_whole(module, joins)
            return layer(*args, **kwargs)
        return self._run_slices(module, layer, call, call.split(times * self.rows), joins)

    def _joins(self, module: nn.Module, plain: Callable[..., Any], call: Call) -> Joins | str | None:
        """Return how the outputs of slices are joined, or why the layer is to see the whole batch."""
        if not call.times:
            return f"its first input has not the {call.rows} rows of the batch first"
        if (why := call.uncut) is not None:
            return why
        if not self._tries:
            return None
        kind = self._layout(module), module.training, call.kind(), collected_kinds()
        if kind not in self._tried:
            self._tried[kind] = Trial(module, self._device, self._between).of(plain, call)
        return self._tried[kind]

    def _layout(self, module: nn.Module) -> Hashable:
        """Return the classes that a layer is made of."""
        if module not in self._layouts:
            self._layouts[module] = tuple(type(inner) for inner in module.modules())
        return self._layouts[module]

    def _say_whole(self, module: nn.Module, why: str) -> None:
        name = type(module).__name__
        if name not in self._said:
            self._said.add(name)
            self._say(
                f"{name} runs on the whole batch, and not on micro-batches of {self.rows} (micro_batch_size), which "
                f"takes the memory of the whole batch: {why}"
            )

    def _run_slices(
        self,
        module: nn.Module,
        layer: Callable[..., Any],
        call: Call,
        slices: list[list[Any]],
        joins: Joins | None,
    ) -> Any:
        for index in call.cut:
            self._on_cut(call.leaves[index], [leaves[index] for leaves in slices])
        outputs: list[Outputs] = []
        collected = Collected()
        # From the last to the first: see the module's docstring.
        for leaves in reversed(slices):
            args, kwargs = call.arguments(leaves)
            outputs.insert(0, Outputs.of(layer(*args, **kwargs), collected.take()))
            self._between(module)
        structure = outputs[0].structure
        if joins is None:
            rows = len(slices[0][call.cut[0]])
            joins = [isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) for leaf in outputs[0].leaves]
        if any(len(output.leaves) != len(joins) or output.structure != structure for output in outputs):
            raise MemascendError(
                f"{type(module).__name__} returned other things for a slice of the batch than when it was tried: leave "
                "micro_batch_size out, and accumulate"
            )
        joined = [
            self._join(call, slices, [output.leaves[index] for output in outputs], by_rows)
            for index, by_rows in enumerate(joins)
        ]
        count = structure.num_leaves
        collected.add(joined[count:])
        return pytree.tree_unflatten(joined[:count], structure)

    @staticmethod
    def _join(call: Call, slices: list[list[Any]], values: list[Any], by_rows: bool) -> Any:
        """Return one output of a layer, of its `values` for each slice: side by side, or the value that all share."""
        if not by_rows:
            return values[0]
        # An input that the layer has handed on.
        for index in call.cut:
            if all(value is leaves[index] for value, leaves in zip(values, slices, strict=True)):
                return call.leaves[index]
        return torch.cat(values)


def run_in_slices(model: nn.Module, micro_batch_size: int) -> nn.Module:
    """Have the repeated layers of a model in memory run on micro-batches, in place, and return the model.

    `memascend.offload(..., micro_batch_size=...)` does the same with the layers of an offloaded model, and gives the
    same bits: this is a reference for it, and a way to compute with the activations of a micro-batch together with
    checkpointing of activations. The model is called with the whole batch, as before.

    Args:
        model: an ordinary model, on any device.
        micro_batch_size: sequences that a layer computes at once. A batch that is no larger is computed as before.

    Raises ValueError for a micro-batch of no sequence, MemascendError for a model whose layers do so already.
    """
    check_micro_batch_size(micro_batch_size)
    if getattr(model, "_memascend_slices", None) is not None:
        raise MemascendError("the layers of the model run on micro-batches already: call memascend.run_in_slices once")

    def clear(_: nn.Module) -> None:
        # Slices would share a converted weight, and their gradients would be added in the lower precision.
        torch.clear_autocast_cache()

    slicing = Slicing(micro_batch_size, between=clear)

    def layer(module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        return slicing.around(module, forward, forward)(*args, **kwargs)

    for module in {module for unit in partition(model) if unit.repeated for module in unit.modules} - {model}:
        surround(module, layer)
    enclose(model, slicing.of_pass)
    model._memascend_slices = slicing  # type: ignore[assignment]
    return model


def enclose(model: nn.Module, of_pass: Callable[[tuple, dict[str, Any]], AbstractContextManager[None]]) -> None:
    """Have each call of a model run within `of_pass(args, kwargs)`, also of another forward in the place of its own.

    TRL and Liger-Kernel put such there.
    """
    entered: list[AbstractContextManager[None]] = []

    def begin(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        entered.append(of_pass(args, kwargs))
        entered[-1].__enter__()

    def end(*_: Any) -> None:
        if entered:  # not where another hook has failed before
            entered.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)


def surround(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have `call(module, forward, args, kwargs)` run for the module's forward, and of a copy of the module for its."""
    own, of_class = module.__dict__.get("forward"), type(module).forward

    @wraps(of_class)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, partial(of_class, self) if own is None else own, args, kwargs)

    module.forward = MethodType(forward, module)
