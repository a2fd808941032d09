"""TRL's trainers over offloaded models.

from memascend.integrations.trl import SFTConfig, SFTTrainer

args = SFTConfig(output_dir="out", store="/nvme/run", host_memory="4GiB")
SFTTrainer("model-directory", args, train_dataset=dataset).train()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import trl

from memascend.integrations.transformers import OffloadArguments, TrainerMixin


@dataclass
class SFTConfig(OffloadArguments, trl.SFTConfig):  # type: ignore[name-defined]
    """`trl.SFTConfig`, and where the model goes."""


@dataclass
class DPOConfig(OffloadArguments, trl.DPOConfig):  # type: ignore[name-defined]
    """`trl.DPOConfig`, and where the model goes."""


@dataclass
class RewardConfig(OffloadArguments, trl.RewardConfig):  # type: ignore[name-defined]
    """`trl.RewardConfig`, and where the model goes."""


class _TrlMixin(TrainerMixin):
    """The part that is the same for all of them."""

    _over_ranks = False


class SFTTrainer(_TrlMixin, trl.SFTTrainer):  # type: ignore[name-defined]
    """`trl.SFTTrainer` for offloaded models; see `memascend.integrations.transformers.TrainerMixin`."""


class DPOTrainer(_TrlMixin, trl.DPOTrainer):  # type: ignore[name-defined]
    """`trl.DPOTrainer` for offloaded models; see `memascend.integrations.transformers.TrainerMixin`.

    Raises ValueError where TRL would load a second model, for reference, whole into memory.
    """

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, *others: Any, **named: Any) -> None:
        """Take the arguments of `trl.DPOTrainer`."""
        adapted = named.get("peft_config") is not None or hasattr(model, "peft_config")
        if ref_model is None and not adapted and not getattr(args, "precompute_ref_log_probs", False):
            raise ValueError(
                "without an adapter, DPO compares with a second model: give ref_model=memascend.from_pretrained("
                "directory, store=..., host_memory=..., frozen='files'), peft_config=, or precompute_ref_log_probs=True"
            )
        super().__init__(model, ref_model, args, *others, **named)


class RewardTrainer(_TrlMixin, trl.RewardTrainer):  # type: ignore[name-defined]
    """`trl.RewardTrainer` for offloaded models; see `memascend.integrations.transformers.TrainerMixin`.

    The directory of a causal model is opened with a new head, as TRL does it.
    """

    _opened_as: ClassVar[dict[str, Any]] = {"model_class": "AutoModelForSequenceClassification", "num_labels": 1}
