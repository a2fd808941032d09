"""Checkpoints of transformers' Trainer over offloaded models: in the store, with a directory that names each.

Over processes the first one writes, deletes and reads the directories, and tells the others; each keeps the checkpoint
in its own store.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import memascend
from memascend.errors import CheckpointError, MemascendError
from memascend.integrations.named_checkpoints import MANIFEST, forget, has_names, read_name, write_names
from memascend.integrations.trainer_uploads import stores_left_out
from memascend.optim import OffloadedOptimizer
from memascend.ranks.rank_errors import broadcast_from_rank0, raise_on_all_ranks
from memascend.session.api import find_offload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend.integrations.trainer_position import TrainerPosition
    from memascend.ranks.group import Ranks
    from memascend.session.session import Session

_log = logging.getLogger("memascend")


class CheckpointsMixin:
    """The checkpoints that a Trainer saves and goes back to. Part of `TrainerMixin`."""

    # Attributes of transformers' Trainer.
    if TYPE_CHECKING:
        args: Any
        model: Any
        optimizer: Any
        lr_scheduler: Any
        state: Any
        accelerator: Any
        processing_class: Any
        data_collator: Any
        _created_lr_scheduler: bool
        _position: TrainerPosition
        _tr_loss: torch.Tensor

        def __getattr__(self, name: str) -> Any: ...

    @property
    def _stored(self) -> Session | None:
        """The session whose store holds everything that is trained; None for a model in memory, and for adapters."""
        session = find_offload(self.model)
        if session is None or session.closed or session.trained_outside():
            return None
        return session if any(place.parameter.requires_grad for place in session.places) else None

    @property
    def _ranks(self) -> Ranks | None:
        """The ranks that the model's store is divided over; None in a single process, and for a closed model."""
        session = find_offload(self.model)
        return None if session is None or session.closed else session.membership.ranks

    def _own_optimizer(self) -> OffloadedOptimizer | None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        return optimizer if isinstance(optimizer, OffloadedOptimizer) else None

    def _check_weights(self, used: str) -> None:
        """Raise ValueError where the weights are those of a run in the store, which nothing was said of."""
        if self._weights_replaced and self._stored is not None:
            where = ", ".join(map(str, self._stored.paths))
            raise ValueError(
                f"{where} holds a run after step {self._stored.commit_log.steps}, and its weights would be {used} "
                "instead of those of the model that was given. For the run's: give memascend.resume(store, "
                "host_memory=...).model as the model; for the model's: give another output_dir, or store="
            )

    # ---- going back ----------------------------------------------------------------------------------------

    def _named_by(self, checkpoint: Path) -> str | None:
        """Return the name, in the store, of a checkpoint whose directory this is; None for one of another kind."""

        def find() -> str | None:
            return _tag_of(checkpoint) if has_names(checkpoint) else None

        return broadcast_from_rank0(self._ranks, "read a checkpoint", find)

    def _go_back(self, tag: str | None) -> None:
        """Restore a checkpoint of the store, or its last durable step."""
        if self.optimizer is not None and self._own_optimizer() is None:
            raise ValueError(
                "the run in the store was trained by another optimizer than the one given: leave optimizers= out, or "
                "give the one that memascend.resume returned"
            )
        if self.lr_scheduler is not None and not self._created_lr_scheduler:
            raise ValueError(
                "a scheduler that was given belongs to an optimizer before the checkpoint: leave optimizers= out "
                "(lr_scheduler_type, optim), or use memascend.resume(store, tag=...) before the Trainer is made"
            )
        resumed = memascend.restore_checkpoint(self.model, tag)
        self.optimizer = resumed.optimizer if resumed.optimizers else None

    # ---- saving --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        session = None if self.args.save_only_model else self._stored
        with self._deleting_with_folders(trial), raise_on_all_ranks(self._ranks, "write a checkpoint", Exception):
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        # The others have no directories to look for, if they are on other machines.
        best = broadcast_from_rank0(self._ranks, "tell the best checkpoint", lambda: self.state.best_model_checkpoint)
        self.state.best_model_checkpoint = best
        if session is not None:
            self._position.finish()
            tag = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            forget(self.model, {tag})  # of a run that was interrupted here
            memascend.save_checkpoint(self.model, tag)

    @contextmanager
    def _deleting_with_folders(self, trial: Any) -> Iterator[None]:
        """Delete checkpoints of the store whose directories transformers' Trainer deletes meanwhile."""

        def find() -> list[str]:
            return sorted(_tags_in(self._get_output_dir(trial=trial)))

        before = broadcast_from_rank0(self._ranks, "look for checkpoints", find)
        yield
        forget(self.model, set(before).difference(broadcast_from_rank0(self._ranks, "look for checkpoints", find)))

    def _finalize_training(self, trial: Any, *others: Any) -> Any:
        with self._deleting_with_folders(trial):
            return super()._finalize_training(trial, *others)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, tensor by tensor; for a checkpoint of the store, where it is, and the tokenizer.

        Raises ValueError where the weights belong to a run in the store, and not to the given model.
        """
        self._check_weights("saved")
        ranks, first = self._ranks, self._ranks is None or self._ranks.rank == 0
        of_checkpoint = _internal_call and output_dir is not None  # without one, `push_to_hub` wants the model
        if of_checkpoint and not self.args.save_only_model and self._stored is not None:
            with raise_on_all_ranks(ranks, "write a checkpoint", Exception):
                if first:
                    self._write_names(Path(str(output_dir)), self._stored)
            return
        if ranks is not None:
            self._check_saves_itself()
        with raise_on_all_ranks(ranks, "make the directory of the model", Exception):
            if ranks is not None and first:
                os.makedirs(output_dir or self.args.output_dir, exist_ok=True)
        with raise_on_all_ranks(ranks, "save the model and what belongs to it", Exception):
            if first:
                super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            else:
                # Sends its shares to the first.
                self.model.save_pretrained(output_dir or self.args.output_dir, is_main_process=False)

    def push_to_hub(self, *others: Any, **named: Any) -> Any:
        """Upload as `transformers.Trainer.push_to_hub` does, but no store that lies in the output directory."""
        with stores_left_out():
            return super().push_to_hub(*others, **named)  # type: ignore[misc]

    def _push_from_checkpoint(self, *others: Any) -> None:
        with stores_left_out():
            super()._push_from_checkpoint(*others)  # type: ignore[misc]

    def _check_saves_itself(self) -> None:
        """Raise MemascendError for a model whose weights transformers' Trainer would read as a dictionary."""
        if not isinstance(self.model, transformers.PreTrainedModel) and not hasattr(self.model, "get_base_model"):
            raise MemascendError(
                f"{type(self.model).__name__} is not a model of transformers, and save_model of it cannot be had over "
                "several processes: use memascend.save_distributed(model, None, directory) on every rank"
            )

    def _write_names(self, folder: Path, session: Session) -> None:
        """Write the directory of a checkpoint in the store."""
        folder.mkdir(parents=True, exist_ok=True)
        write_names(folder, {0: (session, folder.name)})
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.save_only_model or self._stored is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.save_only_model or self._stored is None:
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        tag = None if self._stored is None else self._named_by(best)
        if tag is None:
            super()._load_best_model()  # type: ignore[misc]
            return
        _log.info("going back to the best model, %s (%s)", best, self.state.best_metric)
        self._go_back(tag)


def _tag_of(checkpoint: Path) -> str:
    """Return the name, in the store, of a checkpoint whose directory this is."""
    tag = read_name(checkpoint)
    if tag is None:
        raise CheckpointError(f"{checkpoint} names no checkpoint: nothing on the store was trained when it was saved")
    return tag


def _tags_in(folder: str | os.PathLike[str]) -> set[str]:
    """Return the names of the checkpoints that have a directory in `folder`."""
    return {file.parent.name for file in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{MANIFEST}")}
