"""Kill a run with SIGKILL, resume it from its store, and compare with a run that was left alone: the same bits.

python examples/resume_after_kill.py                                      # a tiny random model, seconds
python examples/resume_after_kill.py --model MODEL_DIR --scratch /nvme/scratch --host-memory 8GiB
"""

import argparse
import hashlib
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import torch
from train_loop import tiny_model

import memascend


def train(source: Path, store: Path, host_memory: str, kill: bool) -> str:
    """Begin the run in `store`, or resume it where there is a durable step; return a checksum of the weights."""
    if memascend.can_resume(store):
        run = memascend.resume(store, host_memory=host_memory)
        model, optimizer, done = run.model, run.optimizer, run.steps
        print(f"resumed after step {done}")
    else:
        model, done = memascend.from_pretrained(source, store=store, host_memory=host_memory, durability="step"), 0
        optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
    for step in range(done, 6):
        batch = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(step))
        model(input_ids=batch, labels=batch).loss.backward()
        if kill and step == 3:  # in the middle of a step: its gradients are lost, no update is
            print("killed in step 4", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
    checksum = hashlib.sha256()
    for _, value in memascend.parameters_of(model):
        checksum.update(value.contiguous().view(torch.uint8).numpy())
    memascend.close(model)
    return checksum.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory (default: a tiny random one)")
    parser.add_argument("--scratch", type=Path, help="a directory on an SSD (default: that of temporary files)")
    parser.add_argument("--host-memory", default="64MiB", help="the most host memory that memascend uses")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        source = options.model or tiny_model(Path(scratch) / "model")
        arguments = (source, Path(scratch) / "killed", options.host_memory)
        victim = multiprocessing.get_context("spawn").Process(target=train, args=(*arguments, True))
        victim.start()
        victim.join()
        print(f"the first run ended with exit code {victim.exitcode}")
        resumed = train(*arguments, kill=False)
        alone = train(source, Path(scratch) / "alone", options.host_memory, kill=False)
        print("the weights are the same, bit for bit" if resumed == alone else "THE WEIGHTS DIFFER")
