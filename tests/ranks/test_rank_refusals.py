"""Features missing over ranks are refused, with a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rank_programs

if TYPE_CHECKING:
    from pathlib import Path

#: The text of each error, by the attempt in `rank_programs.refusals`.
SAID = {
    "update": "use update='forward'",
    "gradients": "use gradients='auto'",
    "fused_loss": "use fused_loss=False",
    "auto": "use a size such as '8GiB'",
    "host_memory_max": "use host_memory alone",
    "volumes": "could be a location for each rank or volumes of every rank: give a list for each rank",
    "too few": "store has entries for 1 ranks, of which there are 2",
    "device on": "use directories on filesystems, or durability='none'",
    "weights": "the model of rank 1 has other weights than that of rank 0, first embedding.weight",
    "model": "the ranks have other models",
    "frozen": "use frozen='store'",
    "no store": "holds no store that was kept",
    "parameters beside": "add adapters before memascend.offload",
    "DDP": "DistributedDataParallel cannot divide or copy an offloaded model",
    "FSDP": "fully_shard cannot divide or copy an offloaded model",
    "FSDP 1": "FullyShardedDataParallel cannot divide or copy an offloaded model",
    "a part": "call the model, or use torch.no_grad()",
    "added": "training layers.0.added.weight, which is not on the store, is not possible",
    "write": "write to weights before memascend.offload",
    "storage": "is on SSD, divided over ranks: its storage asks for its address",
    "set_host_memory": "give host_memory when it is offloaded or resumed",
    "gradient": "clip with optimizer.clip_grad_norm_(...)",
    "zeros": "use zero_grad(set_to_none=True)",
    "assigned gradient": "leave gradients to backward()",
    "in parts": "use torch.utils.checkpoint with use_reentrant=False",
    "experts": "memascend.apollo_groups(model, experts=False)",
    "load_state_dict": "rank 1 loads other states or options of the optimizer than rank 0",
}


def test_what_is_not_done_says_what_to_do(tmp_path: Path) -> None:
    results = rank_programs.run("refusals", 2, tmp_path)
    for told in results:
        assert told.keys() == SAID.keys()
        unlike = {name: text for name, text in told.items() if SAID[name] not in text}
        assert unlike == {}
