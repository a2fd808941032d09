"""The blocks of tables."""

from __future__ import annotations

import pytest
import torch

from memascend.layout.tables import MIB, RowBlocks, block_rows
from memascend.vocabulary.tables import MemoryTable, table_of


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [512, 576, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 8192, 12288])
def test_blocks_of_usual_widths_are_whole_mib(width: int, itemsize: int) -> None:
    rows_bytes = width * itemsize
    block = block_rows(width, itemsize) * rows_bytes
    assert 4 * MIB <= block <= 12 * MIB
    assert block % MIB == 0 or MIB // torch.gcd(torch.tensor(rows_bytes), torch.tensor(MIB)) * rows_bytes > 12 * MIB
    assert block % 4096 == 0


def test_blocks_of_odd_widths_are_whole_pages() -> None:
    assert block_rows(1000, 2) * 2000 % 4096 == 0
    assert block_rows(4097, 4) * 4097 * 4 % 4096 == 0
    assert block_rows(1024, 2) == 4096


def test_blocks_of_a_table() -> None:
    blocks = RowBlocks(rows=10_000, width=1024, itemsize=2)
    assert list(blocks) == [(0, 4096), (4096, 4096), (8192, 1808)]
    assert (blocks.height, blocks.elements, blocks.nbytes) == (4096, 4096 * 1024, 8 * MIB)
    assert RowBlocks(rows=100, width=1024, itemsize=2).nbytes == 100 * 2048


def test_a_memory_table_yields_all_rows_and_looks_up_copies() -> None:
    weight = torch.nn.Parameter(torch.randn(10, 4))
    table = MemoryTable(weight, 4)
    assert [(first, block.shape[0]) for first, block in table.blocks()] == [(0, 4), (4, 4), (8, 2)]
    assert torch.equal(torch.cat([block for _, block in table.blocks()]), weight)
    rows = table.look_up(torch.tensor([1, 7]))
    assert torch.equal(rows, weight[[1, 7]])
    before = table.version
    with torch.no_grad():
        weight.mul_(2)
    assert table.version != before
    assert isinstance(table_of(weight), MemoryTable)
