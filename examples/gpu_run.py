"""Compute on a CUDA device within a budget of its memory; weights, gradients and states stay on SSD.

python examples/gpu_run.py                                                # a tiny random model, seconds
python examples/gpu_run.py --model MODEL_DIR --store /nvme/run1 --host-memory 16GiB --device-memory 20GiB
"""

import argparse
import tempfile
from pathlib import Path

import torch
from train_loop import tiny_model

import memascend


def main(device: object = "cuda") -> None:
    """Train for some steps on random tokens, and show the plans and what was moved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory (default: a tiny random one)")
    parser.add_argument("--store", type=Path, help="a directory on an SSD (default: a temporary one)")
    parser.add_argument("--host-memory", default="64MiB", help="the most host memory that memascend uses")
    parser.add_argument("--device-memory", default="1GiB", help="the most device memory, PyTorch's included")
    parser.add_argument("--activations", choices=("recompute", "host", "ssd"), default="host")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    batch = torch.randint(512, (2, 32))  # sequences x tokens, on the CPU: the model copies them to the device
    with tempfile.TemporaryDirectory() as scratch:
        model = memascend.from_pretrained(
            options.model or tiny_model(Path(scratch) / "model"),
            store=options.store or Path(scratch) / "store",
            host_memory=options.host_memory,
            device=device,
            device_memory=options.device_memory,
            activations=options.activations,
            batch_tokens=batch.numel(),
        )
        print(memascend.plan_of(model))
        optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
        for step in range(options.steps):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.3f}")
        moved = memascend.stats(model)["device"]
        print(f"{moved['h2d_bytes'] / 1e6:.1f} MB to the device, {moved['d2h_bytes'] / 1e6:.1f} MB from it")
        memascend.close(model)


if __name__ == "__main__":
    main()
