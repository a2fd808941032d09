"""States of random generators, for calls that are made again."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memascend.hardware.cuda import ComputeDevice

#: The latest state of each shared generator. Calls between which no number is drawn share it.
_latest: dict[str, Any] = {}


def _shared(name: str, state: Any, same: Callable[[Any, Any], bool]) -> Any:
    if name not in _latest or not same(_latest[name], state):
        _latest[name] = state
    return _latest[name]


def _same_numpy_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    (key, rest), (other_key, other_rest) = (
        (state["state"].get("key"), [state["bit_generator"], state["state"].get("pos"), state.get("gauss")])
        for state in (one, other)
    )
    return key is not None and rest == other_rest and np.array_equal(key, other_key)


class RandomState:
    """The states of PyTorch's generators and, unless `torch_only`, of Python's and NumPy's global ones."""

    def __init__(
        self, device: ComputeDevice | None, generators: Iterable[torch.Generator] = (), torch_only: bool = False
    ) -> None:
        """Read the states; `generators` are those besides the default ones."""
        self.device = device
        self.torch_only = torch_only
        self.default = _shared("torch", torch.get_rng_state(), torch.equal)
        self.on_devices = [] if device is None else [(device, device.random_state())]
        self.generators = [(generator, generator.get_state()) for generator in generators]
        if not torch_only:
            self.python = _shared("python", random.getstate(), lambda one, other: one == other)
            self.numpy = _shared("numpy", np.random.get_state(legacy=False), _same_numpy_state)

    def set(self) -> None:
        """Give the generators these states."""
        torch.set_rng_state(self.default)
        for device, on_device in self.on_devices:
            device.set_random_state(on_device)
        for generator, state in self.generators:
            generator.set_state(state)
        if not self.torch_only:
            random.setstate(self.python)
            np.random.set_state(self.numpy)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have the generators in these states; afterwards they are in the present ones again."""
        present = RandomState(self.device, [generator for generator, _ in self.generators], self.torch_only)
        self.set()
        try:
            yield
        finally:
            present.set()
