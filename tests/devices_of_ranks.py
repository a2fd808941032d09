"""Ranks that compute on simulated devices, one each, where copies are as late as CUDA allows."""

from __future__ import annotations

import gc
import os
import shutil
from typing import TYPE_CHECKING, Any

import fake_cuda
import rank_programs
from simulated_device import Accesses, SimulatedDevice

from memascend.offloading import activations
from memascend.ranks.group import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch


def run(
    program: Callable[..., Any],
    rank: int,
    ranks: int,
    folder: Path,
    library: Path,
    settings: dict[str, int] | None = None,
    computing: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run one of `rank_programs` whose models compute on a simulated device, of the runtime in `library`.

    Args:
        settings: of the runtime: see `Fake.set`.
        computing: options of `memascend.offload` and `resume`; `device_memory="least"` is what a model needs.

    The result has `books` too: what `Fake` says of races, and of what was left behind.
    """
    own = folder / f"cudart{rank}-{os.getpid()}"
    own.mkdir(parents=True)
    os.environ[fake_cuda.VARIABLE] = str(shutil.copy(library, own))
    activations.STASH_FROM_BYTES = 1
    fake = fake_cuda.Fake()
    for name, value in ({"lazy": 1, "seed": rank} | (settings or {})).items():
        fake.set(name, value)
    rank_programs.OPTIONS |= {"allocator": "auto", "device": SimulatedDevice(), "device_memory": "1GiB"}
    rank_programs.OPTIONS |= computing or {}
    _tell_collectives(fake)
    with Accesses(fake):
        result = program(rank, ranks, folder, **options)
    gc.collect()
    return result | {"races": fake.get("races"), "race": fake.text("race"), "left": _left(fake)}


def _left(fake: fake_cuda.Fake) -> str:
    try:
        fake.assert_clean()
    except AssertionError as error:
        return str(error)
    return ""


def _tell_collectives(fake: fake_cuda.Fake) -> None:
    """Tell the race detector what the backend reads and writes."""
    gather, exchange = Ranks.gather, Ranks.exchange

    def told_gather(self: Ranks, action: str, wholes: list[torch.Tensor]) -> None:
        for whole in wholes:
            fake.access(whole.data_ptr(), whole.nbytes, True, action)
        gather(self, action, wholes)

    def told_exchange(self: Ranks, action: str, sent: torch.Tensor, *counts: Any) -> torch.Tensor:
        fake.access(sent.data_ptr(), sent.nbytes, False, action)
        return exchange(self, action, sent, *counts)

    Ranks.gather, Ranks.exchange = told_gather, told_exchange  # type: ignore[method-assign, assignment]
