"""The description of a GGUF file that `ollama create` reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError
from memascend.formats.json_files import read_json

if TYPE_CHECKING:
    from pathlib import Path

#: Tokens of context that are asked for at most: Ollama reserves memory for all of them.
_CONTEXT_MAX = 8192


def write_modelfile(path: Path, gguf_name: str, tokenizer: Any, model_dir: Path, context: int) -> None:
    """Write the description of the file `gguf_name` beside it.

    Ollama takes the chat template from the file. Each token that ends an answer is a stop: a file names only one.
    """
    lines = [f"# ollama create NAME -f {path.name}", f"FROM ./{gguf_name}"]
    lines.append(f"PARAMETER num_ctx {min(context, _CONTEXT_MAX)}")
    for token in _ends(tokenizer, model_dir):
        lines.append(f"PARAMETER stop {json.dumps(token, ensure_ascii=False)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _ends(tokenizer: Any, model_dir: Path) -> list[str]:
    """Return the tokens that end an answer, by the defaults of generation beside the model and by the tokenizer."""
    try:
        named = read_json(model_dir / "generation_config.json").get("eos_token_id")
    except (CheckpointError, AttributeError):
        named = None
    numbers = named if isinstance(named, list) else [named]
    tokens = [
        tokenizer.convert_ids_to_tokens(number) for number in [*numbers, tokenizer.eos_token_id] if number is not None
    ]
    return list(dict.fromkeys(token for token in tokens if token))
