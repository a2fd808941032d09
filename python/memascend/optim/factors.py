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

    from memascend.optim.home import Home

    #: Returns the sum of squares of each gradient and whether it is not finite, as `Homes.gradient_stats` does.
    Measure = Callable[[Sequence[Home]], list[tuple[float, bool]]]


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

    def of(self, home: Home) -> float:
        """Return the factor of a parameter's gradient: the home's, by default 1, unless another one was set.

        Raises RuntimeError if the gradient was added to, or written to, after its factor was set.
        """
        if home.parameter not in self._factors:
            return home.gradient_factor
        version, factor = self._factors[home.parameter]
        unchanged = version.unchanged(home)
        if unchanged is None:
            raise RuntimeError(
                f"the gradient of {home.name} was changed after it was clipped or unscaled: unscale and "
                "clip after the last backward pass of a step, with the optimizer's clip_grad_norm_"
            )
        return factor if unchanged else home.gradient_factor

    def unscale(self, homes: list[Home], inv_scale: float, measure: Measure) -> bool:
        """Set the factor of every gradient to `inv_scale`; returns whether one of them is not finite."""
        for home in homes:
            home.take_gradient()
        stats = measure(homes)
        for home in homes:
            self._factors[home.parameter] = _GradientVersion(home), inv_scale * home.gradient_factor
        return any(non_finite for _, non_finite in stats)

    def clip(self, homes: list[Home], max_norm: float, error_if_nonfinite: bool, measure: Measure) -> float:
        """Multiply all factors so that the 2-norm of the gradients is at most `max_norm`.

        Returns the norm before: the square root of a sum of squares, in fp64 and in the order of `homes`. It is NaN
        where a gradient is not finite.
        """
        sum_squares, finite = 0.0, True
        factors: dict[nn.Parameter, float] = {}
        for home in homes:
            home.take_gradient()
            factors[home.parameter] = self.of(home)
        for home, (squares, non_finite) in zip(homes, measure(homes), strict=True):
            sum_squares += squares * factors[home.parameter] ** 2
            finite = finite and not non_finite
        norm = math.sqrt(sum_squares) if finite else math.nan
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError("the norm of the gradients is not finite, so they cannot be clipped")
        scale = torch.tensor(max_norm, dtype=torch.float64) / (norm + 1e-6)
        coefficient = float(scale.clamp(max=1.0).to(torch.float32))
        self._factors = {
            home.parameter: (_GradientVersion(home), coefficient * factors[home.parameter]) for home in homes
        }
        return norm


class _GradientVersion:
    """Which gradient a parameter had, and how often it had been written to."""

    def __init__(self, home: Home) -> None:
        gradient = home.parameter.grad
        assert gradient is not None
        self._captures = home.captures
        self._gradient = weakref.ref(gradient)
        self._version = gradient._version

    def unchanged(self, home: Home) -> bool | None:
        """Return whether the parameter still has this gradient; None if it has, but the gradient was written to."""
        now = _GradientVersion(home)
        if self._captures is None or now._captures is None:
            if self._gradient() is not home.parameter.grad:
                return False
            return True if self._version == now._version else None
        if self._captures[0] != now._captures[0]:
            return False
        return True if self._captures == now._captures else None
