#!/usr/bin/env python
"""Host memory of transformers' Trainer over an offloaded model, beside the same run in a plain loop.

    python benches/trainer.py MODEL_DIRECTORY                       # a directory of a causal model
    python benches/trainer.py MODEL_DIRECTORY --steps 3 --check --json benches/results/trainer.json

Three processes, one after the other: a plain loop that saves the model at the end; the Trainer, with an evaluation, two
checkpoints and `save_model`; and the Trainer again, which goes on with the run that the second has left, and saves. All
import the same modules before the baseline is taken. Each runs under RLIMIT_DATA, set so far above the baseline that
the plan and PyTorch's share fit, and a copy of the model does not.

Peak is VmHWM above the baseline. Losses of all three are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import finish, machine, markdown, rss, run

TOKENS = 128
#: The Trainer's peak beside the plain loop's.
TIMES_MAX = 1.03


def data_bytes() -> int:
    """Return the bytes that count towards RLIMIT_DATA now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmData in /proc/self/status")


def child(way: str, model: str, folder: str, steps: int, host_memory: str, room: int) -> None:
    import torch
    import transformers
    from transformers import LlamaForCausalLM  # noqa: F401 (part of the baseline)

    import memascend
    from memascend.integrations.transformers import MemascendArguments, Trainer

    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))  # starts the threads
    baseline = rss()["hwm"]
    limit = data_bytes() + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    generator = torch.Generator().manual_seed(0)
    vocabulary = transformers.AutoConfig.from_pretrained(model).vocab_size
    rows = torch.randint(0, vocabulary, (8, TOKENS), generator=generator)
    losses = []
    if way == "loop":
        (store := Path(folder, "loop")).mkdir()
        offloaded = memascend.from_pretrained(model, store=store, host_memory=host_memory, durability="step")
        optimizer = memascend.AdamW(offloaded.parameters(), lr=1e-4, weight_decay=0.0)
        for step in range(steps):
            row = rows[step : step + 1]
            # The Trainer divides by the number of labels, too.
            loss = offloaded(input_ids=row, labels=row, num_items_in_batch=torch.tensor(TOKENS - 1)).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
        memascend.save_pretrained(offloaded, f"{folder}/loop-saved")
        memascend.close(offloaded)
    else:
        arguments: dict[str, Any] = {
            "output_dir": f"{folder}/trainer",
            "store": [f"{folder}/store"],
            "host_memory": host_memory,
            "durability": "step",
            "per_device_train_batch_size": 1,
            "max_steps": steps if way == "trainer" else steps + 1,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "train_sampling_strategy": "sequential",
            "eval_strategy": "steps",
            "save_strategy": "steps",
            "eval_steps": steps,
            "save_steps": max(1, steps // 2),
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
        }
        Path(folder, "store").mkdir(exist_ok=True)
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, MemascendArguments(**arguments), train_dataset=data, eval_dataset=data[:1])
        trainer.train(resume_from_checkpoint=way == "resumed")
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.save_model(f"{folder}/saved-{way}")
    result = {"way": way, "losses": losses, "baseline_bytes": baseline, "peak_bytes": rss()["hwm"] - baseline}
    Path(folder, f"{way}.json").write_text(json.dumps(result))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model directory")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--host-memory", default="160MiB")
    parser.add_argument("--room", type=int, default=800, help="MiB that data may take above the baseline")
    parser.add_argument("--workdir", type=Path, help="where stores go")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {TIMES_MAX} of the plain loop's peak")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, folder, _ = args.child
        child(way, args.model, folder, args.steps, args.host_memory, args.room << 20)
        return 0
    results = []
    folder = tempfile.mkdtemp(dir=args.workdir)
    try:
        for way in ("loop", "trainer", "resumed"):
            options = ["--steps", str(args.steps), "--host-memory", args.host_memory, "--room", str(args.room)]
            subprocess.run([sys.executable, __file__, args.model, *options, "--child", way, folder, ""], check=True)
            results.append(json.loads(Path(folder, f"{way}.json").read_text()))
    finally:
        shutil.rmtree(folder)
    weights = sum(file.stat().st_size for file in Path(args.model).glob("*.safetensors"))
    loop = results[0]
    print(
        markdown(
            ["run", "peak above the baseline, MB", "beside the loop", "losses"],
            [
                [
                    found["way"],
                    f"{found['peak_bytes'] / 1e6:.1f}",
                    f"{found['peak_bytes'] / loop['peak_bytes']:.3f}",
                    ", ".join(f"{loss:.4f}" for loss in found["losses"]),
                ]
                for found in results
            ],
        )
    )
    print(f"\nthe model's files: {weights / 1e6:.0f} MB; data limited to {args.room} MiB above the baseline")
    faults = [
        f"{found['way']}: {found['peak_bytes'] / loop['peak_bytes']:.3f} of the plain loop's peak"
        for found in results
        if args.check and found["peak_bytes"] > TIMES_MAX * loop["peak_bytes"]
    ]
    if any(found["losses"][: args.steps] != loop["losses"] for found in results):
        faults.append("the losses differ")
    about = {"machine": machine(args.workdir or Path()), "tokens": TOKENS, "model_bytes": weights}
    return finish(
        about | {"host_memory": args.host_memory, "room_mib": args.room, "results": results}, args.json, faults
    )


if __name__ == "__main__":
    run(main)
