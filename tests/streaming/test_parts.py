"""Parts of tensors through the native runtime: gradients in ranges, updates in slots, blocks and rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from memascend._memascend import GRADIENT_BLOCK, Projection, Rule, Runtime, StepScalars, step_host
from memascend.memory_plan.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
CHUNKS = 4


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    """Open a runtime with a few staging chunks of one gradient block of float32, and two update slots."""
    opened: list[Runtime] = []

    def open_runtime(volumes: int = 1, **options: Any) -> Runtime:
        paths = [tmp_path / f"volume{index}" for index in range(volumes)]
        chunk = 4 * GRADIENT_BLOCK
        sizes = (chunk, CHUNKS, GRADIENT_BLOCK, 12 * GRADIENT_BLOCK, 2)
        opened.append(Runtime(paths, Arena([("weights", MIB, 1)], [], *sizes), allocator="pageable", **options))
        return opened[-1]

    yield open_runtime
    for each in opened:
        each.close(keep=False)


def read_gradient(runtime: Runtime, gradient: int, like: torch.Tensor) -> torch.Tensor:
    target = torch.empty_like(like)
    runtime.gradients.read_gradient(gradient, target.data_ptr(), target.nbytes)
    return target


def test_no_part_of_a_closed_runtime_is_used(runtime: Callable[..., Runtime]) -> None:
    native = runtime()
    memory, store, gradients, projections = native.memory, native.store, native.gradients, native.projections
    units, unit = native.units, native.units.add_unit()
    assert store.generation == 0 and memory.chunks_in_use == 0 and not native.closed
    native.close(keep=False)
    calls: list[Callable[[], object]] = [
        lambda: memory.lease_unit(MIB),
        lambda: store.generation,
        lambda: store.commit("{}", []),
        lambda: units.fetch(unit, [], None, []),
        lambda: gradients.create_gradient(unit, "gradient", "float32", 4096),
        lambda: projections.take_projected(Projection(8, 8, 2, 0, 0), 0),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="the offloaded model was closed"):
            call()
    assert native.closed


def test_a_gradient_in_ranges_is_the_one_captured_whole(runtime: Callable[..., Runtime]) -> None:
    native = runtime()
    unit = native.units.add_unit()
    values = torch.randn(5 * GRADIENT_BLOCK + 77, generator=torch.Generator().manual_seed(1))
    whole = native.gradients.create_gradient(unit, "whole", "float32", values.numel())
    ranges = native.gradients.create_gradient(unit, "ranges", "float32", values.numel())
    for accumulate in (False, True, True):
        captured = native.gradients.capture(whole, 0, values.data_ptr(), values.numel(), accumulate)
        coming = native.gradients.begin_gradient(ranges, accumulate)
        for part in values.split(GRADIENT_BLOCK + 1234):
            coming.add(part.data_ptr(), part.numel())
        assert coming.end() == captured
        assert read_gradient(native, ranges, values).equal(read_gradient(native, whole, values))


def test_a_gradient_in_ranges_that_ends_otherwise(runtime: Callable[..., Runtime]) -> None:
    native = runtime()
    unit = native.units.add_unit()
    values = torch.ones(GRADIENT_BLOCK + 5)
    gradient = native.gradients.create_gradient(unit, "ranges", "float32", values.numel())
    coming = native.gradients.begin_gradient(gradient, False)
    coming.add(values.data_ptr(), GRADIENT_BLOCK)
    with pytest.raises(ValueError, match="5 elements are left"):
        coming.end()
    with pytest.raises(ValueError, match="5 are left"):
        coming.add(values.data_ptr(), 6)
    del coming
    assert not read_gradient(native, gradient, values).any(), "an abandoned capture leaves nothing"
    coming = native.gradients.begin_gradient(gradient, False)
    coming.add(values.data_ptr(), values.numel())
    coming.end()
    with pytest.raises(ValueError, match="has ended"):
        coming.end()
    assert read_gradient(native, gradient, values).equal(values)
    coming = native.gradients.begin_gradient(gradient, False)
    native.close(keep=False)
    with pytest.raises(Exception, match="closed"):
        coming.add(values.data_ptr(), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_without_a_buffer_is_the_one_in_memory(runtime: Callable[..., Runtime], dtype: torch.dtype) -> None:
    native = runtime()
    name = str(dtype).removeprefix("torch.")
    rule = Rule("adamw", "float32", name, True)
    scalars = StepScalars.adamw(1e-2, (0.9, 0.95), 1e-8, 0.1, 1, decoupled=True, grad_scale=1.0, maximize=False, seed=0)
    unit, numel = native.units.add_unit(), 2 * GRADIENT_BLOCK + 4096
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(numel, generator=generator).to(dtype)
    gradient = torch.randn(numel, generator=generator).to(dtype)
    tensor = native.store.create_tensor("table", weights.nbytes)
    native.store.write(tensor, weights.data_ptr(), weights.nbytes)
    planes = [
        SimpleNamespace(plane=plane, id=native.store.create_tensor(plane.name, plane.bytes(numel)), written=False)
        for plane in rule.planes
    ]
    captured = native.gradients.create_gradient(unit, "gradient", name, numel)
    native.gradients.capture(captured, 0, gradient.data_ptr(), numel, False)
    fresh = [True] * len(planes)
    segment = SimpleNamespace(
        start=0, first_element=0, numel=numel, rule=rule, scalars=scalars, fresh=fresh, host=None, factors=None
    )
    update = SimpleNamespace(
        dtype=name,
        numel=numel,
        weight_offset=0,
        planes=planes,
        gradient=captured,
        segments=[segment],
        kept_elements=0,
        write_through=True,
    )
    native.units.fetch(unit, [(tensor, 0, native.store.tensor_bytes(tensor))], None, [update]).wait()
    native.units.wait_unit(unit)

    states = [torch.zeros(plane.bytes(numel), dtype=torch.uint8) for plane in rule.planes]
    step_host(
        rule,
        numel,
        weights.data_ptr(),
        [state.data_ptr() for state in states],
        gradient.data_ptr(),
        scalars,
        1,
    )
    found = torch.empty_like(weights)
    native.store.read(tensor, found.data_ptr(), found.nbytes)
    assert found.view(torch.uint8).equal(weights.view(torch.uint8))
    for plane, state in zip(planes, states, strict=True):
        found = torch.empty_like(state)
        native.store.read(plane.id, found.data_ptr(), found.nbytes)
        assert found.equal(state), plane.plane.name


# ---- blocks and rows ----------------------------------------------------------------------------------------


def read_rows(runtime: Runtime, tensor: Any, width: int, rows: torch.Tensor, compare: bool = False) -> torch.Tensor:
    target = torch.empty((len(rows), width))
    runtime.store.read_rows(tensor, width * 4, rows.data_ptr(), len(rows), target.data_ptr(), compare)
    return target


@pytest.mark.parametrize("volumes", [1, 3])
def test_a_table_is_written_by_blocks_and_read_by_blocks_and_rows(
    runtime: Callable[..., Runtime], volumes: int
) -> None:
    native = runtime(volumes)
    unit, rows, width, block = native.units.add_unit(), 3000, 700, 512  # a block is whole pages
    table = torch.randn((rows, width), generator=torch.Generator().manual_seed(1))
    tensor = native.store.create_tensor("table", table.nbytes)
    # Filled twice, the second time while a generation holds the first.
    for factor in (1.0, 2.0):
        table *= factor
        for start in range(0, rows, block):
            part = table[start : start + block]
            lease = native.memory.lease_outside(part.nbytes)
            torch.frombuffer(lease, dtype=torch.float32)[: part.numel()].copy_(part.flatten())
            native.units.write_part(unit, tensor, start * width * 4, part.nbytes, lease)
        native.units.wait_unit(unit)
        native.store.commit("{}", []).wait()
    under_way = []
    for start in range(0, rows, block):
        part = table[start : start + block]
        lease = native.memory.lease_outside(part.nbytes)
        under_way.append((native.units.read_part(unit, tensor, start * width * 4, part.nbytes, lease), lease, part))
    for ticket, lease, part in under_way:
        ticket.wait()
        assert torch.frombuffer(lease, dtype=torch.float32)[: part.numel()].view_as(part).equal(part)

    generator = torch.Generator().manual_seed(2)
    for count, compare in [(count, compare) for count in (0, 1, 40, 2900, rows) for compare in (False, True, True)]:
        few = torch.randperm(rows, generator=generator)[:count].sort().values
        assert read_rows(native, tensor, width, few, compare).equal(table[few])


def test_parts_and_rows_that_a_tensor_does_not_have(runtime: Callable[..., Runtime]) -> None:
    native = runtime()
    unit, size = native.units.add_unit(), 10 * 4096
    tensor, lease = native.store.create_tensor("table", size), native.memory.lease_outside(2 * 4096)
    native.store.write(tensor, torch.zeros(size, dtype=torch.uint8).data_ptr(), size)
    for offset, count, says in [(100, 4096, "multiple"), (9 * 4096, 4097, "leave"), (0, 3 * 4096, "does not fit")]:
        with pytest.raises(ValueError, match=says):
            native.units.read_part(unit, tensor, offset, count, lease)
        with pytest.raises(ValueError, match=says):
            native.units.write_part(unit, tensor, offset, count, lease)
    with pytest.raises(ValueError, match="not whole pages"):
        native.units.write_part(unit, tensor, 0, 100, lease)
    for rows in ([5, 10], [-1, 2], [3, 3], [3, 2]):
        with pytest.raises(ValueError, match="row"):
            read_rows(native, tensor, 1024, torch.tensor(rows))
    native.units.wait_unit(unit)


def test_memory_outside_is_counted_until_its_last_view_is_gone(runtime: Callable[..., Runtime]) -> None:
    native = runtime()

    def outside() -> tuple[int, int]:
        stats = native.stats()
        return stats["host_bytes_outside"], stats["host_bytes_outside_most"]

    assert outside() == (0, 0)
    first, second = native.memory.lease_outside(5000), native.memory.lease_outside(MIB)
    assert (len(first), first.address % 4096) == (8192, 0)
    view = torch.frombuffer(second, dtype=torch.uint8)[7:]
    del first, second
    assert outside() == (MIB, MIB + 8192)
    view.fill_(1)
    del view
    assert outside() == (0, MIB + 8192)
    assert native.stats()["host_bytes_in_use"] == 0
