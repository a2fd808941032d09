"""TRL's own scripts, unchanged, over models on SSD.

    python -m memascend.integrations.trl_scripts sft --model_name_or_path Qwen/Qwen3-8B --dataset_name org/name \
        --output_dir out --host_memory 8GiB --store /nvme/run1

The words after the script's name are the script's, and the options of
`memascend.integrations.transformers.OffloadArguments`.
"""

from __future__ import annotations

import functools
import runpy
import sys
from typing import TYPE_CHECKING, Any

import memascend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

#: Scripts of TRL, and the trainer that each imports.
SCRIPTS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}


def main(words: Sequence[str]) -> None:
    """Run the script that the first word names. Ends the program with a message where there is none."""
    if not words or words[0] not in SCRIPTS:
        sys.exit(f"give one of TRL's scripts, {', '.join(SCRIPTS)}, and its options after it")
    import trl

    from memascend.integrations import trl as ours

    trainer_class: Any = getattr(ours, f"{SCRIPTS[words[0]]}Trainer")
    models: list[nn.Module] = []

    class Remembered(trainer_class):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            models.append(self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model)

    # The scripts import these from trl when they begin.
    setattr(trl, trainer_class.__name__, functools.wraps(trainer_class, updated=())(Remembered))
    setattr(trl, f"{SCRIPTS[words[0]]}Config", getattr(ours, f"{SCRIPTS[words[0]]}Config"))
    sys.argv = [f"trl {words[0]}", *words[1:]]
    runpy.run_module(f"trl.scripts.{words[0]}", run_name="__main__")
    for model in models:
        memascend.close(model)


if __name__ == "__main__":
    main(sys.argv[1:])
