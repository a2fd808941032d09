"""Digests of the kernels' results for fixed inputs: equal on every instruction set and every architecture.

    python tests/kernel_digests.py            # compares with tests/kernels/digests.json; exit code 1 on a difference
    python tests/kernel_digests.py --write    # after a change that is meant to change results

It needs nothing but the installed package, so that it runs wherever the wheel does.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import memascend
from memascend._memascend import (
    Rule,
    StepScalars,
    check_overflow,
    gradient_stats,
    instruction_set,
    step_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RECORD = Path(__file__).resolve().parent / "kernels" / "digests.json"
#: More than GRADIENT_BLOCK, so that work is divided, and a tail that no vector divides.
NUMEL = 66_003
STEPS = 3
THREADS = 2
WEIGHTS = (("bfloat16", True), ("bfloat16", False), ("float32", True), ("float16", True))
ALGORITHMS = ("adamw", "adamw amsgrad", "lion", "sgd", "sgd momentum")
STATES = ("float32", "bfloat16", "8bit")
BETAS = (0.9, 0.999)


def words(count: int, seed: int) -> np.ndarray[Any, Any]:
    """Return `count` random 32-bit words (splitmix64), made by integer arithmetic alone."""
    with np.errstate(over="ignore"):
        state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def numbers(count: int, seed: int, dtype: str) -> np.ndarray[Any, Any]:
    """Return numbers of magnitudes from 2**-12 to 2, of both signs, with zeros among them; bfloat16 as its bits."""
    drawn = words(count, seed)
    exponents = np.uint32(115) + (drawn >> np.uint32(8)) % np.uint32(13)
    bits = (drawn & np.uint32(0x80000000)) | (exponents << np.uint32(23)) | (drawn & np.uint32(0x7FFFFF))
    bits[drawn % np.uint32(97) == 0] = 0
    if dtype == "bfloat16":
        return (bits >> np.uint32(16)).astype(np.uint16)
    single = bits.view(np.float32)
    return single.astype(np.float16) if dtype == "float16" else single


def with_specials(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return a copy with infinities, NaNs of several payloads, and subnormal numbers among the others."""
    patterns = {
        "bfloat16": (0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x8001),
        "float16": (0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0x0001, 0x8001),
        "float32": (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x00000001, 0x80000001),
    }[dtype]
    bits = values.copy().view(np.uint32 if dtype == "float32" else np.uint16)
    for position, pattern in enumerate(patterns):
        bits[position * 37 :: 311] = pattern
    return bits


def address(array: np.ndarray[Any, Any]) -> int:
    """Return where an array begins."""
    return int(array.ctypes.data)


def digest(*results: Any) -> str:
    """Return the first 16 digits of the SHA-256 of arrays' bytes, and of numbers as they are printed."""
    sha = hashlib.sha256()
    for result in results:
        sha.update(result.tobytes() if isinstance(result, np.ndarray) else repr(result).encode())
    return sha.hexdigest()[:16]


def scalars(algorithm: str, step: int) -> StepScalars:
    """Return the constants of a step, with options that are not the defaults in the second one."""
    options: Any = {"grad_scale": 0.5 if step == 2 else 1.0, "maximize": step == 2, "seed": 11 * step}
    if algorithm.startswith("adamw"):
        return StepScalars.adamw(1e-2, BETAS, 1e-8, 0.1, step, decoupled=step != 2, **options)
    if algorithm == "lion":
        return StepScalars.lion(1e-2, (0.9, 0.99), 0.1, step, **options)
    momentum = 0.9 if "momentum" in algorithm else 0.0
    return StepScalars.sgd(1e-2, momentum, 0.0, 0.1, bool(momentum), step, **options)


def of_rule(algorithm: str, states: str, dtype: str, master: bool, special: bool) -> str:
    """Return the digest of weight and states after some steps."""
    rule = Rule(algorithm, states, dtype, master)
    weight = numbers(NUMEL, 1, dtype)
    planes = [np.zeros(plane.bytes(NUMEL), np.uint8) for plane in rule.planes]
    for step in range(1, STEPS + 1):
        gradient = numbers(NUMEL, 1 + step, dtype)
        if special and step == STEPS:
            gradient = with_specials(gradient, dtype)
        step_host(
            rule,
            NUMEL,
            address(weight),
            [address(plane) for plane in planes],
            address(gradient),
            scalars(algorithm, step),
            THREADS,
        )
    return digest(weight, *planes)


def of_gradient(dtype: str, special: bool) -> str:
    """Return the digest of the sums and checks of a gradient, and of its unscaled elements."""
    gradient = numbers(NUMEL, 5, dtype)
    if special:
        gradient = with_specials(gradient, dtype)
    stats = gradient_stats(dtype, NUMEL, address(gradient))
    looked = check_overflow([(dtype, NUMEL, address(gradient))], True, None, THREADS)
    unscaled = check_overflow([(dtype, NUMEL, address(gradient))], True, 1.0 / 3.0, THREADS)
    return digest(stats, looked, unscaled, gradient)


def of_plane(index: int) -> str:
    """Return the digest of 8-bit states, signed (0) or unsigned (1), and of their decoded values."""
    plane = Rule("adamw", "8bit", "float32", True).planes[index]
    values = numbers(NUMEL, 6, "float32")
    if index:
        values = np.abs(values)
    coded, decoded = np.zeros(plane.bytes(NUMEL), np.uint8), np.zeros(NUMEL, np.float32)
    plane.encode(NUMEL, address(values), address(coded))
    plane.decode(NUMEL, address(coded), address(decoded))
    return digest(coded, decoded)


def matrix(shape: tuple[int, int], seed: int, dtype: str) -> torch.Tensor:
    """Return a matrix of such numbers."""
    values = numbers(shape[0] * shape[1], seed, dtype).reshape(shape)
    if dtype == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def of_apollo(shape: tuple[int, int], rank: int | None, dtype: str) -> str:
    """Return the digest of a matrix and of its states after some steps of APOLLO, or of APOLLO-Mini without a rank."""
    weight = torch.nn.Parameter(matrix(shape, 7, dtype))
    if rank is None:
        optimizer = memascend.ApolloMini([weight], lr=1e-2, weight_decay=0.1, seed=42, update_proj_gap=2)
    else:
        optimizer = memascend.Apollo([weight], lr=1e-2, weight_decay=0.1, seed=42, update_proj_gap=2, rank=rank)
    for step in range(1, STEPS + 1):
        weight.grad = matrix(shape, 7 + step, dtype)
        optimizer.step()
    states = optimizer.state_dict()["state"][0]
    arrays = [weight.detach(), *(states[name] for name in sorted(states) if isinstance(states[name], torch.Tensor))]
    return digest(*(array.contiguous().view(torch.uint8).numpy() for array in arrays if array.ndim))


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each case and the function that computes its digest."""
    for algorithm, states, (dtype, master), special in product(ALGORITHMS, STATES, WEIGHTS, (False, True)):
        name = f"{algorithm}, {states} states, {dtype}{'' if master else ' alone'}{', not finite' if special else ''}"
        yield name, partial(of_rule, algorithm, states, dtype, master, special)
    for dtype, special in product(("bfloat16", "float16", "float32"), (False, True)):
        yield f"gradient, {dtype}{', not finite' if special else ''}", partial(of_gradient, dtype, special)
    for index, sign in enumerate(("signed", "unsigned")):
        yield f"8-bit states, {sign}", partial(of_plane, index)
    for shape, rank, dtype in product(((70, 33), (33, 70), (96, 2048)), (None, 1, 4, 70), ("bfloat16", "float32")):
        of = "apollo-mini" if rank is None else f"apollo of rank {rank}"
        yield f"{of}, {shape[0]} x {shape[1]}, {dtype}", partial(of_apollo, shape, rank, dtype)


def digests() -> dict[str, str]:
    """Return the digest of each case."""
    return {name: compute() for name, compute in cases()}


def main() -> int:
    """Compare with the record, or write it."""
    found = digests()
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    record = json.loads(RECORD.read_text())
    different = [name for name in sorted(found.keys() | record.keys()) if found.get(name) != record.get(name)]
    for name in different:
        print(f"{name}: {found.get(name)}, and {record.get(name)} in {RECORD}")
    equal = f"{len(found) - len(different)} of {len(record)} digests are equal"
    print(f"{platform.machine()}, {instruction_set()}: {equal}")
    return 1 if different or not found else 0


if __name__ == "__main__":
    sys.exit(main())
