"""sentence-transformers' trainer over models on SSD.

from memascend.integrations import sentence_transformers as on_ssd

args = on_ssd.SentenceTransformerTrainingArguments(output_dir="out", store="/nvme/run", host_memory="4GiB")
on_ssd.SentenceTransformerTrainer("model-directory", args, train_dataset=pairs, loss=losses.CoSENTLoss).train()

Of private names it uses `Transformer._load_model`, by which sentence-transformers opens a directory's model of
transformers: tested with 6.2. Where it is gone, a model that is given by its directory ends in an AttributeError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import sentence_transformers
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn

from memascend.integrations.transformers import OffloadArguments, TrainerMixin


@dataclass
class SentenceTransformerTrainingArguments(
    OffloadArguments, sentence_transformers.SentenceTransformerTrainingArguments
):
    """`sentence_transformers.SentenceTransformerTrainingArguments`, and where the model goes."""


class SentenceTransformerTrainer(TrainerMixin, sentence_transformers.SentenceTransformerTrainer):
    """`SentenceTransformerTrainer` for offloaded models; see `memascend.integrations.transformers.TrainerMixin`.

    A directory is opened as `sentence_transformers.SentenceTransformer` opens it, with the weights of its model of
    transformers on SSD. Raises ValueError where other parts have weights to be trained: a dense layer behind the
    pooling, or a loss.
    """

    _over_ranks = False
    _opened_as: ClassVar[dict[str, Any]] = {"model_class": "AutoModel"}

    def _around(self, model: nn.Module, given: Any) -> nn.Module:
        if isinstance(given, nn.Module):
            return model
        with mock.patch.object(Transformer, "_load_model", lambda *_, **__: model):
            whole = sentence_transformers.SentenceTransformer(str(given), device=str(next(model.parameters()).device))
        _refuse_others("the directory's other modules have", whole, model)
        return whole

    def prepare_loss(self, loss: Any, model: nn.Module) -> nn.Module:
        """Return the loss as sentence-transformers prepares it. Raises ValueError for one with weights of its own."""
        prepared = super().prepare_loss(loss, model)
        _refuse_others(f"{type(prepared).__name__} has", prepared, model)
        return prepared


def _refuse_others(which: str, whole: nn.Module, model: nn.Module) -> None:
    """Raise ValueError where a part of `whole` that is not of `model` has weights to be trained."""
    own = {id(parameter) for parameter in model.parameters()}
    others = [
        name for name, parameter in whole.named_parameters() if parameter.requires_grad and id(parameter) not in own
    ]
    if others:
        raise ValueError(
            f"{which} weights to be trained, {others[0]} among them, which would not be on SSD: load the model with "
            "SentenceTransformer(directory), and give memascend.offload(model, ...) with a loss that has none"
        )
