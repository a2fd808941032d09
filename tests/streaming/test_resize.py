"""Memory of the native runtime that grows and shrinks."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from memascend._memascend import GRADIENT_BLOCK, Rule, Runtime, StepScalars, step_host
from memascend.memory_plan.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
CHUNK = 4 * GRADIENT_BLOCK
STATES = 10 * GRADIENT_BLOCK


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    """Open a runtime whose units, staging and states grow and shrink."""
    opened: list[Runtime] = []

    def open_runtime(units: list[Any], engine: str = "auto", **most: int) -> Runtime:
        sizes = (CHUNK, 4, GRADIENT_BLOCK, 14 * GRADIENT_BLOCK, 2)
        arena = Arena(units, [], *sizes, states_bytes=STATES, **most)
        opened.append(Runtime([tmp_path / f"store{len(opened)}"], arena, engine=engine, allocator="pageable"))
        return opened[-1]

    yield open_runtime
    for each in opened:
        each.close(keep=False)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


def wait_until_left(native: Runtime) -> None:
    deadline = time.monotonic() + 30
    while native.stats()["host_bytes_leaving"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_buffers_come_and_go(runtime: Callable[..., Runtime], engine: str) -> None:
    units = [("weights", 32 * MIB, 1, 6), ("head", 2 * MIB, 1)]
    native = runtime(units, chunk_count_max=8, states_count=0, states_count_max=3, engine=engine)
    fixed = 2 * MIB + 2 * 14 * GRADIENT_BLOCK
    assert native.stats()["host_bytes_reserved"] == fixed + 32 * MIB + 4 * CHUNK
    native.memory.resize([(32 * MIB, 6)], chunk_count=8, states_count=3)
    assert native.stats()["host_bytes_reserved"] == fixed + 6 * 32 * MIB + 8 * CHUNK + 3 * STATES
    leases = [native.memory.lease_unit(32 * MIB) for _ in range(6)]
    assert native.memory.lease_unit(32 * MIB) is None
    for index, lease in enumerate(leases):
        torch.frombuffer(lease, dtype=torch.uint8).fill_(index + 1)
    full = resident_bytes()
    native.memory.resize([(32 * MIB, 2)], chunk_count=4, states_count=0)
    assert native.stats()["host_bytes_leaving"] == 4 * 32 * MIB
    del lease
    leases = leases[4:]
    wait_until_left(native)
    assert native.stats()["host_bytes_reserved"] == fixed + 2 * 32 * MIB + 4 * CHUNK
    assert full - resident_bytes() > 120 * MIB
    for index, lease in enumerate(leases):
        assert lease is not None
        assert torch.frombuffer(lease, dtype=torch.uint8).eq(index + 5).all()
    assert native.memory.lease_unit(32 * MIB) is None
    native.memory.resize([(32 * MIB, 3)])
    assert native.memory.lease_unit(32 * MIB) is not None


def test_what_was_not_reserved_is_refused(runtime: Callable[..., Runtime]) -> None:
    native = runtime([("weights", MIB, 1, 2), ("head", 2 * MIB, 1)])
    for units in ([(MIB, 3)], [(2 * MIB, 2)], [(3 * MIB, 1)]):
        with pytest.raises(ValueError, match="at most"):
            native.memory.resize(units)
    with pytest.raises(ValueError, match="at most 4"):
        native.memory.resize(chunk_count=5)
    with pytest.raises(ValueError, match="at most 0"):
        native.memory.resize(states_count=1)
    native.memory.resize([(MIB, 2)])
    native.close(keep=False)
    with pytest.raises(RuntimeError, match="closed"):
        native.memory.resize([(MIB, 1)])


def test_states_are_let_go_and_their_buffers_come_back(runtime: Callable[..., Runtime]) -> None:
    native = runtime([("weights", MIB, 1)], states_count=3, states_count_max=3, chunk_count_max=20)
    # Then gradients need not go to the drives.
    native.memory.resize(chunk_count=20)
    unit, numel = native.units.add_unit(), 2 * GRADIENT_BLOCK + 4096
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(numel, generator=generator)
    rule = Rule("adamw", "float32", "float32", True)
    tensor = native.store.create_tensor("weight", weights.nbytes)
    native.store.write(tensor, weights.data_ptr(), weights.nbytes)
    planes = [
        SimpleNamespace(plane=plane, id=native.store.create_tensor(plane.name, plane.bytes(numel)), written=False)
        for plane in rule.planes
    ]
    gradient = native.gradients.create_gradient(unit, "gradient", "float32", numel)
    states = [torch.zeros(plane.bytes(numel), dtype=torch.uint8) for plane in rule.planes]
    for step, kept in enumerate((numel, numel, 2 * GRADIENT_BLOCK, GRADIENT_BLOCK, 0, numel), start=1):
        if step > 1:
            native.units.release_states(unit, [(plane.id, plane.plane.bytes(kept)) for plane in planes]).wait()
            native.memory.resize(states_count=-(-kept // GRADIENT_BLOCK))
            assert native.stats()["host_bytes_leaving"] == 0
        values = torch.randn(numel, generator=generator)
        native.gradients.capture(gradient, 0, values.data_ptr(), numel, False)
        betas, first = (0.9, 0.95), step == 1
        scalars = StepScalars.adamw(
            1e-2, betas, 1e-8, 0.1, step, decoupled=True, grad_scale=1.0, maximize=False, seed=0
        )
        fresh = [first] * len(planes)
        segment = SimpleNamespace(
            start=0, first_element=0, numel=numel, rule=rule, scalars=scalars, fresh=fresh, host=None, factors=None
        )
        update = SimpleNamespace(
            dtype="float32",
            numel=numel,
            weight_offset=0,
            planes=planes,
            gradient=gradient,
            segments=[segment],
            kept_elements=kept,
            write_through=False,
        )
        before = native.stats()["ssd_bytes_read"]
        native.units.fetch(unit, [(tensor, 0, native.store.tensor_bytes(tensor))], None, [update]).wait()
        native.units.wait_unit(unit)
        read = native.stats()["ssd_bytes_read"] - before - native.store.tensor_bytes(tensor)
        # The states that were let go come from the drives, and no others.
        lacking = 0 if first else numel - min(kept, 0 if step == 6 else numel)
        assert read == sum(plane.plane.bytes(lacking) for plane in planes)
        addresses = [state.data_ptr() for state in states]
        step_host(rule, numel, weights.data_ptr(), addresses, values.data_ptr(), scalars, 1)
        for plane, state in zip(planes, states, strict=True):
            plane.written = True
            found = torch.empty_like(state)
            native.store.read(plane.id, found.data_ptr(), found.nbytes)
            assert found.equal(state), f"{plane.plane.name} after step {step}"
    found = torch.empty_like(weights)
    native.store.read(tensor, found.data_ptr(), found.nbytes)
    assert found.equal(weights)
