"""Tables of tokens that a program resizes while they are on SSD: refused, with the remedy."""

from __future__ import annotations

from typing import Any

from memascend.errors import MemascendError


def resize(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any
) -> Any:
    """Stand for `resize_token_embeddings` of an offloaded model of transformers.

    Returns the table where it has that many rows. Raises MemascendError for any other number.
    """
    table = model.get_input_embeddings()
    rows = table.weight.shape[0]
    wanted = rows if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted == rows:
        return table
    if wanted < rows:
        raise MemascendError(
            f"the table of tokens is on SSD with {rows} rows, which have room for {wanted} tokens: leave "
            "resize_token_embeddings out. For a table of that many rows give memascend.from_pretrained(..., "
            f"resize_token_embeddings={wanted})"
        )
    raise MemascendError(
        f"the table of tokens is on SSD with {rows} rows and cannot have {wanted}: resize the model before "
        f"memascend.offload, or give memascend.from_pretrained(..., resize_token_embeddings={wanted})"
    )
