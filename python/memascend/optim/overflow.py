"""The check of gradients for infinities and NaNs: one pass, no temporaries, with the norm and unscaling on request."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memascend._memascend import check_overflow
from memascend.autograd.proxies import is_proxy, kept_gradient
from memascend.errors import MemascendError
from memascend.kernels import launcher
from memascend.layout.registry import finish_gradient, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memascend.layout.units import ParameterEntry

__all__ = ["Overflow", "check"]

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Overflow:
    """The result of a check. The part of CUDA devices is fetched, and waited for, when it is first read."""

    def __init__(
        self,
        found_inf: bool,
        sum_squares: float | None,
        on_devices: Sequence[launcher.Checked] = (),
    ) -> None:
        """Take the results for CPU tensors, and the checks that were launched on each device."""
        self._found_on_cpu = found_inf
        self._sum_squares = sum_squares
        self._on_devices = list(on_devices)
        self._fetched: tuple[bool, float | None] | None = None

    def _fetch(self) -> tuple[bool, float | None]:
        if self._fetched is None:
            found_inf, total = self._found_on_cpu, self._sum_squares
            for checked in self._on_devices:
                found_inf = bool(checked.flag.item()) or found_inf
                if total is not None:
                    part = checked.total
                    assert part is not None
                    total += part.item()
            self._fetched = found_inf, math.nan if found_inf and total is not None else total
        return self._fetched

    @property
    def found_inf(self) -> bool:
        """Whether an element is infinite or NaN (was, before it was unscaled)."""
        return self._fetch()[0]

    @property
    def found_inf_tensor(self) -> torch.Tensor:
        """`found_inf` as a 0-dim float32 tensor, 1.0 or 0.0, as torch's gradient scalers take it, without waiting.

        On the first CUDA device of the list, or on the CPU if there is none.
        """
        host = float(self._found_on_cpu)
        if not self._on_devices:
            return torch.tensor(host)
        flags = [checked.flag for checked in self._on_devices]
        flags = [flag.to(flags[0].device, non_blocking=True) for flag in flags]
        return torch.stack(flags).amax().clamp(min=host)

    @property
    def sum_squares(self) -> float:
        """The sum of the squares in fp64, after unscaling if that was asked for. NaN when `found_inf`.

        Raises:
            ValueError: the check was made without `norm=True`.
        """
        total = self._fetch()[1]
        if total is None:
            raise ValueError("the squares were not summed: use check(..., norm=True)")
        return total

    @property
    def norm(self) -> float:
        """The 2-norm: the square root of `sum_squares`."""
        return math.sqrt(self.sum_squares)

    def __bool__(self) -> bool:
        """Return whether an infinity or a NaN was found."""
        return self.found_inf

    def __repr__(self) -> str:
        """Show the result, or that it is still to come, without waiting for a device."""
        if self._on_devices and self._fetched is None:
            return "Overflow(on its way)"
        found_inf, total = self._fetch()
        return f"Overflow(found_inf={found_inf}" + (")" if total is None else f", norm={math.sqrt(total)})")


def check(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    *,
    norm: bool = False,
    unscale: float | torch.Tensor | None = None,
    threads: int | None = None,
) -> Overflow:
    """Look for infinities and NaNs in float32, float16 and bfloat16 tensors, in one pass, without temporaries.

    The first infinity or NaN ends the check. CPU tensors are checked before the call returns; for CUDA tensors one
    kernel is launched on each device's current stream, and the host waits for it only when the result is read. CUDA
    tensors need CuPy.

    Gradients that an offloaded model keeps (`parameter.grad` of its parameters) were checked and summed as they were
    made; the recorded results are taken. They cannot be unscaled here.

    Tensors that are dense in any order of dimensions are read in place. Others (slices of columns, expanded tensors)
    are copied, and written back if unscaled.

    Args:
        tensors: one tensor or any number of tensors, of any shape (empty included), dtypes and devices mixed.
        norm: sum the squares in the same pass, in fp64 and in a fixed order: the result depends neither on the number
            of threads nor on the run. On the CPU `memascend.AdamW.clip_grad_norm_` gives the same.
        unscale: multiply all elements by this in place: 1 / scale, torch's `inv_scale`. A number or a tensor of one
            element; the host waits for a CUDA tensor only if there are CPU tensors to unscale. As in torch's gradient
            scaler, the product is taken in fp32 and rounded to the dtype, the check sees the values before the
            product, and all tensors are unscaled whatever the check finds. The norm is taken of the products. Autograd
            is told of the change (graphs that saved a tensor will refuse it) but does not record it.
        threads: for CPU tensors (default: `torch.get_num_threads()`).

    Raises:
        ValueError: a tensor of another dtype, layout or device; weights that are not in memory; unscaling of gradients
            that memascend keeps, of tensors that share memory, or of expanded tensors. The message names the tensor's
            index, and no tensor was changed.
        ImportError: there are CUDA tensors, and CuPy is not installed.
    """
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if isinstance(unscale, torch.Tensor) and unscale.numel() != 1:
        raise ValueError(f"unscale must be a number or have one element, not the shape {tuple(unscale.shape)}")
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads must be 1 or more, not {threads}")
    offloaded = _offloaded(listed)
    _refuse_any(listed, offloaded, unscale is not None)
    in_memory = _InMemory([(index, tensor) for index, tensor in enumerate(listed) if index not in offloaded])
    # Before the CPU's part, so that the devices work meanwhile.
    on_devices = [launcher.check(device, part, norm, unscale) for device, part in in_memory.on_cuda.items()]
    non_finite, sums = in_memory.check_on_cpu(norm, unscale, threads)
    if unscale is not None:
        _tell_autograd(listed, in_memory.copies)
    for place in offloaded.values():
        finish_gradient(place)
    non_finite = non_finite or any(place.gradient.non_finite for place in offloaded.values())
    total = None
    if norm:
        # In the order of the list, as the optimizer adds them.
        sums |= {index: place.gradient.sum_squares for index, place in offloaded.items()}
        total = sum((sums[index] for index in sorted(sums)), start=0.0)
    return Overflow(non_finite, math.nan if norm and non_finite else total, on_devices)


class _InMemory:
    """The tensors to check whose elements are in memory, by device, dense each."""

    def __init__(self, tensors: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Sort (index, tensor) by device; tensors that are not dense are copied."""
        self.on_cuda: defaultdict[torch.device, list[torch.Tensor]] = defaultdict(list)
        self.on_cpu: list[tuple[int, torch.Tensor]] = []
        #: (tensor, its dense copy).
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, tensor in tensors:
            # Autograd records neither the copies nor the writes to them.
            dense = tensor.detach()
            if not _is_dense(dense):
                dense = dense.contiguous()
                self.copies.append((tensor, dense))
            if dense.device.type == "cuda":
                self.on_cuda[dense.device].append(dense)
            else:
                self.on_cpu.append((index, dense))

    def check_on_cpu(
        self, norm: bool, unscale: float | torch.Tensor | None, threads: int
    ) -> tuple[bool, dict[int, float]]:
        """Check the CPU tensors: whether an element is not finite, and with `norm` the sums of squares by index."""
        factor = None if unscale is None or not self.on_cpu else float(unscale)
        described = [(_NAMES[dense.dtype], dense.numel(), dense.data_ptr()) for _, dense in self.on_cpu]
        non_finite, sums, _ = check_overflow(described, norm, factor, threads)
        return non_finite, dict(zip((index for index, _ in self.on_cpu), sums, strict=True)) if norm else {}


def _offloaded(tensors: Sequence[torch.Tensor]) -> dict[int, ParameterEntry]:
    """Return, by index, the entries of gradients that an offloaded model keeps.

    Raises ValueError for a tensor that stands for weights that are not in memory.
    """
    places: dict[int, ParameterEntry] = {}
    for index, tensor in enumerate(tensors):
        if not is_proxy(tensor):
            continue
        try:
            kept = kept_gradient(tensor)
        except MemascendError as error:
            raise ValueError(f"tensors[{index}]: {error}") from None
        if kept is None:
            located = place_of(tensor)
            name = "a view of a parameter" if located is None else f"the parameter {located[1].name}"
            raise ValueError(
                f"tensors[{index}] is {name}, whose weights are not in memory now: give its gradient, or a copy"
            )
        place, is_whole = kept
        if not is_whole:
            raise ValueError(
                f"tensors[{index}] is a part of {place.name}'s gradient, which memascend keeps: pass it whole"
            )
        places[index] = place
    return places


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type in ("cpu", "cuda")


def _refuse_any(tensors: Sequence[torch.Tensor], offloaded: dict[int, ParameterEntry], unscale: bool) -> None:
    for index, tensor in enumerate(tensors):
        _refuse(index, tensor, offloaded.get(index), unscale)
    if unscale:
        _refuse_overlaps(tensors)


def _refuse(index: int, tensor: torch.Tensor, place: ParameterEntry | None, unscale: bool) -> None:
    def refuse(reason: str) -> None:
        raise ValueError(f"tensors[{index}] {reason}")

    if not isinstance(tensor, torch.Tensor):
        refuse(f"is a {type(tensor).__name__}, not a tensor")
    if is_traceable_wrapper_subclass(tensor):
        refuse(f"is a {type(tensor).__name__}: pass the tensors that it is made of")
    if tensor.layout is not torch.strided:
        refuse(f"has the layout {tensor.layout}: only dense tensors are checked; of a sparse one pass its values()")
    if tensor.dtype not in _NAMES:
        name = str(tensor.dtype).removeprefix("torch.")
        refuse(f"has dtype {name}: only float32, float16 and bfloat16 are checked")
    if not _has_memory(tensor):
        refuse(f"is on {tensor.device}: only CPU and CUDA tensors are checked")
    if unscale and place is not None:
        refuse(f"is the gradient of {place.name}, which memascend keeps: it cannot be unscaled in place")
    repeated = any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if unscale and tensor.numel() and repeated:
        refuse("is expanded: its elements share memory and cannot be unscaled in place")


def _refuse_overlaps(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors whose memory ranges overlap: shared elements would be unscaled twice, or by two threads."""
    ranges = []
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            ranges.append((str(tensor.device), start, start + (last + 1) * tensor.itemsize, index))
    ranges.sort()
    for (device, _, end, index), (next_device, start, _, next_index) in pairwise(ranges):
        if device == next_device and start < end:
            first, second = sorted((index, next_index))
            raise ValueError(f"tensors[{second}] shares memory with tensors[{first}]: both cannot be unscaled in place")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


def _tell_autograd(tensors: Sequence[torch.Tensor], copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write copies back, and increment the versions of the tensors that were changed in place."""
    with torch.no_grad():
        for tensor, copy in copies:
            tensor.copy_(copy)
    copied = {id(tensor) for tensor, _ in copies}
    for tensor in tensors:
        if id(tensor) not in copied and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
