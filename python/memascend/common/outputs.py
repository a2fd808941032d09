"""Directories that appear whole under their names, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memascend.errors import MemascendError, OutputError


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """A hidden directory beside `out` for everything unfinished; it is gone afterwards, whatever happens."""
    if os.path.lexists(out):
        raise OutputError(f"--out {out} already exists: choose another, or move it away")
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-{os.getpid()}-", dir=out.parent))
    except OSError as error:
        raise OutputError(f"--out {out}: cannot write in {out.parent}: {error.strerror}") from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def put_in_place(finished: Path, out: Path) -> None:
    """Make the finished directory appear under its name, durably and in one go."""
    for path in [*finished.rglob("*"), finished]:
        sync(path)
    if os.path.lexists(out):  # since the start of the run; a rename onto an empty directory would succeed
        raise OutputError(f"--out {out} was created by someone else during the run: nothing was written over it")
    os.rename(finished, out)
    sync(out.parent)


def sync(path: Path) -> None:
    """Wait until a file, or what a directory lists, is on the medium."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear_away(out: Path) -> None:
    """Remove what runs that were killed left beside the output."""
    for left in out.parent.glob(f".{out.name}.partial-*"):
        owner = left.name.removeprefix(f".{out.name}.partial-").partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """Have an error of the system name `what` was being written: of an open file it names nothing."""
    try:
        yield
    except MemascendError:  # it says what it is about; some are errors of the system too
        raise
    except OSError as error:
        where = f": {error.filename}" if error.filename and str(error.filename) != str(what) else ""
        hint = " (this process may write no larger files: see `ulimit -f`)" if error.errno == errno.EFBIG else ""
        raise OutputError(f"cannot write {what}: {error.strerror or error}{where}{hint}") from error
