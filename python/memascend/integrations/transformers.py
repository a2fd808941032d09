"""transformers' `Trainer` over offloaded models: the optimizer, clipping, checkpoints in the store, and resuming.

    from memascend.integrations.transformers import MemascendArguments, Trainer

    args = MemascendArguments(output_dir="out", store="/nvme/run", host_memory="4GiB", optim="adamw_torch")
    Trainer("model-directory", args, train_dataset=dataset).train()

`TrainerMixin` adds the same to any other class that derives from transformers' Trainer; `integrations.trl` does so for
TRL's. A model in memory is trained by the same optimizer, so that losses and weights can be compared bit for bit.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from torch import nn

import memascend
from memascend.durability.record import restore_random_states
from memascend.errors import CheckpointError
from memascend.integrations.trainer_arguments import (
    MemascendArguments,
    OffloadArguments,
    apollo_groups_with_decay,
    check,
    check_optimizer_of_run,
    open_model,
    optimizer_of,
)
from memascend.integrations.trainer_checkpoints import CheckpointsMixin
from memascend.integrations.trainer_lines import PREFIX, figures_not_printed
from memascend.integrations.trainer_position import LOG_NAME, TrainerLog, TrainerPosition
from memascend.optim import Apollo, OffloadedOptimizer
from memascend.optim.scaler import GradScaler
from memascend.report.figures import figures_of_ranks
from memascend.session.api import find_offload, offload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend.ranks.group import Ranks

__all__ = ["MemascendArguments", "OffloadArguments", "Trainer", "TrainerMixin"]

_log = logging.getLogger("memascend")
#: How names of whole numbers end that are no tokens.
_NO_TOKENS = ("mask", "type_ids", "position_ids", "positions", "labels", "_sizes", "_thw")


class TrainerMixin(CheckpointsMixin):
    """A class that derives from `transformers.Trainer`, for an offloaded model. Put this before that class.

    - The model is offloaded (`memascend.offload`, `from_pretrained`, `resume`), or `args` say where it goes
      (`OffloadArguments`); then it may be given by its directory. A run in the store is resumed.
    - `args.optim` names the optimizer, see `OPTIMIZERS`; `optim_args` may have `states`, `master` and `seed`.
    - A checkpoint is a named checkpoint of the store, and a directory that names it and holds the tokenizer.
    - `train(resume_from_checkpoint=True)` goes on from the last durable step, which may be later than the last
      checkpoint; with a directory, from that checkpoint. Both give the bits of a run that was not interrupted.
    - Under `torchrun` or `accelerate launch`, with `use_cpu=True`, the model is divided over the processes: each has
      batches of its own, as with DistributedDataParallel, and the update takes the mean of their gradients. The first
      one writes and deletes the directories of checkpoints, and reads them for all; each keeps the named checkpoint in
      its store. Where one cannot, all raise.
    - Impossible arguments are refused here with a ValueError, before anything starts.

    Adapters that are added to an offloaded model are trained and saved as transformers does it.
    """

    #: Whether it was tested over several processes.
    _over_ranks = True
    #: Options of `memascend.from_pretrained` for a model that is given by name.
    _opened_as: ClassVar[dict[str, Any]] = {}
    #: Whether it says that a model which is not offloaded is trained in memory.
    _tells_of_memory = True

    def __init__(self, *given: Any, **named: Any) -> None:
        """Take the arguments of the class that this is mixed into."""
        bound = signature_of(type(self)).bind(self, *given, **named)
        model, args, own_optimizers = (bound.arguments.get(name) for name in ("model", "args", "optimizers"))
        _check_given(model, args)
        #: Whether the store holds a Trainer's run that `train` has not been told to go on with.
        self._run_found = False
        #: Whether that run's weights have replaced the given model's.
        self._weights_replaced = False
        #: Whether `train` goes on with a run in the store.
        self._resuming = False
        #: The losses of all ranks' batches, of the last pass over ranks.
        self._losses = torch.empty(0)
        optimizers: list[Any] = []
        with ExitStack() as on_failure:
            if isinstance(args, OffloadArguments) and not (isinstance(model, nn.Module) and find_offload(model)):
                optimizers = self._open(args, bound.arguments, on_failure)
                model = bound.arguments["model"]
            session = find_offload(model) if isinstance(model, nn.Module) else None
            if session is None and self._tells_of_memory:
                _log.warning(
                    "%s trains the model in memory, as transformers does: nothing of it is on SSD. Open it with "
                    "memascend.from_pretrained or memascend.offload, or give MemascendArguments(output_dir=..., "
                    "host_memory='4GiB') in the place of %s",
                    type(self).__name__,
                    "TrainingArguments" if args is None else type(args).__name__,
                )
            if session is not None:
                if args is not None:
                    check(args, session, own_optimizers)
                self._run_found = TrainerPosition.NAME in session.commit_log.unclaimed_states
                optimizers = optimizers or list(session.commit_log.optimizers)
                own, _ = own_optimizers or (None, None)
                if self._run_found and args is not None and own is None and len(optimizers) == 1:
                    self._check_optimizer(args, optimizers[0])
            super().__init__(*bound.args[1:], **bound.kwargs)
            if session is not None and args is None:
                check(self.args, session, own_optimizers)
            if session is not None and session.membership.divides and not self._over_ranks:
                raise ValueError(
                    f"{type(self).__name__} was not tested over several processes, and trains in one: use "
                    "memascend.integrations.transformers.Trainer, or start one process"
                )
            on_failure.pop_all()
        self._position = TrainerPosition(self)
        self.add_callback(self._position)
        if session is not None:
            self._leave_in_place()
            if self._run_found and self.optimizer is None:
                self.optimizer = _only(optimizers)

    def _open(self, args: OffloadArguments, given: dict[str, Any], on_failure: ExitStack) -> list[Any]:
        """Open the model that is `given` as the arguments say, and return the optimizers of the run that it resumes."""
        if given.get("quantization_config") is not None:
            raise ValueError(
                "quantization_config is for models that transformers loads, and this one is opened on SSD in "
                f"{args.weights_dtype}: leave it out"
            )
        model = given.get("model")
        if model is None:
            raise ValueError("model_init makes models anew, which one store cannot hold: give model=")
        opened, optimizers = open_model(model, args, self._opened_as)
        # A run that was resumed stays; a store that was made for this goes.
        on_failure.callback(offload_of(opened).close, failed=bool(optimizers))
        given["model"] = self._around(opened, model)
        self._weights_replaced = bool(optimizers)
        return optimizers

    def _check_optimizer(self, args: Any, optimizer: Any) -> None:
        """Raise ValueError where the run in the store has another optimizer than `args` name."""
        if type(self).get_optimizer_cls_and_kwargs is TrainerMixin.get_optimizer_cls_and_kwargs:
            check_optimizer_of_run(args, optimizer)

    def _leave_in_place(self) -> None:
        """Have the model and the states of its optimizer stay where they are. Batches are placed as always."""
        self.accelerator.device_placement = False
        self.accelerator.prepare_data_loader = _placing(self.accelerator.prepare_data_loader)
        self.accelerator.prepare_model = _unwrapping(self.accelerator.prepare_model)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler = GradScaler(self.args.device.type)

    def _around(self, model: nn.Module, given: Any) -> nn.Module:
        """Return the module that is trained, around the model that was opened as `given` says."""
        return model

    @property
    def _keeps_log(self) -> bool:
        """Whether the run has a metrics file."""
        session = find_offload(self.model)
        return session is not None and not session.closed

    def _open_log(self) -> TrainerLog:
        rank = self.args.process_index
        name = Path(LOG_NAME)
        if rank:
            # transformers makes it on the machine of the first process alone.
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            name = name.with_suffix(f".{rank}{name.suffix}")
        return TrainerLog(Path(self.args.output_dir) / name)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if find_offload(model) is None:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    # ---- the optimizer -------------------------------------------------------------------------------------

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return the optimizer's class and options that the arguments name; see `OPTIMIZERS`."""
        make, options = optimizer_of(args)
        if issubclass(make, Apollo) and model is not None:
            rank, targets = int(options.pop("rank", 256)), getattr(args, "optim_target_modules", None)
            options["params"] = apollo_groups_with_decay(model, args.weight_decay, rank, targets)
        return make, options

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._clip(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        self._position.grad_norm = float(self._clip(model, math.inf) if grad_norm is None else grad_norm)
        return self._position.grad_norm

    def _clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        optimizer = self._own_optimizer()
        if optimizer is None:
            return self.accelerator.clip_grad_norm_(model.parameters(), max_norm)
        self.accelerator.unscale_gradients()
        # Applied within the update, so that no gradient is read for it.
        return optimizer.clip_grad_norm_(max_norm)

    def _get_learning_rate(self) -> float:
        rate = super()._get_learning_rate()  # type: ignore[misc]
        self._position.learning_rate = rate
        return rate

    # ---- training, and going on with a run ------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *others: Any, **named: Any) -> Any:
        """Train as `transformers.Trainer.train` does.

        Args:
            resume_from_checkpoint: True goes on from the last durable step, or begins where there is none yet; the
                directory of a checkpoint discards all later steps. "True", "last" and "False" are taken as a script's
                `--resume_from_checkpoint` gives them.

        Raises:
            ValueError: the store holds a run, and nothing was said of it.
            CheckpointError: the checkpoint is not in the store.
        """
        with self._resumption(_parse_resumption(resume_from_checkpoint)) as folder:
            return super().train(folder, *others, **named)  # type: ignore[misc]

    @contextmanager
    def _resumption(self, given: Any) -> Iterator[Any]:
        """Resume the run that `given` names, and yield the directory with the state of transformers' Trainer."""
        session, ranks = self._stored, self._ranks
        checkpoint = None if given in (None, False, True) else Path(given)
        tag = None if checkpoint is None or session is None else self._named_by(checkpoint)
        if session is None or (checkpoint is not None and tag is None):
            if ranks is not None:
                raise CheckpointError(
                    f"{checkpoint} names no checkpoint of the store, and other weights cannot be loaded over several "
                    "processes: load them into the model before it is offloaded"
                )
            yield given
            return
        if not given:
            if self._run_found:
                where = ", ".join(map(str, session.paths))
                raise ValueError(
                    f"{where} holds a run after step {session.commit_log.steps}: train(resume_from_checkpoint=True) "
                    "goes on with it (--resume_from_checkpoint True of a script); keep_store='replace' (--keep_store "
                    "replace) deletes it and begins anew"
                )
            yield None
            return
        if tag is not None:
            self._go_back(tag)
        elif not self._run_found:
            if not session.runtime.store.generation:
                _log.warning("the store holds no durable step yet: beginning anew")
                yield None
                return
            self._go_back(None)
        self._run_found, self._weights_replaced, self._resuming = False, False, True
        try:
            with tempfile.TemporaryDirectory() as folder:
                recorded = offload_of(self.model).commit_log.unclaimed_states[TrainerPosition.NAME]
                # The directory may be on another machine, and each process has its own log.
                own = ranks is not None and ranks.rank > 0
                yield self._position.write(folder, recorded) if own or checkpoint is None else checkpoint
        finally:
            self._resuming = False

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        self._position.begin()
        if self._stored is not None:
            # By now it is known whether the store has room for durable steps.
            check(self.args, self._stored, (self._own_optimizer(), None))
            tracked = {TrainerPosition.NAME: self._position, "scheduler": self.lr_scheduler}
            if self.accelerator.scaler is not None:
                tracked["scaler"] = self.accelerator.scaler
            memascend.track(self.model, **tracked)
        return prepared

    def _run_epoch(self, *others: Any, **named: Any) -> Any:
        # A run may have been interrupted after its last step.
        if not self.control.should_training_stop:
            super()._run_epoch(*others, **named)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *others: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(*others, **named)  # type: ignore[misc]
        self._position.finish()

    def evaluation_loop(self, *others: Any, **named: Any) -> Any:
        """Evaluate or predict as `transformers.Trainer.evaluation_loop` does.

        Raises ValueError where the weights belong to a run in the store, and not to the given model.
        """
        self._check_weights("evaluated")
        return super().evaluation_loop(*others, **named)  # type: ignore[misc]

    def training_step(self, model: nn.Module, inputs: Any, *others: Any, **named: Any) -> torch.Tensor:
        """Take a step as `transformers.Trainer.training_step` does."""
        self._position.log.count_tokens(_tokens_in(inputs))
        loss = super().training_step(model, inputs, *others, **named)  # type: ignore[misc]
        return loss if self._ranks is None else self._with_others(loss, self._ranks)

    def _with_others(self, loss: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Add the losses of a batch of each rank to the logged sum, in their order, but for the last, and return that.

        So the sum on every rank is rounded as in one process which takes the batches one after another.
        """
        self._losses = ranks.all_gather("gather the losses of a batch", loss.detach().view(1)).view(-1) / ranks.size
        for earlier in self._losses[:-1]:
            if self.args.logging_nan_inf_filter and not earlier.isfinite():
                # As transformers does with the last.
                self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
            else:
                self._tr_loss += earlier
        return self._losses[-1]

    def log(self, logs: dict[str, float], *others: Any, **named: Any) -> None:
        """Log as `transformers.Trainer.log` does; a step with its seconds, SSD bytes, host memory: "memascend/...".

        Lines are printed as by transformers, without these.
        """
        log = self._position.log if self.is_in_train and self._keeps_log else None
        figures: dict[str, Any] = {}
        if log is not None and "loss" in logs:
            figures = log.figures(self.state.global_step)
            if ranks := figures_of_ranks(self.model, figures):
                figures["ranks"] = ranks
            logs |= {f"{PREFIX}{name}": value for name, value in figures.items() if isinstance(value, int | float)}
            waited = figures["waited_seconds"] or {}
            logs |= {f"{PREFIX}seconds_{kind}": seconds for kind, seconds in waited.items()}
        elif log is not None and "eval_loss" in logs:
            figures = log.lap()  # The next step's begin after it.
        with figures_not_printed(self.callback_handler.callbacks):
            super().log(logs, *others, **named)  # type: ignore[misc]
        if log is not None:
            log.append(self.state.log_history[-1], figures)

    def _load_from_checkpoint(self, *others: Any, **named: Any) -> None:
        if not self._resuming:
            super()._load_from_checkpoint(*others, **named)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if not self._resuming:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: Any) -> None:
        if not self._resuming:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        if self._resuming:
            restore_random_states(self._position.random)
        else:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` for offloaded models, and for models in memory with the same optimizers."""

    __doc__ = f"{__doc__}\n\n{TrainerMixin.__doc__}"


# ---- the parts of a Trainer ------------------------------------------------------------------------------------


def _check_given(model: Any, args: Any) -> None:
    """Raise TypeError for a class in the place of arguments, ValueError where no arguments say where a model goes."""
    if isinstance(args, type):
        raise TypeError(
            f"args is the class {args.__name__}, and not an object of it: give {args.__name__}(output_dir=...)"
        )
    if isinstance(model, str | os.PathLike) and not isinstance(args, OffloadArguments):
        silent = "nothing says" if args is None else f"{type(args).__name__} does not say"
        raise ValueError(
            f"the model is given by its directory, {model}, and {silent} where it goes: give "
            "MemascendArguments(output_dir=..., host_memory='4GiB'), or a model that is opened"
        )


def signature_of(trainer_class: type) -> inspect.Signature:
    """Return the signature of the class that the mixin stands before, or of the first that names its arguments."""
    classes = trainer_class.__mro__[trainer_class.__mro__.index(TrainerMixin) + 1 :]
    signatures = (inspect.signature(vars(cls)["__init__"]) for cls in classes if "__init__" in vars(cls))
    return next(signature for signature in signatures if "model" in signature.parameters)


def _parse_resumption(given: Any) -> Any:
    """Return what `resume_from_checkpoint` means: a script's arguments are texts, where no directory is so called."""
    if not isinstance(given, str) or os.path.isdir(given):
        return given
    return {"true": True, "last": True, "false": None, "none": None}.get(given.lower(), given)


def _placing(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Have accelerate's `prepare_data_loader` place batches: only then it counts an iterable data set's last batch."""

    def prepare_data_loader(loader: Any, device_placement: bool | None = None, *others: Any, **named: Any) -> Any:
        return prepare(loader, True if device_placement is None else device_placement, *others, **named)

    return prepare_data_loader


def _unwrapping(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Have accelerate's `prepare_model` wrap no model: it is divided over the processes already."""

    def prepare_model(model: nn.Module, device_placement: bool | None = None, *_: Any, **__: Any) -> Any:
        return prepare(model, device_placement, evaluation_mode=True)

    return prepare_model


def _only(optimizers: list[Any]) -> OffloadedOptimizer:
    """Return the optimizer of a run that was resumed. Raises ValueError where it is gone, or not the only one."""
    if len(optimizers) != 1:
        raise ValueError(
            f"the run in the store has {len(optimizers)} optimizers here: keep what memascend.resume returned, and "
            "give optimizers=(resumed.optimizer, None)"
        )
    return optimizers[0]


def _tokens_in(inputs: Any) -> int:
    """Return how many tokens a batch has: its ids, under any name, or the positions of its embeddings or labels."""
    if isinstance(inputs, list):  # Of prompts that GRPO has yet to answer: what is trained on is not known.
        return 0
    tensors = {name: value for name, value in dict(inputs).items() if isinstance(value, torch.Tensor)}
    ids = [value for name, value in tensors.items() if name.endswith("input_ids") and name != "decoder_input_ids"]
    if ids:
        return sum(value.numel() for value in ids)
    embedded, labels = tensors.get("inputs_embeds"), tensors.get("labels")
    if embedded is not None:
        return embedded.shape[:-1].numel()
    # Of a model of the program's own: whole numbers, a row for each sequence.
    others = [
        value.numel()
        for name, value in tensors.items()
        if value.dtype in (torch.int32, torch.int64) and value.dim() > 1 and not name.endswith(_NO_TOKENS)
    ]
    if others:
        return max(others)
    return labels.numel() if labels is not None and labels.dim() > 1 else 0
