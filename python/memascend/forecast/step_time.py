"""Time of an optimizer step, on a GPU or over ranks: the load of each resource, over its rate.

How well the resources overlap is not modelled. The slowest resource gives the least time of a step, and the sum of all
gives the time without any overlap. Only necessary work is counted, not the overhead of an implementation.

Rates are measured or asked for, never assumed. The benchmarks compare runs with this floor.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.hardware.gpu import Rate
    from memascend.layout.units import Unit
    from memascend.memory_plan.estimates import Shape

#: Resources of a step, by the name of their rate, in the order of the table.
RESOURCES = {
    "flops": "compute",
    "ssd": "SSD, read and written",
    "network": "network, in the busier direction",
    "h2d": "PCIe to the GPU",
    "d2h": "PCIe from the GPU",
    "dram": "host memory",
    "update": "updates by the processor",
}
#: Names of routed experts: as one tensor of three dimensions, or as modules.
_EXPERTS = re.compile(r"\.experts\b")


def step_flops(
    model: nn.Module,
    units: Sequence[Unit],
    shape: Shape,
    config: Any,
    seq_len: int,
    batch_size: int,
    passes: int,
    tiled: bool = False,
    kept: float = 0.0,
) -> int:
    """Floating-point operations of an optimizer step with recomputed layers, but for a share of them that is `kept`.

    With N weights that a token is multiplied with and T tokens, 2 N T forward and 4 N T backward, and 2 N T more for
    recomputation: 8 N T for layers and for a head whose loss is in pieces, 6 N T for another head (Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1). An embedding is looked up, not multiplied, unless it is the head too. Of experts, N
    counts only the ones that a token is sent to.

    Where MLPs are `tiled`, their forward pass is made a third time: 10 N T for them.

    To this the attention of each layer: 4 S A operations a token for the products of queries, keys and values with a
    context of S and heads' width A (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), half of it because the
    mask is causal, and 4 times for forward, backward and recomputation. A sliding window is not taken into account.
    """
    text = config.get_text_config()
    experts_per_token, experts = getattr(text, "num_experts_per_tok", None) or 1, 1
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(text, name, None) or experts
    share = min(1.0, experts_per_token / experts)
    head = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[operator]
    looked_up = {
        module.weight for module in model.modules() if isinstance(module, nn.Embedding) and module.weight is not head
    }
    # Weights that a token is multiplied with, by whether products are made again in the backward pass.
    multiplied = {True: 0.0, False: 0.0}
    for unit in units:
        for place in unit.places:
            if len(place.shape) > 1 and place.parameter not in looked_up:
                again = unit.repeated or unit.is_head or unit.is_experts
                multiplied[again] += place.numel * (share if _EXPERTS.search(place.name) else 1)
    tokens, layers = seq_len * batch_size * passes, sum(unit.repeated for unit in units)
    attention = (4 - kept) * 2 * seq_len * shape.queries * layers
    of_layers = multiplied[True] - sum(p.numel for unit in units if unit.is_head for p in unit.places)
    remade = 2 * max(0.0, of_layers - layers * shape.attention_weights) if tiled else 0.0
    remade -= 2 * kept * of_layers
    return int(tokens * (8 * multiplied[True] + remade + 6 * multiplied[False] + attention))


def step_time(amounts: Mapping[str, int], rates: Mapping[str, Rate], tokens: int) -> dict[str, Any]:
    """Return the time of a step of `tokens` tokens.

    Args:
        amounts: operations ("flops") and bytes (other keys of `RESOURCES`) of a step.
        rates: of the same keys; a resource without one is left out.
        tokens: of all passes of the step.

    Returns:
        `resources`, a list of `resource`, `name`, `amount`, `per_second`, `seconds`, `source`; `bound_by` and `next`,
        the names of the slowest and the second, and `times_the_next`, the ratio of their seconds (null where there is
        no second); `floor_seconds`, where everything overlaps; `sum_seconds`, where nothing does;
        `tokens_per_second_at_most`.
    """
    seconds = {key: amounts[key] / rates[key].per_second for key in RESOURCES if key in rates and key in amounts}
    resources = [
        {
            "resource": key,
            "name": name,
            "amount": amounts[key],
            "per_second": rates[key].per_second,
            "seconds": seconds[key],
            "source": rates[key].source,
        }
        for key, name in RESOURCES.items()
        if key in seconds
    ]
    slowest, second, *_ = [*sorted(seconds, key=lambda key: -seconds[key]), None]
    return {
        "resources": resources,
        "bound_by": RESOURCES[slowest],
        "next": None if second is None else RESOURCES[second],
        "times_the_next": None if second is None else seconds[slowest] / seconds[second],
        "floor_seconds": seconds[slowest],
        "sum_seconds": sum(seconds.values()),
        "tokens_per_second_at_most": tokens / seconds[slowest],
    }
