"""The files beside the weights of a model directory: tokenizer, generation defaults, chat template."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError
from memascend.formats.json_files import read_json
from memascend.formats.quantised.forms import DESCRIPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE_FILE_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
SIDE_FILE_BYTES_MAX = 64 << 20
#: What a directory of adapters says of these.
_OF_ADAPTERS = ("adapter_config.json",)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds the files of a tokenizer."""
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def add_tokenizer(source: dict[str, Any], given: Path | None, out: Path, tell: Callable[[str], None]) -> None:
    """Copy the side files of an exported model; `tell` gets a line where its tokenizer cannot be found.

    Args:
        source: the return value of `durable.record.source_of`, which may name the model's directory.
        given: the directory to copy from instead.
        out: where the model is.
    """
    if given is not None:
        copy_side_files(given, out, tell)
        return
    recorded = source.get("directory")
    if recorded is None:
        reason = "the store does not know which model directory the run was made from"
    elif not _is_of(source, Path(recorded)):
        reason = f"{recorded}, which the run was made from, is gone or holds another model"
    else:
        copy_side_files(Path(recorded), out, tell)
        return
    tell(f"the tokenizer is missing: {reason}; give --tokenizer DIR, or copy its files")


def _is_of(source: dict[str, Any], directory: Path) -> bool:
    """Whether a directory still holds a model like that of `source`."""
    try:
        config = read_json(directory / "config.json")
    except CheckpointError:
        return False
    return isinstance(config, dict) and config.get("model_type") == source["config"].get("model_type")


def copy_side_files(model_dir: Path, out: Path, tell: Callable[[str], None]) -> None:
    """Copy tokenizer, generation defaults and chat template beside newly written weights; replace nothing.

    What describes quantised weights is left out, since none are written.

    A directory from a stranger may hold links to any file of the user's. Only links within it are followed, and those
    of Hugging Face's cache; `tell` gets a line on each of the others.
    """
    within = _where_links_may_lead(model_dir)
    for file in sorted(model_dir.iterdir()):
        wanted = file.suffix in SIDE_FILE_SUFFIXES and not file.name.endswith(
            (".index.json", *DESCRIPTIONS, *_OF_ADAPTERS)
        )
        if not wanted or file.name.startswith(".") or not file.is_file() or os.path.lexists(out / file.name):
            continue
        source = file.resolve()
        if not any(source.is_relative_to(folder) for folder in within):
            tell(f"{file} was not copied: it is a link to {source}, outside of the model; copy it if it belongs")
            continue
        if source.stat().st_size <= SIDE_FILE_BYTES_MAX:
            shutil.copyfile(source, out / file.name, follow_symlinks=False)


def _where_links_may_lead(model_dir: Path) -> list[Path]:
    """Return the directory itself and, of a snapshot in Hugging Face's cache, where its repository keeps the files."""
    folder = model_dir.resolve()
    repository = folder.parent.parent
    cached = folder.parent.name == "snapshots" and repository.name.startswith("models--")
    return [folder, repository / "blobs"] if cached else [folder]
