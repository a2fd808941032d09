"""The base of every optimizer: parameter groups, and PyTorch's interface to steps and saved states."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from memascend.common.interrupts import uninterrupted
from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.layout.registry import ranks_of
from memascend.layout.units import raw_tensor_access
from memascend.optim import record
from memascend.optim.gradient_scaling import GradientFactors
from memascend.optim.in_backward import BackwardSteps
from memascend.optim.rules import Algorithm, rule_for
from memascend.optim.state_allocation import StateAllocation
from memascend.optim.state_backends import StateBackends
from memascend.optim.state_store import OptimizerStateStores
from memascend.optim.states import check_saved, saved_steps
from memascend.optim.step import NONFINITE, OptimizerStep
from memascend.options import tuning_of
from memascend.session.rank_checks import compare_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim.optimizer import ParamsT

    from memascend._memascend import Projection, Rule, Runtime, StepScalars
    from memascend.durability.protocols import SessionProtocol
    from memascend.layout.units import ParameterEntry
    from memascend.optim.state_backend import StateBackend
    from memascend.options import StorePaths
    from memascend.streaming.updates import MeasuredGradient, Segment

#: Seeds of stochastic rounding are below this: they are the upper half of a 64-bit seed.
_SEEDS = 1 << 32


class OffloadedOptimizer(Optimizer):
    """An optimizer whose arithmetic is the same wherever its parameters and states live.

    - Parameters of an offloaded model: weights, masters, states and gradients are on SSD. `step` is deferred: a unit is
      updated when it is next fetched, so that the update costs no pass of its own.
    - Ordinary parameters with `store`: masters and states are on SSD; weights and gradients stay in memory.
    - Ordinary parameters without `store`: everything is in memory. This is the reference for exactness.

    A subclass names its algorithm and turns a group's options into the constants of a step; everything else is here.
    The arithmetic is in Rust (`kernels/rules/`).

    Options of every subclass, beside those that it has in `torch.optim`:
        states: "float32", "bfloat16" (rounded stochastically) or "8bit" (bitsandbytes' dynamic map in blocks of 256;
            parameters below 64 KiB keep float32). A group may have its own.
        master: True keeps an fp32 master of each bfloat16 weight, as the weight and the low half of the master (int16).
            False keeps none: the weight is rounded stochastically. A float16 weight always has an fp32 master beside
            it. A group may have its own.
        seed: seed of stochastic rounding, below 2^32. The same seed gives the same bits, with any number of threads.
        nonfinite: the policy of `step` for a gradient that is infinite or NaN: "propagate" it as PyTorch does, "skip"
            the step (and count it in `skipped_steps`), or "raise" a MemascendError before anything has changed.
        store: directory, or several, for the states of ordinary parameters.
        host_memory: ceiling of the buffers that move those states (default: as much as they need).
        options: `engine`, `direct`, `allocator`, `huge_pages`, `compute_threads`, as in `memascend.offload`.

    `foreach`, `fused`, `capturable` and `differentiable` are accepted because `torch.optim` has them. Every step is
    fused; the last two are refused, since updates run outside of autograd.

    Differences from `torch.optim`: `clip_grad_norm_` is a method, and scales the gradient in fp32 inside the update;
    `step` consumes gradients kept on SSD: call `zero_grad` before the next backward pass, which else is refused.
    """

    #: Tells `memascend.autograd.proxies` that steps do not read parameters in memory.
    updates_on_store = True
    #: Options that `load_state_dict` leaves as they are.
    own_options: tuple[str, ...] = ("params", "param_names", "states", "master")

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        states: str | torch.dtype = "float32",
        master: bool = True,
        seed: int = 0,
        nonfinite: str = "propagate",
        store: StorePaths | None = None,
        host_memory: str | int | None = None,
        **options: Any,
    ) -> None:
        """Make room for the states of every parameter."""
        if nonfinite not in NONFINITE:
            raise ValueError(f"Invalid nonfinite value: {nonfinite!r}: it is one of {', '.join(NONFINITE)}")
        tuning = tuning_of(type(self).__name__, options, defaults)
        for name in ("capturable", "differentiable"):
            if defaults.get(name):
                raise ValueError(f"{name}=True is not supported: updates run outside of autograd and CUDA graphs")
        if defaults.get("fused") and defaults.get("foreach"):
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self._begin(None if store is None else OptimizerStateStores(store, host_memory, tuning))
        #: The policy for a step whose gradients are not all finite; may be changed at any time.
        self.nonfinite = nonfinite
        defaults |= {"states": states, "master": bool(master), "seed": int(seed)}
        super().__init__(params, defaults)
        self._built = True
        self._prepare(self.param_groups)

    def _begin(self, state_stores: OptimizerStateStores | None) -> None:
        """Set the attributes that come before the parameters, for a new optimizer as for a copy."""
        self._backends = StateBackends(self, state_stores)
        self._factors = GradientFactors()
        self._backward_steps = BackwardSteps(self._backends)
        self._built = False
        self._closed = False
        #: Steps left out for a gradient that was not finite, with `nonfinite="skip"`.
        self.skipped_steps = 0
        self.nonfinite = "propagate"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy. Raises TypeError if states are on SSD."""
        if self._backends.on_drives:
            raise TypeError(f"{type(self).__name__} has states on SSD and cannot be copied: use state_dict()")
        return super().__getstate__() | {"nonfinite": self.nonfinite, "skipped_steps": self.skipped_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become the copy that `state` describes."""
        self._begin(None)
        super().__setstate__(state)
        self._built = True
        self._prepare(self.param_groups)

    # ---- the algorithm, which a subclass gives ---------------------------------------------------

    def _algorithm(self, group: dict[str, Any]) -> str:
        """Name the algorithm of a group, as `memascend._memascend.Rule` takes it."""
        raise NotImplementedError

    def _scalars(self, group: dict[str, Any], step: int, begins: bool, grad_scale: float, seed: int) -> StepScalars:
        """Return the constants of step number `step`, the first being 1, with a group's options.

        `begins` says that a state of the parameter is new, as all are in its first step.
        """
        raise NotImplementedError

    def _request(self, group: dict[str, Any], backend: StateBackend, room: StateAllocation) -> None:
        """Ask for room for states of the algorithm beside the planes of a parameter's rule."""

    def _find_factors(self, group: dict[str, Any], backend: StateBackend, segment: Segment, grad_scale: float) -> None:
        """Give an update its factors, which depend on the whole gradient, multiplied by `grad_scale`.

        This is a part of the step: nothing is refused any more.
        """

    def _find_joined_factors(self, work: Sequence[tuple[dict[str, Any], StateBackend, Segment, float]]) -> None:
        """Find the factors of several updates together, where a store is divided over ranks; see `_find_factors`."""

    def _factor_options(self, group: dict[str, Any]) -> Any:
        """Return the options of a group that `_find_factors` reads."""
        return None

    def rule_of(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> Rule:
        """Return the kernels and states of the parameter's next step, with the options of `group`."""
        nbytes = parameter.numel() * parameter.element_size()
        return rule_for(self._algorithm(group), group["states"], parameter.dtype, nbytes, group["master"])

    def last_rule_of(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> Rule:
        """Return the kernels and states of the parameter's last step, or of the next one if it is the first."""
        return self._backends.rules.get(parameter) or self.rule_of(group, parameter)

    # ---- parameter groups ------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in PyTorch, and make room for its states."""
        super().add_param_group(param_group)
        numbers = dict(self._backends.numbers)
        try:
            group = self.param_groups[-1]
            group["states"] = str(group["states"]).removeprefix("torch.")
            if not 0 <= int(group["seed"]) < _SEEDS:
                raise ValueError(f"Invalid seed: {group['seed']}: it must be from 0 to below 2^32")
            if self._built:
                self._prepare([group])
                self._backward_steps.forget()
        except BaseException:
            self.param_groups.pop()
            self._backends.numbers = numbers
            raise

    def _prepare(self, groups: Iterable[dict[str, Any]]) -> None:
        """Number the parameters and make room for the states of those that are trained."""
        room = StateAllocation()
        for group in groups:
            for parameter in group["params"]:
                self._backends.numbers.setdefault(parameter, len(self._backends.numbers))
                # Room for the states of a frozen parameter is made when it has a gradient.
                if parameter.requires_grad:
                    backend = self._backends.of(parameter)
                    backend.check()
                    backend.prepare(self.rule_of(group, parameter), room)
                    self._request(group, backend, room)
        self._backends.make(room)
        self._backends.join_beside(self.param_groups)

    def _with_gradient(self) -> Iterable[tuple[dict[str, Any], torch.nn.Parameter]]:
        for session in self._backends.sessions:
            if not session.closed:
                session.gradients.complete()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter

    def _homes_with_gradient(self) -> list[StateBackend]:
        return [self._backends.of(parameter) for _, parameter in self._with_gradient()]

    # ---- step ------------------------------------------------------------------------------------

    def unscaled_by_torch(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients `torch.amp.GradScaler` can unscale in place."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return [parameter for parameter in parameters if not self._backends.of(parameter).unscaled_by_update]

    def unscale_in_step(self, inv_scale: float) -> bool:
        """Have the next `step` multiply all other gradients by `inv_scale`, in fp32.

        Returns whether one of them is not finite. `memascend.GradScaler` calls this. `clip_grad_norm_` takes the factor
        into account, `step` and `zero_grad` forget it, and a new gradient does not have it.
        """
        with self._turn("unscaling gradients"), raw_tensor_access():
            backends = [backend for backend in self._homes_with_gradient() if backend.unscaled_by_update]
            return self._factors.unscale(backends, inv_scale, self._backends.gradient_stats)

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale all gradients so that their 2-norm is at most `max_norm`, in the next `step`.

        Returns the norm before (0-dim float32): the square root of a fixed-order sum of squares in fp64, the
        same for offloaded and ordinary parameters. Not finite when a gradient overflowed.
        """
        with self._turn("clip_grad_norm_"), raw_tensor_access():
            backends = self._homes_with_gradient()
            norm = self._factors.clip(backends, max_norm, error_if_nonfinite, self._backends.gradient_stats)
        return torch.tensor(norm, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. On offloaded parameters the work is deferred.

        Returns the loss of `closure`, which is called first if given. Whatever is refused is refused before anything
        has changed, and signals' handlers, Ctrl-C's among them, wait until the step is complete. Raises MemascendError
        while another thread uses the model.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._turn("optimizer.step"), span("optimizer step"), raw_tensor_access():
            self._step()
        return loss

    def _turn(self, use: str) -> ExitStack:
        """Begin a use of the offloaded models, by this thread alone, until the end of a `with` block."""
        turns = ExitStack()
        for session in self._backends.joined:
            if not session.closed:
                turns.enter_context(session.turns.take(use))
        return turns

    def _step(self) -> None:
        if self._closed:
            raise MemascendError(f"this {type(self).__name__} was closed, and its states are gone: make a new one")
        step = OptimizerStep(
            self._backends, self._factors, self._algorithms, self._with_gradient(), self._backward_steps, self.nonfinite
        )
        if step.left_out():
            self.skipped_steps += 1
            self._factors.clear()
            return
        schedule = step.plan()
        with uninterrupted():
            step.carry_out(schedule)
            if step.takes_any:
                self._backward_steps.look_up(self.param_groups)

    @property
    def _algorithms(self) -> Algorithm:
        return Algorithm(
            self.rule_of,
            self._scalars,
            self._request,
            self._find_factors,
            self._find_joined_factors,
            self._factor_options,
        )

    def projection_of(self, parameter: torch.nn.Parameter) -> Projection | None:
        """Return how the gradient of the parameter's next step is projected while it is captured, if it is."""
        return None

    def backward_segment(self, parameter: torch.nn.Parameter, addresses: tuple[int, int] | None) -> Segment | None:
        """Return the parameter's next update, of weights and a gradient at `addresses`; None if it waits for `step`.

        Without addresses, the update is given weights and gradient piece by piece.
        """
        if self._closed or self.nonfinite != "propagate":
            return None
        return self._backward_steps.segment(self._algorithms, parameter, addresses)

    def prepare_in_backward(self, parameter: torch.nn.Parameter, segment: Segment) -> None:
        """Complete an update that `backward_segment` gave, which is about to be started."""
        self._backward_steps.prepare(self._algorithms, parameter, segment)

    def measured_in_backward(
        self, parameter: torch.nn.Parameter, projection: Projection, address: int
    ) -> MeasuredGradient | None:
        """Return the source of the factors of an update of `backward_segment`; it replaces `prepare_in_backward`.

        A device measures the gradient as `projection_of` says; the numbers are at `address` there.
        """
        return None

    def applied_in_backward(self, parameter: torch.nn.Parameter, segment: Segment) -> None:
        """Note that the backward pass has started the update that `backward_segment` gave."""
        self._backward_steps.take(self._algorithms, parameter, segment)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, those kept on SSD too.

        Raises MemascendError, before anything has changed, where the backward pass has applied one already.
        """
        self._backward_steps.check_complete([])
        with self._turn("zero_grad"), raw_tensor_access():
            for backend in self._homes_with_gradient():
                backend.clear_gradient(set_to_none)
        self._factors.clear()
        with raw_tensor_access() if set_to_none else nullcontext():
            super().zero_grad(set_to_none)

    def flush(self) -> None:
        """Apply deferred updates now, and wait until they are on the store's drives."""
        self._backends.flush()

    # ---- saved states ----------------------------------------------------------------------------

    def location(self, parameter: torch.nn.Parameter) -> tuple[Runtime, ParameterEntry] | None:
        """Return the store that keeps a parameter's states and its entry there; None for states in memory."""
        return self._backends.of(parameter).location

    def state_dict(self) -> dict[str, Any]:
        """Return the states in PyTorch's format, for `torch.save` or the optimizer of the same name in `torch.optim`.

        Per parameter: `step` (0-dim float32) and the algorithm's states, of the parameter's shape. States are bfloat16
        where they are kept so, and float32 otherwise; 8-bit states are decoded, and loading them restores the same 8
        bits. Float16 weights also have `master` (float32), and bfloat16 weights `master_low` (int16): master bits =
        (weight bits << 16) + sign-extended low half.

        States on SSD are copied one at a time into unnamed files beside the store, which the tensors map: the copy
        takes as much room on the drive as the states, and host memory only as cache. `torch.load(..., mmap=True)` gives
        tensors of the same kind, from which `load_state_dict` reads one parameter at a time. Where the store is divided
        over ranks, each rank calls this and gets all states, for which its drive needs the room.
        """
        self.flush()
        own_state = self.state
        shown: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                backend = self._backends.of(parameter)
                if backend.has_stepped:
                    shown[parameter] = self._read(group, backend)
        self.state = shown
        try:
            return super().state_dict()
        finally:
            self.state = own_state

    def _read(self, group: dict[str, Any], backend: StateBackend) -> dict[str, Any]:
        """Return the states of one parameter as `state_dict` shows them."""
        return backend.read(self.last_rule_of(group, backend.parameter))

    def _check_saved(self, group: dict[str, Any], parameter: torch.nn.Parameter, saved: dict[str, Any]) -> None:
        """Raise ValueError unless everything in a parameter's saved states can be loaded."""
        check_saved(parameter, saved)

    def _load_states(
        self, group: dict[str, Any], backend: StateBackend, rule: Rule, saved: dict[str, Any], steps: int
    ) -> None:
        """Take over saved states, for which there is room."""
        backend.load(rule, saved, steps)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states in PyTorch's format: of this class, or of the class of the same name in `torch.optim`.

        Options of the groups are loaded too, except `states` and `master`: the loaded states are converted to them.

        Where the store is divided over ranks, each rank loads the same states, which is checked.

        Raises ValueError when groups or shapes do not match, before anything has changed.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replacement = pre_hook(self, state_dict)
            state_dict = state_dict if replacement is None else replacement
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved_groups]:
            raise ValueError("the loaded state dict has parameter groups of other sizes than this optimizer")
        saved_states = [
            (group, parameter, state_dict["state"].get(key) or {})
            for group, saved in zip(groups, saved_groups, strict=True)
            for key, parameter in zip(saved["params"], group["params"], strict=True)
        ]
        for group, parameter, states in saved_states:
            self._check_saved(group, parameter, states)
        ranks = ranks_of(parameter for _, parameter, _ in saved_states)
        if ranks is not None:
            compare_states(ranks, saved_groups, [states for _, _, states in saved_states])
        self.flush()
        for group, saved in zip(groups, saved_groups, strict=True):
            options = {name: value for name, value in saved.items() if name not in self.own_options}
            group.update(copy.deepcopy(options))
        self._backward_steps.forget()
        for group, parameter, states in saved_states:
            self._load(group, parameter, states)
        for session in self._backends.joined:
            session.commit_log.changed()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, group: dict[str, Any], parameter: torch.nn.Parameter, saved: dict[str, Any]) -> None:
        """Replace the states of one parameter. Without saved ones it begins anew with its next gradient."""
        self.state.pop(parameter, None)
        self._backends.rules.pop(parameter, None)
        backend, rule = self._backends.of(parameter), self.rule_of(group, parameter)
        backend.restart(rule)
        steps = saved_steps(saved)
        if steps:
            room = StateAllocation()
            backend.prepare(rule, room)
            self._request(group, backend, room)
            self._backends.make(room)
            self._load_states(group, backend, rule, saved, steps)

    # ---- durable steps ---------------------------------------------------------------------------

    def trains_only(self, session: SessionProtocol) -> bool:
        """Return whether every parameter is of the model that `session` offloads."""
        return record.trains_only(self, session)

    def can_be_recorded(self, session: SessionProtocol) -> bool:
        """Return whether a generation of `session` can have the states of all parameters.

        Those that are not on its store were added to its model since, and have states in memory.
        """
        return record.can_be_recorded(self, self._backends, session)

    def added_states(self, session: SessionProtocol) -> dict[str, dict[str, torch.Tensor]]:
        """Return the states in memory of parameters that were added to the model of `session`, by their names."""
        return record.added_states(self, session)

    def restore_added(self, described: dict[str, Any], states: dict[str, dict[str, torch.Tensor]]) -> None:
        """Go on with the `states` of added parameters, after `restore`."""
        record.restore_added(self, self._backends, described, states)

    def describe(self, session: SessionProtocol) -> dict[str, Any]:
        """Return the optimizer's record for a store: names of parameters instead of parameters, and no tensors.

        Raises MemascendError where parameters are not all of the model that `session` offloads.
        """
        if not self.can_be_recorded(session):
            raise MemascendError(
                f"{type(self).__name__} also trains parameters that are not of the offloaded model, so that a step of "
                "all of them cannot be made durable in its store: use an optimizer for each, or durability='none'"
            )
        described = record.describe(self, self._backends, session)
        return described | {"nonfinite": self.nonfinite, "skipped_steps": self.skipped_steps}

    def restore(self, described: dict[str, Any]) -> None:
        """Go on as the optimizer that `describe` described, over the same parameters; their states are in place."""
        self.skipped_steps = described["skipped_steps"]
        record.restore(self, self._backends, described)

    def save_checkpoint(self, tag: str, *, keep_last: int | None = None) -> None:
        """Keep the present state under a name; see `memascend.save_checkpoint`."""
        if len(self._backends.sessions) != 1:
            raise MemascendError("save_checkpoint is for an optimizer of one offloaded model: use state_dict()")
        self._backends.sessions[0].save_checkpoint(tag, keep_last)

    def close(self, failed: bool = False) -> None:
        """Remove the store of ordinary parameters' states, if there is one."""
        state_stores = self._backends.state_stores
        if state_stores is not None:
            self._closed = self._closed or state_stores.any_made
            state_stores.close()
