"""Programs of ranks that save, load, keep and delete trained models."""

from __future__ import annotations

import copy
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
import torch.distributed.checkpoint as dcp
from rank_losing import die, start_nothing
from rank_runs import Run, batch, build, loss_of, offload
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import memascend
from memascend.durability.commits import CommitLog
from memascend.formats import safetensors
from memascend.session.api import offload_of
from memascend.session.checkpoints import Checkpoints

if TYPE_CHECKING:
    from pathlib import Path


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

    torch.manual_seed(0)
    return tiny_models.LlamaForCausalLM(tiny_models.LlamaConfig(**tiny_models.SMALL_DECODER))


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
    """Load weights and states of a checkpoint, and train on; the result also has the loaded values, and bytes read."""
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
    """Load checkpoints whose files differ between ranks, and return each error's text."""
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
        offload_of(model).runtime.store.snapshot("two")
    elif rank == 1:
        Checkpoints._keep_under = die  # type: ignore[method-assign]
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
    generations = offload_of(model).commit_log
    if rank == victim:
        CommitLog.start = start_nothing  # type: ignore[method-assign]
    model(batch(0))
    if rank == victim:
        die()
    commit = generations._phases.commit
    assert commit is not None
    commit.wait()
    memascend.delete_checkpoint(model, "one")
