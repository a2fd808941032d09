"""The environment of a run of gpu.py: the machine, the file of results, child processes, models and rates."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _common import GB, ChildFailed, fork, machine, mem_available, start
from _gpu_steps import rates_here
from _gpu_tables import checks
from _llama import parameter_count
from device.floor import Rates, rates_of

HERE = Path(__file__).resolve().parent
SECTIONS = ("exact", "copy", "plan", "step", "activations", "peers", "trace")
#: Parts that toys and smoke runs leave out, unless asked for.
BY_DEFAULT = SECTIONS[:-1]
POSITIONS = 4096
#: name: ((hidden, intermediate, layers, heads, key/value heads), words, positions)
SHAPES = {
    "smoke": ((64, 192, 4, 4, 2), 256, POSITIONS),
    "exact": ((1024, 3072, 8, 8, 4), 4096, POSITIONS),
    "tiny": ((512, 1536, 8, 8, 4), 4096, POSITIONS),
    "0.4B": ((2048, 5504, 6, 16, 16), 32_000, POSITIONS),
    "1.5B": ((2048, 5504, 28, 16, 16), 32_000, POSITIONS),
    "3B": ((3072, 8192, 24, 24, 24), 32_000, POSITIONS),
    "7B": ((4096, 11008, 32, 32, 32), 32_000, POSITIONS),
    "8B-2L": ((4096, 14336, 2, 32, 8), 32_000, 131_072),
    "8B": ((4096, 14336, 32, 32, 8), 128_256, 131_072),
}
POLICIES = ("recompute", "host", "ssd")
#: Bytes of a parameter on the store: weight, the master's low half and gradient, and the two moments.
STORE_BYTES, STATE_BYTES = 6, {"float32": 8, "bfloat16": 4, "8bit": 2}
#: DeepSpeed as it is, and after `import memascend.deepspeed`.
PEERS = ("zero-infinity", "zero-infinity-memascend", "zero-offload", "zero-offload-memascend")
#: DeepSpeed's: weight, fp32 master, gradient and moments, where they are kept.
PEER_BYTES = 18
#: The module that a measuring process runs, and modules that take long to import.
IMPORTS = ["_gpu_child", "transformers.models.llama.modeling_llama", "memascend"]
#: The least memory of a context and the first kernels.
START_SECONDS = 5
#: Bytes per second at which models are written and loaded at best: a run without time for that is not begun.
SETUP_RATE = 1.5e9


class Stopped(Exception):
    """The user ended the run; its measurements are kept."""


class Base:
    """The processes of one run, and the file with their measurements."""

    def __init__(self, args: argparse.Namespace, workdir: Path) -> None:
        self.args, self.workdir = args, workdir
        self.store = [str(place.resolve()) for place in args.store or [workdir]]
        self.device = "cpu" if args.smoke else args.device
        self.policies = args.policies or (("ssd",) if self.args.smoke or self.args.toy else POLICIES)
        self.began = time.monotonic()
        self.stopped = False
        if self.small:
            os.environ["OMP_NUM_THREADS"] = "1"  # a toy's threads would do nothing but wait for each other
        self.results: dict = {"smoke": args.smoke, "machine": self.machine(), "rows": {}}
        self.out = args.out
        if self.out is None and not args.smoke:
            self.out = HERE / "results" / f"gpu-{self.slug()}.json"
        self.load()
        self._rates: dict | None = None
        self._compute: dict = {}

    @property
    def small(self) -> bool:
        """Whether toys are measured, to see that the script runs."""
        return self.args.smoke or self.args.toy

    @property
    def probed(self) -> bool:
        """Whether a probe has measured the machine in this call."""
        return self.args.rates is not None and self.args.rates.is_file()

    # ---- the machine and the file ---------------------------------------------------------------------

    def machine(self) -> dict:
        about = machine(Path(self.store[0]))
        try:
            about |= self.child("describe", {"task": "describe"})
        except ChildFailed as error:
            self.tell(f"no usable CUDA device: {error}")
            about["gpu"] = None
        query = {
            "driver": "driver_version",
            "pcie_generation": "pcie.link.gen.max",
            "pcie_width": "pcie.link.width.max",
            "power_limit": "power.limit",
        }
        command = ["nvidia-smi", f"--query-gpu={','.join(query.values())}", "--format=csv,noheader", "--id=0"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=30)
            about |= dict(zip(query, (field.strip() for field in told.stdout.split(",")), strict=True))
        except (OSError, ValueError, subprocess.TimeoutExpired):
            about |= dict.fromkeys(query, "unknown")
        return about

    def slug(self) -> str:
        name = str(self.results["machine"]["gpu"]).lower()
        return re.sub(r"[^a-z0-9]+", "-", name.removeprefix("nvidia ")).strip("-")

    def options(self) -> dict:
        names = ("models", "tokens", "sequence", "accumulate", "steps", "warmup", "states", "durability")
        chosen = {name: getattr(self.args, name) for name in names}
        return chosen | {name: getattr(self.args, name) for name in ("host_memory", "device_memory", "minutes")}

    def load(self) -> None:
        """Go on with the file's results, which must be of this GPU."""
        if self.out is None or not self.out.is_file():
            return
        known = json.loads(self.out.read_text())
        if (known["machine"]["gpu"], known["smoke"]) != (self.results["machine"]["gpu"], self.args.smoke):
            shown = "a smoke run" if known["smoke"] else known["machine"]["gpu"]
            sys.exit(f"{self.out} holds results of {shown}: give another --out, or move it away")
        self.results["rows"] = known["rows"]
        self.tell(f"adding to {self.out.name}")

    def put(self, section: str, row: dict) -> None:
        """Keep a row in the place of one of its name; the file is complete at any time."""
        rows = [known for known in self.results["rows"].get(section, []) if known["name"] != row["name"]]
        self.results["rows"][section] = [
            *rows,
            row | {"date": time.strftime("%Y-%m-%d %H:%M"), "options": self.options()},
        ]
        self.results["checks"] = [{"pass": passed, "what": what} for passed, what in self.verdicts()]
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            part = self.out.with_suffix(".part")
            part.write_text(self.without_paths(json.dumps(self.results, indent=1)) + "\n")
            part.replace(self.out)
        if self.stopped:
            raise Stopped

    def verdicts(self) -> list[tuple[bool, str]]:
        rows = self.results["rows"]
        # A toy on the CPU shows nothing of a GPU but that the arithmetic is the same.
        return checks({"exact": rows.get("exact", [])} if self.args.smoke else rows)

    def without_paths(self, text: str) -> str:
        for place in sorted({str(self.workdir), *self.store}, key=len, reverse=True):
            text = text.replace(place, "WORKDIR")
        return text

    def tell(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", file=sys.stderr, flush=True)

    # ---- processes --------------------------------------------------------------------------------------

    def left(self) -> float:
        """Return the seconds of the time budget."""
        minutes = self.args.minutes
        return 1e9 if minutes is None else 60 * minutes - (time.monotonic() - self.began)

    def child(self, name: str, job: dict, python: str = sys.executable, need_s: float = 0) -> dict:
        """Run a job in its own process. Partial results of a failed or stopped one are kept, with `cut_short`."""
        left = self.left()
        if left < START_SECONDS + need_s:
            raise ChildFailed(f"no time left: it takes more than {START_SECONDS + need_s:.0f} s, {left:.0f} s are left")
        job = {"device": self.device, "until": time.time() + left - START_SECONDS / 4, "store": self.store, **job}
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if job.get("deterministic") else {}
        limit = min(left, self.args.timeout)
        try:
            if python == sys.executable and not job.get("system", "").startswith("zero"):
                return fork(IMPORTS, job, name, self.workdir, limit, environment)
            return start([python, str(HERE / "_gpu_child.py")], job, name, self.workdir, limit, environment)
        except (ChildFailed, KeyboardInterrupt) as error:
            kept = self.workdir / f"{name}.result.json"
            reason = str(error) if isinstance(error, ChildFailed) else "interrupted"
            self.stopped = self.stopped or isinstance(error, KeyboardInterrupt)
            found = json.loads(kept.read_text()) if kept.is_file() else {}
            if not found:
                raise ChildFailed(reason) from None
            return found | {"cut_short": reason}
        finally:
            for place in self.store:
                shutil.rmtree(f"{place}/gpu-store", ignore_errors=True)

    def model(self, name: str) -> str:
        """Return the directory of a model, written where it is not there yet."""
        path = self.workdir / "models" / name
        if not path.is_dir():
            shape, words, positions = SHAPES[name]
            nbytes = 2 * parameter_count(shape, words)
            free = shutil.disk_usage(self.workdir).free
            if free < nbytes * 1.05:
                raise ChildFailed(f"the model takes {nbytes / GB:.1f} GB, {free / GB:.1f} GB of disk are free")
            self.tell(f"writing {name}, {nbytes / GB:.1f} GB")
            half = path.with_suffix(".part")
            shutil.rmtree(half, ignore_errors=True)
            job = {"task": "write", "shape": shape, "vocabulary": words, "positions": positions}
            self.child(f"write-{name}", job | {"model_dir": str(half)}, need_s=nbytes / SETUP_RATE)
            half.rename(path)
        return str(path)

    def train(self, section: str, row: str, model: str, tokens: int, **options) -> dict:
        """Train, and return the results; raises ChildFailed where there are none."""
        shape, words, positions = SHAPES[model]
        batch, accumulate = self.batches(tokens)
        job = {
            "task": "train",
            "system": "memascend",
            "shape": shape,
            "vocabulary": words,
            "positions": positions,
            "sequence": min(self.args.sequence, tokens),
            "batch": batch,
            "accumulate": accumulate,
            "policy": "recompute",
            "steps": self.args.steps,
            "warmup": self.args.warmup,
            "inspect": False,
            "watch": False,
            "compare": False,
            "deterministic": False,
            "host_memory": self.host_memory(),
            "device_memory": self.args.device_memory,
            "states": self.args.states,
            "durability": self.args.durability,
            "update": self.args.update,
            "lora": self.args.lora,
            "compile": self.args.compile,
            "tile_tokens": self.args.tile_tokens,
        } | options
        python = self.args.deepspeed_python if job["system"].startswith("zero") else sys.executable
        count = parameter_count(shape, words)
        self.check_room(job, count)
        job["model_dir"] = self.model(model)
        self.tell(f"{section}: {row}")
        found = self.child(f"{section}-{re.sub(r'[^A-Za-z0-9.]+', '-', row)}", job, python, 4 * count / SETUP_RATE)
        if "weights" not in found and not any(step["kind"] == "measured" for step in found.get("steps", [])):
            raise ChildFailed(found.get("cut_short") or "it took no step")
        return found

    def batches(self, tokens: int) -> tuple[int, int]:
        """Return the sequences at a time, and how often in a step."""
        sequences = max(1, tokens // self.args.sequence)
        return (1, sequences) if self.args.accumulate else (sequences, 1)

    def check_room(self, job: dict, count: int) -> None:
        if job["system"] == "memascend":
            need = count * (STORE_BYTES + STATE_BYTES[job["states"]])
            if job["durability"] != "none":  # a second slot for all but the gradient
                need += count * (STORE_BYTES - 2 + STATE_BYTES[job["states"]])
        elif job["system"].startswith("resident"):
            return  # on the device, which tells by itself
        elif job["system"].startswith("zero-infinity"):
            need = count * PEER_BYTES
        else:
            need, free = count * (PEER_BYTES - 2), mem_available()
            if need > free:
                raise ChildFailed(f"it takes about {need / GB:.1f} GB of host memory, {free / GB:.1f} GB are free")
            return
        free = sum(shutil.disk_usage(place).free for place in self.store)
        if need > free:
            raise ChildFailed(f"it takes about {need / GB:.1f} GB of disk, {free / GB:.1f} GB are free")

    def host_memory(self) -> int | str:
        if self.args.host_memory is not None:
            return self.args.host_memory
        # So little in a smoke run that something goes to the store.
        return (16 << 20) if self.small else min(32 << 30, mem_available() // 2)

    # ---- rates ------------------------------------------------------------------------------------------

    def rates(self, *parts: str) -> dict:
        """Of copies, host memory and drives; measured once in a run. Raises ChildFailed where one of `parts` is not."""
        if self._rates is None:
            self.tell("rates: copies, host memory, drives")
            job = {
                "task": "rates",
                # The probe has the others.
                "parts": ("copies",) if self.probed else ("copies", "dram_bytes_per_s", "ssd"),
                "repeats": 5,
                "bytes": 1 << 30,
                "ssd_bytes": 1 << 30,
                "ssd_seconds": 1.0,
            }
            if self.small:
                job |= {"repeats": 2, "bytes": 8 << 20, "ssd_bytes": 16 << 20, "ssd_seconds": 0.05}
            try:
                self._rates = self.child("rates", job, need_s=5 if self.probed else 15)
            except ChildFailed as error:
                self._rates = {"cut_short": str(error)}
        if not set(parts) <= self._rates.keys():
            raise ChildFailed(self._rates.get("cut_short", "it was not measured"))
        return self._rates

    def compute_seconds(self, model: str, batch: int, sequence: int) -> dict:
        """Of a pass with everything on the device."""
        key = (model, batch, sequence)
        if key not in self._compute:
            self.tell(f"compute: {model}, {batch} x {sequence} tokens, resident")
            shape, words, positions = SHAPES[model]
            job = {"task": "compute", "shape": shape, "vocabulary": words, "positions": positions, "repeats": 5}
            name = f"compute-{model}-{batch}"
            self._compute[key] = self.child(name, job | {"batch": batch, "sequence": sequence}, need_s=10)
        return self._compute[key]

    def hardware_rates(self) -> Rates:
        """Return the rates that the probe of the same call measured, if any, or that this run measures itself."""
        if self.probed:
            return rates_of(json.loads(self.args.rates.read_text()))
        return rates_here(self.rates("copies", "dram_bytes_per_s", "ssd"))

    def rows(self, section: str, name: str, measure) -> dict | None:
        """Put the row that `measure` gives, or why there is none; returns it, or None."""
        try:
            row = measure()
        except ChildFailed as error:
            if not self.stopped:
                self.tell(f"{section}: {name}: {error}")
            self.put(section, {"name": name, "failed": str(error)})
            return None
        self.put(section, {"name": name, **row})
        return row
