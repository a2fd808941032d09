#!/usr/bin/env python
"""Memory of a long sequence, with tiles and without: what PyTorch holds beside the plan, and what was estimated.

    python benches/tiles.py --workdir DIR --json benches/results/tiles.json           # 32,768 and 131,072 tokens
    python benches/tiles.py --tokens 4096 --tile 512                                  # to try the script out

A decoder of a small width, whose proportions are those of Qwen2.5 0.5B (an MLP of 5.5 times the width), takes two steps
of one sequence in float32, with the least budget, in a process of its own for each length, with tiles (tile_tokens) and
without. Its peak of resident memory, less what there was after importing, less the plan, is PyTorch's share. With
--check: the share with tiles within 10% of the estimate, and at most a quarter of that without. The losses stand beside
it: they are equal where the shapes of the products decide nothing.

--tiles-only leaves out the runs without tiles. With --activations ssd the inputs of layers go to the SSD. How long the
computing thread stands still because of them, a step, is in the last columns: until an input has left (forward pass),
and until it is back (backward pass).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from _common import end_as_child, finish, in_workdir, machine, markdown, rss, run
from _common import start as start_child

SEED = 7
#: How far the estimate may be off, and the most of the share without tiles that tiles may take.
ESTIMATE_OFF, SHARE_MOST = 0.1, 0.25
CONFIG = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 64,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def write_model(directory: Path) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if not directory.exists():
        torch.manual_seed(SEED)
        Qwen2ForCausalLM(Qwen2Config(**CONFIG)).save_pretrained(directory)
    return directory


# --- the child: one length, with tiles or without ---


def child(job: dict) -> dict:
    import torch
    from transformers import Qwen2ForCausalLM  # noqa: F401

    import memascend
    from memascend.autograd.recompute import COMES, LEAVES
    from memascend.common.timeline import noted

    baseline = rss()["rss"]
    model = memascend.from_pretrained(
        job["model_dir"],
        store=f"{job['scratch']}/store",
        host_memory=job["host_memory"],
        dtype="float32",
        tile_tokens=job["tile"],
        activations=job["activations"],
        durability="none",
        keep_store=False,
    )
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(SEED)
    losses, begin = [], time.perf_counter()
    with noted() as spans:
        for _ in range(job["steps"]):
            ids = torch.randint(0, CONFIG["vocab_size"], (1, job["tokens"]), generator=generator)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses.append(float(loss.detach()))
            del loss
            optimizer.step()
            optimizer.zero_grad()
    seconds = (time.perf_counter() - begin) / job["steps"]
    idle = {
        key: sum(end - start for name, start, end, _ in spans if name == shown) / 1e9 / job["steps"]
        for key, shown in (("leaves_s", LEAVES), ("comes_s", COMES))
    }
    planned, notices = memascend.stats(model)["host_bytes_planned"], memascend.stats(model)["notices"]
    memascend.close(model)
    share = rss()["hwm"] - baseline - planned
    found = {"share_bytes": share, "planned_bytes": planned, "step_s": seconds, "losses": losses, "notices": notices}
    return found | idle


# --- the parent ---


def measure(model_dir: Path, workdir: Path, args: argparse.Namespace, tokens: int, tile: int | str | None) -> dict:
    from memascend.forecast.forecast import forecast

    plan = forecast(model_dir, seq_len=tokens, batch_size=1, dtype="float32", tile_tokens=tile, durability="none")
    scratch = workdir / "scratch"
    scratch.mkdir(exist_ok=True)
    job = {
        "model_dir": str(model_dir),
        "scratch": str(scratch),
        "host_memory": plan["host_memory"]["smallest_bytes"],
        "tokens": tokens,
        "tile": tile,
        "activations": args.activations,
        "steps": args.steps,
    }
    told = start_child([sys.executable, __file__, "--child"], job, "tiles", workdir, args.timeout, {})
    estimated = plan["pytorch"]["estimated_bytes"]
    return {"tokens": tokens, "tile_tokens": tile, "estimated_bytes": estimated, **told}


def compare(workdir: Path, args: argparse.Namespace) -> int:
    model_dir = write_model(workdir / "model")
    entries, rows, missed = [], [], []
    for tokens in args.tokens:
        tiles = (args.tile,) if args.tiles_only else (args.tile, None)
        measured = [measure(model_dir, workdir, args, tokens, tile) for tile in tiles]
        entries += measured
        with_tiles, without = measured[0], None if args.tiles_only else measured[1]
        off = with_tiles["share_bytes"] / with_tiles["estimated_bytes"] - 1
        if abs(off) > ESTIMATE_OFF:
            missed.append(f"{tokens} tokens: {off:+.1%} beside the estimate")
        if without is not None and (part := with_tiles["share_bytes"] / without["share_bytes"]) > SHARE_MOST:
            missed.append(f"{tokens} tokens: {part:.2f} of the share without tiles")
        for entry in measured:
            rows.append(
                [
                    f"{tokens:,}",
                    str(entry["tile_tokens"] or "none"),
                    f"{entry['share_bytes'] / 2**20:.0f}",
                    f"{entry['estimated_bytes'] / 2**20:.0f}",
                    f"{entry['share_bytes'] / entry['estimated_bytes'] - 1:+.1%}",
                    "" if without is None else f"{entry['share_bytes'] / without['share_bytes']:.2f}",
                    f"{entry['step_s']:.1f}",
                    " ".join(f"{loss:.7f}" for loss in entry["losses"]),
                    f"{entry['leaves_s']:.2f}",
                    f"{entry['comes_s']:.2f}",
                ]
            )
    header = ["tokens", "tile", "PyTorch's MiB", "estimated", "off by", "of none", "step, s", "losses"]
    header += ["inputs leave, s", "come back, s"]
    print("\n" + markdown(header, rows))
    results = {"machine": machine(workdir), "config": CONFIG, "steps": args.steps, "entries": entries}
    results["activations"] = args.activations
    return finish(results, args.json, missed if args.check else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    tile = lambda text: text if text == "auto" else int(text)  # noqa: E731
    parser.add_argument("--tokens", type=numbers, default=[32768, 131072], help="of the sequence")
    parser.add_argument("--tile", type=tile, default="auto", help="tokens of a tile (default: auto)")
    parser.add_argument("--tiles-only", action="store_true", help="leave out the runs without tiles")
    parser.add_argument("--steps", type=int, default=2)
    text = "where inputs of layers wait (default: host, as far as there is room)"
    parser.add_argument("--activations", choices=["host", "ssd"], default="host", help=text)
    parser.add_argument("--check", action="store_true", help="exit 1 where a limit is missed")
    parser.add_argument("--timeout", type=float, default=7200)
    parser.add_argument("--workdir", type=Path, help="where model and stores go (default: made here)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    return in_workdir(args.workdir, lambda workdir: compare(workdir, args))


if __name__ == "__main__":
    end_as_child(child)
    run(main)
