"""Reading and writing optimizer states, on a store or in memory, in the form of PyTorch's `state_dict`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.layout.registry import ranks_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend._memascend import Plane, Rule, Runtime
    from memascend.layout.units import ParameterEntry


def read_states(
    parameter: torch.nn.Parameter, rule: Rule, state: dict[str, Any], location: tuple[Runtime, ParameterEntry] | None
) -> dict[str, Any]:
    """Return the entry of one parameter in `state_dict`: `step`, and a tensor for each of its states.

    `state` is the parameter's entry in `Optimizer.state`; `location` is its store and entry, or None for memory.
    """
    values: dict[str, Any] = {"step": torch.tensor(float(state["step"]))}
    for plane in rule.planes:
        values[plane.name] = read_state(parameter, plane, state, location)
    return values


def read_state(
    parameter: torch.nn.Parameter, plane: Plane, state: dict[str, Any], location: tuple[Runtime, ParameterEntry] | None
) -> torch.Tensor:
    """Return one state of one parameter as `state_dict` shows it."""
    if location is not None:
        return _read(*location, plane)
    if plane.dtype != "uint8":
        return state[plane.name]
    value = torch.empty(parameter.shape)
    plane.decode(parameter.numel(), state[plane.name].data_ptr(), value.data_ptr())
    return value


def _read(runtime: Runtime, place: ParameterEntry, plane: Plane) -> torch.Tensor:
    tensor, shard = place.tensor, place.tensor.shard
    dtype, share = shown_dtype(plane), tensor.numel
    numel = share if shard is None else share * shard.ranks
    whole = torch.zeros(numel, dtype=dtype) if tensor.packed else _file_backed(runtime, numel, dtype)
    own = whole if shard is None else whole[shard.rank * share : (shard.rank + 1) * share]
    store_plane = tensor.planes.get(plane)
    if store_plane is not None and store_plane.written:
        if plane.dtype == "uint8":
            runtime.store.read_plane(store_plane.id, plane, share, own.data_ptr())
        else:
            runtime.store.read(store_plane.id, own.data_ptr(), own.nbytes)
    ranks = ranks_of([place.parameter])
    if ranks is not None:
        ranks.gather(f"gather {plane.name} of {place.name}", [whole.view(torch.uint8)])
    part = whole[place.start : place.start + place.numel].view(place.shape)
    return part.clone() if tensor.packed else part


class UnreadStates(dict[str, torch.Tensor]):
    """Saved states of one parameter in a file, which `load_states` reads one at a time.

    The tensors in this dictionary only have the shapes and dtypes of the states; `step` has its value.
    """

    def __init__(self, shown: dict[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> None:
        """Have `shown` stand for the tensors that `read(name)` returns."""
        super().__init__(shown)
        self.read = read


def load_states(
    parameter: torch.nn.Parameter, rule: Rule, saved: dict[str, Any], location: tuple[Runtime, ParameterEntry] | None
) -> dict[str, torch.Tensor]:
    """Write the saved states of one parameter to its store, or return them if its states are in memory.

    A state that was not saved begins as zeros. A master is zeros too, which stands for the weight itself, if it was not
    saved, or if another optimizer has converted it to another dtype.
    """
    in_memory: dict[str, torch.Tensor] = {}
    for plane in rule.planes:
        value = saved.get(plane.name)
        if value is None or (plane.name.startswith("master") and value.dtype != shown_dtype(plane)):
            value = torch.zeros(parameter.shape)
        elif isinstance(saved, UnreadStates):
            value = saved.read(plane.name)
        value = value.detach().to(dtype=shown_dtype(plane), device="cpu").contiguous()
        if location is not None:
            _write(*location, plane, value)
        elif plane.dtype == "uint8":
            in_memory[plane.name] = torch.zeros(plane.bytes(parameter.numel()), dtype=torch.uint8)
            plane.encode(parameter.numel(), value.data_ptr(), in_memory[plane.name].data_ptr())
        else:
            in_memory[plane.name] = value.clone()
    return in_memory


def saved_steps(saved: dict[str, Any]) -> int:
    """Return how many steps the saved states of a parameter have seen.

    `torch.optim.SGD` does not count steps, but its momentum shows that there was a first one.
    """
    if saved.get("step") is not None:
        return int(saved["step"])
    return 1 if any(value is not None for value in saved.values()) else 0


def check_saved(parameter: torch.nn.Parameter, saved: dict[str, Any]) -> None:
    """Raise ValueError unless everything in a parameter's saved states can be loaded."""
    for name, value in saved.items():
        if name == "step" or value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} of the loaded state dict is a {type(value).__name__}, not a tensor")
        if value.shape != parameter.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}: load the states of a "
                "model of the same shapes"
            )
    saved_steps(saved)  # raises ValueError if `step` is not a number


def _write(runtime: Runtime, place: ParameterEntry, plane: Plane, value: torch.Tensor) -> None:
    tensor = place.tensor
    store_plane = tensor.planes[plane]
    first, start, count = place.stored
    whole = own = value.view(-1)[first : first + count]
    if tensor.packed:
        whole = torch.zeros(tensor.numel, dtype=value.dtype)
        if store_plane.written:
            runtime.store.read(store_plane.id, whole.data_ptr(), whole.nbytes)
        whole[start : start + count] = own
    elif count < tensor.numel:  # The remainder of a share is padding.
        whole = _file_backed(runtime, tensor.numel, value.dtype)
        whole[:count] = own
    if plane.dtype == "uint8":
        runtime.store.write_plane(store_plane.id, plane, tensor.numel, whole.data_ptr())
    else:
        runtime.store.write(store_plane.id, whole.data_ptr(), whole.nbytes)
    store_plane.written = True


def shown_dtype(plane: Plane) -> torch.dtype:
    """Return the dtype in which `state_dict` shows a state."""
    return torch.float32 if plane.dtype == "uint8" else getattr(torch, plane.dtype)


def _file_backed(runtime: Runtime, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in an unnamed file beside the store, whose pages the system can reclaim.

    Raises OSError, naming the directory, where the drive has no room for it.
    """
    directory = _directory(runtime)
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            # Allocate every block now: writing to a mapping of a full drive raises SIGBUS.
            os.posix_fallocate(file.fileno(), 0, max(numel * dtype.itemsize, 1))
        except OSError as error:
            error.filename = str(directory)
            raise
        return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=numel, dtype=dtype)


def _directory(runtime: Runtime) -> Path:
    """Return a directory on one of the store's drives, or the system's temporary directory.

    Raw devices have none, and on one that is mounted read-only nothing can be made.
    """
    for volume in runtime.stats()["volumes"]:
        path = Path(volume["path"])
        directory = path if path.is_dir() else path.parent
        if (path.is_dir() or path.is_file()) and os.access(directory, os.W_OK):
            return directory
    return Path(tempfile.gettempdir())
