"""The record that the native side keeps of a step: every byte, every flush, and its time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from durable_run import LEAST, Run, build

import memascend
from memascend._memascend import ForTests
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("engine", ["ring", "threads"])
def test_every_request_flush_and_kernel_is_recorded(tmp_path: Path, engine: str) -> None:
    stores = [tmp_path / "a", tmp_path / "b"]
    options = LEAST | {"store": stores, "keep_store": False, "durability": "step", "engine": engine}
    model = memascend.offload(build("llama"), host_memory="16MiB", **options)
    try:
        run = Run(model, "llama").go(2)
        memascend.flush(model)
        runtime = offload_of(model).runtime
        before, begun = memascend.stats(model), time.perf_counter_ns()
        ForTests.begin_recording(runtime, 1_000_000)
        run.go(4, 2)
        memascend.flush(model)
        spans, missed = ForTests.end_recording(runtime)
        elapsed, after = time.perf_counter_ns() - begun, memascend.stats(model)
        assert missed == 0
        for volume in (0, 1):
            for activity, counter in (("read", "bytes_read"), ("write", "bytes_written")):
                moved = sum(nbytes for kind, on, nbytes, *_ in spans if (kind, on) == (activity, volume))
                counted = [stats["volumes"][volume][counter] for stats in (before, after)]
                assert 0 < moved == counted[1] - counted[0]
            # Each of the two steps was made durable.
            for activity in ("flush", "manifest"):
                assert sum((kind, on) == (activity, volume) for kind, on, *_ in spans) >= 2
        assert any(kind == "kernel" for kind, *_ in spans)
        assert all(elapsed >= began >= ended >= 0 for *_, began, ended in spans)
        # A recording that is too short says so, and one that was ended records nothing.
        ForTests.begin_recording(runtime, 1)
        run.go(5, 4)
        memascend.flush(model)
        spans, missed = ForTests.end_recording(runtime)
        assert len(spans) == 3 and missed > 0
        run.go(6, 5)
        assert ForTests.end_recording(runtime) == ([], 0)
    finally:
        memascend.close(model)
