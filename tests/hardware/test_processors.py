"""The processors that a process really has: its affinity mask, SMT, and quotas of both versions of cgroups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import torch

from memascend.errors import DataError
from memascend.hardware import cgroups, processors, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The findings of a process of its own.
SHOWN = (
    "import json; from memascend.hardware import threads; from memascend.hardware.processors import processors; "
    "here = processors(); print(json.dumps([here.logical, here.physical, here.quota, here.quota_of, here.whole, "
    "here.threads, here.cores, threads.update_threads(False), threads.update_threads(True)]))"
)


def write(root: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., processors.Processors]:
    """Fake a machine: the processors of the mask, the siblings of each, the line of /proc/self/cgroup."""
    real = Path.read_text

    def fake(mask: int, own: str = "0::/", siblings: Callable[[int], str] = str) -> processors.Processors:
        for number in range(mask):
            write(tmp_path, {f"system/cpu{number}/topology/thread_siblings_list": siblings(number)})
        processors._core_of.cache_clear()
        write(tmp_path, {"cgroup": own})
        faked = {"/proc/self/cgroup": tmp_path / "cgroup"}
        monkeypatch.setattr(cgroups, "CGROUPS", tmp_path / "groups")
        monkeypatch.setattr(processors, "PROCESSORS", tmp_path / "system")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(mask)))
        monkeypatch.setattr(os, "cpu_count", lambda: mask)
        monkeypatch.setattr(Path, "read_text", lambda path, *a, **k: real(faked.get(str(path), path), *a, **k))
        return processors.processors()

    return fake


def test_two_processors_of_a_core_are_one_core(machine: Callable[..., processors.Processors]) -> None:
    here = machine(16, siblings=lambda number: f"{number % 8},{number % 8 + 8}")
    assert (here.logical, here.physical, here.quota) == (16, 8, None)
    assert (here.threads, here.cores) == (16, 8)
    assert here.text() == "16 processors for this process on 8 cores"


def test_a_system_that_tells_no_siblings(
    machine: Callable[..., processors.Processors], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(4)
    monkeypatch.setattr(processors, "PROCESSORS", tmp_path / "nowhere")
    assert processors.processors().physical == 4


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_quota_above_counts(
    machine: Callable[..., processors.Processors], tmp_path: Path, version: int
) -> None:
    root = tmp_path / "groups" / ("cpu" if version == 1 else "")
    if version == 1:
        write(root, {"outer/cpu.cfs_quota_us": 250000, "outer/cpu.cfs_period_us": 100000})
        write(root, {"outer/inner/cpu.cfs_quota_us": -1, "outer/inner/cpu.cfs_period_us": 100000})
    else:
        write(root, {"outer/cpu.max": "250000 100000", "outer/inner/cpu.max": "max 100000"})
    here = machine(8, "3:cpu,cpuacct:/outer/inner" if version == 1 else "0::/outer/inner")
    assert here.quota == 2.5 and "/outer allows 250000 of each 100000 us" in here.quota_of
    assert (here.logical, here.threads, here.cores) == (8, 2, 2)
    write(
        root,
        {"outer/inner/cpu.cfs_quota_us": 50000} if version == 1 else {"outer/inner/cpu.max": "50000 100000"},
    )
    here = processors.processors()
    assert here.quota == 0.5 and "/outer/inner" in here.quota_of
    assert here.threads == here.cores == 1, "half a processor is one thread"


def test_a_hierarchy_that_is_named_by_its_controllers(
    machine: Callable[..., processors.Processors], tmp_path: Path
) -> None:
    write(tmp_path / "groups/cpu,cpuacct", {"cpu.cfs_quota_us": 300000, "cpu.cfs_period_us": 100000})
    # The path is the host's, and a container shows the root alone.
    assert machine(8, "3:cpu,cpuacct:/docker/1234").quota == 3.0


def test_a_quota_of_all_processors_is_none(machine: Callable[..., processors.Processors], tmp_path: Path) -> None:
    write(tmp_path / "groups", {"cpu.max": "400000 100000"})
    assert machine(4).quota is None


# ---- consequences -------------------------------------------------------------------------------------------


def test_update_threads_follow_the_cores(
    machine: Callable[..., processors.Processors], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    chosen = {}
    for count in (1, 2, 4, 8, 16, 64):
        machine(count)
        chosen[count] = (threads.update_threads(False), threads.update_threads(True))
    assert chosen == {1: (1, 1), 2: (1, 1), 4: (1, 3), 8: (2, 6), 16: (4, 12), 64: (16, 48)}
    machine(16, siblings=lambda number: str(number // 2))
    assert (threads.update_threads(False), threads.update_threads(True)) == (2, 12)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert threads.update_threads(True) == 3, "four processes of a launch share the processors"


def test_one_variable_sets_them(machine: Callable[..., processors.Processors], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(16)
    monkeypatch.setenv(threads.VARIABLE, "update=3, waits=yield,torch=5")
    assert threads.settings() == threads.ThreadSettings(5, 3, "yield")
    assert threads.update_threads(True) == 3 and threads.torch_threads() == 5
    assert threads.update_threads(True, 7) == 7, "the option of a model comes first"
    with pytest.raises(ValueError, match="compute_threads=0: at least one"):
        threads.update_threads(True, 0)


def test_a_program_of_ours_computes_with_no_more_threads_than_a_quota_pays_for(
    machine: Callable[..., processors.Processors], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (threads.VARIABLE, *threads._NUMBERS):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        machine(8)
        threads.set_torch_threads()
        assert torch.get_num_threads() == 4
        write(tmp_path / "groups", {"cpu.max": "250000 100000"})
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        threads.set_torch_threads()
        assert torch.get_num_threads() == 4, "the user has said how many"
        monkeypatch.delenv("OMP_NUM_THREADS")
        threads.set_torch_threads()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", ["update", "update=0", "update=-1", "waits=never", "threads=2", "update=٣"])
def test_a_variable_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(threads.VARIABLE, f"torch=2,{wrong}")
    with pytest.raises(DataError, match=r"MEMASCEND_THREADS has .*: give torch=N"):
        threads.settings()


# ---- a real mask and real quotas ----------------------------------------------------------------------------


def shown(command: list[str]) -> list[Any]:
    """Return the findings of a process of its own, started by `command`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMASCEND_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def test_a_real_mask() -> None:
    one = str(min(os.sched_getaffinity(0)))
    logical, physical, *_, whole, count, cores, update, beside_device = shown(
        ["taskset", "-c", one, sys.executable, "-P", "-c", SHOWN]
    )
    assert (logical, physical, whole) == (1, 1, os.cpu_count() == 1)
    assert (count, cores, update, beside_device) == (1, 1, 1, 1)


@pytest.fixture
def quota() -> Iterator[Path]:
    """A cgroup of the first version that allows half a processor."""
    group = cgroups.CGROUPS / "cpu" / f"memascend-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        requirements.unmet("root", f"no cgroup of processors can be made: {error}")
    try:
        (group / "inner").mkdir()
        (group / "cpu.cfs_quota_us").write_text("50000")
        yield group
    finally:
        (group / "inner").rmdir()
        group.rmdir()


def test_a_real_quota_of_a_group_above(quota: Path) -> None:
    entered = f"echo $$ > {quota}/inner/cgroup.procs && exec {sys.executable} -P -c '{SHOWN}'"
    logical, _, allowed, why, _, count, cores, update, beside_device = shown(["sh", "-c", entered])
    assert (logical, allowed) == (len(os.sched_getaffinity(0)), 0.5)
    assert why.startswith(f"the cpu cgroup /{quota.name} allows 50000")
    assert (count, cores, update, beside_device) == (1, 1, 1, 1)
