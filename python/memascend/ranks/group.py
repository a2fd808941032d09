"""The ranks of a group: collectives in one order, compared before each.

Everything here moves bytes. Nothing is reduced inside a collective, so that no result depends on how a backend sums.

Before each collective all ranks exchange its number and a hash of its description: 16 bytes beside megabytes.
A hash of the order once a step would be cheaper, but would find a difference only after bytes of one unit have gone
into another.

A lost rank is named. A waiting rank looks every half second in the group's key-value store whether another has given
up. When a collective fails, a rank writes that it has given up, and waits for the others to write the same: the one
that does not is the cause. Where the key-value store itself does not answer, the collective goes on: the rank that
holds the store may have ended after the collective that others still wait for, and if it is lost, its connections
close.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from memascend.errors import MemascendError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: How often a rank that waits looks whether another one has given up.
PATIENCE = timedelta(seconds=0.5)
#: How long a rank that has given up waits for others to say so: those that do not are the cause.
GRACE_SECONDS = 3.0

#: Prefix of a backend's message.
_SOURCE = re.compile(r"^\[[^\]]*\] ")
#: How many `Ranks` each group has had: the same on every rank.
_made: Counter[str] = Counter()


def group_of(process_group: Any) -> dist.ProcessGroup | None:
    """Return the group that is meant: a DeviceMesh's, a given one, or the initialised one.

    None where there is none, or where it has one rank. Raises MemascendError for a mesh of several dimensions.
    """
    if not dist.is_available():
        return None
    group = process_group
    if group is None:
        group = dist.group.WORLD if dist.is_initialized() else None
    elif hasattr(group, "get_group"):
        if group.ndim != 1:
            raise MemascendError(
                f"process_group is a DeviceMesh of {group.ndim} dimensions: give the one over which data is parallel, "
                "as mesh['dp']"
            )
        group = group.get_group()
    if group is None or dist.get_world_size(group) == 1:
        return None
    if dist.get_rank(group) < 0:
        raise MemascendError("this process is not in the process_group: call this in the processes of the group only")
    return group


def refuse_group(what: str, instead: str) -> None:
    """Raise MemascendError where a group of several ranks is initialised that `what` does not support yet."""
    group = group_of(None)
    if group is not None:
        raise MemascendError(
            f"torch.distributed has a group of {dist.get_world_size(group)} ranks, and {what} is for one: {instead}"
        )


class Ranks:
    """One rank's side of the collectives of a group.

    Each collective is preceded by a comparison of its description. So a rank with another control flow raises on every
    rank, before any byte has gone to the wrong place.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take part in `group`, which has a backend for CPU tensors.

        Raises MemascendError where it has none.
        """
        backends = str(dist.get_backend_config(group))
        if "cpu" not in backends:
            raise MemascendError(
                f"the process group has the backend {dist.get_backend(group)}, which moves no tensors of the CPU: use "
                "torch.distributed.init_process_group('cpu:gloo,cuda:nccl'), or give process_group=torch.distributed."
                "new_group(backend='gloo')"
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        #: Bytes that this rank has sent to each of the others together, as the collectives are defined.
        self.sent_bytes = 0
        #: Buffers that an abandoned collective may still write to.
        self._stranded: list[torch.Tensor] = []
        self._number = 0
        self._lost: str | None = None
        self._label = f"memascend/{group.group_name}/{_made[group.group_name]}"
        _made[group.group_name] += 1

    @staticmethod
    def of(process_group: Any) -> Ranks | None:
        """Return this rank's side of the group that is meant, as `group_of` says; None for a program by itself."""
        group = group_of(process_group)
        return None if group is None else Ranks(group)

    # ---- collectives ------------------------------------------------------------------------------------

    def barrier(self, action: str) -> None:
        """Wait for all ranks, which have to be about to do the same.

        Raises RankError on every rank, with the next collective of each, where they differ; and where a rank does not
        answer within the group's timeout, with its number.
        """
        if self._lost is not None:
            raise RankError(f"{self._lost}. Start all ranks again (now rank {self.rank} was to {action})")
        self._number += 1
        digest = int.from_bytes(hashlib.blake2b(action.encode(), digest_size=7).digest(), "little")
        mine = torch.tensor([self._number, digest])
        if (self._all_gather(mine, action) != mine).any():  # (ranks, 2)
            told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self._texts(action)))
            self._lost = f"the ranks were to do different things, at number {self._number} of what they do: {told}"
            raise RankError(
                f"{self._lost}. Every rank has to run the same passes, steps and reads of weights, in the same order"
            )

    def all_gather(self, action: str, values: torch.Tensor) -> torch.Tensor:
        """Return the values of every rank, (ranks, n); this rank's are `values`, (n,) of any dtype."""
        self.barrier(action)
        return self._all_gather(values, action)

    def all_gather_object(self, action: str, text: str) -> list[str]:
        """Return a text of every rank."""
        self.barrier(action)
        return self._texts(text)

    def gather(self, action: str, wholes: Sequence[torch.Tensor]) -> None:
        """Complete tensors (uint8, (ranks x n,)) in place; each rank has its own n bytes."""
        self.barrier(action)
        for whole in wholes:
            count = len(whole) // self.size
            target = _unheld(whole)
            share = target[self.rank * count : (self.rank + 1) * count]
            try:
                self._wait(partial(self._start_gather, target, share), action)
            except BaseException:
                self._stranded.append(whole)
                raise
            self.sent_bytes += count * (self.size - 1)

    def all_to_all(self, action: str, sent: torch.Tensor, counts: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        """Return the bytes that all ranks have for this one, in their order.

        Args:
            action: a description of the bytes. The ranks have met, and know the counts of each other.
            sent: bytes (uint8) for every rank, in their order.
            counts: how many of them are for each rank.
            wanted: how many bytes come from each rank.
        """
        received = torch.empty(sum(wanted), dtype=torch.uint8)
        self._wait(
            lambda: dist.all_to_all_single(received, sent, list(wanted), list(counts), group=self.group, async_op=True),
            action,
        )
        self.sent_bytes += len(sent) - counts[self.rank]
        return received

    def abort(self, reason: str) -> None:
        """Tell the other ranks that this one has given up, so that they need not wait for the group's timeout."""
        if self._lost is None:
            self._lost = f"rank {self.rank} has given up: {reason}"
            with suppress(RuntimeError, ValueError):  # They are gone already.
                self._tell_lost(reason)

    def lost(self, action: str, error: RuntimeError) -> RankError:
        """Return the error for a collective of the program's own that has failed, with the rank that does not answer.

        `error` is the backend's, of the collective `action`.
        """
        return self._give_up(action, error)

    # ---- one collective ---------------------------------------------------------------------------------

    def _start_gather(self, whole: torch.Tensor, share: torch.Tensor) -> Any:
        return dist.all_gather_into_tensor(whole, share, group=self.group, async_op=True)

    def _all_gather(self, values: torch.Tensor, action: str) -> torch.Tensor:
        every = values.new_empty(self.size * len(values))
        if len(values):
            self._wait(partial(self._start_gather, every, values), action)
        return every.view(self.size, -1)

    def _texts(self, text: str) -> list[str]:
        encoded = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        lengths = self._all_gather(torch.tensor([len(encoded)]), text).view(-1).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(encoded)] = encoded
        every = self._all_gather(padded, text)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(every, lengths, strict=True)]

    def _wait(self, start: Callable[[], Any], action: str) -> None:
        """Start a collective and wait for its end, for the group's timeout, or until another rank has given up."""
        try:
            work = start()
            while not _ended(work):
                if self._is_lost():
                    raise RuntimeError("another rank has given up")
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed.
            raise self._give_up(action, error) from error

    def _give_up(self, action: str, error: Exception) -> RankError:
        """Tell the other ranks, find those that do not tell, and return the error that names them."""
        # Without the place in a backend's sources, and its advice.
        reason = _SOURCE.sub("", str(error).partition("\n")[0]).partition(". ")[0]
        try:
            told = self._hear_lost()
        except (RuntimeError, ValueError):
            who = "a rank does not answer, nor does the group's own store, which rank 0 or the launcher holds"
        else:
            silent = [f"rank {rank} does not answer" for rank in range(self.size) if rank not in told]
            left = [f"rank {rank} has given up ({text})" for rank, text in told.items() if text]
            who = "; ".join(left or silent) or "the connection to another rank has failed"
        self._lost = f"{who}: rank {self.rank} of {self.size} was to {action}"
        return RankError(
            f"{self._lost} ({reason}). Start all ranks again: memascend.resume goes on from the last step that all of "
            "them have prepared"
        )

    def _tell_lost(self, reason: str) -> None:
        store = _store_of(self.group)
        store.set(f"{self._label}/lost/{self.rank}", reason)
        store.add(f"{self._label}/told", 1)
        store.set(f"{self._label}/lost", "")

    def _hear_lost(self) -> dict[int, str]:
        """Return the reasons of the ranks that have given up within a while; "" for those that others made do so."""
        self._tell_lost("")
        store = _store_of(self.group)
        deadline = time.monotonic() + GRACE_SECONDS
        # One number, because many ranks ask at once.
        while store.add(f"{self._label}/told", 0) < self.size and time.monotonic() < deadline:
            time.sleep(0.05)
        keys = {rank: f"{self._label}/lost/{rank}" for rank in range(self.size)}
        return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}

    def _is_lost(self) -> bool:
        """Return whether another rank has given up."""
        try:
            return bool(_store_of(self.group).check([f"{self._label}/lost"]))
        except RuntimeError:
            # The rank that holds the store may have ended after the collective that this one still waits for. If it is
            # lost, its connections say so.
            return False


def _unheld(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same bytes (uint8) that does not hold them.

    A backend's thread refers to its tensors for a moment after a collective has ended. A buffer is free only when no
    tensor refers to it, and whether it is must not depend on that thread.
    """
    return torch.frombuffer((ctypes.c_uint8 * len(tensor)).from_address(tensor.data_ptr()), dtype=torch.uint8)


def _ended(work: Any) -> bool:
    """Wait a while for a collective; whether it has ended. Raises its error."""
    try:
        work.wait(PATIENCE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _store_of(group: dist.ProcessGroup) -> Any:
    """Return the key-value store by which the processes of a group have found each other."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)  # PyTorch 2.8
