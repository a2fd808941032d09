"""A training run whose steps are told as they are taken: a process of its own, in a memory cgroup or beside one.

    python automatic_run.py JSON

The argument has `options` of `memascend.offload`, `architecture` (layers, width), `group` (a cgroup to enter, or null),
`steps` (a number, or null to go on until a line comes on standard input) and `pause` (seconds after each step). Each
step is a line of JSON, and the end is one with a hash of weights and states.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys
import time
from pathlib import Path

job = json.loads(sys.argv[1])
if job["group"]:
    (Path(job["group"]) / "cgroup.procs").write_text(str(os.getpid()))

import float32_products  # noqa: E402
import torch  # noqa: E402  (its memory is the cgroup's)

import memascend  # noqa: E402


def main() -> None:
    torch.manual_seed(0)
    layers, width = job["architecture"]
    blocks = (torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(layers))
    model = torch.nn.Sequential(*blocks).bfloat16()
    memascend.offload(model, keep_store=False, **job["options"])
    plan = memascend.offload_of(model).plan
    tell(least=plan.smallest_bytes, most=(plan.most or plan).total)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step != job["steps"] and not (job["steps"] is None and select.select([sys.stdin], [], [], 0)[0]):
        torch.manual_seed(step)
        x = torch.randn(32, width).bfloat16()
        loss = (model(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        stats = memascend.stats(model)
        names = ("budget", "planned", "reserved")
        told = {name: stats[f"host_bytes_{name}"] for name in names}
        tell(step=step, time=time.monotonic(), loss=loss.item(), rss=of("VmRSS"), swap=of("VmSwap"), **told)
        time.sleep(job["pause"])
    digest = hashlib.sha256()
    for name, values in memascend.parameters_of(model):
        digest.update(name.encode() + values.contiguous().view(torch.uint8).numpy().tobytes())
    for states in optimizer.state_dict()["state"].values():
        for values in states.values():
            digest.update(values.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    tell(steps=step, digest=digest.hexdigest())
    memascend.close(model)


def of(field: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) << 10


def tell(**values: object) -> None:
    print(json.dumps(values), flush=True)


with float32_products.in_float32():
    main()
