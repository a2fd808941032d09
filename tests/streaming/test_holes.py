"""Blocks that a pass frees inside malloc's heap go back to the system while the pass runs."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

#: Trains blocks whose activations come from the heap: each has less than 128 KiB. Between them lie
#: nodes of the graph, and each block's input, for the whole pass.
PROGRAM = """
import ctypes, re, sys
from pathlib import Path
import torch
from torch import nn
import memascend

TOKENS, WIDTH, DEPTH = 1500, 16, 40

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x
        for _ in range(6):
            y = torch.tanh(y * 0.5 + x) - y.mean(-1, keepdim=True)
        return x + self.linear(y)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info

def resident_holes():
    # Resident bytes of the heap that malloc has not given to the program.
    entry = Path("/proc/self/smaps").read_text().split("[heap]")[1]
    resident = int(re.search(r"Rss: +(\\d+) kB", entry)[1]) * 1024
    return resident - libc.mallinfo2().uordblks

torch.manual_seed(0)
torch.set_num_threads(1)
model = Model()
memascend.offload(model, store=sys.argv[1], host_memory="24MiB", allocator="pageable")
libc.malloc_trim(0)
before = resident_holes()
x = torch.randn(TOKENS, WIDTH)
loss = model(x).square().mean()
forward = resident_holes()
loss.backward()
print((forward - before) // 1024, (resident_holes() - before) // 1024)
memascend.close(model)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives holes back")
def test_a_pass_leaves_no_holes_in_the_heap(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "store")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    forward_kib, backward_kib = map(int, done.stdout.split())
    assert max(forward_kib, backward_kib) < 8 * 1024
