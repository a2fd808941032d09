"""The session and the optimizer, as protocols for folders that must not import theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from memascend._memascend import Projection, Runtime
    from memascend.common.timeline import Timeline
    from memascend.errors import MemascendError
    from memascend.layout.units import ParameterEntry, Unit
    from memascend.options import OffloadOptions
    from memascend.ranks.membership import Membership, OneProcess
    from memascend.streaming.experts import ExpertPieces
    from memascend.streaming.streamer import Streamer
    from memascend.streaming.updates import MeasuredGradient, Segment


class GradientsProtocol(Protocol):
    """The captured gradients of a session; see `memascend.gradients.capture.GradientCapture`."""

    def note_used(self, place: ParameterEntry, /) -> None:
        """Note that the program uses a gradient, or its weight within a backward pass, beside `optimizer.step()`."""

    def values(self, place: ParameterEntry, /) -> torch.Tensor:
        """Return a copy of a gradient: (elements of the parameter,)."""

    def replace(self, place: ParameterEntry, values: torch.Tensor, /) -> None:
        """Store other values as the gradient."""

    def fill(self, place: ParameterEntry, value: float, /) -> None:
        """Set every element of a gradient to a value."""


class SessionProtocol(Protocol):
    """The offloaded state of one model; see `memascend.session.session.Session`."""

    runtime: Runtime
    streamer: Streamer
    #: The experts in memory that are read one by one.
    pieces: ExpertPieces
    timeline: Timeline
    units: list[Unit]
    notices: list[str]
    keep_store: bool | None
    #: The ranks that the store is divided over, or the one process that has it.
    membership: Membership | OneProcess

    @property
    def options(self) -> OffloadOptions:
        """The options that open the store again."""

    @property
    def gradients(self) -> GradientsProtocol:
        """The captured gradients."""

    @property
    def closed(self) -> bool:
        """Whether the session was closed."""

    @property
    def in_pass(self) -> bool:
        """Whether a pass, or a part of the model that was called by itself, is under way."""

    def closed_error(self, message: str, /) -> MemascendError:
        """Return the error of using a closed session, which says `message`, or that the process is a forked child."""

    def saving_names(self) -> AbstractContextManager[Any]:
        """Have autograd save names of weights instead of views of them."""

    def model(self) -> nn.Module | None:
        """Return the model, or None once it is gone."""

    @property
    def tracked(self) -> dict[str, Any]:
        """The objects whose states belong to every generation, by name. They live as long as the model does."""

    @property
    def places(self) -> Iterator[ParameterEntry]:
        """The entries of all parameters."""


class OptimizerProtocol(Protocol):
    """An optimizer of offloaded parameters; see `memascend.optim.base.OffloadedOptimizer`."""

    param_groups: list[dict[str, Any]]

    def trains_only(self, session: SessionProtocol, /) -> bool:
        """Return whether every parameter of the optimizer is on the session's store."""

    def can_be_recorded(self, session: SessionProtocol, /) -> bool:
        """Return whether a generation can have the states of all parameters: others are added to the model."""

    def added_states(self, session: SessionProtocol, /) -> dict[str, dict[str, torch.Tensor]]:
        """Return the states in memory of parameters that were added to the session's model, by their names."""

    def projection_of(self, parameter: nn.Parameter, /) -> Projection | None:
        """Return how the gradient of the parameter's next step is projected while it is captured, if it is."""

    def backward_segment(self, parameter: nn.Parameter, addresses: tuple[int, int] | None, /) -> Segment | None:
        """Return the parameter's next update, of weights and a gradient at `addresses`; None if it is to wait.

        See `memascend.optim.in_backward.BackwardSteps`.
        """

    def prepare_in_backward(self, parameter: nn.Parameter, segment: Segment, /) -> None:
        """Complete the update, which is about to be started."""

    def measured_in_backward(
        self, parameter: nn.Parameter, projection: Projection, address: int, /
    ) -> MeasuredGradient | None:
        """Return the values that complete the update once a device has measured the gradient."""

    def applied_in_backward(self, parameter: nn.Parameter, segment: Segment, /) -> None:
        """Note that the update was taken."""

    def describe(self, session: SessionProtocol, /) -> dict[str, Any]:
        """Return the record of the optimizer, without tensors.

        Raises MemascendError where some of its parameters are not the model's.
        """
