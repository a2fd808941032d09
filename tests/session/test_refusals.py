"""Refusals of an offloaded model: the error has a remedy, and nothing has changed."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_net import TOKENS, WIDTH, Net, assert_same, loss_of, step
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _use_the_optimizer(kind: type, **options: Any) -> Callable[[Net], None]:
    def use(model: Net) -> None:
        loss_of(model).backward()
        kind(model.parameters(), lr=0.1, **options).step()

    return use


def _after_the_step(model: Net, act: Callable[[Net, Any], None]) -> None:
    optimizer = memascend.AdamW(model.parameters())
    loss_of(model).backward()
    kept = model.head.weight.grad
    optimizer.step()
    act(model, kept)


def _change_between(model: Net, weight: torch.Tensor) -> None:
    loss = loss_of(model)
    with torch.no_grad():
        weight.mul_(2)
    loss.backward()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half": (lambda model: model.half(), "cannot become torch.float16.*before memascend.offload"),
    "shared memory": (lambda model: model.share_memory(), "share_memory_ asks for its address"),
    "shared data": (
        lambda model: setattr(model.layers[0][0].weight, "data", model.layers[1][0].weight.data),
        r"layers\.0\.0\.weight and layers\.1\.0\.weight cannot share",
    ),
    "vmap": (lambda model: torch.func.vmap(lambda x: x @ model.head.weight)(torch.ones(2, 3, TOKENS)), r"torch\.func"),
    "grad": (lambda model: torch.func.grad(lambda x: (x @ model.head.weight).sum())(torch.ones(3, TOKENS)), "copies"),
    "pickle": (lambda model: torch.save(model, io.BytesIO()), "save_pretrained"),
    "copy": (copy.deepcopy, "cannot be copied"),
    "double": (lambda model: model.layers.to(torch.float64), "cannot become torch.float64"),
    "data of another dtype": (lambda model: setattr(model.scale, "data", torch.zeros((), dtype=torch.half)), "float16"),
    "data of another shape": (lambda model: setattr(model.head.bias, "data", torch.zeros(3)), "shape"),
    "AdamW": (_use_the_optimizer(torch.optim.AdamW), r"memascend\.AdamW\(model\.parameters\(\)"),
    "fused AdamW": (_use_the_optimizer(torch.optim.AdamW, fused=True), r"memascend\.AdamW"),
    "foreach SGD": (_use_the_optimizer(torch.optim.SGD, foreach=True), r"memascend\.SGD"),
    "Adagrad": (_use_the_optimizer(torch.optim.Adagrad), r"memascend\.AdamW"),
    "create_graph": (lambda model: loss_of(model).backward(create_graph=True), r"torch\.autograd\.grad"),
    "assign": (lambda model: model.load_state_dict(model.state_dict(), assign=True), "assign=False"),
    "address": (lambda model: model.head.weight.data_ptr(), "clone"),
    "resized storage": (lambda model: model.head.weight.untyped_storage().resize_(0), "storage's resize_ asks.*clone"),
    "copied storage": (lambda model: copy.deepcopy(model.head.weight.untyped_storage()), "clone"),
    "a view trained": (lambda model: memascend.AdamW([nn.Parameter(model.head.weight.data)]), "model.parameters"),
    "a gradient after its step": (lambda model: _after_the_step(model, lambda _, kept: kept.norm()), "consumed"),
    "adding after the step": (lambda model: _after_the_step(model, lambda m, _: loss_of(m, 1).backward()), "zero_grad"),
    "stepping twice": (
        lambda model: _after_the_step(model, lambda m, kept: memascend.AdamW(m.parameters()).step()),
        "zero_grad",
    ),
    "head.weight changed": (lambda model: _change_between(model, model.head.weight), r"head\.weight changed"),
    "layers.0.0.weight changed": (
        lambda model: _change_between(model, model.layers[0][0].weight),
        r"layers\.0\.0\.weight changed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_changes_nothing(pair: Callable[..., tuple[nn.Module, nn.Module]], name: str) -> None:
    expected, model = pair()
    act, reason = REFUSED[name]
    with pytest.raises(memascend.MemascendError, match=reason):
        act(model)
    if name.endswith(" changed"):
        with torch.no_grad():
            expected.get_parameter(name.removesuffix(" changed")).mul_(2)
    model.zero_grad()
    if "step" in name:
        optimizer = memascend.AdamW(expected.parameters())
        loss_of(expected).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(expected, model)
    for run in (expected, model):
        step(run, memascend.SGD(run.parameters(), lr=0.1), 3)
    assert_same(expected, model)


def test_an_inplace_error_is_refused_as_in_memory(pair: Callable[..., tuple[nn.Module, nn.Module]]) -> None:
    for model in pair():
        output = torch.sigmoid(model(torch.zeros(1, 3, dtype=torch.long)))
        output.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_arrays_of_weights_are_read_only(pair: Callable[..., tuple[nn.Module, nn.Module]]) -> None:
    _, model = pair()
    with pytest.raises(ValueError, match="read-only"):
        model.head.weight.detach().numpy()[0] = 1


def test_a_gradient_is_not_shown_by_what_stood_for_an_earlier_one(pair: Callable[..., Any]) -> None:
    _, model = pair()
    loss_of(model).backward()
    earlier = model.head.weight.grad
    part = earlier[0]
    model.zero_grad()
    loss_of(model, 1).backward()
    for stale in (earlier, part):
        with pytest.raises(memascend.MemascendError, match="later backward pass has replaced it"):
            stale.sum()


def test_a_closed_model_is_not_read(pair: Callable[..., tuple[nn.Module, nn.Module]]) -> None:
    _, model = pair()
    memascend.close(model)
    for use in (lambda: model.head.weight.norm(), lambda: model.scale.data.zero_(), lambda: model.embed(torch.ones(1))):
        with pytest.raises(memascend.MemascendError, match="closed"):
            use()
    assert model.head.weight.shape == (TOKENS, WIDTH)


def test_a_parameter_that_is_not_contiguous_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"0\.weight has strides .*contiguous_format"):
        memascend.offload(model, store=tmp_path, host_memory="1GiB")


def test_a_lazy_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weight has no shape yet: run one forward pass"):
        memascend.offload(nn.LazyLinear(3), store=tmp_path, host_memory="1GiB")


def _shared_data(model: Net) -> None:
    model.layers[0][0].weight.data = model.layers[1][0].weight.data


def _views_of_one_buffer(model: Net) -> None:
    flat = torch.randn(2 * model.head.bias.numel())
    model.flat = nn.Parameter(flat)
    model.head.bias.data = flat[3 : 3 + model.head.bias.numel()]


def _a_buffer(model: Net) -> None:
    model.register_buffer("copied", model.head.bias.detach().view(1, -1))


@pytest.mark.parametrize("share", [_shared_data, _views_of_one_buffer, _a_buffer])
def test_memory_that_parameters_share_is_refused(tmp_path: Path, share: Callable[[Net], None]) -> None:
    """A step of one changes the other in memory; on the store each would have bytes of its own."""
    model = Net()
    share(model)
    with pytest.raises(ValueError, match=r"share memory without being one parameter.*module\.weight = other\.weight"):
        memascend.offload(model, store=tmp_path / "store", host_memory="64MiB")
    assert not (tmp_path / "store").exists()


def test_memory_that_is_not_shared_is_taken(
    offloaded: Callable[..., nn.Module],
) -> None:
    """Parts of one buffer that do not overlap, and frozen weights, whose values do not change."""
    model, twin = Net(), Net()
    for one in (model, twin):
        torch.manual_seed(0)
        count = one.head.bias.numel()
        flat = torch.randn(2 * count)
        one.head.bias.data = flat[:count]
        one.rest = nn.Parameter(flat[count:])
        one.layers[0][0].weight.requires_grad_(False)
        one.layers[1][0].weight.requires_grad_(False)
        one.layers[0][0].weight.data = one.layers[1][0].weight.data
    twin.load_state_dict(model.state_dict())
    offloaded(model)
    for one in (model, twin):
        step(one, memascend.AdamW([p for p in one.parameters() if p.requires_grad]))
    assert_same(model, twin)
