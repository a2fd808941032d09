"""Train LoRA adapters with PEFT over a model whose frozen weights are read from its own files: nothing is copied.

python examples/lora.py                                                   # a tiny random model, seconds
python examples/lora.py --model MODEL_DIR --store /nvme/lora --host-memory 4GiB --out adapter
"""

import argparse
import tempfile
from pathlib import Path

import peft
import torch
from train_loop import tiny_model

import memascend


def main() -> None:
    """Train the adapters on random tokens and save them as PEFT does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory (default: a tiny random one)")
    parser.add_argument("--store", type=Path, help="a directory on an SSD (default: a temporary one)")
    parser.add_argument("--host-memory", default="64MiB", help="the most host memory that memascend uses")
    parser.add_argument("--out", type=Path, help="where the adapters go (default: a temporary directory)")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        source = options.model or tiny_model(Path(scratch) / "model")
        store, out = options.store or Path(scratch) / "store", options.out or Path(scratch) / "adapter"
        base = memascend.from_pretrained(source, store=store, host_memory=options.host_memory, frozen="files")
        model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = memascend.AdamW(adapters, lr=1e-2)
        batch = torch.randint(model.config.vocab_size, (2, 32))  # sequences x tokens: learned by heart
        for step in range(options.steps):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.3f}")
        model.save_pretrained(out)
        numbers = sum(parameter.numel() for parameter in adapters)
        frozen = memascend.stats(model)["file_bytes_read"]
        print(f"wrote {out}: {numbers} numbers; {frozen / 1e6:.1f} MB of frozen weights read from {source}")
        memascend.close(model)


if __name__ == "__main__":
    main()
