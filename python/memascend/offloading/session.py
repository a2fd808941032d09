"""Put a model's parameters on SSD and hook their streaming into its forward and backward pass.

This is the only module that installs hooks into a model.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import sys
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from memascend._memascend import Runtime, return_large_blocks_to_system
from memascend.common.sizes import format_size, parse_size
from memascend.common.timeline import Timeline
from memascend.durable.generations import Generations, source_of
from memascend.errors import BudgetError, MemascendError, PinnedMemoryError
from memascend.layout.units import CPU, Place, Unit, partition
from memascend.machine.cuda import ComputeDevice, explained, open_device
from memascend.machine.drives import store_options
from memascend.offloading.activations import POLICIES, InputStash, Recomputation
from memascend.offloading.gradients import GradientCapture
from memascend.plan.device import make_device_plan
from memascend.plan.host import Plan, check_available, make_plan
from memascend.residency.device import DeviceStreamer
from memascend.residency.host import Streamer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from memascend._memascend import LeaseBuffer
    from memascend.plan.device import DevicePlan

    StorePaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_log = logging.getLogger("memascend")
#: (Offload, Place), both weakly, by identity of the parameter: how an optimizer finds what it is given.
_places = WeakIdKeyDictionary()
#: What still holds a store; closed when the interpreter ends, so that no files are left behind.
_open: weakref.WeakSet[Any] = weakref.WeakSet()
_OWNER_PID = os.getpid()
#: What `open_runtime` takes beside a plan and a store.
OPTIONS = frozenset(
    name
    for name, value in inspect.signature(Runtime).parameters.items()
    if value.kind is inspect.Parameter.KEYWORD_ONLY and name not in ("resume", "in_place", "device")
)


def place_of(parameter: nn.Parameter) -> tuple[Offload, Place] | None:
    """Return where an offloaded parameter is, or None for an ordinary one."""
    found = _places.get(parameter)
    if found is None:
        return None
    state, place = (reference() for reference in found)
    return None if state is None or place is None else (state, place)


def finish_gradient(place: Place) -> None:
    """Wait until what is known of a kept gradient is known: it may be on its way from a device."""
    found = place_of(place.parameter)
    if found is not None:
        found[0].gradients.finish(place)


def shown_places() -> dict[int, tuple[Place, bool]]:
    """Return all places by the address of what stands for an absent weight (False) or a kept gradient (True)."""
    found: dict[int, tuple[Place, bool]] = {}
    for _, reference in _places.values():
        place = reference()
        if place is not None:
            found[place.absent.data_ptr()] = (place, False)
            found[place.marker.data_ptr()] = (place, True)
    return found


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
    """A module's `_parameters`: a parameter asked for while its unit is absent, during a pass, is fetched."""

    __slots__ = ("lookup",)

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        # A compiled layer has its own before it runs, and would be compiled anew whenever something else is there.
        if parameter is not None and not torch.compiler.is_dynamo_compiling():
            self.lookup(parameter)
        return parameter

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy would share the forward of the original, and train nothing of its own.
        raise MemascendError(
            "a module of an offloaded model cannot be copied, as PEFT's modules_to_save wants it to be: its parameters "
            "are on SSD. Copy it, or add the adapters, before memascend.offload"
        )


@dataclass(frozen=True, kw_only=True)
class Computing:
    """Where and how an offloaded model computes."""

    #: None is the CPU.
    device: ComputeDevice | None
    #: Ceiling of what memascend and PyTorch hold in device memory, in bytes; None is what is free.
    device_memory: int | None
    recompute: bool
    #: One of `POLICIES`.
    activations: str
    batch_tokens: int | None

    @staticmethod
    def of(
        device: str | torch.device | ComputeDevice | None,
        device_memory: str | int | None,
        recompute: bool,
        activations: str | None,
        batch_tokens: int | None,
    ) -> Computing:
        """Understand the arguments of `memascend.offload` that have these names."""
        if activations not in (None, *POLICIES):
            raise ValueError(f"activations={activations!r} is none of {', '.join(map(repr, POLICIES))}")
        if activations not in (None, "recompute") and not recompute:
            raise ValueError(
                f"activations={activations!r} is about the inputs of recomputed layers: leave recompute=True"
            )
        if batch_tokens is not None and batch_tokens < 1:
            raise ValueError(f"batch_tokens={batch_tokens}: a batch has one token or more")
        opened = open_device(device)
        if opened is None and device_memory is not None:
            raise ValueError("device_memory is of a CUDA device: give device='cuda' too")
        return Computing(
            device=opened,
            device_memory=None if device_memory is None else parse_size(device_memory),
            recompute=recompute,
            # In host memory an input costs no more than where it was; on a device there is less room.
            activations=activations or ("host" if opened is None else "recompute"),
            batch_tokens=batch_tokens,
        )

    @property
    def torch_device(self) -> torch.device:
        """The device, as PyTorch names it."""
        return CPU if self.device is None else self.device.torch_device

    def plan(self, units: Sequence[Unit], config: Any) -> DevicePlan | None:
        """Plan the device's memory, if there is a device."""
        if self.device is None:
            return None
        free, total = self.device.memory()
        places = (place for unit in units for place in unit.places)
        # A model that is there already makes room.
        free += sum(place.nbytes for place in places if place.parameter.device.type == "cuda")
        plan = make_device_plan(
            units,
            self.device_memory,
            tokens=self.batch_tokens,
            config=config,
            activations=self.activations if self.recompute else "keep",
            free=free,
        )
        _log.info("device memory:\n%s", plan.table())
        if plan.budget > free:
            raise BudgetError(
                f"device_memory is {format_size(plan.budget)}, but {self.torch_device} has only {format_size(free)} "
                f"free of {format_size(total)}: another process, or other tensors of this one, hold the rest; free it "
                f"(see nvidia-smi) or lower device_memory (the least is {format_size(plan.smallest_bytes)})",
                plan.smallest_bytes,
            )
        return plan


class Offload:
    """The offloaded state of one model: its units on SSD, its budgeted host and device memory and its hooks."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        plan: Plan,
        store: StorePaths,
        *,
        computing: Computing,
        keep_store: bool | None,
        durability: str,
        source: dict[str, Any],
        options: dict[str, Any],
        resume: bool = False,
    ) -> None:
        """Create the store for `units`, without contents, or open it to `resume`; `source` makes the model again."""
        self.model = weakref.ref(model)
        self.units = units
        self.recompute = computing.recompute
        self.device = computing.device
        self.torch_device = computing.torch_device
        self.keep_store = keep_store
        self.generations = Generations(self, durability, source)
        self.notices: list[str] = []
        self.device_plan = computing.plan(units, getattr(model, "config", None))
        self.host_memory = plan.budget
        self.plan, self.runtime = self._open(plan, store, options, resume)
        if self.device is not None and options.get("allocator") in ("locked", "pageable"):
            self.notices.append(
                f"allocator={options['allocator']!r}: every copy to the device and back stops the program until it is "
                "done, which pinned memory ('auto', 'cuda', 'registered') spares"
            )
        try:
            for unit in units:
                unit.index = self.runtime.add_unit()
                self.runtime.read_from_files(unit.index, unit.outside)
                for tensor in unit.tensors:
                    if tensor.places[0].source is not None:
                        continue
                    if not resume:
                        tensor.id = self.runtime.create_tensor(tensor.name, tensor.nbytes)
                        continue
                    tensor.id = self.runtime.find_tensor(tensor.name)
                    if tensor.id is None:
                        raise MemascendError(f"the store has no weights of {tensor.name}")
            self.timeline = Timeline(updating=lambda: self.runtime.update_seconds)
            self.streamer = self._stream()
        except BaseException:
            self.runtime.close(keep=resume)
            raise
        in_flight = 0 if self.device_plan is None else self.device_plan.in_flight_bytes
        self.gradients = GradientCapture(self.runtime, self.streamer, self.timeline, self.device, in_flight)
        self._inputs = InputStash(self.runtime, computing.activations, self.timeline, self.device)
        #: What is read beside the store.
        self.files = list({place.source[0] for place in self.places if place.source is not None})
        if any(not file.direct for file in self.files) and options.get("direct", True):
            self.notices.append("the model's files are read through the page cache: their filesystem refuses O_DIRECT")
        self._originals: list[tuple[nn.Module, str, Any]] = []
        close_at_exit(self)

    def _open(self, plan: Plan, store: StorePaths, options: dict[str, Any], resume: bool) -> tuple[Plan, Runtime]:
        """Create the native side; where the system pins less than the plan takes, with a smaller one."""
        in_place = self.generations.period == 0
        index = None if self.device is None else self.device.index
        wanted = plan
        while True:
            try:
                with nullcontext() if self.device is None else self.device.current():
                    runtime = open_runtime(plan, store, options, resume=resume, in_place=in_place, device=index)
                break
            except PinnedMemoryError as error:
                if plan.total <= plan.smallest_bytes:
                    raise
                smaller = make_plan(self.units, max(plan.smallest_bytes, plan.total // 2))
                _log.info("%s: trying %s", error, format_size(smaller.total))
                plan = smaller
        if plan is not wanted:
            self.notices.append(
                f"the system pins less host memory than the {format_size(wanted.total)} that were planned: the windows "
                f"are smaller, {format_size(plan.total)} in all (WSL2 pins a part of its memory only; see `memory` in "
                ".wslconfig, or `ulimit -l`)"
            )
            _log.warning("%s", self.notices[-1])
        return plan, runtime

    def _stream(self) -> Streamer:
        if self.device is None or self.device_plan is None:
            return Streamer(self.runtime, self.units, self.plan, self.timeline)
        self.device.link = self.runtime.device
        return DeviceStreamer(self.runtime, self.units, self.plan, self.timeline, self.device, self.device_plan)

    @property
    def places(self) -> Iterable[Place]:
        """Every parameter."""
        return (place for unit in self.units for place in unit.places)

    # ---- filling the store ------------------------------------------------------------------------------

    def fill(self, read: Callable[[Place, torch.Tensor], None], progress: Callable[[int, int], None] | None) -> None:
        """Write every unit, calling `read(place, target)` to fill each parameter's bytes (a typed view)."""
        stored = [unit for unit in self.units if unit.weights]
        total, done = sum(unit.nbytes for unit in stored), 0
        for unit in stored:
            lease = self._free_lease(unit)
            storage = torch.frombuffer(lease, dtype=torch.uint8)
            storage[: unit.nbytes].zero_()
            for place in unit.places:
                read(place, place.view(storage))
            self.runtime.write_unit(unit.index, unit.weights, lease)
            # The write alone holds the buffer now: the next unit may be waiting for it.
            del storage, lease
            done += unit.nbytes
            if progress is not None:
                progress(done, total)
        for unit in stored:
            self.runtime.wait_unit(unit.index)
        self.generations.changed()

    def _free_lease(self, unit: Unit) -> LeaseBuffer:
        for other in self.units:
            lease = self.runtime.lease_unit(unit.nbytes)
            if lease is not None:
                return lease
            # All buffers of this size are being written: wait for one.
            self.runtime.wait_unit(other.index)
        lease = self.runtime.lease_unit(unit.nbytes)
        assert lease is not None, "the plan holds a buffer for every unit"
        return lease

    # ---- hooks ------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Install the hooks: from here on the model's parameters are on SSD."""
        model = self.model()
        assert model is not None
        owner: dict[nn.Parameter, Unit] = {}
        for unit in self.units:
            for place in unit.places:
                owner[place.parameter] = unit
                if self.device is not None:
                    place.seen = [place.parameter._version, place.marker._version]
                place.hide()
                place.parameter.grad = None
                _places[place.parameter] = (weakref.ref(self), weakref.ref(place))
                self.gradients.watch(place)

        self.streamer.attach()
        blocks = {module for unit in self.units if unit.repeated for module in unit.modules}
        inside = {inner for block in blocks for inner in block.modules()}

        def lookup(parameter: nn.Parameter) -> None:
            if self.streamer.depth:
                unit = owner.get(parameter)
                if unit is not None:
                    self.streamer.enter_loose(unit)

        if self.device is not None:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(self.torch_device)
        for module in model.modules():
            if module._parameters:
                watched = _WatchedParameters(module._parameters)
                watched.lookup = lookup
                self._replace(module, "_parameters", watched)
            if module in blocks:
                own = list(module.parameters())
            elif module not in inside and any(p is not None for p in module._parameters.values()):
                own = [p for p in module._parameters.values() if p is not None]
            else:
                continue
            needed = list(dict.fromkeys(owner[p] for p in own if p in owner))
            if needed and module is not model:
                self._surround(module, partial(self._streamed, module, needed, module in blocks))
        self._surround(model, partial(self._whole, model, owner))
        self._refuse_state_dict(model)
        model._memascend = self
        if self.device is not None and self.device_plan is not None:
            # Only now: weights that were on the device are gone from there.
            self.device.hold(self.device_plan)

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        self._originals.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = value

    def _surround(self, module: nn.Module, around: Callable[[Callable], Callable]) -> None:
        """Put `around(forward)` in the place of a module's forward, or around what `torch.compile` has made of it.

        What streams is never traced itself: it acts on what a compiled graph knows nothing of.
        """

        def install() -> None:
            compiled = module.__dict__.get("_compiled_call_impl")
            name, original = ("forward", module.forward) if compiled is None else ("_compiled_call_impl", compiled)
            self._replace(module, name, torch.compiler.disable(around(original)))

        def compile_(*args: Any, **kwargs: Any) -> None:
            options = kwargs.get("options") or {}
            if self.device is not None and (
                kwargs.get("mode") in ("reduce-overhead", "max-autotune") or options.get("triton.cudagraphs")
            ):
                raise MemascendError(
                    f"mode={kwargs.get('mode')!r} records CUDA graphs, for which weights must stay where they are: use "
                    "mode=None, or 'max-autotune-no-cudagraphs'"
                )
            mine = [each for each in self._originals if each[0] is module and each[1] != "_parameters"]
            _restore(mine)
            self._originals = [each for each in self._originals if each not in mine]
            module.compile(*args, **kwargs)
            install()
            self._replace(module, "compile", compile_)

        install()
        self._replace(module, "compile", compile_)

    def _streamed(self, module: nn.Module, needed: list[Unit], recompute: bool, original: Callable) -> Callable:
        """Wrap a module's forward: fetch before, let go after; recompute in the backward pass if wanted."""
        streamer = self.streamer

        def run(*args: Any, **kwargs: Any) -> Any:
            # Transformers' own checkpointing would call the layer behind our back: ours replaces it.
            checkpointing = module.__dict__.get("gradient_checkpointing")
            if checkpointing:
                module.gradient_checkpointing = False
            entered: list[Unit] = []
            try:
                for unit in needed:
                    streamer.enter(unit)
                    entered.append(unit)
                with streamer.scope(), explained(self.device_plan):
                    return original(*args, **kwargs)
            finally:
                for unit in entered:
                    streamer.exit(unit)
                if torch.is_autocast_enabled(self.torch_device.type):
                    # It keeps a copy of every weight that it has converted, until the pass ends.
                    torch.clear_autocast_cache()
                if checkpointing:
                    module.gradient_checkpointing = checkpointing

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            wanted = recompute and (
                self.recompute or (module.training and getattr(module, "gradient_checkpointing", 0))
            )
            if not (wanted and torch.is_grad_enabled()):
                # Called by itself, and not by the whole model, whose forward saves so already.
                alone = streamer.depth == 0 and torch.is_grad_enabled()
                with self._saving() if alone else nullcontext():
                    return run(*args, **kwargs)
            for name in ("past_key_values", "layer_past", "past_key_value"):
                if kwargs.get(name) is not None:
                    raise MemascendError(
                        f"{type(module).__name__} was given {name} while its activations are recomputed, which would "
                        "fill the cache twice: call the model with use_cache=False when training"
                    )
            versions = [place.version for unit in needed for place in unit.places]

            def same(*args: Any, **kwargs: Any) -> Any:
                if versions != [place.version for unit in needed for place in unit.places]:
                    raise MemascendError(_stale(f"the parameters of {needed[0].name}"))
                return run(*args, **kwargs)

            return Recomputation(same, args, kwargs, self._inputs).run(args, kwargs)

        return forward

    def _saving(self) -> Any:
        """Have autograd save names of weights instead of views of them, and all other tensors as ever."""
        streamer = self.streamer

        def pack(tensor: torch.Tensor) -> Any:
            unit = None
            if tensor.device == self.torch_device and tensor.layout is torch.strided:
                unit = streamer.by_address.get(tensor.untyped_storage().data_ptr())
            # Detached: a node that saves its own output would refer to itself, and live for ever.
            return tensor.detach() if unit is None else _SavedWeight(unit, tensor)

        def unpack(saved: Any) -> torch.Tensor:
            if not isinstance(saved, _SavedWeight):
                return saved
            if saved.place.version != saved.version:
                raise MemascendError(_stale(saved.place.name))
            storage = streamer.storage(saved.unit).untyped_storage()
            empty = torch.empty(0, dtype=saved.dtype, device=self.torch_device)
            return empty.set_(storage, saved.offset, saved.shape, saved.stride)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _whole(self, model: nn.Module, owner: dict[nn.Parameter, Unit], original: Callable) -> Callable:
        """Wrap the forward of the whole model: one pass of the stream."""
        streamer = self.streamer
        # PEFT's models hand what they do not know to the model that they wrap.
        wrapped = model.get_base_model() if hasattr(model, "get_base_model") else model
        caches = "use_cache" in inspect.signature(wrapped.forward).parameters
        direct = [owner[p] for p in model._parameters.values() if p is not None and p in owner]

        def brought(value: Any) -> Any:
            on_cpu = isinstance(value, torch.Tensor) and value.device == CPU
            return value.to(self.torch_device, non_blocking=True) if on_cpu else value

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            grad = torch.is_grad_enabled()
            if grad:
                for place in self.places:
                    if not place.hooks:
                        self.gradients.watch(place)
                # A cache is for generation; filled during training it would only hold activations in memory.
                if caches and kwargs.get("use_cache") is None:
                    kwargs["use_cache"] = False
                self.generations.begin()
            if self.device is not None:
                args, kwargs = pytree.tree_map(brought, (args, kwargs))
            with streamer.forward_pass(grad), explained(self.device_plan):
                for unit in direct:
                    streamer.enter_loose(unit)
                if not grad:
                    return original(*args, **kwargs)
                with self._saving():
                    result = original(*args, **kwargs)
            self.generations.start()
            return result

        return forward

    def _refuse_state_dict(self, model: nn.Module) -> None:
        """Refuse `state_dict()` of the whole model; with PEFT's adapters it holds what is trained, as PEFT wants."""

        def refuse(*_: Any) -> None:
            if not has_adapters(model):
                raise MemascendError(
                    "the parameters of an offloaded model are on SSD, so state_dict() cannot hold them: use "
                    "memascend.save_pretrained(model, directory) or memascend.parameters_of(model)"
                )

        def keep_trained(_: nn.Module, found: dict[str, Any], prefix: str, *__: Any) -> None:
            self.flush()
            for name, parameter in model.named_parameters(remove_duplicate=False):
                offloaded = place_of(parameter)
                if offloaded is None:
                    continue
                if not parameter.requires_grad:
                    del found[prefix + name]
                    continue
                place = offloaded[1]
                found[prefix + name] = place.view(self.read_unit(place.tensor.unit)).clone()

        model.register_state_dict_pre_hook(refuse)
        model.register_state_dict_post_hook(keep_trained)

    # ---- use --------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Apply deferred updates and wait until everything is on the store's drives, and durable if it is to be."""
        self.streamer.apply_updates()
        self.generations.commit()

    def save_checkpoint(self, tag: str, keep_last: int | None = None) -> None:
        """Keep the present state under a name; see `memascend.save_checkpoint`."""
        if outside := self.trained_outside():
            raise MemascendError(
                f"{outside[0]} is trained, but not on the store: a checkpoint there would not have it. Save adapters "
                "with model.save_pretrained(directory) and the optimizer with state_dict(), or add them before "
                "memascend.offload"
            )
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: at least the checkpoint that is made is kept")
        if self.generations.period == 0:
            raise MemascendError(
                "with durability='none' weights and states are updated in place, so that no checkpoint can be kept "
                "beside them: use durability='step' or 'every:N', or write them elsewhere (save_pretrained, state_dict)"
            )
        self.streamer.apply_updates()
        self.generations.keep()
        self.runtime.snapshot(tag)
        if keep_last is not None:
            for old, _, _ in self.runtime.snapshots()[:-keep_last]:
                self.runtime.delete_snapshot(old)

    def trained_outside(self) -> list[str]:
        """Return the names of the model's trained parameters that are not on the store: adapters added later."""
        model = self.model()
        named = [] if model is None else model.named_parameters()
        return [name for name, parameter in named if parameter.requires_grad and place_of(parameter) is None]

    def read_unit(self, unit: Unit) -> torch.Tensor:
        """Return a unit's current bytes (uint8); deferred updates must have been flushed."""
        return self.streamer.read(unit)

    def stats(self) -> dict[str, Any]:
        """Return counters; see `memascend.stats`."""
        stats = self.runtime.stats()
        stats["host_bytes_budget"] = self.host_memory
        stats["host_bytes_planned"] = self.plan.total
        stats["file_bytes_read"] = sum(file.bytes_read for file in self.files)
        stats["parameters"] = sum(place.numel for place in self.places)
        stats["fetch_waits"] = self.streamer.waits
        stats["notices"] = self.runtime.notices + self.notices
        stats["generation"] = self.runtime.generation
        stats["seconds"] = self.timeline.seconds()
        if self.device_plan is not None:
            stats["device_bytes_budget"] = self.device_plan.budget
            stats["device_bytes_planned"] = self.device_plan.total
        if self.runtime.device is not None:
            stats["device"] = self.runtime.device.stats()
        return stats

    def close(self, failed: bool = False) -> None:
        """Free every lease and file handle. The store's files go unless they were to be kept.

        After something `failed`, the last durable generation is kept, unless `keep_store` is False, and nothing newer.
        So it is while an exception is on its way, and where there are checkpoints.
        """
        if self.runtime.closed:
            return
        failed = failed or sys.exc_info()[0] is not None
        if failed:
            self.generations.abandon()
        wanted = failed or bool(self.runtime.snapshots())
        kept = wanted and self.keep_store is not False and self.runtime.generation > 0
        try:
            if self.keep_store and not failed:
                if outside := self.trained_outside():
                    _log.warning("%s is trained, but not on the store that is kept: save it yourself", outside[0])
                self.streamer.apply_updates()
                self.generations.keep()
                kept = True
        finally:
            self.generations.abandon()
            model = self.model()
            _restore(self._originals)
            self._originals.clear()
            for place in self.places:
                self.gradients.unwatch(place)
                place.parameter.grad = None
                place.hide()
            if model is not None:
                self._replace(model, "forward", _closed)
                self._replace(model, "_compiled_call_impl", None)
            try:
                self.gradients.close()
                self._inputs.close()
                self.streamer.release_all()
            finally:
                try:
                    # Of a store that was to be kept and could not be, the last generation is.
                    self.runtime.close(keep=kept or (bool(self.keep_store) and self.runtime.generation > 0))
                finally:
                    self._free()

    def forget(self) -> None:
        """Leave a model that was closed: another store may have its weights."""
        _restore(self._originals)
        self._originals.clear()

    def discard(self) -> None:
        """Close what has not become a model's: nothing of it is kept."""
        self.runtime.close(keep=False)
        self._free()

    def _free(self) -> None:
        self.streamer.free()
        if self.device is not None:
            self.device.let_go()


def _restore(replaced: list[tuple[nn.Module, str, Any]]) -> None:
    """Put back what `Offload` has replaced."""
    for module, name, value in reversed(replaced):
        if value is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value


def _stale(what: str) -> str:
    return (
        f"{what} changed since the forward pass whose gradients were asked for: call backward() before "
        "optimizer.step(), or run the forward pass again"
    )


def _closed(*_: Any, **__: Any) -> Any:
    raise MemascendError("the model was closed: its parameters are no longer on the store")


@atexit.register
def _close_all() -> None:
    if os.getpid() != _OWNER_PID:  # a forked child has none of the threads that closing waits for
        return
    # Nobody has said that the run is done: what is durable of it stays, and what was to be kept is made so.
    crashed = getattr(sys, "last_exc", getattr(sys, "last_value", None)) is not None
    for holder in list(_open):
        holder.close(failed=crashed or not getattr(holder, "keep_store", False))


def close_at_exit(holder: Any) -> None:
    """Have `holder.close(failed)` called when the interpreter ends, if it still lives then."""
    _open.add(holder)


def store_paths(store: StorePaths) -> list[str | os.PathLike[str]]:
    """Return the places of a store as a list."""
    return [store] if isinstance(store, str) or hasattr(store, "__fspath__") else list(store)


def open_runtime(
    plan: Plan,
    store: StorePaths,
    options: dict[str, Any],
    *,
    resume: bool = False,
    in_place: bool = True,
    device: int | None = None,
) -> Runtime:
    """Create the native side of a plan on the directories of `store`, or open what is there to `resume`.

    With `device`, the number of a CUDA device, host memory is pinned for it.
    """
    _log.info("host memory:\n%s", plan.table())
    check_available(plan)
    return_large_blocks_to_system()
    paths = store_paths(store)
    measured, note = store_options(paths)
    if note:
        _log.info("%s", note)
    if resume:
        measured = {name: value for name, value in measured.items() if name != "rates"}  # as it was laid out
    return Runtime(
        paths,
        [(line.consumer, line.nbytes, line.count) for line in plan.units],
        [(line.consumer, line.nbytes, line.count) for line in plan.packs],
        plan.staging.nbytes,
        plan.staging.count + plan.kept.count,
        plan.chunk_elements,
        plan.slots.nbytes,
        plan.slots.count,
        resume=resume,
        in_place=in_place,
        device=device,
        **{**measured, **options},
    )


def find_offload(model: nn.Module) -> Offload | None:
    """Return the offloaded state of a model, or of the one that it wraps, as PEFT's do; None for an ordinary one."""
    states = (module.__dict__.get("_memascend") for module in model.modules())
    return next((state for state in states if state is not None), None)


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into a model."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


def offload_of(model: nn.Module) -> Offload:
    """Return the offloaded state of a model, or of the one that it wraps.

    Raises MemascendError for an ordinary or a closed model.
    """
    state = find_offload(model)
    if state is None:
        raise MemascendError("the model is not offloaded: use memascend.offload or memascend.from_pretrained")
    if state.runtime.closed:
        raise MemascendError("the model was closed")
    return state


def offload(
    model: nn.Module,
    *,
    store: StorePaths,
    host_memory: str | int,
    device: str | torch.device | None = None,
    device_memory: str | int | None = None,
    recompute: bool = True,
    activations: str | None = None,
    batch_tokens: int | None = None,
    durability: str = "auto",
    keep_store: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Move the parameters of a model in memory to SSD, in place, and return the model.

    Args:
        model: parameters in bfloat16, float16 or float32, on the CPU or on `device`. Tied parameters stay tied.
        store: a directory or a raw block device formatted by `memascend format` (its path or "UUID=..."), or several on
            different drives, over which the bytes are striped: evenly, or as `memascend bench` has measured them.
        host_memory: ceiling of what memascend holds in host memory, as bytes or "8GiB".
        device: where the model computes: "cuda", "cuda:1", or the CPU (None). Weights come to the device as they are
            needed, the model's buffers stay there, and inputs on the CPU are copied there.
        device_memory: ceiling of device memory, as `host_memory`: of what memascend keeps there and of all that PyTorch
            allocates there, without CUDA's own context (0.3 to 0.6 GiB). None is what is free.
        recompute: compute the activations of the repeated layers again in the backward pass.
        activations: where the inputs of these layers wait for it: "recompute", where they are; "host", in host memory
            as far as `host_memory` has room, and else on the SSD; "ssd", all of them on the SSD. None is "host" on the
            CPU and "recompute" on a device.
        batch_tokens: tokens of a batch (sequences x length), for the plan's estimate of activations: a device that is
            too small for them is refused before anything starts.
        durability: "step" makes every step of an optimizer durable: whatever stops the run, `memascend.resume` goes on
            from the last one. It takes room for a second copy of weights and states, and no traffic. "every:N" does so
            for every N-th step; "none" updates in place. "auto" is "step" where the volumes have the room.
        keep_store: leave the store's files in place on close, to be resumed. By default `close` removes them, but not
            while an exception is on its way, nor where there are checkpoints; a program that ends without `close`
            leaves its last durable step. False removes them in any of these cases.
        options: `engine` ("auto", "ring", "threads"), `direct` (bool), `rates` (bytes per second of each place, which
            decide on its share), `depth` (transfers in flight on each), `io_poll`, `sq_poll` (bool, see `memascend
            bench`), `checksums` (bool: check everything that is read), `allocator` ("auto", "cuda", "registered",
            "locked", "pageable"), `huge_pages` (bool), `compute_threads` (int).

    Raises:
        BudgetError: `host_memory` or `device_memory` is too small; the message and `smallest_bytes` say what would do.
        DeviceError: there is no such device, or it cannot be used; the message says what is missing.
        PinnedMemoryError: the system pins not even the least that works.
        StoreError: a directory cannot be used, is in use, or has not the room.
        ValueError: a dtype or device that cannot be trained.
    """
    if (known := find_offload(model)) is not None:
        raise MemascendError(
            "the model was closed: its weights are no longer in it; make it anew, or resume its store"
            if known.runtime.closed
            else "the model is offloaded already"
        )
    budget = parse_size(host_memory)
    computing = Computing.of(device, device_memory, recompute, activations, batch_tokens)
    for name, parameter in model.named_parameters():
        if parameter.device not in (CPU, computing.torch_device):
            raise ValueError(
                f"parameter {name} is on {parameter.device}, but the model is to compute on {computing.torch_device}: "
                f"give device='{parameter.device.type}', or move it to the CPU"
            )
    units = partition(model, computing.torch_device)
    plan = make_plan(units, budget)
    state = Offload(
        model,
        units,
        plan,
        store,
        computing=computing,
        keep_store=keep_store,
        durability=durability,
        source=source_of(model),
        options=options,
    )
    try:
        state.fill(lambda place, target: target.copy_(place.parameter.data), None)
        state.attach()
    except BaseException:
        state.discard()
        raise
    return model
