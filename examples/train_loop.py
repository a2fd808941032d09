"""Fine-tune a causal language model with its weights and optimizer states on SSD: an ordinary PyTorch loop.

python examples/train_loop.py                                             # a tiny random model, seconds
python examples/train_loop.py --model MODEL_DIR --store /nvme/run1 --host-memory 8GiB --out tuned
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memascend

TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


def tiny_model(directory: Path) -> Path:
    """Write a random model where none is given."""
    config = LlamaConfig(**TINY, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def main() -> None:
    """Train for some steps on random tokens; put your own data loader here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory (default: a tiny random one)")
    parser.add_argument("--store", type=Path, help="a directory on an SSD (default: a temporary one)")
    parser.add_argument("--host-memory", default="64MiB", help="the most host memory that memascend uses")
    parser.add_argument("--out", type=Path, help="where the tuned model goes (default: a temporary directory)")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        source = options.model or tiny_model(Path(scratch) / "model")
        store, out = options.store or Path(scratch) / "store", options.out or Path(scratch) / "out"
        model = memascend.from_pretrained(source, store=store, host_memory=options.host_memory)
        optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        batch = torch.randint(model.config.vocab_size, (2, 32))  # sequences x tokens: learned by heart
        for step in range(options.steps):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.3f}")
        memascend.save_pretrained(model, out)
        moved = memascend.stats(model)["ssd_bytes_read"] + memascend.stats(model)["ssd_bytes_written"]
        memascend.close(model)
        print(f"wrote {out}; {moved / 1e6:.1f} MB moved over the SSD")


if __name__ == "__main__":
    main()
