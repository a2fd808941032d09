"""Recomputes a unit's activations in the backward pass. Its inputs wait in place, in host memory or on the SSD.

Where host memory has room for the saved tensors of a call, they stay and are not computed again (`kept`).

The scheme follows Chen et al. 2016 (arXiv 1604.06174), except that the graph of the first forward pass is kept and only
its saved tensors are dropped, so that gradients flow to everything that the unit was called with. As in SSDTrain
(Wu et al. 2024, arXiv 2408.10013), inputs are copied to the SSD while the device goes on computing, each of them once,
and an input that is still in memory is used from there.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from memascend.autograd.buffers import BufferCopies, BufferState, version_of
from memascend.autograd.kept import KeptTensor
from memascend.autograd.kv_caches import CacheState, is_state
from memascend.autograd.rng import RandomState
from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.hardware.cuda import autocast, autocast_of
from memascend.layout.units import CPU

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from memascend._memascend import Restore, Runtime, Stash
    from memascend.autograd.kept import KeptActivations, KeptCall, Packing
    from memascend.common.timeline import Timeline
    from memascend.hardware.cuda import ComputeDevice

#: Smaller inputs stay in place: an SSD request costs more than it frees.
STASH_FROM_BYTES = 64 * 1024
#: Inputs that may be on their way from a device at once: one being copied, and one still in use. Of those on their way
#: back as many wait beside the one in use, so that the drive reads on while the caller launches a layer.
LEAVING_INPUTS = 2
#: Spans in which the computing thread waits for an input: until it has left its tensor, and until it is back.
LEAVES, COMES = "input leaves", "input comes back"


class StashedInput:
    """An input that the runtime has copied out of the tensor; `restore` brings its values back into a new tensor."""

    def __init__(self, inputs: InputStash, tensor: torch.Tensor) -> None:
        """Copy the values of `tensor` out."""
        self.shape, self.dtype, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad
        self.timeline = inputs.timeline
        with span(LEAVES), self.timeline.waiting("ssd_write"):
            self.stash: Stash = inputs.runtime.memory.stash(tensor.data_ptr(), tensor.nbytes, inputs.policy == "ssd")

    def restore(self) -> torch.Tensor:
        """Return the values, in a new tensor of the input's shape and dtype."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with span(COMES), self.timeline.waiting("ssd_read"):
            self.stash.restore(tensor.data_ptr())
        return tensor.requires_grad_(self.requires_grad)


class _Source:
    """Keeps a tensor alive until it has been copied from the device."""

    def __init__(self, inputs: InputStash, device: ComputeDevice, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.timeline = inputs.timeline
        self._version = tensor._version
        self._ready = device.record()
        spill = inputs.policy == "ssd"
        self.stash = inputs.runtime.memory.stash_from_device(tensor.data_ptr(), tensor.nbytes, self._ready, spill)

    def leave(self, wait: bool) -> bool:
        """Drop the tensor once it has been copied, waiting for the copy if `wait`; return whether it was dropped."""
        if not self.stash.copied():
            if not wait:
                return False
            self._ready.wait()
            with span(LEAVES), self.timeline.waiting("d2h"):
                self.stash.wait_copied()
        self.check()
        self.tensor = None
        return True

    def check(self) -> None:
        """Raise MemascendError if the tensor was written to since the copy was started."""
        if self.tensor is not None and self.tensor._version != self._version:
            raise MemascendError(
                f"an input of shape {tuple(self.tensor.shape)} was changed in place after the layer that takes it was "
                "called, while it was copied from the device: change a copy of it"
            )


class LeavingInput(StashedInput):
    """An input on a device: copied out while the device goes on computing, and back before it is needed."""

    def __init__(self, inputs: DeviceInputStash, device: ComputeDevice, tensor: torch.Tensor) -> None:
        """Start copying `tensor` out."""
        self.shape, self.dtype, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad
        self.device = device
        self.timeline = inputs.timeline
        self.source = _Source(inputs, device, tensor)
        self.stash = self.source.stash
        #: The tensor being filled, the copy that fills it, and the stream on which its memory was
        #: allocated.
        self._coming: tuple[torch.Tensor, Restore, int] | None = None
        #: The input copied out before this one, which the backward pass needs next (a weak
        #: reference).
        self._previous = inputs.latest

    def come(self) -> None:
        """Start copying the values back, unless the tensor still lives."""
        if self.source.tensor is None and self._coming is None:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device.torch_device)
            stream = self.device.stream()
            # Kernels under way may still use this memory for an earlier tensor: copy after them.
            restore = self.stash.restore_to_device(tensor.data_ptr(), self.device.record(stream))
            self._coming = tensor, restore, stream

    def restore(self) -> torch.Tensor:
        """Return the values, valid for every kernel launched from now on, and start copying earlier inputs back."""
        self.come()
        if self._coming is None:
            self.source.check()
            tensor = self.source.tensor
            assert tensor is not None
        else:
            tensor, restore, _ = self._coming
            with span(COMES), self.timeline.waiting("ssd_read"):
                arrived = restore.enqueued()
            self._coming = None
            self.device.wait(arrived)
        previous = self._previous()
        for _ in range(LEAVING_INPUTS):
            if previous is not None:
                previous.come()
                previous = previous._previous()
        return tensor.detach().requires_grad_(self.requires_grad)

    def __del__(self) -> None:
        coming, self._coming = getattr(self, "_coming", None), None
        if coming is not None:
            # Never used. Its memory must not be allocated again while the copy still writes to it.
            _, restore, stream = coming
            with suppress(MemascendError):
                self.device.wait(restore.enqueued(), stream)


class InputStash:
    """Copies the inputs of recomputed units out, each tensor once, however many units it is passed to."""

    #: The device that the inputs are copied from, if they are not in host memory.
    device: ComputeDevice | None = None
    #: The saved tensors that are kept, where some may be.
    kept: KeptActivations | None = None

    def __init__(self, runtime: Runtime, policy: str, timeline: Timeline) -> None:
        """Copy inputs into `runtime`, by a `policy` of `memascend.options.POLICIES`."""
        self.runtime = runtime
        self.policy = policy
        self.timeline = timeline
        #: Where the inputs lie that are copied out.
        self.torch_device = CPU
        #: For each part of a tensor, None being the whole: (version, stashed input), by identity of the tensor.
        self._stashed = WeakIdKeyDictionary()
        #: The tensor that another one is a slice of (a weak reference), and the number of the slice.
        self._parts = WeakIdKeyDictionary()
        self.buffers = BufferCopies()
        #: Whether the caches keep the entries of layers.
        self.keeps_caches = True

    @contextmanager
    def keeping_caches(self, keeps: bool) -> Iterator[None]:
        """Keep the entries that layers put into caches, or drop them."""
        before, self.keeps_caches = self.keeps_caches, keeps
        try:
            yield
        finally:
            self.keeps_caches = before

    def put(self, tensor: torch.Tensor) -> StashedInput | torch.Tensor:
        """Stash `tensor` and return a handle of its values, or the tensor itself where moving it would gain nothing."""
        movable = (
            self.policy != "recompute"
            and tensor.requires_grad
            and not tensor.is_leaf
            and tensor.device == self.torch_device
            and tensor.nbytes >= STASH_FROM_BYTES
            and tensor.is_contiguous()
        )
        if not movable:
            return tensor
        reference, part = self._parts.get(tensor, (None, None))
        whole = tensor if reference is None else reference()
        stashed_parts = {} if whole is None else self._stashed.setdefault(whole, {})
        version, stashed = stashed_parts.get(part) or (None, None)
        if stashed is not None and version == tensor._version:
            return stashed
        stashed = self.copy_out(tensor)
        stashed_parts[part] = (tensor._version, stashed)
        return stashed

    def note_parts(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Note that `parts` are slices of a tensor, which may be cut again for another unit."""
        for number, part in enumerate(parts):
            self._parts[part] = weakref.ref(whole), (number, len(parts))

    def copy_out(self, tensor: torch.Tensor) -> StashedInput:
        """Return a handle of the values of `tensor`, which leave it."""
        return StashedInput(self, tensor)

    def wait_copied(self) -> None:
        """Wait until no input is on its way to host memory: copies end before `copy_out` does."""

    def close(self) -> None:
        """Wait until no copy is under way."""


class DeviceInputStash(InputStash):
    """Copies the inputs of recomputed units out of a device's memory while the device goes on computing."""

    device: ComputeDevice

    def __init__(self, runtime: Runtime, policy: str, timeline: Timeline, device: ComputeDevice) -> None:
        """Copy inputs on `device` as `InputStash` does."""
        super().__init__(runtime, policy, timeline)
        self.device = device
        self.torch_device = device.torch_device
        self.latest: Callable[[], LeavingInput | None] = lambda: None
        #: Inputs on their way from the device, the oldest first.
        self._leaving: deque[_Source] = deque()

    def copy_out(self, tensor: torch.Tensor) -> StashedInput:
        """Return a handle of the values of `tensor`, which leave it while the device goes on."""
        stashed = LeavingInput(self, self.device, tensor)
        self.latest = weakref.ref(stashed)
        self._leaving.append(stashed.source)
        self._release(LEAVING_INPUTS)
        return stashed

    def wait_copied(self) -> None:
        """Wait until no input is on its way from the device. Inputs without other references are dropped."""
        self._release(0)

    def _release(self, most: int) -> None:
        """Drop inputs that have been copied from the device. Wait for all but the last `most`."""
        while self._leaving and self._leaving[0].leave(wait=len(self._leaving) > most):
            self._leaving.popleft()

    def close(self) -> None:
        """Wait until no copy reads the device."""
        while self._leaving:
            with suppress(MemascendError):
                self._leaving.popleft().leave(wait=True)


#: Recomputations that hold recomputed tensors; some tensors are views of weights.
_holding: weakref.WeakSet[Recomputation] = weakref.WeakSet()


def forget_recomputed() -> None:
    """Drop recomputed tensors that autograd has not asked for yet; asked for later, they are recomputed once more.

    An abandoned backward pass would hold unit buffers through them for as long as its loss lives.
    """
    for recomputation in list(_holding):
        recomputation.values = {}
    _holding.clear()


def recomputed_views(storage: torch.UntypedStorage) -> list[tuple[int, int]]:
    """Return the first byte, and that behind the last, of each recomputed tensor that is a view of `storage`."""
    address, found = storage.data_ptr(), []
    for recomputation in _holding:
        for value, _ in recomputation.values.values():
            if value.layout is torch.strided and value.untyped_storage().data_ptr() == address:
                begin = int(value.storage_offset()) * value.itemsize
                last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
                found.append((begin, begin + (int(last) + 1) * value.itemsize))
    return found


class Recomputation:
    """One call of a unit whose saved tensors are computed again when the backward pass asks for the first."""

    def __init__(
        self,
        module: nn.Module,
        function: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        stash: InputStash,
        packing: Packing | None = None,
    ) -> None:
        """Store everything that a second call of `function`, which runs `module`, needs.

        These are its inputs, the module's buffers, random states and autocast settings. With a `packing`, saved tensors
        may be kept as it packs them.
        """
        self.function = function
        self._name = f"a module of {type(module).__name__}"
        self.buffers = BufferState(module, stash.buffers)
        leaves, self.structure = pytree.tree_flatten((args, kwargs), is_leaf=is_state)
        #: Where the objects of `caches` were among the leaves, which do not keep the objects alive.
        self.cached = [index for index, leaf in enumerate(leaves) if is_state(leaf)]
        self.caches = CacheState([leaves[index] for index in self.cached], stash.buffers)
        self.keeps_caches = stash.keeps_caches
        self.leaves = [
            stash.put(leaf) if isinstance(leaf, torch.Tensor) else None if is_state(leaf) else leaf for leaf in leaves
        ]
        self._versions = self._count_writes()
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        self.random_state = RandomState(
            stash.device, [*self.buffers.generators, *generators], torch_only=self.buffers.checkpointed
        )
        self.autocast = autocast_of(stash.torch_device)
        self._stash = stash
        #: The saved tensors of this call, if they are kept or measured.
        self._kept: KeptCall | None = None
        # PyTorch's checkpointing, in whose place this one is, runs a layer twice: buffers and random numbers show it.
        if stash.kept is not None and packing is not None and not self.buffers.checkpointed:
            self._kept = stash.kept.call(packing, leaves, self.leaves)
        #: Shape and dtype of each tensor that the first forward saved.
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        #: Recomputed tensors, and the version of each when it was saved.
        self.values: dict[int, tuple[torch.Tensor, int | None]] = {}

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the function. Keep its autograd graph, and its saved tensors only if there is room for them."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, self._recall):
            result = self.function(*args, **kwargs)
        if self._kept is not None:
            self._kept.end()
        if self.cached and not self.keeps_caches:
            leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_state)
            self.caches.drop_new([leaves[index] for index in self.cached])
        return result

    def _save(self, tensor: torch.Tensor) -> int | KeptTensor:
        self.saved.append((tensor.shape, tensor.dtype))
        index = len(self.saved) - 1
        return index if self._kept is None else self._kept.add(index, tensor)

    def _recall(self, saved: int | KeptTensor) -> torch.Tensor:
        index = saved.index if isinstance(saved, KeptTensor) else saved
        if index not in self.values:
            if isinstance(saved, KeptTensor) and (kept := saved.value()) is not None:
                return kept
            with nullcontext() if self._stash.kept is None else self._stash.kept.recomputing():
                self._recompute()
        value, version = self.values.pop(index)
        refuse_overwritten(value, version)
        return value

    def _count_writes(self) -> list[int | None]:
        return [version_of(leaf) for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def _recompute(self) -> None:
        if self._kept is not None:
            self._kept.drop()
        if self._count_writes() != self._versions:
            raise MemascendError(
                f"an input of {self._name} was changed in place by the module, or after its call, so that it cannot be "
                "computed again: change a copy of it, or pass recompute=False"
            )
        leaves = [leaf.restore() if isinstance(leaf, StashedInput) else leaf for leaf in self.leaves]
        # Detach the inputs, so that this second graph does not reach back into the first.
        leaves = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        for index, state in zip(self.cached, self.caches.restored(), strict=True):
            leaves[index] = state
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        values: dict[int, tuple[torch.Tensor, int | None]] = {}

        def keep(tensor: torch.Tensor) -> int:
            # Detached, it shares the version counter.
            values[len(values)] = tensor.detach(), version_of(tensor)
            return len(values) - 1

        def refuse(_: int) -> torch.Tensor:
            raise MemascendError(
                f"{self._name} computes gradients in its forward, which cannot be computed again: pass recompute=False"
            )

        with (
            span("recompute"),
            self.buffers.restored(),
            torch.enable_grad(),
            self.random_state.restored(),
            autocast(*self.autocast),
            torch.autograd.graph.saved_tensors_hooks(keep, refuse),
        ):
            self.function(*args, **kwargs)
        if [(value.shape, value.dtype) for value, _ in values.values()] != self.saved:
            raise MemascendError(
                f"recomputing {self._name} saved {len(values)} tensors where its first forward saved "
                f"{len(self.saved)}, or tensors of other shapes: its forward is not deterministic; pass recompute=False"
            )
        if self._kept is not None:  # The backward pass may have had some of them already.
            wanted = self._kept.indices()
            values = {index: value for index, value in values.items() if index in wanted}
        self.values = values
        _holding.add(self)


def refuse_overwritten(tensor: torch.Tensor, version: int | None) -> None:
    """Raise PyTorch's RuntimeError if `tensor`, saved for the backward pass at `version`, was written to since.

    PyTorch checks the tensors that it keeps itself, and not those that pass through hooks.
    """
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            "instead. Hint: change a copy of it, outside of the operation that needs its value"
        )
