"""Many ranks that are lost, late or astray: a run always has a step that every rank has whole, and never hangs.

The ranks are simulated (`simulated_ranks`); collectives, durable steps and the choice of a step to resume are the code
of real ones. A rank's store is a directory with the two manifests of a real one, and tensors that have two slots each.
MEMASCEND_SEEDS says how many seeds are run with 8 ranks, MEMASCEND_SEED runs one of them alone.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import simulated_ranks
import torch
from simulated_ranks import Fault, Group, Lost, Simulation

from memascend.durability.commits import CommitLog
from memascend.durability.step_snapshot import StepSnapshot
from memascend.errors import CheckpointError, RankError
from memascend.ranks import group
from memascend.ranks.group import GRACE_SECONDS, Ranks
from memascend.ranks.membership import Membership
from memascend.recovery import common_generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SEEDS, ALONE = int(os.environ.get("MEMASCEND_SEEDS", "15")), os.environ.get("MEMASCEND_SEED")
#: Steps before the run in which ranks are lost first, and how often they are, by the number of ranks.
RUNS = {8: (4, 3), 64: (2, 1), 512: (1, 1)}
#: How many of the seeds are run with as many ranks.
#: Ranks and seeds; half a thousand take half a minute for one seed.
COUNTS = [
    (8, SEEDS),
    (64, max(SEEDS // 25, 1)),
    pytest.param(512, max(SEEDS // 300, 1), marks=pytest.mark.soak),
]
UNITS = ("embedding", "layer")
#: Content of a slot that is being written.
TORN = "torn"
#: The simulation that runs.
current: list[Simulation] = []


class Slow:
    """Calls of the system at which a rank may be lost, before and after each."""

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in ("link", "replace", "fsync"):
            return call

        def between(*args: Any) -> None:
            current[-1].instant()
            if name != "fsync":
                call(*args)
            current[-1].instant()

        return between


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "dist", simulated_ranks.Transport)
    monkeypatch.setattr(group, "_made", simulated_ranks.Uncounted())
    monkeypatch.setattr(common_generation, "os", Slow())
    monkeypatch.setattr(common_generation, "_open", lambda directories: Opened(*directories))
    monkeypatch.setattr(common_generation, "manifest_in", manifest_in)
    monkeypatch.setattr(common_generation, "_described", described)


def each_seed(count: int, scenario: Callable[[int], int]) -> int:
    """Run a scenario with seeds, and name the one that fails; return the sum of its results."""
    total = 0
    for seed in range(count) if ALONE is None else [int(ALONE)]:
        try:
            total += scenario(seed)
        except BaseException:
            print(f"MEMASCEND_SEED={seed} runs this alone")
            raise
    return total


# ---- a rank's store -----------------------------------------------------------------------------------------


def read(directory: Path) -> tuple[int, dict[str, Any]]:
    """Return the generation that a store has by its manifest, and the record there."""
    try:
        manifest = json.loads((directory / common_generation.MANIFEST).read_text())
    except (ValueError, FileNotFoundError) as error:
        raise CheckpointError(f"no manifest: {error}") from error
    return manifest["generation"], manifest


class Opened:
    """A stand-in for an open store, of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.generation, self.manifest = read(directory)

    def report(self) -> dict[str, Any]:
        return {"volumes": [{"path": str(self._directory)}]}

    def close(self) -> None:
        pass


def manifest_in(file: Path, **_: Any) -> dict[str, Any] | None:
    """Read a manifest as `memascend.recovery.running_store.manifest_in` does; None where it is not whole."""
    try:
        return {"current": {"number": json.loads(file.read_text())["generation"]}}
    except (ValueError, FileNotFoundError):
        return None


def described(opened: Opened, _: Any) -> tuple[tuple[int, int, list[str]], dict[str, Any]]:
    """Describe a store as `common_generation._described` does, without checkpoints."""
    return (opened.generation, opened.manifest["steps"], []), opened.manifest["ranks"]


class Drive:
    """The files of a rank when its process is gone: manifests, and two slots for each tensor."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.slots: dict[str, list[Any]] = {unit: [None, None] for unit in UNITS}
        #: The newest generation with a manifest of its own name.
        self.newest = 0

    def whole(self) -> set[int]:
        """Return the generations whose manifests and tensors are all there."""
        found = set()
        for name in (common_generation.MANIFEST, common_generation.BEFORE, common_generation._ASIDE):
            try:
                manifest = json.loads((self.directory / name).read_text())
            except (ValueError, FileNotFoundError):
                continue
            if all(self.slots[unit][slot] == manifest["steps"] for unit, slot in manifest["slots"].items()):
                found.add(manifest["generation"])
        return found


class World:
    """The drives of all ranks, and the invariants of all."""

    def __init__(self, size: int, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.drives = [Drive(folder / str(rank)) for rank in range(size)]
        #: The newest generation that a rank took to be on all of them.
        self.reached = 0

    def check(self) -> int:
        """Return the newest generation that is whole on all ranks.

        Raises Fault where one that was on all of them is not any more.
        """
        common = max(set.intersection(*(drive.whole() for drive in self.drives)), default=0)
        if common < self.reached:
            raise Fault(f"all ranks had generation {self.reached}, and have {common} in common")
        return common

    def write_over(self, rank: int, value: Any) -> None:
        """Note that a rank writes over a value, which is the number of its generation.

        Raises Fault where the rank goes on with that generation, or where another one may have to go back to it.
        """
        if isinstance(value, int) and value <= self.drives[rank].newest:
            behind = [other for other, drive in enumerate(self.drives) if drive.newest <= value]
            if behind:
                raise Fault(f"rank {rank} writes over generation {value}, and rank {behind[0]} has no newer one")


class Store:
    """A rank's open store: which slots are current, which are durable, and commits beside the computation."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.drive = world, rank, world.drives[rank]
        self.generation, self.steps = 0, 0
        self.slots = dict.fromkeys(UNITS, 0)
        self.durable: dict[str, int] = {}
        if (self.drive.directory / common_generation.MANIFEST).exists():
            self.generation, manifest = read(self.drive.directory)
            self.slots, self.durable, self.steps = dict(manifest["slots"]), dict(manifest["slots"]), manifest["steps"]

    def rewrite(self, unit: str, steps: int) -> None:
        """Write a tensor's next value to a slot that this rank's durable generation does not need."""
        slot = self.slots[unit]
        if self.durable.get(unit) == slot:
            slot = 1 - slot
        current[-1].instant()
        self.world.write_over(self.rank, self.drive.slots[unit][slot])
        self.drive.slots[unit][slot] = TORN
        current[-1].instant()
        self.drive.slots[unit][slot] = steps
        self.slots[unit] = slot

    def commit(self, record: str, _: Sequence[Any]) -> SimpleNamespace:
        """Begin a commit, which is carried out at once or when it is waited for."""
        slots, generation = dict(self.slots), self.generation + 1
        text = json.dumps(json.loads(record) | {"generation": generation, "slots": slots})
        parts = self._parts(text, generation, slots)
        if current[-1].chance.random() < 0.5:
            all(True for _ in parts)
        return SimpleNamespace(wait=lambda: all(True for _ in parts))

    def _parts(self, text: str, generation: int, slots: dict[str, int]) -> Iterator[None]:
        directory = self.drive.directory
        before, newest = directory / common_generation.BEFORE, directory / common_generation.MANIFEST
        current[-1].instant()
        before.write_text(text[: len(text) // 2])
        current[-1].instant()
        before.write_text(text)
        yield current[-1].instant()
        # RENAME_EXCHANGE
        if newest.exists():
            newest.rename(directory / "exchanged")
            before.rename(newest)
            (directory / "exchanged").rename(before)
        else:
            before.rename(newest)
        self.drive.newest = self.generation = generation
        self.durable = slots
        yield current[-1].instant()


# ---- a rank's program ---------------------------------------------------------------------------------------


class Streamer:
    """Deferred updates of units, which the next use applies."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.updates: dict[str, int] = {}

    def use(self, unit: str) -> None:
        if unit in self.updates:
            self.store.rewrite(unit, self.updates.pop(unit))

    def apply_updates(self) -> None:
        for unit in UNITS:
            self.use(unit)

    def deferred(self) -> bool:
        return bool(self.updates)

    def tickets(self) -> list[Any]:
        return []

    def forget_last_use(self) -> None:
        pass


class SmallGenerations(CommitLog):
    """Real generations, with records that say no more than the step."""

    def _take_snapshot(self) -> StepSnapshot:
        return StepSnapshot(random={}, data=None, buffers=None)

    def _record(self) -> str:
        return json.dumps({"steps": self.steps, "ranks": self._session.membership.described})


class Session:
    """The part of a session that generations use."""

    def __init__(self, world: World, ranks: Ranks) -> None:
        self.runtime: Any = SimpleNamespace(store=Store(world, ranks.rank))
        self.streamer = Streamer(self.runtime.store)
        self.timeline = SimpleNamespace(waiting=lambda _: nullcontext())
        self.membership = Membership(ranks, "run")
        self.keep_store = True
        self.options = SimpleNamespace(durability="step")
        self.tracked: dict[str, Any] = {}

    def model(self) -> None:
        return None


class Optimizer:
    def trains_only(self, _: Session) -> bool:
        return True


def gather(ranks: Ranks, unit: str, step: int) -> None:
    """Gather a unit, and see that every rank's share is in its place."""
    expected = (torch.arange(ranks.size) + 10 * step + len(unit)).to(torch.uint8)
    whole = torch.zeros(ranks.size, dtype=torch.uint8)
    whole[ranks.rank] = expected[ranks.rank]
    ranks.gather(f"gather {unit}", [whole])
    if not torch.equal(whole, expected):
        raise Fault(f"rank {ranks.rank} has gathered other bytes for {unit}")


def exchange(ranks: Ranks, unit: str, step: int) -> None:
    """Exchange gradients: each rank sends some bytes to the three behind it."""
    action = f"exchange the gradients of {unit}"
    ranks.all_gather(action, torch.tensor([ranks.rank, step]))
    counts, wanted = [0] * ranks.size, [0] * ranks.size
    for distance in (1, 2, 3):
        counts[(ranks.rank + distance) % ranks.size] = wanted[(ranks.rank - distance) % ranks.size] = distance
    received = ranks.all_to_all(action, torch.full((6,), ranks.rank % 100, dtype=torch.uint8), counts, wanted)
    if received.tolist() != [rank % 100 for rank, count in enumerate(wanted) for _ in range(count)]:
        raise Fault(f"rank {ranks.rank} has received other gradients for {unit}")


def go(world: World, ranks: Ranks, steps: int, resumes: bool) -> None:
    """Train until a step, from the step that all ranks have."""
    drive = world.drives[ranks.rank]
    if resumes:
        common_generation.go_to_common_step([drive.directory], ranks)
        drive.newest, manifest = read(drive.directory)
        if any(drive.slots[unit][slot] != manifest["steps"] for unit, slot in manifest["slots"].items()):
            raise Fault(f"rank {ranks.rank} goes on from generation {drive.newest}, which is not whole")
    session = Session(world, ranks)
    runtime, streamer = session.runtime, session.streamer
    store, generations, optimizer = runtime.store, SmallGenerations(session, runtime, {}), Optimizer()
    generations.steps = generations._committed_steps = store.steps
    ahead = random.Random(f"{ranks.rank} {current[-1].chance.random()}")
    for step in range(store.steps, steps):
        generations.begin()
        # Which updates run before a pass, in it, and after it, is a matter of each rank's memory.
        used = [unit for unit in UNITS if ahead.random() < 0.8]
        for unit in UNITS:
            if unit in used:
                streamer.use(unit)
            gather(ranks, unit, step)
        generations.start()
        for unit in reversed(UNITS):
            exchange(ranks, unit, step)
        generations.wait_committed(optimizer)
        world.reached = max(world.reached, store.generation)
        streamer.updates = dict.fromkeys(UNITS, step + 1)
        generations.stepped(optimizer)
    streamer.apply_updates()
    generations.commit()
    world.reached = max(world.reached, store.generation)


def run(simulation: Simulation, program: Callable[[Ranks], None]) -> list[Any]:
    """Run a program on all ranks; None, or the exception that each has ended with."""
    current.append(simulation)
    clock: Any = group.time
    group.time = simulated_ranks.Clock(simulation)  # type: ignore[assignment]
    try:
        return simulation.run(lambda rank: program(Ranks(Group(simulation, rank))))  # type: ignore[arg-type]
    finally:
        group.time = clock
        current.pop()


# ---- lost ranks ---------------------------------------------------------------------------------------------


@lru_cache
def instants() -> float:
    """Return how many instants a step of a rank has that is not disturbed."""
    with tempfile.TemporaryDirectory() as folder:
        simulation, world = Simulation(0, 8), World(8, Path(folder))
        assert run(simulation, lambda ranks: go(world, ranks, 4, False)) == [None] * 8
        return min(simulation.instants) / 4


def lose(seed: int, size: int, folder: Path) -> int:
    """Lose ranks of a run again and again, and have it go on; how often all had a step to go on from."""
    chance = random.Random(f"lose {seed}")
    first, losses = RUNS[size]
    world, resumed, steps = World(size, folder / str(seed)), 0, first
    for attempt in range(losses + 1):
        resumes = all((drive.directory / common_generation.MANIFEST).exists() for drive in world.drives)
        if resumes:
            resumed += 1
        else:
            # A store may have the first step that another one lost: that run begins anew.
            world = World(size, folder / f"{seed} anew {attempt}")
        victims = chance.sample(range(size), chance.choice((1, 1, 2, size)) if attempt < losses else 0)
        steps += 1
        # Large runs are few, and have a step to go on from.
        instant = int(steps * instants() * chance.uniform(0 if size == 8 else 0.7, 1))
        dies_at = {victim: max(1, instant + chance.randrange(-3, 4)) for victim in victims}
        simulation = Simulation(
            f"{seed} {attempt}",
            size,
            dies_at=dies_at,
            silent=chance.random() < 0.3,
            keeper_lost=chance.random() < 0.5,
        )
        results = run(simulation, partial(go, world, steps=steps, resumes=resumes))
        world.check()
        check_ends(simulation, results)
    if world.check() != steps or [drive.newest for drive in world.drives] != [steps] * size:
        raise Fault(f"the run has ended with {[drive.whole() for drive in world.drives]}")
    return resumed


def check_ends(simulation: Simulation, results: list[Any]) -> None:
    """Raise Fault where a rank has ended with another error than that others are lost, or long after them."""
    lost = [simulation.gone[rank] for rank in simulation.lost]
    for rank, result in enumerate(results):
        if result is not None and not isinstance(result, Lost) and not (lost and isinstance(result, RankError)):
            raise Fault(f"rank {rank} has ended with {result!r}") from result
        late = simulation.gone[rank] - max(lost, default=simulation.now)
        if late > simulated_ranks.TIMEOUT + 2 * GRACE_SECONDS:
            raise Fault(f"rank {rank} has ended {late} s after the loss of others")


@pytest.mark.parametrize(("size", "count"), COUNTS)
def test_a_run_goes_on_from_a_step_that_all_ranks_have(size: int, count: int, tmp_path: Path) -> None:
    resumed = each_seed(count, lambda seed: lose(seed, size, tmp_path))
    assert ALONE or resumed >= count / 2


# ---- ranks that go astray -----------------------------------------------------------------------------------


#: Acts of a rank that goes astray, from a place on.
ASTRAY: dict[str, Callable[[list[Any]], list[Any]]] = {
    "leaves one out": lambda actions: actions[1:],
    "repeats one": lambda actions: [actions[0], *actions],
    "does two in another order": lambda actions: [actions[1], actions[0], *actions[2:]],
    "does another one": lambda actions: [(gather, "head", 0), *actions[1:]],
    "ends": lambda _: [],
}


def go_astray(seed: int, size: int) -> int:
    """Have one rank do something else at some time, and perhaps another one be lost."""
    chance = random.Random(f"astray {seed}")
    actions = [
        (action, unit, step)
        for step in range(3)
        for action, units in ((gather, UNITS), (exchange, UNITS[::-1]))
        for unit in units
    ]
    chosen, astray = chance.choice(list(ASTRAY)), chance.randrange(size)
    at = chance.randrange(len(actions) - 2)
    dies_at = {chance.randrange(size): chance.randrange(1, 80)} if chance.random() < 0.3 else {}

    def program(ranks: Ranks) -> None:
        mine = [*actions[:at], *ASTRAY[chosen](actions[at:])] if ranks.rank == astray else actions
        for action, unit, step in mine:
            action(ranks, unit, step)

    simulation = Simulation(f"astray {seed}", size, dies_at=dies_at)
    results = run(simulation, program)
    if simulation.lost:
        if not all(isinstance(result, RankError | Lost | None) for result in results):
            raise Fault(f"the ranks have ended with {results}")
        return 0
    if chosen == "ends":
        told = {type(result) for rank, result in enumerate(results) if rank != astray}
        if told != {RankError} or results[astray] is not None:
            raise Fault(f"rank {astray} has ended, and the others with {told}")
        return 0
    told = {str(result) if isinstance(result, RankError) else repr(result) for result in results}
    if len(told) != 1 or "the ranks were to do different things" not in told.pop():
        raise Fault(f"rank {astray} {chosen}, and the ranks have ended with {told}")
    return 1


@pytest.mark.parametrize(("size", "count"), COUNTS)
def test_another_order_raises_on_every_rank_of_many(size: int, count: int) -> None:
    assert each_seed(count, lambda seed: go_astray(seed, size)) >= count // 3 or ALONE


# ---- mutants ------------------------------------------------------------------------------------------------


def _leave_out(*_: Any) -> None:
    pass


def _take_own(_: Path, ranks: Ranks) -> None:
    ranks.barrier("resume")


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        (Membership, "barrier", _leave_out),
        (common_generation, "_read_before", _leave_out),
        (common_generation, "go_to_common_step", _take_own),
        (Ranks, "barrier", _leave_out),
    ],
)
def test_an_omission_is_noticed(
    place: Any, name: str, instead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instants()
    monkeypatch.setattr(place, name, instead)
    with pytest.raises(Fault):
        for seed in range(100):
            if place is Ranks:
                go_astray(seed, 8)
            else:
                lose(seed, 8, tmp_path)
