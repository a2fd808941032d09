"""Pieces of HTML: text from anywhere, escaped, and tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is HTML already: `escape` leaves it as it is."""

    __slots__ = ()


def escape(text: object) -> str:
    """Return text as HTML that shows it, in an element or in a quoted attribute."""
    return text if isinstance(text, Markup) else html.escape(str(text))


def table(caption: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> Markup:
    """Return a table with a row of headings (none for an empty `header`); the first cell of each row heads the row."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    thead = f"<thead><tr>{head}</tr></thead>" if head else ""
    return Markup(f"<table><caption>{escape(caption)}</caption>{thead}<tbody>{body}</tbody></table>")
