"""Host memory and SSD traffic of ZeRO-Infinity, by the formulas of its own source.

`beside_it` puts the formulas together for a model; every other function is pure: element counts in, bytes out.
DeepSpeed's files are of release 0.19.8, on one device, with parameters and optimizer on NVMe and `max_in_cpu: 0`.

The papers: Rajbhandari et al. 2021, "ZeRO-Infinity" (arXiv 2104.07857); Liaw and Chen 2025, "MemAscend: System Memory
Optimization for SSD-Offloaded LLM Fine-Tuning" (arXiv 2505.23254), which measures its waste.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit

#: `offload_param`: defaults of `buffer_count` and `buffer_size` (runtime/zero/offload_config.py).
PARAMETER_BUFFERS = 5
PARAMETER_BUFFER_ELEMENTS = 100_000_000
#: `offload_optimizer`: default of `buffer_count` (runtime/zero/offload_config.py): Adam's
#: parameter, gradient and moments.
OPTIMIZER_BUFFERS = 4
#: Default of `sub_group_size` (runtime/zero/config.py).
SUB_GROUP_ELEMENTS = 1_000_000_000
#: `MIN_AIO_BYTES` and `AIO_ALIGNED_BYTES` (runtime/swap_tensor/utils.py).
SWAPPABLE_BYTES = 1 << 20
ALIGNED_BYTES = 1024
#: Masters, moments and the gradients that the optimizer reads are fp32.
MASTER_BYTES = 4


def aligned_numel(numel: int, itemsize: int) -> int:
    """Return the elements of a swap buffer for `numel` elements.

    `_io_aligned_numel` in runtime/swap_tensor/partitioned_param_swapper.py, with `intra_op_parallelism` 1.
    """
    multiple = ALIGNED_BYTES // itemsize
    return -(-numel // multiple) * multiple


def is_swapped(numel: int, itemsize: int) -> bool:
    """Return whether a parameter goes through the pool at all; smaller ones stay in memory.

    `swappable_tensor` in runtime/swap_tensor/partitioned_param_swapper.py.
    """
    return numel * itemsize >= SWAPPABLE_BYTES


def in_flight_slots(outer: Iterable[int], layers: Iterable[Sequence[int]], itemsize: int) -> int:
    """Return the slots for every parameter outside the layers and one layer, which are in flight at once.

    `outer` are the element counts of the embedding, the head and their like, `layers` the counts of each layer. A slot
    holds one parameter, whatever its size (`_allocate_and_return_buffers_for_swap_in` in
    runtime/swap_tensor/partitioned_param_swapper.py). The count that MemAscend's authors assume was deduced: with it
    the slots of Llama 3.1 8B and Qwen2.5 7B, 14B and 32B are 72.7% empty on average, the waste for which their paper is
    cited.
    """
    slots = sum(is_swapped(numel, itemsize) for numel in outer)
    return slots + max((sum(is_swapped(numel, itemsize) for numel in layer) for layer in layers), default=0)


def parameter_pool_bytes(largest_numel: int, slots: int, itemsize: int) -> int:
    """Return the bytes of the parameter pool: `slots` buffers, each as large as the largest parameter.

    `_configure_aio` in runtime/swap_tensor/partitioned_param_swapper.py allocates
    `buffer_count * aligned(buffer_size)` elements in one tensor; a parameter larger than `buffer_size` does
    not fit.
    """
    return slots * aligned_numel(largest_numel, itemsize) * itemsize


def default_parameter_pool_bytes(largest_numel: int, itemsize: int) -> int:
    """Return the parameter pool's bytes with DeepSpeed's defaults, `buffer_size` raised where the largest needs it.

    `buffer_count: 5` and `buffer_size: 1e8` (`DeepSpeedZeroOffloadParamConfig` in runtime/zero/offload_config.py).
    """
    return parameter_pool_bytes(max(largest_numel, PARAMETER_BUFFER_ELEMENTS), PARAMETER_BUFFERS, itemsize)


def pool_waste(numels: Sequence[int]) -> float:
    """Share of a pool that is empty while it holds `numels`, each in a slot as large as the largest.

    The internal fragmentation that MemAscend (arXiv 2505.23254, abstract) argues with.
    """
    return 1 - sum(numels) / (len(numels) * max(numels)) if numels else 0.0


def gradient_buffer_bytes(numel: int, itemsize: int) -> int:
    """Return the bytes of the flat gradient buffer: every gradient of the partition, in host memory throughout.

    `grad_partitions_flat_buffer` in runtime/zero/stage3.py, of dtype `gradient_accumulation_dtype`: the model's unless
    the configuration says otherwise (`get_data_types` in runtime/engine.py).
    """
    return numel * itemsize


def sub_groups(numels: Iterable[int], sub_group_size: int = SUB_GROUP_ELEMENTS) -> list[list[int]]:
    """Return the parameters of each sub-group: taken in order, closed when they reach `sub_group_size`.

    `_create_fp16_sub_groups` in runtime/zero/stage3.py, for the parameters of one parameter group.
    """
    groups: list[list[int]] = []
    elements = sub_group_size
    for numel in numels:
        if not groups or elements >= sub_group_size:
            groups.append([])
            elements = 0
        groups[-1].append(numel)
        elements += numel
    return groups


def largest_sub_group(numels: Iterable[int], sub_group_size: int = SUB_GROUP_ELEMENTS) -> list[int]:
    """Return the parameters of the largest sub-group, the first of them if there are several."""
    return max(sub_groups(numels, sub_group_size), key=sum, default=[])


def optimizer_swap_bytes(sub_group_numel: int, buffers: int = OPTIMIZER_BUFFERS, *, pipelined: bool = False) -> int:
    """Return the bytes of the optimizer's swap buffers: each holds one fp32 state of the largest sub-group.

    `SwapBufferManager(num_elems=largest_numel, count=buffer_count)` in runtime/swap_tensor/optimizer_utils.py. With
    `pipeline_read` or `pipeline_write` two sub-groups are under way (`ASYNC_SWAP_IN` and `ASYNC_SWAP_OUT` in
    runtime/swap_tensor/pipelined_optimizer_swapper.py), each with `buffers` buffers, and `buffer_count` has to be twice
    as high.
    """
    return aligned_numel(sub_group_numel, MASTER_BYTES) * MASTER_BYTES * buffers * (2 if pipelined else 1)


def write_back_bytes(sub_group: Iterable[int], itemsize: int) -> int:
    """Return the buffer bytes through which updated weights of the largest sub-group go back to the SSD.

    `reserve_partitioned_swap_space` in runtime/swap_tensor/partitioned_param_swapper.py.
    """
    return sum(aligned_numel(numel, itemsize) * itemsize for numel in sub_group)


def overflow_check_bytes(numel: int, itemsize: int) -> int:
    """Return the temporaries' bytes of the overflow check over the flat gradient buffer, run in float16 training.

    `has_overflow` in runtime/zero/stage3.py calls `torch.isinf(buffer).any()`. PyTorch computes isinf as
    `self.abs() == inf`: a copy of the buffer and a mask of a byte an element. In fp32 that is 1.25 times the buffer.
    `_overflow_check_and_loss_scale_update` leaves the check out for other dtypes than float16.
    """
    return numel * itemsize + numel


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes that PyTorch pins for a request: the next power of two.

    aten/src/ATen/core/CachingHostAllocator.h. It holds for the flat gradient buffer, which DeepSpeed pins through
    PyTorch on CUDA; its swap buffers are whole pages since they are allocated by its own library
    (`new_cpu_locked_tensor`).
    """
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def ssd_traffic_bytes(numel: int, itemsize: int, grad_accum: int = 1) -> tuple[int, int]:
    """Return the bytes that one optimizer step reads from and writes to the SSD.

    Read: the weights in every forward and every backward pass, then master, two moments and gradient in fp32. Written:
    those four again, and the weights. Gradients are added up in the flat buffer, so that they move once a step. With
    bf16 weights that is 20 + 18 = 38 bytes a parameter; benches/results has 20.0 + 18.0 for 1.6B parameters.
    """
    states = 4 * MASTER_BYTES
    return numel * (2 * itemsize * grad_accum + states), numel * (states + itemsize)


def beside_it(units: Sequence[Unit], ours: int, smallest: int, work: Workload) -> dict[str, Any]:
    """Describe ZeRO-Infinity's memory and traffic for these units, beside the host memory of our plans in bytes.

    Over ranks, each holds and moves its part of every parameter.
    """

    def parts_of(unit: Unit) -> list[int]:
        return [-(-place.numel // work.ranks) for place in unit.places]

    itemsize = max(place.dtype.itemsize for unit in units for place in unit.places)
    numels = [numel for unit in units for numel in parts_of(unit)]
    total, largest = sum(numels), max(numels)
    parameters = sum(place.numel for unit in units for place in unit.places)
    outer = [numel for unit in units if not unit.repeated for numel in parts_of(unit)]
    layers = [parts_of(unit) for unit in units if unit.repeated]
    slots = max(1, in_flight_slots(outer, layers, itemsize))
    fullest = max(layers, key=lambda layer: sum(is_swapped(n, itemsize) for n in layer), default=[])
    in_flight = [numel for numel in [*outer, *fullest] if is_swapped(numel, itemsize)]
    sub_group = largest_sub_group(numels)
    read, written = ssd_traffic_bytes(total, itemsize, work.grad_accum)
    gradients = gradient_buffer_bytes(total, itemsize)
    held = {
        "parameter_pool_bytes": parameter_pool_bytes(largest, slots, itemsize),
        "gradient_buffer_bytes": gradients,
        "optimizer_swap_bytes": optimizer_swap_bytes(sum(sub_group)),
        "write_back_bytes": write_back_bytes(sub_group, itemsize),
    }
    peak = sum(held.values())
    return {
        "slots": slots,
        "slot_bytes": parameter_pool_bytes(largest, 1, itemsize),
        **held,
        "peak_bytes": peak,
        "peak_pinned_bytes": peak - gradients + pinned_bytes(gradients),
        "parameter_pool_waste": round(pool_waste(in_flight), 4),
        "default_parameter_pool_bytes": default_parameter_pool_bytes(largest, itemsize),
        "overflow_check_float16_bytes": overflow_check_bytes(total, 2),
        "ssd_read_bytes": read,
        "ssd_written_bytes": written,
        "ssd_bytes_per_parameter": round((read + written) / parameters, 2),
        "ratio": round(peak / ours, 2),
        "ratio_to_smallest": round(peak / smallest, 2),
    }
