"""Scripts that use the simulated CUDA runtime directly, each in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake_cuda
import faults

if TYPE_CHECKING:
    from pathlib import Path


#: Streams and events as CUDA's functions make them, for the scripts.
PREAMBLE = """
import ctypes, os, sys
from fake_cuda import Fake
fake = Fake()
cuda = ctypes.CDLL(os.environ["MEMASCEND_CUDART"])
MIB = 2**20

def call(name, *words):
    words = [ctypes.c_void_p(word) if isinstance(word, int) else word for word in words]
    code = getattr(cuda, name)(*words)
    assert code in (0, 600), (name, code)
    if code:
        cuda.cudaGetLastError()
    return code == 0

def make(name, flags):
    made = ctypes.c_void_p()
    assert call(name, ctypes.byref(made), ctypes.c_uint(flags))
    return made.value

class Event:
    def __init__(self, stream=None):
        self.handle = make("cudaEventCreateWithFlags", 3)
        if stream is not None:
            self.record(stream)

    def record(self, stream):
        call("cudaEventRecord", self.handle, stream)

    def is_done(self):
        return call("cudaEventQuery", self.handle)

    def wait(self):
        call("cudaEventSynchronize", self.handle)

    def __del__(self):
        call("cudaEventDestroy", self.handle)

class Stream:
    def __init__(self):
        self.handle = make("cudaStreamCreateWithFlags", 1)

    def copy(self, target, source, kind=1):
        size = ctypes.c_size_t(len(source))
        call("cudaMemcpyAsync", address(target), address(source), size, ctypes.c_int(kind), self.handle)

    def wait(self, event):
        wait(self.handle, event)

    def record(self):
        return Event(self.handle)

    def __del__(self):
        call("cudaStreamDestroy", self.handle)

def wait(stream, event):
    call("cudaStreamWaitEvent", stream, event.handle, ctypes.c_uint(0))

def address(memory):
    return ctypes.addressof(memory)

def memory(value, nbytes=64):
    return (ctypes.c_char * nbytes)(*[value] * nbytes)

def access(memory, write, offset=0, nbytes=None):
    nbytes = len(memory) - offset if nbytes is None else nbytes
    cuda.fake_access(*map(ctypes.c_size_t, (address(memory) + offset, nbytes, write)))

def raced():
    before, raced.seen = raced.seen, fake.get("races")
    return raced.seen - before
raced.seen = 0

#: The default stream, which computes.
COMPUTE = 0
source, target, other = memory(b"s"), memory(b"t"), memory(b"o")
"""


def alone(script: str, cudart: Path) -> None:
    """Run a script in a process of its own, whose CUDA runtime is the simulated one."""
    faults.run_script(PREAMBLE + script, [], {fake_cuda.VARIABLE: str(cudart)})
