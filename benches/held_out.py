#!/usr/bin/env python
"""The loss on held-out chats after `memascend finetune`, beside TRL's own SFTTrainer in memory.

    python benches/held_out.py ~/.cache/memascend/SmolLM2-135M-Instruct --json benches/results/held_out.json --check

Both take the same chats in the same order, one in each sequence, in float32: questions on functions of Python's
standard library, answered by their docstrings; every tenth is held out. TRL trains with PyTorch's AdamW and a loss
of its own, which round otherwise than memascend's, so the losses are near and not equal. A third run has TRL's
trainer take memascend's optimizer and its loss in pieces, over the model in memory: its weights are the same bits. The
loss is the mean over the tokens of the assistant's turns, computed by the same code for all. Needs TRL and datasets.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from _common import machine, versions
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

import memascend
from memascend.cli.data import shuffled
from memascend.cli.data.blocks import PADDED_TO
from memascend.cli.main import main as command
from memascend.cli.metrics import METRICS_NAME
from memascend.integrations.transformers import TrainerMixin

MODULES = ("bisect", "calendar", "csv", "difflib", "fractions", "functools", "glob", "heapq", "inspect", "json", "math")
MODULES += (
    "os.path",
    "pathlib",
    "random",
    "shlex",
    "shutil",
    "statistics",
    "string",
    "tempfile",
    "textwrap",
    "zipfile",
)
#: Of a chat template that does not say what the assistant's tokens are.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>\n{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
ANSWER_CHARACTERS = 300
SEED = 0
#: The most by which the losses may differ, relative to TRL's.
APART_MAX = 0.005


def chats() -> tuple[list[Any], list[Any]]:
    """Return the chats to train on and those that are held out, each a list of messages."""
    found = []
    for name in MODULES:
        for function, value in sorted(vars(import_module(name)).items()):
            answer = inspect.getdoc(value) if inspect.isroutine(value) and not function.startswith("_") else None
            if answer:
                question = {"role": "user", "content": f"What does {name}.{function} do?"}
                found.append([question, {"role": "assistant", "content": answer[:ANSWER_CHARACTERS]}])
    return [chat for number, chat in enumerate(found) if number % 10 != 9], found[9::10]


def prepare(model_dir: Path, room: Path) -> Path:
    """Copy a model, with a template that marks the assistant's tokens."""
    copy = Path(shutil.copytree(model_dir, room / "model"))
    tokenizer = AutoTokenizer.from_pretrained(copy)
    if "{% generation %}" not in (tokenizer.chat_template or ""):
        tokenizer.chat_template = MARKED
        tokenizer.save_pretrained(copy)
    return copy


def held_out_loss(model_dir: Path, held_out: list[Any]) -> float:
    """Return the mean loss of the tokens that the assistant says."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    total, tokens = 0.0, 0
    for chat in held_out:
        shown = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids, said = torch.tensor([shown["input_ids"]]), torch.tensor(shown["assistant_masks"]).bool()
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")[said[1:]]
        total, tokens = total + losses.sum().item(), tokens + len(losses)
    return total / tokens


def by_memascend(model_dir: Path, room: Path, train: list[Any], options: argparse.Namespace) -> list[float]:
    """Train by the command line, into `room / "memascend"`, and return the losses of its steps."""
    data, out = room / "chats.jsonl", room / "memascend"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in train))
    words = ["finetune", str(model_dir), "--data", str(data), "--store", str(room / "store"), "--out", str(out)]
    words += ["--host-memory", options.host_memory, "--steps", str(options.steps), "--lr", str(options.lr)]
    words += ["--batch-size", str(options.batch_size), "--seq-len", str(options.seq_len), "--seed", str(SEED)]
    words += ["--dtype", "float32", "--no-packing", "--schedule", "cosine", "--weight-decay", "0.01"]
    if code := command(words):
        sys.exit(code)
    records = map(json.loads, (out / METRICS_NAME).read_text().splitlines())
    return [record["loss"] for record in records if record["record"] == "step"]


def with_the_same_arithmetic(trainer_class: type) -> type:
    """Return the class of a TRL trainer with memascend's optimizer, and the loss and the batches of `finetune`.

    TRL has a loss of its own. Its batches have masks, with which attention rounds otherwise: the padding is at the end,
    where no other token sees it.
    """

    class Same(TrainerMixin, trainer_class):
        def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *others: Any, **named: Any) -> Any:
            del inputs["attention_mask"]
            return Trainer.compute_loss(self, model, inputs, *others, **named)

    return Same


def by_trl(
    model_dir: Path, room: Path, train: list[Any], options: argparse.Namespace, same: bool = False
) -> list[float]:
    """Train by TRL's trainer in memory, into `room / "trl"`, and return the losses of its steps.

    With the `same` arithmetic, the optimizer and the loss are memascend's, and the model is in `room / "same"`.
    """
    import datasets
    import trl

    taken = options.steps * options.batch_size
    order = []
    for position in range(taken):
        epoch, place = divmod(position, len(train))
        sequence = shuffled(place, len(train), f"{SEED}/epoch {epoch}")
        order.append(shuffled(sequence, len(train), f"{SEED}/documents"))
    arguments = trl.SFTConfig(
        str(room / "trl-run"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        max_length=options.seq_len,
        pad_to_multiple_of=PADDED_TO if same else None,
        train_sampling_strategy="sequential",
        assistant_only_loss=True,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        weight_decay=0.01,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=SEED,
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if same:
        memascend.fuse_loss(model)
    trainer = (with_the_same_arithmetic(trl.SFTTrainer) if same else trl.SFTTrainer)(
        model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"messages": train[number]} for number in order]),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
    )
    trainer.train()
    trainer.save_model(str(room / ("same" if same else "trl")))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def differing(model_dir: Path, other: Path) -> list[str]:
    """Return the names of weights that have other bits in the two directories, or are in one alone."""
    mine, others = ({} for _ in range(2))
    for directory, weights in ((model_dir, mine), (other, others)):
        for file in directory.glob("*.safetensors"):
            weights |= load_file(file)
    same = {name for name in mine.keys() & others.keys() if torch.equal(mine[name], others[name])}
    return sorted((mine.keys() | others.keys()) - same)


def compare(model_dir: Path, room: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train in all ways, and return the losses on held-out chats, before and after, and those of the steps."""
    train, held_out = chats()
    model_dir = prepare(model_dir, room)
    steps = {train_by.__name__: train_by(model_dir, room, train, options) for train_by in (by_memascend, by_trl)}
    steps["by_trl_with_the_same_arithmetic"] = by_trl(model_dir, room, train, options, same=True)
    found = {name: held_out_loss(room / name, held_out) for name in ("memascend", "trl")}
    return {
        "chats": len(train),
        "held_out": len(held_out),
        "before": held_out_loss(model_dir, held_out),
        **found,
        "apart": abs(found["memascend"] / found["trl"] - 1),
        "tensors_of_other_bits": differing(room / "memascend", room / "same"),
        "losses_of_steps": steps,
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model directory with its tokenizer")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128, help=f"a multiple of {PADDED_TO}, to which `finetune` pads")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"fail where the losses are more than {APART_MAX:.1%} apart, or the same arithmetic gives other bits",
    )
    return parser


def main() -> int:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="held-out-") as folder:
        room = Path(folder)
        found = compare(options.model, room, options)
        settings = {name: value for name, value in vars(options).items() if name not in ("model", "json", "check")}
        result = {
            "model": options.model.name,
            **settings,
            **found,
            "machine": machine(room),
            "versions": versions("torch", "transformers", "trl"),
        }
    print(f"held-out loss {found['before']:.4f} before; {found['memascend']:.4f} memascend, {found['trl']:.4f} TRL")
    others = found["tensors_of_other_bits"]
    print(f"apart: {found['apart']:.4%}; with the same arithmetic {len(others)} tensors of other bits")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if options.check and (others or not found["apart"] <= APART_MAX) else 0


if __name__ == "__main__":
    sys.exit(main())
