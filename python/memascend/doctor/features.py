"""The features of this build and this machine, in a few lines: `memascend --version`."""

from __future__ import annotations

import platform

import torch

from memascend._memascend import FileEngine, instruction_set
from memascend.errors import MemascendError


def features() -> dict[str, str]:
    """Return by name the interpreter, the instruction set of the kernels, whether io_uring works, and CUDA."""
    return {
        "Python": f"{platform.python_version()}, {platform.machine()}",
        "PyTorch": torch.__version__,
        "kernels": instruction_set(),
        "io_uring": _io_uring(),
        "CUDA": _cuda(),
    }


def _io_uring() -> str:
    try:
        FileEngine(engine="ring")
    except (MemascendError, OSError) as error:
        return f"no ({error}): threads are used instead"
    return "yes"


def _cuda() -> str:
    built_for = getattr(torch.version, "cuda", None)
    if built_for is None:
        return "no: this PyTorch is built without it"
    if not torch.cuda.is_available():
        return f"no device (PyTorch is built for CUDA {built_for})"
    return f"{torch.cuda.get_device_properties(0).name} (PyTorch is built for CUDA {built_for})"
