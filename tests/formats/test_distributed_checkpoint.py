"""Training states moved to other trainers and back: PyTorch Distributed Checkpoints, torch's own optimizers, FSDP."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flushes
import forked
import pytest
import tiny_models
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from training_states import LR, assert_same_states, groups_of, states_by_name, train

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 2**20


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        # PyTorch says so whenever there is no process group.
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def freeze(model: nn.Module) -> nn.Module:
    """Freeze one large parameter and one of a pack."""
    matrix, vector = (
        [p for p in model.parameters() if p.ndim == 2][2],
        next(p for p in model.parameters() if p.ndim == 1),
    )
    matrix.requires_grad_(False)
    vector.requires_grad_(False)
    return model


#: Architecture, dtype, optimizer, and where the states are loaded to besides an offloaded model.
KINDS: dict[str, tuple[str, torch.dtype, Callable[..., Any], str]] = {
    "bf16": ("llama", torch.bfloat16, memascend.AdamW, "in memory"),
    "tied": ("gpt2", torch.bfloat16, partial(memascend.AdamW, amsgrad=True), "states on SSD"),
    "fp32": ("plain", torch.float32, memascend.AdamW, "in memory"),
    "fp16": ("plain", torch.float16, memascend.AdamW, "states on SSD"),
    "8bit": ("plain", torch.bfloat16, partial(memascend.AdamW, states="8bit"), "in memory"),
    "bf16 states": ("plain", torch.bfloat16, partial(memascend.AdamW, states="bfloat16", master=False), "in memory"),
    "lion": ("plain", torch.bfloat16, memascend.Lion, "states on SSD"),
    "sgd": ("plain", torch.float32, partial(memascend.SGD, momentum=0.9), "in memory"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(
    offloaded: Callable[..., nn.Module], tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    architecture, dtype, optimizer_of, elsewhere = KINDS[kind]
    model = offloaded(freeze(tiny_models.build(architecture, dtype)))
    optimizer = optimizer_of(groups_of(model), lr=LR)
    train(model, architecture, optimizer, 0)
    optimizer.param_groups[1]["lr"] = LR / 2
    memascend.save_distributed(model, optimizer, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir() if path.name != "store"] == ["saved"]

    def other(where: str) -> tuple[nn.Module, memascend.AdamW]:
        twin = freeze(tiny_models.build(architecture, dtype, seed=1))
        options: dict[str, Any] = {}
        if where == "offloaded":
            offloaded(twin, store=tmp_path / "other")
        elif where == "states on SSD":
            options = {"store": tmp_path / "states", "allocator": "pageable"}
        twin_optimizer = optimizer_of(groups_of(twin), lr=1.0, **options)
        request.addfinalizer(twin_optimizer.close)
        # It has states of its own, which must go.
        train(twin, architecture, twin_optimizer, 7, steps=1)
        return twin, twin_optimizer

    weights, states = dict(memascend.parameters_of(model)), states_by_name(model, optimizer)
    options = [{**group, "params": []} for group in optimizer.param_groups]
    twins = [other(where) for where in ("offloaded", elsewhere)]
    for twin, twin_optimizer in twins:
        memascend.load_distributed(twin, twin_optimizer, tmp_path / "saved")
        tiny_models.assert_same_weights(dict(memascend.parameters_of(twin)), weights)
        assert_same_states(states_by_name(twin, twin_optimizer), states)
        assert [{**group, "params": []} for group in twin_optimizer.param_groups] == options
    train(model, architecture, optimizer, 2)
    for twin, twin_optimizer in twins:
        train(twin, architecture, twin_optimizer, 2)
        tiny_models.assert_same_weights(dict(memascend.parameters_of(twin)), dict(memascend.parameters_of(model)))
    # And back from there.
    memascend.save_distributed(*twins[1], tmp_path / "again")
    memascend.load_distributed(*twins[0], tmp_path / "again")
    assert_same_states(states_by_name(*twins[0]), states_by_name(model, optimizer))


def load_into_torch(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load as PyTorch's tutorial does."""
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


@pytest.mark.parametrize(("architecture", "dtype"), [("plain", torch.float32), ("gpt2", torch.bfloat16)])
def test_to_torch_and_back(
    offloaded: Callable[..., nn.Module], tmp_path: Path, architecture: str, dtype: torch.dtype
) -> None:
    model = offloaded(freeze(tiny_models.build(architecture, dtype)))
    optimizer = memascend.AdamW(groups_of(model), lr=LR)
    train(model, architecture, optimizer, 0)
    memascend.save_distributed(model, optimizer, tmp_path / "ours")

    theirs = freeze(tiny_models.build(architecture, dtype, seed=1))
    reference = torch.optim.AdamW(groups_of(theirs), lr=1.0, fused=True)
    load_into_torch(theirs, reference, tmp_path / "ours")
    tiny_models.assert_same_weights(dict(theirs.named_parameters()), dict(memascend.parameters_of(model)))
    wanted = {
        name: {kind: value.to(dtype) if value.ndim else value for kind, value in states.items() if kind != "master_low"}
        for name, states in states_by_name(model, optimizer).items()
    }
    assert_same_states(states_by_name(theirs, reference), wanted)
    assert [group["lr"] for group in reference.param_groups] == [LR, LR]
    assert [group["weight_decay"] for group in reference.param_groups] == [0.1, 0.0]

    train(theirs, architecture, reference, 2)
    state = {"model": get_model_state_dict(theirs), "optim": get_optimizer_state_dict(theirs, reference)}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    memascend.load_distributed(model, optimizer, tmp_path / "theirs")
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(theirs.named_parameters()))
    back = states_by_name(model, optimizer)
    for states in back.values():
        # The weight as it came is the master now.
        assert dtype == torch.float32 or not states.pop("master_low").any()
    expected = states_by_name(theirs, reference)
    assert_same_states(back, {n: {k: v.float() for k, v in states.items()} for n, states in expected.items()})
    train(model, architecture, optimizer, 4)


def test_masters_do_not_disturb_torch(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(tiny_models.build("plain"))
    optimizer = memascend.AdamW(model.parameters(), lr=LR)
    train(model, "plain", optimizer, 0)
    memascend.save_distributed(model, optimizer, tmp_path / "saved")
    # This takes everything that is there, wanted or not.
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert any("master_low" in states for states in whole["optim"]["state"].values())
    theirs = tiny_models.build("plain", seed=1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1.0)
    set_model_state_dict(theirs, whole["model"])
    set_optimizer_state_dict(theirs, reference, whole["optim"])
    train(theirs, "plain", reference, 2)


def test_before_the_first_step(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(tiny_models.build("plain", torch.float32))
    optimizer = memascend.AdamW(model.parameters(), lr=LR, fused=True)
    memascend.save_distributed(model, optimizer, tmp_path / "saved")
    theirs = tiny_models.build("plain", torch.float32, seed=1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1.0, fused=True)
    load_into_torch(theirs, reference, tmp_path / "saved")
    fresh = tiny_models.build("plain", torch.float32)
    train(fresh, "plain", torch.optim.AdamW(fresh.parameters(), lr=LR, fused=True), 0)
    train(theirs, "plain", reference, 0)
    tiny_models.assert_same_weights(dict(theirs.named_parameters()), dict(fresh.named_parameters()))
    # Here they are no states at all.
    train(model, "plain", optimizer, 0)
    memascend.load_distributed(model, optimizer, tmp_path / "saved")
    assert optimizer.state_dict()["state"] == {}


def test_weights_alone(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(tiny_models.build("qwen3"))
    memascend.save_distributed(model, None, tmp_path / "saved")
    with torch.no_grad():
        twin = tiny_models.build("qwen3", torch.float32, seed=1)
    memascend.load_distributed(twin, None, tmp_path / "saved")
    weights = dict(memascend.parameters_of(model))
    tiny_models.assert_same_weights(
        dict(memascend.parameters_of(twin)), {n: value.float() for n, value in weights.items()}
    )
    offloaded(twin, store=tmp_path / "other")
    loss = twin(**tiny_models.batch("qwen3", 0)).loss
    memascend.load_distributed(twin, None, tmp_path / "saved")
    with pytest.raises(memascend.MemascendError, match="changed since the forward pass"):
        loss.backward()
    with pytest.raises(memascend.CheckpointError, match=r"optim\.param_groups is missing"):
        memascend.load_distributed(twin, memascend.AdamW(twin.parameters()), tmp_path / "saved")


#: The program of a rank with FSDP: from the checkpoint "ours" to "theirs", on the model and the input that the test has
#: too.
ON_A_RANK = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
)
from torch.distributed.fsdp import fully_shard

rank, room = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{room}/meet", rank=rank, world_size=2)
model = nn.Sequential(nn.Linear(129, 257), nn.Tanh(), nn.Linear(257, 65))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
dcp.load(state, checkpoint_id=f"{room}/ours")
set_model_state_dict(model, state["model"])
set_optimizer_state_dict(model, optimizer, state["optim"])
model(torch.linspace(-1, 1, 2 * 129).view(2, 129)).square().sum().backward()
optimizer.step()
state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
dcp.save(state, checkpoint_id=f"{room}/theirs")
print("saved", flush=True)
# A rank whose peer has gone may abort: both stay until they are killed.
sys.stdin.read()
"""


def test_to_fsdp_and_back(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = offloaded(nn.Sequential(nn.Linear(129, 257), nn.Tanh(), nn.Linear(257, 65)))
    optimizer = memascend.AdamW(model.parameters(), lr=LR)

    def step() -> dict[str, torch.Tensor]:
        model(torch.linspace(-1, 1, 2 * 129).view(2, 129)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return dict(memascend.parameters_of(model))

    before = step()
    memascend.save_distributed(model, optimizer, tmp_path / "ours")
    with contextlib.ExitStack() as after:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        ranks = []
        for rank in range(2):
            ranks.append(after.enter_context(forked.Program(["-c", ON_A_RANK, rank, tmp_path], **pipes)))
            after.callback(ranks[-1].kill)
        assert [rank.stdout.readline() for rank in ranks] == ["saved\n", "saved\n"]
    assert len(list((tmp_path / "theirs").glob("*.distcp"))) == 2
    expected, states = step(), states_by_name(model, optimizer)
    memascend.load_distributed(model, optimizer, tmp_path / "theirs")
    # Every rank has the same gradient here, and their mean is that again, but for rounding.
    for name, value in memascend.parameters_of(model):
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, before[name]), name
    for name, loaded in states_by_name(model, optimizer).items():
        assert loaded["step"] == 2
        torch.testing.assert_close(loaded["exp_avg"], states[name]["exp_avg"], rtol=1e-4, atol=1e-6)


# ---- memory -------------------------------------------------------------------------------------------------


def test_memory_is_bounded(tmp_path: Path) -> None:
    """The kernel allows no more private memory than 30 % of the states', on top of earlier memory."""
    script = f"""
import gc, resource, sys
from pathlib import Path
import torch
from torch import nn
import memascend, memascend.formats.dcp

LAYERS, WIDTH, ROOM = 24, 512, Path({str(tmp_path)!r})
torch.set_num_threads(1)

def opened(name):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()
    memascend.offload(model, store=ROOM / name, host_memory="24MiB", allocator="pageable")
    return model, memascend.AdamW(model.parameters(), lr=0.1)

def limited(call, *arguments):
    gc.collect()
    words = Path("/proc/self/status").read_text().split()
    used = int(words[words.index("VmData:") + 1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + states * 3 // 10, -1))
    try:
        call(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))

states = LAYERS * WIDTH * WIDTH * (4 + 4 + 2)
(model, optimizer), (other, others) = opened("one"), opened("two")
model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
limited(memascend.save_distributed, model, optimizer, ROOM / "saved")
limited(memascend.load_distributed, other, others, ROOM / "saved")
limited(memascend.save_distributed, other, others, ROOM / "again")
written = sum(file.stat().st_size for file in (ROOM / "again").iterdir())
assert written > states, written
try:
    limited(lambda: [state.clone() for state in optimizer.state_dict()["state"].values() for state in state.values()])
except RuntimeError:
    sys.exit(7)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1] / "support"
    )
    assert done.returncode == 7, done.stderr


# ---- a model and an optimizer of plain PyTorch --------------------------------------------------------------

#: Steps from equal weights and states are equal where PyTorch's step is fused and has vector code; a few ulp if not.
BOUND_ULPS = 8


def assert_close_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], steps: int) -> None:
    """Within `BOUND_ULPS` of the larger of the weight and its largest possible change by the steps."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scale = torch.maximum(value.abs(), torch.tensor(steps * LR))
        ulp = torch.nextafter(scale, torch.tensor(torch.inf)) - scale
        assert ((actual[name] - value).abs() <= BOUND_ULPS * ulp).all(), name


def test_from_safetensors_and_a_torch_optimizer_and_back(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    theirs = tiny_models.build("llama", torch.float32)
    reference = torch.optim.AdamW(theirs.parameters(), lr=LR, fused=True)
    train(theirs, "llama", reference, 0, steps=3)
    theirs.save_pretrained(tmp_path / "model")
    torch.save(reference.state_dict(), tmp_path / "optimizer.pt")

    options = {"store": tmp_path / "store", "host_memory": "256MiB", "allocator": "pageable"}
    model = memascend.from_pretrained(tmp_path / "model", dtype="float32", **options)
    request.addfinalizer(partial(memascend.close, model))
    optimizer = memascend.AdamW(model.parameters(), lr=1.0)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", mmap=True, weights_only=True))
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(theirs.named_parameters()))
    assert_same_states(states_by_name(model, optimizer), states_by_name(theirs, reference))
    for trained in ((model, "llama", optimizer, 3, 3), (theirs, "llama", reference, 3, 3)):
        train(*trained)
    weights = {name: value.detach() for name, value in theirs.named_parameters()}
    assert_close_weights(dict(memascend.parameters_of(model)), weights, 3)

    memascend.save_pretrained(model, tmp_path / "out")
    torch.save(optimizer.state_dict(), tmp_path / "out.pt")
    back = type(theirs).from_pretrained(tmp_path / "out", dtype=torch.float32).train()
    again = torch.optim.AdamW(back.parameters(), lr=1.0, fused=True)
    again.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    tiny_models.assert_same_weights(dict(back.named_parameters()), dict(memascend.parameters_of(model)))
    assert_same_states(states_by_name(back, again), states_by_name(model, optimizer))
    for trained in ((back, "llama", again, 6, 3), (theirs, "llama", reference, 6, 3)):
        train(*trained)
    assert_close_weights({name: value.detach() for name, value in back.named_parameters()}, weights, 6)


def test_a_checkpoint_is_on_the_medium_before_it_gets_its_name(
    offloaded: Callable[..., nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offloaded(tiny_models.build("plain"))
    operations = flushes.recorded(monkeypatch)
    memascend.save_distributed(model, None, tmp_path / "saved")
    renamed = max(at for at, (what, _) in enumerate(operations) if what == "rename")
    hidden = Path(operations[renamed][1])
    files = {str(hidden / file.name) for file in (tmp_path / "saved").iterdir()}
    flushed = {path.removesuffix(".tmp") for path in flushes.flushed(operations[:renamed])}
    assert len(files) > 1 and files | {str(hidden)} <= flushed
    assert operations[renamed + 1 :] == [("flush", str(tmp_path))]
