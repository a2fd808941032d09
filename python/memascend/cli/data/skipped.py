"""Files that a directory holds beside its text: how many were left out, and why."""

from __future__ import annotations

from pathlib import Path

BINARY = "binary"
ENCODING = "not UTF-8 text"
EXAMPLES = 3


class Skipped:
    """The number of files that were skipped for each reason, and the first few of them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._counts: dict[str, int] = {}
        self._examples: dict[str, list[Path]] = {}

    def __len__(self) -> int:
        return sum(self._counts.values())

    def add(self, reason: str, path: Path) -> None:
        """Count a file that was skipped."""
        self._counts[reason] = self._counts.get(reason, 0) + 1
        examples = self._examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(path)

    def lines(self) -> list[str]:
        """Return a line for each reason."""
        lines = []
        for reason, count in self._counts.items():
            names = [str(path) for path in self._examples[reason]] + ["..."] * (count > EXAMPLES)
            lines.append(f"skipped {count} {'file' if count == 1 else 'files'} ({reason}): {', '.join(names)}")
        return lines
