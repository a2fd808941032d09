"""The attributes of modules that a session replaces, and forwards that it surrounds.

Streaming surrounds compiled layers: fetches are outside a layer's compiled call, where Dynamo does not look, and
graphs see parameters that have their values. Logits that are not computed yet cannot be traced, so Dynamo leaves a
model with tables as it is (`common.graphs`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend.common.graphs import is_compiled
from memascend.common.notices import warn_of
from memascend.errors import MemascendError
from memascend.layout.registry import place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from torch import nn

    from memascend.session.session import Session

#: Values of `torch.compile`'s mode that record CUDA graphs.
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


class Replacements:
    """The replaced attributes of one model's modules."""

    def __init__(self, session: Session, experts: Set[nn.Parameter]) -> None:
        """Replace attributes in the model of `session`, whose `experts` are read one by one."""
        self._session = session
        self._experts = experts
        #: (module, attribute, previous entry of its `__dict__`, or None), in the order of replacement.
        self._originals: list[tuple[nn.Module, str, Any]] = []
        #: The replacements by which parts of layers, and norms, run on tiles.
        self._tiled: dict[nn.Module, tuple[nn.Module, str, Any]] = {}
        #: How a program reaches the model's layers, and whether it was told that they are not compiled.
        self.layers = "model"
        self.said_uncompiled = False

    def modules(self) -> list[nn.Module]:
        """Return the modules with a replaced attribute."""
        return list(dict.fromkeys(module for module, *_ in self._originals))

    def of(self, module: nn.Module) -> list[tuple[str, Any]]:
        """Return each replaced attribute of a module with its previous entry in `__dict__`, or None, in their order."""
        return [(name, previous) for of, name, previous in self._originals if of is module]

    def replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Replace an attribute of a module until `give_back`."""
        self._originals.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = value

    def tile(self, part: nn.Module, forward: Callable[..., Any]) -> None:
        """Replace the forward of a part of a layer by one that runs on tiles, also once the part is compiled."""
        self.replace(part, "forward", forward)
        self._tiled[part] = self._originals[-1]

    def give_back(self) -> None:
        """Give the model back every attribute that was replaced."""
        _restore(self._originals)
        self._originals.clear()
        self._tiled.clear()

    def surround(self, module: nn.Module, around: Callable[[Callable], Callable]) -> None:
        """Replace a module's forward by `around(forward)`, or wrap the result of `torch.compile`.

        Of the whole model the call is surrounded, hooks included, so that another forward may take the place of its own
        (TRL and Liger-Kernel do that). The wrapper itself is never traced: it fetches and releases buffers, which a
        compiled graph does not know.
        """
        whole = module is self._session.model()

        def install() -> None:
            compiled = module.__dict__.get("_compiled_call_impl")
            if compiled is not None or whole:
                name, original = "_compiled_call_impl", compiled or module._call_impl
            else:
                name, original = "forward", module.forward
            in_turn = self._session.turns.around(around(original), "a forward pass")
            self.replace(module, name, torch.compiler.disable(in_turn))
            if whole and compiled is not None:
                self.say_uncompiled(module)

        def compile_(*args: Any, **kwargs: Any) -> None:
            options = kwargs.get("options") or {}
            records_graphs = kwargs.get("mode") in _CUDA_GRAPH_MODES or options.get("triton.cudagraphs")
            if self._session.site.uploads and records_graphs:
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
            self.replace(module, "compile", compile_)

        install()
        self.replace(module, "compile", compile_)

    def say_uncompiled(self, model: nn.Module) -> None:
        """Say once that compiling the whole model, or its caller, compiles none of its layers."""
        if self.said_uncompiled:
            return
        self.said_uncompiled = True
        if not any(is_compiled(module) for module in model.modules() if module is not model):
            warn_of(
                "torch.compile of an offloaded model, or of its caller, does not compile its layers, whose weights "
                f"come and go between graphs. Compile each by itself: for layer in {self.layers}: layer.compile()"
            )


def _restore(replaced: list[tuple[nn.Module, str, Any]]) -> None:
    """Put back replaced attributes, the latest first."""
    for module, name, value in reversed(replaced):
        if value is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value
