"""The binding of parameters to the model's modules: which object, class and version each has there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from memascend.autograd.proxies import OffloadedParameter, ResidentParameter
from memascend.layout.units import absent_like

if TYPE_CHECKING:
    from memascend.layout.units import ParameterEntry, Unit


def materialise(model: nn.Module, units: list[Unit]) -> None:
    """Replace the meta parameters by CPU parameters that show NaN and occupy one element; tied ones stay tied."""
    places = {place.parameter: place for unit in units for place in unit.places}
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in fresh:
                place = places.get(parameter)
                absent = place.binding.absent if place else absent_like(parameter.shape, parameter.dtype)
                fresh[parameter] = nn.Parameter(absent, requires_grad=parameter.requires_grad)
                if place:
                    place.binding.parameter = fresh[parameter]
            module._parameters[name] = fresh[parameter]


def make_proxy(place: ParameterEntry) -> None:
    """Have a parameter be a proxy from now on, whenever its values are not in memory."""
    kind = type(place.parameter)
    place.binding.absent_class = OffloadedParameter
    # A program's own kind of parameter has its own class while its values are in memory.
    place.binding.resident_class = ResidentParameter if kind in (nn.Parameter, OffloadedParameter) else kind
    place.binding.unbind()


def outdate_graphs(place: ParameterEntry) -> None:
    """Note that the values of a parameter were replaced: graphs made before are out of date."""
    place.binding.version += 1
