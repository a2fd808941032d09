"""Training scripts that `accelerate launch` and `torchrun` start, and that a test runs in one process for comparison.

    torchrun --nproc-per-node 2 launched_programs.py PROGRAM FOLDER [NUMBER ...]

The result of a program is saved in FOLDER, by rank.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rank_losing
import rank_runs
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader
from transformers import LlamaConfig, TrainerCallback, TrainingArguments

import memascend
from memascend.integrations.accelerate import Accelerator
from memascend.integrations.transformers import MemascendArguments, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

TOKENS, STEPS = 1024, 4
#: More than a gradient block in most tensors.
LLAMA = LlamaConfig(
    vocab_size=TOKENS,
    hidden_size=256,
    intermediate_size=520,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_dropout=0.0,
)


# ---- Accelerate's loop --------------------------------------------------------------------------------------


class Loop:
    """The loop of accelerate's own examples, of `ranks` processes or of one that accumulates their batches."""

    def __init__(self, accelerator: Any, model: nn.Module, ranks: int, optimizer: Any = None) -> None:
        self.accelerator = accelerator
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = optimizer or memascend.AdamW(trained, lr=1e-2)
        # accelerate steps it once for each process.
        alone = ranks if accelerator.num_processes == 1 else 1
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + alone * step))
        batches: Any = [rank_runs.batch(number) for number in range(8)]
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, DataLoader(batches, collate_fn=lambda rows: rows[0]), scheduler
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def go(self, batches: range | None = None) -> Loop:
        """Train on the loader's batches; or on `batches`, numbers of all ranks, where this one has its own."""
        accelerator = self.accelerator
        rank, ranks = accelerator.process_index, accelerator.num_processes
        own = () if batches is None else map(rank_runs.batch, batches[rank::ranks])
        for tokens in self.loader if batches is None else own:
            with accelerator.accumulate(self.model):
                loss = self.model(tokens)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    self.norms.append(accelerator.clip_grad_norm_(self.model.parameters(), 0.5).item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses += accelerator.gather(loss.detach().reshape(1)).tolist()
        return self

    def result(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "rate": self.scheduler.get_last_lr(),
            "weights": dict(memascend.parameters_of(self.model)),
        }


def loop(folder: Path, accumulate: int) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = rank_runs.offload(rank_runs.build(), folder)
    result = Loop(accelerator, model, accelerator.num_processes).go().result()
    memascend.close(model)
    return result


def loop_in_one_process(ranks: int, accumulate: int) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ranks * accumulate)
    return Loop(accelerator, rank_runs.build(), ranks).go().result()


def refused_by_accelerate(folder: Path) -> dict[str, str]:
    """Do things that are refused, and return each error's text."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    alone = rank_runs.offload(rank_runs.build(), folder / str(rank), process_group=_group_of_one(rank))
    told = {"alone": _refusal(lambda: accelerator.prepare(alone))}
    memascend.close(alone)
    model = rank_runs.offload(rank_runs.build(), folder)
    model.register_parameter("added", torch.nn.Parameter(torch.ones(3)))
    told["added"] = _refusal(lambda: accelerator.prepare(model))
    model.added.requires_grad_(False)
    prepared = accelerator.prepare(model)
    told["unwrapped"] = str(prepared is model)
    memascend.close(model)
    return told


# ---- transformers' Trainer -----------------------------------------------------------------------------------


def rows(count: int, masked: bool = True) -> list[dict[str, torch.Tensor]]:
    """Return sequences; if `masked`, some tokens are not trained on: other numbers of them in each batch."""
    found = []
    for number in range(count):
        ids = torch.randint(0, TOKENS, (16,), generator=torch.Generator().manual_seed(number))
        labels = ids.clone()
        labels[: number % 5 if masked else 0] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


class Stop(TrainerCallback):
    """Ends a run early."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class Untested(Trainer):
    """A Trainer that was not tested over several processes, as TRL's."""

    _over_ranks = False


def arguments(folder: Path, make: Any, accumulate: int, **options: Any) -> Any:
    return make(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        warmup_steps=1,
        max_grad_norm=0.5,
        weight_decay=0.1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch",
        seed=3,
        **{"save_strategy": "no"} | options,
    )


def train(model: nn.Module, args: Any, stop: int = STEPS, resume: bool = False) -> dict[str, Any]:
    trainer = Trainer(model, args, train_dataset=rows(32), callbacks=[Stop(stop)])
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate(rows(8, masked=False))["eval_loss"] if stop == STEPS else None
    kept = ("loss", "grad_norm", "learning_rate", "step", "epoch")
    history = [{name: entry[name] for name in kept} for entry in trainer.state.log_history if "loss" in entry]
    return {
        "history": history,
        "evaluated": evaluated,
        "weights": dict(memascend.parameters_of(trainer.model)),
        "wrapped": trainer.model_wrapped is not trainer.model,
    }


def build() -> nn.Module:
    import traffic

    return traffic.build(LLAMA, torch.float32)


def trainer(folder: Path, accumulate: int, stop: int = STEPS, resume: bool = False) -> dict[str, Any]:
    args = arguments(
        folder,
        MemascendArguments,
        accumulate,
        store=[f"{folder}/store{{rank}}"],
        host_memory="96MiB",
        fused_loss=False,
        keep_store=True,
    )
    model = build()
    result = train(model, args, stop, resume)
    memascend.close(model)
    return result


def trainer_in_one_process(folder: Path, ranks: int, accumulate: int) -> dict[str, Any]:
    return train(build(), arguments(folder, TrainingArguments, ranks * accumulate))


def refused_by_the_trainer(folder: Path) -> dict[str, str]:
    """Do things that are refused, and return each error's text."""
    options = {"store": [f"{folder}/store{{rank}}"], "host_memory": "96MiB"}
    args = arguments(folder, MemascendArguments, 1, **options)
    told: dict[str, str] = {}
    for name, option in (("each node", "save_on_each_node"), ("hub", "push_to_hub")):
        setattr(args, option, True)
        told[name] = _refusal(lambda: Trainer(build(), args, train_dataset=rows(8)))
        setattr(args, option, False)
    alone = memascend.offload(
        build(), store=folder / f"alone{args.process_index}", host_memory="96MiB", process_group=_group_of_one()
    )
    told["alone"] = _refusal(lambda: Trainer(alone, args, train_dataset=rows(8)))
    memascend.close(alone)
    model = build()
    told["untested"] = _refusal(lambda: Untested(model, args, train_dataset=rows(8)))
    return told


# ---- checkpoints ---------------------------------------------------------------------------------------------

#: Events at which a rank is killed.
EVENTS = ("on_step_end", "on_log", "on_evaluate", "on_save", "in the directory", "in the store")
SAVING: dict[str, Any] = {
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # so that the best model is not the last
}


class Killed(TrainerCallback):
    """Kills the process at an event of a step."""

    def __init__(self, step: int, event: str) -> None:
        def kill(_args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == step:
                rank_losing.die()

        setattr(self, event, kill)


def _kill_within(step: int, event: str) -> Any:
    """Return callbacks that have the process be killed at a step's event, or in the midst of its saving."""
    if event.startswith("on_"):
        return [Killed(step, event)]
    whole = Trainer._save_checkpoint

    def save(trainer: Any, *others: Any) -> None:
        if trainer.state.global_step == step:
            if event == "in the directory":
                Trainer._save_scaler = rank_losing.die
            else:
                memascend.save_checkpoint = rank_losing.die
        whole(trainer, *others)

    Trainer._save_checkpoint = save  # type: ignore[method-assign]
    return []


def _saving(model: nn.Module, args: Any, callbacks: Any = (), resume: Any = None) -> dict[str, Any]:
    trainer = Trainer(
        model, args, train_dataset=rows(32), eval_dataset=rows(8, masked=False), callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=resume)
    kept = ("loss", "grad_norm", "learning_rate", "step", "epoch", "eval_loss")
    history = [
        {name: entry[name] for name in kept if name in entry}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]
    trainer.save_model(f"{args.output_dir}/final")
    return {
        "history": history,
        "weights": dict(memascend.parameters_of(trainer.model)),
        "best": trainer.state.best_global_step,
        "directory": Path(trainer.state.best_model_checkpoint).name,
    }


def saving_trainer(folder: Path, resume: int = -1, victim: int = -1, step: int = 0, event: int = 0) -> dict[str, Any]:
    """Train with checkpoints; `resume` is a step whose checkpoint is gone on from, or 0 for the last durable step.

    The second process has a directory of its own, as on another machine.
    """
    own = folder if os.environ["RANK"] == "0" else folder / "elsewhere"
    args = arguments(
        own,
        MemascendArguments,
        1,
        store=[[f"{folder}/one"], f"{folder}/two"],
        host_memory="96MiB",
        fused_loss=False,
        keep_store=True,
        **SAVING,
    )
    callbacks = _kill_within(step, EVENTS[event]) if args.process_index == victim else []
    model = build()
    result = _saving(model, args, callbacks, {-1: None, 0: True}.get(resume, str(own / f"checkpoint-{resume}")))
    result["tags"] = [tag for tag, _, _ in memascend.checkpoints(model)]
    memascend.close(model)
    return result


def saving_in_one_process(folder: Path, ranks: int) -> dict[str, Any]:
    return _saving(build(), arguments(folder, TrainingArguments, ranks, **SAVING))


def saving_where_rank_0_cannot(folder: Path) -> dict[str, str]:
    """Train and save where a file is in the way of a directory, on the machine of the first rank."""
    options = {"store": [f"{folder}/store{{rank}}"], "host_memory": "96MiB", "fused_loss": False}
    args = arguments(folder, MemascendArguments, 1, **options, **SAVING)
    model = build()
    told = {}
    for where, resume in ((folder / "checkpoint-2", None), (folder / "final", True)):
        if args.process_index == 0:
            where.write_text("in the way")
        told[where.name] = _refusal(partial(_saving, model, args, resume=resume), OSError)
        if args.process_index == 0:
            where.unlink()
    memascend.close(model)
    return told


def states(folder: Path, victim: int = -1) -> dict[str, Any]:
    """Save and load the state of Accelerate's loop, by name and by number, with a process that is killed in between."""
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = rank_runs.build()
    model.register_buffer("own", torch.tensor(float(accelerator.process_index)))
    store = [[str(folder / "one")], [str(folder / "two")]]
    options: dict[str, Any] = {"host_memory": "64MiB", "allocator": "pageable", "keep_store": True}
    resumed = memascend.can_resume(store)
    if resumed:
        run = memascend.resume(store, model=model, **options)
        run_loop = Loop(accelerator, run.model, accelerator.num_processes, run.optimizer)
        accelerator.load_state(str(folder / "checkpoints" / "checkpoint_1"))
        project.iteration = 2
    else:
        memascend.offload(model, store=store, fused_loss=False, **options)
        run_loop = Loop(accelerator, model, accelerator.num_processes)
        for number in range(2):
            run_loop.go(range(2 * number, 2 * number + 2))
            accelerator.save_state()
        if accelerator.process_index == victim:
            rank_losing.die()
    run_loop.go(range(4, 6))
    accelerator.save_state()
    before = run_loop.go(range(6, 8)).result()
    model.own.fill_(5.0)
    accelerator.load_state()
    result = run_loop.go(range(6, 8)).result()
    result |= {
        "before": before,
        "own": float(model.own),
        "tags": len(memascend.checkpoints(model)),
        "directories": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }
    memascend.close(model)
    return result


def states_in_one_process(ranks: int) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ranks)
    return Loop(accelerator, rank_runs.build(), ranks).go().result()


# ---- running them --------------------------------------------------------------------------------------------


def _group_of_one(rank: int | None = None) -> Any:
    groups = [dist.new_group([number]) for number in range(dist.get_world_size())]
    return groups[dist.get_rank() if rank is None else rank]


def _refusal(do: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    try:
        do()
    except (memascend.MemascendError, kind) as error:
        return str(error)
    return "done"


PROGRAMS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        loop,
        refused_by_accelerate,
        trainer,
        refused_by_the_trainer,
        saving_trainer,
        saving_where_rank_0_cannot,
        states,
    )
}


def main() -> None:
    torch.set_num_threads(1)
    name, folder, *numbers = sys.argv[1:]
    result = PROGRAMS[name](Path(folder), *map(int, numbers))
    torch.save(result, Path(folder) / f"{name}.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
