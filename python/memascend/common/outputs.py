"""Output directories that appear complete under their names, or not at all."""

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
    """Make a hidden directory beside `out` for unfinished files, and remove it at the end of the block."""
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
    """Rename the finished directory to `out`, atomically and durably."""
    for path in [*finished.rglob("*"), finished]:
        sync(path)
    if os.path.lexists(out):  # made since the start of the run; a rename onto an empty directory would succeed
        raise OutputError(f"--out {out} was created by someone else during the run: nothing was written over it")
    os.rename(finished, out)
    sync(out.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the medium."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def left_behind(out: Path) -> list[Path]:
    """Return the unfinished directories that killed runs left beside `out`."""
    prefix = f".{out.name}.partial-"
    folders = [path for path in out.parent.iterdir() if path.name.startswith(prefix)]
    owners = [path.name.removeprefix(prefix).partition("-")[0] for path in folders]
    return [
        folder
        for folder, owner in zip(folders, owners, strict=True)
        if owner.isdecimal() and not Path("/proc", owner).exists()
    ]


def clear_away(out: Path) -> None:
    """Remove the unfinished directories that killed runs left beside `out`."""
    for unfinished in left_behind(out):
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """Turn an OSError into an OutputError that names `what`: for an open file the system gives no path."""
    try:
        yield
    except MemascendError:  # its message names the path already; some are OSErrors too
        raise
    except OSError as error:
        where = f": {error.filename}" if error.filename and str(error.filename) != str(what) else ""
        hint = " (this process may write no larger files: see `ulimit -f`)" if error.errno == errno.EFBIG else ""
        raise OutputError(f"cannot write {what}: {error.strerror or error}{where}{hint}") from error
