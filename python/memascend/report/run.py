"""Reading a metrics file into the series of a report. Nothing in the file is trusted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memascend.common.timeline import COMPUTE, KINDS
from memascend.errors import DataError
from memascend.report.counters import RANK_FIGURES, VOLUME_COUNTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Longer lines are not records of ours.
LINE_BYTES_MAX = 4 << 20
STEPS_MAX = 1 << 53
NUMBERS_MAX = 1e100
#: More ranks than this are not shown.
RANKS_MAX = 4096

#: One value for each step; None where there is none.
Values = list[float | None]


@dataclass
class RunRecords:
    """The records of one run."""

    path: Path
    #: The first records of the run and of each time that it was resumed.
    openings: list[dict[str, Any]] = field(default_factory=list)
    #: The last record of a run that has ended, else {}.
    end: dict[str, Any] = field(default_factory=dict)
    #: The record of each step, by its number, in order.
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: The loss of each evaluation, by the step after which it was taken.
    evaluations: dict[int, float] = field(default_factory=dict)
    #: Lines that hold no record: the last one of a run that was killed may be incomplete.
    unreadable: int = 0
    #: The paths of the volumes, in the order of the file.
    volumes: list[str] = field(default_factory=list)
    #: For each step with figures of volumes: its counters by path.
    _moved: dict[int, dict[str, list[Any]]] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """The numbers of all steps, and of those after which an evaluation was taken."""
        return sorted(self.records.keys() | self.evaluations.keys())

    @property
    def opening(self) -> dict[str, Any]:
        """The latest opening record, or {}."""
        return self.openings[-1] if self.openings else {}

    def column(self, *names: str) -> Values:
        """Return the number at `names` (a path into the record) of each of `steps`."""
        return self._of_each(lambda step: _at(self.records.get(step), *names))

    def waited(self) -> dict[str, Values]:
        """Return the seconds of each step by kind of wait, by the kinds' names on the screen."""
        shown = {**KINDS, COMPUTE: COMPUTE}
        return {shown[kind]: self.column("waited_seconds", kind) for kind in shown}

    def moved(self, counter: str) -> dict[str, Values]:
        """Return one of `VOLUME_COUNTERS` for each volume, by its path."""
        index = VOLUME_COUNTERS.index(counter)

        def of(volume: str) -> Values:
            return self._of_each(lambda step: _entry(self._moved.get(step, {}).get(volume), index))

        return {volume: of(volume) for volume in self.volumes}

    def of_ranks(self) -> list[dict[str, Values]]:
        """Return the figures of each rank, by the names of `RANK_FIGURES`; none for a run of one process."""
        told = [self.records.get(step, {}).get("ranks") for step in self.steps]
        steps = [ranks if isinstance(ranks, list) else [] for ranks in told]

        def of(rank: int, index: int) -> Values:
            return [number(_entry(_entry(ranks, rank), index)) for ranks in steps]

        count = min(RANKS_MAX, max(map(len, steps), default=0))
        return [{name: of(rank, index) for index, name in enumerate(RANK_FIGURES)} for rank in range(count)]

    def _of_each(self, value_of: Callable[[int], Any]) -> Values:
        return [number(value_of(step)) for step in self.steps]

    def take(self, record: dict[str, Any]) -> None:
        """Add one record of the file."""
        kind, step = record.get("record"), record.get("step")
        if kind in ("start", "resume"):
            self.openings.append(record)
            self.volumes += [path for path in _paths(record) if path not in self.volumes]
        elif kind == "end":
            self.end = record
        elif isinstance(step, int) and not isinstance(step, bool) and 0 < step <= STEPS_MAX:
            loss = number(record.get("eval_loss", record.get("loss") if kind == "eval" else None))
            if loss is not None:
                self.evaluations[step] = loss
            if kind == "step":
                self.records[step] = record
                counters = record.get("volumes")
                if isinstance(counters, list):
                    self._moved[step] = dict(zip(_paths(self.opening), counters, strict=False))


def number(value: Any) -> float | None:
    """Return a value as a number, or None for anything else: NaN, infinity and impossible values included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if abs(value) <= NUMBERS_MAX else None


def section(record: Any, *names: str) -> dict[str, Any]:
    """Return the dictionary at `names` (a path into a record), or {}."""
    found = _at(record, *names)
    return found if isinstance(found, dict) else {}


def _at(record: Any, *names: str) -> Any:
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def _entry(counters: Any, index: int) -> Any:
    return counters[index] if isinstance(counters, list) and index < len(counters) else None


def _paths(opening: dict[str, Any]) -> list[str]:
    volumes = section(opening, "store").get("volumes")
    named = [_at(volume, "path") for volume in volumes] if isinstance(volumes, list) else []
    return [path if isinstance(path, str) else f"volume {index}" for index, path in enumerate(named)]


def read_run(path: Path) -> RunRecords:
    """Read a metrics file.

    Raises DataError where it cannot be read, or holds no step.
    """
    run = RunRecords(path)
    try:
        for line in _lines(path):
            record = _parsed(line)
            if record is None:
                run.unreadable += 1
            else:
                run.take(record)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not run.openings and not run.records:
        raise DataError(f"{path} holds no records of a run: `memascend finetune` writes such as metrics.jsonl")
    if not run.records:
        raise DataError(f"{path} holds no step yet")
    run.records = dict(sorted(run.records.items()))
    return run


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, of long ones the beginning, which is no record."""
    with open(path, "rb") as file:
        while line := file.readline(LINE_BYTES_MAX):
            yield line
            while len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
                line = file.readline(LINE_BYTES_MAX)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("record"), str) else None
