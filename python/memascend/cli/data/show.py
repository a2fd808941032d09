"""`--show-data N`: the first sequences of a run as text, and which parts are trained on."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend.cli.data.blocks import TokenBlocks
    from memascend.cli.data.tokens import Tokenizer

#: Characters of a part that are shown, half of them at its end.
CHARACTERS = 240


def shown(blocks: TokenBlocks, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """Yield the lines on the `count` sequences that come first, as many as there are."""
    for position in range(min(count, len(blocks))):
        row = blocks.row(blocks.number(position))
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        # The first token of a sequence is predicted from nothing.
        trained = [label >= 0 and index > 0 for index, label in enumerate(labels)]
        yield f"sequence {position + 1} of {len(blocks):,}: {len(ids)} tokens, {sum(trained)} of them trained on"
        parts = groupby(zip(ids, trained, strict=True), key=lambda one: one[1])
        for is_trained, part in parts:
            text = repr(tokenizer.shown([token for token, _ in part]))[1:-1]
            if len(text) > CHARACTERS:
                text = f"{text[: CHARACTERS // 2]} ... {text[-CHARACTERS // 2 :]}"
            yield f"  {'trained' if is_trained else 'seen':<8}| {text}"
