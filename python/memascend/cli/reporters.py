"""`--report-to`: programs that show a run as it goes on, by transformers' callbacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from transformers.integrations import get_available_reporting_integrations

from memascend.errors import DataError


def prepare_reporters(names: Sequence[str], out: Path) -> None:
    """See that each is installed, and have TensorBoard's files beside `out`.

    Raises DataError for one that is not installed.
    """
    missing = sorted(set(names) - set(get_available_reporting_integrations())) if names else []
    if missing:
        raise DataError(f"--report-to {missing[0]} is not installed: pip install {missing[0]}")
    if "tensorboard" in names:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", f"{out}.tensorboard")
