"""Attaching a session to its model: `Hooks` changes the modules, and gives them back what it has `replaced`.

It wraps forwards, so that units are fetched before use; watches `_parameters`, so that a parameter used outside of its
module is fetched too (`watched_parameters`); and has autograd save names of weights instead of views of them
(`saved_weights`).

A module that writes to its own weights (`Embedding(max_norm=...)`) is noticed by the version counters when the use of
its unit ends. The write belongs to the next step. From then on each pass waits before that unit until the step before
is durable; the generation in which the first such write came by surprise is left out. A recomputed layer that does so
is refused, since its first values are gone.

Everything that may use a session refers to its `Hooks`: the model, each module whose forward was replaced, and the
graphs of passes. The session refers to them weakly and is itself held in a set until it is closed, so a model that
nothing uses is found by the garbage collector while its session is whole, and closed as at the end of a program
(`runtime.close_when_unused`).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from memascend.autograd.autocast import CastWeights
from memascend.autograd.binding import make_proxy
from memascend.autograd.buffers import collected_by_checkpoint
from memascend.autograd.dispatch import check_transforms, refuse_other_optimizers, wrap_outputs
from memascend.autograd.kv_caches import asks_for_cache, caches_as_checkpointed, check_caches
from memascend.autograd.proxies import is_proxy
from memascend.autograd.recompute import Recomputation
from memascend.common.graphs import called_from_compiled, in_backward, outside_of_graphs
from memascend.common.meetings import meet_libraries
from memascend.errors import FORKED, MemascendError, stale
from memascend.hardware.cuda import explained
from memascend.layout.registry import place_of, register
from memascend.layout.units import raw_tensor_access
from memascend.session.copying import copy_of_module, refuse_copy
from memascend.session.replaced import Replacements
from memascend.session.resize_tables import resize
from memascend.session.runtime import close_when_unused
from memascend.session.saved_weights import SavedNames, version_now
from memascend.session.watched_parameters import WatchedParameters, guard
from memascend.vocabulary.known import remember

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from memascend.layout.units import ParameterEntry, Unit
    from memascend.session.session import Session


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
        #: The units that a use fetches. A table stays a proxy, for functions that read its blocks.
        self._owners: dict[nn.Parameter, Unit] = {
            place.parameter: unit for unit in session.units if not unit.is_table for place in unit.places
        }
        self._tables = {place.parameter for unit in session.units if unit.is_table for place in unit.places}
        # Of the tables, experts that are read one by one.
        self._experts = {place.parameter for unit in session.units if unit.is_experts for place in unit.places}
        self._replaced = Replacements(session, self._experts)
        #: Entries of parameters by the address of the tensor that an absent parameter holds.
        self._absent: dict[int, ParameterEntry] = {}
        self._names = SavedNames(self, self._absent)
        self._casts = CastWeights(session.torch_device.type)
        #: Hooks of modules.
        self._handles: list[RemovableHandle] = []
        #: The stream that gradients are captured on, on a device.
        self._stream: int | None = None
        self._said_accumulating = False

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
        self._stream = session.site.stream()
        for place in session.places:
            register(session, place)
            if not is_proxy(place.parameter):
                place.parameter.grad = None
            make_proxy(place)
            self._absent[place.binding.absent.data_ptr()] = place
            session.gradients.watch(place)
        refuse_other_optimizers()
        meet_libraries()
        session.site.take(model)
        session.streamer.attach()
        self._hook_modules(model)
        self._replaced.surround(model, partial(self._whole, model))
        for module in self._replaced.modules():
            self._replaced.replace(module, "__deepcopy__", partial(self._copy, module))
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
            self._replaced.replace(model, "forward", _refuse_closed)
            self._replaced.replace(model, "_compiled_call_impl", _refuse_closed)

    def forget(self) -> None:
        """Give the model back every attribute that was replaced."""
        self._replaced.give_back()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_modules(self, model: nn.Module) -> None:
        """Watch the parameters of every module, and wrap the forward of those that a unit is fetched for."""
        units = self.session.units
        blocks = {module for unit in units if unit.repeated for module in unit.modules}
        first = next((name for name, module in model.named_modules() if module in blocks), None)
        self._replaced.layers = "its modules" if first is None else ".".join(["model", *first.split(".")[:-1]])
        inside_blocks = {inner for block in blocks for inner in block.modules()}
        by_rows = self._tables - self._experts
        if (tiling := self.session.tiling) is not None:
            for part in tiling.parts(model, blocks):
                self._replaced.tile(part, tiling.around(part, part.forward))
        for module in model.modules():
            if (saver := Hooks._saver_of(module)) is not None:
                self._replaced.replace(module, "save_pretrained", saver)
            if hasattr(type(module), "resize_token_embeddings"):
                self._replaced.replace(module, "resize_token_embeddings", partial(resize, module))
            if module._parameters:
                watched = WatchedParameters(module._parameters)
                watched.lookup = self._lookup
                self._replaced.replace(module, "_parameters", watched)
                self._handles.append(guard(module, self._replaced, self._is_offloaded))
                self._expect_writes(module)
            if module in blocks:
                parameters = list(module.parameters())
            elif module not in inside_blocks:
                parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
            else:
                if any(parameter in by_rows for parameter in module._parameters.values()):
                    self._replaced.replace(module, "forward", outside_of_graphs(module.forward))
                continue
            needed = list(dict.fromkeys(self._owners[p] for p in parameters if p in self._owners))
            # A graph that is compiled cannot read a table.
            reads_table = any(parameter in self._tables for parameter in module._parameters.values())
            if (needed or reads_table) and module is not model:
                self._replaced.surround(module, partial(self._streamed, module, needed, module in blocks))

    def _expect_writes(self, module: nn.Module) -> None:
        """Tell the streamer of a module that writes to its own weight in its forward."""
        if getattr(module, "max_norm", None) is not None:  # torch.nn.Embedding, EmbeddingBag
            for unit in {self._owners[p] for p in module._parameters.values() if p in self._owners}:
                self.session.streamer.cached_units[unit].writes_itself = True

    def _is_offloaded(self, parameter: nn.Parameter) -> bool:
        return parameter in self._owners or parameter in self._tables

    def _lookup(self, parameter: nn.Parameter) -> None:
        """Fetch the unit of a parameter that is asked for during a pass."""
        streamer = self.session.streamer
        if streamer.depth:
            unit = self._owners.get(parameter)
            if unit is not None:
                streamer.enter_loose(unit)

    def _copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """Copy a part of the model, as `copy.deepcopy` does."""
        if module is self._model:
            refuse_copy()
        in_pieces = self.session.options.fused_loss is not False and not self.session.site.uploads
        tables = self._tables - self._experts if in_pieces else set()
        hooks = {handle.id for handle in self._handles}
        return copy_of_module(module, memo, self._replaced.of(module), hooks, tables)

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
        # Experts and tables within a layer, which its own unit has not.
        apart = [place_of(parameter) for parameter in module.parameters() if parameter in self._tables]
        read_apart = [located[1] for located in apart if located is not None]

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._check_process()
            if not session.in_pass and torch.is_grad_enabled():
                session.commit_log.begin_part()
            wanted = recompute and (
                session.options.recompute or (module.training and getattr(module, "gradient_checkpointing", False))
            )
            if not (wanted and torch.is_grad_enabled()):
                # A module called by itself: the forward of the whole model would save names of
                # weights already.
                alone = not session.in_pass and torch.is_grad_enabled() and not collected_by_checkpoint()
                with self.saving_names() if alone else nullcontext():
                    result = run(*args, **kwargs)
                return wrap_outputs(result, session) if not session.in_pass else result
            kwargs = caches_as_checkpointed(module, kwargs)
            check_caches(module, kwargs)
            places = [*(place for unit in needed for place in unit.places), *read_apart]
            versions = [version_now(place) for place in places]
            with raw_tensor_access():
                trained = [place.parameter.requires_grad for place in places]

            def written() -> list[int]:
                return [session.streamer.cached_units[unit].module_writes for unit in needed]

            def run_unless_stepped(*args: Any, **kwargs: Any) -> Any:
                nonlocal versions
                for place, version in zip(places, versions, strict=True):
                    if version_now(place) != version:
                        raise MemascendError(stale(place.name))
                before = written()
                with _trained_as(places, trained):
                    result = run(*args, **kwargs)
                if written() == before and not any(session.streamer.uses(unit) for unit in needed):
                    # A function has counted a write that has changed nothing.
                    versions = [version_now(place) for place in places]
                return result

            before = written()
            names = self._names if session.in_pass else None
            result = Recomputation(module, run_unless_stepped, args, kwargs, session.inputs, names).run(args, kwargs)
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

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._check_process()
            grad = torch.is_grad_enabled()
            if not self._replaced.said_uncompiled and called_from_compiled():
                self._replaced.say_uncompiled(model)
            check_transforms("the model")
            streamer.backward_updates.refuse()
            session.host_budget.fit(grad)
            if grad:
                self._watch_gradients()
                self._say_accumulating()
                session.commit_log.begin()
                if not session.in_pass and not in_backward():
                    session.host_budget.kept.begin()
            args, kwargs = session.site.moved((args, kwargs), remember if self._tables else None)
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
                session.commit_log.start()
            return wrap_outputs(result, session)

        return forward

    def _watch_gradients(self) -> None:
        """Capture the gradients of all parameters that are trained now, on the stream that the program computes on now.

        PyTorch's node for a parameter's gradient belongs to the stream that was the current one when the node was made.
        For gradients that another stream computes it waits, warns, and hands them to the first stream.
        """
        session = self.session
        stream = session.site.stream()
        moved, self._stream = stream != self._stream, stream
        with raw_tensor_access():
            for place in session.places:
                if moved:
                    session.gradients.unwatch(place)
                if not place.gradient.hooks:
                    session.gradients.watch(place)

    def _say_accumulating(self) -> None:
        """Say once that a pass begins while gradients wait for a step, where slices of one batch would move less."""
        plan = self.session.plan
        moving = (unit for unit in self.session.units if unit.repeated and unit not in plan.resident_units)
        if self._said_accumulating or not any(place.gradient.held for unit in moving for place in unit.places):
            return
        self._said_accumulating = True
        self.session.note(
            "gradients of several passes are accumulated before a step, and each pass moves weights and gradients to "
            "and from the SSD. One call with all sequences and micro_batch_size=K moves them once a step: in a "
            "Trainer's arguments accumulate_in_layers=True, in memascend finetune --batch-size and --micro-batch-size"
        )

    def as_pass(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the model's parts, as one pass of the stream: as the model's forward is."""
        model = self.session.model()
        assert model is not None, "the caller holds the model"
        return self.session.turns.around(self._whole(model, function), "a forward pass")

    def saving_names(self) -> AbstractContextManager[Any]:
        """Have autograd save names of weights instead of views of them, and other tensors unchanged."""
        return self._names.saving()


@contextmanager
def _trained_as(places: list[ParameterEntry], trained: list[bool]) -> Iterator[None]:
    """Have parameters require gradients as they did before: a graph computed again is the graph of the first call."""
    with raw_tensor_access():
        changed = [
            place.parameter for place, was in zip(places, trained, strict=True) if place.parameter.requires_grad != was
        ]
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        with raw_tensor_access():
            for parameter in changed:
                parameter.requires_grad_(not parameter.requires_grad)


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into a model."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


def _refuse_closed(*_: Any, **__: Any) -> Any:
    raise MemascendError("the model was closed: its parameters are no longer on the store")
