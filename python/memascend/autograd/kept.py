"""Saved tensors of recomputed layers that stay in memory, where the plan leaves room: they are not computed again.

Kept tensors are a cache of the results of a recomputation. They may be dropped at any time before the backward pass,
and then the layer is computed again; so results do not depend on the room. The room bounds the bytes at every instant.
All saved tensors of the call that is being made are held beside it: as much as a recomputation holds.

The last calls of a pass are kept. Their tensors live for the shortest time, since the backward pass begins with them.
How many fit follows from the pass before, call by call; the first pass keeps none, and measures.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memascend.common.graphs import in_backward
from memascend.layout.units import raw_tensor_access

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

#: Objects of Python and PyTorch for a saved tensor that is kept.
OBJECT_BYTES = 1024


class Packing(Protocol):
    """How autograd saves tensors in a pass: names of weights instead of views of them, and other tensors unchanged."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return an object that stands for a tensor in a graph."""

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that `saved` stands for."""

    def tensor_of(self, saved: Any) -> torch.Tensor | None:
        """Return the tensor that `saved` keeps alive; None for a name."""

    def overwritten(self, saved: Any) -> bool:
        """Return whether the tensor that `saved` keeps alive was written to since."""


class KeptTensor:
    """Stands in a graph for a saved tensor of a call."""

    __slots__ = ("__weakref__", "_call", "index", "saved")

    def __init__(self, call: KeptCall, index: int, saved: Any) -> None:
        #: The call's bytes are counted as long as any of its tensors is referred to.
        self._call = call
        #: Its number among the tensors that the call has saved.
        self.index = index
        #: None once it was dropped.
        self.saved = saved

    def value(self) -> torch.Tensor | None:
        """Return the tensor; None if it has to be computed again."""
        return None if self.saved is None else self._call.unpacked(self.saved)


class _Memory:
    """A storage that calls keep alive, however many of them."""

    __slots__ = ("nbytes", "users")

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.users = nbytes, 0


class KeptCall:
    """One call of a layer, whose saved tensors are kept or, at the end of its forward pass, dropped."""

    def __init__(self, owner: KeptActivations, packing: Packing, elements: int, keeps: bool) -> None:
        """Begin a call with tensors of so many `elements`; see `KeptActivations.call`."""
        self._owner, self._packing = owner, packing
        self.elements, self.keeps = elements, keeps
        #: Whether it took more than was measured, and more than there was room for.
        self.gave_up = False
        #: What counts against the room: storages, and bytes of objects and of tensors that have no storage.
        self.memory: list[_Memory] = []
        self.own_bytes = 0
        self._tensors: list[weakref.ref[KeptTensor]] = []
        #: For each storage, by its address, its bytes and the parts of it that were saved with their bytes.
        self._parts: dict[int, tuple[int, dict[Hashable, int]]] = {}
        self._left_out: set[int] = set()

    @property
    def size(self) -> int:
        """Bytes that the call has saved. Of a storage that a slice of the batch is a part of, the part counts.

        Of a call that gave up storages count as a whole: no other call has saved the rest of them.
        """
        storages = self._parts.values()
        parts = (nbytes if self.gave_up else min(nbytes, sum(saved.values())) for nbytes, saved in storages)
        return len(self._tensors) * OBJECT_BYTES + sum(parts)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the memory of `tensors` uncounted: a recomputation would hold them too."""
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage is not None:
                self._left_out.add(storage._cdata)

    def add(self, index: int, tensor: torch.Tensor) -> KeptTensor:
        """Keep a saved tensor, the `index`-th of the call."""
        saved = self._packing.pack(tensor)
        kept = KeptTensor(self, index, saved)
        self._tensors.append(weakref.ref(kept))
        held = self._packing.tensor_of(saved)
        storage = None if held is None else _storage_of(held)
        added, memory = OBJECT_BYTES, None
        if storage is not None and held is not None:
            if storage._cdata not in self._left_out:
                whole, parts = self._parts.setdefault(storage._cdata, (storage.nbytes(), {}))
                parts[held.storage_offset(), held.shape] = min(whole, held.numel() * held.itemsize)
                memory = self._owner.memory_of(storage)
        elif held is not None:
            nbytes = held.numel() * held.element_size()
            self._parts[id(kept)] = nbytes, {None: nbytes}
            added += nbytes
        self._owner.take(self, added, memory)
        return kept

    def unpacked(self, saved: Any) -> torch.Tensor | None:
        """Return the tensor that `saved` stands for; None where it was written to since."""
        return None if self._packing.overwritten(saved) else self._packing.unpack(saved)

    def end(self) -> None:
        """Note that the forward pass of the call has ended."""
        self._owner.ended(self)

    def drop(self) -> None:
        """Let go of the tensors; the call is computed again if autograd asks for any."""
        for reference in self._tensors:
            kept = reference()
            if kept is not None:
                kept.saved = None
        self._owner.give(self)

    def indices(self) -> set[int]:
        """Return the numbers of the tensors that autograd may still ask for."""
        return {kept.index for reference in self._tensors if (kept := reference()) is not None}

    def __del__(self) -> None:
        """Give the room back: no graph refers to a tensor of the call."""
        if getattr(self, "keeps", False):
            self._owner.freed.append((self.own_bytes, self.memory))


class KeptActivations:
    """Decides which calls of layers keep their saved tensors, and counts the bytes."""

    def __init__(self, room: Callable[[int], int], clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """Keep as much as `room(held_bytes)` says at the beginning of a pass, with `held_bytes` kept already.

        `clock` gives the nanoseconds by which recomputations are timed.
        """
        self._room_of = room
        self._clock = clock
        #: Whether calls are measured for which there is no room.
        self.measures = False
        self._room = 0
        self._held = 0
        #: What calls have held that were freed, by whatever thread.
        self.freed: deque[tuple[int, list[_Memory]]] = deque()
        #: Of each storage that is kept alive.
        self._memory = WeakIdKeyDictionary()
        #: Calls that are kept, the oldest first.
        self._kept: deque[weakref.ref[KeptCall]] = deque()
        #: (elements of the tensors that it was called with, bytes that it saved), of each call of the last pass and of
        #: the present one.
        self._last: list[tuple[int, int]] = []
        self._present: list[tuple[int, int]] = []
        #: Calls that were kept and that were computed again, and the most bytes that were held.
        self.calls_kept = self.calls_recomputed = self.most_bytes = 0
        #: Nanoseconds of recomputations.
        self.recomputed_ns = 0
        #: Elements of the tensors that calls were given, of those that are measured or kept.
        self.elements = 0
        #: The most bytes that a pass before the present one has saved.
        self._most_pass_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that are kept."""
        while self.freed:
            self._release(*self.freed.popleft())
        return self._held

    def memory_of(self, storage: torch.UntypedStorage) -> _Memory:
        """Return the entry of a storage, which all calls share."""
        memory = self._memory.get(storage)
        if memory is None:
            self._memory[storage] = memory = _Memory(storage.nbytes())
        return memory

    def begin(self) -> None:
        """Begin a pass of the whole model with gradients."""
        self._most_pass_bytes = self.wanted_bytes
        self._last, self._present = self._present or self._last, []
        self.limit(self._room_of(self.held_bytes))

    def limit(self, room: int) -> None:
        """Have another room from now on, and drop the oldest calls beyond it."""
        self._room = room
        self._kept = deque(reference for reference in self._kept if reference() is not None)
        while self._kept and self.held_bytes > room:
            call = self._kept.popleft()()
            if call is not None:
                call.drop()

    def call(self, packing: Packing, given: Iterable[Any], in_place: Iterable[Any]) -> KeptCall | None:
        """Return a call that is `given` some tensors; tensors `in_place` wait there for its recomputation.

        None for a call that is to keep and to measure nothing.
        """
        if (self._room <= 0 and not self.measures) or in_backward():
            return None
        with raw_tensor_access():
            elements = sum(value.numel() for value in given if isinstance(value, torch.Tensor))
        self.elements += elements
        call = self._begun(packing, elements)
        if call is not None:
            call.leave_out(value for value in in_place if isinstance(value, torch.Tensor))
        return call

    def _begun(self, packing: Packing, elements: int) -> KeptCall | None:
        number = len(self._present)
        rest = self._last[number:]
        if not rest:
            return KeptCall(self, packing, elements, False)
        before = rest[0][0]
        wanted = sum(nbytes for _, nbytes in rest) * elements / max(before, 1)
        keeps = wanted <= self._room - self.held_bytes
        if not keeps and elements <= before:
            self._present.append(rest[0])
            return None
        return KeptCall(self, packing, elements, keeps)

    def take(self, call: KeptCall, nbytes: int, memory: _Memory | None) -> None:
        """Count bytes of a call that keeps, and a storage; a call for which there is no room keeps nothing."""
        if not call.keeps:
            return
        call.own_bytes += nbytes
        self._held += nbytes
        if memory is not None and memory not in call.memory:
            call.memory.append(memory)
            memory.users += 1
            self._held += memory.nbytes if memory.users == 1 else 0
        if self.held_bytes > self._room:
            call.gave_up = True
            self.give(call)
        self.most_bytes = max(self.most_bytes, self._held)

    def give(self, call: KeptCall) -> None:
        """Count the bytes of a call no longer, which keeps nothing."""
        if call.keeps:
            call.keeps = False
            self._release(call.own_bytes, call.memory)

    def _release(self, own_bytes: int, memory: list[_Memory]) -> None:
        self._held -= own_bytes
        for each in memory:
            each.users -= 1
            self._held -= 0 if each.users else each.nbytes

    def ended(self, call: KeptCall) -> None:
        """Note the bytes of a call, and have it drop its tensors unless it keeps them."""
        self._present.append((call.elements, call.size))
        if call.keeps:
            self.calls_kept += 1
            self._kept.append(weakref.ref(call))
        else:
            call.drop()

    @property
    def wanted_bytes(self) -> int:
        """The most bytes that the calls of a pass have saved."""
        return max(self._most_pass_bytes, sum(nbytes for _, nbytes in self._present))

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Count what is enclosed as a recomputation of a call."""
        self.calls_recomputed += 1
        began = self._clock()
        yield
        self.recomputed_ns += self._clock() - began

    def stats(self) -> dict[str, int]:
        """Return the counters; see `memascend.stats`."""
        return {
            "layers_kept": self.calls_kept,
            "layers_recomputed": self.calls_recomputed,
            "activation_bytes_kept": self.held_bytes,
            "activation_bytes_kept_peak": self.most_bytes,
        }


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None of a class or a layout that has none."""
    with raw_tensor_access():
        plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        return tensor.untyped_storage() if plain and tensor.layout is torch.strided else None
