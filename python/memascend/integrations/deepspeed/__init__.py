"""DeepSpeed ZeRO-Infinity on memascend's engine, pinned memory and kernels: one import, and the script stays as it is.

    import memascend.deepspeed

before `deepspeed.initialize` is enough. For scripts that cannot be edited: `python -m memascend.deepspeed train.py ...`
(also behind `torchrun -m`, `accelerate launch -m` and `deepspeed --module`), or
`PYTHONPATH=$(python -m memascend.deepspeed --hook)` in front of whatever starts the script.

Each part, and the one that it replaces:

- `async_io`: one io_uring for all swap files of the process instead of libaio and a file opened for each transfer.
  Errors name the file and are raised by `wait()`; short transfers are resumed.
- `pin_memory`: page-locked memory of exactly the size asked for.
- `cpu_adam`, and on a CPU `fused_adam`: PyTorch's Adam and AdamW to the bit, vectorised for the processor at hand.

None of them needs a compiler, ninja or libaio.
"""

from __future__ import annotations

from memascend.integrations.deepspeed.installing import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]

install()
