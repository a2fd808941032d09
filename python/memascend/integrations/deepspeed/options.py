"""The section "memascend" of the configuration that DeepSpeed reads."""

from __future__ import annotations

from typing import Any

from memascend.forecast.deepspeed.options import Options

__all__ = ["Options", "current", "read"]

#: The options in the configuration that was read last.
current = Options()


def read(configuration: dict[str, Any]) -> None:
    """Take the options of a configuration that DeepSpeed reads."""
    global current
    current = Options.of(configuration)
