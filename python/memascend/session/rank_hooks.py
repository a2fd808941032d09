"""Attaching a session whose store is divided over ranks: backward passes that all ranks complete together."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from memascend.common.graphs import in_backward
from memascend.errors import MemascendError
from memascend.gradients.reduce import ReducedGradients
from memascend.session.module_hooks import Hooks
from memascend.session.rank_checks import refuse_wrappers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from memascend.layout.units import Unit
    from memascend.session.session import Session


def hooks_for(session: Session) -> Hooks:
    """Return the hooks that attach a session to its model."""
    return RankHooks(session) if session.membership.divides else Hooks(session)


class RankHooks(Hooks):
    """The hooks of a session of one rank."""

    def attach(self) -> None:
        """Install the hooks."""
        super().attach()
        refuse_wrappers()

    def _whole(self, model: nn.Module, original: Callable) -> Callable:
        session, gradients = self.session, self.session.gradients
        assert isinstance(gradients, ReducedGradients)
        run = super()._whole(model, original)

        @wraps(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                session.refuse_trained_outside()
            gradients.complete()
            result = run(*args, **kwargs)
            leaves = pytree.tree_leaves(result)
            gradients.complete_after([v for v in leaves if isinstance(v, torch.Tensor) and v.requires_grad])
            return result

        return forward

    def _streamed(self, module: nn.Module, needed: list[Unit], recompute: bool, original: Callable) -> Callable:
        run = super()._streamed(module, needed, recompute, original)
        session = self.session

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not session.in_pass and torch.is_grad_enabled() and not in_backward():
                raise MemascendError(
                    f"a part of an offloaded model ({type(module).__name__}) was called by itself with gradients, "
                    "which ranks exchange by passes of the whole model: call the model, or use torch.no_grad()"
                )
            return run(*args, **kwargs)

        return forward
