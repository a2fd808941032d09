"""Models out: of a store, of adapters merged into their model, or of a model directory, for other programs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from memascend.common.outputs import put_in_place, workspace, writing
from memascend.durability.record import understanding
from memascend.errors import CheckpointError
from memascend.formats.adapters import CONFIG_NAME, copied_modules, is_adapter, is_model, load_adapters, model_of
from memascend.formats.config import limits, load_config
from memascend.formats.distributed import save_distributed
from memascend.formats.gguf import write_gguf
from memascend.formats.gguf.architectures import describe
from memascend.formats.hugging_face import from_pretrained
from memascend.formats.nf4 import write_nf4
from memascend.formats.quantised.forms import form_of
from memascend.formats.saving import save_pretrained
from memascend.formats.side_files import add_tokenizer, copy_side_files, has_tokenizer
from memascend.formats.tokenizers import load_tokenizer
from memascend.formats.transformers_models import config_of_record, load_any_config
from memascend.recovery.resume import read_record, resume
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, kw_only=True)
class Export:
    """The source and the form of an export."""

    #: "huggingface" (save_pretrained), "torch" (that and the optimizer's state dict), "distributed", "gguf" or "nf4".
    layout: str
    #: Of the saved weights; None keeps each parameter's own. "q8_0" is for GGUF.
    dtype: str | None = None
    #: Ceiling in bytes; None is the least that works.
    host_memory: int | None = None
    #: A directory whose tokenizer is taken instead.
    tokenizer: Path | None = None
    #: Called with a line on each thing that the user should know of, such as a tokenizer that is missing.
    tell: Callable[[str], None] = print


def export(paths: Sequence[Path], out: Path, how: Export) -> str:
    """Write a model to the directory `out`, and return its description, such as "the model after step 3".

    Nothing of `paths` changes. `out` appears whole, or not at all. A model directory gets the tokenizer of the one that
    the run was made from.

    Args:
        paths: the volumes of a store, at least one; or one directory of adapters that PEFT wrote, which are merged; or,
            for GGUF and NF4, one model directory.
        out: a directory that does not exist yet.

    Raises:
        CheckpointError: there is no such model, or the format has no place for it.
        StoreError: the store cannot be opened.
        OutputError: `out` exists, or cannot be written to.
    """
    tokenizer = how.tokenizer
    if tokenizer is not None and not has_tokenizer(tokenizer):
        raise CheckpointError(f"--tokenizer {tokenizer} holds no tokenizer: give a directory with tokenizer.json")
    first = paths[0]
    if is_adapter(first) or is_model(first):
        _check_directory(paths, how)
    with workspace(out) as work, writing(out):
        finished, model = work / "finished", work / "model"
        written = model if how.layout in ("gguf", "nf4") else finished
        if is_adapter(first):
            what = _merged(first, written, work / "store", how)
        elif is_model(first):
            model, what = first, f"the model in {first}"
            if tokenizer is not None and how.layout == "nf4":
                _check_tokenizer(tokenizer, limits(load_config(first))[0])
        else:
            what = _of_store(paths, written, how)
        try:
            if how.layout == "gguf":
                write_gguf(model, finished, how.dtype, out.name, how.tell, tokenizer=tokenizer)
            elif how.layout == "nf4":
                write_nf4(model, finished)
                copy_side_files(model, finished, how.tell, tokenizer=tokenizer)
        except CheckpointError as error:  # The user knows the source, and not the directory on the way.
            raise CheckpointError(str(error).replace(str(model), str(first))) from error
        put_in_place(finished, out)
    return what


def _check_tokenizer(tokenizer: Path, vocabulary: int) -> None:
    """Raise CheckpointError where a tokenizer cannot be loaded, or has tokens that the model has not."""
    last = max(load_tokenizer(tokenizer).get_vocab().values(), default=0)
    if last >= vocabulary:
        raise CheckpointError(
            f"--tokenizer {tokenizer} has tokens up to {last}, but the model's vocabulary ends at {vocabulary - 1}: "
            "give the tokenizer that the model was trained with"
        )


def _check_before(config: Any, source: Path, how: Export) -> None:
    """Raise CheckpointError, before a model is written, where it cannot be written so."""
    if how.tokenizer is not None:
        _check_tokenizer(how.tokenizer, limits(config)[0])
    if how.layout == "gguf":
        describe(config, source)


def _check_directory(paths: Sequence[Path], how: Export) -> None:
    """Raise CheckpointError where a directory, which is no store, cannot be exported so."""
    first = paths[0]
    if len(paths) > 1:
        raise CheckpointError(f"{first} is no store: one such directory is exported at a time")
    if how.layout in ("torch", "distributed"):
        raise CheckpointError(f"{first} is not a store: --format {how.layout} needs a store with its optimizer")
    if how.layout == "huggingface" and not is_adapter(first):
        raise CheckpointError(
            f"{first} is a model directory of Hugging Face already: give --format gguf or nf4, or copy it"
        )


def _of_store(paths: Sequence[Path], out: Path, how: Export) -> str:
    """Write the model of a store to `out`."""
    source = read_record(list(paths))["model"]
    if source["kind"] == "transformers":
        with understanding(paths):
            config = config_of_record(source)
        _check_before(config, paths[0], how)
    # No second slots are needed, since nothing is updated.
    resumed = resume(list(paths), host_memory=how.host_memory, durability="none")
    session = offload_of(resumed.model)
    try:
        if how.layout == "distributed":
            save_distributed(resumed.model, resumed.optimizer if resumed.optimizers else None, out)
        else:
            save_pretrained(resumed.model, out, dtype=None if how.layout == "gguf" else how.dtype)
            # A GGUF file is refused without one, and says more than a note.
            add_tokenizer(source, how.tokenizer, out, how.tell if how.layout != "gguf" else _ignore)
        if how.layout == "torch" and resumed.optimizers:
            _save(resumed.optimizer.state_dict(), out / "optimizer.pt")
    finally:
        session.close(failed=True)  # Keeps the store as it is.
    return f"the model after step {resumed.steps}"


def _merged(adapter: Path, out: Path, store: Path, how: Export) -> str:
    """Write the model of some adapters with these merged into its weights, as PEFT does it, layer by layer."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise CheckpointError("adapters need the package peft: pip install 'memascend[cli]'") from error
    directory = model_of(adapter, how.tell)
    if form_of(directory) is not None:
        raise CheckpointError(
            f"{adapter} holds adapters of {directory}, whose weights are quantised, and adapters are merged into "
            f"weights in 16 bits: put the directory of these into base_model_name_or_path of {CONFIG_NAME}"
        )
    copied = copied_modules(adapter)
    if copied and load_config(directory).get_text_config().tie_word_embeddings:
        raise CheckpointError(
            f"{adapter} holds copies of whole modules ({', '.join(copied)}), and the embedding and the head of "
            f"{directory} are one tensor, which a copy would part: merge it in memory with PEFT (merge_and_unload)"
        )
    _check_before(load_any_config(directory), directory, how)
    model = from_pretrained(directory, store=store, host_memory=how.host_memory, dtype="auto", frozen="store")
    session = offload_of(model)
    try:
        merged = load_adapters(model, adapter, trained=False).merge_and_unload()
        save_pretrained(merged, out, dtype=None if how.layout == "gguf" else how.dtype)
    finally:
        session.close(failed=True)
    for source in (how.tokenizer, adapter, directory):
        if source is not None:
            copy_side_files(source, out, how.tell)
    return f"the model in {directory} with the adapters of {adapter}"


def _ignore(line: str) -> None:
    """Say nothing."""


class _Noting:
    """A file that notes the error of a write: `torch.save` replaces it by one that says nothing of the drive."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _save(value: Any, path: Path) -> None:
    """Write a value for `torch.load`.

    Raises OSError where the drive is full, or fails.
    """
    with open(path, "wb") as file:
        noting = _Noting(file)
        try:
            torch.save(value, noting)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        except RuntimeError:
            if noting.error is None:
                raise
            raise noting.error from None
