"""Runs a subcommand of `memascend` by the module in `jobs` that has it, which alone is imported."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from memascend.cli.errors import tell

if TYPE_CHECKING:
    import argparse

#: The module of `jobs` with the function of each subcommand, which takes the arguments and returns the exit code.
_MODULES = {
    "finetune": "training",
    "demo": "training",
    "plan": "planning",
    "inspect": "stores",
    "verify": "stores",
    "checkpoints": "stores",
    "export": "writing",
    "merge": "writing",
    "reshard": "writing",
    "generate": "answering",
    "chat": "answering",
    "report": "reporting",
    "bench": "machines",
    "format": "machines",
    "doctor": "machines",
}
#: Modules whose commands do without PyTorch.
_LIGHT = ("stores", "reporting")


def run(chosen: argparse.Namespace) -> int:
    """Run the subcommand of these arguments and return its exit code."""
    name = _MODULES[chosen.command]
    if name not in _LIGHT:
        if "torch" not in sys.modules and sys.stderr is not None and sys.stderr.isatty():
            tell("loading PyTorch and transformers ...")
        from memascend.hardware.threads import set_torch_threads

        set_torch_threads()
    module = importlib.import_module(f"memascend.cli.jobs.{name}")
    code: int = getattr(module, chosen.command)(chosen)
    return code
