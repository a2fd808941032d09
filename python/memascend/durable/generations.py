"""Which states of a run are durable: every step of the optimizer makes a generation, committed beside the training.

A step's updates run with the next forward pass, into room that no durable generation needs. Once the last of them is
on its way, a thread waits for the writes, has the drives flush them and writes the manifest, while the backward pass
computes; the next step waits for it. A generation is the tensors on the SSD and one JSON text: everything else that
is needed to go on from there.
"""

from __future__ import annotations

import json
import random
import sys
import weakref
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from memascend.common.interrupts import uninterrupted
from memascend.common.sizes import format_size
from memascend.durable import exact_json as plain
from memascend.durable.buffers import KeptBuffers
from memascend.errors import MemascendError, StoreError

if TYPE_CHECKING:
    from memascend._memascend import Commit
    from memascend.offloading.session import Offload
    from memascend.optim.base import OffloadedOptimizer

#: Of the JSON text; a later version says what it does not read.
FORMAT = 1
#: What is kept of `track`'s objects as soon as a step is taken: the rest is asked for when the next pass begins, after
#: schedulers and scalers have followed the step.
_WITH_THE_STEP = "data"


def parse_durability(durability: str) -> int | None:
    """Return the steps between generations: 0 for "none", None for "auto".

    Raises ValueError for anything but "auto", "none", "step" and "every:N".
    """
    if durability in ("auto", "none", "step"):
        return {"auto": None, "none": 0, "step": 1}[durability]
    name, _, number = str(durability).partition(":")
    if name == "every" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise ValueError(f"durability {durability!r} is none of 'auto', 'step', 'every:N' and 'none'")


class Generations:
    """The generations of one offloaded model."""

    def __init__(self, state: Offload, durability: str, model: dict[str, Any]) -> None:
        """Commit as `durability` says; `model` is what makes the model again."""
        self._state = weakref.ref(state)
        #: Steps between generations; 0 for none; None until it is known whether the volumes have room for two slots.
        self.period = parse_durability(durability)
        self._model = model
        self._optimizers: list[_Known] = []
        self._tracked: dict[str, Any] = {}
        #: States of a resumed run that wait for the objects they are of.
        self.waiting: dict[str, Any] = {}
        #: Of a resumed run: its random states and its optimizers, as they were.
        self._resumed: dict[str, Any] | None = None
        #: Optimizer steps in the life of the run, and those in the generation committed last, or being committed.
        self.steps = 0
        self._kept_steps = 0
        #: Whose step was counted since the last pass began.
        self._counted: weakref.ref[OffloadedOptimizer] | None = None
        #: What had to be kept at once when the last step was taken.
        self._moment: dict[str, Any] | None = None
        self._kept_moment: dict[str, Any] | None = None
        #: What was committed since is not all: states were loaded, or schedulers had not followed the step yet.
        self._again = False
        self._buffers = KeptBuffers(state)
        self._due: str | None = None
        self._commit: Commit | None = None

    @property
    def durable_steps(self) -> int:
        """Steps in the generation that was committed last."""
        return self._kept_steps

    # ---- what belongs to a generation ---------------------------------------------------------------------

    @property
    def _offload(self) -> Offload:
        state = self._state()
        assert state is not None, "the model outlives its generations"
        return state

    @property
    def optimizers(self) -> list[OffloadedOptimizer]:
        """Those that train the model, the oldest first."""
        return [optimizer for known in self._optimizers if (optimizer := known.reference()) is not None]

    def join(self, optimizer: OffloadedOptimizer) -> None:
        """Have an optimizer belong to every generation from now on."""
        if all(known is not optimizer for known in self.optimizers):
            self._optimizers.append(_Known(optimizer))

    def track(self, objects: dict[str, Any]) -> None:
        """Have the states of `objects` belong to every generation, and give those of a resumed run theirs back."""
        for name, each in objects.items():
            if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
                raise TypeError(f"{name} is a {type(each).__name__} without state_dict() and load_state_dict()")
            plain.encode(each.state_dict(), name)  # which says at once what cannot be kept
        for name, each in objects.items():
            if name in self.waiting:
                each.load_state_dict(self.waiting[name])
                del self.waiting[name]
            self._tracked[name] = each
        if self._resumed is not None:
            # What the program did to get here it did not do then: a new scheduler, say, sets the learning rate.
            restore_random_states(self._resumed["random"])
            for known, described in zip(self._optimizers, self._resumed["optimizers"], strict=False):
                optimizer = known.reference()
                for group, kept in zip(optimizer.param_groups if optimizer else (), described["groups"], strict=False):
                    group.update({name: value for name, value in kept.items() if name != "params"})

    def decide(self, optimizer: OffloadedOptimizer, missing: int, spares: int) -> bool:
        """Return whether tensors get a second slot: `spares` bytes beside `missing` ones that are needed anyway."""
        whole = optimizer.trains_only(self._offload)
        if not whole and (self.period or (self.period is None and self._offload.runtime.generation)):
            optimizer.describe(self._offload)  # which says what is wrong
        if self.period is None and not whole:
            self.period = 0
            self._offload.notices.append(
                f"{type(optimizer).__name__} also trains parameters outside of the store: its steps are not durable, "
                "and a run that is killed cannot be resumed (durability='none')"
            )
        if self.period is None:
            try:
                self._offload.runtime.check_room(missing + spares)
                self.period = 1
            except StoreError:
                if self._offload.runtime.generation:  # nothing of which may be written over
                    raise
                self._offload.runtime.check_room(missing)
                self.period = 0
                self._offload.notices.append(
                    f"the store has no room for {format_size(spares)} more, which a second copy of weights and states "
                    "would take: they are updated in place, and a run that is killed cannot be resumed "
                    "(durability='none')"
                )
        return self.period > 0

    # ---- the course of a step -----------------------------------------------------------------------------

    def stepped(self, optimizer: OffloadedOptimizer) -> None:
        """Note that a step was taken: its generation is committed with the next pass."""
        self._resumed = None
        if self._counted is None or self._counted() is optimizer:
            self.steps += 1  # those of others before the next pass belong to the same step
            self._counted = weakref.ref(optimizer)
        for known in self._optimizers:
            if known.reference() is optimizer and (self.period or self._offload.keep_store):
                known.held = optimizer
        if self._wanted():
            self._moment = self._now()

    def begin(self) -> None:
        """A pass begins. If a generation is due, keep what belongs to it before the pass changes that."""
        self._counted = None
        if self._moment is not None and self._due is None and (self._wanted() or self._again):
            self._due = self._describe()
            self._moment = self._kept_moment = None
            self._again = False

    def start(self) -> None:
        """Start committing the generation that is due, if the updates that it waits for have been started."""
        if self._due is None or self._commit is not None:
            return
        streamer = self._offload.streamer
        if not streamer.deferred():
            with uninterrupted():
                self._commit = self._offload.runtime.commit(self._due, streamer.tickets())

    def settle(self, optimizer: OffloadedOptimizer | None = None) -> None:
        """Wait until the generation that is due is durable: the next updates may write over the one before it.

        `optimizer` is about to step, or to begin with a parameter. Raises StoreError if the generation could not be
        committed; it is tried again the next time.
        """
        if self.period and optimizer is not None and self._counted is not None and self._counted() is optimizer:
            # There was no pass of the whole model since its last step: a loop that calls parts of it.
            self._offload.streamer.apply_updates()
            self.begin()
        if self._due is not None and self._commit is None:
            self._offload.streamer.apply_updates()
            self.start()
        if self._commit is not None:
            try:
                with self._offload.timeline.waiting("ssd_write"):
                    self._commit.wait()
            except MemascendError:
                self._commit = None
                raise
            self._commit = self._due = None
            self._kept_steps = self.steps

    def commit(self) -> None:
        """Make what the run is now a durable generation; all updates have been applied."""
        self.settle()
        if self.period and (self._moment is not self._kept_moment or self.steps != self._kept_steps):
            self.keep()

    def keep(self) -> None:
        """Commit in any case: the store is to be kept, or a snapshot made."""
        self.settle()
        self._due = self._describe()
        self.settle()
        # Schedulers may follow the step only now: what they say then is committed with the next pass.
        self._kept_moment, self._again = self._moment, self._moment is not None

    def changed(self) -> None:
        """Note that weights or states were loaded: they are committed with the next pass, or by `flush`."""
        if self.period and self._offload.runtime.generation:
            self._moment, self._again = self._now(), True

    def abandon(self) -> None:
        """Wait for a commit under way, whatever becomes of it."""
        if self._commit is not None:
            with suppress(MemascendError):  # the generation before it stays
                self._commit.wait()
                self._kept_steps = self.steps
            self._commit = None

    def take_up(self, record: dict[str, Any]) -> None:
        """Go on from what the store has kept."""
        self.steps = self._kept_steps = record["steps"]
        self.waiting = record["tracked"]
        self._resumed = {"random": record["random"], "optimizers": record["optimizers"]}
        self._buffers.take_up(record["buffers"])

    def _wanted(self) -> bool:
        return bool(self.period) and self.steps - self._kept_steps >= (self.period or 1)

    # ---- the JSON text ------------------------------------------------------------------------------------

    def _now(self) -> dict[str, Any]:
        data = self._tracked.get(_WITH_THE_STEP)
        return {
            "random": random_states(),
            "data": None if data is None else data.state_dict(),
            "buffers": self._buffers.changed(),
        }

    def _describe(self) -> str:
        """Everything of the run that is not on the SSD."""
        state, moment = self._offload, self._moment or self._now()
        self._buffers.write(moment["buffers"])
        tracked = dict(self.waiting)
        for name, each in self._tracked.items():
            tracked[name] = moment["data"] if name == _WITH_THE_STEP else each.state_dict()
        record = {
            "format": FORMAT,
            "steps": self.steps,
            "model": self._model,
            "recompute": state.recompute,
            "units": [
                {
                    "name": unit.name,
                    "tensors": [
                        {
                            "name": tensor.name,
                            "dtype": str(tensor.dtype).removeprefix("torch."),
                            "numel": tensor.numel,
                            "trained": tensor.trained,
                            "parameters": [
                                [place.name, place.shape, place.start, place.parameter.requires_grad]
                                for place in tensor.places
                            ],
                            "states": [
                                [kept.name, plane.name, plane.dtype]
                                for plane, kept in tensor.planes.items()
                                # Those of a first step are written by the time that they are committed.
                                if kept.written or any(plane in place.made for place in tensor.places)
                            ],
                        }
                        for tensor in unit.tensors
                    ],
                }
                for unit in state.units
            ],
            "buffers": self._buffers.described,
            "optimizers": self._described(),
            "random": plain.encode(moment["random"], "the random numbers"),
            "tracked": plain.encode(tracked, "the run"),
        }
        return plain.as_json(record)

    def _described(self) -> list[dict[str, Any]]:
        """What is kept of the optimizers, the latest of those too that are no more but whose states are there."""
        state = self._offload
        for known in self._optimizers:
            optimizer = known.reference()
            if optimizer is not None:
                known.described = optimizer.describe(state) if optimizer.trains_only(state) else None
            elif known.described is not None:
                places = {place.name: place for place in state.places}
                for name in list(known.described["states"]):
                    owner = places[name].owner
                    if owner is not None and owner() is not None:  # another one's by now
                        del known.described["states"][name]
            known.held = None
        self._optimizers = [
            known
            for known in self._optimizers
            if known.reference() is not None or (known.described is not None and known.described["states"])
        ]
        return [known.described for known in self._optimizers if known.described is not None]


class _Known:
    """An optimizer of the model."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self.reference: weakref.ref[OffloadedOptimizer] = weakref.ref(optimizer)
        #: What is kept of it, also when it is no more: its states are on the store still.
        self.described: dict[str, Any] | None = None
        #: Kept alive from a step until that is described.
        self.held: OffloadedOptimizer | None = None


def source_of(model: torch.nn.Module, conversions: list[int] | None = None) -> dict[str, Any]:
    """Return what a store keeps of a model to make it again; `conversions` are those that its checkpoint needed."""
    transformers: Any = sys.modules.get("transformers")
    name = type(model).__name__
    if transformers is None or getattr(transformers, name, None) is not type(model):
        return {"kind": "module", "class": f"{type(model).__module__}.{type(model).__qualname__}"}
    generation = getattr(model, "generation_config", None)
    return {
        "kind": "transformers",
        "class": name,
        "config": json.loads(model.config.to_json_string(use_diff=False)),
        "generation_config": None if generation is None else json.loads(generation.to_json_string(use_diff=False)),
        "conversions": conversions,
        "implementations": {
            name: kept
            for name in ("_attn_implementation", "_experts_implementation")
            if isinstance(kept := getattr(model.config, name, None), str)
        },
    }


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's generators of random numbers."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, array("Q", words).tobytes(), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [str(name), keys.tobytes(), *rest]
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Go on with the random numbers where `random_states` was."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(array("Q", words)), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
