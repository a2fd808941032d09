"""How far a step is: layers count their calls, as many in every step as in the one before."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

#: Between two calls of `show`.
SECONDS = 1.0


class WithinStep:
    """Counts the calls of a recomputed model's layers: each computes in the forward and again in the backward pass."""

    def __init__(self, model: nn.Module, show: Callable[[str], None]) -> None:
        """Call `show` at most once in `SECONDS` with how far the present step is."""
        self._show = show
        self._calls, self._of_step = 0, 0
        self._shown = time.monotonic()
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        layers = max(lists, key=len, default=nn.ModuleList())
        # A layer is called once, and its parts again when it is computed again.
        inner = (next(layer.children(), None) for layer in layers)
        self._handles = [module.register_forward_pre_hook(self._called) for module in inner if module is not None]

    def _called(self, _module: nn.Module, _arguments: Any) -> None:
        self._calls += 1
        now = time.monotonic()
        if now - self._shown >= SECONDS:
            self._shown = now
            share = f"{min(99, 100 * self._calls // self._of_step)}%" if self._of_step else f"{self._calls} layers done"
            self._show(share)

    def stepped(self) -> None:
        """Begin the next step."""
        self._of_step, self._calls = self._calls, 0

    def forget(self) -> None:
        """Count from 0 again: the calls since the last step were an evaluation's."""
        self._calls = 0

    def close(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()
