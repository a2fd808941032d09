"""Whether malloc keeps freed blocks, which decides how often pages are zeroed anew."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import resource, sys
import torch
from memascend._memascend import keep_large_blocks, return_large_blocks_to_system

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(8 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

return_large_blocks_to_system()
faults()
given_back = faults()
keep_large_blocks()
faults()
print(given_back, faults())
"""


def test_large_blocks_are_given_back_or_kept() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", _SCRIPT], capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    # Twenty times 2048 pages, unless the system has huge ones; of kept blocks next to none.
    assert kept < given_back / 10
