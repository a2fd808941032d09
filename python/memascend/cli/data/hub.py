"""Data sets of the Hugging Face hub as sources: `org/name`, `org/name:split` or `org/name:configuration:split`.

Rows are streamed by `datasets`, and put on disk one after the other.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.cli.data.columns import plain
from memascend.errors import DataError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NAMED = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?::(?P<one>[^:/]+))?(?::(?P<other>[^:/]+))?")
#: How a file's name ends, which is not there.
_SUFFIX = re.compile(r"\.[A-Za-z]\w*$")
#: The split that is taken where none is named.
SPLIT = "train"


@dataclass(frozen=True)
class HubData:
    """A data set of the hub, or a directory of the same form."""

    name: str
    configuration: str | None
    split: str

    @staticmethod
    def of(text: str) -> HubData | None:
        """Return the data set of the hub that a word of --data names, or None for another form."""
        named = _NAMED.fullmatch(text)
        if named is None or _SUFFIX.search(text):
            return None
        configuration, split = (named["one"], named["other"]) if named["other"] else (None, named["one"] or SPLIT)
        return HubData(named["name"], configuration, split)

    def rows(self, fields: Sequence[str]) -> Iterator[bytes]:
        """Yield the `fields` that a row has, as JSON; where there are none of them, every column without values.

        Raises DataError where the data set cannot be read.
        """
        try:
            import datasets
        except ImportError as error:
            what = f"--data {self.name}: no such file, and one of the hub needs datasets: pip install datasets"
            raise DataError(what) from error
        number = 0
        try:
            source: Any = datasets.load_dataset(self.name, self.configuration, split=self.split, streaming=True)
            for row in source:
                number += 1
                present = {name: plain(value) for name, value in row.items() if name in fields}
                yield json.dumps(present or dict.fromkeys(row), default=str).encode()
        except Exception as error:  # of the network, the hub, a file in it, or the name
            where = f"--data {self.name}: no such file; as a data set of the hub it"
            if number:
                where = f"{self.name}, row {number + 1},"
            raise DataError(
                f"{where} cannot be read: {first_line(error)}. Such a set is org/name, org/name:split or "
                "org/name:configuration:split"
            ) from error
