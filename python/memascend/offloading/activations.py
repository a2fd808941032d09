"""Recompute a unit's activations in the backward pass; its inputs wait where they are, in host memory or on the SSD.

The scheme is that of Chen et al. 2016 (arXiv 1604.06174), with the graph of the first forward kept and only
its saved tensors dropped, so that gradients flow through whatever the unit was called with. That inputs go to the SSD
while the device computes on, each once, and are taken from where they are as long as they are there, is SSDTrain's idea
(Wu et al. 2024, arXiv 2408.10013).
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.layout.units import CPU
from memascend.machine.cuda import autocast, autocast_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend._memascend import Restore, Runtime, Stash
    from memascend.common.timeline import Timeline
    from memascend.machine.cuda import ComputeDevice

#: Where the inputs of recomputed units wait: where they are; in host memory, and on the SSD when that is full; on the
#: SSD.
POLICIES = ("recompute", "host", "ssd")
#: Inputs below this stay where they are: an SSD request costs more than it frees.
STASH_FROM_BYTES = 64 * 1024
#: Inputs that may be on their way from a device at once: one being copied, one that is used just now.
LEAVING_INPUTS = 2


class StashedInput:
    """An input put aside by the runtime; `restore` brings its values back into a fresh tensor."""

    def __init__(self, inputs: InputStash, tensor: torch.Tensor) -> None:
        """Copy `tensor` out."""
        self.shape, self.dtype, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad
        self.timeline = inputs.timeline
        with self.timeline.waiting("ssd_write"):
            self.stash: Stash = inputs.runtime.stash(tensor.data_ptr(), tensor.nbytes, inputs.policy == "ssd")

    def restore(self) -> torch.Tensor:
        """Return the values; shape and dtype as they were."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with self.timeline.waiting("ssd_read"):
            self.stash.restore(tensor.data_ptr())
        return tensor.requires_grad_(self.requires_grad)


class _Source:
    """A tensor that is being copied from the device: it lives until that is done, whoever lost interest."""

    def __init__(self, inputs: InputStash, device: ComputeDevice, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.timeline = inputs.timeline
        self._version = tensor._version
        self._ready = device.record()
        spill = inputs.policy == "ssd"
        self.stash = inputs.runtime.stash_from_device(tensor.data_ptr(), tensor.nbytes, self._ready, spill)

    def leave(self, wait: bool) -> bool:
        """Let go of the tensor once it was read, or `wait` for that; returns whether it is gone."""
        if not self.stash.copied():
            if not wait:
                return False
            self._ready.wait()
            with self.timeline.waiting("d2h"):
                self.stash.wait_copied()
        self.check()
        self.tensor = None
        return True

    def check(self) -> None:
        """Raise MemascendError if the tensor was written to since it was put aside."""
        if self.tensor is not None and self.tensor._version != self._version:
            raise MemascendError(
                "an input of a unit was changed in place after the unit was called, while it was copied from the "
                "device: change a copy of it"
            )


class LeavingInput(StashedInput):
    """An input on a device, which is copied from there while the device computes on, and back before it is needed."""

    def __init__(self, inputs: InputStash, device: ComputeDevice, tensor: torch.Tensor) -> None:
        """Start copying `tensor` out."""
        self.shape, self.dtype, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad
        self.device = device
        self.timeline = inputs.timeline
        self.source = _Source(inputs, device, tensor)
        self.stash = self.source.stash
        #: The values on their way back, when they are there, and the stream whose memory they have.
        self._coming: tuple[torch.Tensor, Restore, int] | None = None
        #: What was put aside before: the backward pass asks for it next.
        self._before = inputs.latest

    def come(self) -> None:
        """Start bringing the values back, unless they are still here."""
        if self.source.tensor is None and self._coming is None:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device.torch_device)
            stream = self.device.stream()
            # The memory may have been something else's, which is being computed with still.
            restore = self.stash.restore_to_device(tensor.data_ptr(), self.device.record(stream))
            self._coming = tensor, restore, stream

    def restore(self) -> torch.Tensor:
        """Return the values, there for whatever is computed from now on, and start bringing the ones before."""
        self.come()
        if self._coming is None:
            self.source.check()
            tensor = self.source.tensor
            assert tensor is not None
        else:
            tensor, restore, _ = self._coming
            with self.timeline.waiting("ssd_read"):
                arrived = restore.enqueued()
            self._coming = None
            self.device.wait(arrived)
        before = self._before()
        if before is not None:
            before.come()
        return tensor.detach().requires_grad_(self.requires_grad)

    def __del__(self) -> None:
        coming, self._coming = getattr(self, "_coming", None), None
        if coming is not None:
            # Brought back in vain: its memory must not become something else's while it is still written to.
            _, restore, stream = coming
            with suppress(MemascendError):
                self.device.wait(restore.enqueued(), stream)


class InputStash:
    """Puts the inputs of recomputed units aside, each tensor once however many units it is passed to."""

    def __init__(self, runtime: Runtime, policy: str, timeline: Timeline, device: ComputeDevice | None = None) -> None:
        """Put them into the keeping of `runtime`, by one of `POLICIES`; `device` is where they are."""
        self.runtime = runtime
        self.policy = policy
        self.timeline = timeline
        self.device = device
        #: (version, stand-in) by identity of the tensor.
        self._known = WeakIdKeyDictionary()
        self.latest: Callable[[], LeavingInput | None] = lambda: None
        #: Inputs on their way from the device, the oldest first.
        self._leaving: deque[_Source] = deque()

    def put(self, tensor: torch.Tensor) -> StashedInput | torch.Tensor:
        """Return a stand-in for `tensor`, or the tensor itself where moving it would gain nothing."""
        movable = (
            self.policy != "recompute"
            and tensor.requires_grad
            and not tensor.is_leaf
            and tensor.device == (CPU if self.device is None else self.device.torch_device)
            and tensor.nbytes >= STASH_FROM_BYTES
            and tensor.is_contiguous()
        )
        if not movable:
            return tensor
        known = self._known.get(tensor)
        if known is not None and known[0] == tensor._version:
            return known[1]
        if self.device is None:
            stashed = StashedInput(self, tensor)
        else:
            stashed = LeavingInput(self, self.device, tensor)
            self.latest = weakref.ref(stashed)
            self._leaving.append(stashed.source)
            self._release()
        self._known[tensor] = (tensor._version, stashed)
        return stashed

    def _release(self) -> None:
        """Let go of what the device has been read from, and of all but the last few in any case."""
        while self._leaving and self._leaving[0].leave(wait=len(self._leaving) > LEAVING_INPUTS):
            self._leaving.popleft()

    def close(self) -> None:
        """Wait until the device is read from no more."""
        while self._leaving:
            with suppress(MemascendError):
                self._leaving.popleft().leave(wait=True)


#: Recomputations that hold recomputed tensors, views of weights among them.
_holding: weakref.WeakSet[Recomputation] = weakref.WeakSet()


def forget_recomputed() -> None:
    """Drop what was recomputed and not asked for yet; what is asked for later is recomputed once more.

    An abandoned backward pass holds buffers by it for as long as its loss lives.
    """
    for recomputation in list(_holding):
        recomputation.values = {}
    _holding.clear()


class Recomputation:
    """One call of a unit whose saved tensors are computed again when the backward pass asks for the first."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict[str, Any], stash: InputStash) -> None:
        """Remember how to call `function` again: inputs, random state and autocast."""
        self.function = function
        leaves, self.structure = pytree.tree_flatten((args, kwargs))
        self.leaves = [stash.put(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._versions = self._count_writes()
        self.device = stash.device
        self.random_state = _shared_random_state(), None if stash.device is None else stash.device.random_state()
        self.autocast = autocast_of(CPU if stash.device is None else stash.device.torch_device)
        self.saved = 0
        self.values: dict[int, torch.Tensor] = {}

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the function; keep its graph and none of the tensors that the graph would save."""
        with torch.autograd.graph.saved_tensors_hooks(self._drop, self._recall):
            return self.function(*args, **kwargs)

    def _drop(self, _: torch.Tensor) -> int:
        self.saved += 1
        return self.saved - 1

    def _recall(self, index: int) -> torch.Tensor:
        if index not in self.values:
            self._recompute()
        return self.values.pop(index)

    def _count_writes(self) -> list[int]:
        return [leaf._version for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def _recompute(self) -> None:
        if self._count_writes() != self._versions:
            raise MemascendError(
                "an input of a unit was changed in place after the unit was called, so that it cannot be computed "
                "again: change a copy of it, or pass recompute=False"
            )
        leaves = [leaf.restore() if isinstance(leaf, StashedInput) else leaf for leaf in self.leaves]
        # Detached inputs keep this second graph from reaching back into the first.
        leaves = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        values: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> int:
            values[len(values)] = tensor.detach()
            return len(values) - 1

        def refuse(_: int) -> torch.Tensor:
            raise MemascendError("a recomputed graph was asked for gradients of its own")

        with (
            span("recompute"),
            torch.enable_grad(),
            _random_state(self.random_state, self.device),
            autocast(*self.autocast),
            torch.autograd.graph.saved_tensors_hooks(keep, refuse),
        ):
            self.function(*args, **kwargs)
        if len(values) != self.saved:
            raise MemascendError(
                f"recomputing a unit saved {len(values)} tensors where the first forward saved {self.saved}: its "
                "forward is not deterministic; pass recompute=False"
            )
        self.values = values
        _holding.add(self)


_latest_random_state = torch.empty(0, dtype=torch.uint8)


def _shared_random_state() -> torch.Tensor:
    """Return the generator's state (5 KB), the same tensor as long as nothing draws from it."""
    global _latest_random_state
    state = torch.get_rng_state()
    if not torch.equal(state, _latest_random_state):
        _latest_random_state = state
    return _latest_random_state


@contextmanager
def _random_state(states: tuple[torch.Tensor, torch.Tensor | None], device: ComputeDevice | None) -> Iterator[None]:
    current = torch.get_rng_state(), None if device is None else device.random_state()

    def set_(states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if device is not None:
            device.set_random_state(states[1])

    set_(states)
    try:
        yield
    finally:
        set_(current)
