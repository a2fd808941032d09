"""The stages of `benches/device_run.sh`: the command of each, its time limit, and the file it writes.

Standard library only: the first stage installs the package that the others measure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHES = ROOT / "benches"
#: Seconds that a call may take in all: the limits of each group's stages sum up to less.
CALL_SECONDS = 540
#: Seconds before its limit at which a stage that can end by itself is told to.
MARGIN = 8
#: Files that may lie under $OUT at the end, the summary and the logs among them.
FILES_MAX = 8
SUMMARY, LOGS = "device.json", "logs.tar.gz"
#: The folder that a run makes on the drive, and removes.
OWN = "memascend-device-run"


@dataclass(frozen=True)
class Settings:
    """Where a run works, and how large."""

    out: Path
    #: For logs and the unpacked wheel.
    base: Path
    #: On the drive that is measured.
    store: Path
    #: Where models are written: host memory if there is plenty, else the drive.
    models: Path
    #: A wheel, or a folder of wheels; None to take memascend as it is installed.
    wheel: Path | None = None
    rehearse: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def site(self) -> Path:
        """Where the wheel is unpacked."""
        return self.base / "site"

    @property
    def logs(self) -> Path:
        """Where each stage's output goes."""
        return self.base / "logs"

    def python(self, *words: object) -> list[str]:
        """Return the command that runs this interpreter with `words`."""
        return [sys.executable, *map(str, words)]

    def option(self, name: str, usual: str, toy: str) -> str:
        """Return a size from the environment, else the usual one, or a toy's in a rehearsal."""
        return self.environment.get(name) or (toy if self.rehearse else usual)


@dataclass(frozen=True)
class Stage:
    """One process with a limit of its own."""

    name: str
    groups: tuple[str, ...]
    #: Seconds, after which everything that the stage has started is killed.
    limit: int
    command: Callable[[Settings], list[str] | str]
    #: The file under $OUT that the stage writes or adds to; None where the log says all.
    file: str | None = None

    def minutes(self) -> str:
        """Return the minutes in which a stage that can end by itself has to."""
        return f"{(self.limit - MARGIN) / 60:.2f}"


def install(settings: Settings) -> list[str] | str:
    """Unpack the wheel beside the interpreter's packages; a string says why there is nothing to do."""
    if settings.wheel is None:
        return "no wheel was given: memascend is taken as it is installed"
    flags = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--quiet")
    wheels = sorted(settings.wheel.glob("*.whl")) if settings.wheel.is_dir() else [settings.wheel]
    return settings.python("-m", "pip", "install", *flags, "--target", settings.site, *wheels)


def probe(settings: Settings) -> list[str]:
    size = "toy" if settings.rehearse else "full"
    seconds = STAGES["probe"].limit - 15
    words = ("--store", settings.store, "--out", settings.out / "probe.json", "--size", size, "--seconds", seconds)
    return settings.python("-W", "ignore", "-m", "device.probe", *words)


def gpu(stage: str, only: str, *words: object) -> Callable[[Settings], list[str]]:
    """Return the command of `benches/gpu.py` for some of its sections."""

    def command(settings: Settings) -> list[str]:
        chosen = ["--store", settings.store, "--workdir", settings.models, "--out", settings.out / "gpu.json"]
        chosen += ["--only", only, "--minutes", STAGES[stage].minutes(), "--rates", settings.out / "probe.json"]
        chosen += ["--toy"] if settings.rehearse else []
        return settings.python(BENCHES / "gpu.py", *chosen, *words)

    return command


def steps(
    stage: str, model: str, budgets: str, *words: object, tokens: str = "16384"
) -> Callable[[Settings], list[str]]:
    """Return the command that measures steps of a model by budgets, DEVICE/HOST; the environment may choose others."""

    def command(settings: Settings) -> list[str]:
        sizes = {
            "--models": settings.option("MODELS", model, "tiny"),
            "--budgets": settings.option("BUDGETS", budgets, "256MiB/256MiB,256MiB/least"),
            "--tokens": settings.option("TOKENS", tokens, "256"),
            "--sequence": settings.option("SEQUENCE", "4096", "128"),
            # The first steps fault in their memory.
            "--steps": settings.option("STEPS", "3", "1"),
            "--warmup": settings.option("WARMUP", "2", "1"),
        }
        flat = [word for pair in sizes.items() for word in pair]
        return gpu(stage, "step", *flat, *words)(settings)

    return command


def overflow(settings: Settings) -> list[str]:
    sizes = ("--gpu-gib", "0.001", "--repeats", "1") if settings.rehearse else ("--gpu-gib", "4", "--repeats", "7")
    words = ("--elements", "1", "--threads", "1", *sizes, "--json", settings.out / "overflow.json")
    return settings.python(BENCHES / "overflow.py", *words)


def counters(settings: Settings) -> list[str] | str:
    """Read the hardware's counters of the overflow kernels, where Nsight Compute is there."""
    if settings.rehearse or shutil.which("ncu") is None:
        return "Nsight Compute (ncu) is not there" if not settings.rehearse else "a rehearsal has no counters"
    return settings.python("-m", "device.counters", "--into", settings.out / "overflow.json")


def large(stage: str, *words: object, tokens: str = "16384") -> Callable[[Settings], list[str]]:
    """Return the command for 8 billion parameters in 24 GiB of device memory, on two volumes.

    Files that do not fit on the drive lie in /dev/shm, which is memory: the figures are of both.
    """

    def command(settings: Settings) -> list[str]:
        second = settings.models / "second-volume"
        sizes = ["--states", settings.option("STATES", "8bit", "8bit"), "--store", settings.store, second]
        sizes += ["--activations", settings.option("ACTIVATIONS", "host", "host"), *words]
        return steps(stage, "8B", "24GiB/12GiB", *sizes, tokens=tokens)(settings)

    return command


def contexts(stage: str, tokens: str, toy: str, *words: object) -> Callable[[Settings], list[str]]:
    """Return the command that measures a sequence a step, in layers as wide as in 8 billion parameters."""

    def command(settings: Settings) -> list[str]:
        sizes = ["--models", "tiny" if settings.rehearse else "8B-2L"]
        sizes += ["--tokens", settings.option("TOKENS", tokens, toy)]
        sizes += ["--sequence", "256" if settings.rehearse else "131072", "--steps", "1", "--warmup", "1"]
        sizes += ["--budgets", settings.option("BUDGETS", "24GiB/24GiB", "256MiB/256MiB"), "--activations", "host"]
        return gpu(stage, "step", *sizes, "--no-compute", *words)(settings)

    return command


def module(name: str) -> Callable[[Settings], list[str]]:
    """Return the command of one of this folder's modules, with the store, the file and a toy's sizes if rehearsed."""

    def command(settings: Settings) -> list[str]:
        words = ["--store", settings.store, "--out", settings.out / f"{name}.json"]
        return settings.python("-m", f"device.{name}", *words, *(["--toy"] if settings.rehearse else []))

    return command


def segments(settings: Settings) -> list[str]:
    seconds = STAGES["segments"].limit - MARGIN
    return [*module("segments")(settings), "--models", str(settings.models), "--seconds", str(seconds)]


def peers(settings: Settings) -> list[str] | str:
    """Train beside DeepSpeed, where this interpreter has it or the folder of wheels brought it."""
    carried = settings.wheel is not None and settings.wheel.is_dir() and any(settings.wheel.glob("deepspeed-*.whl"))
    if not carried and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed, and WHEEL is no folder with a wheel of it"
    sizes = [
        "--models",
        settings.option("MODELS", "0.4B", "tiny"),
        "--tokens",
        settings.option("TOKENS", "16384", "256"),
    ]
    sizes += ["--sequence", settings.option("SEQUENCE", "4096", "128"), "--steps", "2", "--warmup", "1"]
    device, host = settings.option("BUDGETS", "24GiB/100GiB", "256MiB/256MiB").split("/")
    if chosen := settings.environment.get("SYSTEMS"):
        sizes += ["--systems", chosen]
    budgets = ["--device-memory", device, "--host-memory", host, "--deepspeed-python", sys.executable]
    return gpu("peers", "peers", *sizes, *budgets)(settings)


#: Everything in host memory, then as much as 12 GiB hold.
MEMORY = "6GiB/100GiB"
BOTH = f"{MEMORY},6GiB/12GiB"
BACKWARD = ("--resident", "--update", "backward")
#: Without tiles so many tokens take 37 GiB.
TILES = ("--tile-tokens", "auto")
#: The groups, each a call of its own. A new machine has nothing of an earlier call, so each begins alike.
GROUPS = ("first", "second", "third", "fourth", "peers")


def tests(settings: Settings) -> list[str]:
    seconds = STAGES["tests"].limit - MARGIN
    return settings.python("-m", "device.gpu_tests", "--out", settings.out / "tests.json", "--seconds", seconds)


def describe(settings: Settings) -> list[str]:
    out = settings.out / "environment.json"
    return settings.python("-m", "device.environment", "--store", settings.store, "--out", out)


def trace(settings: Settings) -> list[str]:
    return gpu("profile", "trace", "--trace", settings.out / "trace.json.gz")(settings)


ALL = [
    Stage("install", GROUPS, 20, install),
    Stage("environment", GROUPS, 20, describe, "environment.json"),
    Stage("probe", GROUPS, 65, probe, "probe.json"),
    Stage("smoke", ("first",), 25, lambda settings: settings.python(ROOT / "examples" / "gpu_run.py")),
    Stage("tests", ("first",), 145, tests, "tests.json"),
    Stage("exact", ("first",), 90, gpu("exact", "exact"), "gpu.json"),
    Stage("overflow", ("first",), 30, overflow, "overflow.json"),
    Stage("steps", ("first",), 80, steps("steps", "0.4B", "6GiB/12GiB,3GiB/2GiB"), "gpu.json"),
    Stage("profile", ("first",), 40, trace, "trace.json.gz"),
    Stage("counters", ("first",), 20, counters, "overflow.json"),
    Stage("steps-1.5B", ("second",), 150, steps("steps-1.5B", "1.5B", BOTH, "--resident"), "gpu.json"),
    Stage("steps-backward", ("second",), 75, steps("steps-backward", "1.5B", MEMORY, *BACKWARD), "gpu.json"),
    Stage("steps-3B", ("second",), 200, steps("steps-3B", "3B", "24GiB/100GiB,6GiB/12GiB", "--resident"), "gpu.json"),
    Stage("large", ("third",), 300, large("large"), "gpu.json"),
    Stage("large-lora", ("third",), 115, large("large-lora", "--lora", "16", tokens="8192"), "gpu.json"),
    Stage("contexts", ("fourth",), 80, contexts("contexts", "4096,32768", "128,256"), "gpu.json"),
    Stage("contexts-tiles", ("fourth",), 110, contexts("contexts-tiles", "131072", "256", *TILES), "gpu.json"),
    Stage("copies", ("fourth",), 40, gpu("copies", "copy"), "gpu.json"),
    Stage("cufile", ("fourth",), 60, module("cufile"), "cufile.json"),
    Stage("segments", ("fourth",), 120, segments, "segments.json"),
    Stage("peers", ("peers",), 400, peers, "gpu.json"),
]
#: For a rehearsal on a busy machine: limits are so many times as long.
PATIENCE = float(os.environ.get("PATIENCE", "1"))
ALL = [replace(stage, limit=round(stage.limit * PATIENCE)) for stage in ALL]
STAGES = {stage.name: stage for stage in ALL}


class UnknownStage(ValueError):
    """ONLY names something that is neither a stage nor a group."""


def chosen(only: str) -> list[Stage]:
    """Return the stages that ONLY names, by themselves or by group, in their order; the first group if it is empty.

    Raises:
        UnknownStage: a name is of no stage and no group.
    """
    names = [name.strip() for name in only.split(",") if name.strip()] or [GROUPS[0]]
    unknown = [name for name in names if name not in STAGES and name not in GROUPS]
    if unknown:
        known = f"the stages are {', '.join(STAGES)}; groups of them are {', '.join(GROUPS)}"
        raise UnknownStage(f"ONLY names {', '.join(unknown)}: {known}")
    return [stage for stage in STAGES.values() if stage.name in names or not set(stage.groups).isdisjoint(names)]


def settings_of(environment: dict[str, str]) -> Settings:
    """Return the settings that the environment gives: OUT, STORE, WORK, WHEEL, REHEARSE, and the sizes of steps."""
    rehearse = environment.get("REHEARSE") == "1"
    base = ROOT / "build" / ("device-rehearsal" if rehearse else "device-run")
    out = Path(environment.get("OUT") or base / "out").resolve()
    # A folder of its own in the directory that the user names: it is removed at the end.
    store = Path(environment.get("STORE") or base).resolve() / OWN
    models = (
        Path(environment["WORK"]).resolve() / f"{OWN}-models" if environment.get("WORK") else work_in(store, rehearse)
    )
    named = environment.get("WHEEL")
    # A rehearsal takes the sources, or a wheel that is named: then it installs as a run on a device does.
    wheel = Path(named).resolve() if named else None if rehearse else found_wheel()
    return Settings(out, base, store, models, wheel, rehearse, dict(environment))


def found_wheel() -> Path | None:
    """Return the newest wheel in dist/, if there is one."""
    wheels = sorted((ROOT / "dist").glob("memascend-*.whl"), key=lambda path: path.stat().st_mtime)
    return wheels[-1] if wheels else None


def work_in(store: Path, rehearse: bool) -> Path:
    """Return where models are written: /dev/shm where the machine has plenty, so that the drive has the store alone."""
    shm = Path("/dev/shm")
    plenty = 64 << 30
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not rehearse and total >= plenty and shm.is_dir() and shutil.disk_usage(shm).free >= plenty // 2:
        return shm / f"{OWN}-{os.getpid()}"
    return store / "models"
