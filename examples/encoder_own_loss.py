"""Train an encoder that is no Hugging Face model, with a loss of its own: pairs of sentences close, others apart.

python examples/encoder_own_loss.py                                       # tiny, seconds
python examples/encoder_own_loss.py --width 1024 --layers 48 --store /nvme/encoder --host-memory 2GiB
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import memascend


class Encoder(nn.Module):
    """A Transformer whose sentence vector is the mean over its tokens."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        """Make it with random weights."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = {"d_model": width, "nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a unit vector for each sentence: (sentences, tokens) to (sentences, width)."""
        states = self.embedding(tokens)  # (sentences, tokens, width)
        for layer in self.layers:
            states = layer(states)  # the same
        return functional.normalize(states.mean(dim=1), dim=-1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--store", type=Path, help="a directory on an SSD (default: a temporary one)")
    parser.add_argument("--host-memory", default="64MiB", help="the most host memory that memascend uses")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        encoder = Encoder(512, options.width, options.layers)
        memascend.offload(encoder, store=options.store or Path(scratch) / "store", host_memory=options.host_memory)
        optimizer = memascend.AdamW(encoder.parameters(), lr=1e-3, states="bfloat16")
        sentences = torch.randint(512, (8, 16))  # (sentences, tokens)
        paired = sentences.clone()
        paired[:, ::4] = torch.randint(512, (8, 4))  # the same sentences with some words replaced
        for step in range(8):
            vectors, others = encoder(torch.cat([sentences, paired])).chunk(2)  # each (sentences, width)
            similar = vectors @ others.T / 0.1  # (sentences, sentences)
            loss = functional.cross_entropy(similar, torch.arange(8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.3f}")
        memascend.close(encoder)
