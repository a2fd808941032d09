"""One JSON object of the data: what of it is trained on."""

from __future__ import annotations

import json

from memascend.errors import first_line


class NotARecord(ValueError):
    """Bytes hold no object with a text; `is_object` says whether it is one without."""

    def __init__(self, message: str, *, is_object: bool = False) -> None:
        """Take what is said after the place of the record."""
        super().__init__(message)
        self.is_object = is_object


def record_text(raw: bytes, text_field: str) -> str:
    """Return the text of a record.

    Raises NotARecord for something else.
    """
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:  # the latter for what is nested too deeply
        raise NotARecord(f"is not JSON: {first_line(error)}") from error
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise NotARecord(
            f"has no text in field {text_field!r}: name it with --text-field", is_object=isinstance(record, dict)
        )
    return text
