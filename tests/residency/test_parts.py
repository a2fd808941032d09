"""Parts of tensors through the native runtime: gradients in ranges, updates in slots, blocks and rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from memascend._memascend import GRADIENT_BLOCK, Rule, Runtime, StepScalars, step_host

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
        opened.append(Runtime(paths, [("weights", MIB, 1)], [], *sizes, allocator="pageable", **options))
        return opened[-1]

    yield open_runtime
    for each in opened:
        each.close(keep=False)


def read_gradient(runtime: Runtime, gradient: int, like: torch.Tensor) -> torch.Tensor:
    target = torch.empty_like(like)
    runtime.read_gradient(gradient, target.data_ptr(), target.nbytes)
    return target


def test_a_gradient_in_ranges_is_the_one_captured_whole(runtime: Callable[..., Runtime]) -> None:
    native = runtime()
    unit = native.add_unit()
    values = torch.randn(5 * GRADIENT_BLOCK + 77, generator=torch.Generator().manual_seed(1))
    whole = native.create_gradient(unit, "whole", "float32", values.numel())
    ranges = native.create_gradient(unit, "ranges", "float32", values.numel())
    for accumulate in (False, True, True):
        captured = native.capture(whole, 0, values.data_ptr(), values.numel(), accumulate)
        coming = native.begin_gradient(ranges, accumulate)
        for part in values.split(GRADIENT_BLOCK + 1234):
            coming.add(part.data_ptr(), part.numel())
        assert coming.end() == captured
        assert read_gradient(native, ranges, values).equal(read_gradient(native, whole, values))


def test_a_gradient_in_ranges_that_ends_otherwise(runtime: Callable[..., Runtime]) -> None:
    native = runtime()
    unit = native.add_unit()
    values = torch.ones(GRADIENT_BLOCK + 5)
    gradient = native.create_gradient(unit, "ranges", "float32", values.numel())
    coming = native.begin_gradient(gradient, False)
    coming.add(values.data_ptr(), GRADIENT_BLOCK)
    with pytest.raises(ValueError, match="5 elements are left"):
        coming.end()
    with pytest.raises(ValueError, match="5 are left"):
        coming.add(values.data_ptr(), 6)
    del coming
    assert not read_gradient(native, gradient, values).any(), "an abandoned capture leaves nothing"
    coming = native.begin_gradient(gradient, False)
    coming.add(values.data_ptr(), values.numel())
    coming.end()
    with pytest.raises(ValueError, match="has ended"):
        coming.end()
    assert read_gradient(native, gradient, values).equal(values)
    coming = native.begin_gradient(gradient, False)
    native.close(keep=False)
    with pytest.raises(Exception, match="closed"):
        coming.add(values.data_ptr(), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_without_a_buffer_is_the_one_in_memory(runtime: Callable[..., Runtime], dtype: torch.dtype) -> None:
    native = runtime()
    name = str(dtype).removeprefix("torch.")
    rule = Rule("adamw", "float32", name, True)
    scalars = StepScalars.adamw(1e-2, (0.9, 0.95), 1e-8, 0.1, 1, decoupled=True, grad_scale=1.0, maximize=False, seed=0)
    unit, numel = native.add_unit(), 2 * GRADIENT_BLOCK + 4096
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(numel, generator=generator).to(dtype)
    gradient = torch.randn(numel, generator=generator).to(dtype)
    tensor = native.create_tensor("table", weights.nbytes)
    native.write(tensor, weights.data_ptr(), weights.nbytes)
    planes = [
        SimpleNamespace(plane=plane, id=native.create_tensor(plane.name, plane.bytes(numel)), written=False)
        for plane in rule.planes
    ]
    captured = native.create_gradient(unit, "gradient", name, numel)
    native.capture(captured, 0, gradient.data_ptr(), numel, False)
    fresh = [True] * len(planes)
    segment = SimpleNamespace(start=0, numel=numel, rule=rule, scalars=scalars, fresh=fresh, host=None)
    update = SimpleNamespace(
        dtype=name, numel=numel, weight_offset=0, planes=planes, gradient=captured, segments=[segment]
    )
    native.fetch(unit, [(tensor, 0, native.tensor_bytes(tensor))], None, [update]).wait()
    native.wait_unit(unit)

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
    native.read(tensor, found.data_ptr(), found.nbytes)
    assert found.view(torch.uint8).equal(weights.view(torch.uint8))
    for plane, state in zip(planes, states, strict=True):
        found = torch.empty_like(state)
        native.read(plane.id, found.data_ptr(), found.nbytes)
        assert found.equal(state), plane.plane.name
