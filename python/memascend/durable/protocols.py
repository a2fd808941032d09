"""What the durable rooms ask of a session and of an optimizer, which both live in rooms above."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from memascend._memascend import Projection, Runtime
    from memascend.common.timeline import Timeline
    from memascend.layout.units import Place, Unit
    from memascend.options import OffloadOptions
    from memascend.ranks.membership import Membership
    from memascend.residency.host import Streamer
    from memascend.residency.updates import Measured, Segment


class Session(Protocol):
    """The offloaded state of one model; see `memascend.offloading.session.Session`."""

    runtime: Runtime
    streamer: Streamer
    timeline: Timeline
    units: list[Unit]
    notices: list[str]
    options: OffloadOptions
    keep_store: bool | None
    membership: Membership | None

    def model(self) -> nn.Module | None:
        """Return the model, or None once it is gone."""

    @property
    def tracked(self) -> dict[str, Any]:
        """The objects whose states belong to every generation, by name. They live as long as the model does."""

    @property
    def places(self) -> Iterator[Place]:
        """The places of all parameters."""


class Optimizer(Protocol):
    """An optimizer of offloaded parameters; see `memascend.optim.base.OffloadedOptimizer`."""

    param_groups: list[dict[str, Any]]

    def trains_only(self, session: Session, /) -> bool:
        """Whether every parameter of the optimizer is one of the session's model."""

    def projection_of(self, parameter: nn.Parameter, /) -> Projection | None:
        """Return how the gradient of the parameter's next step is projected while it is captured, if it is."""

    def early_segment(self, parameter: nn.Parameter, addresses: tuple[int, int] | None, /) -> Segment | None:
        """Return the parameter's next update, of weights and a gradient at `addresses`; None if it is to wait.

        See `memascend.optim.early.EarlySteps`.
        """

    def prepare_early(self, parameter: nn.Parameter, segment: Segment, /) -> None:
        """Complete the update, which is about to be started."""

    def measured_early(self, parameter: nn.Parameter, projection: Projection, address: int, /) -> Measured | None:
        """Return what completes the update once a device has measured the gradient."""

    def took_early(self, parameter: nn.Parameter, segment: Segment, /) -> None:
        """Note that the update was taken."""

    def describe(self, session: Session, /) -> dict[str, Any]:
        """Return the record of the optimizer, without tensors.

        Raises MemascendError where some of its parameters are not the model's.
        """
