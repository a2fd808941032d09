"""Output directories that appear complete under their names, or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from memascend.errors import MemascendError, OutputError, system_line

#: In a workspace: files that outlive a killed process, which `beside` says the place of.
KEPT = "kept"
#: In a workspace: locked while its process lives. The kernel unlocks it however the process ends.
_LOCK = "lock"
#: Of renameat2(2): a relative path is one from here, and the two names are exchanged.
_HERE, _EXCHANGE = -100, 2
_WORKSPACE = re.compile(r"\.(?P<out>.+)\.partial-(?P<process>\d+)-[^-]+")


@contextmanager
def workspace(out: Path, *, replaces: bool = False, shared: bool = False) -> Iterator[Path]:
    """Make a hidden directory beside `out` for unfinished files, and remove it at the end of the block.

    Those that killed processes left in the same place are removed first. Raises OutputError where `out` exists, or
    another process is writing it, unless the block `replaces` it. `shared`: the processes of a launch have one each.
    """
    if not replaces and os.path.lexists(out):
        raise OutputError(f"--out {out} already exists: choose another, or move it away")
    clear_away(out.parent)
    if not (replaces or shared) and (process := _writer_of(out)) is not None:
        raise OutputError(f"--out {out} is being written by process {process}: wait for its end, or choose another")
    with ExitStack() as stack:
        try:
            work = stack.enter_context(hidden_directory(out.parent, out.name))
        except OSError as error:
            raise OutputError(f"--out {out}: cannot write in {system_line(error, out.parent)}") from error
        yield work


@contextmanager
def hidden_directory(folder: Path, name: str) -> Iterator[Path]:
    """Make a hidden directory in `folder`, and remove it at the end of the block.

    Where the process is killed, `clear_away` removes it later. Raises OSError where it cannot be made.
    """
    work = Path(tempfile.mkdtemp(prefix=f".{name}.partial-{os.getpid()}-", dir=folder))
    lock = -1
    try:
        lock = _lock(work)
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _writer_of(out: Path) -> str | None:
    """Return the number of the living process that has a workspace for `out`, or None."""
    with suppress(OSError):
        for work in out.parent.iterdir():
            named = _WORKSPACE.fullmatch(work.name)
            if named is not None and named["out"] == out.name and (work / _LOCK).is_file():
                try:
                    with _taken_over(work):
                        pass
                except BlockingIOError:
                    return named["process"]
    return None


def _lock(work: Path) -> int:
    """Make the lock of a workspace; return its descriptor, whose end unlocks it."""
    new = work / f"{_LOCK}.new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(OSError):  # A filesystem without locks: its leftovers stay.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(new, work / _LOCK)  # It appears locked.
    return lock


def beside(out: Path, name: str) -> Path:
    """Return where the file `name` under `KEPT` of a killed process's workspace goes, hidden beside `out`."""
    return out.with_name(f".{out.name}.{name}")


def under_way(out: Path, name: str) -> Path | None:
    """Return the file `name` of the run that is writing `out` now, where there is one; of several, the newest."""
    found = []
    with suppress(OSError):
        for work in out.absolute().parent.iterdir():
            named = _WORKSPACE.fullmatch(work.name)
            if named is not None and named["out"] == out.name:
                found += [file for file in (work / KEPT / name, work / "model" / name) if file.is_file()]
    return max(found, key=lambda file: file.stat().st_mtime, default=None)


def clear_away(folder: Path) -> None:
    """Remove the workspaces in `folder` whose processes were killed; move the files to keep beside their output."""
    with suppress(OSError):
        for path in folder.iterdir():
            if named := _WORKSPACE.fullmatch(path.name):
                with suppress(OSError), _taken_over(path):
                    for file in (path / KEPT).iterdir() if (path / KEPT).is_dir() else ():
                        _put_if_newer(file, beside(folder / named["out"], file.name))
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _taken_over(work: Path) -> Iterator[None]:
    """Hold the lock of a workspace.

    Raises OSError where its process lives, where it has no lock yet or is gone, and where another user made it: links
    in there may lead anywhere.
    """
    owner = work.lstat()
    if owner.st_uid != os.geteuid() or not stat.S_ISDIR(owner.st_mode):
        raise PermissionError(errno.EPERM, "not this user's directory", str(work))
    lock = os.open(work / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _put_if_newer(file: Path, place: Path) -> None:
    """Move a file, unless the one there is newer."""
    if not place.exists() or place.stat().st_mtime_ns < file.stat().st_mtime_ns:
        os.replace(file, place)


def put_in_place(finished: Path, out: Path, *, replaces: bool = False) -> None:
    """Rename the finished directory to `out`, atomically and durably; where it `replaces` another, swap them."""
    for path in [*finished.rglob("*"), finished]:
        sync(path)
    if replaces and os.path.lexists(out):
        _exchange(finished, out)
        sync(out.parent)
        return
    if os.path.lexists(out):  # made since the start of the run; a rename onto an empty directory would succeed
        raise OutputError(f"--out {out} was created by another process during the run: it was not overwritten")
    os.rename(finished, out)
    sync(out.parent)


def _exchange(finished: Path, out: Path) -> None:
    """Have two directories take each other's names at once, where the filesystem can do that."""
    names = [os.fsencode(path) for path in (finished, out)]
    if _libc().renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(out))
    # A process that is killed in between leaves the earlier one under this name.
    before = beside(out, "before")
    os.rename(out, before)
    os.rename(finished, out)
    os.rename(before, finished)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the medium."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_names(folder: Path) -> None:
    """Wait until the entries of a directory are on the medium, where user and filesystem allow that."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
            raise


@contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """Turn an OSError into an OutputError that names `what`: for an open file the system gives no path."""
    try:
        yield
    except MemascendError:  # its message names the path already; some are OSErrors too
        raise
    except OSError as error:
        named = isinstance(error.filename, str | bytes) and os.fsdecode(error.filename) != str(what)
        where = f" {os.fsdecode(error.filename)}:" if named else ""
        raise OutputError(f"cannot write {what}:{where} {_told(error)}") from error


def _told(error: OSError) -> str:
    """Return the message and the remedy without the path."""
    return system_line(OSError(error.errno, error.strerror)) if error.strerror else str(error)


def close_quietly(file: IO[bytes]) -> None:
    """Close a scratch file. A failed write was reported before, and closing would only try it again."""
    with suppress(OSError):
        file.close()
