"""The plan's constant for one call of a layer between the passes, beside allocations that are counted."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memascend
from memascend.forecast.total_memory import CALL_BYTES
from memascend.memory_plan.lines import Plan

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, WIDTH, TOKENS = 4, 64, 8
#: Bytes of a call's input, which is too small to leave its tensor and is no part of the constant.
INPUT_BYTES = TOKENS * WIDTH * 4
#: The largest objects that Python's own allocator serves.
SMALL_BYTES = 512


class _Mallinfo(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


def allocated() -> int:
    """Return the bytes that the program has of malloc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("no mallinfo2: glibc before 2.33, or another C library")
    libc.mallinfo2.restype = _Mallinfo
    gc.collect()
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def small_objects() -> int:
    """Return the bytes of Python's objects since tracing began that are too small for malloc."""
    gc.collect()
    return sum(trace.size for trace in tracemalloc.take_snapshot().traces if trace.size <= SMALL_BYTES)


def test_a_call_of_a_layer_takes_about_the_bytes_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "activations_bytes", 0)  # Activations that are kept count apart.
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    memascend.offload(model, store=tmp_path, host_memory="256MiB", micro_batch_size=1, allocator="pageable")
    memascend.AdamW(model.parameters())

    def held(rows: int) -> int:
        """Return the bytes that the graph of a pass with so many slices holds."""
        ids = torch.ones(rows, TOKENS, dtype=torch.int64)
        model(input_ids=ids)  # The first pass of this size keeps some for good.
        before = allocated()
        logits = model(input_ids=ids).logits
        nbytes = allocated() - before
        del logits
        # Apart, since the table of the traces is of malloc.
        tracemalloc.start()
        logits = model(input_ids=ids).logits
        nbytes += small_objects()
        tracemalloc.stop()
        del logits
        return nbytes

    few, many = held(4), held(20)
    call = (many - few) / (LAYERS * 16) - INPUT_BYTES
    memascend.close(model)
    print(f"{call:.0f} bytes a call")
    assert 0.6 * CALL_BYTES <= call <= CALL_BYTES
