"""The state of one parameter while its model is trained. Each part is written by one folder, and read by others."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    import torch

    from memascend._memascend import Capture, Plane, Projection, Rule, TensorId


@dataclass(slots=True, eq=False)
class GradientState:
    """The gradient that memascend keeps of a parameter.

    Written by the captures of `memascend.gradients` alone.
    """

    #: The value of `parameter.grad` while memascend keeps the gradient: a proxy for it, a new one for every gradient
    #: (`memascend.autograd.proxies`). Before the first gradient, a tensor that `parameter.grad` never is.
    marker: torch.Tensor
    #: Whether the backward pass has updated the parameter, ahead of `optimizer.step()`.
    updated_in_backward: bool = False
    #: Whether no backward pass may update the parameter: the program has used its gradient beside `optimizer.step()`
    #: (read, scaled or added to it, or it is the program's own tensor), or its weight within a backward pass.
    must_wait_for_step: bool = False
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


@dataclass(slots=True, eq=False)
class StoreMoments:
    """Both moments of one parameter's projected gradient on SSD: (2, channels, rank) float32."""

    name: str
    id: TensorId
    numel: int
    #: Whether they were written; otherwise they are zeros.
    written: bool = False


@dataclass(slots=True, eq=False)
class OptimizerState:
    """Which of the parameter's states are on the store, and whose they are. Written by `memascend.optim` alone."""

    #: The rule of the latest step, or of the step that the states were asked for.
    rule: Rule | None = None
    #: The planes that have values of the parameter; others begin as zeros.
    made: set[Plane] = field(default_factory=set)
    #: The moments of its projected gradient, where they are on the store.
    moments: StoreMoments | None = None
    #: The optimizer that has claimed the states. Weak: once the program has deleted it, another may claim them.
    _owner: weakref.ref[Any] | None = None

    def claim(self, optimizer: Any, rule: Rule) -> None:
        """Note that the states are `optimizer`'s from now on, by `rule`."""
        self._owner, self.rule = weakref.ref(optimizer), rule

    @property
    def claimed(self) -> bool:
        """Whether an optimizer has claimed the states, which may be gone since."""
        return self._owner is not None

    @property
    def owner(self) -> Any:
        """The optimizer that has the states (`memascend.durability.protocols.OptimizerProtocol`); None without one."""
        return None if self._owner is None else self._owner()


@dataclass(slots=True, eq=False)
class Binding:
    """The parameter as the model's modules have it.

    Written by `memascend.autograd` and `memascend.session` alone; `memascend.streaming` has it bind and unbind the
    values.
    """

    parameter: nn.Parameter
    #: The parameter's data while it is not resident: its shape and dtype, and NaN for every value.
    absent: torch.Tensor
    #: The classes of the parameter while its values are on SSD, and while they are in memory.
    absent_class: type = nn.Parameter
    resident_class: type = nn.Parameter
    #: The parameter's version counter when its values came into memory.
    bound_version: int = 0
    #: How often its values were replaced, by a step of the optimizer or by loading others: a graph made before the
    #: last time is out of date.
    version: int = 0
    #: How many graphs' nodes have saved it, by name.
    saved_names: int = 0

    def bind(self, values: torch.Tensor) -> None:
        """Bind the parameter to its values, of its shape and dtype."""
        parameter = self.parameter
        # Neither class of an offloaded parameter has an ordinary `data`.
        parameter.__class__ = nn.Parameter
        parameter.data = values
        parameter.__class__ = self.resident_class
        self.bound_version = parameter._version

    @property
    def written(self) -> bool:
        """Whether the parameter, which shows its values, was written to since it began to show them."""
        return self.parameter._version != self.bound_version

    def unbind(self) -> None:
        """Unbind the parameter: it stands for values that are on SSD."""
        parameter = self.parameter
        parameter.__class__ = nn.Parameter
        parameter.data = self.absent
        parameter.__class__ = self.absent_class
