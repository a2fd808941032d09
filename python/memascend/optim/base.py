"""What every optimizer here shares: where states live, how a step reaches them, how they are saved."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from memascend import _memascend
from memascend.errors import MemascendError
from memascend.offload import OPTIONS, Offload, close_at_exit, open_runtime, place_of
from memascend.optim.states import load_states, read_states
from memascend.optim.update import Segment, Update, add_segment, allocate_states, missing_planes, rule_for
from memascend.plan import make_states_plan, parse_size
from memascend.units import DTYPE_NAMES, Place, StoreTensor, Unit, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim.optimizer import ParamsT

    from memascend._memascend import Rule, StepScalars
    from memascend.offload import StorePaths

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
        if not 0 <= int(seed) < _SEEDS:
            raise ValueError(f"Invalid seed: {seed}: it must be from 0 to below 2^32")
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
        defaults |= {"states": str(states).removeprefix("torch."), "master": bool(master), "seed": int(seed)}
        super().__init__(params, defaults)
        self._built = True
        self._prepare(self.param_groups)

    def _forget(self) -> None:
        self._store: StorePaths | None = None
        self._host_memory: str | int | None = None
        self._options: dict[str, Any] = {}
        self._host_places: dict[torch.nn.Parameter, Place] = {}
        self._stores: list[_HostStates] = []
        self._offloads: list[Offload] = []
        self._numbers: dict[torch.nn.Parameter, int] = {}
        self._rules: dict[torch.nn.Parameter, Rule] = {}
        self._grad_scale = 1.0
        self._inv_scale = 1.0
        self._built = False
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

    def _scalars(self, group: dict[str, Any], step: int, grad_scale: float, seed: int) -> StepScalars:
        """Return the constants of step number `step`, the first being 1, with a group's options."""
        raise NotImplementedError

    # ---- set-up -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in PyTorch, and make room for its states."""
        super().add_param_group(param_group)
        if self._built:
            try:
                self._prepare(self.param_groups[-1:])
            except BaseException:
                self.param_groups.pop()
                raise

    def _prepare(self, groups: Iterable[dict[str, Any]]) -> None:
        offloaded: defaultdict[Offload, dict[StoreTensor, list[Rule]]] = defaultdict(dict)
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
                offloaded[state].setdefault(place.tensor, []).append(self._rule(group, parameter))
        for state, tensors in offloaded.items():
            self._prepare_offloaded(state, tensors)
        if self._store is not None and ordinary:
            self._put_on_store(ordinary)

    def _prepare_offloaded(self, state: Offload, tensors: dict[StoreTensor, list[Rule]]) -> None:
        """Make room for the states and gradients of tensors of an offloaded model, all of it at once or none."""
        missing = 0
        for tensor, rules in tensors.items():
            planes = {plane for rule in rules for plane in missing_planes(tensor, rule)}
            missing += sum(plane.bytes(tensor.numel) for plane in planes)
            # Known before training starts: gradients spill to the SSD too.
            missing += 0 if tensor.packed or tensor.gradient is not None else tensor.nbytes
        state.runtime.check_room(missing)
        for tensor, rules in tensors.items():
            for rule in rules:
                allocate_states(state.runtime, tensor, rule)
            state.gradients.allocate(tensor)
        if state not in self._offloads:
            self._offloads.append(state)

    def _check_ordinary(self, parameter: torch.nn.Parameter) -> None:
        if torch.is_complex(parameter):
            raise ValueError(
                f"{type(self).__name__} does not support complex parameters: pass torch.view_as_real(parameter)"
            )
        if parameter.dtype not in DTYPE_NAMES:
            name = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(f"cannot train a parameter of dtype {name}: convert it to bfloat16, float16 or float32")
        if parameter.device.type != "cpu":
            raise ValueError(f"a parameter is on {parameter.device}: this version trains on the CPU")

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

        Returns whether any of them is not finite. For `memascend.GradScaler`; `step` and `zero_grad` end it.
        """
        self._inv_scale = inv_scale
        non_finite = False
        for _, parameter in self._with_gradient():
            if self._unscaled_in_step(parameter):
                self._capture(parameter)
                non_finite = self._squares(parameter)[1] or non_finite
        return non_finite

    def _capture(self, parameter: torch.nn.Parameter) -> bool:
        """Take over a gradient that somebody put on an offloaded parameter; returns whether there was one."""
        found = place_of(parameter)
        if found is None:
            return False
        state, place = found
        state.gradients.settle(place)
        if parameter.grad is place.marker:
            return False
        state.gradients.capture(place, accumulate=False)
        return True

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale all gradients so that their 2-norm is at most `max_norm`, in the next `step`.

        Returns the norm before (0-dim float32): the square root of a fixed-order sum of squares in fp64, the
        same for offloaded and ordinary parameters. Not finite when a gradient overflowed.
        """
        total, finite = 0.0, True
        for _, parameter in self._with_gradient():
            squares, non_finite, inv_scale = self._squares(parameter)
            total += squares * inv_scale**2
            finite = finite and not non_finite
        norm = math.sqrt(total) if finite else math.nan
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError("the norm of the gradients is not finite, so they cannot be clipped")
        scale = torch.tensor(max_norm, dtype=torch.float64) / (norm + 1e-6)
        self._grad_scale = float(scale.clamp(max=1.0).to(torch.float32))
        return torch.tensor(norm, dtype=torch.float32)

    def _squares(self, parameter: torch.nn.Parameter) -> tuple[float, bool, float]:
        """Sum of squares of a gradient as it is kept, whether it is not finite, and what still scales it."""
        found = place_of(parameter)
        if found is not None:
            found[0].gradients.settle(found[1])
        gradient = parameter.grad
        assert gradient is not None
        if found is not None and gradient is found[1].marker:
            return found[1].sum_squares, found[1].non_finite, self._inv_scale
        gradient = self._usable(parameter, gradient)
        stats = _memascend.gradient_stats(DTYPE_NAMES[gradient.dtype], gradient.numel(), gradient.data_ptr())
        return *stats, self._inv_scale if found is None and parameter.dtype == torch.float16 else 1.0

    def _usable(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient in one piece, on the CPU and of its parameter's shape and dtype."""
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
        return gradient.detach().contiguous()

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update every parameter that has a gradient. On offloaded parameters the work is deferred."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = list(self._with_gradient())
        # What can be refused is refused before anything changes.
        for group, parameter in work:
            if place_of(parameter) is None:
                self._check_ordinary(parameter)
                assert parameter.grad is not None
                self._usable(parameter, parameter.grad)
            self._check_rule(group, parameter)
        put_by_hand = {parameter for _, parameter in work if self._capture(parameter)}
        if self._leave_out(work):
            return loss
        deferred: defaultdict[Offload, dict[StoreTensor, Update]] = defaultdict(dict)
        in_host = []
        for group, parameter in work:
            found = place_of(parameter)
            if found is None:
                in_host.append((group, parameter))
                continue
            state, place = found
            rule = self._rule(group, parameter)
            if missing_planes(place.tensor, rule) or state not in self._offloads:
                # Frozen when the optimizer was made, or keeping more than it did then.
                self._prepare_offloaded(state, {place.tensor: [rule]})
            # Somebody's own gradient was put there after unscaling.
            inv_scale = 1.0 if parameter in put_by_hand else self._inv_scale
            place.version += 1
            segment = self._segment(group, parameter, place, inv_scale)
            add_segment(deferred[state], place, segment, captured=True)
            parameter.grad = None
        self._step_in_host(in_host)
        self._grad_scale = self._inv_scale = 1.0
        for state, updates in deferred.items():
            by_unit: defaultdict[Unit, list[Update]] = defaultdict(list)
            for update in updates.values():
                by_unit[update.tensor.unit].append(update)
            for unit, of_unit in by_unit.items():
                state.streamer.defer(unit, of_unit)
            state.streamer.start_next_pass()
        return loss

    def _check_rule(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> None:
        rule = self._rule(group, parameter)
        known = self._rules.get(parameter)
        if known not in (None, rule) and "step" in self.state.get(parameter, {}):
            replaced = {plane.name for plane in rule.planes if plane not in known.planes}
            lost = [
                plane.name
                for plane in known.planes
                if plane.name in replaced or (plane.name.startswith("master") and plane not in rule.planes)
            ]
            if lost:
                raise MemascendError(
                    f"states or master of a group changed after the first step, which would lose {', '.join(lost)}: "
                    "make a new optimizer and load the state_dict of this one"
                )
        self._rules[parameter] = rule

    def _leave_out(self, work: list[tuple[dict[str, Any], torch.nn.Parameter]]) -> bool:
        """Whether the user wants no step with such gradients."""
        if self.nonfinite == "propagate" or not any(self._squares(parameter)[1] for _, parameter in work):
            return False
        if self.nonfinite == "raise":
            bad = next(parameter for _, parameter in work if self._squares(parameter)[1])
            found = place_of(bad)
            name = f"parameter number {self._numbers[bad]}" if found is None else found[1].name
            raise MemascendError(
                f"the gradient of {name} is not finite, and the optimizer was made with nonfinite='raise': nothing has "
                "changed; zero_grad() discards the gradients"
            )
        self.skipped_steps += 1
        self._grad_scale = self._inv_scale = 1.0
        return True

    def _segment(
        self,
        group: dict[str, Any],
        parameter: torch.nn.Parameter,
        place: Place,
        inv_scale: float,
        host: tuple[int, int] | None = None,
    ) -> Segment:
        rule = self._rule(group, parameter)
        scalars, fresh = self._next(group, parameter, inv_scale)
        return Segment(place.start, place.numel, rule, scalars, fresh, host)

    def _next(self, group: dict[str, Any], parameter: torch.nn.Parameter, inv_scale: float) -> tuple[StepScalars, bool]:
        """Count a step of a parameter: its constants, and whether it is the first."""
        state = self.state[parameter]
        fresh = "step" not in state
        state["step"] = 1 if fresh else state["step"] + 1
        # Two parameters must not round by the same random numbers.
        seed = group["seed"] << 32 | self._numbers[parameter]
        return self._scalars(group, state["step"], self._grad_scale * inv_scale, seed), fresh

    def _step_in_host(self, work: list[tuple[dict[str, Any], torch.nn.Parameter]]) -> None:
        if self._store is not None:
            added = [(group, parameter) for group, parameter in work if parameter not in self._host_places]
            if added:  # frozen when the optimizer was made
                self._put_on_store(added)
        on_ssd: defaultdict[_HostStates, dict[StoreTensor, Update]] = defaultdict(dict)
        for group, parameter in work:
            assert parameter.grad is not None
            # The kernels write behind autograd's back: tell it, so that it refuses graphs made before the step.
            torch.autograd.graph.increment_version(parameter)
            gradient = self._usable(parameter, parameter.grad)
            weight = parameter.detach().contiguous()
            inv_scale = self._inv_scale if self._unscaled_in_step(parameter) else 1.0
            place = self._host_places.get(parameter)
            if place is None:
                self._step_in_memory(group, parameter, weight, gradient, inv_scale)
                _copy_back(parameter, weight)
                continue
            states = next(states for states in self._stores if parameter in states.places)
            rule = self._rule(group, parameter)
            if missing_planes(place.tensor, rule):
                allocate_states(states.runtime, place.tensor, rule)
            segment = self._segment(group, parameter, place, inv_scale, (weight.data_ptr(), gradient.data_ptr()))
            states.hold.append((parameter, weight, gradient))
            add_segment(on_ssd[states], place, segment, captured=False)
        for states, updates in on_ssd.items():
            states.step(list(updates.values()))

    def _step_in_memory(
        self,
        group: dict[str, Any],
        parameter: torch.nn.Parameter,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        inv_scale: float,
    ) -> None:
        rule = self._rule(group, parameter)
        scalars, fresh = self._next(group, parameter, inv_scale)
        state = self.state[parameter]
        for plane in rule.planes:
            if plane.name not in state:
                dtype = getattr(torch, plane.dtype)
                shape = (plane.bytes(parameter.numel()),) if dtype == torch.uint8 else parameter.shape
                state[plane.name] = torch.zeros(shape, dtype=dtype)
        _memascend.step_host(
            rule,
            parameter.numel(),
            weight.data_ptr(),
            [state[plane.name].data_ptr() for plane in rule.planes],
            gradient.data_ptr(),
            scalars,
            fresh,
            torch.get_num_threads(),
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, those kept on SSD too."""
        for _, parameter in self._with_gradient():
            found = place_of(parameter)
            if found is not None:
                found[0].gradients.clear(found[1])
        self._inv_scale = 1.0
        super().zero_grad(set_to_none)

    def flush(self) -> None:
        """Apply deferred updates now, and wait until they are on the store's drives."""
        for state in self._offloads:
            if not state.runtime.closed:
                state.flush()

    # ---- state ------------------------------------------------------------------------------------------

    def location(self, parameter: torch.nn.Parameter) -> tuple[_memascend.Runtime, Place] | None:
        """Return the store that keeps a parameter's states and its place there; None for states in memory."""
        found = place_of(parameter)
        if found is not None:
            return found[0].runtime, found[1]
        place = self._host_places.get(parameter)
        if place is None:
            return None
        return next(states.runtime for states in self._stores if parameter in states.places), place

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
            (group, parameter, state_dict["state"].get(key))
            for group, saved in zip(groups, saved_groups, strict=True)
            for key, parameter in zip(saved["params"], group["params"], strict=True)
        ]
        for _, parameter, saved in pairs:
            for name, value in (saved or {}).items():
                if isinstance(value, torch.Tensor) and name != "step" and value.shape != parameter.shape:
                    raise ValueError(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
        self.flush()
        for group, saved in zip(groups, saved_groups, strict=True):
            own = ("params", "param_names", "states", "master")
            group.update({name: value for name, value in saved.items() if name not in own})
        for group, parameter, saved in pairs:
            self._load(group, parameter, saved)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load(self, group: dict[str, Any], parameter: torch.nn.Parameter, saved: dict[str, Any] | None) -> None:
        self.state.pop(parameter, None)
        self._rules.pop(parameter, None)
        # A parameter without states begins anew with its next gradient: whatever is on the SSD counts no more.
        step = _step_of(saved or {})
        if saved is None or not step:
            return
        rule = self._rule(group, parameter)
        found = place_of(parameter)
        if found is not None:
            self._prepare_offloaded(found[0], {found[1].tensor: [rule]})
        elif self._store is not None and parameter not in self._host_places:
            self._put_on_store([(group, parameter)])
        location = self.location(parameter)
        if location is not None:
            allocate_states(location[0], location[1].tensor, rule)

        def weights() -> torch.Tensor:
            if found is None:
                return parameter.detach()
            state, place = found
            return place.view(state.read_unit(place.tensor.unit))

        self._rules[parameter] = rule
        loaded = load_states(parameter, rule, saved, location, weights)
        self.state[parameter] = {"step": step} | loaded

    def close(self) -> None:
        """Remove the store of ordinary parameters' states, if there is one."""
        # Those of parameters added later lie inside the first one's directory.
        for states in reversed(self._stores):
            states.close()


def _step_of(saved: dict[str, Any]) -> int:
    """Steps that a parameter has taken; `torch.optim.SGD` does not count them, but its momentum tells of the first."""
    if saved.get("step") is not None:
        return int(saved["step"])
    return 1 if any(value is not None for value in saved.values()) else 0


def _copy_back(parameter: torch.nn.Parameter, weight: torch.Tensor) -> None:
    """Write updated weights to a parameter that was not contiguous."""
    if weight.data_ptr() != parameter.data_ptr():
        parameter.detach().copy_(weight)


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
        #: Parameters, their weights and gradients, while a step is under way.
        self.hold: list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]] = []
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

    def close(self) -> None:
        self.runtime.close(keep=False)

    def step(self, updates: list[Update]) -> None:
        try:
            self.runtime.fetch(self.unit.index, None, None, 0, updates).wait()
            for update in updates:
                update.started()
            for parameter, weight, _ in self.hold:
                _copy_back(parameter, weight)
            self.runtime.wait_unit(self.unit.index)
        finally:
            self.hold.clear()
