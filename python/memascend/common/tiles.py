"""How many tokens a tile of a sequence has."""

from __future__ import annotations

#: `tile_tokens` for tiles of a share of the tokens that a layer computes, and no fewer tokens than these.
AUTO = "auto"
AUTO_SHARE, AUTO_TOKENS_MIN = 1 / 32, 1024


def check_tile_tokens(tokens: int | str | None) -> None:
    """Raise ValueError for tiles that cannot be: neither a number of tokens, nor "auto", nor None."""
    if tokens is None or tokens == AUTO:
        return
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tile_tokens={tokens!r} is neither a whole number of at least 1 nor 'auto'")


def parse_tile_tokens(text: int | str | None) -> int | str | None:
    """Return the tokens of a tile; a number may be a string.

    Raises ValueError as `check_tile_tokens` does.
    """
    tokens = int(text) if isinstance(text, str) and text.isdecimal() else text
    check_tile_tokens(tokens)
    return tokens


def tile_of(tile_tokens: int | str, tokens: int) -> int:
    """Return how many tokens a tile has of a call with so many."""
    if isinstance(tile_tokens, int):
        return tile_tokens
    share = max(1, int(tokens * AUTO_SHARE))
    return max(AUTO_TOKENS_MIN, 1 << (share - 1).bit_length())
