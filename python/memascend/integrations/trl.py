"""TRL's trainers over offloaded models.

from memascend.integrations.trl import SFTConfig, SFTTrainer

args = SFTConfig(output_dir="out", store="/nvme/run", host_memory="4GiB")
SFTTrainer("model-directory", args, train_dataset=dataset).train()
"""

from __future__ import annotations

from dataclasses import dataclass

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


class SFTTrainer(TrainerMixin, trl.SFTTrainer):  # type: ignore[name-defined]
    """`trl.SFTTrainer` for offloaded models; see `memascend.integrations.transformers.TrainerMixin`."""


class DPOTrainer(TrainerMixin, trl.DPOTrainer):  # type: ignore[name-defined]
    """`trl.DPOTrainer` for offloaded models; see `memascend.integrations.transformers.TrainerMixin`."""


class RewardTrainer(TrainerMixin, trl.RewardTrainer):  # type: ignore[name-defined]
    """`trl.RewardTrainer` for offloaded models; see `memascend.integrations.transformers.TrainerMixin`."""
