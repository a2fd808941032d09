"""Models in: Hugging Face directories streamed into the store, never whole in memory."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memascend._memascend import return_large_blocks_to_system
from memascend.autograd.binding import materialise
from memascend.durability.record import source_of
from memascend.formats.heads import change_config
from memascend.formats.quantised.forms import check_form, form_of
from memascend.formats.saving import parse_dtype
from memascend.formats.transformers_models import (
    empty_model,
    load_any_config,
    load_generation_config,
)
from memascend.formats.weight_files import WeightFiles
from memascend.formats.weights import Sources
from memascend.layout.bits import PUBLISHED
from memascend.layout.division import divide
from memascend.layout.frozen_bits import quantise_units
from memascend.options import TUNING_NAMES
from memascend.session import rank_checks
from memascend.session.frozen_bits import check_beside, check_bits
from memascend.session.open import open_session, opening
from memascend.session.quantised_files import quantise_beside
from memascend.session.rank_hooks import hooks_for

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import torch
    from torch import nn

    from memascend.layout.units import Unit
    from memascend.options import Activations, Experts, Gradients, RankLocations, SpareFor, Update
    from memascend.ranks.group import Ranks
    from memascend.session.compute import ComputeOptions
    from memascend.session.session import Session


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    store: RankLocations,
    host_memory: str | int | None,
    host_memory_max: str | int | None = None,
    dtype: str | torch.dtype = "bfloat16",
    subfolder: str = "",
    variant: str | None = None,
    device: str | torch.device | None = None,
    device_memory: str | int | None = None,
    frozen: str | None = None,
    frozen_bits: int | Literal["published"] | None = None,
    dequantize: bool = False,
    model_class: str | type | None = None,
    resize_token_embeddings: int | None = None,
    recompute: bool = True,
    activations: Activations | None = None,
    batch_tokens: int | tuple[int, int] | None = None,
    micro_batch_size: int | None = None,
    tile_tokens: int | str | None = None,
    fused_loss: bool | Literal["auto"] = "auto",
    gradients: Gradients = "auto",
    update: Update = "forward",
    experts: Experts = "whole",
    spare_memory: SpareFor = "auto",
    durability: str = "auto",
    keep_store: bool | Literal["replace"] | None = None,
    progress: Callable[[int, int], None] | None = None,
    process_group: Any = None,
    **options: Any,
) -> nn.Module:
    """Open a Hugging Face model directory with its parameters on SSD: the model is never whole in memory.

    Args:
        path: directory with config.json and safetensors weights. Over ranks each one reads its share of them.
        dtype: "bfloat16", "float16" or "float32"; the weights are converted while they are read. "auto" is that of the
            configuration, or else of the weights.
        subfolder: the folder in `path` that holds the model.
        variant: which of several kinds of weights ("fp16": model.fp16.safetensors), as transformers takes it.
        frozen: freeze all parameters, for adapters that are added later (PEFT): "store" copies them to the store like
            trained ones; "files" reads them from the safetensors files at each use, which takes neither time nor room
            for a copy. The files must hold the weights in `dtype` and must not change, and the run has no durable
            steps.
        frozen_bits: with frozen="store", quantise the linear weights of the repeated layers as they are read: 4 is NF4
            with double quantisation, 8 is 8 bits by blocks of 4,096, both with the bits of bitsandbytes. Each use reads
            3.9 or 2.0 times fewer bytes of them, and dequantises them to bfloat16, which `dtype` has to be. They lie in
            files without names in the directories of the store, and the run has no durable steps
            (docs/how-to/quantised.md). "published", with `dequantize`: layers whose weights are quantised in the files
            are read from there at each use, as with frozen="files", and the rest lies in the store.
        dequantize: read quantised weights into the store in `dtype`, a piece at a time, with the bits of the library
            that defines their form (docs/how-to/quantised.md names the forms). With frozen="files" they stay as they
            are and are dequantised at each use, in the forms for which that is done. Without it they are refused.
            Weights that are not quantised are read as always.
        model_class: a class of transformers, or its name, to open the directory as a model of another task, such as
            "AutoModelForSequenceClassification". A head that the directory does not hold begins as in transformers,
            with the same bits after the same seed.
        resize_token_embeddings: the rows that the tables of tokens are to have, such as `len(tokenizer)` after tokens
            were added: as `model.resize_token_embeddings` of transformers, with the same bits after the same seed. The
            tables are whole in host memory, beside the budget, while the model is opened: transformers takes up to six
            times the bytes of a bfloat16 table.
        host_memory: as in `memascend.offload`; None is the least that works.
        store, host_memory_max, device, device_memory, recompute: as in `memascend.offload`.
        activations, batch_tokens, micro_batch_size, tile_tokens: as in `memascend.offload`.
        fused_loss, gradients, update, experts: as in `memascend.offload`.
        durability, keep_store, process_group: as in `memascend.offload`.
        options: as in `memascend.offload`; and values of the configuration that are to be others, by their names there
            (`num_labels=3`), with `attn_implementation`.
        progress: called with (bytes done, bytes in all) while the weights are read.

    Raises:
        CheckpointError: the directory is not such a model, its weights are quantised and `dequantize` is false, or in
            a form that is not read, a file is damaged, or another rank's files differ.
        TypeError: an option that there is none of, and no value of the configuration has the name.
        BudgetError, DeviceError, StoreError, RankError, ValueError: as in `memascend.offload`.
    """
    changes = {name: options.pop(name) for name in list(options) if name not in TUNING_NAMES}
    _check_frozen(frozen, frozen_bits, durability, keep_store)
    return_large_blocks_to_system()
    directory = Path(path) / subfolder
    with opening(from_pretrained, locals(), frozen) as (chosen, ranks):
        if frozen == "files" or frozen_bits is not None:
            chosen = replace(chosen, durability="none")
        if frozen_bits is not None:
            check_beside(chosen, ranks, frozen_bits)
        if resize_token_embeddings is not None:
            _check_resized(frozen, ranks)
        config = load_any_config(directory)
        check_form(form_of(directory), directory, dequantize)
        change_config(config, model_class, changes)
        with closing(WeightFiles(directory, variant)) as files:
            model = empty_model(config, directory, _dtype_of(dtype, config, files))
            load_generation_config(model, directory)
            sources = Sources(model, files, begins_heads=model_class is not None and ranks is None)
            if resize_token_embeddings is not None:
                sources.resize_tables(resize_token_embeddings)
            units_of = partial(_divide, model, sources, frozen=frozen, frozen_bits=frozen_bits, ranks=ranks)
            session = open_session(
                model, chosen, ranks, units_of, lambda: source_of(model, sources.conversions, directory)
            )
            _fill(session, sources, progress)
    return model


def _dtype_of(dtype: str | torch.dtype, config: Any, files: WeightFiles) -> torch.dtype:
    """Return the dtype that weights are trained in; "auto" is what transformers would load them in."""
    if dtype != "auto":
        return parse_dtype(dtype)
    return parse_dtype(getattr(config, "dtype", None) or files.first_dtype() or torch.float32)


def _check_frozen(
    frozen: str | None, frozen_bits: int | str | None, durability: str, keep_store: bool | str | None
) -> None:
    if frozen not in (None, "store", "files"):
        raise ValueError(f"frozen={frozen!r} is not one of None, 'store' and 'files'")
    check_bits(frozen_bits, durability, keep_store)
    if frozen_bits is not None and frozen != "store":
        what = "keeps frozen weights as they are published" if frozen_bits == PUBLISHED else "quantises frozen weights"
        why = "whose files stay as they are" if frozen else "which are trained"
        raise ValueError(f"frozen_bits={frozen_bits!r} {what}, not those {why}: give frozen='store'")
    if frozen == "files" and (keep_store is True or durability not in ("auto", "none")):
        raise ValueError(
            "with frozen='files' the store holds nothing that could be kept: leave out durability and keep_store, or "
            "use frozen='store'"
        )


def _check_resized(frozen: str | None, ranks: Ranks | None) -> None:
    if frozen == "files" or ranks is not None:
        where = "over ranks" if ranks is not None else "with frozen='files'"
        raise ValueError(
            f"resize_token_embeddings cannot be had {where}, where weights are read as the files have them: resize the "
            "model with transformers once (from_pretrained, resize_token_embeddings, save_pretrained), and open the "
            "directory that this writes"
        )


def _divide(
    model: nn.Module,
    sources: Sources,
    computing: ComputeOptions,
    frozen: str | None,
    frozen_bits: int | str | None,
    ranks: Ranks | None,
) -> list[Unit]:
    """Divide the model into units, frozen if `frozen` is not None, and those into the shares of `ranks`."""
    model.requires_grad_(frozen is None)
    # A table is read by parts from the store only, and from one that is not divided.
    fused_loss = None if frozen == "files" or ranks is not None else computing.options.fused_loss
    units = computing.partition(model, fused_loss, ranks is not None, frozen == "files")
    direct = computing.options.tuning.get("direct", True)
    if frozen == "files":
        sources.locate(units, direct)
    if frozen_bits == PUBLISHED:
        sources.locate_published(units, direct)
    elif frozen_bits is not None:
        quantise_units(model, units, int(frozen_bits))
    if ranks is not None:
        rank_checks.compare_layout(ranks, units)
        rank_checks.compare_checkpoints(ranks, sources.files.fingerprint(), sources.files.directory)
        divide(units, ranks.rank, ranks.size)
    materialise(model, units)
    return units


def _fill(session: Session, sources: Sources, progress: Callable[[int, int], None] | None) -> None:
    """Read the weights into the store and attach the session to its model; discard the session on an error."""
    quantised = sum(unit.nbytes for unit in session.units if unit.bits is not None)
    stored = sum(unit.nbytes for unit in session.units if unit.weights)

    def tell(done: int, _: int, before: int = 0) -> None:
        if progress is not None:
            progress(before + done, quantised + stored)

    try:
        if quantised:
            quantise_beside(session, sources.read_part, tell)
        session.fill(
            sources.read_share if session.membership.divides else sources.read, partial(tell, before=quantised)
        )
        sources.read_buffers()
        hooks_for(session).attach()
    except BaseException:
        session.discard()
        raise
