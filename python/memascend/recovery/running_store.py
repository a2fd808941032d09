"""A store that a process is using, read without its lock: the manifest of its last durable step.

The manifest's file is replaced by an exchange of names (crates/memascend-nvme/src/volume/notes.rs), after which the old
one is written over: a reader may see a mixture, which the checksum in the first line tells.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.common.shapes import Either, check, count
from memascend.errors import StoreError
from memascend.hardware.drives import is_device

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The file of a directory that has the newest manifest.
MANIFEST = "memascend.json"
_LOCK, _VOLUME = "memascend.lock", "memascend.volume"
_FIRST_LINE = re.compile(rb"memascend-store 3 (?P<bytes>\d{1,18}) (?P<sum>[0-9a-f]{8})")
_TRIES, _SECONDS_BETWEEN = 50, 0.02
#: The longest manifest, as crates/memascend-nvme/src/volume/notes.rs has it.
_MANIFEST_BYTES_MAX = 256 << 20
#: Before the digits of a volume's path that is not UTF-8: see crates/memascend-nvme/src/volume/names.rs.
_BYTES = "BYTES="
_WRITTEN = {"number": count, "tag": str, "time": count, "state": str, "tensors": [(str, count)]}
_BODY = {
    "sequence": count,
    "volumes": [str],
    "stripes": [count],
    "life": [count],
    "versions": [{"ranges": [(count, count)]}],
    "current": Either(_WRITTEN, None),
    "snapshots": [_WRITTEN],
}


def holds_store(path: Path) -> bool:
    """Return whether a directory or device is one of a store."""
    return is_device(path) or (path / MANIFEST).exists()


def process_using(path: Path) -> str | None:
    """Return the number of the process that uses the store in a directory, as its lock says, or None."""
    try:
        return _read_regular(path / _LOCK).decode(errors="replace").strip() or None
    except OSError:
        return None


def live_report(paths: Sequence[Path], process: str) -> tuple[dict[str, Any], list[str]]:
    """Return the report of `ClosedStore.report`, with `state` and `snapshots` of a `ClosedStore`, and notices.

    Raises StoreError where the store that `process` uses has no manifest yet.
    """
    body = _newest([manifest_in(Path(path) / MANIFEST) for path in paths])
    if body is None:
        where = ", ".join(map(str, paths))
        raise StoreError(
            errno.EBUSY, f"{where}: a run is going on (process {process}), and no step is durable yet: try again later"
        )
    body = _newest([body, *(manifest_in(path_of(volume) / MANIFEST) for volume in body["volumes"])]) or body
    return _report(body), [f"a run is going on (process {process}): this is its last durable step"]


def report_without_volume(paths: Sequence[Path]) -> tuple[dict[str, Any], list[str]] | None:
    """Return a report as `live_report` does, of a store that lacks a volume: by the manifests of the others.

    None where none of `paths` has a whole manifest, or every volume in it is there.
    """
    body = _newest([manifest_in(Path(path) / MANIFEST, tries=1) for path in paths])
    if body is None:
        return None
    volumes = [path_of(volume) for volume in body["volumes"]]
    gone = [path for path in volumes if not _is_there(path)]
    if not gone:
        return None
    named = ", ".join(map(str, gone))
    return _report(body), [f"{named} is not there: this is what the manifest on the other volumes says was committed"]


def _is_there(volume: Path) -> bool:
    return is_device(volume) or (volume / _VOLUME).exists()


def _report(body: dict[str, Any]) -> dict[str, Any]:
    versions = body["versions"]

    def nbytes(version: int) -> int:
        return sum(length for _, length in versions[version]["ranges"])

    generations = body["snapshots"] + ([body["current"]] if body["current"] else [])
    held: dict[str, set[int]] = {}
    for name, version in (tensor for generation in generations for tensor in generation["tensors"]):
        held.setdefault(name, set()).add(version)
    current = body["current"] or {"number": 0, "time": 0, "state": None, "tensors": []}
    tensors = [
        {
            "name": name,
            "bytes": nbytes(version),
            "extents": len(held[name]),
            "extent_bytes": sum(map(nbytes, held[name])),
        }
        for name, version in current["tensors"]
    ]
    return {
        "generation": current["number"],
        "written": current["time"],
        "tensors": tensors,
        "volumes": [
            _volume(str(path_of(path)), stripes / sum(body["stripes"]), life)
            for path, stripes, life in zip(body["volumes"], body["stripes"], body["life"], strict=True)
        ],
        "state": current["state"],
        "snapshots": [
            (written["tag"], written["number"], sum(nbytes(v) for _, v in written["tensors"]), written["state"])
            for written in body["snapshots"]
        ],
    }


def _newest(manifests: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    whole = [manifest for manifest in manifests if manifest is not None]
    return max(whole, key=lambda manifest: manifest["sequence"], default=None)


def manifest_in(file: Path, tries: int = _TRIES) -> dict[str, Any] | None:
    """Return the manifest in a file; None where there is none, or none that was whole at any of the tries."""
    for number in range(tries):
        if number:
            time.sleep(_SECONDS_BETWEEN)
        try:
            note = _read_regular(file)
        except OSError:
            return None
        line, _, rest = note.partition(b"\n")
        if found := _FIRST_LINE.fullmatch(line):
            text = rest[: int(found["bytes"])]
            if len(text) == int(found["bytes"]) and _crc32c(text) == int(found["sum"], 16):
                return _checked(text)
    return None


def _checked(text: bytes) -> dict[str, Any] | None:
    """Return a manifest if it is made as crates/memascend-store/src/manifest.rs makes them, else None."""
    try:
        body = json.loads(text)
        check(body, _BODY, "the manifest")
        if any(b"\0" in os.fsencode(path_of(volume)) for volume in body["volumes"]):
            return None
    except (ValueError, RecursionError):
        return None
    generations = body["snapshots"] + ([body["current"]] if body["current"] else [])
    named = {version for generation in generations for _, version in generation["tensors"]}
    counts = {len(body[name]) for name in ("volumes", "stripes", "life")}
    is_whole = len(counts) == 1 and sum(body["stripes"]) > 0 and max(named, default=-1) < len(body["versions"])
    return body if is_whole else None


def path_of(volume: str) -> Path:
    """Return the path of a volume, or `UUID=...`, by its name in a manifest."""
    if not volume.startswith(_BYTES):
        return Path(volume)
    with suppress(ValueError):
        return Path(os.fsdecode(bytes.fromhex(volume.removeprefix(_BYTES))))
    return Path(volume)


def _read_regular(file: Path) -> bytes:
    """Return the contents of a file; nothing for a pipe, which may have no other end, or a file that is too long."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        status = os.fstat(opened.fileno())
        return opened.read() if stat.S_ISREG(status.st_mode) and status.st_size <= _MANIFEST_BYTES_MAX else b""


def _volume(path: str, share: float, life_bytes_written: int) -> dict[str, Any]:
    """Describe a volume as `ClosedStore.report` does; facts on a device that only its own process knows are None."""
    described: dict[str, Any] = {"path": path, "share": share, "life_bytes_written": life_bytes_written}
    try:
        reserved = (Path(path) / _VOLUME).stat().st_size
        filesystem = os.statvfs(path)
        free = filesystem.f_bavail * filesystem.f_frsize
    except OSError:
        reserved, free = 0, None
    return described | {"reserved_bytes": reserved, "free_bytes": free, "capacity_bytes": None}


def _crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of some bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)
        table.append(entry)
    return table


_TABLE = _table()
