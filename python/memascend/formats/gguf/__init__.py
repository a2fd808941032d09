"""Model directories as a GGUF file, which llama.cpp and the programs on top of it open.

Names of tensors and keys come from the package `gguf`, which llama.cpp publishes. The entries for an architecture are
in `architectures`, the tokenizer in `tokenizer`, the file itself in `file`. An architecture, a configuration or a
tokenizer that is not known to give the same tokens there is refused, since a file that opens and answers nonsense is
worse than none; llama.cpp's own converter knows more of them.

A file is written from a model directory, also where the model comes from a store: the directory is written first, so
that names and shapes are checked once. The rules of a tokenizer are compared; llama.cpp's converter compares a digest
of one tokenised text, and so knows only listed vocabularies.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import CheckpointError
from memascend.formats.gguf.architectures import describe
from memascend.formats.gguf.file import Weights, write_file
from memascend.formats.gguf.modelfile import write_modelfile
from memascend.formats.gguf.tokenizer import load_fast_tokenizer, tokenizer_entries
from memascend.formats.quantised.forms import check_form, form_of
from memascend.formats.transformers_models import empty_model, load_any_config
from memascend.formats.weight_files import WeightFiles, weights_dtype
from memascend.formats.weights import Sources

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Names of the file and of the description for Ollama in the directory that is written.
FILE_NAME, MODELFILE_NAME = "model.gguf", "Modelfile"
#: Names for `dtype` -> the type in the file. llama.cpp's llama-quantize makes other types from such a file.
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}


def write_gguf(
    model_dir: Path,
    out: Path,
    dtype: str | None,
    name: str,
    tell: Callable[[str], None],
    *,
    tokenizer: Path | None = None,
) -> None:
    """Write the model directory `model_dir` to `out`: `model.gguf` with its tokenizer, and a Modelfile for Ollama.

    Tensors are read, converted and written in pieces, so the memory does not depend on the model.

    Args:
        out: a directory, which is made.
        dtype: of matrices: one of TYPES, or None to keep their own. Vectors are float32, as llama.cpp wants them.
        name: the name of the model in the file.
        tell: called with a line on each thing that the user should know of.
        tokenizer: a directory whose tokenizer is taken instead.

    Raises CheckpointError for a model that cannot be written so, naming the way that remains.
    """
    _need_gguf()
    if dtype is None:
        stored = weights_dtype(model_dir)
        dtype = str(stored).removeprefix("torch.") if stored is not None else "float32"
    kind = TYPES.get(dtype)
    if kind is None:
        raise CheckpointError(f"{model_dir} holds weights in {dtype}: give --dtype, one of {', '.join(TYPES)}")
    config = load_any_config(model_dir)
    check_form(form_of(model_dir), model_dir, False)
    described = describe(config, model_dir)
    tokenizer_dir = tokenizer or model_dir
    loaded = load_fast_tokenizer(tokenizer_dir)
    with closing(WeightFiles(model_dir)) as files:
        _check_weights(config, model_dir, files)
        weights = Weights(files, described, tied=bool(getattr(config, "tie_word_embeddings", False)))
        entries = tokenizer_entries(loaded, weights.vocabulary, tokenizer_dir)
        out.mkdir(parents=True)
        write_file(out / FILE_NAME, weights, [*_general(name), *described.entries, *entries], kind, tell)
    write_modelfile(out / MODELFILE_NAME, FILE_NAME, loaded, model_dir, described.context)


def _need_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise CheckpointError("--format gguf needs the package gguf: pip install 'memascend[gguf]'") from error


def _general(name: str) -> list[tuple[str, Any]]:
    # The name of a path may hold bytes that are no UTF-8.
    return [("name", name.encode("utf-8", "replace").decode()), ("type", "model")]


def _check_weights(config: Any, model_dir: Path, files: WeightFiles) -> None:
    """Raise CheckpointError where a weight is missing, or has another shape than the configuration says."""
    Sources(empty_model(config, model_dir, torch.float32), files)
