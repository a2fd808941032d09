"""The kinds of values in the JSON files beside a model's weights, for one error that names file and field.

transformers checks most of a config.json itself. Of other files it takes what is there: a text in place of a number is
an error of any class, much later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from memascend.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: Characters of a value that an error shows.
_SHOWN = 60


class Kind(NamedTuple):
    """What a field may hold beside null."""

    said: str
    accepts: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_special(value: Any) -> bool:
    """Return whether a value names a token: its text, or an object with it."""
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_template(value: Any) -> bool:
    """Return whether a value is a chat template, or a list or an object of such by name."""
    if isinstance(value, list):
        return all(isinstance(one, dict) and isinstance(one.get("template"), str) for one in value)
    return isinstance(value, str) or (isinstance(value, dict) and all(isinstance(one, str) for one in value.values()))


_WHOLE = Kind("a whole number", _is_whole)
_NUMBER = Kind("a number", lambda value: _is_whole(value) or isinstance(value, float))
_SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
_TEXT = Kind("a text", lambda value: isinstance(value, str))
_IDS = Kind(
    "the number of a token, or a list of such",
    lambda value: all(map(_is_whole, value)) if isinstance(value, list) else _is_whole(value),
)
_SPECIAL = Kind('a text, or an object with it as "content"', _is_special)

#: Of generation_config.json.
GENERATION = {
    **dict.fromkeys(("eos_token_id", "decoder_start_token_id", "forced_eos_token_id"), _IDS),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "forced_bos_token_id"), _WHOLE),
    **dict.fromkeys(("max_length", "max_new_tokens", "min_length", "min_new_tokens", "top_k", "num_beams"), _WHOLE),
    **dict.fromkeys(("num_return_sequences", "no_repeat_ngram_size"), _WHOLE),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), _NUMBER),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), _NUMBER),
    **dict.fromkeys(("do_sample", "use_cache"), _SWITCH),
}
#: Of tokenizer_config.json.
TOKENIZER = {
    **dict.fromkeys(("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"), _SPECIAL),
    "mask_token": _SPECIAL,
    "model_max_length": _NUMBER,
    "chat_template": Kind("a text, or a list of objects with name and template", _is_template),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces"), _SWITCH),
    **dict.fromkeys(("tokenizer_class", "padding_side", "truncation_side"), _TEXT),
}


def check_fields(described: Any, file: Path, kinds: Mapping[str, Kind]) -> None:
    """Raise CheckpointError where a field that is described in `kinds` holds another kind of value, and not null."""
    if not isinstance(described, dict):
        raise CheckpointError(f"{file} holds no JSON object: copy the file anew from the model that it belongs to")
    for name, kind in kinds.items():
        value = described.get(name)
        if value is not None and not kind.accepts(value):
            shown = repr(value)
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
            raise CheckpointError(f"{file}: {name} is {shown}, and has to be {kind.said}: correct the file")
