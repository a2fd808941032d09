"""Puts memascend behind DeepSpeed in every Python process that imports deepspeed, and does nothing in others."""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Finder:
    """Finds deepspeed as the others do, and has memascend installed when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return deepspeed's spec, whose loader then also installs memascend."""
        if name != "deepspeed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            import memascend.integrations.deepspeed  # noqa: F401

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())

# The sitecustomize that this one hides.
_others = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
