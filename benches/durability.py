#!/usr/bin/env python
"""Cost of durable steps and checksums: step times with and without, in one process, by turns.

    python benches/durability.py                                   # a Llama of 0.30B parameters, 128 tokens
    python benches/durability.py --rounds 9 --json benches/results/durability.json --check

Every variant has a store of its own on the same drive. A round takes a few steps of each, in an order that turns from
round to round; a step lasts from step boundary to step boundary, deferred updates and commit included. The result is
the median over the rounds of the ratio to the plain variant of the same round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from _common import GB, finish, fio, machine, markdown, run
from _llama import SEED, llama_config
from _peak_systems import LEARNING_RATE, MAX_NORM, TOKENS, VOCABULARY
from peak_memory import SHAPES

#: name: durability, checksums
VARIANTS = {
    "in place, no checksums": ("none", False),
    "in place, checksums": ("none", True),
    "every step, no checksums": ("step", False),
    "every step, checksums": ("step", True),
}
PLAIN, WHOLE = "in place, no checksums", "every step, checksums"
STEPS = 3  # of a variant in a round
RATIO_LIMIT = 1.05  # of a step with everything over the plain one: the limit of --check


class Variant:
    """A model that is trained one step at a time."""

    def __init__(self, shape: tuple[int, ...], store: Path, budget: str, durability: str, checksums: bool) -> None:
        import torch
        from transformers import LlamaForCausalLM

        import memascend

        torch.manual_seed(SEED)
        self.model = LlamaForCausalLM(llama_config(shape, VOCABULARY)).to(torch.bfloat16)
        memascend.offload(
            self.model, store=store, host_memory=budget, durability=durability, checksums=checksums, engine="auto"
        )
        self.optimizer = memascend.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        generator = torch.Generator().manual_seed(SEED)
        self.ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=generator)
        self.losses: list[float] = []

    def step(self) -> float:
        """Return one step; how many seconds it took."""
        begun = time.perf_counter()
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return time.perf_counter() - begun


def measure(args: argparse.Namespace, workdir: Path) -> dict:
    """Train every variant by turns."""
    import memascend

    variants = {
        name: Variant(SHAPES[args.model], workdir / str(index), args.host_memory, *kind)
        for index, (name, kind) in enumerate(VARIANTS.items())
    }
    for variant in variants.values():
        variant.step(), variant.step()  # the first has no states to read, and none to write over
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(args.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(statistics.mean(variants[name].step() for _ in range(STEPS)))
            time.sleep(1)  # prefetches of the last step must not run in another one's time
        print(f"round {number + 1}: " + ", ".join(f"{name} {seconds[name][-1]:.2f} s" for name in names), flush=True)
    rows = {}
    for name, variant in variants.items():
        stats = memascend.stats(variant.model)
        ratios = [one / plain for one, plain in zip(seconds[name], seconds[PLAIN], strict=True)]
        rows[name] = {
            "seconds": seconds[name],
            "median_s": statistics.median(seconds[name]),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "store_bytes": stats["store_bytes_used"],
            "generations": stats["generation"],
            "same_losses": variant.losses == variants[PLAIN].losses,
        }
        memascend.close(variant.model)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="depth-8")
    parser.add_argument("--host-memory", default="225MiB")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--workdir", type=Path, help="where the stores go (default: the system's temporary directory)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is missed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.workdir) as workdir:
        disk = fio(Path(workdir))
        rows = measure(args, Path(workdir))
        results = {"machine": machine(Path(workdir)), "fio": disk, "model": args.model, "variants": rows}
    table = [
        [name, f"{row['median_s']:.2f} s", f"{row['ratio']:.3f}x", f"{row['store_bytes'] / GB:.1f} GB"]
        for name, row in rows.items()
    ]
    print(markdown(["variant", "step, median", "of the plain one, median of rounds", "store"], table))
    faults = [f"{name}: other losses than {PLAIN}" for name, row in rows.items() if not row["same_losses"]]
    if args.check and rows[WHOLE]["ratio"] > RATIO_LIMIT:
        faults.append(f"{WHOLE}: {rows[WHOLE]['ratio']:.3f}x is above {RATIO_LIMIT}x")
    return finish(results, args.json, faults)


if __name__ == "__main__":
    run(main)
