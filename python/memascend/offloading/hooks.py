"""Attaching a session to its model: the only module that changes an `nn.Module`.

`Hooks` wraps forwards, so that units are fetched before use; watches `_parameters`, so that a parameter used outside of
its module is fetched too; and has autograd save names of weights instead of views of them.

A saved-tensor hook over the whole forward replaces every saved view of a unit's buffer by its unit, offset, shape and
stride, and the unit is fetched again when the backward pass asks. PyTorch compares no versions of tensors that hooks
pack, so names and other saved tensors carry theirs. Every parameter counts its steps: a backward pass through a graph
older than a step raises.

Streaming surrounds compiled layers: fetches are outside a layer's compiled call, where Dynamo does not look, and
graphs see parameters that have their values. Logits that are not computed yet cannot be traced, so Dynamo leaves a
model with tables as it is (`common.graphs`).

A module that writes to its own weights (`Embedding(max_norm=...)`) is noticed by the version counters when its unit is
let go. The write belongs to the next step. From then on each pass waits before that unit until the step before is
durable; the generation in which the first such write came by surprise is left out. A recomputed layer that does so is
refused, since its first values are gone.

Everything that may use a session refers to its `Hooks`: the model, each module whose forward was replaced, and the
graphs of passes. The session refers to them weakly and is itself held in a set until it is closed, so a model that
nothing uses is found by the garbage collector while its session is whole, and closed as at the end of a program
(`native.close_when_unused`).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from memascend.common.graphs import called_from_compiled, is_compiled, outside_of_graphs
from memascend.common.meetings import meet_libraries
from memascend.errors import FORKED, MemascendError
from memascend.layout.units import CPU, as_held
from memascend.machine.cuda import explained
from memascend.offloading.activations import Recomputation, refuse_overwritten
from memascend.offloading.buffers import collected_by_checkpoint, version_of
from memascend.offloading.caches import asks_for_cache, caches_as_checkpointed, check_caches
from memascend.offloading.casts import CastWeights
from memascend.offloading.native import close_when_unused, warn_of
from memascend.offloading.places import place_of, register
from memascend.offloading.resizing import resize
from memascend.offloading.session import stale
from memascend.offloading.stand_ins import disguise, is_stand_in
from memascend.offloading.torch_functions import check_transforms, conceal, refuse_other_optimizers
from memascend.vocabulary.known import remember

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from memascend.layout.units import Place, Unit
    from memascend.offloading.session import Session

#: Values of `torch.compile`'s mode that record CUDA graphs.
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


class _SavedWeight:
    """Stands for a view of a unit's weights in the autograd graph, so that the graph does not hold the buffer."""

    __slots__ = ("dtype", "offset", "place", "shape", "stride", "version")

    def __init__(self, place: Place, tensor: torch.Tensor, offset: int) -> None:
        self.place = place
        self.version = _version(place)
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        #: Elements before the first one, in the unit's bytes.
        self.offset = offset
        place.saved_names += 1

    def __del__(self) -> None:
        # Dynamo makes objects without attributes while it traces.
        if hasattr(self, "place"):
            self.place.saved_names -= 1


class _Saved:
    """A tensor in the autograd graph, and its version: with hooks, PyTorch does not compare versions by itself."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a node that saves its own output would refer to itself, and never be freed.
        with nullcontext() if _has_memory(tensor) else as_held():
            self.tensor = tensor.detach()
        self.version = version_of(tensor)


def wrapped_by(wrapper: str) -> str:
    """Say that a wrapper of PyTorch's for several processes cannot have an offloaded model."""
    return (
        f"{wrapper} cannot divide or copy an offloaded model, whose parameters are on SSD: leave it out, and call the "
        "model that memascend.offload(model, process_group=...) returns, which divides its store over the ranks"
    )


class _WatchedParameters(dict):
    """A module's `_parameters`: during a pass, a parameter whose unit is absent is fetched when it is asked for."""

    __slots__ = ("lookup",)

    lookup: Callable[[nn.Parameter], None]

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        # A compiled layer has its parameters before it runs. Fetching while Dynamo traces would
        # compile the layer anew whenever another unit is resident.
        if parameter is not None and not torch.compiler.is_dynamo_compiling():
            self.lookup(parameter)
        return parameter

    def __setitem__(self, name: str, parameter: Any) -> None:
        distributed: Any = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(parameter, distributed.DTensor):
            raise MemascendError(wrapped_by("fully_shard"))
        super().__setitem__(name, parameter)

    def __reduce__(self) -> Any:
        raise MemascendError(
            "an offloaded model cannot be pickled: use memascend.save_pretrained(model, directory), or torch.save of "
            "its state_dict(), which takes it into memory"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy would share the original's forward, and train no parameters of its own.
        raise MemascendError(
            "a module of an offloaded model cannot be copied: its parameters are on SSD. For an average of the weights "
            "(EMA, torch.optim.swa_utils.AveragedModel) copy the model before memascend.offload: "
            "average.update_parameters(model) then reads the weights, and the average is whole in memory. Or average "
            "the files of memascend.save_checkpoint and memascend export. For adapters that copy modules (PEFT's "
            "modules_to_save) add them before memascend.offload"
        )


class Hooks:
    """The hooks of one session in its model."""

    #: See `save_by`.
    _saver_of: ClassVar[Callable[[nn.Module], Callable[..., None] | None]] = staticmethod(lambda module: None)

    def __init__(self, session: Session) -> None:
        """Become the session's attachment; `attach` installs the hooks."""
        self.session = session
        session.attach(self)
        #: See `Session.tracked`. Here, since such an object may refer to the model, which the session must not.
        self.tracked: dict[str, Any] = {}
        #: The model once the hooks are in it.
        self._model: nn.Module | None = None
        #: (module, attribute, previous entry of its `__dict__`, or None), in the order of
        #: replacement.
        self._originals: list[tuple[nn.Module, str, Any]] = []
        #: The replacements by which parts of layers, and norms, run on tiles.
        self._tiled: dict[nn.Module, tuple[nn.Module, str, Any]] = {}
        #: The units that a use fetches. A table stays a stand-in, for functions that read its blocks.
        self._owners: dict[nn.Parameter, Unit] = {
            place.parameter: unit for unit in session.units if not unit.is_table for place in unit.places
        }
        self._tables = {place.parameter for unit in session.units if unit.is_table for place in unit.places}
        #: Of the tables, experts that are read one by one.
        self._experts = {place.parameter for unit in session.units if unit.is_experts for place in unit.places}
        #: Places by the address of the tensor that an absent parameter holds.
        self._absent: dict[int, Place] = {}
        self._casts = CastWeights(session.torch_device.type)
        #: Hooks of modules.
        self._handles: list[RemovableHandle] = []
        #: The stream that gradients are captured on, on a device.
        self._stream: int | None = None
        #: How a program reaches the model's layers, and whether it was told that they are not compiled.
        self._layers = "model"
        self._said_uncompiled = False

    @staticmethod
    def save_by(saver_of: Callable[[nn.Module], Callable[..., None] | None]) -> None:
        """Have modules save themselves by `saver_of(module)`, which replaces their `save_pretrained` unless it is None.

        The format of saved models is a matter of `memascend.formats`, which calls this as it is imported.
        """
        Hooks._saver_of = staticmethod(saver_of)

    def attach(self) -> None:
        """Install the hooks: from here on the model's parameters are on SSD."""
        session = self.session
        model = session.model()
        assert model is not None, "the caller holds the model"
        self._stream = None if session.device is None else session.device.stream()
        for place in session.places:
            register(session, place)
            if not is_stand_in(place.parameter):
                place.parameter.grad = None
            disguise(place)
            self._absent[place.absent.data_ptr()] = place
            session.gradients.watch(place)
        refuse_other_optimizers()
        meet_libraries()
        if session.device is not None and session.device_plan is not None:
            self._move_buffers(model)
            # Weights that were on the device have left it, and the plan's own buffers are not there yet.
            session.device.hold(session.device_plan)
        session.streamer.attach()
        self._hook_modules(model)
        self._surround(model, partial(self._whole, model))
        # The session must not keep the model alive, to which some modules refer. The units' modules are not asked for
        # any more.
        for unit in session.units:
            unit.modules.clear()
        model._memascend, model._memascend_hooks = session, self  # type: ignore[assignment]
        self._model = model
        close_when_unused(session)

    def __del__(self) -> None:
        """Have the session closed: the model, its parts and the graphs of its passes are garbage."""
        if self._model is not None:
            self.session.unused(self, self._model)

    def detach(self) -> None:
        """Take every hook out of the model, and have its forward refuse to run."""
        self.forget()
        model = self.session.model()
        if model is not None:
            self._replace(model, "forward", _refuse_closed)
            self._replace(model, "_compiled_call_impl", _refuse_closed)

    def forget(self) -> None:
        """Give the model back every attribute that was replaced."""
        _restore(self._originals)
        self._originals.clear()
        self._tiled.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _move_buffers(self, model: nn.Module) -> None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.session.torch_device)

    def _hook_modules(self, model: nn.Module) -> None:
        """Watch the parameters of every module, and wrap the forward of those that a unit is fetched for."""
        units = self.session.units
        blocks = {module for unit in units if unit.repeated for module in unit.modules}
        first = next((name for name, module in model.named_modules() if module in blocks), None)
        self._layers = "its modules" if first is None else ".".join(["model", *first.split(".")[:-1]])
        inside_blocks = {inner for block in blocks for inner in block.modules()}
        if (tiling := self.session.tiling) is not None:
            for part in tiling.parts(model, blocks):
                self._replace(part, "forward", tiling.around(part, part.forward))
                self._tiled[part] = self._originals[-1]
        for module in model.modules():
            if (saver := Hooks._saver_of(module)) is not None:
                self._replace(module, "save_pretrained", saver)
            if hasattr(type(module), "resize_token_embeddings"):
                self._replace(module, "resize_token_embeddings", partial(resize, module))
            if module._parameters:
                watched = _WatchedParameters(module._parameters)
                watched.lookup = self._lookup
                self._replace(module, "_parameters", watched)
                self._guard(module)
                self._expect_writes(module)
            if module in blocks:
                parameters = list(module.parameters())
            elif module not in inside_blocks:
                parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
            else:
                continue
            needed = list(dict.fromkeys(self._owners[p] for p in parameters if p in self._owners))
            # A graph that is compiled cannot read a table.
            reads_table = any(parameter in self._tables for parameter in module._parameters.values())
            if (needed or reads_table) and module is not model:
                self._surround(module, partial(self._streamed, module, needed, module in blocks))

    def _expect_writes(self, module: nn.Module) -> None:
        """Tell the streamer of a module that writes to its own weight in its forward."""
        if getattr(module, "max_norm", None) is not None:  # torch.nn.Embedding, EmbeddingBag
            for unit in {self._owners[p] for p in module._parameters.values() if p in self._owners}:
                self.session.streamer.residencies[unit].writes_itself = True

    def _lookup(self, parameter: nn.Parameter) -> None:
        """Fetch the unit of a parameter that is asked for during a pass."""
        streamer = self.session.streamer
        if streamer.depth:
            unit = self._owners.get(parameter)
            if unit is not None:
                streamer.enter_loose(unit)

    # ---- replacing attributes ---------------------------------------------------------------------------

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        self._originals.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = value

    def _surround(self, module: nn.Module, around: Callable[[Callable], Callable]) -> None:
        """Replace a module's forward by `around(forward)`, or wrap the result of `torch.compile`.

        Of the whole model the call is surrounded, hooks included, so that another forward may take the place of its own
        (TRL and Liger-Kernel do that). The wrapper itself is never traced: it fetches and releases buffers, which a
        compiled graph does not know.
        """
        whole = module is self.session.model()

        def install() -> None:
            compiled = module.__dict__.get("_compiled_call_impl")
            if compiled is not None or whole:
                name, original = "_compiled_call_impl", compiled or module._call_impl
            else:
                name, original = "forward", module.forward
            in_turn = self.session.turns.around(around(original), "a forward pass")
            self._replace(module, name, torch.compiler.disable(in_turn))
            if whole and compiled is not None:
                self._say_uncompiled(module)

        def compile_(*args: Any, **kwargs: Any) -> None:
            options = kwargs.get("options") or {}
            records_graphs = kwargs.get("mode") in _CUDA_GRAPH_MODES or options.get("triton.cudagraphs")
            if self.session.device is not None and records_graphs:
                raise MemascendError(
                    f"mode={kwargs.get('mode')!r} records CUDA graphs, for which weights must stay where they are: use "
                    "mode=None, or 'max-autotune-no-cudagraphs'"
                )
            if experts := [p for p in module.parameters() if p in self._experts]:
                _, place = place_of(experts[0]) or (None, None)
                raise MemascendError(
                    f"{'an expert' if place is None else place.name} is read while its layer computes, which a "
                    "compiled graph cannot do: offload the model with experts='whole' to compile its layers"
                )
            mine = [
                entry
                for entry in self._originals
                if entry[0] is module
                and entry[1] in ("forward", "_compiled_call_impl", "compile")
                and entry is not self._tiled.get(module)  # A compiled part runs on tiles all the same.
            ]
            _restore(mine)
            taken = {id(entry) for entry in mine}
            self._originals = [entry for entry in self._originals if id(entry) not in taken]
            module.compile(*args, **kwargs)
            install()
            self._replace(module, "compile", compile_)

        install()
        self._replace(module, "compile", compile_)

    def _say_uncompiled(self, model: nn.Module) -> None:
        """Say once that compiling the whole model, or its caller, compiles none of its layers."""
        if self._said_uncompiled:
            return
        self._said_uncompiled = True
        if not any(is_compiled(module) for module in model.modules() if module is not model):
            warn_of(
                "torch.compile of an offloaded model, or of its caller, does not compile its layers, whose weights "
                f"come and go between graphs. Compile each by itself: for layer in {self._layers}: layer.compile()"
            )

    # ---- forwards ---------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """Raise MemascendError in a forked child, which lacks the weights that stayed in memory."""
        if self.session.runtime.forked:
            raise MemascendError(FORKED)

    def _streamed(self, module: nn.Module, needed: list[Unit], recompute: bool, original: Callable) -> Callable:
        """Wrap a module's forward: fetch the units that it needs, let them go after, recompute if wanted."""
        session = self.session
        slicing = session.slicing if recompute else None
        run = self._with_units(module, needed, original, slicing is not None)

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._check_process()
            if not session.in_pass and torch.is_grad_enabled():
                session.generations.begin_part()
            wanted = recompute and (
                session.options.recompute or (module.training and getattr(module, "gradient_checkpointing", False))
            )
            if not (wanted and torch.is_grad_enabled()):
                # A module called by itself: the forward of the whole model would save names of
                # weights already.
                alone = not session.in_pass and torch.is_grad_enabled() and not collected_by_checkpoint()
                with self.saving_names() if alone else nullcontext():
                    result = run(*args, **kwargs)
                return conceal(result, session) if not session.in_pass else result
            kwargs = caches_as_checkpointed(module, kwargs)
            check_caches(module, kwargs)
            places = [place for unit in needed for place in unit.places]
            versions = [_version(place) for place in places]
            with as_held():
                trained = [place.parameter.requires_grad for place in places]

            def written() -> list[int]:
                return [session.streamer.residencies[unit].module_writes for unit in needed]

            def run_unless_stepped(*args: Any, **kwargs: Any) -> Any:
                nonlocal versions
                for place, version in zip(places, versions, strict=True):
                    if _version(place) != version:
                        raise MemascendError(stale(place.name))
                before = written()
                with _trained_as(places, trained):
                    result = run(*args, **kwargs)
                if written() == before and not any(session.streamer.uses(unit) for unit in needed):
                    # A function has counted a write that has changed nothing.
                    versions = [_version(place) for place in places]
                return result

            before = written()
            result = Recomputation(module, run_unless_stepped, args, kwargs, session.inputs).run(args, kwargs)
            if written() != before:
                raise MemascendError(
                    f"the forward of {needed[0].name} has written to its own weights, so that it cannot be computed "
                    "again in the backward pass: pass recompute=False"
                )
            return result

        return forward if slicing is None else slicing.around(module, forward, run)

    def _with_units(self, module: nn.Module, needed: list[Unit], original: Callable, sliced: bool) -> Callable:
        """Return `original`, which may run on slices of a batch if `sliced`, with the units that it needs in memory."""
        session, streamer = self.session, self.session.streamer

        def run(*args: Any, **kwargs: Any) -> Any:
            if not sliced:  # Slices share no conversion, where the model is in memory neither.
                self._casts.use(module)
            check_transforms(needed[0].name if needed else "a table")
            # Our recomputation replaces transformers' own, which would call the layer without this
            # wrapper.
            checkpointing = module.__dict__.get("gradient_checkpointing")
            if checkpointing:
                module.gradient_checkpointing = False  # type: ignore[assignment]
            entered: list[Unit] = []
            try:
                for unit in needed:
                    streamer.enter(unit)
                    entered.append(unit)
                with streamer.scope(), explained(session.device_plan):
                    return original(*args, **kwargs)
            finally:
                for unit in entered:
                    streamer.exit(unit)
                self._casts.forget()
                if checkpointing:
                    module.gradient_checkpointing = checkpointing

        return streamer.turns.around(run, "a backward pass")  # a forward pass has its turn

    def _whole(self, model: nn.Module, original: Callable) -> Callable:
        """Wrap the forward of the whole model: one pass of the stream."""
        session, streamer = self.session, self.session.streamer
        if self._tables:
            # Dynamo cannot trace logits that are not computed yet. Without tables, it traces the code between layers.
            original = outside_of_graphs(original)
        own = (parameter for parameter in model._parameters.values() if parameter is not None)
        direct = [self._owners[parameter] for parameter in own if parameter in self._owners]

        def to_device(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device != CPU:
                return value
            there = value.to(session.torch_device, non_blocking=True)
            if self._tables:
                remember(there, value)
            return there

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._check_process()
            grad = torch.is_grad_enabled()
            if not self._said_uncompiled and called_from_compiled():
                self._say_uncompiled(model)
            check_transforms("the model")
            streamer.backward_updates.refuse()
            session.host_budget.fit(grad)
            if grad:
                self._watch_gradients()
                session.generations.begin()
            if session.device is not None:
                args, kwargs = pytree.tree_map(to_device, (args, kwargs))
            # A cache that was not asked for would only hold activations in memory.
            caching = session.inputs.keeping_caches(asks_for_cache(args, kwargs))
            slicing = nullcontext() if session.slicing is None else session.slicing.of_pass(args, kwargs)
            tiling = nullcontext() if session.tiling is None else session.tiling.of_pass(args, kwargs)
            with streamer.forward_pass(grad), explained(session.device_plan), caching, slicing, tiling:
                for unit in direct:
                    streamer.enter_loose(unit)
                with self.saving_names() if grad else nullcontext():
                    result = original(*args, **kwargs)
            if grad:
                session.generations.start()
            return conceal(result, session)

        return forward

    def _watch_gradients(self) -> None:
        """Capture the gradients of all parameters that are trained now, on the stream that the program computes on now.

        PyTorch's node for a parameter's gradient belongs to the stream that was the current one when the node was made.
        For gradients that another stream computes it waits, warns, and hands them to the first stream.
        """
        session = self.session
        stream = None if session.device is None else session.device.stream()
        moved, self._stream = stream != self._stream, stream
        with as_held():
            for place in session.places:
                if moved:
                    session.gradients.unwatch(place)
                if not place.hooks:
                    session.gradients.watch(place)

    def as_pass(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the model's parts, as one pass of the stream: as the model's forward is."""
        model = self.session.model()
        assert model is not None, "the caller holds the model"
        return self.session.turns.around(self._whole(model, function), "a forward pass")

    def saving_names(self) -> AbstractContextManager[Any]:
        """Have autograd save names of weights instead of views of them, and other tensors unchanged."""
        streamer, device = self.session.streamer, self.session.torch_device

        def pack(tensor: torch.Tensor) -> _SavedWeight | _Saved:
            if tensor.device == device and tensor.layout is torch.strided and _has_memory(tensor):
                with as_held():
                    address = tensor.untyped_storage().data_ptr()
                    start = int(tensor.storage_offset()) * tensor.itemsize
                unit = streamer.by_address.get(address)
                if unit is not None:
                    place = next(place for place in unit.places if place.offset <= start < place.offset + place.nbytes)
                    return _SavedWeight(place, tensor, start // tensor.itemsize)
                if address in self._absent:
                    # A custom Function saves a weight that nothing has read yet.
                    place = self._absent[address]
                    return _SavedWeight(place, torch.empty(place.shape, dtype=place.dtype, device="meta"), -1)
            return _Saved(tensor)

        def unpack(saved: _SavedWeight | _Saved) -> torch.Tensor:
            if isinstance(saved, _Saved):
                refuse_overwritten(saved.tensor, saved.version)
                return saved.tensor
            place = saved.place
            if _version(place) != saved.version:
                raise MemascendError(stale(place.name))
            storage = self.session.streamer.storage(
                place.tensor.unit
            ).untyped_storage()  # so that the graph holds the hooks
            offset = place.offset // place.dtype.itemsize if saved.offset < 0 else saved.offset
            empty = torch.empty(0, dtype=saved.dtype, device=device)
            weights = empty.set_(storage, offset, saved.shape, saved.stride)
            streamer.free_whole(place.tensor.unit)
            return weights

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    # ---- changes of a parameter's storage ----------------------------------------------------------

    def _guard(self, module: nn.Module) -> None:
        """Refuse to convert or to replace the parameters of a module by its own methods."""
        apply = module._apply

        def apply_unless_converting(fn: Callable, recurse: bool = True) -> nn.Module:
            own = [p for p in module._parameters.values() if p in self._owners or p in self._tables]
            if all([_leaves_alone(fn, parameter) for parameter in own]):
                return apply(lambda tensor: tensor if is_stand_in(tensor) else fn(tensor), recurse)
            return apply(fn, recurse)

        def refuse_assign(_: nn.Module, _state: Any, prefix: str, metadata: dict[str, Any], *_rest: Any) -> None:
            if metadata.get("assign_to_params_buffers"):
                raise MemascendError(
                    f"load_state_dict(assign=True) would replace the parameters of {prefix or 'the model'}, which are "
                    "on SSD: use assign=False, which copies the values there"
                )

        self._replace(module, "_apply", apply_unless_converting)
        self._handles.append(module.register_load_state_dict_pre_hook(refuse_assign))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own: a class that answers operations itself need not."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _version(place: Place) -> tuple[int, int]:
    """Count the steps taken on a parameter, and the program's writes to it."""
    with as_held():
        return place.version, place.parameter._version


@contextmanager
def _trained_as(places: list[Place], trained: list[bool]) -> Iterator[None]:
    """Have parameters require gradients as they did before: a graph computed again is the graph of the first call."""
    with as_held():
        changed = [
            place.parameter for place, was in zip(places, trained, strict=True) if place.parameter.requires_grad != was
        ]
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        with as_held():
            for parameter in changed:
                parameter.requires_grad_(not parameter.requires_grad)


def _leaves_alone(fn: Callable, parameter: nn.Parameter) -> bool:
    """Return whether `fn`, which `Module._apply` is to call, leaves the parameter as it is.

    Raises MemascendError if it gives the parameter another dtype, device or order of elements in memory.
    """
    probe = torch.ones((2,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
    converted = fn(probe.clone())
    kinds = [(tensor.dtype, tensor.device, tensor.stride()) for tensor in (probe, converted)]
    if kinds[0] != kinds[1]:
        located = place_of(parameter)
        name = "a parameter" if located is None else located[1].name
        dtype, device, stride = kinds[1]
        order = "" if stride == probe.stride() else " in another memory format"
        raise MemascendError(
            f"{name} is on SSD as {probe.dtype} for {probe.device} and cannot become {dtype} on {device}{order}: "
            "convert the model before memascend.offload, or give dtype= to memascend.from_pretrained"
        )
    return torch.equal(probe, converted) and not converted.is_shared()


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into a model."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


def _restore(replaced: list[tuple[nn.Module, str, Any]]) -> None:
    """Put back attributes that `Hooks` has replaced, the latest first."""
    for module, name, value in reversed(replaced):
        if value is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value


def _refuse_closed(*_: Any, **__: Any) -> Any:
    raise MemascendError("the model was closed: its parameters are no longer on the store")
