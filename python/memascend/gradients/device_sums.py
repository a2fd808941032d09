"""Sums of gradients that stay on the device from one backward pass to the next.

A byte of a weight on the device saves two copies for each micro-batch; a byte of a sum saves a copy in all passes but
one, and the host's addition. So sums get the memory that weights leave. Otherwise the host adds. Copying a sum up to
add it there would add half to the traffic towards the device, the busier direction, which weights take. Where more
passes follow than predicted, the host adds them; where a step comes earlier, all sums leave at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from memascend.layout.units import ParameterEntry


class DeviceSums:
    """Adds up gradients of accumulated backward passes on the device, as far as the plan has room for the sums there.

    Which pass is the last before a step is not known: the step before predicts it. With that pass the sum leaves the
    device, while the pass goes on; a prediction that is wrong costs time alone.
    """

    def __init__(self, room: int = 0) -> None:
        """Keep no more than about `room` bytes of sums on the device."""
        self.room = room
        self.nbytes = 0
        self._sums: dict[ParameterEntry, torch.Tensor] = {}
        #: For each parameter: the passes summed in its gradient, and the passes summed in the gradient before it.
        self._passes: dict[ParameterEntry, int] = {}
        self._expected: dict[ParameterEntry, int] = {}

    def __contains__(self, place: ParameterEntry) -> bool:
        """Return whether the gradient of a parameter is here, and nowhere else."""
        return place in self._sums

    def add(self, place: ParameterEntry, gradient: torch.Tensor, accumulate: bool) -> tuple[torch.Tensor, bool] | None:
        """Take a new gradient, to be added to the one so far if `accumulate`; None if the sum stays.

        Otherwise returns the gradient that is to leave the device, (elements of the parameter,), and whether it is to
        be added to the stored one. The gradient is contiguous, and written to by later passes. The sum has the bits of
        autograd's.
        """
        earlier, gradient = self.take(place), gradient.view(-1)
        if not accumulate:
            self._expected[place] = self._passes.get(place, 1)
            self._passes[place] = 0
        elif earlier is None:
            self._passes[place] += 1
            return gradient, True
        else:
            gradient = earlier.add_(gradient)
        self._passes[place] += 1
        if self._passes[place] < self._expected[place] and self.nbytes + gradient.nbytes <= self.room:
            self._sums[place] = gradient
            self.nbytes += gradient.nbytes
            return None
        return gradient, False

    def take(self, place: ParameterEntry) -> torch.Tensor | None:
        """Return the gradient of a parameter, if it is here, and forget it."""
        gradient = self._sums.pop(place, None)
        if gradient is not None:
            self.nbytes -= gradient.nbytes
        return gradient

    def places(self) -> list[ParameterEntry]:
        """Return the parameters whose gradients are here, in the order in which they were made."""
        return list(self._sums)
