"""Parts that the benchmarks share: memory readings, the machine's description, fio, Markdown.

Standard library only: the interpreter with DeepSpeed imports it too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

GB = 1e9  # tables print GB = 10^9 bytes
#: Cargo's level of optimisation in a release.
RELEASE_OPT_LEVEL = "3"


def rss() -> dict[str, int]:
    """Peak and current resident bytes of this process (`hwm` is VmHWM, the kernel's own high-water mark)."""
    names = {"VmHWM": "hwm", "VmRSS": "rss", "RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem"}
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in names:
            found[names[key]] = int(value.split()[0]) * 1024
    return found


def block_io() -> tuple[int, int]:
    """Return the bytes this process made the block layer read and write (every thread; no page-cache hits)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


def _mount(path: Path) -> tuple[str, str]:
    """Return the (device name, filesystem type) that holds `path`."""
    best = ("?", "?", "")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, point, kind = line.split()[:3]
        point = point.replace("\\040", " ")
        inside = point == "/" or f"{path}/".startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[2]):
            best = (device, kind, point)
    return Path(best[0]).name, best[1]


def machine(workdir: Path) -> dict:
    """CPU, cores, RAM, disk under `workdir`, kernel, versions and build. Holds no path, so it can be committed.

    Warns where memascend is not a release build, whose figures alone count.
    """
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            cpu = line.partition(":")[2].strip()
            break
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device, kind = _mount(workdir.resolve())
    model = Path(f"/sys/class/block/{device}/device/model")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(ram / 2**30, 1),
        "disk": f"{device} {kind}" + (f" ({model.read_text().strip()})" if model.is_file() else ""),
        "kernel": platform.release(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "python": platform.python_version(),
        "versions": versions("torch", "transformers", "safetensors", "memascend"),
        "opt_level": opt_level(),
    }


def opt_level() -> str | None:
    """Return the level of optimisation that memascend's core was built with, if it is there; warn if not a release's.

    Another process is asked: the one that measures may be about to fork, and does not need PyTorch for this.
    """
    question = "from memascend._memascend import OPT_LEVEL; print(OPT_LEVEL)"
    asked = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    level = asked.stdout.strip() if asked.returncode == 0 else None
    if level not in (None, RELEASE_OPT_LEVEL):
        print(
            f"WARNING: memascend was built with opt-level {level}, a release with {RELEASE_OPT_LEVEL}: its kernels "
            "are slower, so these figures do not count. Build with `make wheel`.",
            file=sys.stderr,
            flush=True,
        )
    return level


def instruction_sets() -> dict[str, str]:
    """Return the instruction sets in use: MEMASCEND_ISA and ATEN_CPU_CAPABILITY can choose lesser ones."""
    import torch

    from memascend._memascend import instruction_set

    return {"memascend": instruction_set(), "torch": torch.backends.cpu.get_cpu_capability()}


def size(text: str) -> int:
    """Return the bytes, as memascend's options take them."""
    from memascend import parse_size

    return parse_size(text)


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def fio(workdir: Path, size: str = "2G", seconds: int = 10) -> dict[str, float] | None:
    """Sequential GB/s of the disk (1 MiB blocks, depth 32, O_DIRECT); None when fio is missing or fails."""
    if shutil.which("fio") is None:
        return None
    target = workdir / "fio.tmp"
    speeds = {}
    try:
        for kind in ("write", "read"):  # the write comes first: it lays the file out that the read reads
            command = [
                "fio",
                f"--name={kind}",
                f"--filename={target}",
                f"--rw={kind}",
                f"--size={size}",
                "--bs=1M",
                "--iodepth=32",
                "--ioengine=libaio",
                "--direct=1",
                "--time_based",
                f"--runtime={seconds}",
                "--output-format=json",
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                return None
            job = json.loads(done.stdout)["jobs"][0]
            speeds[f"{kind}_gb_s"] = round(job[kind]["bw_bytes"] / GB, 2)
    finally:
        target.unlink(missing_ok=True)
    return speeds


@contextmanager
def slowed(path: Path, limit: int | None) -> Iterator[Path | None]:
    """Yield a cgroup (v1, blkio) that limits the disk under `path` to `limit` bytes/s in either direction."""
    if limit is None:
        yield None
        return
    device = path.stat().st_dev
    # A partition is throttled by its disk.
    link = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    disk = (link.parent if (link / "partition").is_file() else link) / "dev"
    group = Path("/sys/fs/cgroup/blkio") / f"memascend-bench-{os.getpid()}"
    group.mkdir()
    try:
        for direction in ("read", "write"):
            (group / f"blkio.throttle.{direction}_bps_device").write_text(f"{disk.read_text().strip()} {limit}")
        yield group
    finally:
        group.rmdir()


def enter(group: str | None) -> None:
    """Move this process into the cgroup at `group`, if there is one."""
    if group is not None:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))


class ChildFailed(Exception):
    """One line that says why a process gave no result."""


def start(command: list[str], job: dict, name: str, workdir: Path, limit_s: float, environment: dict[str, str]) -> dict:
    """Run `command` with a job (JSON) and return the contents of job["result"]; its output goes to a log.

    Both files are in `workdir` under `name`. A result that a failed child has left stays there.
    """
    log, result = workdir / f"{name}.log", workdir / f"{name}.result.json"
    result.unlink(missing_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, json.dumps({**job, "result": str(result)})],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
        except BaseException as error:  # a time-out or Ctrl-C: leave no child behind
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ChildFailed(f"no end after {limit_s:.0f} s") from None
            raise
    return _outcome(code, log, result, workdir)


def fork(modules: list[str], job: dict, name: str, workdir: Path, limit_s: float, environment: dict[str, str]) -> dict:
    """Fork a process that has imported some modules, and start `run(job)` of the first one there.

    It is forked from one that has imported them and has done nothing else, least of all anything with CUDA.
    """
    log, result = workdir / f"{name}.log", workdir / f"{name}.result.json"
    result.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules)
    here = str(Path(__file__).parent)
    if here not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    # To learn whether there is a device PyTorch asks the driver, which no fork can use after that, or NVML.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    arguments = (modules[0], {**job, "result": str(result)}, str(log), environment)
    process = context.Process(target=_run_forked, args=arguments)
    process.start()
    try:
        process.join(limit_s)
        late = process.exitcode is None
    finally:
        if process.exitcode is None:  # a time-out or Ctrl-C: leave no child behind
            with suppress(ProcessLookupError, TypeError):
                os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            process.kill()
            process.join()
    if late:
        raise ChildFailed(f"no end after {limit_s:.0f} s")
    return _outcome(process.exitcode, log, result, workdir)


def _run_forked(module: str, job: dict, log: str, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    try:
        importlib.import_module(module).run(job)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _outcome(code: int | None, log: Path, result: Path, workdir: Path) -> dict:
    if code == 0 and result.is_file():
        return json.loads(result.read_text())
    if code == -signal.SIGKILL:
        raise ChildFailed("killed with SIGKILL: most likely out of memory")
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no output")
    raise ChildFailed(f"exit status {code}: {reason.replace(str(workdir), 'WORKDIR')[:300]}")


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def finish(results: dict[str, object], written: Path | None, faults: list[str]) -> int:
    """Write the results as JSON if wanted, tell the limits that were missed, and return the exit status."""
    if written is not None:
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(results, indent=1) + "\n")
    if faults:
        print("\n" + "\n".join(faults))
    return 1 if faults else 0


def in_workdir(workdir: Path | None, benchmark: Callable[[Path], int]) -> int:
    """Run a benchmark in `workdir`, which keeps its models, or in a temporary directory here."""
    if workdir is not None:
        workdir.mkdir(parents=True, exist_ok=True)
        return benchmark(workdir.resolve())
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        return benchmark(Path(temporary).resolve())


def end_as_child(child: Callable[[dict], dict]) -> None:
    """Measure, write the result and exit in a process of `start`; do nothing in any other."""
    if sys.argv[1:2] == ["--child"]:
        job = json.loads(sys.argv[2])
        Path(job["result"]).write_text(json.dumps(child(job)))
        sys.stdout.flush()
        os._exit(0)  # threads and process groups of libraries must not hold the exit up


def run(main: Callable[[], int]) -> NoReturn:
    """Run a benchmark's main function and exit. SIGTERM ends it as Ctrl-C does: its children and files go with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
