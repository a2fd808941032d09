"""The work of one optimizer step, for plans and forecasts."""

from __future__ import annotations

from dataclasses import dataclass

from memascend.common.tiles import tile_of


@dataclass(slots=True)
class Workload:
    """The work of one optimizer step."""

    seq_len: int
    batch_size: int
    grad_accum: int
    optimizer: str = "adamw"
    states: str = "float32"
    master: bool = True
    #: Of how many steps one is durable, beside the one before; 0 if none is.
    period: int = 1
    #: Where inputs of recomputed layers wait: on the device ("recompute"), in host memory as far as
    #: it goes, on SSD.
    activations: str = "host"
    #: Whether the repeated layers are recomputed in the backward pass.
    recompute: bool = True
    #: Sequences of a batch that a repeated layer computes at once; None is all of them.
    micro_batch_size: int | None = None
    #: Tokens that an MLP or a norm computes at once, or "auto"; None is all of them.
    tile_tokens: int | str | None = None
    #: Whether a mask keeps the documents of a packed sequence apart, if the model makes one.
    boundaries: bool = False
    #: Generations that the store keeps beside the last steps', such as the best model.
    kept: int = 0
    #: Over how many ranks the store is divided; each computes all of this on batches of its own.
    ranks: int = 1
    #: How experts are read, as in `memascend.offload`.
    experts: str = "whole"

    @property
    def written_share(self) -> float:
        """Share of resident data that a step writes, in the mean of the steps."""
        return 1 / self.period if self.period else 0.0

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass."""
        return self.seq_len * self.batch_size

    @property
    def slices(self) -> int:
        """Slices of a batch that go through a repeated layer one after another."""
        return 1 if self.micro_batch_size is None else -(-self.batch_size // self.micro_batch_size)

    @property
    def layer_tokens(self) -> int:
        """Tokens that a repeated layer computes at once."""
        return self.seq_len * min(self.batch_size, self.micro_batch_size or self.batch_size)

    @property
    def tiled(self) -> bool:
        """Whether MLPs run on tiles, with fewer tokens than a layer computes at once."""
        return self.tile_tokens is not None and tile_of(self.tile_tokens, self.layer_tokens) < self.layer_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens of a step: of all passes, on all ranks."""
        return self.tokens * self.grad_accum * self.ranks
