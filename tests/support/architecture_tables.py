"""Tables in small models: every embedding and head of a page is one, and it is seen how they are used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import small_models

from memascend.layout import tables
from memascend.memory_plan import host
from memascend.streaming.tables import OffloadedTable
from memascend.vocabulary import logits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from memascend.layout.units import Unit
    from memascend.memory_plan.classes import BufferClass

#: Most embeddings of small models are as large.
TABLE_BYTES_MIN = 4096
#: Six blocks of 64 rows, the last of 8.
TOKENS = 328


def force() -> None:
    """Make tables of the embeddings and heads of small models, in blocks of a few pages. For good: in a child."""
    small_models.enlarge_vocabularies(TOKENS)
    tables.TABLE_BYTES_MIN = TABLE_BYTES_MIN
    tables.BLOCK_BYTES = 2 * TABLE_BYTES_MIN
    tables.BLOCK_BYTES_MAX = 0
    classes_apart = host.classes_apart

    def classes_but_for_tables(units: Sequence[Unit]) -> list[BufferClass]:
        return [] if all(unit.is_table for unit in units) else classes_apart(units)

    host.classes_apart = classes_but_for_tables  # no budget has room for a table


@dataclass
class Seen:
    """How the tables of a model were used, by name. Make one in a process of its own."""

    tables: set[str] = field(default_factory=set)
    #: How often rows were looked up, and blocks read, on the store.
    lookups: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    #: How many losses were computed in pieces, in memory or offloaded.
    losses: int = 0
    #: Tables that were in use as a whole.
    whole: set[str] = field(default_factory=set)
    #: Relative distance of the first loss in pieces from the loss of whole logits.
    loss_apart: float = 0.0
    #: The most that a gradient of it is apart, relative to the largest gradient.
    gradient_apart: float = 0.0

    def __post_init__(self) -> None:
        look_up, blocks, loss_in_pieces = OffloadedTable.look_up, OffloadedTable.blocks, logits.loss_in_pieces

        def counted_look_up(table: OffloadedTable, indices: torch.Tensor) -> torch.Tensor:
            self._count(self.lookups, table)
            return look_up(table, indices)

        def counted_blocks(table: OffloadedTable) -> Iterator[tuple[int, torch.Tensor]]:
            self._count(self.reads, table)
            return blocks(table)

        def counted_loss(*args: Any) -> torch.Tensor:
            self.losses += 1
            return loss_in_pieces(*args)

        logits.loss_in_pieces = counted_loss
        OffloadedTable.look_up = counted_look_up  # type: ignore[method-assign]
        OffloadedTable.blocks = counted_blocks  # type: ignore[method-assign]

    @staticmethod
    def _count(counts: Counter[str], table: OffloadedTable) -> None:
        if table._streamer.is_streamed(table._place.tensor.unit):
            counts[table._place.name] += 1

    def expect(self, model: nn.Module) -> None:
        """Take the names of the tables that a model in memory will have offloaded."""
        found = tables.find_tables(model, "auto")
        self.tables = {name for name, parameter in model.named_parameters() if parameter in found}

    def note(self, model: nn.Module) -> None:
        """Note the tables of an offloaded model that were in use as a whole."""
        session: Any = model._memascend
        self.whole |= {unit.name for unit in session.streamer.tables.named}

    def compare(self, fused: Mapping[str, torch.Tensor | None], plain: Mapping[str, torch.Tensor | None]) -> None:
        """Note how far a model with the loss in pieces is from the same one with whole logits."""
        gradients = {name: value for name, value in plain.items() if "step 0: gradient" in name and value is not None}
        largest = max(float(gradient.double().norm()) for gradient in gradients.values())
        for name, theirs in gradients.items():
            ours = fused[name]
            assert ours is not None, f"{name} is missing from the loss in pieces"
            self.gradient_apart = max(self.gradient_apart, float((ours.double() - theirs.double()).norm()) / largest)
        ours, theirs = fused["step 0: loss"], plain["step 0: loss"]
        assert ours is not None and theirs is not None
        self.loss_apart = float((ours.double() - theirs.double()).abs() / theirs.double().abs())
