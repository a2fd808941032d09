"""N ranks with a device each have the bits of one process, in memory, that accumulates the N batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import rank_programs
import requirements

if TYPE_CHECKING:
    from pathlib import Path

LEAST = {"device_memory": "least"}
#: Streams in another order, in which a copy survives some questions whether it is done.
LATE = {"seed": 5, "lateness": 7}
#: `computing` has the options of all ranks, and `settings` of their devices.
CASES: dict[str, dict[str, Any]] = {
    "float32": {"ranks": 2},
    "bfloat16, four ranks": {"ranks": 4, "dtype": "bfloat16", "settings": LATE},
    "micro-batches": {"ranks": 2, "micro": 2, "settings": LATE},
    "not clipped": {"ranks": 2, "max_norm": None, "offloading": {"durability": "none"}},
    "not recomputed": {"ranks": 2, "computing": {"recompute": False}, "settings": LATE},
    "inputs in host memory": {"ranks": 2, "computing": {"activations": "host"}},
    "inputs on the SSD": {"ranks": 2, "micro": 2, "computing": {"activations": "ssd"}, "settings": LATE},
    "least memory": {"ranks": 2, "micro": 2, "computing": LEAST, "offloading": {"least": True}},
    "least memory, inputs on the SSD": {
        "ranks": 2,
        "computing": LEAST | {"activations": "ssd"},
        "offloading": {"least": True},
        "settings": LATE,
    },
    "least memory, not recomputed": {
        "ranks": 2,
        "computing": LEAST | {"recompute": False},
        "offloading": {"least": True},
    },
    "devices that differ": {"ranks": 2, "micro": 2, "computing": {"device_memory": "least on the first"}},
    "host budgets that differ": {"ranks": 2, "micro": 2, "offloading": {"least": "first"}, "settings": LATE},
    "host budgets that differ, not recomputed": {
        "ranks": 2,
        "computing": LEAST | {"recompute": False},
        "offloading": {"least": "first"},
    },
    "opaque outputs": {"ranks": 2, "opaque": True},
    "scaled": {"ranks": 2, "dtype": "float16", "scaled": True},
    "8 bits, bfloat16": {"ranks": 2, "dtype": "bfloat16", "states": "8bit"},
    "memory that is not pinned": {"ranks": 2, "computing": {"allocator": "pageable"}},
    "t5": {"ranks": 2, "kind": "t5", "computing": LEAST, "offloading": {"least": True}, "settings": LATE},
    "lora": {"ranks": 2, "kind": "lora", "computing": LEAST},
    "apollo": {
        "ranks": 2,
        "kind": "matrices",
        "algorithm": "Apollo",
        "projection": {"rank": 8},
        "computing": LEAST,
        "settings": LATE,
    },
}


@pytest.mark.core
# Attributes that PEFT reads of transformers' models are deprecated there.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_ranks_are_micro_batches(case: str, tmp_path: Path, library: Path) -> None:
    options = dict(CASES[case])
    if options.get("kind") == "lora":
        requirements.package("peft")
    ranks = options.pop("ranks")
    results = rank_programs.run("on_device", ranks, tmp_path, doing="train", library=library, **options)
    training = {n: value for n, value in options.items() if n not in ("offloading", "computing", "settings", "opaque")}
    expected = rank_programs.in_one_process(ranks, **training)
    losses: dict[int, float] = {}
    for result in results:
        assert "error" not in result, result
        # The detector takes other memory of the host for the device's.
        assert result["left"] == "" or "pageable" in options.get("computing", {}).values(), result["left"]
        losses |= result["losses"]
        assert bit_equality.difference(result["norms"], expected["norms"]) is None
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
    assert losses == expected["losses"] and len(losses) >= 2 * ranks
