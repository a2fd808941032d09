"""Parts of a model that work token by token, on tiles of the sequence: MLPs and norms.

Of such a part no more than one tile's intermediate tensors are in memory at once, in the forward pass and in the
backward pass, which computes a tile again from the part's input. Tiles are computed in order in both, so that random
numbers are drawn in the same order, and the gradients of weights are added up from the first tile to the last: in
float32, where the weights are in a lower precision.

Which parts work token by token is found by trying them (`tile_trial`). Nothing here knows of stores: a model in memory
runs on the same tiles (`run_in_tiles`), and gives the same bits.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import wraps
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from memascend.autograd.buffers import BufferCopies, BufferState, version_of
from memascend.autograd.rng import RandomState
from memascend.common.graphs import in_backward, outside_of_graphs
from memascend.common.notices import warn_of
from memascend.common.tiles import AUTO, parse_tile_tokens, tile_of
from memascend.errors import MemascendError
from memascend.hardware.cuda import autocast, autocast_of, open_device
from memascend.layout.units import partition
from memascend.slicing.collectors import collected_kinds
from memascend.slicing.slices import enclose, first_tensor, surround
from memascend.slicing.tile_calls import TileCall, by_tokens, swapped, token_dims, tokens_of
from memascend.slicing.tile_trial import TileTrial, leaves_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from memascend.hardware.cuda import ComputeDevice
    from memascend.slicing.tile_calls import Join

#: Modules that keep no intermediate tensors, and containers of modules.
_PLAIN = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

#: Types of settings of modules that can be compared.
_SETTINGS = (bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType)


class Tiling:
    """Runs the parts of one model that work token by token on tiles."""

    def __init__(
        self,
        tile_tokens: int | str,
        *,
        say: Callable[[str], None] = warn_of,
        device: ComputeDevice | None = None,
        tries: bool = True,
    ) -> None:
        """Run on tiles of `tile_tokens`, or as "auto" says.

        Args:
            tile_tokens: tokens of a tile, or "auto".
            say: called with a notice where no part of a layer runs on tiles.
            device: where the model computes.
            tries: whether a part's values are compared before it runs on tiles; otherwise its shapes alone decide.
        """
        self.tile_tokens = tile_tokens
        self._say, self._device, self._tries = say, device, tries
        #: The finding of the first call of each kind: how its outputs are joined, or why it runs on the whole sequence.
        self._tried: dict[Hashable, list[Join] | str] = {}
        #: Which modules were training then.
        self._training: dict[Hashable, tuple[bool, ...]] = {}
        #: The finding for the last call of a forward pass, whatever was collected then.
        self._latest: dict[Hashable, list[Join] | str] = {}
        self._kinds: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        #: The class of the layer that each part of a layer is in.
        self._layers: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        #: For each class of layers, why parts with matrices run on the whole sequence, as far as one was called with
        #: more tokens than a tile has; None once one runs on tiles.
        self._whole: dict[str, dict[str, str] | None] = {}
        self._said: set[str] = set()
        self._copies = BufferCopies()
        #: The threads that are inside a part.
        self._inside: set[int] = set()
        #: `_run`, which torch.compile does not trace.
        self.run = outside_of_graphs(self._run)

    def parts(self, model: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
        """Return the modules that may run on tiles: those inside `layers`, and norms outside of them."""
        parts: dict[nn.Module, None] = {}
        of_layers: set[nn.Module] = set()
        for layer in layers:
            of_layers.update(layer.modules())
            name, of_layer = type(layer).__name__, []
            for inner in layer.modules():
                if inner is not layer and not isinstance(inner, _PLAIN) and any(True for _ in inner.parameters()):
                    of_layer.append(inner)
                    self._layers[inner] = name
            parts.update(dict.fromkeys(of_layer))
            if not isinstance(layer, _PLAIN) and name not in self._whole:
                divided = any(_has_matrices(inner.parameters()) for inner in of_layer)
                self._whole[name] = {} if divided else {"": "it has no part that works token by token"}
        for module in model.modules():
            own = list(module.parameters())
            if module not in of_layers and own and not _has_matrices(own) and not isinstance(module, _PLAIN):
                parts[module] = None
        return list(parts)

    def around(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `forward`, the method of `module`, with tiles of its arguments."""

        @wraps(forward)
        def tiled(*args: Any, **kwargs: Any) -> Any:
            return self.run(module, forward, args, kwargs)

        return tiled

    @contextmanager
    def of_pass(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        """Enclose a call of the whole model with these arguments; say after it which layers run on no tiles."""
        yield
        ids = first_tensor(args, kwargs)
        tokens = 0 if ids is None else ids.shape[:2].numel()
        if tokens <= tile_of(self.tile_tokens, tokens):
            return
        for layer, parts in self._whole.items():
            if not parts or layer in self._said:
                continue
            self._said.add(layer)
            why = "; ".join(f"{name}: {reason}" if name else reason for name, reason in parts.items())
            self._say(
                f"{layer} runs on whole sequences, and not on tiles (tile_tokens={self.tile_tokens!r}), which takes "
                f"the memory of the whole sequence: {why}"
            )

    def _run(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() in self._inside:  # A part of a part has its tile.
            return forward(*args, **kwargs)
        call = TileCall.of(args, kwargs)
        if call is None or call.tokens <= tile_of(self.tile_tokens, call.tokens):
            if call is None and (tokens := tokens_of(args, kwargs)) > tile_of(self.tile_tokens, tokens):
                self._note(module, "what it is called with is not all of the same tokens")
            return forward(*args, **kwargs)
        joins = self._joins(module, forward, call)
        if isinstance(joins, str):
            return forward(*args, **kwargs)
        tiles = _Tiles(self, module, forward, call, joins)
        weights = list(module.parameters())
        outputs = (
            _Tiled.apply(tiles, len(call.tensors), *call.tensors, *weights)
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*call.tensors, *weights))
            else tiles.forward(call.tensors)
        )
        return tiles.result(outputs)

    def _joins(self, module: nn.Module, forward: Callable[..., Any], call: TileCall) -> list[Join] | str:
        """Return how the outputs of tiles are joined, or why the part is to see the whole sequence."""
        kind: Hashable = self._kind(module), call.kind(), autocast_of(call.device)
        if in_backward() and kind in self._latest:
            return self._latest[kind]  # Nothing is collected where a layer is computed again.
        self._latest[kind] = joins = self._try((kind, collected_kinds()), module, forward, call)
        self._note(module, joins if isinstance(joins, str) else None)
        return joins

    def _note(self, module: nn.Module, why: str | None) -> None:
        """Note that a part runs on tiles, or else why it does not."""
        layer = self._layers.get(module)
        reasons = None if layer is None else self._whole.get(layer)
        if layer is not None and reasons is not None and _has_matrices(module.parameters()):
            if why is None:
                self._whole[layer] = None
            else:
                reasons[type(module).__name__] = why

    def _try(self, kind: Hashable, module: nn.Module, forward: Callable[..., Any], call: TileCall) -> list[Join] | str:
        training = tuple(inner.training for inner in module.modules())
        before = self._training.get(kind)
        # A trial in training covers evaluation, too.
        if before is None or any(now and not then for now, then in zip(training, before, strict=True)):
            if torch.is_inference_mode_enabled() and self._tries:
                return "it is first called in inference mode, in which it cannot be tried"
            trial = TileTrial(module, self.device_of(call.device), compares=self._tries)
            with self.inside():
                self._tried[kind] = trial.of(forward, call)
            self._training[kind] = training
        return self._tried[kind]

    def _kind(self, module: nn.Module) -> Hashable:
        """Return the makeup of a part: its classes with their settings, and its weights' shapes and dtypes."""
        if module not in self._kinds:
            classes = tuple((type(inner), _settings(inner)) for inner in module.modules())
            weights = tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
            self._kinds[module] = classes, weights
        trained = tuple(parameter.requires_grad for parameter in module.parameters())
        return self._kinds[module], trained

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Have parts of parts run on their arguments as they are."""
        thread = threading.get_ident()
        if thread in self._inside:
            yield
            return
        self._inside.add(thread)
        try:
            yield
        finally:
            self._inside.discard(thread)

    def state_of(self, module: nn.Module) -> BufferState:
        """Record the present attributes of the modules of a part."""
        return BufferState(module, self._copies)

    def device_of(self, device: torch.device) -> ComputeDevice | None:
        """Return the device that the model computes on, or a model in memory on `device`."""
        if self._device is None and device.type == "cuda":
            self._device = open_device(device)
        return self._device


def _settings(module: nn.Module) -> Hashable:
    """Return the plain values and functions that are attributes of a module: parts of one class may differ by them."""
    return tuple(
        (name, type(value), value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, _SETTINGS) and not hasattr(nn.Module, name) and name != "training"
    )


def _has_matrices(parameters: Any) -> bool:
    return any(parameter.ndim > 1 for parameter in parameters)


class _Tiles:
    """One call of a part, tile by tile."""

    def __init__(
        self, tiling: Tiling, module: nn.Module, forward: Callable[..., Any], call: TileCall, joins: list[Join]
    ) -> None:
        self._tiling, self._module, self._forward, self._joins = tiling, module, forward, joins
        self._structure = call.without_tensors()
        self._bounds = call.bounds(tile_of(tiling.tile_tokens, call.tokens))
        self._autocast = autocast_of(call.device)
        self._buffers = tiling.state_of(module)
        device = tiling.device_of(call.device)
        self._random = RandomState(device, self._buffers.generators, torch_only=self._buffers.checkpointed)
        self._outputs: Any = None

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the outputs of all tiles, joined."""
        joined: list[torch.Tensor] = []
        versions = [version_of(tensor) for tensor in tensors]
        # Without gradients, unless nothing that the part is known to compute with wants any.
        with self._computing():
            flat = self._structure.flat(tensors)
            for begin, end in self._bounds:
                tile = self._structure.tile(flat, begin, end)
                leaves, self._outputs = self._structure.call(self._forward, tile)
                self._check_own(leaves, ())
                if not joined:
                    joined = [join.whole(leaf, tensors[0]) for join, leaf in zip(self._joins, leaves, strict=True)]
                for join, whole, leaf in zip(self._joins, joined, leaves, strict=True):
                    part = join.part(whole, begin, end)
                    part.copy_(leaf.reshape(part.shape))
                del leaves, leaf
        if versions != [version_of(tensor) for tensor in tensors]:
            raise MemascendError(
                f"{type(self._module).__name__} changes its inputs in place, so that it cannot run on tiles of "
                "the sequence: leave tile_tokens out"
            )
        return tuple(joined)

    def result(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the outputs as the part returns them."""
        return torch.utils._pytree.tree_unflatten(list(outputs), self._outputs)

    def backward(
        self,
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of inputs and weights that are `wanted`, from the gradients of the outputs."""
        of_inputs = [Whole(tensor) for tensor in inputs]
        gradients = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        sums = [_Sum(weight.dtype) for weight in weights]
        wanted_inputs, wanted_weights = wanted[: len(inputs)], wanted[len(inputs) :]
        aliases = [weight.detach().requires_grad_(want) for weight, want in zip(weights, wanted_weights, strict=True)]
        state = self._buffers.restored(), self._random.restored()
        with state[0], state[1], swapped(self._module, aliases), self._computing():
            flat = self._structure.flat(inputs)
            for begin, end in self._bounds:
                tile = self._structure.tile(flat, begin, end, wanted_inputs)
                with torch.enable_grad():
                    leaves, _ = self._structure.call(self._forward, tile)
                self._check_own(leaves, [*tile, *aliases])
                parts = self._gradients_of(leaves, gradients, (begin, end), [*tile, *aliases])
                del leaves
                for whole, part in zip(of_inputs, parts[: len(tile)], strict=True):
                    whole.put(part, begin, end)
                for index, total in enumerate(sums):
                    total.add(parts[len(tile) + index])
                    parts[len(tile) + index] = None
        return [*(whole.gradient for whole in of_inputs), *(total.take() for total in sums)]

    def _check_own(self, leaves: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """Raise MemascendError where tensors that gradients would reach are not among the part's `own`."""
        if leaves_of(leaves) - {id(tensor) for tensor in own}:
            raise MemascendError(
                f"{type(self._module).__name__} computes with trained weights that are neither its own nor its "
                "inputs, and they would get no gradient where it runs on tiles of the sequence: leave tile_tokens "
                "out"
            )

    def _gradients_of(
        self,
        leaves: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        bounds: tuple[int, int],
        targets: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of one tile's inputs and weights; None where none is wanted or there is none."""
        outputs, given = [], []
        for leaf, join, gradient in zip(leaves, self._joins, gradients, strict=True):
            if gradient is not None and leaf.requires_grad:
                outputs.append(leaf)
                given.append(join.part(gradient, *bounds).reshape(leaf.shape))
        wanting = [target for target in targets if target.requires_grad]
        if not outputs or not wanting:
            return [None] * len(targets)
        made = iter(torch.autograd.grad(outputs, wanting, given, allow_unused=True))
        return [next(made) if target.requires_grad else None for target in targets]

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute as the part did when it was called; no tile shares a converted weight with another."""
        kind, dtype, _ = self._autocast
        with self._tiling.inside(), autocast(kind, dtype, False):
            yield


class Whole:
    """The gradient of an input, put together from the gradients of its tiles."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self.gradient: torch.Tensor | None = None

    def put(self, part: torch.Tensor | None, begin: int, end: int) -> None:
        """Put the gradient of the tokens from `begin` to `end`; None is zero."""
        if self.gradient is None:
            if part is None:
                return
            # Gradients that earlier tiles did not have are zero.
            make = torch.zeros if begin else torch.empty
            self.gradient = make(self._like.shape, dtype=part.dtype, device=part.device)
        target = by_tokens(self.gradient, token_dims(self.gradient))[begin:end]
        if part is None:
            target.zero_()
        else:
            target.copy_(part.reshape(target.shape))


class _Sum:
    """The sum of a weight's gradients over tiles, in float32 at least."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._exact = torch.promote_types(dtype, torch.float32)
        self._total: torch.Tensor | None = None
        #: Whether the total is a tensor that was made here.
        self._own = False

    def add(self, part: torch.Tensor | None) -> None:
        if part is None:
            return
        if self._total is None:
            self._total = part
        elif not self._own:
            # Autograd may have given the same tensor to others.
            self._total, self._own = torch.add(self._total.to(self._exact), part), True
        else:
            self._total.add_(part)

    def take(self) -> torch.Tensor | None:
        """Return the sum in the weight's dtype."""
        total, self._total = self._total, None
        return None if total is None else total.to(self._dtype)


class _Tiled(torch.autograd.Function):
    """Of a part that runs on tiles, autograd keeps the inputs and the weights."""

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, count: int, *tensors: torch.Tensor) -> Any:
        """Run the part with the first `count` tensors; the others are its weights."""
        outputs = tiles.forward(tensors[:count])
        ctx.tiles, ctx.count = tiles, count
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Compute the part again, tile by tile."""
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        return None, None, *ctx.tiles.backward(saved[: ctx.count], saved[ctx.count :], wanted, gradients)


def run_in_tiles(model: nn.Module, tile_tokens: int | str = AUTO) -> nn.Module:
    """Have the parts of a model in memory that work token by token run on tiles, in place, and return the model.

    `memascend.offload(..., tile_tokens=...)` does the same with an offloaded model, and gives the same bits: this is a
    reference for it, and a way to train on long sequences together with checkpointing of activations. With
    `memascend.run_in_slices` each micro-batch runs on tiles.

    Args:
        model: an ordinary model, on any device.
        tile_tokens: tokens that an MLP or a norm computes at once, of all sequences of a batch together; "auto": one
            in 32 of the tokens of a call, rounded up to a power of two, and at least 1,024. A call with no more tokens
            is computed as before.

    Raises ValueError for a tile of no token, MemascendError for a model that runs on tiles already.
    """
    tokens = parse_tile_tokens(tile_tokens)
    assert tokens is not None
    if getattr(model, "_memascend_tiles", None) is not None:
        raise MemascendError("the model runs on tiles already: call memascend.run_in_tiles once")
    tiling = Tiling(tokens)

    def part(module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        return tiling.run(module, forward, args, kwargs)

    layers = {module for unit in partition(model) if unit.repeated for module in unit.modules} - {model}
    for module in tiling.parts(model, layers):
        surround(module, part)
    enclose(model, tiling.of_pass)
    model._memascend_tiles = tiling  # type: ignore[assignment]
    return model
