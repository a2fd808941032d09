#!/usr/bin/env python
"""Memory of bfloat16 products whose number of rows changes, by the number of products that are kept compiled.

    python benches/products.py --json benches/results/products.json

The experts of a mixture get another number of tokens in every step. Each capacity has a process of its own, which
computes the four products of an MLP's forward and backward pass for `--steps` numbers of rows, of 1 to 512, at random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from _common import machine, markdown, rss

from memascend.cli.main import PRODUCTS_VARIABLES

CAPACITIES = (1024, 256, 64, 16)
ROWS, WIDTH, INNER = 512, 256, 512


def child(steps: int) -> None:
    """Print the bytes by which the process has grown, and the seconds that it took."""
    import torch

    torch.set_num_threads(1)
    up, down = torch.randn(INNER, WIDTH).bfloat16(), torch.randn(WIDTH, INNER).bfloat16()

    def multiply(rows: int) -> None:
        inputs = torch.randn(rows, WIDTH).bfloat16()
        hidden = torch.nn.functional.linear(inputs, up)
        outputs = torch.nn.functional.linear(hidden, down)
        torch.matmul(outputs, down)
        torch.matmul(hidden.t(), inputs)

    multiply(ROWS)
    before, began, numbers = rss()["anon"], time.perf_counter(), random.Random(0)
    for _ in range(steps):
        multiply(numbers.randint(1, ROWS))
    print(json.dumps({"grown_bytes": rss()["anon"] - before, "seconds": time.perf_counter() - began}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="numbers of rows (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.steps)
    results = []
    for capacity in CAPACITIES:
        command = [sys.executable, __file__, "--child", "--steps", str(arguments.steps)]
        environment = os.environ | dict.fromkeys(PRODUCTS_VARIABLES, str(capacity))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        results.append({"capacity": capacity} | json.loads(done.stdout))
    rows = [[str(r["capacity"]), f"{r['grown_bytes'] / 2**20:.1f}", f"{r['seconds']:.1f}"] for r in results]
    print(markdown(["products kept", "grown, MiB", "seconds"], rows))
    if arguments.json:
        record = {"machine": machine(Path.cwd()), "steps": arguments.steps, "results": results}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
