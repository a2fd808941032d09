"""Threads that use one model: refused at once, and with the bits of memory one after the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import small_net
import torch

import memascend
from memascend.errors import MemascendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

USES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward": lambda model, _: small_net.loss_of(model),
    "a part": lambda model, _: model.layers[0](torch.ones(2, small_net.WIDTH)),  # type: ignore[index,operator,union-attr]
    "step": lambda _, optimizer: optimizer.step(),
    "clip": lambda _, optimizer: optimizer.clip_grad_norm_(1.0),
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "a weight": lambda model, _: model.layers[2][0].weight.sum(),  # type: ignore[index,operator,union-attr]
    "flush": lambda model, _: memascend.flush(model),
    "save_checkpoint": lambda model, _: memascend.save_checkpoint(model, "here"),
    "close": lambda model, _: memascend.close(model),
}


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """A thread beside the test's own."""
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        yield pool


def stopping(use: Callable[[], Any]) -> Callable[[torch.Tensor], None]:
    """Return a hook of a gradient that calls `use` once."""
    calls = iter([use])

    def hook(_: torch.Tensor) -> None:
        for call in calls:
            call()

    return hook


@pytest.mark.parametrize("during", ["forward", "backward"])
def test_another_thread_is_refused_in_the_middle_of_a_step(
    pair: Callable[..., tuple[nn.Module, nn.Module]], other: ThreadPoolExecutor, during: str
) -> None:
    in_memory, model = pair()
    optimizers = [memascend.AdamW(each.parameters(), lr=1e-2) for each in (in_memory, model)]
    for each, optimizer in zip((in_memory, model), optimizers, strict=True):
        small_net.step(each, optimizer)

    def refused() -> None:
        for name, use in USES.items():
            error = other.submit(use, model, optimizers[1]).exception(timeout=60)
            assert isinstance(error, MemascendError), name
            assert f"while MainThread is in a {during} pass of the same offloaded model" in str(error), name

    def use(_: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
        if during == "forward":
            return refused()
        output.register_hook(stopping(refused))
        return None

    handle = model.layers[1].register_forward_hook(use)  # type: ignore[index,union-attr,arg-type]
    for each, optimizer in zip((in_memory, model), optimizers, strict=True):
        small_net.step(each, optimizer, 1)
    handle.remove()
    small_net.assert_same(in_memory, model)


def test_threads_that_follow_each_other(pair: Callable[..., tuple[nn.Module, nn.Module]]) -> None:
    """As an executor gives each call of a loop to one of its threads."""
    for each in (models := pair()):
        optimizer = memascend.AdamW(each.parameters(), lr=1e-2)
        for seed in range(2):
            losses: list[torch.Tensor] = []
            for part in (
                lambda each=each, losses=losses, seed=seed: losses.append(small_net.loss_of(each, seed)),
                lambda losses=losses: losses[0].backward(),
                optimizer.step,
                optimizer.zero_grad,
            ):
                thread = threading.Thread(target=part)
                thread.start()
                thread.join()
    small_net.assert_same(*models)


def test_a_pass_that_failed_in_a_thread_is_over(
    pair: Callable[..., tuple[nn.Module, nn.Module]], other: ThreadPoolExecutor
) -> None:
    in_memory, model = pair()

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    def fails_forward(*_: Any) -> None:
        raise ArithmeticError

    def fails_backward(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    for fails in (fails_forward, fails_backward):
        handle = model.layers[1].register_forward_hook(fails)  # type: ignore[index,union-attr,arg-type]
        run = other.submit(lambda: small_net.loss_of(model).backward())
        assert isinstance(run.exception(timeout=60), ArithmeticError)
        handle.remove()
    model.zero_grad()
    for each in (in_memory, model):
        small_net.step(each, memascend.AdamW(each.parameters(), lr=1e-2))
    small_net.assert_same(in_memory, model)
