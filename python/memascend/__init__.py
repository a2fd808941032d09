"""memascend: fine-tune language models larger than your RAM.

Parameters, gradients and optimizer states live on SSD; host memory is one budgeted pool.
"""

from __future__ import annotations

import importlib as _importlib
import importlib.metadata as _importlib_metadata
import importlib.util as _importlib_util
from typing import TYPE_CHECKING, Any

from memascend import _memascend as _memascend
from memascend.common.meetings import meet_libraries_by as _meet_libraries_by
from memascend.common.sizes import format_size, parse_size
from memascend.errors import (
    BudgetError,
    CheckpointError,
    DefectError,
    DeviceError,
    HostMemoryError,
    MemascendError,
    PinnedMemoryError,
    RankError,
    StoreError,
)

if TYPE_CHECKING:
    from memascend import overflow
    from memascend.library import *  # noqa: F403
    from memascend.library import find_offload as find_offload
    from memascend.library import offload_of as offload_of

try:
    #: The version of Cargo.toml, from which the wheel has it.
    __version__ = _importlib_metadata.version("memascend")
except _importlib_metadata.PackageNotFoundError:  # a copy of the sources that was never installed
    __version__ = "0+unknown"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Apollo",
    "ApolloMini",
    "BudgetError",
    "CheckpointError",
    "DefectError",
    "DeviceError",
    "GradScaler",
    "HostMemoryError",
    "Lion",
    "MemascendError",
    "PinnedMemoryError",
    "RankError",
    "Resumed",
    "StoreError",
    "apollo_groups",
    "can_resume",
    "checkpoints",
    "close",
    "delete_checkpoint",
    "empty_pinned",
    "flush",
    "format_size",
    "from_pretrained",
    "fuse_loss",
    "linear_cross_entropy",
    "load_distributed",
    "offload",
    "overflow",
    "parameters_of",
    "parse_size",
    "pin_memory",
    "plan_of",
    "reshard",
    "restore_checkpoint",
    "resume",
    "run_in_slices",
    "run_in_tiles",
    "save_checkpoint",
    "save_distributed",
    "save_pretrained",
    "set_device_memory",
    "set_host_memory",
    "stats",
    "track",
]


def __getattr__(name: str) -> Any:
    """Return a folder of the package or a name of `memascend.library`, which imports PyTorch: `--help` does without."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _importlib_util.find_spec(f"{__name__}.{name}") is not None:
        return _importlib.import_module(f"{__name__}.{name}")
    try:
        value = getattr(_importlib.import_module("memascend.library"), name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _meet_safetensors() -> None:
    from memascend.formats.safetensors_library import meet_safetensors

    meet_safetensors()


_meet_libraries_by(_meet_safetensors)
