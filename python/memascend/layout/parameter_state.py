"""The state of one parameter while its model is trained. Each part is written by one folder, and read by others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from memascend._memascend import Capture, Projection


@dataclass(slots=True, eq=False)
class GradientState:
    """The gradient that memascend keeps of a parameter.

    Written by the captures of `memascend.offloading` alone (`gradients`, `joining`, `early`).
    """

    #: The value of `parameter.grad` while memascend keeps the gradient: a new one for every gradient, and a stand-in
    #: for it (`memascend.offloading.stand_ins`). Before the first gradient, a tensor that `parameter.grad` never is.
    marker: torch.Tensor
    #: Whether the backward pass has updated the parameter, ahead of `optimizer.step()`.
    early: bool = False
    #: Whether no backward pass may update the parameter: the program has used its gradient beside `optimizer.step()`
    #: (read, scaled or added to it, or it is the program's own tensor), or its weight within a backward pass.
    awaits_step: bool = False
    #: Whether memascend keeps a gradient.
    held: bool = False
    #: The value that every element of the gradient was set to since (`zero_grad(set_to_none=False)`).
    filled: float | None = None
    #: Gradients that memascend has taken over so far, and how often one was added to another.
    captured: int = 0
    added: int = 0
    #: The gradient's sum of squares, and whether a value is infinite or NaN.
    sum_squares: float = 0.0
    non_finite: bool = False
    #: The captures under way from a device: of the gradient, which will give `sum_squares` and `non_finite`, and of
    #: its projection.
    capturing: list[Capture] = field(default_factory=list)
    #: How the present gradient was projected when it was captured (APOLLO), if it was, and the number of the result in
    #: the store, with the elements there.
    projection: Projection | None = None
    projected: tuple[int, int] | None = None
    #: Autograd hooks that take over gradients.
    hooks: list[Any] = field(default_factory=list)
