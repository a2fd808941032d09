"""Programs that several processes run as the ranks of a group, and how a test runs them."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import forked
import torch
import torch.distributed as dist
from rank_losing import give_up, go_astray, resume, resume_with_tables, train_or_resume, train_until_lost
from rank_runs import OPTIONS, TOKENS, WIDTH, Run, Shared, batch, build, offload
from rank_saving import (
    change_between,
    delete_too_early,
    go_back,
    keep_on_some,
    load_damaged,
    load_states,
    save,
    save_adapters,
    save_as_fsdp,
    save_llama,
    save_projected,
    save_states,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import memascend
from memascend.formats.safetensors import SafetensorsReader
from memascend.optim import NAMED
from memascend.ranks.group import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

#: Seconds until a rank that does not answer ends the others.
TIMEOUT = 4.0


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
    """Train with `micro` batches on each rank; simultaneous ones are neighbours."""
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


def overflow(rank: int, ranks: int, folder: Path) -> Any:
    """Have the gradients of one rank alone overflow, and report the steps of all."""
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
    """Two layers; a backward pass needs the frozen one alone."""

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
    """Do something that must be refused, and record the error under its name."""
    try:
        do()
    except memascend.MemascendError as error:
        told[name] = str(error)
    else:
        told[name] = "done"


def refusals(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """Do things that are refused, and return each error's text."""
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
    # Libraries save on one rank, where the values of all would be waited for.
    refused("storage", lambda: model.head.weight.untyped_storage())
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
    stack = offload(nn.ParameterList([nn.Parameter(torch.ones(4, WIDTH, WIDTH))]), folder / "stack")
    refused("experts", lambda: memascend.Apollo(stack.parameters(), rank=4))
    return told


def on_device(rank: int, ranks: int, folder: Path, doing: str, library: Path, **options: Any) -> Any:
    """Run another program whose models compute on a simulated device: see `devices_of_ranks`."""
    import devices_of_ranks  # Not for every program: it has memascend look for CUDA.

    program = PROGRAMS.get(doing) or getattr(devices_of_ranks, doing)
    return devices_of_ranks.run(program, rank, ranks, folder, library, **options)


def on_gpus(rank: int, ranks: int, folder: Path, doing: str, computing: dict[str, Any], **options: Any) -> Any:
    """Run another program whose models compute on a real device: each rank has its own, if there are enough."""
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
    # Whole or not at all: a rank may be killed as it writes.
    partial = folder / f"partial{attempt}.{rank}"
    torch.save(result, partial)
    partial.rename(folder / f"result{attempt}.{rank}")
    # Not by way of atexit: a rank whose peers are gone has nothing to tidy up.
    os._exit(0)


def start(program: str, ranks: int, folder: Path, attempt: str = "", **options: Any) -> list[Any]:
    """Start a program on every rank, and return the processes."""
    processes = [
        forked.context().Process(target=_main, args=(program, rank, ranks, folder, attempt, options), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def results_of(processes: list[Any], folder: Path, attempt: str = "", victim: int | None = None) -> list[Any]:
    """Wait for the ranks, and return the program's results; the exit code of one that was killed.

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
    """Run a program on every rank, and return its results."""
    processes = start(program, ranks, folder, attempt, **options)
    return results_of(processes, folder, attempt, options.get("victim"))


def in_one_process(
    ranks: int, steps: int = 2, dtype: str = "float32", micro: int = 1, kind: str = "mixture", **training: Any
) -> Any:
    """Train in memory as `train` does on several ranks, with as many micro-batches."""
    return Run(build(dtype, kind=kind), ranks * micro, range(ranks * micro), **training).go(steps).result()
