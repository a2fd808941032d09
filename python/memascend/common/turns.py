"""One thread at a time uses an offloaded model: another one is refused before it has changed anything.

PyTorch lets several threads use one model, and a step of one then sees gradients of another's half backward pass. Here
they would also move the same buffers. Threads that use a model one after the other are no matter.
"""

from __future__ import annotations

import threading
import time
import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from memascend.common.graphs import after_backward
from memascend.errors import MemascendError

if TYPE_CHECKING:
    from collections.abc import Callable

#: How long a thread waits for the end of another's backward pass. PyTorch lets go of one that failed a moment later.
_PATIENCE_SECONDS = 0.1


class Turn:
    """The use of a model by one thread, for as long as a `with` block holds it.

    Nothing else refers to it strongly: an exception of a signal's handler ends the turn wherever it strikes.
    """

    __slots__ = ("__weakref__", "_turns", "thread", "use")

    def __init__(self, turns: Turns | None, use: str) -> None:
        """Stand for a use by this thread; without `turns`, for a part of one that has its turn."""
        self._turns, self.use = turns, use
        self.thread = threading.current_thread()

    def __enter__(self) -> None:
        """Do nothing: the turn was taken when it was made."""

    def __exit__(self, *_: object) -> None:
        """Let other threads use the model."""
        if self._turns is not None:
            self._turns.end(self)


class _Pass:
    """A backward pass of a thread. Autograd holds it until the end of the pass, and calls it there."""

    __slots__ = ("__weakref__", "ended", "thread", "use")

    def __init__(self) -> None:
        self.ended, self.thread, self.use = False, threading.current_thread(), "a backward pass"

    def __call__(self) -> None:
        self.ended = True


class Turns:
    """The uses of one model: by one thread at a time."""

    def __init__(self) -> None:
        """Begin without a use."""
        # A handler of a signal may use the model, and so come here again.
        self._lock = threading.RLock()
        self._holder: Callable[[], Turn | None] = lambda: None
        #: Backward passes under way, by the number of PyTorch's graph task.
        self._passes: dict[int, weakref.ref[_Pass]] = {}
        self._part = Turn(None, "")

    def take(self, use: str) -> Turn:
        """Begin a use of the model, which a `with` block ends; `use` names it in the errors of other threads.

        Raises MemascendError while another thread uses the model.
        """
        thread = threading.current_thread()
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self._passes:
            self._note_pass(task)
        for_another = task != -1 and isinstance(thread, threading._DummyThread)  # autograd's, for a thread that waits
        deadline = None
        while True:
            with self._lock:
                holder = self._holder()
                other: Turn | _Pass | None = holder if holder is not None and holder.thread is not thread else None
                waits = other is None
                if waits:
                    other = self._other_pass(thread, task)
                if other is None or for_another:
                    if holder is not None:
                        return self._part
                    turn = Turn(self, use)
                    self._holder = weakref.ref(turn)
                    return turn
            if deadline is None:
                deadline = time.monotonic() + _PATIENCE_SECONDS
            if not waits or time.monotonic() > deadline:
                raise MemascendError(
                    f"{use} in {thread.name}, while {other.thread.name} is in {other.use} of the same offloaded model: "
                    "one thread at a time uses a model, so have it wait for the other's step, by a lock for example"
                )
            del holder, other
            time.sleep(0.001)

    def around(self, function: Callable[..., Any], use: str) -> Callable[..., Any]:
        """Return `function` as a use of the model."""

        @wraps(function)
        def taking_turns(*args: Any, **kwargs: Any) -> Any:
            with self.take(use):
                return function(*args, **kwargs)

        return taking_turns

    def end(self, turn: Turn) -> None:
        """End a use."""
        if self._holder() is turn:
            self._holder = lambda: None

    def _note_pass(self, task: int) -> None:
        """Note the backward pass that runs in this thread, until it ends or fails."""
        note = _Pass()
        after_backward(note)
        with self._lock:
            for number, reference in list(self._passes.items()):
                earlier = reference()
                if earlier is None or earlier.ended:
                    del self._passes[number]
            self._passes[task] = weakref.ref(note)

    def _other_pass(self, thread: threading.Thread, task: int) -> _Pass | None:
        """Return a backward pass of another thread that is under way, or None."""
        for number, reference in self._passes.items():
            note = reference()
            if note is not None and not note.ended and note.thread is not thread and number != task:
                return note
        return None
