"""Python values as JSON and back, exactly, for the states of schedulers and random number generators. No pickles."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import MemascendError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: The key of JSON objects that stand for another kind of value.
_KIND = "!"


def dumps(value: Any, what: str) -> str:
    """Return `value` as JSON: numbers, strings, None, lists, tuples, sets, dictionaries of any of these, and tensors.

    Raises MemascendError naming the part of `what` that is something else.
    """
    return as_json(encode(value, what))


def as_json(value: Any) -> str:
    """Return a value of JSON's own kinds, as `encode` returns them, as compact JSON text."""
    return json.dumps(value, separators=(",", ":"))


def loads(text: str) -> Any:
    """Return the value that `dumps` was given. Tensors are new ones on the CPU.

    Raises ValueError for a text that is not such JSON.
    """
    try:
        return json.loads(text, object_hook=_decode)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None
    except (RuntimeError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise ValueError(f"a value of the JSON text cannot be made: {first_line(error)}") from error


def encode(value: Any, what: str) -> Any:
    """Return `value` in JSON's own kinds; see `dumps`."""
    if value is None or type(value) in _PLAIN:
        return value
    for kinds, encoder in _ENCODERS:
        if isinstance(value, kinds):
            return encoder(value, what)
    if type(value).__module__ == "numpy":
        # NumPy numbers and arrays, without importing NumPy for programs that do not use it.
        return encode(value.item() if getattr(value, "ndim", None) == 0 else torch.from_numpy(value), what)
    for kind in _PLAIN:
        if isinstance(value, kind):  # For example a member of an enumeration.
            return kind(value)
    raise MemascendError(
        f"{what} is a {type(value).__name__}, which a store does not keep: numbers, strings, lists, tuples, "
        "dictionaries and tensors are"
    )


def _encode_tensor(value: torch.Tensor, _: str) -> dict[str, Any]:
    data = value.detach().to("cpu").contiguous()
    raw = data.view(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return {
        _KIND: "tensor",
        "dtype": str(data.dtype).removeprefix("torch."),
        "shape": list(data.shape),
        "data": base64.b64encode(raw).decode(),
    }


def _encode_bytes(value: bytes, _: str) -> dict[str, Any]:
    return {_KIND: "bytes", "data": base64.b64encode(value).decode()}


def _encode_dtype(value: torch.dtype, _: str) -> dict[str, Any]:
    return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}


def _encode_dict(value: dict[Any, Any], what: str) -> dict[str, Any]:
    if all(type(key) is str and key != _KIND for key in value):
        return {key: encode(item, f"{what}[{key!r}]") for key, item in value.items()}
    pairs = [[encode(key, what), encode(item, f"{what}[{key!r}]")] for key, item in value.items()]
    return {_KIND: "dict", "items": pairs}


def _encode_items(value: Iterable[Any], what: str) -> list[Any]:
    return [encode(item, f"{what}[{index}]") for index, item in enumerate(value)]


def _encode_tuple(value: tuple[Any, ...], what: str) -> dict[str, Any]:
    return {_KIND: "tuple", "items": _encode_items(value, what)}


def _encode_set(value: Iterable[Any], what: str) -> dict[str, Any]:
    return {_KIND: "set", "items": _encode_items(value, what)}


#: JSON's own kinds; a bool is an int too.
_PLAIN = (bool, int, float, str)
_ENCODERS: tuple[tuple[Any, Callable[[Any, str], Any]], ...] = (
    (torch.Tensor, _encode_tensor),
    (bytes, _encode_bytes),
    (torch.dtype, _encode_dtype),
    (dict, _encode_dict),
    (list, _encode_items),
    (tuple, _encode_tuple),
    ((set, frozenset), _encode_set),
)


def _decode(encoded: dict[str, Any]) -> Any:
    kind = encoded.get(_KIND)
    if kind is None:
        return encoded
    if kind == "tensor":
        dtype = _dtype(encoded["dtype"])
        raw = bytearray(base64.b64decode(encoded["data"]))
        data = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return data.view(encoded["shape"])
    if kind == "bytes":
        return base64.b64decode(encoded["data"])
    if kind == "dtype":
        return _dtype(encoded["name"])
    if kind == "dict":
        return {_hashable(key): value for key, value in encoded["items"]}
    if kind == "tuple":
        return tuple(encoded["items"])
    if kind == "set":
        return set(encoded["items"])
    raise ValueError(f"a value of kind {kind!r}, which this version does not know")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"PyTorch has no dtype {name}")
    return dtype


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
