"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with fp32 masters and states on SSD or in memory."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from memascend import _memascend
from memascend.errors import MemascendError
from memascend.offload import Offload, close_at_exit, open_runtime, place_of
from memascend.optim.update import Scalars, Segment, Update, add_segment, allocate_states, state_bytes
from memascend.plan import make_states_plan, parse_size
from memascend.units import DTYPE_NAMES, Place, StoreTensor, Unit, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim.optimizer import ParamsT

    from memascend.offload import StorePaths


class AdamW(Optimizer):
    """AdamW whose arithmetic is the same wherever its parameters and states live.

    - Parameters of an offloaded model: weights, masters, moments and gradients are on SSD. `step` is deferred:
      the update of a unit runs when the unit is next fetched, so that it costs no pass of its own.
    - Ordinary parameters with `store`: masters and moments are on SSD, weights and gradients where they are.
    - Ordinary parameters without `store`: everything in memory. The reference for exactness.

    bf16 weights have exact fp32 masters, kept as the weight and the low half of the master (int16, 2 bytes).
    Differences from `torch.optim.AdamW`: `clip_grad_norm_` is a method and scales the gradient in fp32 inside
    the update; `step` consumes gradients kept on SSD, as if `zero_grad` followed at once.

    Args:
        params: parameters or groups with options of their own, as for any `torch.optim.Optimizer`.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        store: directory, or several, for the states of ordinary parameters.
        host_memory: ceiling of the buffers that move those states (default: what they need).
        options: `engine`, `direct`, `allocator`, `huge_pages`, `compute_threads`, as in `memascend.offload`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        store: StorePaths | None = None,
        host_memory: str | int | None = None,
        **options: Any,
    ) -> None:
        """Make room for the states of every parameter."""
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not 0.0 <= float(value) < math.inf:
                raise ValueError(f"{name} must be a number from 0 up, not {value}")
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{index}] must be from 0 to below 1, not {beta}")
        self._store = store
        self._host_memory = host_memory
        self._options = options
        self._host_places: dict[torch.nn.Parameter, Place] = {}
        self._stores: list[_HostStates] = []
        self._offloads: list[Offload] = []
        self._grad_scale = 1.0
        self._inv_scale = 1.0
        self._built = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._built = True
        self._prepare(p for group in self.param_groups for p in group["params"])

    # ---- set-up -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in PyTorch, and make room for its states."""
        super().add_param_group(param_group)
        if self._built:
            self._prepare(self.param_groups[-1]["params"])

    def _prepare(self, params: Iterable[torch.nn.Parameter]) -> None:
        offloaded: defaultdict[Offload, list[StoreTensor]] = defaultdict(list)
        ordinary = []
        for parameter in params:
            found = place_of(parameter)
            if found is None:
                ordinary.append(parameter)
                continue
            state, place = found
            if state.runtime.closed:
                raise MemascendError(f"{place.name} belongs to a model that was closed")
            if parameter.requires_grad and place.tensor not in offloaded[state]:
                offloaded[state].append(place.tensor)
        for state, tensors in offloaded.items():
            fresh = [tensor for tensor in tensors if tensor.exp_avg is None]
            # Known before training starts, all at once: gradients spill to the SSD too.
            state.runtime.check_room(
                sum(state_bytes(t) + (0 if t.packed or t.gradient is not None else t.nbytes) for t in fresh)
            )
            for tensor in tensors:
                allocate_states(state.runtime, tensor)
                state.gradients.allocate(tensor)
            if state not in self._offloads:
                self._offloads.append(state)
        self._prepare_ordinary(ordinary)

    def _prepare_ordinary(self, params: list[torch.nn.Parameter]) -> None:
        for parameter in params:
            if parameter.dtype not in DTYPE_NAMES:
                name = str(parameter.dtype).removeprefix("torch.")
                raise ValueError(f"cannot train a parameter of dtype {name}: convert it to bfloat16 or float32")
            if parameter.device.type != "cpu":
                raise ValueError(f"a parameter is on {parameter.device}: this version trains on the CPU")
            if not parameter.is_contiguous():
                raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not contiguous")
        if self._store is not None and params:
            states = _HostStates(params, self._directories(), self._host_memory, self._options)
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

    # ---- step -------------------------------------------------------------------------------------------

    def _with_gradient(self) -> Iterable[tuple[dict[str, Any], torch.nn.Parameter]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter

    def ordinary_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that belong to no offloaded model."""
        return [p for group in self.param_groups for p in group["params"] if place_of(p) is None]

    def unscale_offloaded(self, inv_scale: float) -> bool:
        """Have the next `step` multiply the gradients kept on SSD by `inv_scale`, in fp32, and clip them so.

        Returns whether any of them is not finite. For `memascend.GradScaler`; `step` and `zero_grad` end it.
        """
        self._inv_scale = inv_scale
        non_finite = False
        for _, parameter in self._with_gradient():
            found = place_of(parameter)
            if found is None:
                continue
            state, place = found
            state.gradients.settle(place)
            if parameter.grad is not place.marker:
                state.gradients.capture(place, accumulate=False)
            non_finite = non_finite or place.non_finite
        return non_finite

    def _scalars(self, group: dict[str, Any], parameter: torch.nn.Parameter, inv_scale: float = 1.0) -> Scalars:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        return (
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            int(state["step"]),
            self._grad_scale * inv_scale,
        )

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
        gradient = gradient.detach().contiguous()
        stats = _memascend.gradient_stats(DTYPE_NAMES[gradient.dtype], gradient.numel(), gradient.data_ptr())
        return *stats, 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update every parameter that has a gradient. On offloaded parameters the work is deferred."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        deferred: defaultdict[Offload, dict[StoreTensor, Update]] = defaultdict(dict)
        on_ssd: defaultdict[_HostStates, dict[StoreTensor, Update]] = defaultdict(dict)
        for group, parameter in self._with_gradient():
            found = place_of(parameter)
            if found is not None:
                state, place = found
                state.gradients.settle(place)
                inv_scale = self._inv_scale
                if parameter.grad is not place.marker:
                    # Somebody's own gradient, put there after unscaling.
                    state.gradients.capture(place, accumulate=False)
                    inv_scale = 1.0
                if place.tensor.exp_avg is None:
                    raise MemascendError(
                        f"{place.name} did not require gradients when the optimizer was made: use add_param_group"
                    )
                place.version += 1
                segment = Segment(place.start, place.numel, self._scalars(group, parameter, inv_scale))
                add_segment(deferred[state], place, segment, captured=True)
                parameter.grad = None
                continue
            # The kernels write behind autograd's back: tell it, so that it refuses graphs made before the step.
            torch.autograd.graph.increment_version(parameter)
            gradient = parameter.grad.contiguous()
            scalars = self._scalars(group, parameter)
            place = self._host_places.get(parameter)
            if place is None:
                self._step_in_memory(parameter, gradient, scalars)
            else:
                states = next(states for states in self._stores if parameter in states.places)
                host = (parameter.data_ptr(), gradient.data_ptr())
                states.hold.append(gradient)
                add_segment(on_ssd[states], place, Segment(place.start, place.numel, scalars, host), captured=False)
        self._grad_scale = self._inv_scale = 1.0
        for states, updates in on_ssd.items():
            states.step(list(updates.values()))
        for state, updates in deferred.items():
            by_unit: defaultdict[Unit, list[Update]] = defaultdict(list)
            for update in updates.values():
                by_unit[update.tensor.unit].append(update)
            for unit, of_unit in by_unit.items():
                state.streamer.defer(unit, of_unit)
            state.streamer.start_next_pass()
        return loss

    def _step_in_memory(self, parameter: torch.Tensor, gradient: torch.Tensor, scalars: Scalars) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros(parameter.shape, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros(parameter.shape, dtype=torch.float32)
            if parameter.dtype == torch.bfloat16:
                state["master_low"] = torch.zeros(parameter.shape, dtype=torch.int16)
        low = state.get("master_low")
        _memascend.adamw_host(
            DTYPE_NAMES[parameter.dtype],
            parameter.numel(),
            parameter.data_ptr(),
            0 if low is None else low.data_ptr(),
            state["exp_avg"].data_ptr(),
            state["exp_avg_sq"].data_ptr(),
            gradient.data_ptr(),
            scalars,
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

    def state_dict(self) -> dict[str, Any]:
        """Return the states in PyTorch's format, read from SSD: this holds all of them in memory at once.

        Per parameter: `step` (0-dim float32), `exp_avg` and `exp_avg_sq` (fp32, of the parameter's shape), and for
        bf16 parameters `master_low` (int16): master bits = (weight bits << 16) + sign-extended low half.
        """
        self.flush()
        kept = self.state
        full: defaultdict[Any, Any] = defaultdict(dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                if kept.get(parameter):
                    full[parameter] = self._read_state(parameter, kept[parameter])
        self.state = full
        try:
            return super().state_dict()
        finally:
            self.state = kept

    def _location(self, parameter: torch.nn.Parameter) -> tuple[Any, Place] | None:
        found = place_of(parameter)
        if found is not None:
            return found[0].runtime, found[1]
        place = self._host_places.get(parameter)
        if place is None:
            return None
        return next(states.runtime for states in self._stores if parameter in states.places), place

    def _read_state(self, parameter: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {"step": torch.tensor(float(state["step"]))}
        location = self._location(parameter)
        if location is None:
            return values | {name: value for name, value in state.items() if name != "step"}
        runtime, place = location
        for name, dtype in _state_dtypes(place.dtype).items():
            whole = torch.zeros(place.tensor.numel, dtype=dtype)
            if place.tensor.initialized:
                runtime.read(_extent(place, name), whole.data_ptr(), whole.nbytes)
            values[name] = whole[place.start : place.start + place.numel].view(place.shape).clone()
        return values

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over states in PyTorch's format: ours, or those of a `torch.optim.AdamW` over the same groups.

        Raises ValueError when groups or shapes do not match.
        """
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved_groups]:
            raise ValueError("the loaded state dict has parameter groups of other sizes than this optimizer")
        self.flush()
        for group, saved in zip(groups, saved_groups, strict=True):
            for key, parameter in zip(saved["params"], group["params"], strict=True):
                if key in state_dict["state"]:
                    self._write_state(parameter, state_dict["state"][key])
                else:
                    self.state.pop(parameter, None)
            group.update({name: value for name, value in saved.items() if name != "params"})

    def _write_state(self, parameter: torch.nn.Parameter, saved: dict[str, Any]) -> None:
        values = {}
        for name, dtype in _state_dtypes(parameter.dtype).items():
            value = saved.get(name)
            if value is None:
                # A checkpoint of torch.optim.AdamW has no low half: the weight itself is the master.
                value = torch.zeros(parameter.shape, dtype=dtype)
            if value.shape != parameter.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
            values[name] = value.to(dtype=dtype, device="cpu").contiguous()
        location = self._location(parameter)
        self.state[parameter] = {"step": int(saved["step"])}
        if location is None:
            self.state[parameter] |= {name: value.clone() for name, value in values.items()}
            return
        runtime, place = location
        tensor = place.tensor
        for name, value in values.items():
            whole = torch.zeros(tensor.numel, dtype=value.dtype)
            if tensor.initialized and tensor.packed:
                runtime.read(_extent(place, name), whole.data_ptr(), whole.nbytes)
            whole[place.start : place.start + place.numel] = value.view(-1)
            runtime.write(_extent(place, name), whole.data_ptr(), whole.nbytes)
        tensor.initialized = True

    def close(self) -> None:
        """Remove the store of ordinary parameters' states, if there is one."""
        # Those of parameters added later lie inside the first one's directory.
        for states in reversed(self._stores):
            states.close()


def _state_dtypes(dtype: torch.dtype) -> dict[str, torch.dtype]:
    dtypes = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    return dtypes | {"master_low": torch.int16} if dtype == torch.bfloat16 else dtypes


def _extent(place: Place, name: str) -> Any:
    return place.tensor.low if name == "master_low" else getattr(place.tensor, name)


class _HostStates:
    """The states of ordinary parameters on SSD."""

    def __init__(
        self, params: list[torch.nn.Parameter], store: StorePaths, host_memory: Any, options: dict[str, Any]
    ) -> None:
        self.unit = Unit("parameters", repeated=False)
        lay_out(self.unit, ((f"parameter{index}", parameter) for index, parameter in enumerate(params)))
        self.places = {place.parameter: place for place in self.unit.places}
        self.hold: list[torch.Tensor] = []
        plan = make_states_plan(self.unit, None if host_memory is None else parse_size(host_memory))
        self.runtime = open_runtime(plan, store, options)
        try:
            self.unit.index = self.runtime.add_unit()
            self.runtime.check_room(sum(state_bytes(tensor) for tensor in self.unit.tensors))
            for tensor in self.unit.tensors:
                allocate_states(self.runtime, tensor)
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
                update.tensor.initialized = True
            self.runtime.wait_unit(self.unit.index)
        finally:
            self.hold.clear()
