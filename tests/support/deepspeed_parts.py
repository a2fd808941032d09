"""Which parts of memascend are in force with the version of DeepSpeed that is installed, for its tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import requirements
from packaging.version import Version

if TYPE_CHECKING:
    pass

if importlib.util.find_spec("deepspeed") is None:
    requirements.unmet("deepspeed", "deepspeed is not installed")

MIB = 1 << 20

#: The parts that are in force with the version of DeepSpeed that is installed, and those that it is too old for.
installed_version = Version(importlib.metadata.version("deepspeed"))
POOLS, STREAMS = installed_version >= Version("0.19.4"), installed_version >= Version("0.19.5")
PARTS = ["async_io", *(["pin_memory"] if STREAMS else []), "cpu_adam", "fused_adam"]
ALL_LARGER_PARTS = ["parameter pools", "gradients", "streaming step", "loading of checkpoints"]
LARGER_PARTS = ALL_LARGER_PARTS if STREAMS else ALL_LARGER_PARTS[:1] if POOLS else []
#: Before 0.19.4 DeepSpeed swaps out updated tensors only from memory that CUDA has pinned. Without a GPU such a version
#: keeps optimizer states in memory, and weights in files only until it makes the optimizer.
IN_MEMORY: dict[str, Any] = {} if POOLS else {"optimizer": "cpu", "in_memory": 1_000_000_000}
#: For tests of parts that are not in force with an old DeepSpeed.
for_pools = pytest.mark.skipif(not POOLS, reason=f"DeepSpeed {installed_version} keeps its own pools")
for_streaming = pytest.mark.skipif(not STREAMS, reason=f"DeepSpeed {installed_version} keeps its own step")
