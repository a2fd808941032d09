"""A tokenizer of transformers as llama.cpp reads it: tokens, merges, and which rules split a text before."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from memascend.errors import CheckpointError
from memascend.formats.gguf.architectures import INSTEAD
from memascend.formats.side_files import has_tokenizer
from memascend.formats.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

# The kinds of tokens in a file.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"
#: (The expressions that split a text one after the other, whether a word that is a token needs no merges) -> the name
#: that llama.cpp knows them by.
_SPLITS = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGIT, _GPT2), False): "smollm",
    ((_QWEN2,), False): "qwen2",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_TEKKEN,), True): "tekken",
}
_SPACE = "\u2581"


def load_fast_tokenizer(model_dir: Path) -> Any:
    """Return the tokenizer of a model directory, as transformers loads it.

    Raises CheckpointError where there is none, or transformers has no fast one for it.
    """
    if not has_tokenizer(model_dir):
        raise CheckpointError(
            f"{model_dir} has no tokenizer, which a GGUF file holds: put its files there, or give --tokenizer DIR"
        )
    tokenizer = load_tokenizer(model_dir)
    if not hasattr(tokenizer, "backend_tokenizer"):
        _refuse(model_dir, "it has no tokenizer.json")
    return tokenizer


def tokenizer_entries(tokenizer: Any, rows: int, model_dir: Path) -> list[tuple[str, Any]]:
    """Return the entries of a file on its tokenizer.

    Args:
        tokenizer: of transformers, a fast one.
        rows: of the embedding; tokens without a name make up for those that the tokenizer lacks.

    Raises CheckpointError for a tokenizer whose rules llama.cpp is not known to have.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model.get("type") != "BPE":
        _refuse(model_dir, f"it is of the kind {model.get('type')}")
    if len(tokenizer) > rows:
        raise CheckpointError(f"{model_dir} has {rows} rows of embeddings, but a tokenizer of {len(tokenizer)} tokens")
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    entries: list[tuple[str, Any]]
    if any(part["type"] == "ByteLevel" for part in _parts(described["pre_tokenizer"], "pretokenizers")):
        entries = [("tokenizer_model", "gpt2"), ("tokenizer_pre", _split_name(described, model_dir))]
        entries.append(("token_merges", [" ".join(merge) for merge in merges]))
    elif model.get("byte_fallback"):
        entries = [("tokenizer_model", "llama"), ("tokenizer_pre", "default")]
        entries.append(("add_space_prefix", _begins_with_space(described, model_dir)))
        entries.append(("token_scores", _scores(tokenizer, merges, rows)))
    else:
        _refuse(model_dir, "it knows neither bytes nor their fallback")
    tokens, kinds = _tokens(tokenizer, rows)
    entries += [("token_list", tokens), ("token_types", kinds)]
    entries += _special(tokenizer)
    if isinstance(tokenizer.chat_template, str):
        entries.append(("chat_template", tokenizer.chat_template))
    return entries


def _refuse(model_dir: Path, why: str) -> NoReturn:
    raise CheckpointError(f"{model_dir}: its tokenizer is not written as GGUF: {why}; {INSTEAD}")


def _parts(described: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a part of tokenizer.json; a sequence has several."""
    if described is None:
        return []
    return described[name] if described["type"] == "Sequence" else [described]


def _split_name(described: dict[str, Any], model_dir: Path) -> str:
    """Return the name of the rules by which a tokenizer over bytes splits a text."""
    normalisers = [part["type"] for part in _parts(described["normalizer"], "normalizers")]
    if set(normalisers) - {"NFC"}:  # llama.cpp leaves a text as it is; nearly every text is in this form
        _refuse(model_dir, f"it changes texts first ({', '.join(normalisers)})")
    expressions: list[str] = []
    for part in _parts(described["pre_tokenizer"], "pretokenizers"):
        expression = _expression(part)
        if expression is None:
            _refuse(model_dir, f"it splits texts by {json.dumps(part)}")
        expressions += expression
    name = _SPLITS.get((tuple(expressions), bool(described["model"].get("ignore_merges"))))
    if name is None:
        _refuse(model_dir, f"llama.cpp has no name for its splits, {json.dumps(expressions)}")
    return name


def _expression(part: dict[str, Any]) -> list[str] | None:
    """Return the expressions by which one step splits, or None for a step of another kind."""
    if part["type"] == "ByteLevel" and not part.get("add_prefix_space"):
        return [_GPT2] if part.get("use_regex", True) else []
    if part["type"] == "Digits" and part.get("individual_digits"):
        return [_DIGIT]
    if part["type"] == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return [part["pattern"]["Regex"]] if "Regex" in part["pattern"] else None
    return None


def _begins_with_space(described: dict[str, Any], model_dir: Path) -> bool:
    """Return whether a tokenizer of SentencePiece's kind puts a space before a text."""
    begins, replaces = False, False
    for part in _parts(described["normalizer"], "normalizers"):
        if part["type"] == "Prepend" and part["prepend"] == _SPACE:
            begins = True
        elif part["type"] == "Replace" and part["pattern"] == {"String": " "} and part["content"] == _SPACE:
            replaces = True
        else:
            _refuse(model_dir, f"it changes texts by {json.dumps(part)}")
    for part in _parts(described["pre_tokenizer"], "pretokenizers"):
        if part["type"] == "Metaspace" and not part.get("split", True):
            begins, replaces = begins or part["prepend_scheme"] != "never", True
        elif not (part["type"] == "Split" and part["pattern"] == {"String": " "}):  # no spaces are left by then
            _refuse(model_dir, f"it splits texts by {json.dumps(part)}")
    if not replaces:
        _refuse(model_dir, "it leaves spaces as they are")
    return begins


def _scores(tokenizer: Any, merges: list[tuple[str, ...]], rows: int) -> list[float]:
    """Return a score for each token, the highest for the token that is merged first.

    llama.cpp merges the neighbours whose token has the highest score; the tokenizer, those whose merge comes first.
    """
    scores = [0.0] * rows
    ids = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    for rank, merge in reversed(list(enumerate(merges))):
        if (token := ids.get("".join(merge))) is not None:
            scores[token] = -float(rank)
    return scores


def _tokens(tokenizer: Any, rows: int) -> tuple[list[str], list[int]]:
    """Return every token of the file, and the kind of each."""
    added = tokenizer.added_tokens_decoder
    named = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens, kinds = [], []
    for number in range(rows):
        token = named.get(number)
        if token is None:
            kind = _UNUSED
        elif number in added:
            kind = _CONTROL if added[number].special else _USER_DEFINED
        else:
            kind = _BYTE if len(token) == 6 and token.startswith("<0x") and token.endswith(">") else _NORMAL
        if number == tokenizer.unk_token_id and tokenizer.unk_token == "<unk>":
            kind = _UNKNOWN
        tokens.append(f"[PAD{number}]" if token is None else token)
        kinds.append(kind)
    return tokens, kinds


def _special(tokenizer: Any) -> list[tuple[str, Any]]:
    """Return the entries on the tokens with a meaning, and on those that the tokenizer puts around a text."""
    entries: list[tuple[str, Any]] = []
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            entries.append((f"{name}_token_id", number))
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    entries.append(("add_bos_token", tokenizer.bos_token_id is not None and whole[:1] == [tokenizer.bos_token_id]))
    after = len(whole) > len(plain) and whole[-1:] == [tokenizer.eos_token_id] and plain[-1:] != whole[-1:]
    entries.append(("add_eos_token", after))
    return entries
