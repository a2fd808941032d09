"""Addresses of tensors on SSD: stable, unique, and never readable."""

from __future__ import annotations

import ctypes
import itertools
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_net import Net, loss_of, step
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def comparing(function: str, name: str = "safetensors.torch") -> Callable[[torch.Tensor], int]:
    """Return a function called `function` that asks for an address as one of the module `name`."""
    scope: dict[str, Any] = {"__name__": name}
    exec(f"def {function}(tensor):\n    return tensor.data_ptr()\n", scope)
    return scope[function]


address_of = comparing("_is_complete")


def storages(model: nn.Module) -> dict[str, tuple[int, int]]:
    found = {}
    for name, parameter in model.named_parameters():
        storage = parameter.untyped_storage()
        found[name] = (storage.data_ptr(), storage.nbytes())
    return found


def test_storages_are_apart_and_stay(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(Net())
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    before = storages(model)
    assert all(nbytes == p.nbytes for (_, nbytes), p in zip(before.values(), model.parameters(), strict=True))
    ranges = sorted(before.values())
    assert all(begin + nbytes < after for (begin, nbytes), (after, _) in itertools.pairwise(ranges))
    kept = [parameter.untyped_storage() for parameter in model.parameters()]
    step(model, optimizer)
    assert storages(model) == before
    assert all(p.untyped_storage() is storage for p, storage in zip(model.parameters(), kept, strict=True))
    # No virtual memory of a processor is there, and 64 bits with a sign hold it.
    assert all(1 << 57 < begin < begin + nbytes < 1 << 63 for begin, nbytes in ranges)
    loss_of(model).backward()
    gradients = [parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len({*gradients, *(begin for begin, _ in ranges)}) == 2 * len(ranges)
    other = offloaded(Net(), store=tmp_path / "other")
    assert not {begin for begin, _ in storages(other).values()} & {*gradients, *(begin for begin, _ in ranges)}


def test_views_lie_in_the_storage_of_what_they_show(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(Net())
    weight = model.head.weight
    begin = weight.untyped_storage().data_ptr()
    for view, offset in ((weight.detach(), 0), (weight.data, 0), (weight.detach()[3, 1:], 3 * 160 + 1)):
        assert view.untyped_storage() is weight.untyped_storage()
        assert address_of(view) == begin + 4 * offset
    assert weight.storage().data_ptr() == begin and weight.storage().size() == weight.numel()
    assert weight.storage() == weight.detach().storage() != model.head.bias.storage()
    assert weight.is_set_to(weight.data) and not weight.is_set_to(weight.detach()[1:])
    assert not weight.is_set_to(torch.zeros_like(weight)) and not torch.zeros(64, 160).is_set_to(weight)
    assert weight.untyped_storage().size() == len(weight.untyped_storage()) == weight.nbytes
    assert model.state_dict()["head.weight"].untyped_storage() is weight.untyped_storage()


def test_a_gradient_that_is_gone_has_no_address(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(Net())
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    gradient = model.head.weight.grad
    address = gradient.untyped_storage().data_ptr()
    assert gradient.detach()[2:].untyped_storage().data_ptr() == address
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model).backward()
    with pytest.raises(memascend.MemascendError, match="gone"):
        gradient.untyped_storage()
    assert model.head.weight.grad.untyped_storage().data_ptr() != address


def test_only_who_compares_an_address_gets_it(offloaded: Callable[..., nn.Module]) -> None:
    weight = offloaded(Net()).head.weight
    assert address_of(weight) == comparing("_find_disjoint", "transformers.modeling_utils")(weight)
    for reads in (comparing("_to_ndarray"), comparing("launch", "triton.runtime"), torch.Tensor.data_ptr):
        with pytest.raises(memascend.MemascendError, match=r"data_ptr asks for its address.*clone"):
            reads(weight)
    with pytest.raises(memascend.MemascendError, match="clone"):
        ctypes.cast(weight.data_ptr(), ctypes.c_void_p)
    with pytest.raises(TypeError):
        torch.empty(0).set_(weight.untyped_storage())
    assert not hasattr(weight.untyped_storage(), "_weak_ref")


def test_the_modules_that_compare_are_there() -> None:
    """A release that moves code that compares addresses is noticed."""
    import importlib
    import inspect

    from memascend.autograd import addresses

    for name in sorted(addresses._COMPARING):
        module: types.ModuleType = sys.modules.get(name) or importlib.import_module(name)
        source = inspect.getsource(module)
        assert "data_ptr" in source or "storage_ptr" in source, name


def test_a_closed_model_has_no_addresses(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(Net())
    weight = model.head.weight
    memascend.close(model)
    with pytest.raises(memascend.MemascendError, match="closed"):
        weight.untyped_storage()


def test_a_name_of_the_storage_says_whose_it_is(offloaded: Callable[..., nn.Module]) -> None:
    storage = offloaded(Net()).head.weight.untyped_storage()
    with pytest.raises(memascend.MemascendError, match=r"head\.weight is on SSD: its storage's cpu asks for"):
        storage.cpu()
