"""Parts that programs write, on tiles: tried on a few tokens, and run whole or refused where they need the sequence."""

from __future__ import annotations

import copy
import re
import threading
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import tiny_models
import torch
from test_slices import Layers
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    from test_slices import Offload


class Part(nn.Module):
    """A wide part, with something between its two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x).relu()))


class Normed(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(256)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Shifting(Part):
    """A causal convolution, of each token and the one before."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Far(Part):
    """Each token sees the one 100 before it."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.pad(x, (0, 0, 100, 0))[:, :-100]


class Centred(Part):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)


class Positioned(Part):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()


class Limited(Part):
    def __init__(self) -> None:
        super().__init__()
        self.expert_capacity = 10_000


class Counting(Part):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach().mean()
        return x


class Writing(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


class Lending(Part):
    """Computes with a weight that is not registered here."""

    lent: list[nn.Parameter]

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.lent[0]


class Summing(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum((0, 1)) + 0 * x


class OverRows(Part):
    """Sequences meet, at each position."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * x.mean(0, keepdim=True)


class Awaking(Shifting):
    """Tokens meet once a weight is no longer zero."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(256))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix * (super().between(x) - x)


class Closed(Shifting):
    """As models begin whose layers are identities at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)


class CentredInTraining(Centred):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return super().between(x) if self.training else x


class CountingInTraining(Counting):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return super().between(x) if self.training else x


class Crowded(Part):
    """Experts take no more than two thirds of the tokens, which is enough for random ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[..., :1] > x[..., 1:2]
        places = [chosen.flatten().cumsum(0).view_as(chosen) for chosen in (first, ~first)]
        return super().forward(x) * (torch.where(first, *places) <= 180)


class DropPath(nn.Module):
    pass


class Stochastic(Part):
    def __init__(self) -> None:
        super().__init__()
        self.drop = DropPath()


class Residual(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.gain, self.part = nn.Parameter(torch.ones(256)), part
        if isinstance(part, Lending):
            part.lent = [self.gain]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(x.clone()) * self.gain[:64]


def gradients_of_whole_sequences(offloaded: Offload, made: Callable[[], nn.Module]) -> nn.Module:
    """Offload a model for tiles, train a batch, compare its gradients with a model's that has none, and return it."""
    x = torch.randn(2, 150, 64, generator=torch.Generator().manual_seed(3))
    whole, model = made(), offloaded(made(), tile_tokens=30)
    for each in (whole, model):
        each(x).backward()
    assert bit_equality.difference(dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(whole))) is None
    return model


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Normed, "BatchNorm1d takes the statistics of all tokens"),
        (Shifting, "depends on other tokens"),
        (Far, "depends on other tokens"),
        (Centred, "depends on other tokens"),
        (Positioned, "depends on other tokens"),
        (Limited, "has a capacity"),
        (Counting, r"keeps something of each call \(last\)"),
        (Writing, "changes an input in place"),
        (Lending, "trained weights that are not its own"),
        (Summing, "depends on other tokens"),
        (OverRows, "depends on other tokens"),
        (Awaking, "the gradients of what it returns for a token depend on other tokens"),
        (Closed, "the gradients of what it returns for a token depend on other tokens"),
        (CentredInTraining, "depends on other tokens"),
        (CountingInTraining, r"keeps something of each call \(last\)"),
        (Crowded, "depends on other tokens"),
        (Stochastic, "its DropPath drops whole sequences"),
    ],
)
def test_parts_that_need_the_whole_sequence_get_it(offloaded: Offload, part: Callable[[], nn.Module], why: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Layers(Residual(part()), Residual(part()))

    model = gradients_of_whole_sequences(offloaded, made)
    (notice,) = [notice for notice in memascend.stats(model)["notices"] if "tile_tokens" in notice]
    assert "Residual runs on whole sequences" in notice
    assert re.search(why, notice)


def test_a_part_that_writes_to_its_input_at_times_is_refused(offloaded: Offload) -> None:
    class Jittered(Part):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(0.5) if x.abs().max() > 50 else x)

    model = offloaded(Layers(Residual(Jittered()), Residual(Jittered())), tile_tokens=30)
    with pytest.raises(memascend.MemascendError, match=r"Jittered changes its inputs in place.*tile_tokens"):
        model(torch.randn(2, 150, 64) * 100)


def test_parts_of_one_class_may_differ(offloaded: Offload) -> None:
    class Perhaps(Shifting):
        def __init__(self, shifts: bool) -> None:
            super().__init__()
            self.shifts = shifts

        def between(self, x: torch.Tensor) -> torch.Tensor:
            return super().between(x) if self.shifts else x

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Layers(Residual(Perhaps(False)), Residual(Perhaps(True)))

    x = torch.randn(2, 150, 64, generator=torch.Generator().manual_seed(3))
    whole, in_memory, model = made(), memascend.run_in_tiles(made(), 30), offloaded(made(), tile_tokens=30)
    for each in (whole, in_memory, model):
        each(x).backward()
    gradients = [dict(tiny_models.gradients_of(each)) for each in (whole, in_memory, model)]
    assert bit_equality.difference(gradients[2], gradients[1]) is None
    torch.testing.assert_close(gradients[1], gradients[0])


class Conditioned(Part):
    """Computes with a result of its layer."""

    scale: torch.Tensor

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Conditioning(nn.Module):
    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.gain, self.part = nn.Parameter(torch.ones(256), requires_grad=trained), Conditioned()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.scale = self.gain * 2
        return x + self.part(x)


@pytest.mark.parametrize("where", ["in memory", "on SSD"])
@pytest.mark.parametrize("frozen", ["nothing", "the part", "the gain at first"])
def test_what_gets_a_gradient_later_is_not_left_out(offloaded: Offload, where: str, frozen: str) -> None:
    """A part is tried where nothing wants gradients: in evaluation, or before a weight is trained."""
    model = Layers(Conditioning(frozen != "the gain at first"), Conditioning(frozen != "the gain at first"))
    if frozen == "the part":
        for layer in model.layers:
            layer.part.requires_grad_(False)
    model = memascend.run_in_tiles(model, 30) if where == "in memory" else offloaded(model, tile_tokens=30)
    x = torch.randn(2, 150, 64)
    with torch.no_grad():
        model(x)
    model.get_parameter("layers.0.gain").requires_grad_(True)
    with pytest.raises(memascend.MemascendError, match=r"Conditioned computes with trained weights .*tile_tokens"):
        model(x).backward()


def test_numbers_and_complex_outputs_that_no_tile_gives(offloaded: Offload) -> None:
    class Numbering(Part):
        """Counts the tokens before each."""

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = super().forward(x)
            return wide, (wide[..., :1] > 0).flatten().cumsum(0).view(*wide.shape[:2], 1)

    class Turning(Part):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = super().forward(x)
            return wide, torch.complex(wide[..., :1], wide[..., 1:2])

    class Layer(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide, others = self.part(x)
            return x + wide * (others.abs() if others.is_complex() else others / 100)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Layers(Layer(Numbering()), Layer(Turning()))

    gradients_of_whole_sequences(offloaded, made)


def test_a_thread_inside_a_part_leaves_others_their_tiles() -> None:
    """Threads may share a model in memory."""
    model = memascend.run_in_tiles(Layers(Residual(Part()), Residual(Part())), 30)
    x = torch.randn(1, 90, 64)
    model(x)
    rows: list[int] = []

    def other(*_: Any) -> None:
        handle.remove()
        model.layers[1].part.up.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[1]))
        thread = threading.Thread(target=model.layers[1], args=(x,))
        thread.start()
        thread.join()

    handle = model.layers[0].part.up.register_forward_hook(other)
    model.layers[0](x)
    assert rows == [30, 30, 30]


def test_a_trial_leaves_nothing_behind(offloaded: Offload) -> None:
    """Neither random numbers that are drawn nor modes."""

    class Dropping(Part):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, 0.5, self.training)

    model = offloaded(Layers(Residual(Dropping()), Residual(Dropping())), tile_tokens=30)
    losses = []
    for _ in range(2):  # the first call has the trial
        torch.manual_seed(0)
        losses.append(model(torch.ones(2, 40, 64)))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert all(module.training for module in model.modules())


def test_the_backward_pass_drops_what_the_forward_pass_has_dropped() -> None:
    """Also where the program has switched to evaluation, and has drawn numbers, before the backward pass."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x.exp() * self.scale, 0.5, self.training)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Dropping()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    model = memascend.run_in_tiles(Model(), 8)
    x = torch.randn(1, 30, 64).requires_grad_()
    outputs = model(x)
    assert 0.3 < (outputs == 0).float().mean() < 0.7
    model.eval()
    drawn = torch.rand(3), torch.get_rng_state()
    outputs.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, outputs.detach())  # the derivative of exp
    assert torch.equal(torch.get_rng_state(), drawn[1])


def test_two_dimensions_and_outputs_that_are_several(offloaded: Offload) -> None:
    """Tokens may come in one dimension; an output that is not used has no gradient."""

    class Pair(Part):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
            wide = super().forward(x) * scale
            return {"used": wide, "scores": wide.argmax(-1, keepdim=True), "unused": wide[..., :3].exp()}

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs = self.part(x.flatten(0, 1), scale=2.0)
            assert outputs["scores"].shape == (x.shape[:2].numel(), 1)
            return x + outputs["used"].view(x.shape)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Layers(Layer(), Layer())

    x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(3))
    whole, in_memory, model = made(), memascend.run_in_tiles(made(), 30), offloaded(made(), tile_tokens=30)
    for each in (whole, in_memory, model):
        each(x).backward()
    gradients = [dict(tiny_models.gradients_of(each)) for each in (whole, in_memory, model)]
    assert bit_equality.difference(gradients[2], gradients[1]) is None
    torch.testing.assert_close(gradients[1], gradients[0])
    assert not memascend.stats(model)["notices"]


def test_a_copy_of_a_model_in_memory_computes_with_its_own_weights() -> None:
    torch.manual_seed(0)
    model = memascend.run_in_tiles(Layers(Residual(Part()), Residual(Part())), 8)
    copied, x = copy.deepcopy(model), torch.randn(3, 4, 64)
    assert torch.equal(model(x), copied(x))
    with torch.no_grad():
        model.layers[0].part.down.weight.zero_()
    assert not torch.equal(model(x), copied(x))
    with pytest.raises(memascend.MemascendError, match="already"):
        memascend.run_in_tiles(copied, 1)
