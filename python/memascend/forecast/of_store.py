"""Options with which the run in a store would write less, from the store's own record."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.errors import MemascendError
from memascend.forecast.forecast import forecast
from memascend.formats.config import limits, load_bare_config
from memascend.optim import NAMED

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Tokens of a sequence where the store does not say: they decide the size of activations.
SEQ_LEN = 512


def savings_of_store(recipe: Mapping[str, Any] | None) -> list[dict[str, Any]] | None:
    """Return the `savings` of `memascend.forecast.endurance` at the least host memory, or None where not known.

    `recipe` is the one of `memascend.recovery.inspect.inspect`. A model that is not a causal one of transformers, and
    an optimizer that the command line does not have, are not forecast.
    """
    if recipe is None:
        return None
    name = next((name for name, (make, *_) in NAMED.items() if make.__name__ == recipe["optimizer"]), None)
    if name is None:
        return None
    options = {key: recipe[key] for key in ("dtype", "states", "master", "gradients")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(recipe["config"]))
        try:
            _, positions = limits(load_bare_config(file))
            step = {"seq_len": min(SEQ_LEN, positions or SEQ_LEN), "batch_size": 1} | recipe["step"]
            found: list[dict[str, Any]] = forecast(file, optimizer=name, **step, **options)["endurance"]["savings"]
        except MemascendError:
            return None
    return found
