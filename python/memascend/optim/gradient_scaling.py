"""The factors of the next step's gradients, which come of clipping and of unscaling a loss.

A factor is remembered with the gradient that it was computed for, so a new gradient is not multiplied by an old factor,
and a gradient that was changed since is refused.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from memascend.optim.state_backend import StateBackend

    #: Returns the sum of squares of each gradient and whether it is not finite, as `StateBackends.gradient_stats` does.
    Measure = Callable[[Sequence[StateBackend]], list[tuple[float, bool]]]


class GradientFactors:
    """Factors of gradients that were clipped or unscaled. The update applies them in fp32.

    A factor belongs to one gradient, as it was when the factor was set: a new gradient of the same parameter has none.
    """

    def __init__(self) -> None:
        """Begin with no factors."""
        self._factors: dict[nn.Parameter, tuple[_GradientVersion, float]] = {}

    def clear(self) -> None:
        """Forget all factors: a step has applied them, or `zero_grad` has discarded their gradients."""
        self._factors.clear()

    def of(self, backend: StateBackend) -> float:
        """Return the factor of a parameter's gradient: the backend's, by default 1, unless another one was set.

        Raises RuntimeError if the gradient was added to, or written to, after its factor was set.
        """
        if backend.parameter not in self._factors:
            return backend.gradient_factor
        version, factor = self._factors[backend.parameter]
        unchanged = version.unchanged(backend)
        if unchanged is None:
            raise RuntimeError(
                f"the gradient of {backend.name} was changed after it was clipped or unscaled: unscale and "
                "clip after the last backward pass of a step, with the optimizer's clip_grad_norm_"
            )
        return factor if unchanged else backend.gradient_factor

    def unscale(self, backends: list[StateBackend], inv_scale: float, measure: Measure) -> bool:
        """Set the factor of every gradient to `inv_scale`; returns whether one of them is not finite."""
        for backend in backends:
            backend.take_gradient()
        stats = measure(backends)
        for backend in backends:
            self._factors[backend.parameter] = _GradientVersion(backend), inv_scale * backend.gradient_factor
        return any(non_finite for _, non_finite in stats)

    def clip(self, backends: list[StateBackend], max_norm: float, error_if_nonfinite: bool, measure: Measure) -> float:
        """Multiply all factors so that the 2-norm of the gradients is at most `max_norm`.

        Returns the norm before: the square root of a sum of squares, in fp64 and in the order of `backends`. It is NaN
        where a gradient is not finite.
        """
        sum_squares, finite = 0.0, True
        factors: dict[nn.Parameter, float] = {}
        for backend in backends:
            backend.take_gradient()
            factors[backend.parameter] = self.of(backend)
        for backend, (squares, non_finite) in zip(backends, measure(backends), strict=True):
            sum_squares += squares * factors[backend.parameter] ** 2
            finite = finite and not non_finite
        norm = math.sqrt(sum_squares) if finite else math.nan
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError("the norm of the gradients is not finite, so they cannot be clipped")
        scale = torch.tensor(max_norm, dtype=torch.float64) / (norm + 1e-6)
        coefficient = float(scale.clamp(max=1.0).to(torch.float32))
        self._factors = {
            backend.parameter: (_GradientVersion(backend), coefficient * factors[backend.parameter])
            for backend in backends
        }
        return norm


class _GradientVersion:
    """Which gradient a parameter had, and how often it had been written to."""

    def __init__(self, backend: StateBackend) -> None:
        gradient = backend.parameter.grad
        assert gradient is not None
        self._captures = backend.captures
        self._gradient = weakref.ref(gradient)
        self._version = gradient._version

    def unchanged(self, backend: StateBackend) -> bool | None:
        """Return whether the parameter still has this gradient; None if it has, but the gradient was written to."""
        now = _GradientVersion(backend)
        if self._captures is None or now._captures is None:
            if self._gradient() is not backend.parameter.grad:
                return False
            return True if self._version == now._version else None
        if self._captures[0] != now._captures[0]:
            return False
        return True if self._captures == now._captures else None
