"""Room for gradients of weights that were frozen when the model was offloaded, and are trained later.

The plan of host memory counts none for them, so that adapters over a frozen model cost no more than they need. A large
gradient passes through staging chunk by chunk, as any other. Small tensors of a layer have a buffer for all their
gradients, which the plan has to spare: memory that the budget leaves beside the arena, or staging buffers beyond those
that transfers need. A resumed run plans all that was trained last (`StoreTensor.trained_later`), so gradients
allowed here have to fit in such a plan too.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend._memascend import STAGING_RESERVE
from memascend.common.sizes import format_size
from memascend.errors import BudgetError, MemascendError
from memascend.layout.tables import MIB
from memascend.layout.units import DTYPE_NAMES
from memascend.memory_plan.beside import later_line
from memascend.memory_plan.host import make_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memascend._memascend import Runtime
    from memascend.layout.units import StoreTensor, Unit
    from memascend.memory_plan.lines import Plan
    from memascend.options import OffloadOptions

#: A budget that holds everything.
_WHOLE = 1 << 62
_REMEDY = "have it trainable when the model is opened, and freeze it after that (requires_grad_(False)) until it trains"


class PlannedSession(Protocol):
    """The session whose plan has to spare the room."""

    runtime: Runtime
    units: list[Unit]
    #: Where it computes, and the ranks that its store is divided over.
    site: Any
    membership: Any

    @property
    def plan(self) -> Plan:
        """The present plan of host memory."""

    @property
    def options(self) -> OffloadOptions:
        """The options that it was opened with."""

    def plan_changed(self) -> None:
        """Note that a consumer of host memory has been added."""


class LaterRoom:
    """Makes room for the gradients of one session's tensors that were frozen when it was opened."""

    def __init__(self, session: PlannedSession) -> None:
        """Make room in the plan of `session`."""
        self._session_reference = weakref.ref(session)
        #: Tensors that were found to fit, and have no gradient yet.
        self._checked: set[StoreTensor] = set()

    @property
    def _session(self) -> PlannedSession:
        session = self._session_reference()
        assert session is not None, "the session outlives its gradients"
        return session

    def check(self, tensors: Iterable[StoreTensor]) -> None:
        """Check that all `tensors` can be trained together, before anything is allocated.

        Raises MemascendError for one that cannot be trained later, BudgetError, which names the budget that fits, where
        the plan has no room.
        """
        asked = [tensor for tensor in tensors if not tensor.trained and tensor.gradient is None]
        if self._checked.issuperset(asked):
            return
        for tensor in asked:
            self._refuse(tensor)
        if not self._fits(self._session.plan, asked):
            raise self._too_small(asked)
        self._checked.update(asked)

    def allocate(self, tensor: StoreTensor) -> int:
        """Make room for the gradient of a tensor, and return its number in the store.

        Raises MemascendError and BudgetError as `check` does, StoreError where the drives have no room.
        """
        self.check([tensor])
        session = self._session
        dtype, kept = DTYPE_NAMES[tensor.dtype], DTYPE_NAMES[tensor.gradient_dtype]
        if tensor.packed:
            number = self._allocate_pack(tensor, dtype, kept)
        else:
            number = session.runtime.gradients.create_gradient(
                tensor.unit.index, f"{tensor.name}.grad", dtype, tensor.numel, kept
            )
        tensor.trained_later = True
        return number

    def _allocate_pack(self, tensor: StoreTensor, dtype: str, kept: str) -> int:
        session, plan = self._session, self._session.plan
        runtime, numel = session.runtime, tensor.numel
        if plan.total + plan.freed_blocks_bytes + tensor.gradient_nbytes <= plan.budget:
            number = runtime.gradients.create_later_gradient(dtype, numel, kept, True)
            tensor.gradient_outside = True
            plan.later = later_line(self._tensors())
            session.plan_changed()
        else:
            number = runtime.gradients.create_later_gradient(dtype, numel, kept, False)
            if number is None:  # Other gradients are in all staging buffers: they can wait on the drives.
                runtime.gradients.spill_gradients(0)
                number = runtime.gradients.create_later_gradient(dtype, numel, kept, False)
        if number is None:
            raise MemascendError(
                f"{tensor.places[0].name} begins to train while inputs of layers wait in memory for a backward pass, "
                "which leave no buffer for its gradient: call backward(), or let go of the loss, before it does"
            )
        return number

    def _refuse(self, tensor: StoreTensor) -> None:
        session, name = self._session, tensor.places[0].name
        told = f"{name} was frozen when the model was offloaded"
        if not tensor.unit.in_store:
            raise MemascendError(f"{told}, and {tensor.unit.read_only}")
        if session.site.uploads or session.membership.divides:
            where = "device memory" if session.site.uploads else "memory over ranks"
            raise MemascendError(f"{told}, so that the plan of {where} holds no room for its gradient: {_REMEDY}")
        if not session.plan.slots.count:
            raise MemascendError(
                f"{told}, as everything else was, so that the plan of host memory holds no room for updates: {_REMEDY}"
            )
        if tensor.dtype == torch.float16 and session.options.gradients == "bfloat16":
            raise MemascendError(f"{told}, and is in float16, for which gradients='bfloat16' is not: {_REMEDY}")

    # ---- room -------------------------------------------------------------------------------------------

    def _tensors(self) -> list[StoreTensor]:
        return [tensor for unit in self._session.units for tensor in unit.tensors]

    def _staged(self) -> list[StoreTensor]:
        """Return the tensors whose gradients lie in staging buffers."""
        later = [tensor for tensor in self._tensors() if tensor.trained_later and not tensor.trained]
        return [tensor for tensor in later if tensor.packed and not tensor.gradient_outside]

    def _fits(self, plan: Plan, asked: Sequence[StoreTensor]) -> bool:
        """Return whether a plan has room for the tensors that train later and for `asked`."""
        packs = [tensor for tensor in asked if tensor.packed]
        staged = len(self._staged()) if plan is self._session.plan else 0
        left = plan.left_bytes
        for tensor in packs:
            if tensor.gradient_nbytes <= left:
                left -= tensor.gradient_nbytes
            else:
                staged += 1
        # Where the budget may change, staging buffers beyond the least may have to go.
        buffers = plan.staging.count + (plan.staging_cache.count if plan.budget_max is None else 0)
        return staged <= buffers - STAGING_RESERVE and self._fits_resumed(plan.budget, asked)

    def _fits_resumed(self, budget: int, asked: Sequence[StoreTensor]) -> bool:
        """Return whether a run that is resumed with `budget` has room for all that is trained by then."""
        later = [*asked, *(tensor for tensor in self._tensors() if tensor.trained_later)]
        before = [tensor.trained for tensor in later]
        try:
            for tensor in later:
                tensor.trained = True
            self._plan(budget)
        except BudgetError:
            return False
        finally:
            for tensor, trained in zip(later, before, strict=True):
                tensor.trained = trained
        return True

    def _plan(self, budget: int) -> Plan:
        session, plan = self._session, self._session.plan
        most = None if plan.budget_max is None else max(plan.budget_max, budget)
        return make_plan(session.units, budget, most, plan.update, plan.on_device, plan.update_threads)

    def _too_small(self, asked: Sequence[StoreTensor]) -> BudgetError:
        """Return the error of a plan without room, with a budget that has room."""
        session = self._session
        every = [*asked, *self._staged()]
        fewest = session.plan.budget
        # Everything in memory, and the gradients beside it.
        most = max(fewest, self._plan(_WHOLE).total) + sum(tensor.gradient_nbytes for tensor in every)
        while most - fewest > max(most // 100, 1):
            middle = (fewest + most) // 2
            fewest, most = (fewest, middle) if self._fits(self._plan(middle), every) else (middle, most)
        mebibytes = -(-most // MIB)
        return BudgetError(
            f"{asked[0].places[0].name} was frozen when the model was offloaded, and "
            f"{format_size(session.plan.budget)} of host memory have no room left for the gradients of what trains "
            f"later: open the model with host_memory='{mebibytes}MiB', or {_REMEDY}",
            mebibytes * MIB,
        )
