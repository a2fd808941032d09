"""Attaching a session to its model: the only module that changes an `nn.Module`.

`Hooks` wraps forwards, so that units are fetched before use; watches `_parameters`, so that a parameter used outside of
its module is fetched too; and has autograd save names of weights instead of views of them.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from memascend.errors import MemascendError
from memascend.layout.units import CPU
from memascend.machine.cuda import explained
from memascend.offloading.activations import Recomputation
from memascend.offloading.caches import asks_for_cache, caches_as_checkpointed, check_caches
from memascend.offloading.places import place_of, register

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from memascend.layout.units import Unit
    from memascend.offloading.session import Session

#: Values of `torch.compile`'s mode that record CUDA graphs.
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


class _SavedWeight:
    """Stands for a view of a unit's weights in the autograd graph, so that the graph does not hold the buffer."""

    __slots__ = ("dtype", "offset", "place", "shape", "stride", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit = unit
        start = tensor.storage_offset() * tensor.itemsize
        self.place = next(place for place in unit.places if place.offset <= start < place.offset + place.nbytes)
        self.version = self.place.version
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.offset = tensor.storage_offset()


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

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy would share the original's forward, and train no parameters of its own.
        raise MemascendError(
            "a module of an offloaded model cannot be copied, as PEFT's modules_to_save wants it to be: its parameters "
            "are on SSD. Copy it, or add the adapters, before memascend.offload"
        )


class Hooks:
    """The hooks of one session in its model."""

    def __init__(self, session: Session) -> None:
        """Become the session's attachment; `attach` installs the hooks."""
        self.session = session
        session.attachment = self
        #: (module, attribute, what its `__dict__` held before, or None), in the order of
        #: replacement.
        self._originals: list[tuple[nn.Module, str, Any]] = []
        self._owners: dict[nn.Parameter, Unit] = {
            place.parameter: unit for unit in session.units for place in unit.places
        }

    def attach(self) -> None:
        """Install the hooks: from here on the model's parameters are on SSD."""
        session = self.session
        model = session.model()
        assert model is not None, "the caller holds the model"
        for place in session.places:
            if session.device is not None:
                place.seen = [place.parameter._version, place.marker._version]
            place.hide()
            place.parameter.grad = None
            register(session, place)
            session.gradients.watch(place)
        session.streamer.attach()
        if session.device is not None:
            self._move_buffers(model)
        self._hook_modules(model)
        self._surround(model, partial(self._whole, model))
        self._guard_state_dict(model)
        model._memascend = session  # type: ignore[assignment]
        if session.device is not None and session.device_plan is not None:
            # Only now have weights that were on the device left it.
            session.device.hold(session.device_plan)

    def detach(self) -> None:
        """Take every hook out of the model, and have its forward refuse to run."""
        self.forget()
        model = self.session.model()
        if model is not None:
            self._replace(model, "forward", _refuse_closed)
            self._replace(model, "_compiled_call_impl", None)

    def forget(self) -> None:
        """Give the model back every attribute that was replaced."""
        _restore(self._originals)
        self._originals.clear()

    def _move_buffers(self, model: nn.Module) -> None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.session.torch_device)

    def _hook_modules(self, model: nn.Module) -> None:
        """Watch the parameters of every module, and wrap the forward of those that a unit is fetched for."""
        units = self.session.units
        blocks = {module for unit in units if unit.repeated for module in unit.modules}
        inside_blocks = {inner for block in blocks for inner in block.modules()}
        for module in model.modules():
            if module._parameters:
                watched = _WatchedParameters(module._parameters)
                watched.lookup = self._lookup
                self._replace(module, "_parameters", watched)
            if module in blocks:
                parameters = list(module.parameters())
            elif module not in inside_blocks:
                parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
            else:
                continue
            needed = list(dict.fromkeys(self._owners[p] for p in parameters if p in self._owners))
            if needed and module is not model:
                self._surround(module, partial(self._streamed, module, needed, module in blocks))

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
        """Replace a module's forward by `around(forward)`, or wrap what `torch.compile` has made of it.

        The wrapper itself is never traced: it fetches and releases buffers, of which a compiled graph knows nothing.
        """

        def install() -> None:
            compiled = module.__dict__.get("_compiled_call_impl")
            name, original = ("forward", module.forward) if compiled is None else ("_compiled_call_impl", compiled)
            self._replace(module, name, torch.compiler.disable(around(original)))

        def compile_(*args: Any, **kwargs: Any) -> None:
            options = kwargs.get("options") or {}
            records_graphs = kwargs.get("mode") in _CUDA_GRAPH_MODES or options.get("triton.cudagraphs")
            if self.session.device is not None and records_graphs:
                raise MemascendError(
                    f"mode={kwargs.get('mode')!r} records CUDA graphs, for which weights must stay where they are: use "
                    "mode=None, or 'max-autotune-no-cudagraphs'"
                )
            mine = [entry for entry in self._originals if entry[0] is module and entry[1] != "_parameters"]
            _restore(mine)
            self._originals = [entry for entry in self._originals if entry not in mine]
            module.compile(*args, **kwargs)
            install()
            self._replace(module, "compile", compile_)

        install()
        self._replace(module, "compile", compile_)

    # ---- forwards ---------------------------------------------------------------------------------------

    def _streamed(self, module: nn.Module, needed: list[Unit], recompute: bool, original: Callable) -> Callable:
        """Wrap a module's forward: fetch the units that it needs, let them go after, recompute if wanted."""
        session = self.session
        run = self._with_units(module, needed, original)

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            wanted = recompute and (
                session.recompute or (module.training and getattr(module, "gradient_checkpointing", False))
            )
            if not (wanted and torch.is_grad_enabled()):
                # A module called by itself: the forward of the whole model would save names of
                # weights already.
                alone = session.streamer.depth == 0 and torch.is_grad_enabled()
                with self._saving_names() if alone else nullcontext():
                    return run(*args, **kwargs)
            kwargs = caches_as_checkpointed(module, kwargs)
            check_caches(module, kwargs)
            versions = [place.version for unit in needed for place in unit.places]

            def run_unless_stepped(*args: Any, **kwargs: Any) -> Any:
                if versions != [place.version for unit in needed for place in unit.places]:
                    raise MemascendError(_stale(f"the parameters of {needed[0].name}"))
                return run(*args, **kwargs)

            return Recomputation(module, run_unless_stepped, args, kwargs, session.inputs).run(args, kwargs)

        return forward

    def _with_units(self, module: nn.Module, needed: list[Unit], original: Callable) -> Callable:
        """Return `original` with the units that it needs in memory."""
        session, streamer = self.session, self.session.streamer

        def run(*args: Any, **kwargs: Any) -> Any:
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
                if torch.is_autocast_enabled(session.torch_device.type):
                    # The cache would keep a copy of every weight that autocast has converted, until
                    # the pass ends.
                    torch.clear_autocast_cache()
                if checkpointing:
                    module.gradient_checkpointing = checkpointing

        return run

    def _whole(self, model: nn.Module, original: Callable) -> Callable:
        """Wrap the forward of the whole model: one pass of the stream."""
        session, streamer = self.session, self.session.streamer
        own = (parameter for parameter in model._parameters.values() if parameter is not None)
        direct = [self._owners[parameter] for parameter in own if parameter in self._owners]

        def to_device(value: Any) -> Any:
            on_cpu = isinstance(value, torch.Tensor) and value.device == CPU
            return value.to(session.torch_device, non_blocking=True) if on_cpu else value

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            grad = torch.is_grad_enabled()
            if grad:
                for place in session.places:
                    if not place.hooks:
                        session.gradients.watch(place)
                session.generations.begin()
            if session.device is not None:
                args, kwargs = pytree.tree_map(to_device, (args, kwargs))
            # A cache that was not asked for would only hold activations in memory.
            caching = session.inputs.keeping_caches(asks_for_cache(args, kwargs))
            with streamer.forward_pass(grad), explained(session.device_plan), caching:
                for unit in direct:
                    streamer.enter_loose(unit)
                if not grad:
                    return original(*args, **kwargs)
                with self._saving_names():
                    result = original(*args, **kwargs)
            session.generations.start()
            return result

        return forward

    def _saving_names(self) -> AbstractContextManager[Any]:
        """Have autograd save names of weights instead of views of them, and other tensors unchanged."""
        streamer, device = self.session.streamer, self.session.torch_device

        def pack(tensor: torch.Tensor) -> Any:
            unit = None
            if tensor.device == device and tensor.layout is torch.strided:
                unit = streamer.by_address.get(tensor.untyped_storage().data_ptr())
            # Detached: a node that saves its own output would refer to itself, and never be freed.
            return tensor.detach() if unit is None else _SavedWeight(unit, tensor)

        def unpack(saved: Any) -> torch.Tensor:
            if not isinstance(saved, _SavedWeight):
                return saved
            if saved.place.version != saved.version:
                raise MemascendError(_stale(saved.place.name))
            storage = streamer.storage(saved.unit).untyped_storage()
            empty = torch.empty(0, dtype=saved.dtype, device=device)
            return empty.set_(storage, saved.offset, saved.shape, saved.stride)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    # ---- state dicts ------------------------------------------------------------------------------------

    def _guard_state_dict(self, model: nn.Module) -> None:
        """Refuse `state_dict()` of the whole model. With PEFT's adapters it holds what is trained, as PEFT expects."""
        session = self.session

        def refuse(*_: Any) -> None:
            if not has_adapters(model):
                raise MemascendError(
                    "the parameters of an offloaded model are on SSD, so state_dict() cannot hold them: use "
                    "memascend.save_pretrained(model, directory) or memascend.parameters_of(model)"
                )

        def keep_trained(_root: nn.Module, state_dict: dict[str, Any], prefix: str, *_local: Any) -> None:
            session.flush()
            for name, parameter in model.named_parameters(remove_duplicate=False):
                located = place_of(parameter)
                if located is None:
                    continue
                if not parameter.requires_grad:
                    del state_dict[prefix + name]
                    continue
                _, place = located
                state_dict[prefix + name] = place.view(session.read_unit(place.tensor.unit)).clone()

        model.register_state_dict_pre_hook(refuse)
        model.register_state_dict_post_hook(keep_trained)


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into a model."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


def _restore(replaced: list[tuple[nn.Module, str, Any]]) -> None:
    """Put back attributes that `Hooks` has replaced, the latest first."""
    for module, name, value in reversed(replaced):
        if value is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value


def _stale(subject: str) -> str:
    return (
        f"{subject} changed since the forward pass whose gradients were asked for: call backward() before "
        "optimizer.step(), or run the forward pass again"
    )


def _refuse_closed(*_: Any, **__: Any) -> Any:
    raise MemascendError("the model was closed: its parameters are no longer on the store")
