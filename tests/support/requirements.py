"""Needs of tests beyond the package. A test whose need is not met is skipped, or fails if MEMASCEND_REQUIRE names it.

MEMASCEND_REQUIRE is a list such as `root,mkfs,peft`, or `all`, which is everything but `gpu`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from types import ModuleType

#: Each need, and how to meet it.
NEEDS = {
    "root": "run as root where loop devices, mounts and memory cgroups are allowed (in a container: privileged)",
    "mkfs": "apt-get install e2fsprogs xfsprogs btrfs-progs",
    "chromium": "apt-get install chromium",
    "compiler": "apt-get install g++",
    "data": "pip install 'memascend[test]'",
    "sybil": "pip install 'memascend[test]'",
    "lightning": "pip install 'memascend[test]'",
    "peft": "pip install 'memascend[test]'",
    "liger": "pip install 'memascend[test]'",
    "trl": "pip install 'memascend[test]'",
    "accelerate": "pip install 'memascend[test]'",
    "deepspeed": "pip install 'memascend[test]'",
    "cupy": "pip install 'memascend[test]'",
    "gguf": "pip install 'memascend[test]'",
    "llamacpp": "pip install 'memascend[test]'",
    "expecttest": "pip install 'memascend[test]'",
    "bitsandbytes": "pip install 'memascend[forms]'",
    "compressed_tensors": "pip install 'memascend[forms]'",
    "gpu": "run on a machine with a CUDA device and a PyTorch that can use it",
}


def required() -> frozenset[str]:
    """Return the needs that MEMASCEND_REQUIRE names."""
    names = {name.strip() for name in os.environ.get("MEMASCEND_REQUIRE", "").split(",")} - {""}
    unknown = names - NEEDS.keys() - {"all"}
    if unknown:
        known = ", ".join([*NEEDS, "all"])
        raise pytest.UsageError(f"MEMASCEND_REQUIRE names {', '.join(sorted(unknown))}; there are {known}")
    return frozenset(NEEDS.keys() - {"gpu"} if "all" in names else ()) | (names - {"all"})


def liger_interpreted() -> dict[str, str]:
    """Need Liger-Kernel, and return the variables of a process that runs its kernels without a GPU.

    They run in Triton's interpreter, which has to be chosen before Triton is imported.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        unmet("liger", "liger_kernel is not installed")
    return {"TRITON_INTERPRET": "1"}


def unmet(need: str, why: str) -> NoReturn:
    """Skip this test or module because of `why`, or fail it if its need is required."""
    message = f"{why}; {need} is needed: {NEEDS[need]}"
    if need in required():
        pytest.fail(f"{message} (MEMASCEND_REQUIRE names it)", pytrace=False)
    pytest.skip(message, allow_module_level=True)


def adapters_of_transformers() -> None:
    """Skip this test if transformers refuses the PEFT that is installed, as 5.24 does until PEFT 0.22 is released."""
    from transformers.integrations import peft
    from transformers.utils.peft_utils import check_peft_version

    try:
        check_peft_version(min_version=peft.MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"transformers' own adapters: {error}")


def package(need: str, module: str | None = None) -> ModuleType:
    """Import the module that meets a need."""
    try:
        return importlib.import_module(module or need)
    except ImportError as error:
        unmet(need, f"{module or need} cannot be imported ({error})")
