#!/usr/bin/env python
"""The CUDA path on a machine with a GPU: whether it is exact, its memory, and how near it comes to the hardware.

    python benches/gpu.py --store /nvme/scratch                       # everything, into benches/results/gpu-<GPU>.json
    python benches/gpu.py --store /nvme/scratch --only exact,copy --minutes 9 --out gpu.json
    python benches/gpu.py --store /nvme/scratch --only step --models 7B --tokens 16384 --host-memory 16GiB
    python benches/gpu.py --smoke                                     # every section on the CPU, with a toy

Sections: `exact` (losses and weights, resident beside offloaded), `copy` (rates beside plain pinned copies), `plan`
(peaks beside the plans), `step` (time beside the floor by rates measured here), `activations` (peak and time by
policy), `peers` (DeepSpeed). Each measurement is a process of its own; one that fails is told and does not end the
rest. Results are written after each, and added to earlier ones in the file, so that a run may be made in parts.
benches/README.md explains the numbers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from _common import ChildFailed, run
from _gpu_bench import BY_DEFAULT, HERE, PEERS, POLICIES, SECTIONS, SHAPES, STATE_BYTES, Base, Stopped
from _gpu_steps import all_losses, beside_floors, moved_by, off_by, step_figures
from _gpu_tables import tables
from _llama import parameter_count
from device.floor import Rates


class Bench(Base):
    """The sections of one run."""

    def exact(self) -> None:
        model = "smoke" if self.small else "exact"
        options = {"steps": 6, "warmup": 0, "compare": True, "deterministic": True, "sequence": 256, "batch": 2}
        options |= {"accumulate": 2, "states": "float32"}
        if self.small:
            options |= {"sequence": 32, "steps": 3}
        options["host_memory"] = options["device_memory"] = None
        found: dict = {}

        def resident() -> dict:
            found.update(self.train("exact", "resident", model, 0, **options, system="resident"))
            return {"losses": all_losses(found), "cut_short": found["cut_short"]}

        if self.rows("exact", "resident", resident) is None:
            return
        # So little that the device keeps 4 of 8 layers, the host 3, and that most gradients go to the store.
        options["host_memory"] = "16MiB" if self.small else "128MiB"
        options["device_memory"] = None if self.args.smoke else ("256MiB" if self.args.toy else "352MiB")
        for policy in self.policies:

            def offloaded(policy=policy) -> dict:
                told = self.train("exact", policy, model, 0, **options, policy=policy)
                if told["cut_short"]:
                    raise ChildFailed(told["cut_short"])  # fewer steps than the resident run's show nothing
                weights, reference = told.get("weights", {}), found.get("weights", {})
                moved = [name for name in reference if weights.get(name) != reference[name]]
                return {
                    "losses": all_losses(told),
                    "losses_equal": all_losses(told) == all_losses(found),
                    "tensors": len(weights),
                    "tensors_different": moved[:5],
                    "weights_equal": bool(reference) and weights == reference,
                }

            self.rows("exact", policy, offloaded)

    def copy(self) -> None:
        for direction in ("h2d", "d2h"):

            def ratio(direction=direction) -> dict:
                copies = self.rates("copies")["copies"]
                if "error" in copies:
                    raise ChildFailed(copies["error"])
                return copies[direction]

            self.rows("copy", direction, ratio)

    def plan(self) -> None:
        model, tokens = self.args.models[0], max(self.args.tokens)
        for policy in self.policies:
            name = f"{model}, {tokens} tokens, {policy}"

            def peaks(policy=policy, name=name) -> dict:
                # Steady from the second step on: one warms up, and one measured is enough.
                told = self.train("plan", name, model, tokens, policy=policy, watch=True, steps=2)
                host, device = told["host_peak"], told["device_peak"]
                row = {
                    "device_planned_bytes": told.get("device_bytes_planned"),
                    "device_reserved_bytes": device["reserved_bytes"],
                    "device_allocated_bytes": device["allocated_bytes"],
                    "device_driver_bytes": device["driver_bytes"],
                    "host_planned_bytes": told.get("host_bytes_planned"),
                    "host_held_bytes": host.get("held_bytes"),
                    "host_resident_bytes": host["resident_bytes"],
                    "host_unavailable_bytes": host["unavailable_bytes"],
                    "pinned_in_rss": host.get("pinned_in_rss"),
                    "plan": told.get("plan"),
                    "notices": told.get("notices"),
                    "cut_short": told["cut_short"],
                }
                return row | {
                    "device_off_by": off_by(row["device_reserved_bytes"], row["device_planned_bytes"]),
                    "driver_off_by": off_by(row["device_driver_bytes"], row["device_planned_bytes"]),
                    "host_off_by": off_by(row["host_held_bytes"], row["host_planned_bytes"]),
                }

            self.rows("plan", name, peaks)

    def step(self) -> None:
        for model in self.args.models:
            for tokens in self.args.tokens:
                resident = self.resident(model, tokens) if self.args.resident else None
                for device, host in self.args.budgets or [(self.args.device_memory, self.host_memory())]:
                    name = f"{model}, {tokens} tokens{self.variant()}"
                    name += f", {device} of device and {host} of host memory" if self.args.budgets else ""

                    def one(model=model, tokens=tokens, name=name, budgets=(device, host), beside=resident) -> dict:
                        return self.one(model, tokens, name, budgets, beside)

                    self.rows("step", name, one)

    def variant(self) -> str:
        """Return the name of a step's settings, if unusual: rows of one name replace each other."""
        args = self.args
        parts = [f"{args.states} states"] if args.states != "float32" else []
        parts += [f"inputs by {args.activations}"] if args.activations != "recompute" else []
        parts += [f"LoRA of rank {args.lora}"] if args.lora else []
        parts += ["updated in the backward pass, not clipped"] if args.update == "backward" else []
        parts += ["compiled"] if args.compile else []
        parts += [f"tiles {args.tile_tokens}"] if args.tile_tokens else []
        return "".join(f", {part}" for part in parts)

    def resident(self, model: str, tokens: int) -> float | None:
        """Return the seconds of a step of the resident model, with PyTorch's fused AdamW over fp32 masters."""
        name = f"{model}, {tokens} tokens{self.variant()}, resident"

        def measure() -> dict:
            told = self.train("resident", name, model, tokens, system="resident-fused", policy=self.args.activations)
            return step_figures(told, tokens, parameter_count(*SHAPES[model][:2]))

        row = self.rows("resident", name, measure)
        return None if row is None else row["step_s"]

    def one(self, model: str, tokens: int, name: str, budgets: tuple, resident: float | None) -> dict:
        policy = self.args.activations
        options = {"policy": policy, "inspect": True, "device_memory": budgets[0], "host_memory": budgets[1]}
        told = self.train("step", name, model, tokens, **options)
        row = step_figures(told, tokens, parameter_count(*SHAPES[model][:2]))
        row |= {"sequences": "{} at a time, {} times".format(*self.batches(tokens)), "activations": policy}
        sequence = min(self.args.sequence, tokens)
        passes = {"recomputed": policy != "keep", "frozen": self.args.lora is not None}
        moved = moved_by(told, SHAPES[model], tokens, sequence, **passes)
        errors = {}
        pass_seconds = None
        try:
            batch, accumulate = self.batches(tokens)
            if not self.args.no_compute:
                pass_seconds = accumulate * self.compute_seconds(model, batch, sequence)["pass_seconds"]
        except ChildFailed as error:
            errors["compute"] = str(error)
        try:
            rates = self.hardware_rates()
        except ChildFailed as error:
            rates, errors["rates"] = Rates(), str(error)
        row |= beside_floors(row, moved, rates, pass_seconds) | {"floor_errors": errors}
        return row | {"resident_s": resident, "of_resident": None if resident is None else row["step_s"] / resident}

    def trace(self) -> None:
        """Trace one step of the smallest model whose layers fill a device: how far copies run beside kernels."""
        model, tokens = ("tiny", 256) if self.args.toy or self.args.smoke else ("0.4B", 16384)
        out = self.args.trace or self.workdir / "trace.json.gz"
        # Everything in host memory: the trace shows how the processor, the copies and the device wait for each other.
        budgets = {"device_memory": None if self.args.smoke else "6GiB", "host_memory": "16GiB"}
        if self.args.toy:
            budgets = {"device_memory": "256MiB", "host_memory": "256MiB"}

        def traced() -> dict:
            options = {"steps": 1, "warmup": 1, "inspect": True, "trace": str(out.resolve()), **budgets}
            told = self.train("trace", "trace", model, tokens, policy="host", **options)
            steps = [step for step in told["steps"] if step["kind"] == "inspected"]
            if not steps:
                raise ChildFailed(told["cut_short"] or "no step was inspected")
            row = {"model": model, "tokens": tokens, "step_s": steps[0]["seconds"], "file_bytes": out.stat().st_size}
            return row | {key: steps[0][key] for key in ("profile", "synchronising", "timeline", "moved")}

        self.rows("trace", "trace", traced)

    def activations(self) -> None:
        model = self.args.models[0]
        for tokens in sorted(self.args.tokens, reverse=True):
            kept = None
            for policy in ("keep", *self.policies):
                name = f"{model}, {tokens} tokens, {policy}"

                def peak(policy=policy, name=name, tokens=tokens) -> dict:
                    told = self.train("activations", name, model, tokens, policy=policy)
                    measured = [step["seconds"] for step in told["steps"] if step["kind"] == "measured"]
                    return {
                        "tokens": tokens,
                        "policy": policy,
                        "step_s": statistics.median(measured),
                        "steps_s": measured,
                        **told["device_peak"],
                        "cut_short": told["cut_short"],
                    }

                row = self.rows("activations", name, peak)
                if policy == "keep":
                    kept = row
                if kept is None:
                    break
            # Fewer tokens only where keeping so many does not fit: the comparison needs both.
            if kept is not None:
                return

    def peers(self) -> None:
        model, tokens = self.args.models[0], max(self.args.tokens)
        if self.args.deepspeed_python is None:
            self.put("peers", {"name": "DeepSpeed", "failed": "no interpreter with it was given (--deepspeed-python)"})
            return
        for system in ("memascend", *self.args.systems):
            name = f"{model}, {tokens} tokens, {system}"

            def peer(system=system, name=name) -> dict:
                told = self.deepspeed(name, model, tokens, system)
                measured = [step["seconds"] for step in told["steps"] if step["kind"] == "measured"]
                found = {key: told.get(key) for key in ("deepspeed_config", "versions", "notes", "cut_short")}
                return found | {
                    "system": system,
                    "model": f"{model}, {tokens} tokens",
                    "step_s": statistics.median(measured),
                    "steps_s": measured,
                    "device_reserved_bytes": told["device_peak"]["reserved_bytes"],
                    "host_unavailable_bytes": told["host_peak"]["unavailable_bytes"],
                    "host_resident_bytes": told["host_peak"]["resident_bytes"],
                    "losses": [step["loss"] for step in told["steps"]],
                }

            self.rows("peers", name, peer)

    def deepspeed(self, name: str, model: str, tokens: int, system: str) -> dict:
        if system == "memascend":
            return self.train("peers", name, model, tokens, policy=self.args.activations)
        with tempfile.TemporaryDirectory(dir=self.store[0]) as nvme:
            try:
                return self.train("peers", name, model, tokens, system=system, store=[nvme])
            except ChildFailed as error:
                # DeepSpeed 0.19.8 may queue a parameter twice for prefetch where forward turns into backward.
                if "already assigned swap buffer" not in str(error):
                    raise
            zero = {"stage3_prefetch_bucket_size": 0}
            found = self.train("peers", name, model, tokens, system=system, store=[nvme], zero=zero)
            return found | {"notes": "without prefetch: DeepSpeed asserts 'already assigned swap buffer' with it"}


# --- the command line ---


def names(allowed):
    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return text.split(",")

    return parse


def budgets(text: str) -> list[tuple[str, str]]:
    """Return the pairs of device and host memory."""
    pairs = [tuple(pair.split("/")) for pair in text.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of DEVICE/HOST, as 6GiB/12GiB,24GiB/least")
    return pairs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    shown = ", ".join(SECTIONS)
    text = f"of {shown} (default: all but trace)"
    add("--only", type=names(SECTIONS), default=list(BY_DEFAULT), metavar="A,B", help=text)
    models = [name for name in SHAPES if name not in ("smoke", "exact")]
    text = f"of {', '.join(models)}; all but step take the first (default: 1.5B,7B)"
    add("--models", type=names(models), default=["1.5B", "7B"], metavar="A,B", help=text)
    text = "tokens of a step (default: 4096,16384); all but step take the most"
    add("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[4096, 16384], help=text)
    add("--sequence", type=int, default=4096, metavar="N", help="tokens of a sequence (default: 4096)")
    add("--accumulate", action="store_true", help="take a step's sequences one after another, not as one batch")
    text = "where inputs of layers wait in `step` and `peers` (default: recompute)"
    add("--activations", choices=POLICIES, default="recompute", help=text)
    add("--steps", type=int, default=5, metavar="N", help="measured steps (default: 5)")
    add("--warmup", type=int, default=2, metavar="N", help="steps before them (default: 2)")
    add("--states", choices=STATE_BYTES, default="float32", help="optimizer states (default: float32)")
    text = "of the steps (default: none, as the peers; a store with steps takes almost twice the room)"
    add("--durability", default="none", metavar="WHAT", help=text)
    text = "in the next forward pass, clipped by norm, or in the backward pass, not clipped (default: forward)"
    add("--update", choices=("forward", "backward"), default="forward", help=text)
    text = "directories for stores, on different drives if several (default: --workdir)"
    add("--store", type=Path, nargs="+", metavar="DIR", help=text)
    text = "models are written here and kept (default: a temporary directory here, removed at the end)"
    add("--workdir", type=Path, metavar="DIR", help=text)
    add("--host-memory", metavar="SIZE", help="budget (default: 32 GiB, or half of what is available)")
    add("--device-memory", metavar="SIZE", help="budget (default: what is free)")
    text = "pairs of both, DEVICE/HOST, one after another in `step`; HOST may be `least` (6GiB/least,24GiB/100GiB)"
    add("--budgets", type=budgets, metavar="D/H,...", help=text)
    add("--resident", action="store_true", help="in `step`, first a step of the model resident on the device")
    add("--rates", type=Path, metavar="FILE", help="what `python -m device.probe` measured in this call, for floors")
    add(
        "--trace", type=Path, metavar="FILE", help="where `trace` puts the step's trace, *.json.gz (default: --workdir)"
    )
    add("--device", default="cuda", metavar="DEVICE", help="where to compute (default: cuda)")
    add("--deepspeed-python", metavar="PATH", help="an interpreter that has deepspeed, for `peers`")
    add("--systems", type=names(PEERS), default=PEERS, metavar="A,B", help=f"of {', '.join(PEERS)} (default: all)")
    add("--minutes", type=float, metavar="M", help="end within so many; what does not fit is told")
    add("--timeout", type=float, default=3600, metavar="S", help="seconds for one measurement (default: 3600)")
    add("--out", type=Path, metavar="FILE", help="results (default: benches/results/gpu-<GPU>.json); added to if there")
    add("--check", action="store_true", help="exit 1 when a limit is missed, or nothing was measured")
    add("--smoke", action="store_true", help="every section on the CPU with a toy: that the script runs, no result")
    text = "adapters of this rank alone are trained, over weights read from the model's files (default: all weights)"
    add("--lora", type=int, metavar="RANK", help=text)
    add("--compile", action="store_true", help="torch.compile each layer")
    text = "tokens that MLPs and norms compute at once, or auto (default: all)"
    add("--tile-tokens", type=lambda text: text if text == "auto" else int(text), metavar="T", help=text)
    add("--no-compute", action="store_true", help="measure no pass of a resident model for the floor of `step`")
    add(
        "--policies",
        type=names(POLICIES),
        metavar="A,B",
        help="policies of `exact`, `plan`, `activations` (default: all)",
    )
    add("--toy", action="store_true", help="on the device, with toy sizes: that the script runs, no result")
    args = parser.parse_args()
    positions = min(SHAPES[model][2] for model in args.models)
    if args.sequence > positions or any(tokens > args.sequence and tokens % args.sequence for tokens in args.tokens):
        parser.error(f"--sequence is at most {positions}, and --tokens a number of whole sequences")
    if args.smoke:
        if args.out is not None and args.out.resolve().parent == HERE / "results":
            parser.error("--smoke measures nothing of a GPU: give an --out that is not in benches/results")
        args.models, args.tokens, args.sequence, args.steps, args.warmup = ["smoke"], [128], 64, 2, 1
        args.budgets, args.resident = None, False
    return args


def benchmark(args: argparse.Namespace, workdir: Path) -> int:
    for place in args.store or []:
        place.mkdir(parents=True, exist_ok=True)
    bench = Bench(args, workdir)
    title = "cpu smoke, no result: " if args.smoke else ""
    print(title + ", ".join(f"{key}: {value}" for key, value in bench.results["machine"].items()), flush=True)
    if not args.smoke and bench.results["machine"]["gpu"] is None:
        print("this PyTorch finds no CUDA device: only --smoke runs here", file=sys.stderr)
        return 1
    try:
        for section in SECTIONS:
            if section in args.only:
                getattr(bench, section)()
    except (Stopped, KeyboardInterrupt):
        bench.stopped = True
        bench.tell(f"interrupted; what was measured is in {bench.out}")
    rows = bench.results["rows"]
    print("\n" + bench.without_paths(tables(rows)) + "\n")
    verdicts = bench.verdicts()
    for passed, what in verdicts:
        print(f"{'pass' if passed else 'FAIL'}  {what}")
    if bench.stopped:
        return 130
    if args.check and not (verdicts and all(passed for passed, _ in verdicts)):
        return 1
    # Each section that was asked for has something to show; without DeepSpeed there are no peers.
    wanted = set(args.only) - ({"peers"} if args.deepspeed_python is None else set())
    return 0 if all(any("failed" not in row for row in rows.get(section, [])) for section in wanted) else 1


def main() -> int:
    args = arguments()
    if args.workdir:
        args.workdir.mkdir(parents=True, exist_ok=True)
        return benchmark(args, args.workdir.resolve())
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=".") as temporary:
        return benchmark(args, Path(temporary).resolve())


if __name__ == "__main__":
    run(main)
