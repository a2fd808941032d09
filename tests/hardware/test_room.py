"""Memory that cgroups leave to this process, from trees of files as the kernel shows them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memascend.hardware import cgroups, memory_limits, memory_pressure
from memascend.hardware.memory_pressure import Growth, Stalls

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
UNLIMITED = 9223372036854771712
#: Names by version of cgroups: limit, usage.
NAMES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Fake the files of /proc: cgroups are below `tmp_path`, and the machine has 1 GiB, with `available` free."""
    real = Path.read_text

    def fake(own: str, available: int = 800 * MIB) -> Path:
        proc = tmp_path / "proc"
        proc.mkdir(exist_ok=True)
        (proc / "cgroup").write_text(f"{own}\n")
        (proc / "meminfo").write_text(f"MemTotal: {1 << 20} kB\nMemAvailable: {available >> 10} kB\n")
        (proc / "memory").write_text("some avg10=0.00 total=0\nfull avg10=0.00 total=0\n")
        faked = {
            "/proc/self/cgroup": proc / "cgroup",
            "/proc/meminfo": proc / "meminfo",
            "/proc/pressure/memory": proc / "memory",
        }
        monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
        monkeypatch.setattr(Path, "read_text", lambda path, *a, **k: real(faked.get(str(path), path), *a, **k))
        return proc

    return fake


def write(root: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


def room(part: str) -> tuple[int, int]:
    """Return the bytes left, and of these the reserve, of the bound whose description has `part`."""
    (bound,) = [bound for bound in memory_limits.memory_bounds() if part in bound.description]
    return bound.left, bound.reserve


@pytest.mark.parametrize("version", [1, 2])
def test_each_group_above_is_a_bound(machine: Callable[..., Path], tmp_path: Path, version: int) -> None:
    limit, usage = NAMES[version]
    total = "total_" if version == 1 else ""
    root = tmp_path / "memory" if version == 1 else tmp_path
    write(
        root,
        {
            f"outer/{limit}": 512 * MIB,
            f"outer/{usage}": 400 * MIB,
            "outer/memory.stat": f"{total}inactive_file {100 * MIB}\n{total}active_file {30 * MIB}\n"
            # The code of libraries, and pages that wait for a drive, cannot be taken at once.
            f"{total}{'mapped_file' if version == 1 else 'file_mapped'} {20 * MIB}\n"
            f"{total}{'dirty' if version == 1 else 'file_dirty'} {5 * MIB}",
            f"outer/inner/{limit}": 256 * MIB,
            f"outer/inner/{usage}": 200 * MIB,
            "outer/inner/memory.stat": f"{total}inactive_file 0",
        },
    )
    machine("4:cpu,memory:/outer/inner" if version == 1 else "0::/outer/inner")
    assert room("/outer allows") == ((512 - 400 + 130 - 25) * MIB, 32 * MIB)
    assert room("/outer/inner allows") == (56 * MIB, 16 * MIB)
    assert room("the system's") == (800 * MIB, (1 << 30) // 10)
    assert len(memory_limits.memory_bounds()) == 3
    # The check that refuses a plan counts all of the page cache.
    assert memory_limits.available_memory()[0] == 56 * MIB


def test_the_counters_of_a_group_include_those_within(machine: Callable[..., Path], tmp_path: Path) -> None:
    stat = f"inactive_file 0\ntotal_inactive_file {50 * MIB}"
    names = {"memory.limit_in_bytes": 100 * MIB, "memory.usage_in_bytes": 90 * MIB, "memory.stat": stat}
    write(tmp_path / "memory/group", names)
    machine("4:memory:/group")
    assert room("/group allows")[0] == 60 * MIB


def test_soft_limits_are_limits(machine: Callable[..., Path], tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": 600 * MIB, "memory.soft_limit_in_bytes": 300 * MIB}
    write(tmp_path / "memory/group", {**files, "memory.usage_in_bytes": 400 * MIB})
    machine("4:memory:/group")
    assert room(f"allows {600 * MIB}")[0] == 200 * MIB
    assert room(f"allows {300 * MIB}")[0] == -100 * MIB
    # Nothing is refused for a soft limit: the kernel does not enforce it while there is memory.
    assert memory_limits.available_memory()[0] == 200 * MIB
    write(tmp_path / "group", {"memory.max": "max", "memory.high": 300 * MIB, "memory.current": 400 * MIB})
    machine("0::/group")
    assert room(f"allows {300 * MIB}")[0] == -100 * MIB


def test_a_group_without_limits_leaves_what_the_system_leaves(machine: Callable[..., Path], tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": UNLIMITED, "memory.soft_limit_in_bytes": UNLIMITED}
    write(tmp_path / "memory/group", {**files, "memory.usage_in_bytes": 400 * MIB})
    machine("4:memory:/group", available=123 * MIB)
    assert [bound.left for bound in memory_limits.memory_bounds()] == [123 * MIB]


def test_the_second_version_beside_the_first(machine: Callable[..., Path], tmp_path: Path) -> None:
    write(tmp_path / "unified/group", {"memory.max": 200 * MIB, "memory.current": 50 * MIB})
    machine("0::/group")
    assert room("/group allows")[0] == 150 * MIB
    assert memory_limits.own_group() == tmp_path / "unified/group"
    # Without the controller it counts nothing.
    machine("0::/other")
    assert memory_limits.own_group() is None


def test_the_path_of_a_container_may_be_the_hosts(machine: Callable[..., Path], tmp_path: Path) -> None:
    write(tmp_path, {"memory.max": 200 * MIB, "memory.current": 50 * MIB})
    machine("0::/system.slice/docker-1234.scope")
    assert room("cgroup / allows")[0] == 150 * MIB


def test_stalls_of_the_group_count(machine: Callable[..., Path], tmp_path: Path) -> None:
    group = tmp_path / "group"
    write(group, {"memory.current": 0, "memory.pressure": "some avg10=0.00 total=1000000\nfull avg10=0 total=0"})
    machine("0::/group")
    stalls = Stalls()
    assert stalls.share() == 0
    write(group, {"memory.pressure": "some avg10=0.00 total=9000000\nfull avg10=0 total=0"})
    assert stalls.share() == 1.0
    assert stalls.share() == 0


def test_throttling_counts_without_stalls(machine: Callable[..., Path], tmp_path: Path) -> None:
    group = tmp_path / "group"
    write(group, {"memory.current": 0, "memory.events": "low 0\nhigh 3\nmax 0"})
    machine("0::/group")
    stalls = Stalls()
    assert stalls.share() == 0
    write(group, {"memory.events": "low 0\nhigh 4\nmax 0"})
    assert stalls.share() == 1.0
    assert stalls.share() == 0


def test_stalls_of_the_machine_count_while_it_has_little(machine: Callable[..., Path]) -> None:
    def stall(proc: Path) -> None:
        (proc / "memory").write_text("some avg10=0.00 total=9000000\nfull avg10=0.00 total=0\n")

    proc = machine("4:memory:/")
    stalls = Stalls()
    stall(proc)
    assert stalls.share() == 0, "others may have reached limits of their own"
    proc = machine("4:memory:/", available=100 * MIB)
    stalls = Stalls()
    stall(proc)
    assert stalls.share() == 1.0
    (proc / "memory").unlink()
    assert stalls.share() == Stalls().share() == 0


def test_growth_is_that_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nearly always in the middle of a sample, which is of the pass that it began in.
    monkeypatch.setattr(memory_pressure, "SAMPLE_SECONDS", 0.0)
    growth = Growth()
    try:
        growth.begin()
        block = bytearray(b"1" * (48 * MIB))
        deadline = time.monotonic() + 30
        while growth.bytes() < 40 * MIB:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert growth.bytes() < 400 * MIB
        del block
        assert growth.bytes() > 40 * MIB, "the peak stays, though the block is gone"
        growth.begin()
        assert growth.bytes() < 40 * MIB
    finally:
        growth.close()
    assert growth.ended(10)
