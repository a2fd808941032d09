#!/usr/bin/env python
"""How much of the pool is in use at its peak, for models of any size: the real schedule, replayed without transfers.

    python benches/pool.py                                            # every shape in benches/configs
    python benches/pool.py --models llama-3.1-8b --host-memory 4GiB --json out.json

A model of the same architecture and depth but 64 wide is trained for real, and the calls of its training are recorded:
units entered and left, views of weights that outlive a unit, inputs stashed and restored, gradients captured, steps.
The record is then replayed with the tensors of the full model on the real streamer, pools, gradients, executor and
optimizer, over an engine that moves nothing. Only the arithmetic of the model itself is left out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import mmap
import os
import tempfile
import time
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from _common import finish, machine, markdown, run

import memascend
from memascend.autograd import recompute as recompute_module
from memascend.forecast import zero_infinity
from memascend.layout.units import PAGE_BYTES, absent_like, partition, round_up
from memascend.memory_plan.host import make_plan, smallest_plan
from memascend.options import OffloadOptions
from memascend.session.compute import ComputeOptions
from memascend.session.module_hooks import Hooks
from memascend.session.session import Session

CONFIGS = Path(__file__).parent / "configs"
RECORDED_TOKENS, SEED, MAX_NORM, GIB, MIB = 512, 1, 1.0, 2**30, 2**20
#: Narrow, but every embedding has to stay a unit of its own as it is in the full model: 1 MiB or more.
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 16_384,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 8192,
    "n_ctx": 8192,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
#: Tensors over this size are compared one allocation each. Below it, allocators pack or cache in other ways.
ALONE_BYTES = 4 * MIB
UTILISATION_MIN, SAVING_MIN, ROUNDING_MAX = 0.97, 0.75, 1.001


# --- recording ---


class Recorder:
    """Calls of a training run, in order, without calls inside recorded calls."""

    def __init__(self) -> None:
        self.events: list[tuple] = []
        self.fetches: list[str] = []
        self.tokens = 0
        self.ended = False
        self._inside = 0

    def note(self, *event) -> None:
        if not self._inside:
            self.events.append(event)

    def new_token(self) -> int:
        self.tokens += 1
        return self.tokens

    @contextmanager
    def quiet(self):
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def watch(self, state: Session) -> ExitStack:
        """Record everything that `state` is asked until the returned stack is closed."""
        streamer, recorder = state.streamer, self

        def call(owner, name: str, event) -> None:
            original = getattr(owner, name)

            def recorded(*args, **kwargs):
                noted = event(*args, **kwargs)
                if noted is not None:
                    self.note(*noted)
                with self.quiet():
                    return original(*args, **kwargs)

            setattr(owner, name, recorded)

        def context(owner, name: str) -> None:
            original = getattr(owner, name)

            @contextmanager
            def recorded(*args):
                self.note("open", name, *args)
                manager = original(*args)
                with self.quiet():
                    manager.__enter__()
                try:
                    yield
                finally:
                    self.note("close")
                    with self.quiet():
                        manager.__exit__(None, None, None)

            setattr(owner, name, recorded)

        def loose(unit):
            # Every look at a parameter asks; only those that find the unit absent do anything.
            return ("loose", unit.name) if streamer.depth and streamer.cached_units[unit].users == 0 else None

        fetch = streamer.cache.fetch

        def counted(unit, lease):
            self.fetches.append(unit.name)
            return fetch(unit, lease)

        streamer.cache.fetch = counted
        context(streamer, "forward_pass")
        context(streamer, "scope")
        call(streamer, "enter", lambda unit: ("enter", unit.name))
        call(streamer, "exit", lambda unit: ("exit", unit.name))
        call(streamer, "enter_loose", loose)
        call(streamer, "storage", lambda unit: ("storage", unit.name))
        call(state.gradients, "capture", lambda place, accumulate: ("capture", place.name, accumulate))

        def died(token: int) -> None:
            # Appended even inside a recorded call: no call would replay a release by the computation.
            if not self.ended:
                self.events.append(("release", token))

        class Stashed(recompute_module.StashedInput):
            def __init__(self, runtime, tensor):
                self.token = recorder.new_token()
                recorder.note("stash", self.token, tensor.nbytes)
                super().__init__(runtime, tensor)
                weakref.finalize(self, died, self.token)

            def restore(self):
                recorder.note("restore", self.token)
                return super().restore()

        recompute = recompute_module.Recomputation._recompute

        def recomputed(recomputation):
            recompute(recomputation)
            # The views of weights among the saved values keep the unit's buffer after the unit was left.
            for value, _ in recomputation.values.values():
                unit = streamer.by_address.get(value.untyped_storage().data_ptr())
                if unit is not None and streamer.cached_units[unit].storage is not None:
                    token = self.new_token()
                    self.note("hold", token, unit.name)
                    weakref.finalize(value, died, token)

        stack = ExitStack()
        stack.enter_context(mock.patch.object(recompute_module, "StashedInput", Stashed))
        stack.enter_context(mock.patch.object(recompute_module.Recomputation, "_recompute", recomputed))
        stack.callback(setattr, self, "ended", True)
        return stack


def build(config: dict, device: str):
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    config = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    torch.manual_seed(SEED)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).train()


def units_of(model) -> list:
    """Return the model's units, with every table whole: ZeRO-Infinity's pool holds it so, too."""
    return partition(model, fused_loss=None)


def smallest_budget(units) -> int:
    return smallest_plan(units).total


def record(config: dict, steps: int, workdir: Path) -> tuple[Recorder, dict]:
    """Train the narrow model for real; return the record, its partition and the counters of its pool."""
    kept = set(config) | {"bos_token_id", "eos_token_id"}
    narrow = config | {key: value for key, value in NARROW.items() if key in kept}
    model = build(narrow, "cpu")
    hidden = narrow.get("hidden_size") or narrow["n_embd"]
    budget = smallest_budget(units_of(model))
    recorder = Recorder()
    with tempfile.TemporaryDirectory(dir=workdir) as store:
        memascend.offload(model, store=store, host_memory=budget, fused_loss=False, allocator="pageable")
        state = model._memascend
        optimizer = memascend.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(0, narrow["vocab_size"], (1, RECORDED_TOKENS))
        with recorder.watch(state):
            for _ in range(steps):
                recorder.note("phase", "forward")
                loss = model(input_ids=tokens, labels=tokens).loss
                recorder.note("phase", "backward")
                loss.backward()
                del loss
                recorder.note("phase", "step")
                recorder.note("step")
                with recorder.quiet():
                    optimizer_step(optimizer)
        facts = {
            "budget": budget,
            "hidden": hidden,
            "units": [unit.name for unit in state.units],
            "places": sorted(place.name for place in state.places),
            "fetches": recorder.fetches,
            "ssd": [state.stats()[name] for name in ("ssd_bytes_read", "ssd_bytes_written")],
            "peak": state.stats()["host_bytes_peak"],
            "narrow": narrow,
        }
        memascend.close(model)
    return recorder, facts


def optimizer_step(optimizer) -> None:
    optimizer.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


# --- replaying ---


def stand_in(config: dict):
    """Return the model with parameters of the right shapes that hold one element each."""
    model = build(config, "meta")
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = torch.nn.Parameter(absent_like(parameter.shape, parameter.dtype))
                module._parameters[name] = made[id(parameter)]
    return model


def zeros(nbytes: int) -> torch.Tensor:
    """Return bytes that are only read: until they are written, the kernel backs them by its one page of zeros."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=private), dtype=torch.uint8)


class Replay:
    """Runs a record against the tensors of `model`, on the real runtime over an engine that moves nothing."""

    def __init__(self, model, plan, units, store: Path, activation_scale: float) -> None:
        tuning = {"engine": "null", "direct": False, "allocator": "pageable"}
        options = OffloadOptions(
            store=str(store),
            host_memory=plan.budget,
            fused_loss=False,
            keep_store=False,
            durability="none",
            tuning=tuning,
        )
        self.model, self.plan, self.activation_scale = model, plan, activation_scale
        self.state = Session(model, units, plan, ComputeOptions.of(options), source={})
        Hooks(self.state).attach()
        self.optimizer = memascend.AdamW(model.parameters(), lr=1e-4)
        self.units = {unit.name: unit for unit in units}
        self.places = {place.name: place for place in self.state.places}
        self.gradients = zeros(max(place.nbytes for place in self.places.values())).view(torch.bfloat16)
        self.activation = zeros(1)
        self.held: dict[int, object] = {}
        self.open: list = []
        self.fetches: list[str] = []
        self.phase = ""
        self.peak: dict = {"bytes": 0}
        self.needed = 0
        fetch = self.state.streamer.cache.fetch

        def counted(unit, lease):
            self.fetches.append(unit.name)
            return fetch(unit, lease)

        self.state.streamer.cache.fetch = counted

    def run(self, events: list[tuple]) -> None:
        for event in events:
            # A saved weight that was unpacked for a node of the graph lives until the next event.
            transient = self.perform(*event)
            self.sample(transient)
            del transient
        assert not self.open, "every pass was closed"

    def perform(self, kind: str, *args):
        streamer, held = self.state.streamer, self.held
        if kind == "phase":
            self.phase = args[0]
        elif kind == "open":
            manager = getattr(streamer, args[0])(*args[1:])
            manager.__enter__()
            self.open.append(manager)
        elif kind == "close":
            self.open.pop().__exit__(None, None, None)
        elif kind == "enter":
            streamer.enter(self.units[args[0]])
        elif kind == "exit":
            streamer.exit(self.units[args[0]])
        elif kind == "loose":
            streamer.enter_loose(self.units[args[0]])
        elif kind == "storage":
            return streamer.storage(self.units[args[0]])
        elif kind == "hold":
            held[args[0]] = streamer.cached_units[self.units[args[1]]].storage
            assert held[args[0]] is not None, f"{args[1]} is resident while it is recomputed"
        elif kind == "stash":
            nbytes = int(args[1] * self.activation_scale)
            if self.activation.nbytes < nbytes:
                self.activation = zeros(nbytes)
            held[args[0]] = self.state.runtime.memory.stash(self.activation.data_ptr(), nbytes, False)
        elif kind == "restore":
            held[args[0]].restore(self.activation.data_ptr())
        elif kind == "release":
            del held[args[0]]
        elif kind == "capture":
            place = self.places[args[0]]
            place.parameter.grad = self.gradients[: place.numel].view(place.shape)
            self.state.gradients.capture(place, args[1])
        elif kind == "step":
            optimizer_step(self.optimizer)
        else:
            raise AssertionError(kind)
        return None

    def sample(self, transient) -> None:
        stats = self.state.runtime.stats()
        resident = [r for r in self.state.streamer.cached_units.values() if r.storage is not None]
        views = {view.data_ptr() for view in self.held.values() if isinstance(view, torch.Tensor)}
        if transient is not None:
            views.add(transient.data_ptr())
        # Idle units stay until their buffer is wanted: leased, but not needed now.
        lingering = sum(
            r.unit.nbytes for r in resident if not r.users and r.ticket is None and r.storage.data_ptr() not in views
        )
        self.needed = max(self.needed, stats["host_bytes_in_use"] - lingering)
        if stats["host_bytes_peak"] > self.peak["bytes"]:
            self.peak = {
                "bytes": stats["host_bytes_peak"],
                "phase": self.phase,
                "units": [r.unit.name for r in resident],
                "tensors": sum(not tensor.packed for r in resident for tensor in r.unit.tensors),
            }

    def finish(self) -> dict:
        """Return the counters of the pool; the replay is over."""
        stats = self.state.runtime.stats()
        self.held.clear()
        self.state.close()
        del self.gradients, self.activation
        return stats


def replay(events, config: dict, budget: int, scale: float, workdir: Path) -> dict:
    model = stand_in(config)
    units = units_of(model)
    plan = make_plan(units, budget)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=workdir) as store:
        run = Replay(model, plan, units, Path(store), scale)
        run.run(events)
        stats = run.finish()
    classes = by_consumer(plan, stats["host_classes_at_peak"])
    reserved, peak = stats["host_bytes_reserved"], stats["host_bytes_peak"]
    assert sum(line["reserved"] for line in classes) == reserved == plan.arena_bytes
    assert sum(line["live"] for line in classes) == peak
    return {
        "budget_bytes": budget,
        "reserved_bytes": reserved,
        "live_bytes_at_peak": peak,
        "utilisation": peak / reserved,
        "needed_bytes_max": run.needed,
        "phase_of_peak": run.peak["phase"],
        "units_at_peak": run.peak["units"],
        "tensors_in_flight_at_peak": run.peak["tensors"],
        "weight_buffer_bytes": sum(line.total for line in plan.units),
        "consumers": classes,
        "fetches": run.fetches,
        "ssd_bytes": [stats["ssd_bytes_read"], stats["ssd_bytes_written"]],
        "seconds": round(time.perf_counter() - started, 1),
    }


def by_consumer(plan, classes) -> list[dict]:
    """Name the size classes of the pools after the plan's lines that they serve."""
    named: list[dict] = []
    found = iter(classes)
    for lines in (plan.buffers, plan.packs, [plan.staging, plan.staging_cache], [plan.slots], [plan.states]):
        sizes: dict[int, list[str]] = {}
        for line in lines:
            if line.count:
                sizes.setdefault(round_up(line.nbytes, PAGE_BYTES), []).append(line.consumer)
        for nbytes, names in sorted(sizes.items()):
            size, count, live = next(found)
            assert size == nbytes, "the pools are cut as the plan says"
            reserved = size * count
            name = " + ".join(dict.fromkeys(names))
            named.append({"consumer": name, "bytes": size, "count": count, "reserved": reserved, "live": live})
    return named


# --- reservations of others ---


def power_of_two(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 0).bit_length()


def rounding(sizes: list[int], threshold: float) -> float:
    """Reserved over requested where sizes up to `threshold` are rounded up to a power of two, as PyTorch does.

    `CachingHostAllocatorImpl::allocate` in ATen/core/CachingHostAllocator.h of PyTorch 2.13: a size that is at most
    `pinned_max_round_threshold()` and at most `pinned_max_cached_size()` becomes PowerOf2Ceil(size), any other stays.
    Both limits are without bound unless PYTORCH_ALLOC_CONF sets them.
    """
    return sum(power_of_two(size) if size <= threshold else size for size in sizes) / sum(sizes)


def census(config: dict) -> dict:
    units = units_of(stand_in(config))
    places = [place for unit in units for place in unit.places]
    alone = [place.nbytes for place in places if place.nbytes > ALONE_BYTES]
    largest = max(places, key=lambda place: place.numel)
    return {
        "parameters": sum(place.numel for place in places),
        "largest": {"name": largest.name, "numel": largest.numel, "bytes": largest.nbytes},
        "alone": {
            "tensors": len(alone),
            "bytes": sum(alone),
            "sizes": dict(sorted(Counter(alone).items())),
            "ours": sum(round_up(size, PAGE_BYTES) for size in alone) / sum(alone),
            "torch": rounding(alone, math.inf),
            **{f"torch_{limit}_mb": rounding(alone, limit * MIB) for limit in (64, 128, 512)},
        },
        "smallest": smallest_budget(units),
        "overlapping": smallest_plan(units).overlap_bytes,
        "slots": zero_infinity.in_flight_slots(
            [place.numel for unit in units if not unit.repeated for place in unit.places],
            [[place.numel for place in unit.places] for unit in units if unit.repeated],
            2,
        ),
        "units": [unit.name for unit in units],
        "places": sorted(place.name for place in places),
    }


# --- the report ---


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"


def idle(row: dict) -> str:
    """Return the bytes reserved but not asked for at the peak, by consumer; the JSON has those below 0.1 MiB too."""
    spare = {line["consumer"]: line["reserved"] - line["live"] for line in row["consumers"]}
    largest = sorted(spare.items(), key=lambda item: -item[1])
    return "; ".join(f"{who}: {nbytes / MIB:.1f} MiB" for who, nbytes in largest if nbytes >= MIB / 10) or "nothing"


def measure(name: str, args, workdir: Path) -> dict:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    if args.layers:
        key = "n_layer" if "n_layer" in config else "num_hidden_layers"
        config[key] = min(config[key], args.layers)
    recorder, facts = record(copy.deepcopy(config), args.steps, workdir)
    gc.collect()
    full = census(config)
    if (full["units"], full["places"]) != (facts["units"], facts["places"]):
        raise SystemExit(f"{name}: the narrow model has other units than the full one: NARROW does not suit it")
    same = replay(recorder.events, facts["narrow"], facts["budget"], 1.0, workdir)
    faithful = {
        "fetches_recorded": len(facts["fetches"]),
        "fetches_replayed": len(same["fetches"]),
        "fetches_same": facts["fetches"] == same["fetches"],
        "peak_recorded": facts["peak"],
        "peak_replayed": same["live_bytes_at_peak"],
    }
    print(f"{name}: {len(recorder.events)} events; narrow model, trained against replayed: {faithful}", flush=True)
    hidden = config.get("hidden_size") or config["n_embd"]
    scale = hidden / facts["hidden"] * args.tokens / RECORDED_TOKENS
    budgets = [full["smallest"], full["overlapping"], 2 * full["overlapping"]]
    if args.host_memory and memascend.parse_size(args.host_memory) >= full["smallest"]:
        budgets.append(memascend.parse_size(args.host_memory))
    runs = []
    for budget in budgets:
        row = replay(recorder.events, config, budget, scale, workdir)
        row["fetches"] = len(row["fetches"])
        pool = zero_infinity.parameter_pool_bytes(full["largest"]["numel"], full["slots"], 2)
        row["zero_infinity_bytes"] = pool
        row["saving"] = 1 - row["reserved_bytes"] / pool
        runs.append(row)
        print(
            f"  budget {gib(budget)} GiB: reserved {gib(row['reserved_bytes'])}, live at peak "
            f"{gib(row['live_bytes_at_peak'])} ({row['utilisation']:.1%}, {row['phase_of_peak']}), "
            f"idle: {idle(row)} ({row['seconds']} s)",
            flush=True,
        )
        gc.collect()
    del full["units"], full["places"]
    return {"model": name, "events": len(recorder.events), "faithful": faithful, "census": full, "runs": runs}


def report(results: list[dict]) -> str:
    use, zero, alone = [], [], []
    for result in results:
        full = result["census"]
        for row in result["runs"]:
            use.append(
                [
                    result["model"],
                    gib(row["budget_bytes"]),
                    gib(row["reserved_bytes"]),
                    gib(row["live_bytes_at_peak"]),
                    f"{row['utilisation']:.1%}" + ("" if row["utilisation"] >= UTILISATION_MIN else " (below 97%)"),
                    f"{row['needed_bytes_max'] / row['reserved_bytes']:.1%}",
                    row["phase_of_peak"],
                    idle(row),
                ]
            )
        least, overlapping = result["runs"][:2]
        default = zero_infinity.default_parameter_pool_bytes(full["largest"]["numel"], 2)
        zero.append(
            [
                result["model"],
                str(full["slots"]),
                gib(least["zero_infinity_bytes"]),
                gib(least["reserved_bytes"]),
                f"{least['saving']:.1%}",
                gib(overlapping["reserved_bytes"]),
                f"{overlapping['saving']:.1%}",
                gib(default),
                f"{1 - least['reserved_bytes'] / default:.1%}",
            ]
        )
        own = full["alone"]
        limits = [f"{own[f'torch_{limit}_mb']:.4f}" for limit in (64, 128, 512)]
        alone.append(
            [
                result["model"],
                str(own["tensors"]),
                gib(own["bytes"]),
                f"{own['ours']:.6f}",
                f"{own['torch']:.4f}",
                *limits,
            ]
        )
    return "\n\n".join(
        [
            "Utilisation: bytes asked for by live leases over bytes reserved, at the joint peak of all pools (GiB)\n\n"
            + markdown(
                [
                    "model",
                    "budget",
                    "reserved",
                    "live at peak",
                    "utilisation",
                    "needed at most",
                    "peak in",
                    "idle then",
                ],
                use,
            ),
            "Our whole arena against ZeRO-Infinity's parameter pool alone: slots x largest parameter (GiB)\n\n"
            + markdown(
                [
                    "model",
                    "its slots",
                    "its pool",
                    "least arena",
                    "saved",
                    "reading ahead",
                    "saved",
                    "its pool of 5",
                    "least saves",
                ],
                zero,
            ),
            "Reserved over requested, every tensor over 4 MiB allocated alone\n\n"
            + markdown(
                ["model", "tensors", "GiB", "memascend", "torch", "torch, 64 MB limit", "128 MB", "512 MB"],
                alone,
            ),
        ]
    )


def arguments() -> argparse.Namespace:
    known = sorted(path.stem for path in CONFIGS.glob("*.json"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(known), help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--host-memory", metavar="SIZE", help="one more budget, where it is enough")
    parser.add_argument("--steps", type=int, default=2, help="training steps to record and replay (default: 2)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a replayed batch (default: 2048)")
    parser.add_argument("--layers", type=int, help="cut the models to this depth, for trying the script out")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write results and machine here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is missed")
    args = parser.parse_args()
    args.models = args.models.split(",")
    if unknown := set(args.models) - set(known):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    return args


def main() -> int:
    args = arguments()
    os.environ["MEMASCEND_NULL_ENGINE"] = "1"  # it loses every byte, so it has to be asked for
    with tempfile.TemporaryDirectory(prefix="pool-", dir=".") as temporary:
        workdir = Path(temporary).resolve()
        about = machine(workdir)
        print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
        results = [measure(name, args, workdir) for name in args.models]
    print("\n" + report(results))
    low = [r["model"] for r in results for row in r["runs"] if row["utilisation"] < UTILISATION_MIN]
    low += [r["model"] for r in results if r["runs"][0]["saving"] < SAVING_MIN]
    low += [r["model"] for r in results if r["census"]["alone"]["ours"] > ROUNDING_MAX]
    print(
        f"\nbelow {UTILISATION_MIN:.0%} of use, {SAVING_MIN:.0%} saved at the least or {ROUNDING_MAX} of rounding: "
        f"{', '.join(low) or 'none'}"
    )
    written = {"machine": about, "tokens": args.tokens, "steps": args.steps, "results": results}
    return finish(written, args.json, []) or int(args.check and bool(low))


if __name__ == "__main__":
    run(main)
