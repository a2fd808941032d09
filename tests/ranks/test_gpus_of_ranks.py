"""Ranks on real devices: two on one device, or on one each where there are two."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import bit_equality
import pytest
import rank_programs
import rank_runs
import torch

import memascend

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activations", ["recompute", "host"])
@pytest.mark.parametrize("device_memory", ["1GiB", "least"])
def test_ranks_are_micro_batches_of_one_process(device_memory: str, activations: str, tmp_path: Path) -> None:
    training = {"dtype": "bfloat16", "micro": 2}
    computing = {"device_memory": device_memory, "activations": activations}
    alone = rank_runs.offload(rank_runs.build("bfloat16"), tmp_path / "alone", device="cuda:0", **computing)
    try:
        expected = rank_runs.Run(alone, 4, range(4)).go(2).result()
    finally:
        # Left open, it would limit the device memory of later tests.
        memascend.close(alone)
    losses: dict[int, float] = {}
    for result in rank_programs.run("on_gpus", 2, tmp_path, doing="train", computing=computing, **training):
        assert "error" not in result, result
        losses |= result["losses"]
        assert bit_equality.difference(result["norms"], expected["norms"]) is None
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
    assert losses == expected["losses"]


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this PyTorch has no NCCL")
@pytest.mark.skipif("REHEARSAL" in os.environ, reason="the stand-in device (tests/rehearsal) has no driver for NCCL")
def test_a_group_of_nccl_alone_is_refused(tmp_path: Path) -> None:
    for result in rank_programs.run("with_nccl_alone", 2, tmp_path):
        assert "use torch.distributed.init_process_group('cpu:gloo,cuda:nccl')" in result["error"]
