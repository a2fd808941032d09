"""Which sizes of models can be trained within the memory and on the drives of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend.common.sizes import format_decimal, format_size
from memascend.doctor.findings import Finding, note, ok
from memascend.hardware import memory_limits

if TYPE_CHECKING:
    from memascend.hardware.drives import Location


@dataclass(frozen=True)
class Needs:
    """The bytes to train a model: host memory with PyTorch's, and SSD with durable steps."""

    memory: int
    ssd: int


#: Kinds of training, and the needs of each for published models in bfloat16 with AdamW, one sequence of 512 tokens: as
#: `memascend plan` counts them with the least budget. Adapters have rank 16.
KINDS = ("full", "full with 8-bit states", "adapters")
_MODELS = {
    "GPT-2 XL (1.6B)": ((293_773_328, 40_575_778_816), (293_773_328, 22_288_171_008), (599_003_152, 3_194_036_224)),
    "Llama 3.1 8B": ((732_528_656, 208_920_481_792), (732_528_656, 114_568_040_448), (1_397_927_952, 16_194_740_224)),
    "Qwen2.5 14B": ((891_105_296, 384_271_257_600), (891_105_296, 210_733_240_320), (1_986_220_048, 29_791_825_920)),
    "Qwen2.5 32B": (
        (1_532_899_344, 852_194_627_584),
        (1_532_899_344, 467_232_231_424),
        (3_673_903_120, 65_863_430_144),
    ),
}
NEEDS = {name: dict(zip(KINDS, (Needs(*numbers) for numbers in kinds), strict=True)) for name, kinds in _MODELS.items()}


def sizes(stores: Sequence[Location]) -> Finding:
    """Return a line on the largest model that fits, for each kind of training."""
    memory = memory_limits.available_memory()[0]
    folders = {os.stat(path).st_dev: path for path in stores if os.path.isdir(path)}
    ssd = sum(shutil.disk_usage(path).free for path in folders.values()) if folders else None
    found = {kind: _largest(kind, memory, ssd) for kind in KINDS}
    parts = [f"{kind}: {f'up to {name}' if name else 'none of these'}" for kind, name in found.items()]
    room = "" if ssd is None else f" and {format_decimal(ssd)} of SSD"
    text = f"in {format_size(memory)} of memory{room}, {'; '.join(parts)}"
    if ssd is None:
        needed = ", ".join(
            f"{name} {format_decimal(kinds['full'].ssd)}" for name, kinds in NEEDS.items() if name == found["full"]
        )
        text += f" (SSD for full: {needed})" if needed else ""
    if all(found.values()):
        return ok("models", f"{text}. `memascend plan` counts any model")
    return note("models", text, "Free memory or disk: `memascend plan MODEL --store DIR` shows the needs of a run")


def _largest(kind: str, memory: int, ssd: int | None) -> str | None:
    """Return the largest model that fits, or None."""
    fitting = [
        name
        for name, kinds in NEEDS.items()
        if kinds[kind].memory <= memory and (ssd is None or kinds[kind].ssd <= ssd)
    ]
    return fitting[-1] if fitting else None
