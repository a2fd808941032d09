"""PyTorch's graphs: functions that torch.compile leaves as they are, and whether a backward pass is running."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def outside_of_graphs(function: Callable) -> Callable:
    """Return the function as one that Dynamo does not trace, with all that it calls: graphs end where it is called.

    `torch.compiler.disable` does that, but loads Dynamo, which takes seconds, in programs that compile nothing. What
    is compiled by itself within the function still is.
    """
    untraced: Callable | None = None

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        nonlocal untraced
        if untraced is None:
            if not hasattr(sys.modules.get("torch._dynamo"), "disable"):
                return function(*args, **kwargs)
            untraced = torch.compiler.disable(function)
        return untraced(*args, **kwargs)

    # Dynamo looks for this before it traces a call.
    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outside


def in_backward() -> bool:
    """Whether this thread is in a backward pass, which computes layers again."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Have `function` called at the end of the backward pass that is running, before `backward` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
