"""The memory of keys and values, how many sequences are answered at once, and how long a token takes."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend._memascend import FILE_WINDOW_BYTES, FILE_WINDOWS
from memascend.common.sizes import AUTO, format_decimal, format_least, format_size
from memascend.errors import BudgetError
from memascend.hardware import drives, memory_limits
from memascend.memory_plan.host import make_plan
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Sequences at once, and tokens of prompts in one pass: more gain little, and take memory that no plan has.
SEQUENCES_MAX, PASS_TOKENS_MAX = 64, 8192
#: The part of a budget that keys and values may take, where fewer sequences at once would do.
_CACHE_SHARE = 4
#: Bytes that are read at once to time a drive, and for how long.
_READ_BYTES, _READ_SECONDS = 16 << 20, 0.5


def cache_bytes(config: Any, itemsize: int) -> int:
    """Return the bytes of keys and values that one token of one sequence takes, in all layers.

    Layers that see a window keep less of a long text.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):  # Latent attention: keys and values are kept unfolded.
        elements = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
    else:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        elements = 2 * (getattr(text, "num_key_value_heads", None) or heads) * head_dim
    return int(text.num_hidden_layers * elements * itemsize)


@dataclass(frozen=True, slots=True)
class DividedBudget:
    """How a budget is divided."""

    #: The model's budget: bytes, or "auto".
    host_memory: int | str
    #: Sequences at once.
    sequences: int
    #: Bytes of keys and values, at most.
    cache: int


def divide(
    budget: int | str,
    prompts: Sequence[int],
    new_tokens: int,
    token_bytes: int,
    sequences: int | None,
    lever: str = "--batch-size or --max-new-tokens",
) -> DividedBudget:
    """Divide a budget between keys and values and the model.

    Args:
        budget: bytes, or "auto".
        prompts: the tokens of each prompt.
        new_tokens: the most that follow each.
        token_bytes: see `cache_bytes`.
        sequences: at once; None is as many as a quarter of the budget has room for.
        lever: the options that take less.

    Raises BudgetError where they have no room.
    """
    left = memory_limits.memory_left() if budget == AUTO else int(budget)
    longest = max(prompts)
    each = token_bytes * (longest + new_tokens)
    if sequences is None:
        sequences = max(1, min(SEQUENCES_MAX, PASS_TOKENS_MAX // longest, left // _CACHE_SHARE // each))
    sequences = min(sequences, len(prompts))
    cache = each * sequences
    if cache > left // 2:
        raise BudgetError(
            f"keys and values of {sequences} sequences of up to {longest + new_tokens} tokens take "
            f"{format_size(cache)}, more than half of the {format_size(left)} of host memory: give less of {lever}, or "
            f"more memory",
            2 * cache,
        )
    return DividedBudget(budget if budget == AUTO else int(budget) - cache, sequences, cache)


def speed_text(model: Any, weights: Path, room: DividedBudget, tokens: int | None = None) -> str:
    """Return a line on how long a token takes, which the reading of weights that do not stay in memory bounds.

    `tokens` is the most of all passes together, where that is known.
    """
    session = offload_of(model)
    total = sum(unit.stored_nbytes for unit in session.units)
    unread = total - sum(unit.stored_nbytes for unit in session.plan.resident_units) - _looked_up(model, session)
    unread -= _not_reached(model, session, room.sequences)
    cache = f"{format_size(room.cache)} for keys and values"
    if unread <= 0:
        return f"the model stays in memory once it was read ({format_size(total)}, and {cache})"
    # With so much its own files are read, through windows.
    enough = make_plan(session.units, 1 << 62).total + FILE_WINDOWS * FILE_WINDOW_BYTES + room.cache
    line = f"the model is larger than the budget: a pass reads {format_decimal(unread)} of {format_decimal(total)}"
    # Without files of its own the model is read from its store, which may be a copy elsewhere.
    in_own_files = session.files and not any(unit.bits for unit in session.units)
    rate = _rate(weights if in_own_files else Path(session.stats()["volumes"][0]["path"]))
    if rate is not None:
        line += f", at least {unread / rate:.2g} s for each token at {format_decimal(int(rate))}/s"
        if tokens is not None:
            line += f" ({_duration(tokens * unread / rate)} for all)"
    if room.sequences > 1:
        line += f", and that gives each of {room.sequences} sequences one"
    return f"{line}. {cache}. --host-memory {format_least(enough)} keeps all of it in memory"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 7200 else f"{seconds / 3600:.2g} h"


def _looked_up(model: Any, session: Any) -> int:
    """Return the bytes of an embedding whose rows alone are read."""
    source, head = model.get_input_embeddings(), model.get_output_embeddings()
    if source is None or head is None or source.weight is head.weight:
        return 0
    staying = set(session.plan.resident_units)
    named = [place.tensor.unit for place in session.places if place.parameter is source.weight]
    return sum(unit.nbytes for unit in named if unit.is_table and unit not in staying)


def _not_reached(model: Any, session: Any, sequences: int) -> int:
    """Return the bytes of experts, read one by one, that a token of each sequence is not sent to."""
    per_token = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    places = [place for unit in session.units if unit.is_experts for place in unit.places]
    total = sum(place.nbytes for place in places)
    if sum(line.total for line in session.plan.experts) >= total:
        return total  # All of them stay.
    return sum(place.expert_nbytes * max(0, place.shape[0] - per_token * sequences) for place in places)


def _rate(weights: Path) -> float | None:
    """Return the bytes per second that `weights` is read with: as `memascend bench` measured, or as timed now."""
    measured = drives.measured_rates([weights])
    if measured is not None:
        return sum(measured.values())
    files = [weights] if not weights.is_dir() else sorted(weights.iterdir(), key=lambda file: file.stat().st_size)
    return _timed_read(files[-1]) if files else None


def _timed_read(file: Path) -> float | None:
    """Return the bytes per second of reading a file past the page cache; None where that cannot be told."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, _READ_BYTES) as buffer:
            done, begin = 0, time.perf_counter()
            while (passed := time.perf_counter() - begin) < _READ_SECONDS:
                count = os.preadv(fd, [buffer], done)
                done += count
                if count < _READ_BYTES:
                    break
            passed = time.perf_counter() - begin
    except OSError:
        return None
    finally:
        os.close(fd)
    return done / passed if done >= _READ_BYTES else None
