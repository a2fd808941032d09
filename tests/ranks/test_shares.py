"""Each rank's store has its share of the bytes, and moves its share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import bit_equality
import pytest
import rank_programs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("width", [512, 256])  # In 256 x 256 elements there is one block, which is rank 0's.
def test_with_the_least_memory_the_last_layers_buffer_serves_others(width: int, tmp_path: Path) -> None:
    (whole,) = rank_programs.run("flush_each_step", 1, tmp_path, "whole", width=width)
    for weights in rank_programs.run("flush_each_step", 2, tmp_path, width=width):
        assert bit_equality.difference(weights, whole) is None


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_a_rank_are_a_share_of_one_process(ranks: int, tmp_path: Path) -> None:
    (whole,) = rank_programs.run("measure", 1, tmp_path, "whole", least=False)
    for shared in rank_programs.run("measure", ranks, tmp_path, least=False):
        # Weights for forward and backward passes (the last layer's stay between both), and gradients.
        assert shared.pop("network_bytes_sent") == 3 * (4 + 3 + 4) * 4 * 1024**2 * (ranks - 1) // ranks
        for name, nbytes in whole.items():
            assert nbytes > 0 and abs(shared[name] * ranks / nbytes - 1) < 0.03, name


def test_with_the_least_memory_a_rank_moves_no_more_than_its_share(tmp_path: Path) -> None:
    (whole,) = rank_programs.run("measure", 1, tmp_path, "whole", least=True)
    for shared in rank_programs.run("measure", 2, tmp_path, least=True):
        assert whole["ssd_bytes_read"] > 2e8
        assert all(2 * shared[name] <= 1.03 * nbytes for name, nbytes in whole.items())
