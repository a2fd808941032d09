"""A small model of any architecture of transformers, and inputs for it: one rule for all of them."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

#: Widths are divided by the first of these with which a model can be built and trained. A common divisor keeps the
#: relations between widths: heads that divide them, stages that double them.
DIVISORS = (16, 32, 8, 4, 2)
PARAMETERS_MAX = 25_000_000
LAYERS = 2
VOCABULARY = 128
#: Tokens of the vocabulary that texts have no use for: those with a meaning of their own come last.
RESERVED = 40
TOKENS = 16
IMAGE = 64

#: The largest value of sizes, by the names that configurations have for them. The first pattern that fits decides.
#: None: the value stays.
LIMITS: list[tuple[str, int | None]] = [
    (r"type_vocab_size|vocab_offset|relative.*buckets|num_feat_extract_layers|num_adapter_layers", None),
    (r".*vocab_size.*|num_embeddings|codebook_size|.*group_vocab_size", VOCABULARY),
    (r"image_size|crop_size|pretrain_image_size|resolution|max_img_size|img_size|input_size", IMAGE),
    (r"num_mel_bins|n_mel_bins|mel_dim|num_mels|feature_size|input_feat_per_channel", 16),
    (r"max_.*positions|max_.*position_embeddings|n_ctx|n_positions|max_seq_len|block_size|context_length", VOCABULARY),
    (r"(num_|n_|moe_num_)?(local_|routed_)?experts", 16),
    (r".*experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts", 2),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|attention_types|attn_layer_offset", 1),
    (r"(num_|n_)?(.*_)?(layers?|depths?|blocks|block_repeats)(_per_stage)?|stage_numb_of_layers", LAYERS),
    (r"attn_layer_period", LAYERS),
    (r"num_queries|num_query_tokens|max_num_patches|num_denoising|two_stage_num_proposals|(.*_)?chunk_size", 16),
    (r"axial_pos_shape|num_frames|frames_per_clip", 4),
    (r"attention_window", 8),
    (r"num_samples|train_num_points", 64),
]
_LIMITS = [(re.compile(pattern), limit) for pattern, limit in LIMITS]
_VOCABULARIES = 1  # the second of them
#: Names of widths, and of numbers that are called like them but are none.
_WIDTHS = re.compile(
    r".*(size|sizes|dim|dims|dimension|channels?|width|rank|filters|units|planes|features|latents)"
    r"|d_\w+|n_embd|n_inner|.*hidden_.*|.*_dim_.*|.*channel_list|upsample_groups|dff|.*_ff"
)
_NO_WIDTHS = re.compile(
    r".*(vocab|image|patch|kernel|window|chunk|block|crop|stride|num_|max_|min_|pool|hop|batch|merge|group_"
    r"|audio_channels|in_chans|patch_embed_input|feature_layer|grid|roi|hidden_layers|attention_heads).*"
)


def enlarge_vocabularies(tokens: int) -> None:
    """Have the models that are made from now on in this process know so many tokens."""
    global VOCABULARY
    VOCABULARY = tokens
    _LIMITS[_VOCABULARIES] = (_LIMITS[_VOCABULARIES][0], tokens)


# ---- configurations -----------------------------------------------------------------------------------------


def configurations(model_type: Any, **changed: Any) -> Iterator[PreTrainedConfig]:
    """Yield small configurations of an architecture with `changed` values; raise the first error if there is one."""
    default = model_type.config_class()
    error: Exception | None = None
    for divisor in DIVISORS:
        try:
            config = model_type.config_class(**smaller(default, divisor) | changed)
        except Exception as raised:
            error = error or raised
        else:
            yield config
    if error is not None:
        raise error


def smaller(config: PreTrainedConfig, divisor: int) -> dict[str, Any]:
    """Return the arguments that make a small configuration of the kind of `config`."""
    arguments: dict[str, Any] = {}
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            arguments[name] = smaller(value, divisor) | {"model_type": value.model_type}
        else:
            small = _smaller_size(name, value, divisor)
            if small != value:
                arguments[name] = small
    layers = next((values[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if name in values), None)
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) == layers:
            # An entry for each layer: keep as many kinds of layers as there is room for.
            kinds = list(dict.fromkeys(value)) if all(isinstance(entry, str) for entry in value) else []
            arguments[name] = [*kinds, *arguments.get(name, value)][:LAYERS]
    patch = values.get("patch_size")
    if isinstance(patch, int) and patch > 0 and isinstance(arguments.get("image_size"), int) and IMAGE % patch:
        arguments["image_size"] = 4 * patch
    if values.get("num_experts_per_tok", 0) is None:
        arguments["num_experts_per_tok"] = 2
    if "vocab_size" in values:
        arguments |= _tokens_of_meaning(values, arguments.setdefault("vocab_size", values["vocab_size"] or VOCABULARY))
    return arguments


def _smaller_size(name: str, value: Any, divisor: int) -> Any:
    """Return the size `value` made small, or `value` itself if it is none."""
    if isinstance(value, list | tuple):
        return [_smaller_size(f"{name}_", element, divisor) for element in value]  # a list, as in config.json
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    name, is_listed = name.rstrip("_"), name.endswith("_")
    for pattern, limit in _LIMITS:
        if pattern.fullmatch(name):
            return value if limit is None else min(value, limit)
    if value < 16 or (is_listed and name in ("in_channels", "out_channels")):
        return value
    if _WIDTHS.fullmatch(name) and not _NO_WIDTHS.fullmatch(name):
        return max(-(-value // divisor), 2)
    return value


def _tokens_of_meaning(values: dict[str, Any], vocabulary: int) -> dict[str, int]:
    """Return tokens such as the end of a text that lie within the vocabulary."""
    tokens = {}
    if values.get("pad_token_id", 0) is None:
        tokens["pad_token_id"] = 0
    for name, value in values.items():
        if re.fullmatch(r".*token_(id|index)", name) and isinstance(value, int) and value >= vocabulary:
            tokens[name] = vocabulary - 1 - len(tokens)
    return tokens


def value_of(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """Return the first of these attributes that the configuration, or else one within it, has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            value = value_of(inner, *names)
            if value is not None:
                return value
    return default


# ---- inputs -------------------------------------------------------------------------------------------------


class Inputs:
    """Inputs for a model, by the names of its forward's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.config: Any = model.config
        self.rows = 2
        self._generator = torch.Generator().manual_seed(0)
        parameters = inspect.signature(model.forward).parameters.values()
        named = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
        self.accepted = {each.name for each in named}
        self.needed = {each.name for each in named if each.default is each.empty}
        self.needed |= {getattr(model, "main_input_name", "input_ids")} & self.accepted

    def candidates(self) -> Iterator[dict[str, Any]]:
        """Yield candidates for the inputs without labels, the fullest first, in several shapes."""
        unknown = sorted(self.needed - FORMS.keys())
        if unknown:
            raise ValueError(f"there is no rule for the input {', '.join(unknown)}")
        both = self.accepted & {"input_ids", "decoder_input_ids", "bbox", "pixel_values"}
        tried: list[set[str]] = []
        for without in (set(), {"pixel_values"}, {"decoder_input_ids"}, both):
            names = self.needed | (both - without)
            if names in tried:
                continue
            tried.append(names)
            for number in range(max((len(FORMS[name]) for name in names), default=1)):
                yield {name: FORMS[name][min(number, len(FORMS[name]) - 1)](self) for name in sorted(names)}

    def labels(self) -> Iterator[dict[str, Any]]:
        """Yield candidates for the labels; none, in the end."""
        for labels in LABELS if "labels" in self.accepted else LABELS[-1:]:
            yield labels(self)

    def of(self, *names: str, default: Any = None) -> Any:
        return value_of(self.config, *names, default=default)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn((self.rows, *shape), generator=self._generator)

    def integers(self, *shape: int, below: int) -> torch.Tensor:
        return torch.randint(0, below, (self.rows, *shape), generator=self._generator)

    def tokens(self, *between: int) -> torch.Tensor:
        vocabulary = min(self.of("vocab_size", default=VOCABULARY), VOCABULARY)
        tokens = 3 + self.integers(*between, TOKENS, below=max(vocabulary - RESERVED, vocabulary // 2) - 3)
        end = self.of("eos_token_id")
        if isinstance(end, int):
            tokens[..., -1] = end
        return tokens

    def image(self, *between: int) -> torch.Tensor:
        size = self.of("image_size", "pretrain_image_size", "img_size", default=IMAGE)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = self.of("num_channels", "in_channels", "in_chans", default=3)
        return self.floats(*between, channels if isinstance(channels, int) else 3, height, width)

    def video(self) -> torch.Tensor:
        return self.image(self.of("num_frames", "frames_per_clip", default=4))

    def bins(self) -> int:
        names = ("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mel_bins", "mel_dim", "input_dim")
        return self.of(*names, "input_size", default=16)


#: The forms that an input may have: models call different things by the same name.
FORMS: dict[str, list[Callable[[Inputs], torch.Tensor]]] = {
    "input_ids": [Inputs.tokens, lambda inputs: inputs.tokens(2)],  # the second: two choices
    "decoder_input_ids": [Inputs.tokens],
    "attention_mask": [lambda inputs: torch.ones(inputs.rows, TOKENS, dtype=torch.long)],
    "pixel_values": [Inputs.image, Inputs.video, lambda inputs: inputs.image(1), lambda inputs: inputs.image(2)],
    "pixel_values_videos": [Inputs.video],
    "bbox": [lambda inputs: torch.zeros(inputs.rows, TOKENS, 4, dtype=torch.long)],
    "input_features": [
        lambda inputs: inputs.floats(inputs.bins(), 2 * inputs.of("max_source_positions", default=32)),
        lambda inputs: inputs.floats(64, inputs.bins()),
        lambda inputs: inputs.floats(inputs.bins(), 64),
        lambda inputs: inputs.floats(1, 64, inputs.bins()),
    ],
    "input_values": [
        lambda inputs: inputs.floats(8000),
        lambda inputs: inputs.floats(inputs.of("max_length", default=64), inputs.bins()),
        lambda inputs: inputs.floats(1, 8000),
        Inputs.tokens,
    ],
    "past_values": [
        lambda inputs: inputs.floats(
            inputs.of("context_length", default=32), inputs.of("num_input_channels", default=1)
        ),
        lambda inputs: inputs.floats(inputs.of("context_length", default=32)),
    ],
}


def _class_of_each_pixel(inputs: Inputs) -> dict[str, Any]:
    return {"labels": inputs.integers(*inputs.image().shape[-2:], below=2)}


def _boxes(inputs: Inputs) -> dict[str, Any]:
    boxes = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.5, 0.3, 0.4]])
    return {"labels": [{"class_labels": torch.tensor([0, 1]), "boxes": boxes} for _ in range(inputs.rows)]}


#: Kinds of labels; none, in the end.
LABELS: list[Callable[[Inputs], dict[str, Any]]] = [
    lambda inputs: {"labels": inputs.tokens()},
    lambda inputs: {"labels": torch.arange(inputs.rows) % 2},
    lambda inputs: {"labels": inputs.integers(TOKENS, below=2)},
    _class_of_each_pixel,
    _boxes,
    lambda _inputs: {},
]


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return the tensors among a model's arguments or results."""
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss that a model has computed, or else one to which all that it has returned contributes."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.float().sum()
    trained = [value for value in tensors_of(output) if value.requires_grad]
    if not trained:
        raise ValueError("nothing that it returns depends on its parameters")
    return torch.stack([value.float().square().mean() for value in trained]).sum()
