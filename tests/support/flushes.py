"""Records the flushes and renames of a program: their order decides which files a power failure leaves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from memascend.common import outputs

if TYPE_CHECKING:
    import pytest


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that gets a pair for each operation from now on: "flush" or "rename", and the path before it."""
    operations: list[tuple[str, str]] = []
    fsync = os.fsync

    def flush(file: int) -> None:
        operations.append(("flush", os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def renaming(function: Any) -> Any:
        def rename(source: Any, target: Any) -> None:
            function(source, target)
            operations.append(("rename", str(source)))

        return rename

    monkeypatch.setattr(os, "fsync", flush)
    for module, name in ((os, "rename"), (os, "replace"), (outputs, "_exchange")):
        monkeypatch.setattr(module, name, renaming(getattr(module, name)))
    return operations


def flushed(operations: list[tuple[str, str]]) -> set[str]:
    """Return the paths that were flushed."""
    return {path for what, path in operations if what == "flush"}
