"""The file of a checkpoint's directory that names checkpoints in stores."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models

import memascend
from memascend.integrations import named_checkpoints as named

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

pytestmark = pytest.mark.core


def test_names_are_read_as_they_were_written(offloaded: Callable[..., nn.Module], store: Path, tmp_path: Path) -> None:
    session = memascend.offload_of(offloaded(tiny_models.build("qwen2")))
    assert not named.has_names(tmp_path)
    for names in ({0: "one"}, {0: None, 2: "two"}, {0: None}):
        named.write_names(tmp_path, {index: (session, tag) for index, tag in names.items()})
        assert named.has_names(tmp_path) and named.read_names(tmp_path) == names
    assert named.read_name(tmp_path) is None
    assert [model["store"] for model in json.loads((tmp_path / named.MANIFEST).read_text())["models"]] == [[str(store)]]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "has no memascend_checkpoint.json: it was not saved from an offloaded model"),
        ("{", "cannot be read as JSON"),
        ([], "is of another version of memascend"),
        ({"format": 2, "models": []}, "is of another version of memascend"),
        ({"format": 1}, "names no checkpoint of a store"),
        ({"format": 1, "models": [3]}, "names no checkpoint of a store"),
        ({"format": 1, "models": [{"index": 0, "tag": 7}]}, "names no checkpoint of a store"),
        ({"format": 1, "models": []}, "is of 0 offloaded models, and here is one"),
        ({"format": 1, "models": [{"index": n, "tag": "a"} for n in (0, 1)]}, "is of 2 offloaded models"),
    ],
)
def test_other_files_are_refused(content: Any, told: str, tmp_path: Path) -> None:
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / named.MANIFEST).write_text(text)
    with pytest.raises(memascend.CheckpointError, match=told):
        named.read_name(tmp_path)
