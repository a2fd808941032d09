"""The files beside the weights of a model directory: tokenizer, generation defaults, chat template."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError
from memascend.formats.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIDE_FILE_BYTES_MAX = 64 << 20
#: Files that are copied, by name: of tokenizers, and others.
_TOKENIZER = (
    *("tokenizer*.json", "added_tokens.json", "special_tokens_map.json", "chat_template*", "*.model", "*.tiktoken"),
    *("vocab*.json", "vocab*.txt", "*_vocab.json", "merges.txt", "tekken.json", "normalizer.json", "dict.txt"),
)
_OTHERS = ("config.json", "generation_config.json", "*processor_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
    "tekken.json",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "merges.txt",
)


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory holds the files of a tokenizer."""
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def add_tokenizer(source: dict[str, Any], given: Path | None, out: Path, tell: Callable[[str], None]) -> None:
    """Copy the side files of an exported model; `tell` gets a line where its tokenizer cannot be found.

    Args:
        source: the return value of `memascend.durability.record.source_of`, which may name the model's directory.
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
        tell(f"the tokenizer comes from {recorded}, which the run was made from")
        copy_side_files(Path(recorded), out, tell)
        return
    tell(f"the tokenizer is missing: {reason}; give --tokenizer DIR, or copy its files")


def _is_of(source: dict[str, Any], directory: Path) -> bool:
    """Return whether a directory still holds a model like the one in `source`."""
    try:
        config = read_json(directory / "config.json")
    except CheckpointError:
        return False
    return isinstance(config, dict) and config.get("model_type") == source["config"].get("model_type")


def copy_side_files(model_dir: Path, out: Path, tell: Callable[[str], None], *, tokenizer: Path | None = None) -> None:
    """Copy tokenizer, generation defaults and chat template beside newly written weights; replace nothing.

    Files of other names stay, also files that describe quantised weights: a stranger's store may have named the
    directory. It may also hold links to any file of the user's. Only links within it, and within Hugging Face's cache,
    are followed.

    Args:
        model_dir: where the files are.
        out: where the weights are.
        tell: called with a line on each link that was not followed.
        tokenizer: where the tokenizer and its chat template are instead.
    """
    if tokenizer is None:
        _copy(model_dir, (*_TOKENIZER, *_OTHERS), out, tell)
        return
    _copy(tokenizer, _TOKENIZER, out, tell)
    _copy(model_dir, _OTHERS, out, tell)


def _copy(folder: Path, patterns: Sequence[str], out: Path, tell: Callable[[str], None]) -> None:
    within = _where_links_may_lead(folder)
    for file in sorted(folder.iterdir()):
        wanted = any(fnmatchcase(file.name, pattern) for pattern in patterns)
        if not wanted or file.name.startswith(".") or not file.is_file() or os.path.lexists(out / file.name):
            continue
        source = file.resolve()
        if not any(source.is_relative_to(inside) for inside in within):
            tell(f"{file} was not copied: it is a link to {source}, outside of the model; copy it if it belongs")
            continue
        if source.stat().st_size <= SIDE_FILE_BYTES_MAX:
            shutil.copyfile(source, out / file.name, follow_symlinks=False)


def _where_links_may_lead(model_dir: Path) -> list[Path]:
    """Return the directory itself and, within a snapshot of Hugging Face's cache, where its repository has files."""
    folder = model_dir.resolve()
    for snapshot in (folder, *folder.parents):  # A model may lie in a subfolder of its repository.
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith("models--"):
            return [folder, repository / "blobs"]
    return [folder]
