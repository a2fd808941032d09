"""Every element of a tensor is one rank's, and no gradient block is divided."""

from __future__ import annotations

import pytest

from memascend._memascend import GRADIENT_BLOCK
from memascend.layout.shards import PAGE_ELEMENTS, Shard


@pytest.mark.core
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("elements", [1, 2048, GRADIENT_BLOCK, GRADIENT_BLOCK + 1, 5 * GRADIENT_BLOCK, 1_000_003])
def test_shards_have_every_element_once(elements: int, ranks: int) -> None:
    for packed in (True, False) if elements <= GRADIENT_BLOCK else (False,):
        shards = [Shard.of(elements, packed, rank, ranks) for rank in range(ranks)]
        assert len({shard.elements for shard in shards}) == 1
        assert shards[0].elements % PAGE_ELEMENTS == 0
        for start, numel in ((0, elements), (elements // 3, elements - elements // 3)):
            seen = []
            for rank, shard in enumerate(shards):
                first, own, count = shard.part(start, numel)
                assert (first, own, count) == shards[0].part(start, numel, rank)
                assert own + count <= shard.elements
                assert not count or rank * shard.elements + own == start + first
                seen += range(first, first + count)
                # A block of gradients is one rank's.
                assert elements <= GRADIENT_BLOCK or shard.elements % GRADIENT_BLOCK == 0
            assert seen == list(range(numel))
