#!/usr/bin/env python
"""A small Llama trained from scratch with AdamW, APOLLO and APOLLO-Mini: the loss on text that it has not seen.

    python benches/convergence.py --json benches/results/convergence.json --svg docs/assets/convergence.svg
    python benches/convergence.py --width 512 --layers 2 --json benches/results/convergence-512.json
    python benches/convergence.py --width 512 --layers 2 --beside 3e-4
    python benches/convergence.py --sequences 64    # batches nearer to the paper's, of 512 sequences of 256 tokens

The model reads bytes; the text is this repository's documentation and Python sources; every tenth kilobyte is held out.
All in float32 and in memory, where the optimizers have the bits that they have on SSD. Every run begins with the same
weights and sees the same sequences, by a cosine schedule with a tenth of warm-up. AdamW clips gradients to a norm of 1;
under APOLLO the limit on the growth of a step's norm stands in for that. AdamW's learning rate is the best of several;
APOLLO's options are the paper's (0.01; a rank of a quarter of the width). APOLLO-Mini's scale makes up for the loss of
a projection to one number, which grows with the width: the paper's 128 is a quarter of its smallest model's width of
512; a quarter and an eighth of this width stand beside it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from _common import machine, versions
from _llama import llama_config

import memascend

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 128
#: An optimizer, its learning rates, the rank of those that have one, and other options.
Contestant = tuple[Any, tuple[float, ...], int | None, dict[str, Any]]
#: Most by which a loss may be larger than AdamW's.
LIMIT = 0.01


def contestants(width: int) -> dict[str, Contestant]:
    found: dict[str, Contestant] = {
        "AdamW": (memascend.AdamW, (3e-4, 1e-3, 3e-3), None, {}),
        "APOLLO": (memascend.Apollo, (1e-2,), width // 4, {}),
        f"APOLLO-Mini, scale {width // 8}": (memascend.ApolloMini, (1e-2,), 1, {"scale": width / 8}),
        f"APOLLO-Mini, scale {width // 4}": (memascend.ApolloMini, (1e-2,), 1, {"scale": width / 4}),
    }
    if width != 512:
        found["APOLLO-Mini, scale 128"] = memascend.ApolloMini, (1e-2,), 1, {}
    return found


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to learn from, and those to be tested on."""
    files = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "python").rglob("*.py"))]
    every = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    pieces = every[: len(every) // 1024 * 1024].view(-1, 1024)
    held = torch.arange(len(pieces)) % 10 == 9
    return pieces[~held].flatten(), pieces[held].flatten()


def batch(source: torch.Tensor, number: int, sequences: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(source) - LENGTH, (sequences,), generator=generator)
    return torch.stack([source[start : start + LENGTH] for start in starts])


def train(
    shape: tuple[int, int],
    make: Any,
    lr: float,
    rank: int | None,
    options: dict[str, Any],
    steps: int,
    sequences: int,
    beside: float | None = None,
) -> dict[str, Any]:
    """Train anew; returns the losses of steps, in means of tens, and the loss on unseen text.

    `beside` is the learning rate of parameters that take AdamW beside APOLLO, if it differs.
    """
    from transformers import LlamaForCausalLM

    (width, layers), (learn, unseen) = shape, text()
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config((width, 3 * width, layers, 4, 4), 256, LENGTH)).float()
    trained: Any = model.parameters() if rank is None else memascend.apollo_groups(model, rank)
    if rank is not None and beside is not None:
        trained[1]["lr"] = beside
    optimizer = make(trained, lr=lr, weight_decay=0.0, **options)

    def course(step: int) -> float:
        warm = steps / 10
        return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0.0, step - warm) / (steps - warm))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, course)
    losses = []
    for step in range(steps):
        ids = batch(learn, step, sequences)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if rank is None:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        batches = (batch(unseen, 10**6 + number, 8) for number in range(24))
        final = sum(model(input_ids=ids, labels=ids).loss.item() for ids in batches) / 24
    means = [round(sum(losses[at : at + 10]) / len(losses[at : at + 10]), 4) for at in range(0, steps, 10)]
    return {"lr": lr, "rank": rank, **options, "loss": round(final, 4), "losses": means}


PLOT, LEFT, BOTTOM, TOP = (640, 360), 50, 40, 20
COLOURS = ("#5b6b7b", "#4051b5", "#2e8b57", "#c77d2e", "#e0b98a")


def drawing(runs: dict[str, dict[str, Any]], steps: int) -> str:
    """Return the losses of the steps as SVG: text, so that it needs no library and is the same on every machine."""
    width, height = PLOT
    every = [loss for run in runs.values() for loss in run["losses"]]
    low, high = math.floor(2 * min(every)) / 2, math.ceil(2 * max(every)) / 2

    def x(step: float) -> float:
        return LEFT + step / steps * (width - LEFT - 20)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (height - TOP - BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">',
        "<title>The loss of a small Llama in the course of training, by optimizer</title>",
        "<style>text { font: 12px sans-serif; fill: #24292f } path { fill: none; stroke-width: 1.5 }",
        "</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for half in range(int(2 * low), int(2 * high) + 1):
        at = y(half / 2)
        lines.append(f'<path d="M{LEFT} {at:.1f}H{width - 20}" stroke="#d9dee4"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{half / 2:.1f}</text>')
    for step in range(0, steps + 1, max(1, steps // 6)):
        lines.append(f'<text x="{x(step):.1f}" y="{height - 20}" text-anchor="middle">{step}</text>')
    lines.append(f'<text x="{width - 20}" y="{height - 5}" text-anchor="end">step</text>')
    for number, (name, run) in enumerate(runs.items()):
        colour = COLOURS[number]
        points = " ".join(f"{x(10 * at + 5):.1f},{y(loss):.1f}" for at, loss in enumerate(run["losses"]))
        lines.append(f'<path d="M{points}" stroke="{colour}"/>')
        lines.append(f'<rect x="{width - 260}" y="{TOP + 18 * number}" width="12" height="12" fill="{colour}"/>')
        lines.append(
            f'<text x="{width - 243}" y="{TOP + 10 + 18 * number}">{name}: {run["loss"]:.3f} on unseen text</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sequences", type=int, default=8, help="of 128 tokens, in each step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--beside", type=float, metavar="RATE", help="learning rate of embeddings, head and norms under APOLLO"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, metavar="OUT", help="draw the losses here")
    parser.add_argument("--check", action="store_true", help="fail where APOLLO ends more than 1%% above AdamW")
    chosen = parser.parse_args()
    best: dict[str, dict[str, Any]] = {}
    for name, (make, rates, rank, options) in contestants(chosen.width).items():
        shape = chosen.width, chosen.layers
        runs = [train(shape, make, lr, rank, options, chosen.steps, chosen.sequences, chosen.beside) for lr in rates]
        for run in runs:
            print(f"{name:22} lr {run['lr']:<7} rank {run['rank'] or '-':<4} loss {run['loss']:.4f}", flush=True)
        best[name] = min(runs, key=lambda run: run["loss"])
        best[name]["tried"] = {str(run["lr"]): run["loss"] for run in runs}
    if chosen.json:
        told = {"machine": machine(ROOT), "versions": versions("torch", "transformers"), "steps": chosen.steps}
        told |= {"sequences": chosen.sequences}
        told |= {"width": chosen.width, "layers": chosen.layers, "beside": chosen.beside}
        chosen.json.write_text(json.dumps(told | {"runs": best}, indent=1) + "\n")
    if chosen.svg:
        chosen.svg.write_text(drawing(best, chosen.steps))
    over = {name: run["loss"] / best["AdamW"]["loss"] - 1 for name, run in best.items()}
    print(", ".join(f"{name} {excess:+.2%}" for name, excess in over.items()))
    # Of the scales the best counts, as of AdamW's learning rates.
    mini = min(excess for name, excess in over.items() if name.startswith("APOLLO-Mini"))
    if chosen.check and max(mini, over["APOLLO"]) > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
