"""memascend's CUDA kernels on the stand-in device: those that were compiled for the host, in the place of CuPy's."""

import ctypes
import os
import threading
from contextlib import contextmanager
from functools import cache

_one_at_a_time = threading.Lock()


@cache
def _library():
    return ctypes.CDLL(os.path.join(os.environ["REHEARSAL"], "librehearsal-kernels.so"))


def _function(name):
    def launch(grid, block, arguments):
        words = (ctypes.c_ulonglong * len(arguments))(*[word % 2**64 for word in arguments])
        with _one_at_a_time:
            code = _library().launch(name.encode(), grid[0], block[0], words)
        if code:
            raise RuntimeError(f"tests/rehearsal/kernels.cpp does not know the kernel {name}")

    return launch


def install(launcher):
    """Have `memascend.kernels.launcher` launch them."""
    functions = {name: _function(name) for name in launcher.KERNELS}

    @contextmanager
    def launching_on(device, stream):
        yield functions

    launcher._cupy = lambda: None
    launcher.has_cupy = cache(lambda: True)
    launcher.compiles = cache(lambda device: True)
    launcher._functions = lambda device: functions
    launcher._launching_on = launching_on
