"""Ranks in one process: threads that run one at a time by a clock of their own, and messages that come late or never.

The code of real ranks runs, with a `Transport` in the place of torch.distributed. A seed decides who runs when,
how long each message takes, and so which overtakes which. A rank is lost by `Lost`, raised at one of its instants;
its later acts have no effect, and its unsent messages are never sent.
"""

from __future__ import annotations

import random
import threading
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Seconds of the simulation after which a collective fails by itself, and after which ranks that still run are hanging.
TIMEOUT, LIMIT = 30.0, 200.0
#: Seconds in which most messages arrive, and in which few do.
SOON, LATE = 0.001, 0.4


class Lost(BaseException):
    """The rank's process is gone."""


class Fault(AssertionError):
    """The ranks have done something that must not happen."""


class Simulation:
    """One run of a program on many ranks."""

    def __init__(
        self,
        seed: int | str,
        size: int,
        *,
        dies_at: dict[int, int] | None = None,
        silent: bool = False,
        keeper_lost: bool = True,
    ) -> None:
        """Prepare to run `size` ranks.

        Args:
            seed: decides everything that is left open.
            size: the number of ranks.
            dies_at: the instant, counted from 1, at which a rank is lost.
            silent: whether the others are not told of the end of a lost rank's connections.
            keeper_lost: whether the group's own store is lost with rank 0.
        """
        self.size, self.silent, self.keeper_lost = size, silent, keeper_lost
        self.chance = random.Random(seed)
        self.delays = np.random.default_rng(self.chance.getrandbits(63))
        self.now = 0.0
        self.instants = [0] * size
        #: When each rank that is gone went.
        self.gone: dict[int, float] = {}
        self.lost: set[int] = set()
        self.fault: str | None = None
        self.collectives: dict[int, Collective] = {}
        self.keys: dict[str, str] = {}
        self._dies_at = dies_at or {}
        self._events: list[tuple[float, float, int, int]] = []
        #: The number of each rank's latest event, which makes those before it void.
        self._newest = [0] * size
        self._turns = [threading.Lock() for _ in range(size)]
        self._ended = threading.Lock()
        self._local = threading.local()

    # ---- threads and time -------------------------------------------------------------------------------

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Run `program(rank)` on every rank; return each result, or the exception that ended it.

        Raises Fault where bytes went to the wrong place, or a rank was still running at the end.
        """
        results: list[Any] = [None] * self.size

        def main(rank: int) -> None:
            self._local.rank = rank
            self._turns[rank].acquire()
            try:
                self.instant()
                results[rank] = program(rank)
            except BaseException as error:
                results[rank] = error
            self._go(rank, isinstance(results[rank], Lost))

        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(self.size)]
        self._ended.acquire()
        for rank, thread in enumerate(threads):
            self._turns[rank].acquire()
            self._wake(rank, self.chance.random() * SOON)
            thread.start()
        self._next(None)
        self._ended.acquire()
        for thread in threads:
            thread.join()
        if self.fault is not None:
            raise Fault(self.fault)
        return results

    @property
    def rank(self) -> int:
        """The rank that runs."""
        return self._local.rank

    def instant(self) -> None:
        """Let the rank be lost here, or others run."""
        rank = self.rank
        self.check()
        self.instants[rank] += 1
        if self.instants[rank] == self._dies_at.get(rank):
            self.lost.add(rank)
            raise Lost
        if self.chance.random() < 0.1:
            self.sleep(self.chance.random() * SOON)

    def check(self) -> None:
        """Have nothing more be done by a rank that is lost, or hangs."""
        if self.rank in self.lost or self.fault is not None:
            raise Lost

    def sleep(self, seconds: float) -> None:
        """Let others run until that much time has passed."""
        self._wake(self.rank, self.now + seconds)
        self._next(self.rank)
        self.check()

    def _wake(self, rank: int, when: float) -> None:
        self._newest[rank] += 1
        heappush(self._events, (when, self.chance.random(), rank, self._newest[rank]))

    def _next(self, rank: int | None) -> None:
        """Have the rank run whose time comes next, and wait for this one's."""
        while True:
            when, _, chosen, number = heappop(self._events)
            if number == self._newest[chosen]:
                break
        self.now = max(self.now, when)
        if self.now > LIMIT and self.fault is None:
            still = [other for other in range(self.size) if other not in self.gone]
            self.fault = f"ranks {still[:8]} hang"
        if chosen != rank:
            self._turns[chosen].release()
            if rank is not None:
                self._turns[rank].acquire()

    def _go(self, rank: int, lost: bool) -> None:
        """End a rank: its connections close, and, if it is lost, its unsent messages are never sent."""
        self.gone[rank] = self.now
        self._newest[rank] += 1
        for collective in self.collectives.values():
            collective.left_by(rank, lost)
        if len(self.gone) == self.size:
            self._ended.release()
        else:
            self._next(None)


class Collective:
    """One collective: each rank sends to each, and has its result when all messages have arrived."""

    def __init__(self, simulation: Simulation, what: tuple[Any, ...]) -> None:
        """Begin without any rank."""
        self.simulation, self.what = simulation, what
        size = simulation.size
        self.sent: list[Any] = [None] * size
        #: By sender and receiver; infinity for messages that are not sent yet, or never.
        self.leaves = np.full((size, size), np.inf)
        self.arrives = np.full((size, size), np.inf)
        self.began: dict[int, float] = {}
        #: When each rank has everything, and when the first connection closed of those that it waits for.
        self.ready = np.full(size, np.inf)
        self.closed = np.full(size, np.inf)
        for gone in simulation.gone:
            self._close(gone)
        self._waiting: dict[int, float] = {}
        self._results: Any = None

    def begin(self, rank: int, sent: Any) -> None:
        """Send a rank's messages to the others."""
        simulation, size = self.simulation, self.simulation.size
        self.sent[rank] = sent
        self.began[rank] = simulation.now
        seconds = simulation.delays.exponential(SOON / 4, (2, size))
        seconds[1] *= np.where(simulation.delays.random(size) < 0.2 / size, LATE / SOON, 1.0)
        seconds[1, rank] = 0.0
        self.leaves[rank] = simulation.now + seconds[0]
        self.arrives[rank] = self.leaves[rank] + seconds[1]
        if len(self.began) == size:
            self._settle()

    def left_by(self, rank: int, lost: bool) -> None:
        """Note that a rank is gone, which others may wait for."""
        if lost and rank in self.began:
            self.arrives[rank, self.leaves[rank] > self.simulation.now] = np.inf
            self._settle()
        self._close(rank)
        for other in self._waiting:
            self.simulation._wake(other, self.simulation.now)

    def _close(self, rank: int) -> None:
        if not (self.simulation.silent and rank in self.simulation.lost):
            missing = np.isinf(self.arrives[rank])
            self.closed[missing] = np.minimum(self.closed[missing], self.simulation.gone[rank])

    def _settle(self) -> None:
        if len(self.began) == self.simulation.size:
            self.ready = self.arrives.max(axis=0)
            for other, until in self._waiting.items():
                self.simulation._wake(other, min(until, self.ready[other]))

    def result(self, join: Callable[[list[Any]], Any]) -> Any:
        """Return the messages of all, joined; once for all ranks."""
        if self._results is None:
            self._results = join(self.sent)
        return self._results

    def fails(self, rank: int) -> float:
        """Return when a rank's side of it fails, if it does not end before."""
        return min(max(self.closed[rank], self.began[rank]) + SOON, self.began[rank] + TIMEOUT)

    def wait(self, rank: int, seconds: float) -> bool:
        """Wait for a rank's side; whether it has ended. Raises RuntimeError where it has failed."""
        simulation = self.simulation
        until = simulation.now + seconds
        while True:
            fails = self.fails(rank)
            if self.ready[rank] <= simulation.now:
                return True
            if fails <= simulation.now:
                raise RuntimeError("[simulated.cc:1] Connection closed by peer. Or no answer in time")
            if until <= simulation.now:
                return False
            self._waiting[rank] = min(until, fails)
            try:
                simulation.sleep(min(until, fails, self.ready[rank]) - simulation.now)
            finally:
                self._waiting.pop(rank, None)


class Work:
    """One rank's side of a collective, as torch.distributed returns it."""

    def __init__(self, collective: Collective, rank: int, finish: Callable[[Collective], None]) -> None:
        """Wait for a result, which `finish` takes in."""
        self._collective, self._rank, self._finish = collective, rank, finish
        self._over = False

    def wait(self, timeout: Any = None) -> None:
        """Wait. Raises RuntimeError where it has failed, or where it has not ended within `timeout`."""
        if not self._over:
            try:
                ended = self._collective.wait(self._rank, np.inf if timeout is None else timeout.total_seconds())
            except RuntimeError:
                self._over = True
                raise
            if not ended:
                raise RuntimeError("timed out")
            self._over = True
            self._finish(self._collective)
            self._collective.simulation.instant()
        elif self._collective.ready[self._rank] > self._collective.simulation.now:
            raise RuntimeError("[simulated.cc:1] Connection closed by peer. Or no answer in time")

    def is_completed(self) -> bool:
        """Return whether it has ended or failed."""
        return self._over


class Group:
    """A rank's process group."""

    group_name = "simulated"

    def __init__(self, simulation: Simulation, rank: int) -> None:
        """Make the group of all ranks."""
        self.simulation, self.rank = simulation, rank
        #: How many collectives the rank has begun.
        self.begun = 0

    def get_group_store(self) -> Group:
        """Return the group is its own store of keys."""
        return self

    def set(self, key: str, value: str) -> None:
        """Set a value for all."""
        self._ask()
        self.simulation.keys[key] = value

    def get(self, key: str) -> bytes:
        """Return a value."""
        self._ask()
        return self.simulation.keys[key].encode()

    def add(self, key: str, count: int) -> int:
        """Add to a number, and return the sum."""
        self._ask()
        self.simulation.keys[key] = str(int(self.simulation.keys.get(key, "0")) + count)
        return int(self.simulation.keys[key])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        self._ask()
        return all(key in self.simulation.keys for key in keys)

    def _ask(self) -> None:
        self.simulation.check()
        if self.simulation.keeper_lost and 0 in self.simulation.gone:
            raise RuntimeError("Connection reset by peer")

    def begin(self, what: tuple[Any, ...], sent: Any, finish: Callable[[Collective], None]) -> Work:
        """Begin the next collective; its `what` has to be the same on all ranks."""
        simulation = self.simulation
        simulation.instant()
        collective = simulation.collectives.get(self.begun)
        if collective is None:
            collective = simulation.collectives[self.begun] = Collective(simulation, what)
        if collective.what != what:
            simulation.fault = f"collective {self.begun} is {what} on rank {self.rank}, and {collective.what} on others"
        self.begun += 1
        collective.begin(self.rank, sent)
        simulation.collectives.pop(self.begun - 5, None)  # All ranks have had it, or they would not be here.
        simulation.instant()
        return Work(collective, self.rank, finish)


class Transport:
    """Functions of torch.distributed that ranks use."""

    ProcessGroup = Group

    @staticmethod
    def get_backend_config(_: Group) -> str:
        """Return the backends by device."""
        return "cpu:simulated"

    @staticmethod
    def get_rank(group: Group) -> int:
        """Return the rank of the process."""
        return group.rank

    @staticmethod
    def get_world_size(group: Group) -> int:
        """Return the number of ranks."""
        return group.simulation.size

    @staticmethod
    def all_gather_into_tensor(whole: torch.Tensor, share: torch.Tensor, group: Group, async_op: bool) -> Work:
        """Have `whole` be the shares of all ranks."""
        assert async_op
        return group.begin(
            ("gather", share.dtype, len(share)), share.clone(), lambda done: whole.copy_(done.result(torch.cat))
        )

    @staticmethod
    def all_to_all_single(
        received: torch.Tensor, sent: torch.Tensor, wanted: list[int], counts: list[int], group: Group, async_op: bool
    ) -> Work:
        """Fill `received` with the bytes that all ranks have sent to this one."""
        assert async_op

        def finish(done: Collective) -> None:
            pieces = [done.sent[rank][group.rank] for rank, count in enumerate(wanted) if count]
            if [len(piece) for piece in pieces] != [count for count in wanted if count]:
                group.simulation.fault = f"rank {group.rank} has got other bytes than it wanted"
            received.copy_(torch.cat(pieces))

        pieces, begin = {}, 0
        for rank, count in enumerate(counts):
            if count:
                pieces[rank] = sent[begin : begin + count].clone()
                begin += count
        return group.begin(("exchange",), pieces, finish)


class Clock:
    """Functions of the time module that ranks use."""

    def __init__(self, simulation: Simulation) -> None:
        """Show the time of a simulation."""
        self._simulation = simulation
        self.sleep = simulation.sleep

    def monotonic(self) -> float:
        """Return the seconds that have passed."""
        return self._simulation.now


class Uncounted(dict):
    """How many `Ranks` a group has had: all are made in this process, and each is the first of its rank."""

    def __missing__(self, _: str) -> int:
        """Return none yet."""
        return 0

    def __setitem__(self, *_: Any) -> None:
        """Stay so."""
