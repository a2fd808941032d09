"""Puts memascend's parts in the place of DeepSpeed's, and takes them away again."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from dataclasses import dataclass, field
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memascend.integrations.deepspeed import adam, files, options, versions
from memascend.integrations.deepspeed.pinned import PinHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MISSING = object()
#: Where DeepSpeed keeps the module of `pin_memory`, whichever of its packages has loaded it.
_PIN_MEMORY_ATTRIBUTE = "_deepspeed_pin_memory_op_module"


@dataclass
class InstalledPart:
    """A part of memascend that is in force, the parts that it replaces, and how to take it away."""

    name: str
    replaces: str
    undo: list[Callable[[], None]] = field(default_factory=list)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `undo`."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self.undo.append(lambda: delattr(owner, name) if before is _MISSING else setattr(owner, name, before))

    def set_item(self, owner: dict[str, Any], name: str, value: Any) -> None:
        """Set an item of a dictionary until `undo`."""
        before = owner.get(name, _MISSING)
        owner[name] = value

        def undo() -> None:
            if before is _MISSING:
                owner.pop(name, None)
            else:
                owner[name] = before

        self.undo.append(undo)


_lock = Lock()
_parts: list[InstalledPart] = []


def installed() -> list[str]:
    """Return the names of the parts that are in force."""
    return [part.name for part in _parts]


def install() -> list[str]:
    """Put memascend behind DeepSpeed in this process; the names of the parts. A second call changes nothing.

    Call it before `deepspeed.initialize`: engines that exist go on as they are. Says on stderr, in the first process of
    a run, which parts are replaced, and by which.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(f"memascend.deepspeed needs DeepSpeed ({error}): pip install deepspeed") from error

    with _lock:
        if _parts:
            return installed()
        if not versions.is_supported(deepspeed.__version__):
            warnings.warn(
                f"memascend.deepspeed is made for DeepSpeed {versions.FIRST_VERSION} up to {versions.END_VERSION}, and "
                f"leaves this one, {deepspeed.__version__}, as it is: install one of those",
                stacklevel=2,
            )
            return []
        _parts.extend(_operators())
        tiers = os.environ.get("MEMASCEND_DEEPSPEED_TIERS", "ABC")
        if "B" in tiers:
            _parts.extend(_memory(deepspeed.__version__, streaming="C" in tiers))
        if os.environ.get("RANK", "0") == "0":
            said = "; ".join(f"{part.name} in place of {part.replaces}" for part in _parts)
            print(f"memascend behind DeepSpeed {deepspeed.__version__}: {said}", file=sys.stderr)
        return installed()


def uninstall() -> None:
    """Put DeepSpeed's own parts back. Without `install` before, nothing happens."""
    with _lock:
        while _parts:
            undo = _parts.pop().undo
            while undo:
                undo.pop()()
        _forget_compatible()


def _operators() -> Iterator[InstalledPart]:
    """Fill in the operators that DeepSpeed would compile or load."""
    from deepspeed.accelerator import get_accelerator

    pin_memory = _module("pin_memory", pin_handle=PinHandle)
    async_io = _module(
        "async_io",
        aio_handle=files.AioHandle,
        aio_read=files.aio_read,
        aio_write=files.aio_write,
        deepspeed_memcpy=files.deepspeed_memcpy,
    )
    cpu_adam = _module(
        "cpu_adam",
        create_adam=adam.create_adam,
        adam_update=adam.adam_update,
        adam_rollback=adam.adam_rollback,
        destroy_adam=adam.destroy_adam,
    )
    _hand_zenflow_over(cpu_adam)
    modules = [
        (async_io, "AsyncIOBuilder", "libaio"),
        (pin_memory, "PinMemoryBuilder", "malloc and mlock"),
        (cpu_adam, "CPUAdamBuilder", "compiled Adam"),
    ]
    if get_accelerator()._name == "cpu":
        fused_adam = _module("fused_adam", multi_tensor_adam=adam.multi_tensor_adam)
        modules.append((fused_adam, "FusedAdamBuilder", "compiled fused Adam"))
    for module, builder, replaces in modules:
        classes = _builders(builder)
        if not classes:
            # DeepSpeed before 0.19.5 has no operator for pinned memory: it asks its handles of files for that.
            continue
        part = InstalledPart(module.__name__, replaces)
        for package in _builder_packages():
            part.set_item(package.builder.OpBuilder._loaded_ops, module.__name__, module)
        if module is pin_memory:
            part.set_attribute(sys, _PIN_MEMORY_ATTRIBUTE, module)
        _set_compatible(part, classes, True)
        yield part

    if not _can_compile():
        # DeepSpeed raises where it finds that it cannot; gloo carries on alone.
        part = InstalledPart("gloo", "compiled collectives, which need ninja and a compiler")
        _set_compatible(part, _builders("ShareMemCommBuilder"), False)
        yield part

    _forget_compatible()


def _set_compatible(part: InstalledPart, classes: list[type], value: bool) -> None:
    """Have builders say whether their modules can be used here, and DeepSpeed know it if it has asked before."""
    operators = importlib.import_module("deepspeed.ops")
    for cls in classes:
        part.set_attribute(cls, "is_compatible", lambda self, verbose=False: value)
        if not _asks_when_needed(operators):
            part.set_item(operators.__compatible_ops__, vars(cls)["NAME"], value)


def _forget_compatible() -> None:
    """Have DeepSpeed find out anew which of its operators there are, if it does not do so once, when imported."""
    operators = sys.modules.get("deepspeed.ops")
    if operators is not None and _asks_when_needed(operators):
        vars(operators).pop("__compatible_ops__", None)


def _asks_when_needed(operators: ModuleType) -> bool:
    """Return whether DeepSpeed finds out when it needs to which operators there are: since 0.19.8."""
    return "__getattr__" in vars(operators)


@dataclass(frozen=True)
class _LargerPart:
    """A part that follows DeepSpeed's own code: the unknown part of that code, and how to put the part in force."""

    name: str
    replaces: str
    unknown: Callable[[], list[str]]
    apply: Callable[[InstalledPart], None]


def _memory(version: str, streaming: bool) -> Iterator[InstalledPart]:
    """Replace the parts of ZeRO-3 that hold memory: swappers, gradients and, if `streaming`, the optimizer's step.

    Each part needs those before it. From the first whose code is not known, all stay as they are in DeepSpeed.
    """
    larger = [
        _LargerPart("parameter pools", "one pool of the largest parameter", _unknown_to_pools, _apply_pools),
        _LargerPart(
            "gradients",
            "a copy of all gradients, and checks with temporaries",
            _unknown_to_gradients,
            _apply_gradients,
        ),
    ]
    if streaming:
        larger += [
            _LargerPart("streaming step", "buffers for whole sub-groups", _unknown_to_streaming, _apply_streaming),
            _LargerPart(
                "loading of checkpoints",
                "one that leaves out what is not in swap files",
                _unknown_to_loading,
                _apply_loading,
            ),
        ]
    for index, of_version in enumerate(larger):
        try:
            unknown = of_version.unknown()
        except (ImportError, KeyError, AttributeError) as error:
            unknown = [str(error.args[0])]
        if unknown:
            _warn_of_parts(version, [part.name for part in larger[index:]], unknown)
            return
        part = InstalledPart(of_version.name, of_version.replaces)
        of_version.apply(part)
        yield part


def _unknown_to_pools() -> list[str]:
    from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_optimizer_swapper, partitioned_param_swapper
    from deepspeed.runtime.swap_tensor import utils as swap_utils

    return [
        *versions.unknown(partitioned_param_swapper, "AsyncPartitionedParameterSwapper"),
        *versions.unknown(swap_utils, "SwapBufferManager"),
        *versions.unknown(optimizer_utils, "OptimizerSwapper"),
        *versions.unknown(partitioned_optimizer_swapper, "PartitionedOptimizerSwapper"),
    ]


def _apply_pools(part: InstalledPart) -> None:
    from deepspeed.runtime.swap_tensor import optimizer_utils
    from deepspeed.runtime.zero import partition_parameters

    from memascend.integrations.deepspeed import buffers, parameters

    part.set_attribute(partition_parameters, "AsyncPartitionedParameterSwapper", parameters.ParameterSwapper)
    part.set_attribute(optimizer_utils, "SwapBufferManager", buffers.StateBuffers)


def _unknown_to_gradients() -> list[str]:
    from deepspeed.runtime.zero import stage3

    from memascend.integrations.deepspeed import gradients

    return versions.unknown(stage3, gradients.Optimizer.__name__, list(gradients.METHODS))


def _apply_gradients(part: InstalledPart) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    from memascend.integrations.deepspeed import gradients

    for name, method in gradients.METHODS.items():
        part.set_attribute(gradients.Optimizer, name, method)
    # All options are of this part and of the step.
    initialize_params = DeepSpeedConfig._initialize_params

    def read_options(self: Any, param_dict: dict[str, Any]) -> None:
        options.read(param_dict)
        initialize_params(self, param_dict)

    part.set_attribute(DeepSpeedConfig, "_initialize_params", read_options)


def _unknown_to_streaming() -> list[str]:
    from deepspeed.runtime.zero import stage3

    from memascend.integrations.deepspeed import streaming

    return versions.unknown(stage3, streaming.Optimizer.__name__, list(streaming.METHODS))


def _apply_streaming(part: InstalledPart) -> None:
    from deepspeed.runtime.zero import stage3

    from memascend.integrations.deepspeed import streaming

    for name in ("PartitionedOptimizerSwapper", "PipelinedOptimizerSwapper"):
        part.set_attribute(stage3, name, streaming.in_place_of(getattr(stage3, name)))
    for name, replaced in streaming.METHODS.items():
        part.set_attribute(streaming.Optimizer, name, replaced)


def _unknown_to_loading() -> list[str]:
    from deepspeed.runtime import engine

    from memascend.integrations.deepspeed import checkpoints

    return versions.unknown(engine, "DeepSpeedEngine", list(checkpoints.METHODS))


def _apply_loading(part: InstalledPart) -> None:
    from deepspeed.runtime import engine

    from memascend.integrations.deepspeed import checkpoints

    for name, load in checkpoints.METHODS.items():
        part.set_attribute(engine.DeepSpeedEngine, name, load)


def _warn_of_parts(version: str, parts: list[str], unknown: list[str]) -> None:
    warnings.warn(
        f"memascend.deepspeed leaves out its {', '.join(parts)} with DeepSpeed {version}, whose code it does not know: "
        f"{', '.join(unknown)}. Every part is in force with DeepSpeed {versions.KNOWN_VERSIONS}",
        stacklevel=4,
    )


def _module(name: str, **contents: Any) -> ModuleType:
    """Return an operator as a module, which has no file."""
    module = ModuleType(name)
    vars(module).update(contents)

    def missing(attribute: str) -> Any:
        raise AttributeError(
            f"memascend's {name} has no {attribute}: for what needs DeepSpeed's own, leave memascend.deepspeed out or "
            "call memascend.deepspeed.uninstall() first"
        )

    vars(module)["__getattr__"] = missing
    return module


def _hand_zenflow_over(cpu_adam: ModuleType) -> None:
    """Have DeepSpeed's compiled Adam take over as a whole where ZenFlow asks for its functions, which use it inside."""
    refuse = vars(cpu_adam)["__getattr__"]

    def missing(attribute: str) -> Any:
        if not attribute.startswith("zenflow_"):
            return refuse(attribute)
        from deepspeed.ops.op_builder import CPUAdamBuilder

        loaded = CPUAdamBuilder._loaded_ops
        ours = loaded.pop(cpu_adam.__name__, None)
        try:
            compiled = CPUAdamBuilder().load(verbose=False)
        except (RuntimeError, OSError, ImportError) as error:
            raise AttributeError(
                f"ZenFlow needs DeepSpeed's own Adam, which cannot be compiled here: {error}"
            ) from error
        finally:
            if ours is not None:
                loaded[cpu_adam.__name__] = ours
        for optimizer_id, decoupled in adam.optimizers().items():
            # The other options come with each step.
            compiled.create_adam(optimizer_id, 1e-3, 0.9, 0.999, 1e-8, 0.0, decoupled, False)
        functions = {name: value for name, value in vars(compiled).items() if not name.startswith("__")}
        vars(cpu_adam).update(functions)
        return functions[attribute]

    vars(cpu_adam)["__getattr__"] = missing


def _builder_packages() -> Iterator[ModuleType]:
    """Yield the packages of operator builders; a source checkout has a second one."""
    for name in ("deepspeed.ops.op_builder", "op_builder"):
        if name == "deepspeed.ops.op_builder" or name in sys.modules:
            importlib.import_module(f"{name}.builder")
            yield sys.modules[name]


def _builders(name: str) -> list[type]:
    """Return the classes of that name, of every accelerator that has its own."""
    found = []
    for package in _builder_packages():
        for where in (package, sys.modules.get(f"{package.__name__}.cpu")):
            cls = getattr(where, name, None)
            if isinstance(cls, type) and cls not in found:
                found.append(cls)
    return found


def _can_compile() -> bool:
    from shutil import which

    return which("ninja") is not None and any(which(name) for name in (os.environ.get("CXX") or "c++", "g++"))
