"""What every optimizer here shares: where states live, how a step reaches them, how they are saved."""

from __future__ import annotations

import copy
import math
import os
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from memascend import _memascend
from memascend._memascend import Rule
from memascend.common.interrupts import uninterrupted
from memascend.common.sizes import parse_size
from memascend.common.timeline import span
from memascend.durable import exact_json as plain
from memascend.errors import MemascendError
from memascend.layout.units import DTYPE_NAMES, Place, StoreTensor, Unit, lay_out
from memascend.offloading.native import OPTIONS, close_at_exit, open_runtime
from memascend.offloading.places import place_of
from memascend.offloading.session import Session
from memascend.optim.states import load_states, read_states
from memascend.optim.update import (
    add_segment,
    allocate_states,
    free_unused,
    missing_planes,
    rule_for,
)
from memascend.plan.host import make_states_plan
from memascend.residency.updates import Segment, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim.optimizer import ParamsT

    from memascend._memascend import StepScalars
    from memascend.offloading.native import StorePaths

#: What becomes of a step whose gradients are not all finite.
NONFINITE = ("propagate", "skip", "raise")
_SEEDS = 1 << 32


class OffloadedOptimizer(Optimizer):
    """An optimizer whose arithmetic is the same wherever its parameters and states live.

    - Parameters of an offloaded model: weights, masters, states and gradients are on SSD. `step` is deferred:
      the update of a unit runs when the unit is next fetched, so that it costs no pass of its own.
    - Ordinary parameters with `store`: masters and states are on SSD, weights and gradients where they are.
    - Ordinary parameters without `store`: everything in memory. The reference for exactness.

    A subclass names its algorithm and turns a group's options into the constants of a step; everything else is here.
    The arithmetic is in Rust (`kernels/rules/`).

    Options of all, beside those of the namesake in `torch.optim`:
        states: "float32", "bfloat16" (rounded stochastically) or "8bit" (bitsandbytes' dynamic map in blocks of 256;
            parameters below 64 KiB keep float32). A group may have its own.
        master: False lets bfloat16 weights do without an fp32 master: they are rounded stochastically. With True they
            have one, kept as the weight and the low half of the master (int16); float16 weights always have one beside
            them. A group may have its own.
        seed: of stochastic rounding, below 2^32. The same seed gives the same bits, with any number of threads.
        nonfinite: what `step` does where a gradient is infinite or NaN: "propagate" it as PyTorch does, "skip" the
            step (and count it in `skipped_steps`), or "raise" a MemascendError before anything has changed.
        store: directory, or several, for the states of ordinary parameters.
        host_memory: ceiling of the buffers that move those states (default: what they need).
        options: `engine`, `direct`, `allocator`, `huge_pages`, `compute_threads`, as in `memascend.offload`.

    `foreach`, `fused`, `capturable` and `differentiable` are taken for the namesakes' sake. Every step is fused
    already; the last two are refused, since updates run outside of autograd.

    Differences from `torch.optim`: `clip_grad_norm_` is a method and scales the gradient in fp32 inside
    the update; `step` consumes gradients kept on SSD, as if `zero_grad` followed at once.
    """

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
        unknown = options.keys() - OPTIONS
        if unknown:
            known = ", ".join(sorted(OPTIONS))
            raise TypeError(
                f"{type(self).__name__} has no option {', '.join(sorted(unknown))}; those of a store are {known}"
            )
        for name in ("capturable", "differentiable"):
            if defaults.get(name):
                raise ValueError(f"{name}=True is not supported: updates run outside of autograd and CUDA graphs")
        if defaults.get("fused") and defaults.get("foreach"):
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self._forget()
        self._store = store
        self._host_memory = host_memory
        self._options = options
        #: What becomes of a step whose gradients are not all finite; may be changed at any time.
        self.nonfinite = nonfinite
        defaults |= {"states": states, "master": bool(master), "seed": int(seed)}
        super().__init__(params, defaults)
        self._built = True
        self._prepare(self.param_groups)

    def _forget(self) -> None:
        self._store: StorePaths | None = None
        self._host_memory: str | int | None = None
        self._options: dict[str, Any] = {}
        self._host_places: dict[torch.nn.Parameter, Place] = {}
        self._stores: list[_HostStates] = []
        self._offloads: list[Session] = []
        self._numbers: dict[torch.nn.Parameter, int] = {}
        self._rules: dict[torch.nn.Parameter, Rule] = {}
        #: What the next step multiplies gradients by, of those that were clipped or unscaled.
        self._factors: dict[torch.nn.Parameter, tuple[_Seen, float]] = {}
        self._built = False
        self._closed = False
        #: Steps left out for a gradient that was not finite, with `nonfinite="skip"`.
        self.skipped_steps = 0
        self.nonfinite = "propagate"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs, of an optimizer in memory."""
        if self._stores or self._offloads:
            raise TypeError(f"{type(self).__name__} has states on SSD and cannot be copied: use state_dict()")
        return super().__getstate__() | {"nonfinite": self.nonfinite, "skipped_steps": self.skipped_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy."""
        self._forget()
        super().__setstate__(state)
        self._built = True
        self._prepare(self.param_groups)

    # ---- what a subclass says -----------------------------------------------------------------------------

    def _algorithm(self, group: dict[str, Any]) -> str:
        """Name the algorithm of a group, as `memascend._memascend.Rule` takes it."""
        raise NotImplementedError

    def _scalars(self, group: dict[str, Any], step: int, begins: bool, grad_scale: float, seed: int) -> StepScalars:
        """Return the constants of step number `step`, the first being 1, with a group's options.

        `begins` says that a state of the parameter is new, as all are in its first step.
        """
        raise NotImplementedError

    #: Options that `load_state_dict` leaves as they are.
    _own_options: tuple[str, ...] = ("params", "param_names", "states", "master")

    # ---- set-up -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in PyTorch, and make room for its states."""
        super().add_param_group(param_group)
        known = len(self._numbers)
        try:
            group = self.param_groups[-1]
            group["states"] = str(group["states"]).removeprefix("torch.")
            if not 0 <= int(group["seed"]) < _SEEDS:
                raise ValueError(f"Invalid seed: {group['seed']}: it must be from 0 to below 2^32")
            if self._built:
                self._prepare([group])
        except BaseException:
            self.param_groups.pop()
            self._numbers = dict(list(self._numbers.items())[:known])
            raise

    def _prepare(self, groups: Iterable[dict[str, Any]]) -> None:
        offloaded: defaultdict[Session, dict[StoreTensor, list[Rule]]] = defaultdict(dict)
        ordinary = []
        for group in groups:
            for parameter in group["params"]:
                self._numbers.setdefault(parameter, len(self._numbers))
                if not parameter.requires_grad:
                    continue  # its states wait until it has a gradient
                found = place_of(parameter)
                if found is None:
                    self._check_ordinary(parameter)
                    self._rule(group, parameter)
                    ordinary.append((group, parameter))
                    continue
                state, place = found
                if state.runtime.closed:
                    raise MemascendError(f"{place.name} belongs to a model that was closed")
                rule = self._rule(group, parameter)
                offloaded[state].setdefault(place.tensor, []).append(rule)
                if place.owner is None:
                    place.rule = rule
                elif place.owner() is None:  # of an optimizer that is no more
                    self._take_over(state, place, rule)
        for state, tensors in offloaded.items():
            self._prepare_offloaded(state, tensors)
        if self._store is not None and ordinary:
            self._put_on_store(ordinary)

    def _prepare_offloaded(self, state: Session, tensors: dict[StoreTensor, list[Rule]]) -> None:
        """Make room for the states and gradients of tensors of an offloaded model, all of it at once or none."""
        state.generations.settle()
        missing_states = missing = 0
        for tensor, rules in tensors.items():
            planes = {plane for rule in rules for plane in missing_planes(tensor, rule)}
            missing_states += sum(plane.bytes(tensor.numel) for plane in planes)
            # Known before training starts: gradients spill to the SSD too.
            missing += 0 if tensor.packed or tensor.gradient is not None else tensor.nbytes
        missing += missing_states
        runtime = state.runtime
        spares = missing_states
        spares += sum(runtime.spare_bytes(tensor.id) for tensor in tensors if tensor.id is not None)
        spares += sum(runtime.spare_bytes(kept.id) for tensor in tensors for kept in tensor.planes.values())
        two_slots = state.generations.decide(self, missing, spares)
        runtime.check_room(missing + (spares if two_slots else 0))
        for tensor, rules in tensors.items():
            state.gradients.allocate(tensor)
            for rule in rules:
                allocate_states(runtime, tensor, rule)
            if two_slots:
                assert tensor.id is not None
                for kept in [tensor.id, *(kept.id for kept in tensor.planes.values())]:
                    runtime.make_spare(kept)
        if state not in self._offloads:
            self._offloads.append(state)
        state.generations.join(self)

    def _check_ordinary(self, parameter: torch.nn.Parameter) -> None:
        if torch.is_complex(parameter):
            raise ValueError(
                f"{type(self).__name__} does not support complex parameters: pass torch.view_as_real(parameter)"
            )
        if parameter.dtype not in DTYPE_NAMES:
            name = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(f"cannot train a parameter of dtype {name}: convert it to bfloat16, float16 or float32")
        if parameter.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a parameter is on {parameter.device}: only those on the CPU or on CUDA are trained")

    def _put_on_store(self, parameters: list[tuple[dict[str, Any], torch.nn.Parameter]]) -> None:
        rules = {parameter: self._rule(group, parameter) for group, parameter in parameters}
        states = _HostStates(rules, self._directories(), self._host_memory, self._options)
        self._stores.append(states)
        self._host_places |= states.places

    def _directories(self) -> StorePaths:
        """Return the directories given, or one in each of them for parameters added later."""
        store = self._store
        assert store is not None
        if not self._stores:
            return store
        paths = [store] if isinstance(store, str | os.PathLike) else list(store)
        return [os.path.join(path, f"group{len(self._stores)}") for path in paths]

    def _rule(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> Rule:
        nbytes = parameter.numel() * parameter.element_size()
        return rule_for(self._algorithm(group), group["states"], parameter.dtype, nbytes, group["master"])

    # ---- step -------------------------------------------------------------------------------------------

    def _with_gradient(self) -> Iterable[tuple[dict[str, Any], torch.nn.Parameter]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter

    def unscaled_by_torch(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients `torch.amp.GradScaler` can unscale in place."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return [parameter for parameter in parameters if not self._unscaled_in_step(parameter)]

    def _unscaled_in_step(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient stays scaled until the update: it is on SSD, or PyTorch refuses to unscale it."""
        return parameter.dtype == torch.float16 or place_of(parameter) is not None

    def unscale_in_step(self, inv_scale: float) -> bool:
        """Have the next `step` multiply all other gradients by `inv_scale`, in fp32, and clip them so.

        Returns whether any of them is not finite. For `memascend.GradScaler`; `step` and `zero_grad` end it, and a new
        gradient is not one of them.
        """
        non_finite = False
        for _, parameter in self._with_gradient():
            if self._unscaled_in_step(parameter):
                self._capture(parameter)
                non_finite = self._squares(parameter)[1] or non_finite
                self._factors[parameter] = _Seen(parameter), inv_scale
        return non_finite

    def _factor(self, parameter: torch.nn.Parameter) -> float:
        """What the next step multiplies the gradient by: that of unscaling and clipping it, if it is still that one."""
        if parameter not in self._factors:
            return 1.0
        seen, factor = self._factors[parameter]
        same = seen.same(parameter)
        if same is None:
            raise RuntimeError(
                f"the gradient of {self._name(parameter)} was changed after it was clipped or unscaled: unscale and "
                "clip after the last backward pass of a step, with the optimizer's clip_grad_norm_"
            )
        return factor if same else 1.0

    def _name(self, parameter: torch.nn.Parameter) -> str:
        found = place_of(parameter)
        return f"parameter number {self._numbers.get(parameter, 0)}" if found is None else found[1].name

    def _capture(self, parameter: torch.nn.Parameter) -> None:
        """Take over a gradient that somebody put on an offloaded parameter."""
        found = place_of(parameter)
        if found is None:
            return
        state, place = found
        state.gradients.settle(place)
        if parameter.grad is not place.marker:
            assert parameter.grad is not None
            self._check_gradient(parameter, parameter.grad)
            state.gradients.capture(place, accumulate=False)
        elif not place.held:
            raise MemascendError(
                f"{place.name} was given back the stand-in of a gradient that a step or zero_grad has consumed: its "
                "values are gone"
            )

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale all gradients so that their 2-norm is at most `max_norm`, in the next `step`.

        Returns the norm before (0-dim float32): the square root of a fixed-order sum of squares in fp64, the
        same for offloaded and ordinary parameters. Not finite when a gradient overflowed.
        """
        total, finite = 0.0, True
        parameters = [parameter for _, parameter in self._with_gradient()]
        factors = {}
        for parameter in parameters:
            self._capture(parameter)
            factors[parameter] = self._factor(parameter)
            squares, non_finite = self._squares(parameter)
            total += squares * factors[parameter] ** 2
            finite = finite and not non_finite
        norm = math.sqrt(total) if finite else math.nan
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError("the norm of the gradients is not finite, so they cannot be clipped")
        scale = torch.tensor(max_norm, dtype=torch.float64) / (norm + 1e-6)
        coefficient = float(scale.clamp(max=1.0).to(torch.float32))
        self._factors = {parameter: (_Seen(parameter), coefficient * factors[parameter]) for parameter in parameters}
        return torch.tensor(norm, dtype=torch.float32)

    def _squares(self, parameter: torch.nn.Parameter) -> tuple[float, bool]:
        """Sum of squares of a gradient as it is kept, and whether it is not finite."""
        found = place_of(parameter)
        gradient = parameter.grad
        assert gradient is not None
        if found is not None and gradient is found[1].marker:
            found[0].gradients.finish(found[1])
            return found[1].sum_squares, found[1].non_finite
        gradient = self._usable(parameter, gradient)
        return _memascend.gradient_stats(DTYPE_NAMES[gradient.dtype], gradient.numel(), gradient.data_ptr())

    def _check_gradient(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients: use sparse=False")
        if gradient.shape != parameter.shape:
            raise RuntimeError(
                f"a gradient of shape {tuple(gradient.shape)} for a parameter of shape {tuple(parameter.shape)}"
            )
        if gradient.dtype != parameter.dtype or gradient.device != parameter.device:
            raise RuntimeError(
                f"a gradient in {gradient.dtype} on {gradient.device} for a parameter in {parameter.dtype} on "
                f"{parameter.device}: they must be alike"
            )

    def _usable(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient of its parameter's shape and dtype in one piece on the CPU, where the kernels are."""
        self._check_gradient(parameter, gradient)
        return gradient.detach().cpu().contiguous()

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update every parameter that has a gradient. On offloaded parameters the work is deferred.

        Whatever is refused is refused before anything has changed, and Ctrl-C waits until the step is complete.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with span("optimizer step"):
            self._step()
        return loss

    def _step(self) -> None:
        if self._closed:
            raise MemascendError(f"this {type(self).__name__} was closed: its states are gone")
        chosen = list(self._with_gradient())
        for group, parameter in chosen:
            found = place_of(parameter)
            if found is None:
                self._check_ordinary(parameter)
                assert parameter.grad is not None
                self._check_gradient(parameter, parameter.grad)
            else:
                self._capture(parameter)
                found[0].gradients.finish(found[1])
            self._check_rule(group, parameter)
        if self._leave_out(chosen):
            return
        for state in {found[0] for _, parameter in chosen if (found := place_of(parameter)) is not None}:
            state.generations.settle(self)
        self._make_room(chosen)
        work = [self._plan(group, parameter) for group, parameter in chosen]
        for state, unit in {(each.state, each.place.tensor.unit) for each in work if each.state and each.place}:
            state.streamer.let_go(unit)
        with uninterrupted():
            self._carry_out(work)

    def _check_rule(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> None:
        rule, known = self._rule(group, parameter), self._rules.get(parameter)
        if known in (None, rule) or "step" not in self.state.get(parameter, {}):
            return
        replaced = {plane.name for plane in rule.planes if plane not in known.planes}
        lost = [
            plane.name
            for plane in known.planes
            if plane.name in replaced or (plane.name.startswith("master") and plane not in rule.planes)
        ]
        if lost:
            raise MemascendError(
                f"states or master of a group, or the dtype of {self._name(parameter)}, changed after the first step, "
                f"which would lose {', '.join(lost)}: make a new optimizer and load the state_dict of this one"
            )

    def _leave_out(self, chosen: list[tuple[dict[str, Any], torch.nn.Parameter]]) -> bool:
        """Whether the user wants no step with such gradients."""
        if self.nonfinite == "propagate":
            return False
        bad = next((parameter for _, parameter in chosen if self._squares(parameter)[1]), None)
        if bad is None:
            return False
        if self.nonfinite == "raise":
            raise MemascendError(
                f"the gradient of {self._name(bad)} is not finite, and the optimizer's policy is nonfinite='raise': "
                "nothing has changed; zero_grad() discards the gradients"
            )
        self.skipped_steps += 1
        self._factors.clear()
        return True

    def _make_room(self, chosen: list[tuple[dict[str, Any], torch.nn.Parameter]]) -> None:
        """Make room for the states that a step needs, and take over what another optimizer or place has kept."""
        added = []
        for group, parameter in chosen:
            rule = self._rule(group, parameter)
            found = place_of(parameter)
            if found is not None:
                state, place = found
                if place.owner is None or place.owner() is not self:
                    if place.owner is not None and "step" in self.state.get(parameter, {}):
                        raise MemascendError(
                            f"{place.name} has been trained by another optimizer since: its states on the store are "
                            "that one's; load a state_dict to go on with this one"
                        )
                    self._take_over(state, place, rule)
                place.rule = rule
                if missing_planes(place.tensor, rule) or state not in self._offloads:
                    self._prepare_offloaded(state, {place.tensor: [rule]})
                self._adopt(parameter, place)
            elif self._store is not None:
                place = self._host_places.get(parameter)
                if place is None:
                    added.append((group, parameter))  # frozen when the optimizer was made
                    continue
                if place.shape != parameter.shape or place.dtype != parameter.dtype:
                    raise RuntimeError(
                        f"{self._name(parameter)} was {place.dtype} of shape {tuple(place.shape)} when its states were "
                        f"made, and is now {parameter.dtype} of shape {tuple(parameter.shape)}"
                    )
                allocate_states(self._states_of(parameter).runtime, place.tensor, rule)
            else:
                self._make_in_memory(parameter, rule)
        if added:
            self._put_on_store(added)

    def _take_over(self, state: Session, place: Place, rule: Rule) -> None:
        """Have a parameter's states begin anew here; what other optimizers kept of it is of no use any more."""
        state.generations.settle()  # which has them still
        place.owner, place.rule = weakref.ref(self), rule
        place.made.clear()
        unit = place.tensor.unit
        state.streamer.apply_update(unit)
        state.runtime.wait_unit(unit.index)
        free_unused(state.runtime, place.tensor)

    def _adopt(self, parameter: torch.nn.Parameter, place: Place) -> None:
        """Write the states of a parameter to the store that had them in memory before it was offloaded."""
        kept, rule = self.state.get(parameter, {}), self._rules.get(parameter)
        if rule is not None and parameter in self._host_places and not place.made:
            raise MemascendError(
                f"{place.name} was offloaded while its states were on the optimizer's own store: make a new optimizer "
                "and load the state_dict that this one gave before"
            )
        if rule is None or not any(plane.name in kept for plane in rule.planes):
            return
        assert place.rule is not None
        self._load_states(parameter, place.rule, read_states(parameter, rule, kept, None))
        self.state[parameter] = {"step": kept["step"]}

    def _make_in_memory(self, parameter: torch.nn.Parameter, rule: Rule) -> None:
        """Make the states that are missing, and see that the others are what the kernels take them for."""
        state = self.state[parameter]
        for plane in rule.planes:
            dtype = getattr(torch, plane.dtype)
            shape = (plane.bytes(parameter.numel()),) if dtype == torch.uint8 else parameter.shape
            kept = state.get(plane.name)
            if kept is None:
                state[plane.name] = torch.zeros(shape, dtype=dtype)
            elif kept.dtype != dtype or kept.shape != shape or not kept.is_contiguous() or kept.device.type != "cpu":
                raise RuntimeError(
                    f"{plane.name} of {self._name(parameter)}, of shape {tuple(parameter.shape)}, is {kept.dtype} of "
                    f"shape {tuple(kept.shape)}: one of them was replaced; states are replaced by load_state_dict"
                )

    def _plan(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> _Work:
        """Everything about a parameter's step, without a trace of it yet."""
        rule = self._rule(group, parameter)
        found = place_of(parameter)
        place = self._host_places.get(parameter) if found is None else found[1]
        step = self.state.get(parameter, {}).get("step", 0) + 1
        if place is None:
            known = self._rules.get(parameter, rule)
            fresh = [step == 1 or plane not in known.planes for plane in rule.planes]
        else:
            fresh = [plane not in place.made for plane in rule.planes]
        # Two parameters must not round by the same random numbers.
        seed = int(group["seed"]) << 32 | self._numbers[parameter]
        scalars = self._scalars(group, step, step == 1 or any(fresh), self._factor(parameter), seed)
        weight = gradient = None
        if found is None:
            assert parameter.grad is not None
            weight, gradient = parameter.detach().cpu().contiguous(), self._usable(parameter, parameter.grad)
        return _Work(parameter, rule, step, fresh, scalars, found and found[0], place, weight, gradient)

    def _carry_out(self, work: list[_Work]) -> None:
        deferred: defaultdict[Session, dict[StoreTensor, Update]] = defaultdict(dict)
        on_ssd: defaultdict[_HostStates, dict[StoreTensor, Update]] = defaultdict(dict)
        in_host = [each for each in work if each.state is None]
        for each in work:
            if each.state is not None:
                each.add_to(deferred[each.state])
        for state, updates in deferred.items():
            by_unit: defaultdict[Unit, list[Update]] = defaultdict(list)
            for update in updates.values():
                by_unit[update.tensor.unit].append(update)
            for unit, of_unit in by_unit.items():
                state.streamer.defer(unit, of_unit)
        for each in work:
            self._rules[each.parameter] = each.rule
            if each.state is None:
                # The kernels write behind autograd's back: tell it, so that it refuses graphs made before the step.
                torch.autograd.graph.increment_version(each.parameter)
                continue
            assert each.place is not None
            each.place.version += 1
            each.place.held = False
            each.parameter.grad = None
            each.count(self.state)
        self._factors.clear()
        for each in in_host:
            each.count(self.state)
            if each.place is not None:
                each.add_to(on_ssd[self._states_of(each.parameter)])
                continue
            assert each.weight is not None and each.gradient is not None
            kept = self.state[each.parameter]
            _memascend.step_host(
                each.rule,
                each.parameter.numel(),
                each.weight.data_ptr(),
                [kept[plane.name].data_ptr() for plane in each.rule.planes],
                each.gradient.data_ptr(),
                each.scalars,
                torch.get_num_threads(),
            )
            each.copy_back()
        for states, updates in on_ssd.items():
            states.step(list(updates.values()))
        for each in in_host:
            if each.place is not None:
                each.copy_back()
        for state in deferred:
            state.generations.stepped(self)
            state.streamer.start_next_pass()

    def _states_of(self, parameter: torch.nn.Parameter) -> _HostStates:
        return next(states for states in self._stores if parameter in states.places)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, those kept on SSD too."""
        for _, parameter in self._with_gradient():
            found = place_of(parameter)
            if found is not None:
                found[0].gradients.clear(found[1])
        self._factors.clear()
        super().zero_grad(set_to_none)

    def flush(self) -> None:
        """Apply deferred updates now, and wait until they are on the store's drives."""
        for state in self._offloads:
            if not state.runtime.closed:
                state.flush()
        for states in self._stores:
            if not states.runtime.closed:
                states.runtime.wait_unit(states.unit.index)

    # ---- state ------------------------------------------------------------------------------------------

    def location(self, parameter: torch.nn.Parameter) -> tuple[_memascend.Runtime, Place] | None:
        """Return the store that keeps a parameter's states and its place there; None for states in memory."""
        found = place_of(parameter)
        if found is not None:
            return found[0].runtime, found[1]
        place = self._host_places.get(parameter)
        if place is None:
            return None
        return self._states_of(parameter).runtime, place

    def state_dict(self) -> dict[str, Any]:
        """Return the states in PyTorch's format, to be saved by `torch.save` or loaded by a namesake in `torch.optim`.

        Per parameter: `step` (0-dim float32) and the algorithm's states, of the parameter's shape: float32, or bfloat16
        where they are kept so; those of 8 bits become float32, and the same 8 bits again when loaded. Beside them
        `master` (float32) of float16 weights, and `master_low` (int16) of bfloat16 weights: master bits =
        (weight bits << 16) + sign-extended low half.

        States on SSD are copied piece by piece into nameless files beside the store and shown from there, so that they
        take as much room on the drive as they have and host memory only as cache. `torch.load(..., mmap=True)` gives
        tensors of the same kind, from which `load_state_dict` reads one parameter at a time.
        """
        self.flush()
        kept = self.state
        full: defaultdict[Any, Any] = defaultdict(dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                if "step" in kept.get(parameter, {}):
                    rule = self._rules.get(parameter) or self._rule(group, parameter)
                    full[parameter] = read_states(parameter, rule, kept[parameter], self.location(parameter))
        self.state = full
        try:
            return super().state_dict()
        finally:
            self.state = kept

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over states in PyTorch's format: ours, or those of the namesake in `torch.optim` over the same groups.

        Options of the groups are taken over too, but for `states` and `master`: what is loaded is converted.

        Raises ValueError when groups or shapes do not match, before anything has changed.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved_groups]:
            raise ValueError("the loaded state dict has parameter groups of other sizes than this optimizer")
        pairs = [
            (group, parameter, state_dict["state"].get(key) or {})
            for group, saved in zip(groups, saved_groups, strict=True)
            for key, parameter in zip(saved["params"], group["params"], strict=True)
        ]
        for _, parameter, states in pairs:
            _check_saved(parameter, states)
        self.flush()
        for group, saved in zip(groups, saved_groups, strict=True):
            options = {name: value for name, value in saved.items() if name not in self._own_options}
            group.update(copy.deepcopy(options))
        for group, parameter, states in pairs:
            self._load(group, parameter, states)
        for state in self._offloads:
            state.generations.changed()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load(self, group: dict[str, Any], parameter: torch.nn.Parameter, saved: dict[str, Any]) -> None:
        self.state.pop(parameter, None)
        self._rules.pop(parameter, None)
        found = place_of(parameter)
        place = self._host_places.get(parameter) if found is None else found[1]
        step, rule = _step_of(saved), self._rule(group, parameter)
        if found is not None:
            self._take_over(*found, rule)
        elif place is not None:
            place.made.clear()
        # Without states it begins anew with its next gradient: whatever is on the SSD counts no more.
        if not step:
            return
        if found is not None:
            self._prepare_offloaded(found[0], {found[1].tensor: [rule]})
        elif self._store is not None:
            if place is None:
                self._put_on_store([(group, parameter)])
            else:
                allocate_states(self._states_of(parameter).runtime, place.tensor, rule)
        self._rules[parameter] = rule
        self.state[parameter] = {"step": step} | self._load_states(parameter, rule, saved)

    def _load_states(self, parameter: torch.nn.Parameter, rule: Rule, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Take over states for which there is room; returns those that are kept in memory."""
        location = self.location(parameter)
        loaded = load_states(parameter, rule, saved, location)
        if location is not None:
            location[1].made.update(rule.planes)
        return loaded

    def trains_only(self, state: Session) -> bool:
        """Whether every parameter is of the model `state`."""
        known = {id(place.parameter) for place in state.places}
        return all(id(parameter) in known for group in self.param_groups for parameter in group["params"])

    def describe(self, state: Session) -> dict[str, Any]:
        """Return what a store keeps of the optimizer: names of parameters instead of parameters, and no tensors.

        Raises MemascendError where parameters are not all of the model `state`.
        """
        if not self.trains_only(state):
            raise MemascendError(
                f"{type(self).__name__} also trains parameters that are not of the offloaded model, so that a step of "
                "all of them cannot be made durable in its store: use an optimizer for each, or durability='none'"
            )
        places = {id(place.parameter): place for place in state.places}
        groups, states, numbers = [], {}, {}
        for group in self.param_groups:
            names = []
            for parameter in group["params"]:
                place = places[id(parameter)]
                names.append(place.name)
                rule, owner = self._rules.get(parameter), place.owner
                mine = owner is not None and owner() is self
                numbers[place.name] = self._numbers[parameter]
                if mine and rule is not None and "step" in self.state.get(parameter, {}):
                    made = [plane.name for plane in place.made]
                    states[place.name] = [self.state[parameter]["step"], rule.arguments, made]
            options = {name: value for name, value in group.items() if name != "params"}
            groups.append(plain.encode(options, "a group's options") | {"params": names})
        return {
            "class": type(self).__name__,
            "defaults": plain.encode(self.defaults, "the defaults"),
            "groups": groups,
            "states": states,
            "numbers": numbers,
            "nonfinite": self.nonfinite,
            "skipped_steps": self.skipped_steps,
        }

    def take_up(self, described: dict[str, Any]) -> None:
        """Go on as the optimizer that `describe` tells of, over the same parameters; their states are in place."""
        self.defaults.update(described["defaults"])
        self._numbers = {}
        self.skipped_steps = described["skipped_steps"]
        for group in self.param_groups:
            for parameter in group["params"]:
                found = place_of(parameter)
                assert found is not None
                place = found[1]
                self._numbers[parameter] = described["numbers"][place.name]
                found[0].generations.join(self)
                if place.name not in described["states"]:
                    continue
                step, arguments, made = described["states"][place.name]
                rule = Rule(*arguments)
                self._rules[parameter] = place.rule = rule
                place.owner = weakref.ref(self)
                place.made = {plane for plane in rule.planes if plane.name in made}
                self.state[parameter] = {"step": step}

    def save_checkpoint(self, tag: str, *, keep_last: int | None = None) -> None:
        """Keep the present state under a name; see `memascend.save_checkpoint`."""
        if len(self._offloads) != 1:
            raise MemascendError("save_checkpoint is for an optimizer of one offloaded model: use state_dict()")
        self._offloads[0].save_checkpoint(tag, keep_last)

    def close(self, failed: bool = False) -> None:
        """Remove the store of ordinary parameters' states, if there is one."""
        self._closed = self._closed or bool(self._stores)
        # Those of parameters added later lie inside the first one's directory.
        for states in reversed(self._stores):
            states.close()


def _step_of(saved: dict[str, Any]) -> int:
    """Steps that a parameter has taken; `torch.optim.SGD` does not count them, but its momentum tells of the first."""
    if saved.get("step") is not None:
        return int(saved["step"])
    return 1 if any(value is not None for value in saved.values()) else 0


def _check_saved(parameter: torch.nn.Parameter, saved: dict[str, Any]) -> None:
    """Raise ValueError unless everything in a parameter's saved states can be loaded."""
    for name, value in saved.items():
        if name == "step" or value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} of the loaded state dict is a {type(value).__name__}, not a tensor")
        if value.shape != parameter.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
    _step_of(saved)


class _Seen:
    """Which gradient a parameter had, and in what condition."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        found = place_of(parameter)
        gradient = parameter.grad
        assert gradient is not None
        self._kept = None if found is None else (found[1].captured, found[1].added)
        self._gradient = weakref.ref(gradient)
        self._version = gradient._version

    def same(self, parameter: torch.nn.Parameter) -> bool | None:
        """Whether the parameter has that gradient still; None if the gradient was changed since."""
        now = _Seen(parameter)
        if self._kept is None or now._kept is None:
            if self._gradient() is not parameter.grad:
                return False
            return True if self._version == now._version else None
        if self._kept[0] != now._kept[0]:
            return False
        return True if self._kept == now._kept else None


@dataclass(slots=True)
class _Work:
    """The step of one parameter, ready to be carried out."""

    parameter: torch.nn.Parameter
    rule: Rule
    step: int
    fresh: list[bool]
    scalars: StepScalars
    #: The model that the parameter belongs to, if it is offloaded.
    state: Session | None
    #: Where its states are on a store.
    place: Place | None
    #: Of an ordinary parameter; contiguous and on the CPU, so perhaps a copy.
    weight: torch.Tensor | None
    gradient: torch.Tensor | None

    def add_to(self, updates: dict[StoreTensor, Update]) -> None:
        """Add the parameter to what is done to its tensor on a store."""
        assert self.place is not None
        host = None
        if self.weight is not None and self.gradient is not None:
            host = self.weight.data_ptr(), self.gradient.data_ptr()
        place = self.place
        segment = Segment(place.start, place.numel, self.rule, self.scalars, self.fresh, host)
        add_segment(updates, place, segment, captured=host is None)

    def count(self, states: defaultdict[torch.nn.Parameter, dict[str, Any]]) -> None:
        """Note that the step was taken."""
        states[self.parameter]["step"] = self.step
        if self.place is not None:
            self.place.made.update(self.rule.planes)

    def copy_back(self) -> None:
        """Write updated weights to a parameter that is not contiguous, or not on the CPU."""
        if self.weight is not None and self.weight.data_ptr() != self.parameter.data_ptr():
            self.parameter.detach().copy_(self.weight)


class _HostStates:
    """The states of ordinary parameters on SSD."""

    def __init__(
        self,
        rules: dict[torch.nn.Parameter, Rule],
        store: StorePaths,
        host_memory: Any,
        options: dict[str, Any],
    ) -> None:
        self.unit = Unit("parameters", repeated=False)
        lay_out(self.unit, ((f"parameter{index}", parameter) for index, parameter in enumerate(rules)))
        self.places = {place.parameter: place for place in self.unit.places}
        plan = make_states_plan(self.unit, None if host_memory is None else parse_size(host_memory))
        self.runtime = open_runtime(plan, store, options)
        try:
            self.unit.index = self.runtime.add_unit()
            wanted = {(place.tensor, plane) for p, place in self.places.items() for plane in rules[p].planes}
            self.runtime.check_room(sum(plane.bytes(tensor.numel) for tensor, plane in wanted))
            for parameter, place in self.places.items():
                allocate_states(self.runtime, place.tensor, rules[parameter])
        except BaseException:
            self.runtime.close(keep=False)
            raise

        close_at_exit(self)

    def close(self, failed: bool = False) -> None:
        self.runtime.close(keep=False)

    def step(self, updates: list[Update]) -> None:
        ticket = self.runtime.fetch(self.unit.index, [], None, updates)
        for update in updates:
            update.started()
        ticket.wait()
        self.runtime.wait_unit(self.unit.index)
