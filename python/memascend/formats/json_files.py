"""JSON files that came with a model: read, or refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from pathlib import Path

#: Lists and objects inside one another. Files of models have a few. A file that is read must be written again when the
#: model is saved, so the limit is below the depths that transformers, copying and writing can take.
NESTING_MAX = 64


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises CheckpointError, naming the file, where it cannot be read, is not JSON or is nested too deeply.
    """
    try:
        if path.exists() and not path.is_file():  # A pipe would have the reading wait for its other end.
            raise ValueError("it is not a file")
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise _too_deep(path) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    level = [value]
    for _ in range(NESTING_MAX):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
        if not level:
            return value
    raise _too_deep(path)


def _inside(outer: dict[str, Any] | list[Any]) -> list[Any]:
    return list(outer.values()) if isinstance(outer, dict) else outer


def _too_deep(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is nested more than {NESTING_MAX} levels deep, as no file of a model is: it is damaged, or made to "
        "do harm"
    )
