"""Models that answer: a model directory, a store or adapters, looked at first and then opened within a budget."""

from __future__ import annotations

import errno
import os
import shlex
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memascend
from memascend.cli.answers.room import DividedBudget
from memascend.cli.data import BYTE_VOCABULARY
from memascend.cli.errors import note
from memascend.cli.hub import model_directory
from memascend.common.outputs import workspace
from memascend.common.sizes import format_least, format_size
from memascend.durability.record import understanding
from memascend.errors import BudgetError, CheckpointError, DataError, OutputError, StoreError, system_line
from memascend.formats.adapters import add_as_in, is_adapter, is_model, load_adapters, model_of
from memascend.formats.config import INSTEAD, checkpoint_dtype, limits, load_config
from memascend.formats.quantised.forms import form_of
from memascend.formats.side_files import has_tokenizer
from memascend.formats.transformers_models import config_of_record, why_not_trained_causally
from memascend.formats.weights import empty_model_of
from memascend.hardware.drives import cache_directory
from memascend.layout.bits import COMPUTED_IN, PUBLISHED
from memascend.layout.experts import adapted_experts
from memascend.recovery.resume import read_record
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memascend.options import Experts


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that answers, not opened yet."""

    #: The volumes of a store, or one directory of a model.
    paths: tuple[Path, ...]
    config: Any
    #: Where the weights are, to be timed.
    weights: Path
    #: Where the tokenizer is; None for a model over bytes.
    tokenizer: Path | None
    adapter: Path | None = None
    is_store: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """How a source is opened. No bit depends on `store` and `experts`."""

    #: Where a copy goes of weights that cannot be read from the model's own files; None is the cache directory.
    store: Path | None = None
    #: As in `memascend.offload`; None is "whole" where the budget allows it, else "pieces".
    experts: Experts | None = None
    #: Quantise the linear weights of a model directory; see `memascend.from_pretrained` on `frozen_bits`.
    base_bits: int | None = None


def source_of(paths: Sequence[Path], tokenizer: Path | None = None, *, as_bytes: bool = False) -> ModelSource:
    """Look at a source: a model directory, the id of a model of the hub, adapters, or a store's volumes.

    Args:
        paths: of the source.
        tokenizer: a directory whose tokenizer is taken instead.
        as_bytes: the model was trained on bytes, and no tokenizer is taken.

    Raises CheckpointError for a source without a causal language model or without a tokenizer, StoreError for one that
    is no store either.
    """
    if tokenizer is not None and as_bytes:
        raise DataError("--bytes is for a model without a tokenizer: leave out --bytes or --tokenizer")
    first = paths[0]
    if tokenizer is not None and not has_tokenizer(tokenizer):
        raise CheckpointError(f"--tokenizer {tokenizer} holds no tokenizer: give a directory with tokenizer.json")
    is_directory = is_adapter(first) or is_model(first)
    if is_directory and len(paths) > 1:
        raise DataError(f"{first} is no store: leave out {' '.join(map(str, paths[1:]))}, since one model answers")
    if is_adapter(first):
        model = model_of(first, note)
        texts = tokenizer or (first if has_tokenizer(first) else model)
        return _directory(model, texts, as_bytes, adapter=first)
    _refuse_gguf(first)
    if is_directory or not os.path.lexists(first):
        model = model_directory(first)
        if model.is_dir():
            return _directory(model, tokenizer or model, as_bytes)
    record = read_record(list(paths))["model"]
    made_from = record.get("directory")
    if tokenizer is None and made_from is not None:
        tokenizer = Path(made_from)
    with understanding(paths):
        config = config_of_record(record)
    if (problem := why_not_trained_causally(config)) is not None:
        raise CheckpointError(f"{first} holds {problem}: {INSTEAD}")
    found = _tokenizer_in(tokenizer, config, as_bytes, "the model directory that the store was made from")
    return ModelSource(tuple(paths), config, first, found, is_store=True)


def _refuse_gguf(path: Path) -> None:
    """Raise CheckpointError for a file of llama.cpp, or a directory with one."""
    with suppress(OSError):
        files = sorted(path.glob("*.gguf")) if path.is_dir() and not is_model(path) else [path]
        if files and files[0].suffix == ".gguf":
            raise CheckpointError(
                f"{path} holds a model for llama.cpp: talk with it by `llama-cli -m {shlex.quote(str(files[0]))}`, or "
                "give the model directory that it was made from"
            )


def _directory(model: Path, tokenizer: Path, as_bytes: bool, adapter: Path | None = None) -> ModelSource:
    config = load_config(model, dequantize=True)
    return ModelSource((model,), config, model, _tokenizer_in(tokenizer, config, as_bytes, str(model)), adapter)


def _tokenizer_in(directory: Path | None, config: Any, as_bytes: bool, named: str) -> Path | None:
    """Return the directory, if the model's texts are made tokens by a tokenizer in it; None for a model over bytes.

    Raises CheckpointError where there is no tokenizer, and the model has the vocabulary of another one.
    """
    vocabulary, _ = limits(config)
    if not as_bytes and directory is not None and has_tokenizer(directory):
        return directory
    if as_bytes and vocabulary < BYTE_VOCABULARY:
        raise CheckpointError(
            f"--bytes needs a vocabulary of {BYTE_VOCABULARY} tokens, and that of the model has {vocabulary}"
        )
    if not as_bytes and vocabulary != BYTE_VOCABULARY:
        raise CheckpointError(
            f"{named} has no tokenizer: give --tokenizer DIR with its files, or --bytes for a model that was trained "
            "on the bytes of text"
        )
    return None


@contextmanager
def opened(source: ModelSource, room: DividedBudget, how: Opening) -> Iterator[Any]:
    """Open the model of `source` within the memory of `room`, and yield it; nothing of `source` changes.

    Weights are read from the model's own files where these can be read as they are and the budget allows it; else from
    a copy, which is removed.

    Raises DataError where the model cannot be opened as `how` says; BudgetError, StoreError and CheckpointError as
    `memascend.from_pretrained` and `memascend.resume` do.
    """
    with ExitStack() as stack:
        try:
            model = _opened(source, room.host_memory, how, stack)
        except BudgetError as error:
            raise BudgetError(
                f"{error}; {format_size(room.cache)} more are for keys and values: give --host-memory "
                f"{format_least(error.smallest_bytes + room.cache)}",
                error.smallest_bytes + room.cache,
            ) from error
        stack.callback(offload_of(model).close, failed=True)  # Keeps a store as it is.
        if source.adapter is not None:
            model = load_adapters(model, source.adapter, trained=False)
        model.eval()
        yield model


def _opened(source: ModelSource, host_memory: int | str, how: Opening, stack: ExitStack) -> Any:
    if source.is_store:
        if how.base_bits is not None:
            raise DataError("--base-bits works only with a model directory or adapters: leave it out for a store")
        # Its experts were trained or frozen as a part of the run.
        options: dict[str, Any] = {"host_memory": host_memory, "durability": "none", "experts": how.experts or "whole"}
        return memascend.resume(list(source.paths), **options).model
    folder = how.store or cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = stack.enter_context(workspace(folder / "answers", replaces=True))
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        raise OutputError(f"--store {system_line(cause, folder)}: give another directory") from error
    try:
        return _from_directory(source, work / "store", host_memory, how)
    except StoreError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OutputError(
            f"{folder} has no room for a copy of the weights, which are not read where they are: free some space "
            "there, or give another --store"
        ) from error


def _from_directory(source: ModelSource, store: Path, host_memory: int | str, how: Opening) -> Any:
    opening = partial(memascend.from_pretrained, source.paths[0], store=store, host_memory=host_memory, dequantize=True)
    form = form_of(source.paths[0])
    if how.base_bits is not None:
        if form is not None:
            raise DataError(
                f"--base-bits quantises weights, and those of {source.paths[0]} are in {form}: leave it out"
            )
        experts = how.experts or "whole"
        return opening(dtype=COMPUTED_IN, frozen="store", frozen_bits=how.base_bits, experts=experts)
    opening = partial(opening, dtype="auto")
    if how.experts == "pieces":
        _check_pieces(source)
        return opening(frozen="store", experts="pieces")
    in_place = [{"frozen": "files"}, *([{"frozen": "store", "frozen_bits": PUBLISHED}] if form is not None else [])]
    for where in in_place:
        # Tensors that are converted, or a vocabulary that is too large to be whole.
        with suppress(CheckpointError, BudgetError):
            return opening(**where)
    try:
        return opening(frozen="store")
    except BudgetError as error:
        if how.experts == "whole":
            raise
        with suppress(DataError):  # It has no such experts.
            _check_pieces(source)
            model = opening(frozen="store", experts="pieces")
            note("experts are read one by one (--experts pieces), since a layer with all of them does not fit")
            return model
        raise error from None


def _check_pieces(source: ModelSource) -> None:
    """Raise DataError where adapters are on experts that are to be read one by one."""
    if source.adapter is None:
        return
    directory = source.paths[0]
    empty = empty_model_of(source.config, directory, checkpoint_dtype(directory, source.config))
    if adapted_experts(add_as_in(source.adapter, empty, trained=False, low_cpu_mem_usage=True)):
        raise DataError(
            f"{source.adapter} has adapters on all experts of a layer at once, and --experts pieces reads them one by "
            "one: leave it out, or merge the adapters (memascend merge)"
        )
