"""Weights that autocast converts: PyTorch keeps each converted weight until the outermost autocast block ends.

Two uses of a weight in one block then share a conversion, and their gradients are added in the lower precision. The
conversions of a streamed model would take the memory of half the model, so they are dropped when a unit's use ends. A
second use in the same block, whose gradient would have other bits, is refused.
"""

from __future__ import annotations

import torch
from torch import nn

from memascend.common.graphs import in_backward
from memascend.errors import MemascendError


class CastWeights:
    """Which modules of a model have had their weights converted in the present autocast block."""

    def __init__(self, device_type: str) -> None:
        """Watch autocast of devices of this type."""
        self._device_type = device_type
        self._used: set[nn.Module] = set()
        #: A weight of one element. Its conversion is the same object as long as the block lasts.
        self._probe = nn.Parameter(torch.zeros(1, 1, device=device_type))
        self._conversion: object = None

    def use(self, module: nn.Module) -> None:
        """Note that `module` is about to run.

        Raises MemascendError if it has run in this autocast block before, with weights that are converted and trained.
        """
        if not self._shares() or not _is_cast(module):
            return
        conversion = self._convert()
        if conversion is not self._conversion:  # another block
            self._conversion = conversion
            self._used.clear()
        if module in self._used:
            raise MemascendError(
                f"a {type(module).__name__} is used twice in one autocast block, in which PyTorch adds up the "
                "gradients of both uses in the lower precision: use torch.autocast(..., cache_enabled=False), a block "
                "of its own for each forward pass, or a model in bfloat16 without autocast"
            )
        self._used.add(module)

    def forget(self) -> None:
        """Drop the conversions that PyTorch keeps."""
        if torch.is_autocast_enabled(self._device_type):
            shared = self._shares()
            same = shared and self._convert() is self._conversion
            torch.clear_autocast_cache()
            if same:
                self._conversion = self._convert()

    def _shares(self) -> bool:
        """Return whether a conversion made now is used again: not in backward passes, which recompute layers."""
        return (
            torch.is_autocast_enabled(self._device_type)
            and torch.is_autocast_cache_enabled()
            and torch.is_grad_enabled()
            and not in_backward()
        )

    def _convert(self) -> object:
        """Return the autograd node of the probe's conversion."""
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: self._probe):
            product = torch.mm(self._probe, self._probe)
        assert product.grad_fn is not None
        return product.grad_fn.next_functions[0][0]


def _is_cast(module: nn.Module) -> bool:
    """Return whether autocast converts weights of a module that are trained."""
    return any(
        parameter.requires_grad and parameter.dtype == torch.float32 and parameter.ndim > 1
        for inner in module.modules()
        if not isinstance(inner, nn.Embedding | nn.EmbeddingBag)
        for parameter in inner._parameters.values()
        if parameter is not None
    )
