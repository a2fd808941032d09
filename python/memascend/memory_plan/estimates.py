"""PyTorch's memory while a model computes, estimated from its configuration.

With T tokens in a pass, V words and b bytes an element:

- Logits. `ForCausalLMLoss` of transformers works in fp32, and the backward pass of the cross entropy holds three
  such tensors at once: the log-probabilities, their gradient, and the gradient of the logits. 12 T V bytes.
- One layer, recomputed. Per token, with width H, heads' width A, keys' and values' width K and MLP width I: the input
  in fp32, the normalised input and the output of both norms (2 (4 + 2 b) H), the rotated queries and keys, values and
  the attention's output (b (2 A + 2 K)), the MLP's four tensors of width I (4 b I), the layer's output (b H), and in
  the backward pass the gradients of the output and of two of the MLP's (b H + 2 b I). Tensors are counted as by
  Korthikanti et al. 2022 (arXiv 2205.05198, section 4), for RMSNorm and a gated MLP; no attention matrix is kept, since
  PyTorch's fused attention recomputes it. Experts: I is the sum over the experts that a token is sent to.

These are the tensors of transformers' Llama and Qwen2, to 1% (see `tests/memory_plan/test_device_plan.py`). Not
counted: scratch of matrix products and of attention, the allocator's holes, Python and autograd themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.memory_plan.lines import Inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.layout.units import Unit

#: Tensors of equal size: (bytes of one, how many).
Tensors = list[tuple[int, int]]


@dataclass(frozen=True)
class Shape:
    """The widths of a decoder, in elements."""

    hidden: int
    #: All heads' queries, and all heads' keys (or values).
    queries: int
    keys: int
    #: All the experts that a token is sent to.
    mlp: int
    vocabulary: int

    @staticmethod
    def of(config: Any) -> Shape | None:
        """Read a Hugging Face configuration; return None unless it describes a language model."""
        text: Any = config.get_text_config() if hasattr(config, "get_text_config") else None
        if any(getattr(text, name, None) is None for name in ("vocab_size", "hidden_size", "num_attention_heads")):
            return None
        hidden, heads = text.hidden_size, text.num_attention_heads
        head = getattr(text, "head_dim", None) or hidden // heads
        mlp = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
        mlp = mlp or getattr(text, "n_inner", None) or 4 * hidden
        return Shape(
            hidden,
            queries=head * heads,
            keys=head * (getattr(text, "num_key_value_heads", None) or heads),
            mlp=mlp * (getattr(text, "num_experts_per_tok", None) or 1),
            vocabulary=text.vocab_size,
        )

    def tiled_tensors(self, tokens: int, itemsize: int, tile: int) -> Tensors:
        """Return the tensors of one layer in its backward pass, whose MLP and norms run on tiles of `tile` tokens.

        Of the whole sequence there are the tensors that attention keeps, the inputs of both norms and of the MLP, and
        the gradients of the MLP's output and input; of a tile the MLP's tensors as in `layer_tensors`, with copies of
        its input's and output's parts and gradients.
        """
        narrow, of_tile = tokens * itemsize, tile * itemsize
        return [
            (narrow * self.hidden, 6),
            (narrow * self.queries, 2),
            (narrow * self.keys, 2),
            (of_tile * self.mlp, 6),
            (of_tile * self.hidden, 3),
        ]

    @property
    def attention_weights(self) -> int:
        """Weights of the projections of a layer's attention."""
        return 2 * self.hidden * (self.queries + self.keys)

    def kept_tensors(self, tokens: int, itemsize: int) -> Tensors:
        """Return the tensors that autograd keeps of one layer between its forward and its backward pass."""
        wide, narrow = tokens * self.hidden * 4, tokens * itemsize
        return [
            # Of both norms the input in fp32, the normalised input and the output; the layer's output.
            (wide, 2),
            (narrow * self.hidden, 5),
            # Rotated queries and the attention's output; keys and values; the MLP.
            (narrow * self.queries, 2),
            (narrow * self.keys, 2),
            (narrow * self.mlp, 4),
        ]

    def layer_tensors(self, tokens: int, itemsize: int) -> Tensors:
        """Return the tensors of one layer in its backward pass: kept ones, and the gradients of activations."""
        narrow = tokens * itemsize
        return [*self.kept_tensors(tokens, itemsize), (narrow * self.mlp, 2), (narrow * self.hidden, 1)]

    def logits_tensors(self, tokens: int) -> Tensors:
        """Return the logits in fp32 and their gradients, in the backward pass of the loss."""
        return [(4 * tokens * self.vocabulary, 3)]

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of `kept_tensors`."""
        return _sum(self.kept_tensors(tokens, itemsize))


def waiting_inputs(units: Sequence[Unit], config: Any, tokens: int, layer_tokens: int | None = None) -> Inputs | None:
    """Return the inputs of recomputed layers of a pass over `tokens`; None if the model's widths are unknown.

    A repeated layer computes `layer_tokens` of them at once, of slices of the batch; None is all.
    """
    shape = Shape.of(config)
    repeated = next((unit for unit in units if unit.repeated), None)
    if shape is None or repeated is None:
        return None
    layer_tokens = tokens if layer_tokens is None else layer_tokens
    return Inputs(layer_tokens * shape.hidden * repeated.tensors[0].dtype.itemsize, -(-tokens // layer_tokens))


def _sum(tensors: Tensors) -> int:
    return sum(nbytes * count for nbytes, count in tensors)
