"""Several processes that a launcher has started and that train the same offloaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.errors import MemascendError

if TYPE_CHECKING:
    from memascend.session.session import Session


def check_processes(session: Session, processes: int, group_maker: str) -> None:
    """Raise MemascendError where so many processes would not train one model.

    `group_maker` names, in words, the code that initialises the group of torch.distributed.
    """
    ranks = session.membership.size
    if ranks != processes:
        raise MemascendError(
            f"{processes} processes train together, and the store of the model is divided over {ranks}: make "
            f"{group_maker} first, which initialises their group, and then call memascend.offload(model, "
            "store='/nvme{rank}', ...) without process_group"
        )
    session.refuse_trained_outside()
