"""Ranks that compute on simulated devices, one each, where copies are as late as CUDA allows."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import fake_cuda
import rank_programs
import rank_runs
import torch.distributed as dist
from simulated_device import Accesses, SimulatedDevice

import memascend
from memascend.autograd import recompute
from memascend.gradients.device_reduce import DeviceReducedGradients
from memascend.gradients.leaving import LeavingGradients
from memascend.streaming.uploads import Uploads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from memascend.layout.units import ParameterEntry


def run(
    program: Callable[..., Any],
    rank: int,
    ranks: int,
    folder: Path,
    library: Path,
    settings: dict[str, int] | None = None,
    computing: dict[str, Any] | None = None,
    without: str | None = None,
    **options: Any,
) -> Any:
    """Run one of `rank_programs` whose models compute on a simulated device, of the runtime in `library`.

    Args:
        settings: of the runtime: see `Fake.set`.
        computing: options of `memascend.offload` and `resume`; `device_memory="least"` is the need of a model.
        without: the name of an omission in `OMISSIONS`.

    Of a dictionary, the result also has what is "left": races that the runtime reports, the collectives' among them,
    and memory that was not given back.
    """
    own = folder / f"cudart{rank}-{os.getpid()}"
    own.mkdir(parents=True)
    os.environ[fake_cuda.VARIABLE] = str(shutil.copy(library, own))
    recompute.STASH_FROM_BYTES = 1
    fake = fake_cuda.Fake()
    for name, value in ({"lazy": 1, "seed": rank} | (settings or {})).items():
        fake.set(name, value)
    rank_runs.OPTIONS |= {"allocator": "auto", "device": SimulatedDevice(), "device_memory": "1GiB"}
    rank_runs.OPTIONS |= computing or {}
    if without is not None:
        OMISSIONS[without]()
    with Accesses(fake):
        result = program(rank, ranks, folder, **options)
    gc.collect()
    return result | {"left": _left(fake)} if isinstance(result, dict) else result


def _left(fake: fake_cuda.Fake) -> str:
    try:
        fake.assert_clean()
    except AssertionError as error:
        return str(error)
    return ""


# ---- omissions ----------------------------------------------------------------------------------------------


def _gather_at_once() -> None:
    """Gather into a buffer from which a copy is under way."""
    Uploads.wait = lambda *_: None  # type: ignore[method-assign]


def _send_at_once() -> None:
    """Send gradients that are not there yet."""

    def wait_for_none(self: DeviceReducedGradients, places: list[ParameterEntry]) -> None:
        for place in places:
            del self._coming[place]

    DeviceReducedGradients._wait_there = wait_for_none  # type: ignore[method-assign, assignment]


def _copy_at_once() -> None:
    """Copy gradients that are not computed yet."""
    keep_new = DeviceReducedGradients._keep_new
    earlier: list[Any] = []

    def keep(self: DeviceReducedGradients, place: ParameterEntry, gradient: torch.Tensor) -> None:
        device: Any = self.device
        earlier.append(earlier[0] if earlier else device.record())
        device.record = lambda: earlier[0]
        keep_new(self, place, gradient)
        del device.record

    DeviceReducedGradients._keep_new = keep  # type: ignore[method-assign]


def _drop_at_once() -> None:
    """Let go of gradients that are being copied."""

    def drop(self: LeavingGradients, _: int) -> None:
        self._copies.clear()

    LeavingGradients._release = drop  # type: ignore[method-assign]


OMISSIONS = {
    function.__name__[1:]: function for function in (_gather_at_once, _send_at_once, _copy_at_once, _drop_at_once)
}


# ---- programs of their own ----------------------------------------------------------------------------------


def evaluate(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Run passes without gradients, so that the host waits for the device only where it has to."""
    return {"outputs": rank_programs.change_order(rank, ranks, folder, least=False)}


def refused(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """Do refused things on devices, and return each error's text, and a warning about a shared device."""
    told: dict[str, str] = {}

    refuse = partial(rank_programs.note_refusal, told)

    def offload(**options: Any) -> None:
        memascend.close(rank_runs.offload(rank_runs.build(), folder, **options))

    refuse("backend", lambda: offload(process_group=dist.new_group(backend="cuda:gloo")))
    shared = SimulatedDevice(identity="shared")
    refuse("mixed", lambda: offload(**({"device": None, "device_memory": None} if rank else {})))
    refuse("shared", lambda: offload(device=shared, device_memory="64MiB" if rank else None))
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("memascend").addHandler(handler)
    refuse("divided", lambda: offload(device=shared, device_memory="64MiB"))
    logging.getLogger("memascend").removeHandler(handler)
    told["warning"] = "; ".join(warnings)
    model = rank_runs.offload(rank_runs.build(), folder)
    refuse("device memory", lambda: memascend.set_device_memory(model, "512MiB"))
    refuse("write", lambda: model.head.weight.data.mul_(2.0))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = memascend.AdamW(trained, lr=1e-2)
    model(rank_runs.batch(rank))["loss"].backward()
    refuse("gradient", lambda: model.head.weight.grad.sum())
    optimizer.zero_grad()
    memascend.close(model)
    return told
