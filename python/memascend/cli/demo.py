"""`memascend demo`: fine-tune a small model on this Python's own standard library, and show time and memory.

The library's sources are on every machine with Python and are real text, and a few files held out of the training
show whether the model learned. The same run in memory is measured in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from memascend.cli.data import Documents, TokenBlocks, Tokenizer
from memascend.cli.demo_models import SMOLLM2
from memascend.cli.dtypes import choose_dtype
from memascend.cli.finetune import finetune
from memascend.cli.settings import Result, Settings
from memascend.common.outputs import clear_away, hidden_directory
from memascend.common.sizes import format_size
from memascend.errors import CheckpointError, MemascendError, OutputError
from memascend.formats.config import load_config
from memascend.hardware.drives import cache_directory

SEED = 0
LEARNING_RATE = {SMOLLM2: 5e-5, "random": 3e-4}  # an untrained model takes larger steps
#: The default budget by the dtype of the training: enough to read the next layer while one computes.
HOST_MEMORY = {"bfloat16": 160 << 20, "float32": 256 << 20}
HELD_OUT_FILES = 12
HELD_OUT_BLOCKS = 12
SAMPLE_TOKENS = 40
PROMPT = 'def read_lines(path, encoding="utf-8"):\n    """'
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def demo(
    *,
    from_scratch: bool,
    host_memory: int | None,
    dtype: str,
    steps: int,
    seq_len: int,
    store: Path | None = None,
    out: Path | None = None,
    compare: bool = True,
) -> int:
    """Run the demo, print the comparison, and return the exit code."""
    began = time.monotonic()
    if out is not None and os.path.lexists(out):
        raise OutputError(f"--out {out} already exists: choose another, or move it away")
    if store is not None:
        try:
            store.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"--store {store}: {error.strerror}: give another directory") from error
    model_dir = _model("random" if from_scratch else SMOLLM2)
    try:
        config = load_config(model_dir)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; delete {model_dir}: the demo writes it anew") from error
    choice = choose_dtype(dtype, model_dir, config)
    train, held_out = _sources()
    cache = model_dir.parent
    place = store or cache
    clear_away(place)  # A demo that was killed has left its directory.
    with hidden_directory(place, "demo") as work:
        settings = Settings(
            model_dir=model_dir,
            data=train,
            out=out or work / "out",
            store=[work / "store"],
            host_memory=host_memory or HOST_MEMORY[choice.dtype],
            dtype=choice.dtype,
            save_dtype=choice.saved,
            temporary=work,
            steps=steps,
            seq_len=seq_len,
            lr=LEARNING_RATE["random" if from_scratch else SMOLLM2],
            warmup_steps=min(3, steps - 1),
            seed=SEED,
            boundaries="off",  # as when the figures were measured that documents have of it
        )
        settings.store[0].mkdir()
        _say(f"model      {model_dir}")
        _say(f"dtype      {choice.reason or choice.dtype}")
        _say(f"text       {len(train)} files of {Path(os.__file__).parent}, and {len(held_out)} held out")
        look = _Look(held_out, work, seq_len)
        result = finetune(settings, look)
        if result.signal_number is not None:
            kept = f"{out} holds the model after step {result.steps}" if out else "nothing of it was kept"
            _say(f"interrupted: the demo ends here; {kept}. Its store was temporary: it cannot be resumed")
            return 128 + result.signal_number
        in_memory = _measure_in_memory(settings, work) if compare else None
        _print_comparison(settings, result, look, in_memory)
        if out is not None:
            _say(f"\nthe fine-tuned model is in {out}")
    _say(f"\n{time.monotonic() - began:.0f} s in all")
    return 0


def _model(kind: str) -> Path:
    """Return the demo's model directory in the user's cache, written there the first time."""
    cache = cache_directory()
    model_dir = cache / ("random-llama-100M" if kind == "random" else kind)
    if not model_dir.is_dir():
        _say(f"writing {model_dir} (once) ...")
        command = [sys.executable, "-m", "memascend.cli.demo_models", "random" if kind == "random" else "smollm2"]
        done = subprocess.run([*command, str(model_dir)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise MemascendError(last.removeprefix("memascend: error: "))
    return model_dir


def _sources() -> tuple[list[Path], list[Path]]:
    """Return the standard library's source files, to train on and held out."""
    root = Path(os.__file__).parent
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in NOT_LIBRARY)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    files = [file for file in files if 2_000 <= file.stat().st_size <= 200_000]
    if len(files) <= HELD_OUT_FILES:
        raise MemascendError(f"{root} has too few Python sources for the demo")
    held_out = set(random.Random(SEED).sample(files, HELD_OUT_FILES))
    return [file for file in files if file not in held_out], sorted(held_out)


class _Look:
    """The loss on held-out text and a sample from a prompt, before and after the training."""

    def __init__(self, held_out: list[Path], work: Path, seq_len: int) -> None:
        self._held_out, self._work, self._seq_len = held_out, work, seq_len
        self.losses: dict[str, float] = {}
        self.samples: dict[str, str] = {}

    def __call__(self, when: str, model: Any, tokenizer: Tokenizer) -> None:
        model.eval()
        self.losses[when] = self._loss(model, tokenizer)
        self.samples[when] = self._sample(model, tokenizer)
        _say(f"{when + ' it':10} loss {self.losses[when]:.3f} on held-out files")

    @torch.no_grad()
    def _loss(self, model: Any, tokenizer: Tokenizer) -> float:
        scratch = Path(tempfile.mkdtemp(dir=self._work))
        documents = Documents(self._held_out, scratch=scratch)
        blocks = TokenBlocks(
            documents,
            tokenizer,
            scratch=scratch,
            seq_len=self._seq_len,
            seed=SEED,
            vocab_size=model.config.vocab_size,
        )
        try:
            count = min(HELD_OUT_BLOCKS, len(blocks))
            batches = (blocks.batch(index, 1) for index in range(count))
            return sum(model(**batch, use_cache=False).loss.item() for batch in batches) / count
        finally:
            blocks.close()
            documents.close()
            shutil.rmtree(scratch)

    @torch.no_grad()
    def _sample(self, model: Any, tokenizer: Tokenizer) -> str:
        prompt = torch.tensor([list(tokenizer.encode(PROMPT))])
        ids = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=SAMPLE_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.end_of_document,
        )
        return tokenizer.decode(ids[0].tolist())


def _measure_in_memory(settings: Settings, work: Path) -> dict[str, Any]:
    """Two steps of the same run without a store, in a fresh process: its "end" record."""
    _say("measuring two steps of the same run in memory ...")
    metrics = work / "in-memory.jsonl"
    links = work / "sources"  # a directory of links: several hundred paths are too long for a command line
    links.mkdir()
    for number, path in enumerate(settings.data):
        (links / f"{number:05}.py").symlink_to(path)
    command = [
        *(sys.executable, "-m", "memascend", "finetune", str(settings.model_dir), "--in-memory"),
        *("--data", str(links), "--out", str(work / "in-memory"), "--metrics", str(metrics)),
        *("--steps", "2", "--seq-len", str(settings.seq_len), "--seed", str(settings.seed)),
        *("--lr", str(settings.lr), "--warmup-steps", "1", "--dtype", settings.dtype),
        *("--boundaries", settings.boundaries),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or f"ended by signal {-done.returncode}").splitlines()[-1]
        return {"error": reason.removeprefix("memascend: error: ")}  # not fitting is a result too
    return json.loads(metrics.read_text().splitlines()[-1])


def _print_comparison(settings: Settings, result: Result, look: _Look, in_memory: dict[str, Any] | None) -> None:
    steps = result.steps - result.steps_skipped
    traffic = (result.ssd_bytes_read, result.ssd_bytes_written)
    read, written = (count / steps / result.parameters for count in traffic)
    before, after = look.losses["before"], look.losses["after"]
    _say(f"\nheld-out loss     {before:.3f} before, {after:.3f} after {steps} steps")
    _say(f"step time         {result.seconds / result.steps:.2f} s for {settings.seq_len} tokens")
    _say(f"SSD traffic       {read:.1f} bytes read and {written:.1f} written per parameter and step")
    _say("peak host memory, above what importing torch and transformers takes:")
    budget = format_size(int(settings.host_memory or 0))
    _say(f"  memascend       {format_size(result.peak_above_baseline_bytes)} (budget {budget})")
    if in_memory is not None and "error" in in_memory:
        _say(f"  in memory       did not run: {in_memory['error']}")
    elif in_memory is not None:
        above = max(0, in_memory["peak_rss_bytes"] - in_memory["baseline_rss_bytes"])
        seconds = in_memory["seconds"] / in_memory["steps"]
        _say(f"  in memory       {format_size(above)} (measured over 2 steps, {seconds:.2f} s each)")
    for when in ("before", "after"):
        sample = "\n".join("  | " + line for line in look.samples[when].splitlines())
        _say(f"\nsample {when} (greedy; the first {len(PROMPT)} characters are the prompt):\n{sample}")


def _say(text: str) -> None:
    print(text, flush=True)
