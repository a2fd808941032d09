"""Activations that a budget has room for are not computed again: the same bits with any room, within the room."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import bit_equality
import forked
import pytest
import tiny_models
import torch
from torch import nn

import memascend
from memascend.autograd.kept import OBJECT_BYTES
from memascend.layout.units import partition
from memascend.memory_plan import host
from memascend.memory_plan.lines import ACTIVATIONS_BYTES_MIN, HOLES_SHARE, Plan
from memascend.session.host_budget import HostBudget

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Offload = Callable[..., nn.Module]

ROWS, STEPS = 5, 3
WIDTH = 32


def trained(
    model: nn.Module, architecture: str = "llama", steps: int = STEPS, columns: Callable[[int], int] = lambda step: 16
) -> tuple[list[torch.Tensor], list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return losses, gradients of each step and weights of a few steps."""
    optimizer = memascend.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    torch.manual_seed(7)
    losses, gradients = [], []
    for step in range(steps):
        loss = model(**tiny_models.batch(architecture, step, ROWS, columns(step))).loss
        loss.backward()
        losses.append(loss.detach().clone())
        gradients.append(dict(tiny_models.gradients_of(model)))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return losses, gradients, dict(memascend.parameters_of(model))


def layers_of(model: nn.Module) -> int:
    return sum(unit.repeated for unit in memascend.offload_of(model).units)


def counts(model: nn.Module) -> tuple[int, int]:
    stats = memascend.stats(model)
    return stats["layers_kept"], stats["layers_recomputed"]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have every plan leave some bytes to activations."""

    def leave(nbytes: int) -> None:
        monkeypatch.setattr(Plan, "activations_bytes", nbytes)

    return leave


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the rooms of passes, and check at each saved tensor that no more is kept."""
    from memascend.autograd import kept

    rooms, before = [], kept.KeptActivations.take

    def take(self: Any, *of: Any) -> None:
        before(self, *of)
        rooms.append(self._room)
        assert 0 <= self.held_bytes <= self._room

    monkeypatch.setattr(kept.KeptActivations, "take", take)
    return rooms


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"micro_batch_size": 2, "tile_tokens": 8}),
        ("gpt2", {}),
        ("t5_dropout", {"micro_batch_size": 2}),
        ("t5_dropout", {}),
        ("qwen3_moe", {"micro_batch_size": 2}),
        ("plain", {"micro_batch_size": 2}),
    ],
    ids=str,
)
def test_all_but_the_first_pass_is_kept_where_there_is_room(
    offloaded: Offload, architecture: str, options: dict[str, Any]
) -> None:
    model = offloaded(tiny_models.build(architecture, torch.float32), **options)
    slices = 3 if "micro_batch_size" in options else 1
    calls = layers_of(model) * slices
    actual = trained(model, architecture)
    assert counts(model) == (calls * (STEPS - 1), calls)
    memascend.close(model)
    recomputed = offloaded(tiny_models.build(architecture, torch.float32), host_memory=None, **options)
    assert bit_equality.difference(actual, trained(recomputed, architecture)) is None
    assert counts(recomputed) == (0, calls * STEPS)


@pytest.mark.parametrize(
    ("architecture", "update", "share"),
    [
        ("llama", "backward", 0.3),
        ("t5_dropout", "forward", 0.25),
        ("t5_dropout", "backward", 0.6),
        ("mixtral", "forward", 0.6),
    ],
)
def test_the_last_calls_are_kept_as_far_as_there_is_room(
    offloaded: Offload,
    room: Callable[[int], None],
    checked: list[int],
    architecture: str,
    update: str,
    share: float,
) -> None:
    options = {"micro_batch_size": 2, "update": update}
    model = offloaded(tiny_models.build(architecture, torch.float32), **options)
    calls = layers_of(model) * 3
    expected = _passes(model, architecture)
    most = memascend.stats(model)["activation_bytes_kept_peak"]
    assert most and memascend.stats(model)["activation_bytes_kept"] == 0
    memascend.close(model)

    room(int(most * share))
    checked.clear()
    model = offloaded(tiny_models.build(architecture, torch.float32), **options)
    assert bit_equality.difference(_passes(model, architecture), expected) is None
    kept, recomputed = counts(model)
    assert kept + recomputed == calls * STEPS
    assert 0 < kept <= calls * (STEPS - 1) * share + calls / 2
    assert 0 < memascend.stats(model)["activation_bytes_kept_peak"] <= most * share
    assert set(checked) == {int(most * share)}
    gc.collect()
    assert memascend.stats(model)["activation_bytes_kept"] == 0


def _passes(model: nn.Module, architecture: str) -> Any:
    """Return losses and weights of steps without another use of gradients, for updates of the backward pass."""
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(7)
    losses = []
    for step in range(STEPS):
        loss = model(**tiny_models.batch(architecture, step, ROWS)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        del loss
    return losses, dict(memascend.parameters_of(model))


def test_which_calls_are_kept(offloaded: Offload, room: Callable[[int], None]) -> None:
    """The last layers keep theirs: the backward pass begins with them."""
    model = offloaded(tiny_models.build("llama", torch.float32))
    computed: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: computed.append(number))
    for number in range(2):
        model(**tiny_models.batch("llama", number)).loss.backward()
    each = memascend.stats(model)["activation_bytes_kept_peak"] // 3
    assert computed == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    room(each + each // 2)
    computed.clear()
    model(**tiny_models.batch("llama", 2)).loss.backward()
    assert computed == [0, 1, 2, 1, 0]


def test_longer_batches_than_the_pass_before(
    offloaded: Offload, room: Callable[[int], None], checked: list[int]
) -> None:
    """A call for which there turns out to be no room is computed again."""
    lengths = [8, 48, 16, 64, 8, 64].__getitem__
    model = offloaded(tiny_models.build("gpt2", torch.float32), host_memory=None)
    expected = trained(model, "gpt2", 6, lengths)
    memascend.close(model)
    model = offloaded(tiny_models.build("gpt2", torch.float32))
    room(4_000_000)
    actual = trained(model, "gpt2", 6, lengths)
    assert bit_equality.difference(actual, expected) is None
    kept, recomputed = counts(model)
    assert kept and recomputed > 3
    assert checked


def test_a_call_that_takes_more_than_was_measured(
    offloaded: Offload, room: Callable[[int], None], checked: list[int]
) -> None:
    class Growing(nn.Module):
        """Saves more tensors from one pass to the next."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.times = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = x + self.linear(x).sin()
            return x

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Growing() for _ in range(3)))

    def run(model: nn.Module) -> list[Any]:
        found = []
        for times in (1, 2, 8, 1, 1):
            for layer in model:
                layer.times = times
            model(torch.ones(64, WIDTH)).square().sum().backward()
            found.append([value for _, value in tiny_models.gradients_of(model)])
        return found

    expected = run(made())
    room(150_000)
    model = offloaded(made())
    assert bit_equality.difference(run(model), expected) is None
    kept, recomputed = counts(model)
    assert kept and recomputed > 3 and kept + recomputed == 15
    assert checked


# ---- other uses of a graph ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(x).tanh())


def layers(layer: Callable[[], nn.Module] = Layer) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(3)))


def inputs(number: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def twice_each(model: nn.Module) -> None:
    for number in range(3):
        loss = model(inputs(number)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()


def out_of_order(model: nn.Module) -> None:
    for _ in range(2):
        losses = [model(inputs(number)).square().sum() for number in range(4)]
        model.eval()
        with torch.no_grad():
            model(inputs(8))
        model.train()
        for number in (2, 0, 3):
            losses[number].backward()


def second_derivatives(model: nn.Module) -> None:
    for number in range(3):
        x = inputs(number).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()


def part_of_a_graph(model: nn.Module) -> None:
    for number in range(3):
        x = inputs(number).requires_grad_()
        loss = model(x).square().sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        torch.autograd.grad(loss, x, retain_graph=number > 0)
        if number:
            loss.backward()


def failing(model: nn.Module) -> None:
    for number in range(4):
        handle = model[2].register_forward_pre_hook(_fail) if number in (1, 2) else None
        try:
            model(inputs(number)).square().sum().backward()
        except KeyboardInterrupt:
            pass
        if handle is not None:
            handle.remove()


def _fail(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("nbytes", [0, 9_000, 16_000, 1 << 30])
@pytest.mark.parametrize(
    "use", [twice_each, out_of_order, second_derivatives, part_of_a_graph, failing], ids=lambda use: use.__name__
)
def test_uses_of_a_graph(
    offloaded: Offload, room: Callable[[int], None], checked: list[int], use: Callable[[nn.Module], None], nbytes: int
) -> None:
    expected, model = layers(), layers()
    torch.manual_seed(3)
    use(expected)
    drawn = torch.rand(())
    room(nbytes)
    model = offloaded(model)
    torch.manual_seed(3)
    use(model)
    assert torch.equal(torch.rand(()), drawn)
    found, wanted = dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(expected))
    assert bit_equality.difference(found, wanted) is None
    assert bool(counts(model)[0]) == (nbytes > 0)
    gc.collect()
    assert memascend.stats(model)["activation_bytes_kept"] == 0


@pytest.mark.parametrize("nbytes", [0, 1 << 30])
def test_a_result_that_is_changed_in_place(offloaded: Offload, room: Callable[[int], None], nbytes: int) -> None:
    """A saved tensor that was written to is computed again, as it is where nothing is kept."""

    class Exp(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).exp()  # saves its result

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(Exp)

        def forward(self, x: torch.Tensor, in_place: bool) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                x = x.mul_(0.1) if in_place else x * 0.1
            return x

    room(nbytes)
    expected, model = Changing(), offloaded(Changing())
    for number in range(3):
        expected(inputs(number), False).sum().backward()
        model(inputs(number), True).sum().backward()
    found, wanted = dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(expected))
    assert bit_equality.difference(found, wanted) is None


def test_losses_that_are_not_let_go_share_the_room(
    offloaded: Offload, room: Callable[[int], None], checked: list[int]
) -> None:
    model = offloaded(layers())
    for number in range(2):
        model(inputs(number)).sum().backward()
    each = memascend.stats(model)["activation_bytes_kept_peak"]
    room(2 * each + each // 2)
    losses = [model(inputs(number)).sum() for number in range(4)]
    assert 2 * each <= memascend.stats(model)["activation_bytes_kept"] <= 2 * each + each // 2
    for loss in losses:
        loss.backward()
    losses.clear()
    del loss
    gc.collect()
    assert memascend.stats(model)["activation_bytes_kept"] == 0


def test_a_budget_that_becomes_less_before_the_backward_pass(offloaded: Offload) -> None:
    model = offloaded(layers(), host_memory="64MiB", host_memory_max="64MiB")
    expected = layers()
    for each in (model, expected):
        torch.manual_seed(3)
        for number in range(2):
            each(inputs(number)).sum().backward()
        loss = each(inputs(2)).sum()
        if each is model:
            assert memascend.stats(model)["activation_bytes_kept"]
            memascend.set_host_memory(model, memascend.offload_of(model).plan.smallest_bytes)
            assert memascend.stats(model)["activation_bytes_kept"] == 0
        loss.backward()
    found, wanted = dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(expected))
    assert bit_equality.difference(found, wanted) is None
    assert counts(model) == (6, 6)


def test_checkpointed_layers_are_computed_twice_as_in_memory(offloaded: Offload) -> None:
    """PyTorch's checkpointing writes the statistics of batch norm twice, and draws Python's random numbers twice."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Normed(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.gradient_checkpointing = True
            self._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(self.linear(x))

    expected, model = layers(Normed), offloaded(layers(Normed))
    for each in (expected, model):
        for layer in each:
            layer._gradient_checkpointing_func = lambda *of: torch.utils.checkpoint.checkpoint(*of, use_reentrant=False)
        for number in range(3):
            each(inputs(number).requires_grad_()).square().sum().backward()
    assert bit_equality.difference(dict(model.named_buffers()), dict(expected.named_buffers())) is None
    assert counts(model) == (0, 9)


def test_layers_without_recomputation_are_not_counted(offloaded: Offload) -> None:
    model = offloaded(layers(), recompute=False)
    for number in range(3):
        model(inputs(number)).sum().backward()
    assert counts(model) == (0, 0)


# ---- the room ----------------------------------------------------------------------------------------------------


def test_what_a_plan_leaves() -> None:
    units = partition(tiny_models.build("llama", torch.float32))
    least = host.smallest_plan(units)
    assert least.activations_bytes == 0
    whole = host.make_plan(units, 1 << 62).total
    roomy = host.make_plan(units, whole + (300 << 20))
    left = roomy.budget - roomy.total - roomy.freed_blocks_bytes
    assert left >= 44 << 20 and roomy.activations_bytes == int(left / (1 + HOLES_SHARE))
    assert host.make_plan(units, whole + (300 << 20), on_device=True).activations_bytes == 0
    for budget in range(least.total, roomy.budget, roomy.budget // 50):
        plan = host.make_plan(units, budget)
        assert plan.total + plan.freed_blocks_bytes + plan.activations_bytes <= budget
        assert plan.activations_bytes == 0 or plan.activations_bytes >= ACTIVATIONS_BYTES_MIN


def test_a_machine_with_less_than_the_budget_keeps_half_of_what_it_leaves(
    offloaded: Offload, monkeypatch: pytest.MonkeyPatch, checked: list[int]
) -> None:
    from memascend.hardware import memory_limits

    left = 20_000

    def bounds() -> list[memory_limits.Bound]:
        return [memory_limits.Bound(1 << 40, 0, "much"), memory_limits.Bound(left + 5, 5, "a limit")]

    monkeypatch.setattr(memory_limits, "memory_bounds", bounds)
    model = offloaded(layers())
    for number in range(3):
        model(inputs(number)).sum().backward()
    assert set(checked) == {10_000}
    assert 0 < memascend.stats(model)["activation_bytes_kept_peak"] <= 10_000
    kept, recomputed = counts(model)
    assert kept and recomputed > 3


def test_ranks_keep_nothing(offloaded: Offload) -> None:
    """Each would gather units in an order of its own."""
    budget: HostBudget = memascend.offload_of(offloaded(layers())).host_budget
    assert budget._room_for_activations(0)

    class Divides:
        divides = True

    budget._membership = Divides()
    assert budget._room_for_activations(0) == 0


def test_the_bytes_are_those_of_what_is_saved(offloaded: Offload) -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2.0
            return (y.sin() + y.cos()) * self.gain  # saves y twice, and the sum

    model = offloaded(layers(Square))
    for _ in range(2):
        model(torch.ones(256, WIDTH)).sum().backward()
    each = 256 * WIDTH * 4
    # The first layer's input needs no gradient, so that its y is not saved.
    objects = memascend.stats(model)["activation_bytes_kept_peak"] - (2 + 2 + 1) * each
    assert 7 * OBJECT_BYTES <= objects <= 12 * OBJECT_BYTES


@pytest.mark.parametrize("kept", [0, 1, 4, 7, 12])
def test_a_storage_of_all_slices_counts_once(offloaded: Offload, room: Callable[[int], None], kept: int) -> None:
    """A layer saves its slice of the input, and each slice keeps the whole batch's memory alive."""

    class Sine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * self.gain  # saves its input and the sine

    rows, part = 64, 16 * WIDTH * 4
    model = offloaded(layers(Sine), micro_batch_size=16)
    room(3 * 4 * 2 * part + 64 * OBJECT_BYTES if kept == 12 else (kept + 4) * 2 * part)
    for _ in range(3):
        model(torch.ones(rows, WIDTH)).sum().backward()
        found = memascend.stats(model)
        assert found["activation_bytes_kept"] == 0
    calls = found["layers_kept"] // 2
    assert calls + (found["layers_recomputed"] - 12) // 2 == 12 and (kept == 0 or calls > 0)
    whole = -(-calls // 4) * 4 * part  # of the inputs of layers; the first one's are leaves, which wait anyway
    objects = 64 * OBJECT_BYTES
    assert found["activation_bytes_kept_peak"] <= whole + calls * part + objects


PROGRAM = """
import json, sys, torch, memascend
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from memascend.memory_plan.lines import Plan

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

torch.set_num_threads(1)
Plan.activations_bytes = int(sys.argv[2])
sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 256}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
memascend.offload(model, store=sys.argv[1], host_memory="512MiB", micro_batch_size=1, allocator="pageable")
optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(0, 256, (4, 256))
before, losses = status("VmRSS"), []
for step in range(3):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    del loss
stats = memascend.stats(model)
names = ("layers_kept", "layers_recomputed", "activation_bytes_kept_peak")
print(json.dumps({"grown": status("VmHWM") - before, "losses": losses} | {name: stats[name] for name in names}))
memascend.close(model)
"""


def test_the_peak_grows_by_what_is_kept(tmp_path: Path) -> None:
    found = []
    for nbytes in (0, 64 << 20, 1 << 30):
        done = forked.run(["-c", PROGRAM, tmp_path / f"store {nbytes}", str(nbytes)])
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    none, some, every = found
    assert none["losses"] == some["losses"] == every["losses"]
    assert (none["layers_kept"], none["layers_recomputed"]) == (0, 48)
    assert (every["layers_kept"], every["layers_recomputed"]) == (32, 16)
    assert 0 < some["layers_kept"] < 32 and some["activation_bytes_kept_peak"] <= 64 << 20
    for run in (some, every):
        more = run["grown"] - none["grown"]
        # Within the bytes that are counted, and 16 MiB for malloc's holes; blocks that it keeps are there in all runs.
        assert more <= run["activation_bytes_kept_peak"] + (16 << 20), found
    assert every["grown"] - none["grown"] > every["activation_bytes_kept_peak"] / 2, found
