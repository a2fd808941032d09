"""A model whose matrices lie over ranks in every way that APOLLO meets."""

from __future__ import annotations

import torch
from torch import nn

TOKENS, WIDTH, EXPERTS = 1024, 250, 4


class MatrixLayer(nn.Module):
    """Matrices whose shares cut channels, matrices of one block, and some so small that they are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        #: 700 x 250: its channels are rows. Of two ranks the first ends within a row; of four the last has nothing.
        self.tall = nn.Linear(WIDTH, 700)
        #: 250 x 700: its channels are columns, which every share cuts.
        self.wide = nn.Linear(700, WIDTH, bias=False)
        #: As many rows as columns, and one block.
        self.square = nn.Linear(WIDTH, WIDTH)
        #: Packed with small neighbours; channels of both kinds.
        self.down = nn.Linear(WIDTH, 9, bias=False)
        self.up = nn.Linear(9, WIDTH, bias=False)
        #: One of them is used by a batch.
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 300, bias=False) for _ in range(EXPERTS))
        self.back = nn.Linear(300, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.wide(torch.tanh(self.tall(y))) + self.up(self.down(self.square(y)))
        return x + self.back(torch.relu(self.experts[expert](y)))


class Matrices(nn.Module):
    """Two such layers between an embedding and a head, which take AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(MatrixLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.05)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, int(tokens[0, number]) % EXPERTS)
        loss = nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flip(1).flatten())
        return {"loss": loss}
