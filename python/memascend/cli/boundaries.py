"""Whether packed documents are apart in attention: `--boundaries`, and the line that says so.

TRL's packing keeps documents apart unless it is told otherwise, so `auto` does too: a document is trained on as it is
used, without another one before it. transformers makes the masks from position ids that begin anew, also for SDPA and
eager attention; then each mask has the square of the tokens of a sequence, which the fused kernel does without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memascend.cli.arguments.training import BOUNDARIES_TOKENS_MAX
from memascend.cli.errors import note
from memascend.errors import DataError
from memascend.forecast.boundaries import why_without_boundaries

if TYPE_CHECKING:
    from memascend.cli.settings import Settings


def with_boundaries(settings: Settings, config: Any, before: dict[str, Any]) -> Settings:
    """Replace `auto` by the best that the model allows, or by the choice of the run `before`, and say which.

    `before` has the settings of the run that goes on; it is empty for a new one.

    Raises DataError where boundaries are asked for and the model has none.
    """
    if not settings.packing:
        return replace(settings, boundaries="off")
    chosen, reason = settings.boundaries, f"as --boundaries {settings.boundaries} says"
    if chosen == "auto" and before:
        # A run of before there could be boundaries has none.
        chosen, reason = before.get("boundaries", "off"), "as in the run that goes on"
    elif chosen != "off":
        problem = why_without_boundaries(config, settings.model_dir)
        if problem is not None and chosen == "on":
            raise DataError(f"--boundaries on: {problem}; leave it out, or give --no-packing")
        if problem is not None:
            chosen, reason = "off", f"{problem}; --no-packing keeps documents apart"
        elif chosen == "auto" and settings.seq_len > BOUNDARIES_TOKENS_MAX:
            chosen = "off"
            reason = (
                f"masks grow with the square of the length: of more than {BOUNDARIES_TOKENS_MAX:,} tokens they come "
                "with --boundaries on alone"
            )
        elif chosen == "auto":
            chosen, reason = "on", "--boundaries off lets each see those before it"
    if chosen == "on":
        note(f"packing documents with boundaries: each attends to itself alone ({reason})")
    else:
        note(f"packing documents without boundaries: each attends to those before it in its sequence ({reason})")
    return replace(settings, boundaries=chosen)
