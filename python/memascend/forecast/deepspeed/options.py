"""The section "memascend" of DeepSpeed's configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from memascend.common.sizes import parse_size

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Options:
    """The options of the section.

    - `host_memory`: the most bytes of buffers in host memory, as a size ("4GiB") or a number. The remainder keeps
      gradients, and then masters and moments, in memory. None: as few as possible.
    - `states`: the dtype of Adam's moments in their files, "float32" as DeepSpeed's or "bfloat16", which moves 8 bytes
      of 28 less for each parameter and step. Masters are float32 in any case. Files with bfloat16 moments are not
      DeepSpeed's.
    - `keep_blocks`: whether malloc keeps the freed blocks of temporaries for the next ones, which saves zeroing their
      pages; about 256 MiB at most are kept. False gives every block of 128 KiB or more back at once, and takes the
      least memory.
    """

    host_memory: int | None = None
    states: str = "float32"
    keep_blocks: bool = True

    @classmethod
    def of(cls, configuration: dict[str, Any]) -> Options:
        """Read the section of a configuration; ValueError for an unknown or wrong option."""
        section = configuration.get("memascend", {})
        names = [field.name for field in fields(cls)]
        if not isinstance(section, dict) or not set(section) <= set(names):
            raise ValueError(f'"memascend" in DeepSpeed\'s configuration takes {", ".join(names)}; got {section}')
        given = dict(section)
        if given.get("host_memory") is not None:
            given["host_memory"] = parse_size(given["host_memory"])
        if given.get("states", "float32") not in DTYPES:
            raise ValueError(f'"states" of "memascend" is one of {", ".join(DTYPES)}, not {given["states"]!r}')
        if not isinstance(given.get("keep_blocks", True), bool):
            raise ValueError(f'"keep_blocks" of "memascend" is true or false, not {given["keep_blocks"]!r}')
        return cls(**given)
