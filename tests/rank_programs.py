"""Programs that several processes run as the ranks of a group, and how a test runs them."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import shutil
import signal
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import needs
import pytest
import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_models import Matrices
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

import memascend
from memascend.durable.generations import Generations
from memascend.formats import safetensors
from memascend.formats.safetensors import SafetensorsReader
from memascend.layout import tables
from memascend.offloading.api import offload_of
from memascend.offloading.session import Session
from memascend.optim import NAMED
from memascend.ranks.group import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

#: Seconds until a rank that does not answer ends the others.
TIMEOUT = 4.0
WIDTH, TOKENS, EXPERTS = 256, 1024, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 300)  # more than a block, and not a whole number of them
        self.down = nn.Linear(300, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    """A layer of experts, of which a batch uses one: which one is a matter of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + self.gain * self.experts[expert](torch.relu(self.mix(self.norm(x))))


class Mixture(nn.Module):
    """Tied embeddings, layers of experts, a frozen layer."""

    def __init__(self, opaque: bool = False) -> None:
        super().__init__()
        self.opaque = opaque
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.05)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, int(tokens[0, number]) % EXPERTS)
        logits = self.head(self.norm(x + self.frozen(x)))
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flip(1).flatten())
        return Opaque(loss) if self.opaque else {"loss": loss}


class Opaque:
    """An output in which PyTorch finds no tensors."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def __getitem__(self, _: str) -> torch.Tensor:
        return self.loss


class Shared(nn.Module):
    """A layer that is used twice, within two backward passes that lie in one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x.sum()


def build(dtype: str = "float32", seed: int = 0, opaque: bool = False, kind: str = "mixture") -> nn.Module:
    """Return a model.

    A `Mixture`, `Matrices`, or one of transformers: "t5", or "lora", a Llama in float32 with PEFT's adapters.
    """
    if kind not in ("mixture", "matrices"):
        return _adapted(seed) if kind == "lora" else tiny.build(kind, getattr(torch, dtype), seed)
    torch.manual_seed(seed)
    return (Mixture(opaque) if kind == "mixture" else Matrices()).to(getattr(torch, dtype)).train()


def _adapted(seed: int) -> nn.Module:
    peft = needs.package("peft")
    # With this rank adapters have two blocks each, but for one of the values, which has one.
    config = peft.LoraConfig(r=300, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny.build("llama", torch.float32, seed), config)


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, TOKENS, (2, 8), generator=torch.Generator().manual_seed(100 + number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """Return the loss of batch `number`."""
    config: Any = getattr(model, "config", None)
    return (model(batch(number)) if config is None else model(**tiny.batch(config.model_type, number)))["loss"]


OPTIONS: dict[str, Any] = {"host_memory": "64MiB", "allocator": "pageable", "fused_loss": False}


def _optimizer(
    model: nn.Module, algorithm: str = "AdamW", projection: dict[str, Any] | None = None, **options: Any
) -> memascend.OffloadedOptimizer:
    """Return an optimizer of all trained parameters. `projection` has the options of APOLLO's matrices alone."""
    if algorithm.startswith("Apollo"):
        parameters: Any = memascend.apollo_groups(model, **projection or {})
    else:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return getattr(memascend, algorithm)(parameters, lr=1e-2, **options)


class Run:
    """A training loop in which each step has `parts` batches, of which this process takes those in `mine`.

    It takes the mean of those in the loss, or in the update.
    """

    def __init__(self, model: nn.Module, parts: int, mine: range, **options: Any) -> None:
        self.model, self.parts, self.mine = model, parts, mine
        self.scaled, self.max_norm = options.pop("scaled", False), options.pop("max_norm", 1.0)
        self.divides_in_update = options.pop("divides_in_update", False)
        self.optimizer = options.pop("optimizer", None) or _optimizer(model, **options)
        # Ranks divide by their number in the update and not in the loss: each gradient is the same with this.
        self.scaler = memascend.GradScaler(init_scale=64.0 * len(mine), enabled=self.scaled)
        self.losses: dict[int, float] = {}
        self.norms: list[float] = []

    def go(self, steps: int, first: int = 0) -> Run:
        for step in range(first, steps):
            for part in self.mine:
                number = step * self.parts + part
                loss = loss_of(self.model, number)
                # Ranks take the mean of what they have each.
                self.scaler.scale(loss if self.divides_in_update else loss / len(self.mine)).backward()
                self.losses[number] = loss.item()
            self.scaler.unscale_(self.optimizer)
            if self.divides_in_update:
                self.optimizer.unscale_in_step(1.0 / len(self.mine))
            if self.max_norm is not None:
                self.norms.append(self.optimizer.clip_grad_norm_(self.max_norm).item())
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return self

    def result(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "norms": self.norms,
            "weights": dict(memascend.parameters_of(self.model)),
        }


def offload(model: nn.Module, folder: Path, *, least: bool | str = False, **options: Any) -> nn.Module:
    """Offload with the budget of `OPTIONS`, or the least one; with `least="first"` the first rank has the least."""
    folder.mkdir(exist_ok=True)
    options = {"store": f"{folder}/store{{rank}}"} | OPTIONS | options
    if options.get("device_memory") in ("least", "least on the first"):
        with pytest.raises(memascend.BudgetError) as too_small:
            memascend.offload(model, **options | {"device_memory": 1})
        some = options["device_memory"] == "least" or dist.get_rank() == 0
        options["device_memory"] = too_small.value.smallest_bytes if some else "1GiB"
    if least:
        with pytest.raises(memascend.BudgetError) as too_small:
            memascend.offload(model, **options | {"host_memory": 1})
        if least != "first" or dist.get_rank() == 0:
            options["host_memory"] = too_small.value.smallest_bytes
    return memascend.offload(model, **options)


# ---- the programs -------------------------------------------------------------------------------------------


def train(
    rank: int,
    ranks: int,
    folder: Path,
    steps: int = 2,
    micro: int = 1,
    offloading: dict[str, Any] | None = None,
    grouped: str = "world",
    **training: Any,
) -> Any:
    """Train with `micro` batches on each rank; those of one moment lie beside one another."""
    groups: dict[str, Callable[[], Any]] = {
        "world": lambda: None,
        "group": lambda: dist.new_group(backend="gloo"),
        "mesh": lambda: init_device_mesh("cpu", (ranks,)),
    }
    model = build(**{name: training.pop(name) for name in ("dtype", "opaque", "kind") if name in training})
    model = offload(model, folder, process_group=groups[grouped](), **offloading or {})
    run = Run(model, ranks * micro, range(rank, ranks * micro, ranks), **training).go(steps)
    result = run.result()
    memascend.close(model)
    return result


def train_pretrained(
    rank: int, ranks: int, folder: Path, directories: Sequence[Path], dtype: str = "float32", steps: int = 2
) -> Any:
    """Train a model that each rank opens from a directory; the result also has the bytes that it has read there."""
    lengths: list[int] = []
    read = SafetensorsReader._read

    def count(reader: SafetensorsReader, view: memoryview, offset: int) -> None:
        lengths.append(len(view))
        read(reader, view, offset)

    SafetensorsReader._read = count  # type: ignore[method-assign]
    directory = directories[rank % len(directories)]
    model = memascend.from_pretrained(
        directory, store=f"{folder}/store{{rank}}", dtype=dtype, keep_store=True, **OPTIONS
    )
    result = Run(model, ranks, range(rank, ranks, ranks)).go(steps).result() | {"bytes_read": sum(lengths)}
    memascend.close(model)
    return result


def train_alone(rank: int, ranks: int, folder: Path) -> Any:
    """Train by itself in a process of several: its group has one rank."""
    groups = [dist.new_group([number]) for number in range(ranks)]
    model = offload(build(), folder / str(rank), process_group=groups[rank])
    result = Run(model, 1, range(1)).go(2).result()
    memascend.close(model)
    return result


def save(rank: int, ranks: int, folder: Path, least: bool = False) -> Any:
    """Train, save the model, be refused to, find the drive full, and train on."""
    model = offload(build(), folder, least=least)
    run = Run(model, ranks, range(rank, ranks, ranks)).go(1)
    memascend.save_pretrained(model, folder / "out", max_shard_size="1MB")
    memascend.save_pretrained(model, folder / "half", dtype="bfloat16")
    errors = []
    for name in ("out", "full"):
        if name == "full" and rank == 0:
            safetensors._write = _fill_up  # type: ignore[assignment]
        with pytest.raises(OSError) as error:
            memascend.save_pretrained(model, folder / name, max_shard_size="1MB")
        errors.append(f"{type(error.value).__name__}: {error.value}")
    result = run.go(2, 1).result() | {"errors": errors}
    memascend.close(model)
    return result


def llama() -> nn.Module:
    import tiny  # imports transformers, which most ranks do not need

    torch.manual_seed(0)
    return tiny.LlamaForCausalLM(tiny.LlamaConfig(**tiny.SMALL_DECODER))


def save_llama(rank: int, ranks: int, folder: Path) -> Any:
    """Have a model save itself with the arguments that programs of several processes give."""
    model = offload(llama(), folder)
    model.save_pretrained(folder / "out", is_main_process=rank == 0)
    model(input_ids=torch.ones(1, 4, dtype=torch.int64), labels=torch.ones(1, 4, dtype=torch.int64)).loss.backward()
    memascend.close(model)
    return {"steps": 1}


def save_adapters(rank: int, ranks: int, folder: Path, micro: int) -> Any:
    """Train adapters, have the model save them, and be refused to save them there again."""
    import peft

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model = offload(model, folder)
    optimizer = memascend.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for part in range(rank, ranks * micro, ranks):
        (model(input_ids=batch(part), labels=batch(part)).loss / micro).backward()
    optimizer.step()
    model.save_pretrained(folder / "out", is_main_process=rank == 0)
    with pytest.raises(OSError, match="exists: give another directory"):
        memascend.save_pretrained(model, folder / "out")
    memascend.close(model)
    return {}


def save_states(rank: int, ranks: int, folder: Path, dtype: str) -> Any:
    """Save weights and states, and have another model go on from them."""
    model = offload(build(dtype), folder)
    run = Run(model, ranks, range(rank, ranks, ranks)).go(2)
    memascend.save_distributed(model, run.optimizer, folder / "saved")
    with pytest.raises(memascend.MemascendError, match="exists already"):
        memascend.save_distributed(model, run.optimizer, folder / "saved")
    states = run.optimizer.state_dict()
    weights = dict(memascend.parameters_of(model))
    memascend.close(model)
    second = build(dtype)
    with torch.no_grad():
        for name, parameter in second.named_parameters():
            parameter.copy_(weights[name])
    second = offload(second, folder / "second")
    again = Run(second, ranks, range(rank, ranks, ranks))
    again.optimizer.load_state_dict(states)
    result = again.go(3, 2).result() | {"states": states}
    memascend.close(second)
    return result


def save_projected(rank: int, ranks: int, folder: Path, steps: int, **training: Any) -> Any:
    """Show the states of APOLLO, be refused to save them in a directory, and have another model go on from them."""
    kind = training.pop("kind")
    run = Run(offload(build(kind=kind), folder), ranks, range(rank, ranks, ranks), **training).go(steps)
    with pytest.raises(ValueError, match="do not have the shapes of parameters"):
        memascend.save_distributed(run.model, run.optimizer, folder / "saved")
    states, weights = run.optimizer.state_dict(), run.result()["weights"]
    memascend.close(run.model)
    second = build(kind=kind)
    second.load_state_dict(weights)
    again = Run(offload(second, folder / "second"), ranks, range(rank, ranks, ranks), **training)
    again.optimizer.load_state_dict(states)
    result = again.go(steps + 2, steps).result() | {"states": states}
    memascend.close(again.model)
    return result


def change_between(rank: int, ranks: int, folder: Path, kind: str, **training: Any) -> Any:
    """Take steps of APOLLO with another learning rate on one rank, which all refuse, and with another rank number."""
    model = offload(build(kind=kind), folder)
    run = Run(model, ranks, range(rank, ranks, ranks), **training).go(1)
    run.optimizer.param_groups[0]["rank"] += 1
    with pytest.raises(memascend.MemascendError, match="another one than that of its steps so far"):
        run.go(2, 1)
    run.optimizer.zero_grad()
    run.optimizer.param_groups[0]["rank"] -= 1
    run.optimizer.param_groups[0]["lr"] *= 1 + rank
    run.go(2, 1)


def load_states(rank: int, ranks: int, folder: Path, source: str, dtype: str, states: str = "float32") -> Any:
    """Load weights and states of a checkpoint, and train on; the result also has what was loaded, and bytes read."""
    lengths: list[int] = []
    load = FileSystemReader.read_data

    def count(reader: FileSystemReader, plan: Any, planner: Any) -> Any:
        lengths.extend(item.lengths.numel() for item in plan.items)
        return load(reader, plan, planner)

    FileSystemReader.read_data = count  # type: ignore[method-assign]
    model = offload(build(dtype, seed=5), folder)
    run = Run(model, ranks, range(rank, ranks, ranks), states=states).go(1)
    memascend.load_distributed(model, run.optimizer, folder / source)
    loaded, elements = copy.deepcopy(run.optimizer.state_dict()), sum(lengths)
    result = run.go(2, 1).result() | {"states": loaded, "elements": elements}
    memascend.close(model)
    return result


def load_damaged(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Load checkpoints of which one rank's files are not those of the other, and return what each error says."""
    told: dict[str, Any] = {}
    model = offload(build(), folder)
    run = Run(model, ranks, range(rank, ranks, ranks)).go(1)
    before = dict(memascend.parameters_of(model))
    for name in ("nothing", "missing", "other", "damaged"):
        try:
            memascend.load_distributed(model, run.optimizer, folder / f"{name}{rank}")
        except memascend.MemascendError as error:
            told[name] = f"{type(error).__name__}: {error}"
        if name == "other":
            told["unchanged"] = all(torch.equal(before[each], value) for each, value in memascend.parameters_of(model))
    memascend.load_distributed(model, run.optimizer, folder / "saved")
    told["loaded"] = run.go(2, 1).result()
    memascend.close(model)
    return told


def save_as_fsdp(rank: int, ranks: int, folder: Path, dtype: str) -> None:
    """Train a model that PyTorch has divided over the ranks, and have PyTorch save it."""
    model = build(dtype)
    scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
    for layer in model.layers:
        fully_shard(layer, ignored_params=scalars)
    fully_shard(model, ignored_params=scalars)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    for number in range(2):
        loss_of(model, number).backward()  # An expert that only some ranks use has no states on the others.
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=str(folder / "saved"))


_written = 0


def _fill_up(_: int, view: memoryview, offset: int) -> None:
    """Write nothing, and have room for 4 MB of it."""
    global _written
    _written += len(view)
    if _written > 4e6:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def go_back(rank: int, ranks: int, folder: Path, **offloading: Any) -> Any:
    """Keep steps under names, go back to the first of them, and train on from there."""
    model = offload(build(), folder, keep_store=True, **offloading)
    run = Run(model, ranks, range(rank, ranks, ranks)).go(1)
    memascend.save_checkpoint(model, "one")
    run.go(2, 1)
    memascend.save_checkpoint(model, "two")
    run.go(3, 2)
    first = run.result()
    with pytest.raises(memascend.StoreError, match="three"):
        memascend.restore_checkpoint(model, "three")
    restored = memascend.restore_checkpoint(model, "one")
    run = Run(model, ranks, range(rank, ranks, ranks), optimizer=restored.optimizer).go(3, restored.steps)
    memascend.save_checkpoint(model, "three", keep_last=2)
    memascend.save_checkpoint(model, "four")
    tags = [tag for tag, _, _ in memascend.checkpoints(model)]
    memascend.delete_checkpoint(model, "four")
    again = run.result()
    memascend.close(model)
    return {"first": first, "again": again, "steps": restored.steps, "tags": tags}


def keep_on_some(rank: int, ranks: int, folder: Path, victim: int | None) -> Any:
    """Have a checkpoint kept on rank 0 alone: rank 1 has the name already, or is killed before."""
    model = offload(build(), folder, keep_store=True)
    run = Run(model, ranks, range(rank, ranks, ranks)).go(1)
    memascend.save_checkpoint(model, "one")
    if rank == 1 and victim is None:
        offload_of(model).runtime.snapshot("two")
    elif rank == 1:
        Session._keep_under = die  # type: ignore[method-assign]
    try:
        memascend.save_checkpoint(model, "two")
    except memascend.StoreError as error:
        told = str(error)
        left = [tag for tag, _, _ in memascend.checkpoints(model)]
        result = run.go(2, 1).result()
        memascend.close(model)
        return result | {"told": told, "left": left}
    return {}


def delete_too_early(rank: int, ranks: int, folder: Path, victim: int) -> Any:
    """Delete a checkpoint when one rank has committed a step, and the `victim` is killed before it has."""
    model = offload(build(), folder, keep_store=True)
    run = Run(model, ranks, range(rank, ranks, ranks)).go(1)
    memascend.save_checkpoint(model, "one")
    run.go(2, 1)
    generations = offload_of(model).generations
    if rank == victim:
        Generations.start = _start_nothing  # type: ignore[method-assign]
    model(batch(0))
    if rank == victim:
        die()
    assert generations._commit is not None
    generations._commit.wait()
    memascend.delete_checkpoint(model, "one")


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _start_nothing(_: Generations) -> None:
    pass


def _die_if_due(generations: Generations, *_: Any) -> None:
    if generations._due is not None:
        die()


def sleep(*_: Any, **__: Any) -> None:
    time.sleep(60)


def train_until_lost(
    rank: int,
    ranks: int,
    folder: Path,
    victim: int,
    moment: str,
    steps: int,
    kind: str = "mixture",
    store: Any = None,
    **training: Any,
) -> Any:
    """Train durably until one rank is lost.

    It is killed as it begins to commit the last step ("commit"), as it is to gather a unit ("gather"), or, without that
    commit, where all ranks meet to have it ("meet"); or it stops as it is to gather a unit ("hang").
    """
    model = offload(build(kind=kind), folder, keep_store=True, **({} if store is None else {"store": store}))
    run = Run(model, ranks, range(rank, ranks, ranks), **training).go(steps)
    if rank == victim and moment in ("commit", "meet"):
        Generations.start = die if moment == "commit" else _start_nothing  # type: ignore[method-assign]
        Generations.settle = _die_if_due  # type: ignore[method-assign]
    elif rank == victim:
        Ranks.gather = die if moment == "gather" else sleep  # type: ignore[method-assign]
    try:
        run.go(steps + 1, steps)
    finally:
        memascend.close(model)


def resume_with_tables(rank: int, ranks: int, folder: Path) -> Any:
    """Resume where the head is large enough for its loss to have been computed in pieces."""
    tables.TABLE_BYTES_MIN = 1024**2
    return resume(rank, ranks, folder, 1)


def resume(
    rank: int,
    ranks: int,
    folder: Path,
    steps: int,
    micro: int = 1,
    name: str = "store",
    tag: str | None = None,
    dtype: str = "float32",
    described: bool = False,
    kind: str = "mixture",
    store: Any = None,
) -> Any:
    """Go on with a run; `described` says that its store can make the model."""
    model = None if described else build(dtype, seed=5, kind=kind)
    options = {name: value for name, value in OPTIONS.items() if name != "fused_loss"}
    store = store or f"{folder}/{name}{{rank}}"
    if options.get("device_memory") == "least":
        with pytest.raises(memascend.BudgetError) as too_small:
            memascend.resume(store, model=model, tag=tag, **options | {"device_memory": 1})
        options["device_memory"] = too_small.value.smallest_bytes
    resumed = memascend.resume(store, model=model, tag=tag, **options)
    before = dict(memascend.parameters_of(resumed.model))
    run = Run(resumed.model, ranks * micro, range(rank, ranks * micro, ranks), optimizer=resumed.optimizer)
    result = run.go(steps, resumed.steps).result() | {"steps": resumed.steps, "before": before}
    result["tags"] = [tag for tag, _, _ in memascend.checkpoints(resumed.model)]
    memascend.close(resumed.model)
    return result


def train_or_resume(rank: int, ranks: int, folder: Path, steps: int, kind: str = "mixture", **training: Any) -> Any:
    """Do what a script does that is started again after whatever stopped it."""
    if memascend.can_resume(f"{folder}/store{{rank}}"):
        return resume(rank, ranks, folder, steps, kind=kind)
    # A rank may have the first step that another one lost.
    shutil.rmtree(folder / f"store{rank}", ignore_errors=True)
    model = offload(build(kind=kind), folder, keep_store=True)
    result = Run(model, ranks, range(rank, ranks, ranks), **training).go(steps).result()
    memascend.close(model)
    return result


def give_up(rank: int, ranks: int, folder: Path) -> Any:
    """Have one rank end with an error of its own, which its process outlives."""
    model = offload(build(), folder)
    try:
        if rank == 1:
            raise OSError("no such batch")
        Run(model, ranks, range(rank, ranks, ranks)).go(1)
    finally:
        memascend.close(model)
        if rank == 1:
            time.sleep(2)


def go_astray(rank: int, ranks: int, folder: Path) -> Any:
    """Have one rank evaluate once more than the others."""
    model = offload(build(), folder)
    Run(model, ranks, range(rank, ranks, ranks)).go(1)
    if rank == 1:
        with torch.no_grad():
            model(batch(0))
    Run(model, ranks, range(rank, ranks, ranks)).go(1)


def overflow(rank: int, ranks: int, folder: Path) -> Any:
    """Have the gradients of one rank alone overflow, and tell what the steps of all did."""
    model = offload(build(), folder)
    optimizer = memascend.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, nonfinite="skip")
    scaler = memascend.GradScaler(init_scale=256.0)
    before = model.head.weight.detach().clone()
    (scaler.scale(model(batch(rank))["loss"]) * (float("inf") if rank == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    scales = scaler.get_scale()
    optimizer.zero_grad()
    (model(batch(rank))["loss"] * (float("nan") if rank == 1 else 1.0)).backward()
    norm = optimizer.clip_grad_norm_(1.0).item()
    optimizer.step()
    same = bool(torch.equal(before, model.head.weight.detach()))
    memascend.close(model)
    return {"scale": scales, "norm": str(norm), "skipped": optimizer.skipped_steps, "same": same}


class Plain(nn.Module):
    """Large weights alone, each a whole number of blocks for each rank, used in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, order: Sequence[int] = range(4)) -> torch.Tensor:
        for number in order:
            x = x + self.layers[number](x)
        return x.square().mean()


class Around(Plain):
    """A module that has a weight itself, around layers."""

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Parameter(torch.ones(1024))

    def forward(self, x: torch.Tensor, order: Sequence[int] = range(4)) -> torch.Tensor:
        return super().forward(x * self.around, order)


def update_between(rank: int, ranks: int, folder: Path, least: bool | str, flush: bool) -> Any:
    """Apply updates between a pass that ends with a frozen layer and a pass that begins with that layer."""
    torch.manual_seed(0)
    model = Plain()
    model.layers[0].requires_grad_(False)
    model = offload(model, folder, least=least, host_memory="160MiB")
    optimizer = memascend.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for order in (range(4), range(2), range(4)):  # The updates of layers left out wait where there is no room.
        model(torch.ones(2, 1024, requires_grad=True), order).backward()
        optimizer.step()
        optimizer.zero_grad()
        if flush:
            with torch.no_grad():
                model(torch.ones(2, 1024), (0,))
            memascend.flush(model)
    weights = dict(memascend.parameters_of(model))
    memascend.close(model)
    return weights


class FrozenHead(nn.Module):
    """Two layers, of which a backward pass needs the frozen one alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, width, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).square().mean()


def flush_each_step(rank: int, ranks: int, folder: Path, width: int) -> dict[str, torch.Tensor]:
    """Apply each step at once, where two layers share one buffer."""
    torch.manual_seed(0)
    model = offload(FrozenHead(width), folder, least=True)
    optimizer = memascend.AdamW([model.body.weight], lr=1e-2)
    for _ in range(3):
        model(torch.ones(2, width)).backward()
        optimizer.step()
        optimizer.zero_grad()
        memascend.flush(model)
    weights = dict(memascend.parameters_of(model))
    memascend.close(model)
    return weights


def change_order(rank: int, ranks: int, folder: Path, least: bool | str) -> Any:
    """Begin a pass with the layer that the pass before has ended with, although it began with another one."""
    torch.manual_seed(0)
    model = offload(Around(), folder, least=least, host_memory="160MiB")
    with torch.no_grad():
        outputs = [model(torch.ones(2, 1024), order) for order in (range(4), range(4), (3, 2, 1, 0))]
    memascend.close(model)
    return outputs


def hold_gathered(rank: int, ranks: int, folder: Path) -> Any:
    """Train with the least memory, and a backend that never lets go of the tensors of its collectives."""
    held: list[Any] = []
    start = Ranks._start_gather

    def start_and_hold(self: Ranks, *tensors: torch.Tensor) -> Any:
        held.append(tensors)
        return start(self, *tensors)

    Ranks._start_gather = start_and_hold  # type: ignore[method-assign]
    return train(rank, ranks, folder, offloading={"least": True})


MEASURED = ("ssd_bytes_read", "ssd_bytes_written", "store_bytes_used", "network_bytes_sent")


def measure(rank: int, ranks: int, folder: Path, least: bool) -> dict[str, int]:
    """Train, and return the bytes that the store has read, written and taken."""
    torch.manual_seed(0)
    model = offload(Plain(), folder, least=least, host_memory="160MiB")
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.ones(2, 1024)).backward()
        optimizer.step()
        optimizer.zero_grad()
    memascend.flush(model)
    stats = memascend.stats(model)
    memascend.close(model)
    return {name: stats[name] for name in MEASURED if name in stats}


def trace(rank: int, ranks: int, folder: Path, config: Any, budget: int, accumulate: int, optimizer: str) -> Any:
    """Train a model of transformers with an optimizer of the command line; return its figures after each step."""
    # Not for every program: transformers takes seconds to import.
    import traffic

    options = OPTIONS | {"host_memory": budget, "fused_loss": "auto"}
    model = memascend.offload(traffic.build(config), store=f"{folder}/store{{rank}}", **options)
    make, _, given = NAMED[optimizer]
    parameters = memascend.apollo_groups(model, **given) if issubclass(make, memascend.Apollo) else model.parameters()
    seen = traffic.steps(model, make(parameters, lr=1e-4), 4, accumulate, 2, 128, config.vocab_size)
    memascend.close(model)
    seen = [stats | stats.get("device", {}) for stats in seen]
    return [{name: value for name, value in stats.items() if isinstance(value, int)} for stats in seen]


def note_refusal(told: dict[str, str], name: str, do: Callable[[], Any]) -> None:
    """Do what is to be refused, and note what the error says under its name."""
    try:
        do()
    except memascend.MemascendError as error:
        told[name] = str(error)
    else:
        told[name] = "done"


def refusals(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """Do what is refused, and return what each error says."""
    told: dict[str, str] = {}

    refused = partial(note_refusal, told)
    wrong: dict[str, dict[str, Any]] = {
        "update": {"update": "backward"},
        "gradients": {"gradients": "bfloat16"},
        "fused_loss": {"fused_loss": True},
        "auto": {"host_memory": "auto"},
        "host_memory_max": {"host_memory_max": "128MiB"},
        "volumes": {"store": [f"{folder}/a", f"{folder}/b"]},
        "too few": {"store": [[f"{folder}/a"]]},
        "device on": {"store": "UUID=11111111-2222-3333-4444-555555555555"},
    }
    for name, changed in wrong.items():
        options = {"store": folder / "x"} | OPTIONS | changed
        refused(name, lambda options=options: memascend.offload(build(), **options))
    refused("weights", lambda: offload(build(seed=rank), folder))
    refused("model", lambda: offload(build("float32" if rank else "bfloat16"), folder))
    where = {"store": folder / "x", "host_memory": "64MiB"}
    refused("frozen", lambda: memascend.from_pretrained(folder, frozen="files", **where))
    refused("no store", lambda: memascend.resume(folder / "nothing", host_memory="64MiB"))

    model = offload(build(), folder)
    trained = [p for p in model.parameters() if p.requires_grad]
    refused("parameters beside", lambda: memascend.AdamW([*trained, nn.Parameter(torch.ones(3))]))
    refused("DDP", lambda: nn.parallel.DistributedDataParallel(model))
    refused("FSDP", lambda: fully_shard(model.layers[0].mix))
    refused("FSDP 1", lambda: FullyShardedDataParallel(model.layers[1].mix, device_id=torch.device("cpu")))
    refused("a part", lambda: model.layers[0](torch.ones(1, 2, WIDTH), 0))
    model.layers[0].added = nn.Linear(WIDTH, WIDTH)
    refused("added", lambda: model(batch(rank)))
    del model.layers[0].added
    refused("write", lambda: model.head.weight.data.mul_(2.0))
    refused("set_host_memory", lambda: memascend.set_host_memory(model, "80MiB"))
    optimizer = memascend.AdamW(trained, lr=1e-2)
    model(batch(rank))["loss"].backward()
    refused("gradient", lambda: model.head.weight.grad.sum())
    refused("zeros", lambda: optimizer.zero_grad(set_to_none=False))
    optimizer.step()
    optimizer.zero_grad()
    model.head.weight.grad = torch.ones(TOKENS, WIDTH)
    refused("assigned gradient", optimizer.step)
    model.head.weight.grad = None
    other = optimizer.state_dict()
    other["param_groups"][0]["lr"] = 0.1 * rank
    refused("load_state_dict", lambda: optimizer.load_state_dict(other))
    memascend.close(model)
    shared = offload(Shared(), folder / "shared")
    refused("in parts", lambda: shared(torch.ones(1, WIDTH, requires_grad=True)).backward())
    return told


def on_device(rank: int, ranks: int, folder: Path, doing: str, library: Path, **options: Any) -> Any:
    """Run another program, of which models compute on a simulated device: see `devices_of_ranks`."""
    import devices_of_ranks  # Not for every program: it has memascend look for CUDA.

    program = PROGRAMS.get(doing) or getattr(devices_of_ranks, doing)
    return devices_of_ranks.run(program, rank, ranks, folder, library, **options)


def on_gpus(rank: int, ranks: int, folder: Path, doing: str, computing: dict[str, Any], **options: Any) -> Any:
    """Run another program, of which models compute on a real device: each rank has its own, if there are enough."""
    OPTIONS.update({"allocator": "auto", "device": f"cuda:{rank % torch.cuda.device_count()}"} | computing)
    return PROGRAMS[doing](rank, ranks, folder, **options)


def with_nccl_alone(rank: int, ranks: int, folder: Path) -> Any:
    """Offload in a group that moves no tensors of the CPU."""
    memascend.close(offload(build(), folder, process_group=dist.new_group(backend="nccl")))
    return {"error": "none"}


_GATHERING = (update_between, change_order, hold_gathered)
_TRAINING = (
    train,
    train_pretrained,
    go_back,
    keep_on_some,
    delete_too_early,
    save,
    save_llama,
    save_adapters,
    save_states,
    save_projected,
    change_between,
    load_states,
    load_damaged,
    save_as_fsdp,
    train_alone,
    train_until_lost,
    train_or_resume,
    resume,
    resume_with_tables,
)
PROGRAMS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *_TRAINING,
        *_GATHERING,
        on_device,
        on_gpus,
        with_nccl_alone,
        give_up,
        go_astray,
        overflow,
        flush_each_step,
        measure,
        trace,
        refusals,
    )
}


# ---- running them -------------------------------------------------------------------------------------------

_context = multiprocessing.get_context("forkserver")
# What every rank would import by itself otherwise, for seconds.
_context.set_forkserver_preload(["rank_programs", "torch._dynamo", "torch.distributed._local_tensor"])


def _main(program: str, rank: int, ranks: int, folder: Path, attempt: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting{attempt}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    began = time.monotonic()
    try:
        result = PROGRAMS[program](rank, ranks, folder, **options)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    torch.save(result, folder / f"result{attempt}.{rank}")
    # Not by way of atexit: a rank whose peers are gone has nothing to tidy up.
    os._exit(0)


def start(program: str, ranks: int, folder: Path, attempt: str = "", **options: Any) -> list[Any]:
    """Start a program on every rank, and return the processes."""
    processes = [
        _context.Process(target=_main, args=(program, rank, ranks, folder, attempt, options), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def results_of(processes: list[Any], folder: Path, attempt: str = "", victim: int | None = None) -> list[Any]:
    """Wait for the ranks, and return what the program returns there; the exit code of one that was killed.

    The `victim` is killed once the others have ended.
    """
    for rank, process in enumerate(processes):
        if rank != victim:
            process.join(60)
    results: list[Any] = []
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.kill()
        process.join()
        file = folder / f"result{attempt}.{rank}"
        results.append(torch.load(file) if file.exists() else process.exitcode)
    return results


def run(program: str, ranks: int, folder: Path, attempt: str = "", **options: Any) -> list[Any]:
    """Run a program on every rank, and return what it returns there."""
    processes = start(program, ranks, folder, attempt, **options)
    return results_of(processes, folder, attempt, options.get("victim"))


def in_one_process(
    ranks: int, steps: int = 2, dtype: str = "float32", micro: int = 1, kind: str = "mixture", **training: Any
) -> Any:
    """Train in memory what `train` does on several ranks, with as many micro-batches."""
    return Run(build(dtype, kind=kind), ranks * micro, range(ranks * micro), **training).go(steps).result()
