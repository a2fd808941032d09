"""The record of a generation: one JSON text with everything of a run that is not a tensor on the SSD."""

from __future__ import annotations

import json
import os
import random
import sys
from array import array
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.durability import exact_json
from memascend.durability.outline import RECORD_VERSION, parse
from memascend.durability.record_schema import check_record
from memascend.errors import CheckpointError, MemascendError, first_line
from memascend.layout.ties import untied_names
from memascend.layout.units import raw_tensor_access

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memascend.layout.units import StoreTensor, Unit
    from memascend.options import OffloadOptions


def record_text(
    *,
    steps: int,
    source: dict[str, Any],
    options: OffloadOptions,
    units: Iterable[Unit],
    buffers: list[list[Any]],
    optimizers: list[dict[str, Any]],
    random_numbers: dict[str, Any],
    tracked: dict[str, Any],
    added: list[Any] | None = None,
    ranks: dict[str, Any] | None = None,
) -> str:
    """Return the record of a run as JSON.

    Args:
        steps: optimizer steps in the life of the run.
        source: how to make the model again; see `source_of`.
        options: those that the run goes on with are recorded.
        units: the layout of the model, with the states that its tensors have.
        buffers: name, dtype and shape of each of the model's buffers.
        optimizers: the result of `describe` of each optimizer.
        random_numbers: the result of `random_states`.
        tracked: state dicts by the names given to `memascend.track`, as `exact_json.encode` returns them.
        added: the result of `AddedParameters.write`.
        ranks: over which ranks the store is divided, if it is; see `memascend.ranks.membership.Membership`.

    Raises MemascendError for a value in `random_numbers` that JSON cannot hold exactly.
    """
    return exact_json.as_json(
        {
            "format": RECORD_VERSION,
            "steps": steps,
            "model": source,
            **options.recorded,
            "units": [
                {"name": unit.name, "tensors": [_describe_tensor(tensor) for tensor in unit.tensors]} for unit in units
            ],
            "buffers": buffers,
            "optimizers": optimizers,
            "random": exact_json.encode(random_numbers, "the random numbers"),
            "tracked": tracked,
        }
        | ({"added": added} if added else {})
        | ({} if ranks is None else {"ranks": ranks})
    )


def _describe_tensor(tensor: StoreTensor) -> dict[str, Any]:
    with raw_tensor_access():
        parameters = [[place.name, place.shape, place.start, place.parameter.requires_grad] for place in tensor.places]
    return {
        "name": tensor.name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "numel": tensor.numel,
        "trained": tensor.trained and not tensor.trained_later,  # as it was laid out
        "parameters": parameters,
        "states": [
            [store_plane.name, plane.name, plane.dtype]
            for plane, store_plane in tensor.planes.items()
            # States of a first step are not marked as written yet, but are by the time of the
            # commit.
            if store_plane.written or any(plane in place.states.made for place in tensor.places)
        ],
        "moments": [
            [place.name, place.states.moments.name, place.states.moments.numel]
            for place in tensor.places
            if place.states.moments is not None and place.states.moments.written
        ],
    }


def parse_record(text: str | None, paths: Sequence[Any]) -> dict[str, Any]:
    """Return the record that a store in `paths` keeps as `text`.

    Raises CheckpointError for any other text, and for a record of another version.
    """
    return parse(text, paths, exact_json.loads, check_record)


@contextmanager
def understanding(paths: Sequence[Any]) -> Iterator[None]:
    """Raise CheckpointError where the code in the block does not understand a checked record.

    The contents that a record names can still be missing, of another length, or refused by PyTorch or transformers.
    """
    try:
        yield
    except (MemascendError, MemoryError, OSError):
        raise
    except Exception as error:  # libraries raise any class
        where = ", ".join(str(path) for path in paths)
        raise CheckpointError(
            f"the record of the run in {where} contradicts itself, or is of another version of a library: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def source_of(
    model: torch.nn.Module, conversions: list[int] | None = None, directory: Path | None = None
) -> dict[str, Any]:
    """Return the description that makes `model` again: its class and, for models of transformers, its configurations.

    `conversions` are the indices of the weight conversions that its checkpoint needed. `directory` is the one with
    its tokenizer; None is the one that transformers has loaded it from, if any.
    """
    transformers: Any = sys.modules.get("transformers")
    name = type(model).__name__
    if transformers is None or getattr(transformers, name, None) is not type(model):
        return {"kind": "module", "class": f"{type(model).__module__}.{type(model).__qualname__}"}
    generation_config: Any = getattr(model, "generation_config", None)
    config: Any = model.config
    directory = directory or Path(getattr(config, "name_or_path", None) or os.devnull)
    return {
        "kind": "transformers",
        "class": name,
        "directory": str(directory.absolute()) if directory.is_dir() else None,
        "config": json.loads(config.to_json_string(use_diff=False)),
        "generation_config": (
            None if generation_config is None else json.loads(generation_config.to_json_string(use_diff=False))
        ),
        "conversions": conversions,
        "untied": untied_names(model),
        "implementations": {
            key: implementation
            for key in ("_attn_implementation", "_experts_implementation")
            if isinstance(implementation := getattr(config, key, None), str)
        },
    }


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's random number generators.

    NumPy's is included once NumPy has been imported, CUDA's once CUDA has been initialised.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, array("Q", words).tobytes(), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        algorithm, keys, *position_and_gauss = numpy.random.get_state()
        states["numpy"] = [str(algorithm), keys.tobytes(), *position_and_gauss]
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the random number generators to the result of `random_states`."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(array("Q", words)), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        algorithm, keys, *position_and_gauss = states["numpy"]
        numpy.random.set_state((algorithm, numpy.frombuffer(keys, dtype=numpy.uint32), *position_and_gauss))
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
