"""The schema of a record, which is checked before use, since a store may be of another origin."""

from __future__ import annotations

import re
from typing import Any

import torch

from memascend.common.shapes import Absent, Each, Either, check, count, dimensions
from memascend.durability.outline import fill_defaults

#: Names that transformers takes for ways to compute; others, with a slash, name code that it would download.
_IMPLEMENTATION = re.compile(r"[\w|+-]+")


def check_record(record: Any) -> None:
    """Raise ValueError, which names the place, for a record that is not made as `record_text` makes them."""
    check(record, _RECORD, "the record")
    source = record["model"]
    if source["kind"] == "transformers":
        check(source, _TRANSFORMERS, "the record['model']")
    fill_defaults(record)
    names = set()
    for unit in record["units"]:
        for tensor in unit["tensors"]:
            names |= {name for name, *_ in tensor["parameters"]}
            unknown = {name for name, *_ in tensor["moments"]} - names
            if unknown:
                raise ValueError(f"the moments are of parameters that are not there: {min(unknown)}")
    for optimizer in record["optimizers"]:
        unnumbered = {name for group in optimizer["groups"] for name in group["params"]} - optimizer["numbers"].keys()
        if unnumbered:
            raise ValueError(f"an optimizer has no number for {min(unnumbered)}")


def _dtype(value: Any, where: str) -> None:
    if not (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)):
        raise ValueError(f"{where} is no dtype")


def _implementation(value: Any, where: str) -> None:
    check(value, str, where)
    if not _IMPLEMENTATION.fullmatch(value):
        raise ValueError(f"{where} names code of elsewhere ({value[:40]!r}): give the model as model=...")


def _tensor_of_pytorch(value: Any, where: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{where} is no tensor")


_TENSOR = {
    "name": str,
    "dtype": _dtype,
    "numel": count,
    "trained": Absent(bool),
    "parameters": [(str, dimensions, count, bool)],
    "states": [(str, str, str)],
    "moments": Absent([(str, str, count)]),
}
_OPTIMIZER = {
    "class": str,
    "defaults": dict,
    "groups": [{"params": [str]}],
    "states": Each((count, list, [str])),
    "empty": Absent(Each((count, list))),
    "numbers": Each(count),
    "norms": Absent(dict),
    "expert_steps": Absent(Each([count])),
    "added": Absent(Each((list, dict))),
    "nonfinite": str,
    "skipped_steps": count,
}
_TRANSFORMERS = {
    "class": str,
    "directory": Either(str, None),
    "config": {"model_type": str},
    "generation_config": Either(dict, None),
    "conversions": Either([count], None),
    "untied": Absent([str]),
    "implementations": {name: Absent(_implementation) for name in ("_attn_implementation", "_experts_implementation")},
}
_RECORD = {
    "steps": count,
    "model": {"kind": str, "class": str},
    "recompute": bool,
    "fused_loss": Absent(Either(bool, str)),
    "gradients": Absent(str),
    "micro_batch_size": Absent(Either(int, None)),
    "tile_tokens": Absent(Either(int, Either(str, None))),
    "units": [{"name": str, "tensors": [_TENSOR]}],
    "buffers": [(str, _dtype, dimensions)],
    "optimizers": [_OPTIMIZER],
    "added": Absent([(str, [(str, str, _dtype, dimensions)])]),
    "random": {
        "python": (int, bytes, Either(float, None)),
        "torch": _tensor_of_pytorch,
        "numpy": Absent(list),
        "cuda": Absent([_tensor_of_pytorch]),
    },
    "tracked": dict,
    "ranks": Absent({"rank": count, "ranks": count, "run": str}),
}
