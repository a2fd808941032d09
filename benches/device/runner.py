"""Stages one after another, each with its own limit; leftover processes are killed before the next begins.

Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

from .stages import BENCHES, FILES_MAX, LOGS, ROOT, SUMMARY, Settings, Stage

#: Orphans of a stage become children of this process, also those with a session of their own (prctl(2)).
PR_SET_CHILD_SUBREAPER = 36
#: Seconds between the signal that asks and the one that kills.
GRACE = 2
#: Bytes of a log's end that the summary holds.
TAIL_BYTES = 1500


def adopt_orphans() -> None:
    """Have the processes that a stage leaves behind become this process's children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name in parentheses may hold spaces and parentheses.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(root, []))
    for process in found:
        found += children.get(process, [])
    return found


def end_all(grace: float = GRACE) -> int:
    """End every process below this one: ask, then kill. Returns how many there were."""
    count = len(descendants(os.getpid()))
    asked = time.monotonic()
    for process in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    # A process that dies leaves its children to this one, so they are looked for anew until none is left.
    while left := descendants(os.getpid()):
        if time.monotonic() - asked > grace:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
    return count


class Run:
    """A call: its stages, their records, and the files under $OUT."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.began = time.monotonic()
        self.records: list[dict[str, Any]] = []

    def environment(self) -> dict[str, str]:
        """Return the variables of a stage: PYTHONPATH has the wheel, then these modules, before its earlier value."""
        inherited = os.environ.get("PYTHONPATH", "")
        path = [str(place) for place in (self.settings.site, BENCHES)] + ([inherited] if inherited else [])
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(path)}

    def prepare(self) -> None:
        settings = self.settings
        for place in (settings.logs, settings.site):
            shutil.rmtree(place, ignore_errors=True)  # an earlier run's, if that was killed
        for place in (settings.out, settings.store, settings.models, settings.logs, settings.site):
            place.mkdir(parents=True, exist_ok=True)

    def stage(self, stage: Stage) -> dict[str, Any]:
        """Run a stage to its end or its limit, and keep the record of it."""
        command = stage.command(self.settings)
        record: dict[str, Any] = {"name": stage.name, "limit_s": stage.limit, "file": stage.file}
        record["at_s"] = round(time.monotonic() - self.began, 1)
        if isinstance(command, str):
            self._keep(record | {"ended": "skipped", "why": command, "seconds": 0.0})
            return self.records[-1]
        print(f"=== [{record['at_s']:.0f} s] {stage.name}, at most {stage.limit} s", flush=True)
        log = self.settings.logs / f"{stage.name}.log"
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(timeout=stage.limit - GRACE)
                ended = "passed" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                code, ended = None, "out of time"
            finally:
                left = end_all()
        record |= {"ended": ended, "exit": code, "seconds": round(time.monotonic() - began, 1), "killed": left}
        self._keep(record | {"tail": tail(log)})
        return self.records[-1]

    def _keep(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        why = record.get("why") or f"{record['ended']}, {record['seconds']:.1f} s"
        print(f"--- {record['name']}: {why}", flush=True)
        if record["ended"] in ("failed", "out of time"):
            print(record["tail"][-600:], flush=True)
        self.write_summary()

    def write_summary(self) -> None:
        """Write the one file to send on: the stages' records and the contents of their JSON files."""
        results = {}
        for path in sorted(self.settings.out.glob("*.json")):
            if path.name != SUMMARY:
                with contextlib.suppress(ValueError, OSError):
                    results[path.stem] = json.loads(path.read_text())
        whole = {"rehearsed": self.settings.rehearse, "seconds": round(time.monotonic() - self.began, 1)}
        text = json.dumps(whole | {"stages": self.records, "results": results}, indent=1)
        part = self.settings.out / f".{SUMMARY}.part"
        part.write_text(self.without_paths(text) + "\n")
        part.replace(self.settings.out / SUMMARY)

    def without_paths(self, text: str) -> str:
        """Return a text without the places of this machine."""
        settings = self.settings
        places = {str(place) for place in (settings.models, settings.store, settings.out, settings.site, ROOT)}
        for place in sorted(places, key=len, reverse=True):
            text = text.replace(place, "DIR")
        return text.replace(str(Path.home()), "HOME")

    def finish(self) -> None:
        """Pack the logs, and remove the files that the run has written beside $OUT."""
        with tarfile.open(self.settings.out / LOGS, "w:gz") as packed:
            for log in sorted(self.settings.logs.glob("*.log")):
                packed.add(log, arcname=log.name)
        self.write_summary()
        for place in (self.settings.models, self.settings.store, self.settings.logs, self.settings.site):
            shutil.rmtree(place, ignore_errors=True)
        files = [path for path in self.settings.out.rglob("*") if path.is_file()]
        if len(files) > FILES_MAX:
            print(f"note: {len(files)} files are under {self.settings.out}, of earlier runs too", flush=True)


def tail(log: Path) -> str:
    """Return the end of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")
