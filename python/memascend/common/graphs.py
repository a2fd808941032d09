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


def called_from_compiled() -> bool:
    """Return whether a function or a module that `torch.compile` made is among the callers."""
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    made: Any = getattr(eval_frame, "OptimizedModule", None)
    frame = None if made is None else sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__:
            return True
        # Where PyTorch's own function has another name.
        if code.co_name == "_wrapped_call_impl" and isinstance(frame.f_locals.get("self"), made):
            return True
        frame = frame.f_back
    return False


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether `torch.compile` made the module, or `module.compile()` was called."""
    made = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return isinstance(module, made) or module.__dict__.get("_compiled_call_impl") is not None


def in_backward() -> bool:
    """Return whether this thread is in a backward pass, which computes layers again."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Have `function` called at the end of the backward pass that is running, before `backward` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
