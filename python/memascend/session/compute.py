"""Where and how an offloaded model computes: its device, that device's memory, and where activations are kept."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from memascend.common.sizes import format_least, format_size, parse_size
from memascend.errors import BudgetError
from memascend.hardware.cuda import open_device
from memascend.layout.units import CPU
from memascend.memory_plan.device import make_device_plan
from memascend.memory_plan.estimates import waiting_inputs
from memascend.memory_plan.experts import partition_by_plan
from memascend.options import pair_of, parse_durability

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from memascend.hardware.cuda import ComputeDevice
    from memascend.layout.units import Unit
    from memascend.memory_plan.device import DevicePlan
    from memascend.memory_plan.lines import Inputs
    from memascend.options import Activations, Experts, OffloadOptions

_log = logging.getLogger("memascend")


@dataclass(frozen=True)
class ComputeOptions:
    """Where and how an offloaded model computes."""

    #: With the device opened, and its memory in bytes.
    options: OffloadOptions
    #: None is the CPU.
    device: ComputeDevice | None

    @staticmethod
    def of(options: OffloadOptions) -> ComputeOptions:
        """Open the device, and check the options that depend on it.

        Raises ValueError for values that contradict each other, DeviceError where the device cannot be used.
        """
        device = open_device(options.device)
        if device is not None and options.gradients != "auto":
            raise ValueError(
                f"gradients={options.gradients!r} works only where the model computes on the CPU: a device's gradients "
                "are put aside as they are made; leave it out, or train in bfloat16 there"
            )
        if device is None and options.device_memory is not None:
            raise ValueError("device_memory needs a CUDA device: give device='cuda' too")
        budget = None if options.device_memory is None else parse_size(options.device_memory)
        return ComputeOptions(replace(options, device=cast("Any", device), device_memory=budget), device)

    @property
    def activations(self) -> Activations:
        """Where the inputs of recomputed layers wait: on the CPU they are in host memory anyway."""
        return self.options.activations or ("recompute" if self.uploads else "host")

    @property
    def device_memory(self) -> int | None:
        """Ceiling of the device memory of memascend and PyTorch, in bytes. None is all that is free."""
        return cast("int | None", self.options.device_memory)

    def with_device_memory(self, budget: int) -> ComputeOptions:
        """Return the same with another ceiling of device memory."""
        return ComputeOptions(replace(self.options, device_memory=budget), self.device)

    @property
    def uploads(self) -> bool:
        """Whether weights go on from host memory to a device."""
        return self.device is not None

    def experts(self, over_ranks: bool, from_files: bool = False) -> Experts:
        """Return how experts are read, over ranks or from the model's own files.

        Raises ValueError where they cannot be read one by one.
        """
        experts = self.options.experts
        for refused, where, instead in (
            (self.uploads, "on a device", "compute on the CPU"),
            (over_ranks, "over ranks", "use one process"),
            (from_files, "with frozen='files'", "use frozen='store'"),
        ):
            if refused and experts == "pieces":
                raise ValueError(
                    f"experts='pieces' does not work yet {where}: {instead}, or leave it out, with which the experts "
                    "are read with their layer"
                )
        return experts

    def lends(self, automatic: bool, over_ranks: bool) -> bool:
        """Return whether activations may have memory of states, with an automatic budget or over ranks.

        Raises ValueError where they are to have it and cannot.
        """
        allocator = self.options.tuning.get("allocator", "auto")
        pinned = allocator in ("cuda", "registered")
        for cannot, where, instead in (
            (self.uploads, "on a device", "its activations are in device memory"),
            (over_ranks, "over ranks", "use one process"),
            (automatic, "with host_memory='auto'", "give host_memory a size"),
            (not self.options.recompute, "with recompute=False", "all activations are kept then"),
            (pinned, f"with allocator={allocator!r}", "take 'locked', since this memory is pinned as one"),
        ):
            if cannot and self.options.spare_memory == "activations":
                raise ValueError(f"spare_memory='activations' does not work {where}: {instead}, or leave it out")
            if cannot:
                return False
        if self.options.spare_memory == "auto":
            # States that stay are not written where not every step is durable: lending them would wear the drives.
            return parse_durability(self.options.durability) in (None, 1)
        return self.options.spare_memory == "activations"

    def partition(
        self, model: nn.Module, fused_loss: bool | str | None, over_ranks: bool, from_files: bool = False
    ) -> list[Unit]:
        """Divide a model into units, for ranks or to be read from the model's own files.

        `fused_loss` and errors are as in `memascend.layout.units.partition`; `experts` raises too.
        """
        experts = self.experts(over_ranks, from_files)
        computed = self.torch_device, fused_loss, self.options.gradients, self.uploads
        return partition_by_plan(model, *computed, experts, self.options.update)

    @property
    def torch_device(self) -> torch.device:
        """The device as a `torch.device`."""
        return CPU if self.device is None else self.device.torch_device

    def _tokens(self) -> tuple[int | None, int | None]:
        """Return the tokens of a pass and those that a layer computes at once, or None of both if they are unknown."""
        if self.options.batch_tokens is None:
            return None, None
        sequences, length = pair_of(self.options.batch_tokens)
        return sequences * length, length * min(sequences, self.options.micro_batch_size or sequences)

    def inputs(self, units: Sequence[Unit], config: Any) -> Inputs | None:
        """Return the inputs of a device's layers that wait in host memory, or None if none do or their size is unknown.

        On the CPU they share what gradients leave: the tokens of a batch are not known there.
        """
        tokens, layer_tokens = self._tokens()
        if not self.uploads or tokens is None or self.activations != "host" or not self.options.recompute:
            return None
        return waiting_inputs(units, config, tokens, layer_tokens)

    def plan(self, device: ComputeDevice, units: Sequence[Unit], config: Any, leaving_bytes: int) -> DevicePlan:
        """Plan the memory of `device`. `leaving_bytes` in use now will be free.

        Raises BudgetError where the device has less memory free than the plan takes.
        """
        tokens, layer_tokens = self._tokens()
        free, total = device.memory()
        free += leaving_bytes
        plan = make_device_plan(
            units,
            self.device_memory,
            tokens=tokens,
            layer_tokens=layer_tokens,
            tile_tokens=self.options.tile_tokens,
            config=config,
            activations=self.activations if self.options.recompute else "keep",
            free=free,
            segments=device.segments,
        )
        _log.info("device memory:\n%s", plan.table())
        if plan.budget > free:
            raise BudgetError(
                f"device_memory is {format_size(plan.budget)}, but {self.torch_device} has only {format_size(free)} "
                f"free of {format_size(total)}: another process, or other tensors of this one, hold the rest; free it "
                f"(see nvidia-smi) or lower device_memory (the least is {format_least(plan.smallest_bytes)})",
                plan.smallest_bytes,
            )
        return plan
