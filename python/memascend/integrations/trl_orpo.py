"""ORPO over offloaded models: TRL has it among what it calls experimental, and warns of that when it is imported."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental import orpo

from memascend.integrations.transformers import OffloadArguments, TrainerMixin


@dataclass
class ORPOConfig(OffloadArguments, orpo.ORPOConfig):
    """`trl.experimental.orpo.ORPOConfig`, and where the model goes."""


class ORPOTrainer(TrainerMixin, orpo.ORPOTrainer):
    """`trl.experimental.orpo.ORPOTrainer` for offloaded models; it compares with no second model."""

    _over_ranks = False
