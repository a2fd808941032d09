"""`--dtype auto`: which dtype a model is trained in here, which its weights are written in, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memascend.formats.config import checkpoint_dtype
from memascend.hardware.matmul_rates import is_slow, rates_text
from memascend.layout.units import DTYPE_NAMES


@dataclass(frozen=True, slots=True)
class Choice:
    """The dtypes of a run."""

    #: Of the training.
    dtype: str
    #: Of the weights that are written; None is the training's.
    saved: str | None = None
    #: One line; None for a dtype that was asked for by name.
    reason: str | None = None


def choose_dtype(named: str, model: Path, config: Any, device: torch.device | None = None) -> Choice:
    """Choose the dtype for the checkpoint or configuration `model`, to compute on a CUDA `device` or on the CPU.

    "auto" is the checkpoint's dtype where it can be computed in, and float32 where it cannot. A float16 checkpoint is
    trained in bfloat16 or else float32: gradients in float16 need a loss scale. "cuda" is any such device: where none
    is here to be asked, it is taken to compute in bfloat16.
    """
    if named != "auto":
        return Choice(named)
    stored = checkpoint_dtype(model, config)
    if stored not in (torch.bfloat16, torch.float16):
        return Choice("float32", reason=f"float32, as the checkpoint is in {_name(stored)}")
    able, told = _computes_in_bfloat16(device)
    dtype = "bfloat16" if able else "float32"
    if dtype == _name(stored):
        return Choice(dtype, reason=f"{dtype}, as the checkpoint is: {told}")
    written = f"the weights are written in {_name(stored)}, as the checkpoint is"
    return Choice(dtype, _name(stored), f"{dtype}: {told}; {written}")


def _computes_in_bfloat16(device: torch.device | None) -> tuple[bool, str]:
    """Return whether bfloat16 is computed in there, and how that is known."""
    if device is None:
        return not is_slow(torch.bfloat16), rates_text(torch.bfloat16)
    if not torch.cuda.is_available():
        return True, "a GPU computes in bfloat16 (give --dtype for one that does not)"
    with torch.cuda.device(device):
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    return able, f"{device} {'computes' if able else 'does not compute'} in bfloat16"


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
