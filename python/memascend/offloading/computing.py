"""Where and how an offloaded model computes: its device, that device's memory, and what becomes of activations."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.common.choices import GRADIENTS, POLICIES, UPDATES
from memascend.common.sizes import format_size, parse_size
from memascend.errors import BudgetError
from memascend.layout.units import CPU
from memascend.machine.cuda import ComputeDevice, open_device
from memascend.offloading.slices import check_micro_batch_size
from memascend.plan.device import make_device_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from memascend.layout.units import Unit
    from memascend.plan.device import DevicePlan

_log = logging.getLogger("memascend")


@dataclass(frozen=True, kw_only=True)
class Computing:
    """Where and how an offloaded model computes."""

    #: None is the CPU.
    device: ComputeDevice | None
    #: Ceiling of what memascend and PyTorch hold in device memory, in bytes. None is what is free.
    device_memory: int | None
    recompute: bool
    #: One of `POLICIES`.
    activations: str
    batch_tokens: int | tuple[int, int] | None
    #: Whether heads are tables, so that the loss is computed in pieces: True, False or "auto".
    fused_loss: bool | str = "auto"
    #: One of `GRADIENTS`.
    gradients: str = "auto"
    #: One of `UPDATES`.
    update: str = "forward"
    #: Sequences that a repeated layer computes at once, or None for the whole batch.
    micro_batch_size: int | None = None

    @staticmethod
    def of(
        device: str | torch.device | ComputeDevice | None,
        device_memory: str | int | None,
        recompute: bool,
        activations: str | None,
        batch_tokens: int | tuple[int, int] | None,
        fused_loss: bool | str = "auto",
        gradients: str = "auto",
        update: str = "forward",
        micro_batch_size: int | None = None,
    ) -> Computing:
        """Check the arguments of `memascend.offload` that have these names, and open the device.

        Raises ValueError for values that contradict each other, DeviceError where the device cannot be used.
        """
        if activations not in (None, *POLICIES):
            raise ValueError(f"activations={activations!r} is none of {', '.join(map(repr, POLICIES))}")
        if activations not in (None, "recompute") and not recompute:
            raise ValueError(
                f"activations={activations!r} is about the inputs of recomputed layers: leave recompute=True"
            )
        if batch_tokens is not None and min(_pair_of(batch_tokens)) < 1:
            raise ValueError(f"batch_tokens={batch_tokens}: a batch has one token or more")
        if fused_loss not in (True, False, "auto"):
            raise ValueError(f"fused_loss={fused_loss!r} is none of True, False and 'auto'")
        if gradients not in GRADIENTS:
            raise ValueError(f"gradients={gradients!r} is none of {', '.join(map(repr, GRADIENTS))}")
        check_micro_batch_size(micro_batch_size)
        opened = open_device(device)
        if opened is not None and gradients != "auto":
            raise ValueError(
                f"gradients={gradients!r} is of a model that computes on the CPU: a device's gradients are put aside "
                "as they are made; leave it out, or train in bfloat16 there"
            )
        if update not in UPDATES:
            raise ValueError(f"update={update!r} is none of {', '.join(map(repr, UPDATES))}")
        if opened is None and device_memory is not None:
            raise ValueError("device_memory is of a CUDA device: give device='cuda' too")
        return Computing(
            device=opened,
            device_memory=None if device_memory is None else parse_size(device_memory),
            recompute=recompute,
            # On the CPU inputs are in host memory anyway. A device has less room for them.
            activations=activations or ("host" if opened is None else "recompute"),
            batch_tokens=batch_tokens,
            fused_loss=fused_loss,
            gradients=gradients,
            update=update,
            micro_batch_size=micro_batch_size,
        )

    @property
    def uploads(self) -> bool:
        """Whether what is computed with goes on from host memory to a device."""
        return self.device is not None

    @property
    def torch_device(self) -> torch.device:
        """The device as a `torch.device`."""
        return CPU if self.device is None else self.device.torch_device

    def plan(self, units: Sequence[Unit], config: Any, leaving_bytes: int) -> DevicePlan | None:
        """Plan the device's memory, of which `leaving_bytes` are in use and free by then, or return None for the CPU.

        Raises BudgetError where the device has less memory free than the plan takes.
        """
        if self.device is None:
            return None
        tokens = layer_tokens = None
        if self.batch_tokens is not None:
            sequences, length = _pair_of(self.batch_tokens)
            tokens = sequences * length
            layer_tokens = length * min(sequences, self.micro_batch_size or sequences)
        free, total = self.device.memory()
        free += leaving_bytes
        plan = make_device_plan(
            units,
            self.device_memory,
            tokens=tokens,
            layer_tokens=layer_tokens,
            config=config,
            activations=self.activations if self.recompute else "keep",
            free=free,
            segments=self.device.segments,
        )
        _log.info("device memory:\n%s", plan.table())
        if plan.budget > free:
            raise BudgetError(
                f"device_memory is {format_size(plan.budget)}, but {self.torch_device} has only {format_size(free)} "
                f"free of {format_size(total)}: another process, or other tensors of this one, hold the rest; free it "
                f"(see nvidia-smi) or lower device_memory (the least is {format_size(plan.smallest_bytes)})",
                plan.smallest_bytes,
            )
        return plan


def _pair_of(batch_tokens: int | tuple[int, int]) -> tuple[int, int]:
    """Return sequences and their length; one number is taken for one sequence."""
    return (1, batch_tokens) if isinstance(batch_tokens, int) else batch_tokens
