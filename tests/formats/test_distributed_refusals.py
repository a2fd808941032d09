"""Distributed checkpoints that are damaged, of another model, or of another kind are refused and change nothing."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import pickle
import random
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults
import pytest
import tiny_models
import torch
from torch import nn
from training_states import LR, assert_same_states, groups_of, states_by_name, train

import memascend
from memascend.formats.dcp import DistributedReader

if TYPE_CHECKING:
    from collections.abc import Callable


MIB = 2**20


# ---- refusals -----------------------------------------------------------------------------------------------


def small(seed: int = 0) -> nn.Module:
    """Return a model whose layers are packed."""
    torch.manual_seed(seed)
    return tiny_models.Plain(width=64, vocabulary=2048)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small model with states of one step, from memory."""
    model, path = small(), tmp_path_factory.mktemp("original") / "saved"
    optimizer = memascend.AdamW(model.parameters(), lr=LR)
    train(model, "plain", optimizer, 0)
    memascend.save_distributed(model, optimizer, path)
    return path


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """That checkpoint, to be damaged."""
    return shutil.copytree(original, tmp_path / "saved")


def damaged(checkpoint: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata of the checkpoint."""
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def forget(key: str, metadata: Any) -> None:
    del metadata.state_dict_metadata[key]


def reshape(key: str, metadata: Any) -> None:
    entry = metadata.state_dict_metadata[key]
    entry.size = torch.Size(reversed(entry.size))
    entry.chunks[0].sizes = entry.size


def leave_out(key: str, metadata: Any) -> None:
    chunk = metadata.state_dict_metadata[key].chunks[0]
    chunk.sizes = torch.Size([chunk.sizes[0] - 1, *chunk.sizes[1:]])


def file_of(checkpoint: Path, key: str) -> Path:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    [name] = {info.relative_path for index, info in metadata.storage_data.items() if index.fqn == key}
    return checkpoint / name


def move_out(key: str, metadata: Any) -> None:
    for index, info in metadata.storage_data.items():
        if index.fqn == key:
            info.relative_path = "../elsewhere"


def lose_file(checkpoint: Path, key: str) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
    os.truncate(checkpoint / info.relative_path, info.offset + info.length - 1)


WEIGHT, STATE = "model.layers.0.mlp.0.weight", "optim.state.layers.0.mlp.0.weight.exp_avg_sq"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weight": (lambda c: damaged(c, partial(forget, WEIGHT)), rf"{WEIGHT} is missing"),
    "no state": (lambda c: damaged(c, partial(forget, STATE)), rf"{STATE} is missing"),
    "shape of a weight": (lambda c: damaged(c, partial(reshape, WEIGHT)), rf"{WEIGHT} has shape \(64, 128\)"),
    "shape of a state": (lambda c: damaged(c, partial(reshape, STATE)), rf"{STATE} has shape \(64, 128\)"),
    "part of a state": (lambda c: damaged(c, partial(leave_out, STATE)), rf"{STATE} is not there in full"),
    "no groups": (lambda c: damaged(c, partial(forget, "optim.param_groups.0.params")), "param_groups is missing"),
    "no file": (lambda c: file_of(c, STATE).unlink(), rf"which holds {STATE}, is missing"),
    "short file": (lambda c: lose_file(c, STATE), rf"which holds {STATE}, is truncated"),
    "elsewhere": (lambda c: damaged(c, partial(move_out, STATE)), rf"{STATE} is said to be outside"),
    "no metadata": (lambda c: (c / ".metadata").unlink(), "is not a PyTorch Distributed Checkpoint"),
    "empty metadata": (lambda c: (c / ".metadata").write_bytes(b"") and None, "is damaged"),
    "other pickle": (lambda c: (c / ".metadata").write_bytes(pickle.dumps({})) and None, "does not describe"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_refused_before_anything_has_changed(
    offloaded: Callable[..., nn.Module], checkpoint: Path, damage: str
) -> None:
    model = offloaded(small(1))
    optimizer = memascend.AdamW(model.parameters(), lr=LR / 7)
    train(model, "plain", optimizer, 3, steps=1)
    weights, states = dict(memascend.parameters_of(model)), states_by_name(model, optimizer)
    harm, message = DAMAGE[damage]
    harm(checkpoint)
    with pytest.raises(memascend.CheckpointError, match=message) as caught:
        memascend.load_distributed(model, optimizer, checkpoint)
    assert str(checkpoint) in str(caught.value)
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), weights)
    assert_same_states(states_by_name(model, optimizer), states)
    assert optimizer.param_groups[0]["lr"] == LR / 7


def test_groups_that_differ(offloaded: Callable[..., nn.Module], checkpoint: Path, tmp_path: Path) -> None:
    model = offloaded(small())
    grouped = memascend.AdamW(groups_of(model), lr=LR)
    memascend.save_distributed(model, grouped, tmp_path / "groups")
    with pytest.raises(memascend.CheckpointError, match="is in another parameter group than"):
        memascend.load_distributed(model, memascend.AdamW(model.parameters()), tmp_path / "groups")
    # Finer groups than those saved are no difference.
    memascend.load_distributed(model, grouped, checkpoint)
    assert [group["weight_decay"] for group in grouped.param_groups] == [0.01, 0.01]
    some = memascend.AdamW(list(model.parameters())[:3], lr=LR)
    memascend.save_distributed(model, some, tmp_path / "some")
    with pytest.raises(memascend.CheckpointError, match="is in none of the parameter groups"):
        memascend.load_distributed(model, memascend.AdamW(model.parameters()), tmp_path / "some")
    with pytest.raises(ValueError, match="not the model's"):
        memascend.save_distributed(model, memascend.AdamW(nn.Linear(2, 2).parameters()), tmp_path / "strange")
    for call in (memascend.save_distributed, memascend.load_distributed):
        path = tmp_path / "strange" if call is memascend.save_distributed else checkpoint
        with pytest.raises(TypeError, match=r"torch\.distributed\.checkpoint saves and loads"):
            call(model, torch.optim.AdamW(model.parameters()), path)  # type: ignore[arg-type]
    assert not (tmp_path / "strange").exists()


class Touch:
    """Runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize("where", ["metadata", "inside metadata", "option", "tensor"])
def test_no_pickle_runs(checkpoint: Path, tmp_path: Path, where: str) -> None:
    model = small()
    optimizer = memascend.AdamW(model.parameters())
    touch, message = Touch(tmp_path / "witness"), rf"{os.system.__module__}\.system"
    if where == "metadata":
        (checkpoint / ".metadata").write_bytes(pickle.dumps(touch))
    elif where == "inside metadata":
        damaged(checkpoint, lambda metadata: metadata.planner_data.update(a=touch))
    else:
        key = "optim.param_groups.0.lr" if where == "option" else WEIGHT
        torch.save(touch, file_of(checkpoint, key))
        length = file_of(checkpoint, key).stat().st_size

        def adjust(metadata: Any) -> None:
            for index, info in metadata.storage_data.items():
                if index.fqn == key:
                    info.length = length

        damaged(checkpoint, adjust)
        message = f"{key} of .* names {message}"
    with pytest.raises(memascend.CheckpointError, match=message):
        memascend.load_distributed(model, optimizer, checkpoint)
    assert not (tmp_path / "witness").exists()


@pytest.mark.parametrize(
    "name",
    ["builtins eval", "os system", "torch load", "torch.serialization load", "memascend errors", "torch hub.load"],
)
def test_classes_that_are_refused_are_named(tmp_path: Path, name: str) -> None:
    module, attribute = name.split()
    # The opcodes of a global in a pickle of protocol 4, with dots in the name too.
    stack_global = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, attribute))
    (tmp_path / ".metadata").write_bytes(stack_global + b"\x93.")
    with pytest.raises(memascend.CheckpointError, match=name.replace(" ", r"\.")):
        DistributedReader(tmp_path)


@pytest.mark.parametrize(
    "called", ["torch.distributed.checkpoint.metadata Metadata", "torch.serialization _get_layout", "torch Size"]
)
def test_a_pickle_cannot_change_what_it_may_name(tmp_path: Path, called: str) -> None:
    module, name = called.split()
    real = getattr(importlib.import_module(module), name)
    before = dict(vars(real))
    # BUILD with a state of (None, attributes) sets attributes, of whatever is on the stack.
    tampering = pickle.dumps((None, {"__doc__": "mine", "cache": {}}), protocol=0)[:-1]
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{name}\n".encode() + tampering + b"b.")
    with pytest.raises(memascend.CheckpointError, match=r"is damaged|does not describe"):
        DistributedReader(tmp_path)
    assert dict(vars(real)) == before and real.__doc__ != "mine"


def test_flipped_metadata(checkpoint: Path) -> None:
    file = checkpoint / ".metadata"
    original = file.read_bytes()
    chance, refused = random.Random(0), 0
    for _ in range(400):
        changed = bytearray(original)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        try:
            reader = DistributedReader(checkpoint)
        except memascend.CheckpointError:
            refused += 1
        else:
            for key in reader.entries:
                if reader.problem(key) is None:
                    reader.shown(key)
    assert 50 < refused < 400


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    model = small()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("file", "full"):
        with pytest.raises(memascend.CheckpointError, match=f"{tmp_path / name} exists already"):
            memascend.save_distributed(model, None, tmp_path / name)
    for name in ("empty", "new/er"):
        memascend.save_distributed(model, None, tmp_path / name)
        memascend.load_distributed(small(1), None, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full", "new"]


@pytest.mark.root
@pytest.mark.parametrize("leave", [0, 3 * MIB])
def test_full_disk(offloaded: Callable[..., nn.Module], tmp_path: Path, leave: int) -> None:
    model = offloaded(tiny_models.build("llama"))
    optimizer = memascend.AdamW(model.parameters(), lr=LR)
    twin = tiny_models.build("llama")
    reference = memascend.AdamW(twin.parameters(), lr=LR)
    for each in ((model, "llama", optimizer, 0), (twin, "llama", reference, 0)):
        train(*each)
    with faults.mounted("ext4", 4 * faults.LEAST_BYTES["ext4"], tmp_path / "mount") as place:
        ballast = place.fill(leave=leave)
        before = sorted(path.name for path in place.path.iterdir())
        with pytest.raises(OSError, match=str(place.path / "saved")) as caught:
            memascend.save_distributed(model, optimizer, place.path / "saved")
        assert caught.value.errno == errno.ENOSPC
        assert sorted(path.name for path in place.path.iterdir()) == before
        train(model, "llama", optimizer, 2, steps=1)
        ballast.unlink()
        memascend.save_distributed(model, optimizer, place.path / "saved")
        train(twin, "llama", reference, 2, steps=1)
        assert_same_states(states_by_name(model, optimizer), states_by_name(twin, reference))
        other = tiny_models.build("llama", seed=1)
        memascend.load_distributed(other, None, place.path / "saved")
        tiny_models.assert_same_weights(dict(other.named_parameters()), dict(twin.named_parameters()))


@pytest.mark.root
def test_full_drive_of_the_store(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    with (
        faults.mounted("ext4", 2 * faults.LEAST_BYTES["ext4"], tmp_path / "mount") as place,
        contextlib.ExitStack() as after,
    ):
        model = offloaded(tiny_models.build("llama"), store=place.path / "store")
        after.callback(memascend.close, model)
        optimizer = memascend.AdamW(model.parameters(), lr=LR)
        train(model, "llama", optimizer, 0)
        ballast = place.fill()
        # States are shown from there.
        with pytest.raises(OSError, match=str(place.path / "store")) as caught:
            memascend.save_distributed(model, optimizer, tmp_path / "saved")
        assert caught.value.errno == errno.ENOSPC
        assert not (tmp_path / "saved").exists()
        ballast.unlink()
        memascend.save_distributed(model, optimizer, tmp_path / "saved")


# ---- models whose weights are not all on the store, or not all given ----------------------------------------


def test_weights_in_the_models_files_cannot_be_loaded(tmp_path: Path) -> None:
    tiny_models.build("llama", seed=1).save_pretrained(tmp_path / "model")
    memascend.save_distributed(tiny_models.build("llama"), None, tmp_path / "saved")
    for frozen, seed in (("files", 1), ("store", 0)):
        model = memascend.from_pretrained(
            tmp_path / "model", store=tmp_path / frozen, host_memory="64MiB", allocator="pageable", frozen=frozen
        )
        refusal = pytest.raises(memascend.MemascendError, match=r"no checkpoint can be loaded.*use frozen='store'")
        with refusal if frozen == "files" else contextlib.nullcontext():
            memascend.load_distributed(model, None, tmp_path / "saved")
        weights = dict(memascend.parameters_of(model))
        tiny_models.assert_same_weights(weights, dict(tiny_models.build("llama", seed=seed).named_parameters()))
        memascend.close(model)


class Around(nn.Module):
    """A model with another one inside, as PEFT's are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((3,), 2.0))
        self.inner = inner


def test_a_model_around_an_offloaded_one_is_saved_and_loaded(
    offloaded: Callable[..., nn.Module], tmp_path: Path
) -> None:
    model = Around(offloaded(small()))
    with torch.no_grad():
        model.gain.fill_(5)
    memascend.save_distributed(model, None, tmp_path / "saved")
    other = Around(offloaded(small(seed=1), store=tmp_path / "other"))
    memascend.load_distributed(other, None, tmp_path / "saved")
    weights = dict(memascend.parameters_of(other))
    tiny_models.assert_same_weights(weights, dict(memascend.parameters_of(model)))
    tiny_models.assert_same_weights(weights, {"gain": torch.full((3,), 5.0)} | prefixed("inner.", small()))


def prefixed(prefix: str, model: nn.Module) -> dict[str, torch.Tensor]:
    return {prefix + name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_part_is_saved_but_not_loaded(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(small())
    memascend.save_distributed(model.layers, None, tmp_path / "layers")
    other = small(seed=1)
    memascend.load_distributed(other.layers, None, tmp_path / "layers")
    tiny_models.assert_same_weights(prefixed("", other.layers), prefixed("", small().layers))
    with pytest.raises(memascend.MemascendError, match="load into the whole model"):
        memascend.load_distributed(model.layers, None, tmp_path / "layers")
    # A module that was put there after offload is the model's; the one before is not.
    model.head = nn.Linear(64, 2048)
    with torch.no_grad():
        model.head.weight.fill_(1)
    memascend.save_distributed(model, None, tmp_path / "saved")
    memascend.load_distributed(other, None, tmp_path / "saved")
    assert bool(other.head.weight.eq(1).all())
    with pytest.raises(memascend.MemascendError, match=r"head\.weight is on the store, but not in the model"):
        memascend.load_distributed(model, None, tmp_path / "saved")
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), prefixed("", other))
