"""Makes PyTorch and memascend run on the stand-in device, in every process that `run.sh` and its children start.

Python imports this module at its start. Nothing is imported here: PyTorch is changed when the program imports PyTorch,
and memascend's launcher of kernels when that is imported.
"""

import importlib.abc
import importlib.util
import os
import sys


def _change_torch(torch):
    import rehearsed_torch

    rehearsed_torch.install(torch)


def _change_launcher(launcher):
    import rehearsed_kernels

    rehearsed_kernels.install(launcher)


CHANGES = {"torch": _change_torch, "memascend.kernels.launcher": _change_launcher}


class _Loader(importlib.abc.Loader):
    """A module's own loader, and behind it the change."""

    def __init__(self, loader, change):
        self._loader, self._change = loader, change

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        # Modules are asked for the source of their contents.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._change(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self._changes = dict(CHANGES)

    def find_spec(self, name, path, target=None):
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, change)
        return spec


if "REHEARSAL" in os.environ:
    sys.meta_path.insert(0, _Finder())
