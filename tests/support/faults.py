"""Real faults for tests: loop devices, small filesystems, a refused io_uring, processes that may hang or be killed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
#: The file of a store in each of its directories.
VOLUME = "memascend.volume"
#: The least that mkfs takes, and a little more. Backing files are sparse: only written blocks take memory.
LEAST_BYTES = {"ext4": 32 * MIB, "xfs": 304 * MIB, "btrfs": 128 * MIB}


def unavailable(why: str, need: str = "root") -> NoReturn:
    """Skip the test, or fail it if its need is required."""
    import requirements  # not at the top: programs of tests import this file, and need nothing of pytest

    requirements.unmet(need, why)


# ---- devices ------------------------------------------------------------------------------------------------

_LOOP_CLR_FD, _LOOP_CONFIGURE, _LOOP_CTL_GET_FREE = 0x4C01, 0x4C0A, 0x4C82
_LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 4, 16
_LOOP_INFO = struct.Struct("=5Q4I64s64s32s2Q")


@dataclass
class LoopDevice:
    """A block device and the open file behind it."""

    path: Path
    backing: int
    sector: int
    handle: int

    def rename(self) -> None:
        """Go on under another name, as after a reboot."""
        handle, path = _attach(self.backing, self.sector)
        _detach(self.handle)
        self.handle, self.path = handle, path

    def shrink(self, size: int) -> None:
        """Lose everything from `size` on: whatever is read or written there fails with EIO from now on."""
        os.ftruncate(self.backing, size)
        # Sealed, or else the next write would make the file grow again, and holes are read as zeros.
        fcntl.fcntl(self.backing, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)


@contextlib.contextmanager
def loop_device(size: int, sector: int = 512, backing: str | Path = "shm") -> Iterator[LoopDevice]:
    """Yield a device of `size` bytes on memory ("shm") or on a file in the directory `backing`."""
    with contextlib.ExitStack() as cleanup:
        if backing == "shm":
            file = os.memfd_create(f"device-{uuid.uuid4().hex}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            cleanup.callback(os.close, file)
        else:
            file = cleanup.enter_context(tempfile.TemporaryFile(dir=backing)).fileno()
        os.truncate(file, size)
        handle, path = _attach(file, sector)
        device = LoopDevice(path, file, sector, handle)
        cleanup.callback(lambda: _detach(device.handle))
        yield device


def _attach(file: int, sector: int) -> tuple[int, Path]:
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        unavailable(f"no loop devices here: {error}")
    try:
        # The kernel detaches the device when its last file is closed, also if this process is killed.
        # mkfs.btrfs takes two devices over files of the same name for one.
        name = f"memascend test {uuid.uuid4().hex}".encode()
        flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
        info = _LOOP_INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, name, b"", b"", 0, 0)
        for _ in range(100):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            path = Path(f"/dev/loop{number}")
            try:
                device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                unavailable(f"no loop devices here: {error}")
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, struct.pack("=2I", file, sector) + info + bytes(64))
                return device, path
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # busy: another process was faster
                    raise
        raise AssertionError("no loop device stayed free")
    finally:
        os.close(control)


def _detach(device: int) -> None:
    with contextlib.suppress(OSError):  # gone already
        fcntl.ioctl(device, _LOOP_CLR_FD)
    os.close(device)


# ---- filesystems --------------------------------------------------------------------------------------------


@dataclass
class Mounted:
    """A mounted filesystem, and the device under it unless it is in memory."""

    path: Path
    device: LoopDevice | None = None

    @property
    def free_bytes(self) -> int:
        """Bytes that an ordinary user could still write."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leave: int = 0) -> Path:
        """Take the space but for `leave` bytes, as another process would; returns the file that holds it."""
        ballast = self.path / "ballast"
        with open(ballast, "ab") as file:
            piece = 64 * MIB
            while piece >= 4096:
                wanted = min(piece, self.free_bytes - leave) if leave else piece
                try:
                    if wanted < 4096:
                        break
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, wanted)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece //= 2
        return ballast


@contextlib.contextmanager
def mounted(kind: str, size: int, where: Path, sector: int = 512, features: str = "") -> Iterator[Mounted]:
    """Mount a filesystem of `size` bytes (ext4, xfs, btrfs, tmpfs, ramfs) on the new directory `where`.

    `features` are those that mkfs is asked for with -O.
    """
    with contextlib.ExitStack() as cleanup:
        if kind in ("tmpfs", "ramfs"):
            device, source, options = None, kind, ["-o", f"size={size}"] if kind == "tmpfs" else []
        else:
            device = cleanup.enter_context(loop_device(size, sector))
            source, options = str(device.path), []
            quiet = ["-q", "-F", "-m", "0"] if kind == "ext4" else ["-q", "-f"]
            must([f"mkfs.{kind}", *quiet, *(["-O", features] if features else []), source])
        mount(["-t", kind, *options, source], where, cleanup)
        yield Mounted(where, device)


@contextlib.contextmanager
def overlaid(below: Path, where: Path) -> Iterator[Path]:
    """Yield an overlay on the new directory `where`, whose files come to lie in the directory `below`."""
    with contextlib.ExitStack() as cleanup:
        for name in ("lower", "upper", "work"):
            (below / name).mkdir()
        layers = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
        mount(["-t", "overlay", "-o", layers, "overlay"], where, cleanup)
        yield where


def mount(words: list[str], where: Path, cleanup: contextlib.ExitStack) -> None:
    """Mount on the new directory `where` until `cleanup` ends."""
    where.mkdir()
    done = subprocess.run(["mount", *words, str(where)], capture_output=True, text=True)
    if done.returncode:
        unavailable(f"cannot mount here: {done.stderr.strip()}")
    cleanup.callback(_unmount, where)


def _unmount(where: Path) -> None:
    for attempt in range(50):
        done = subprocess.run(["umount", str(where)], capture_output=True, text=True)
        if done.returncode == 0:
            return
        time.sleep(0.1 if attempt < 49 else 0)
    subprocess.run(["umount", "-l", str(where)], check=False)
    raise AssertionError(f"{where} stayed in use: {done.stderr}")


def must(command: list[str]) -> None:
    """Run a tool of the system; without it there is no test."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        unavailable(f"{command[0]} is not installed", "mkfs" if command[0].startswith("mkfs.") else "root")
    assert done.returncode == 0, f"{command}: {done.stderr}"


# ---- io_uring -----------------------------------------------------------------------------------------------


def refuse_io_uring() -> None:
    """Refuse io_uring_setup, _enter and _register with EPERM to this process and its children, as Docker does."""
    # The three numbers are 425 to 427 on every architecture that came with or after x86-64.
    load, at_least, more_than, give = 0x20, 0x35, 0x25, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    program = [
        (load, 0, 0, 0),
        (at_least, 0, 2, 425),
        (more_than, 1, 0, 427),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    prctl, unsigned = libc.prctl, ctypes.c_ulong
    filtered = Program(len(program), ctypes.addressof(code))
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    for words in (
        (no_new_privileges, unsigned(1), unsigned(0), unsigned(0), unsigned(0)),
        (set_seccomp, unsigned(mode_filter), ctypes.byref(filtered), unsigned(0), unsigned(0)),
    ):
        if prctl(*words):
            raise OSError(ctypes.get_errno(), "prctl")


# ---- processes ----------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How a process ended. A negative code is the number of the signal that killed it."""

    code: int
    out: str
    err: str


class Child:
    """A process of its own that runs `target(pipe, *arguments)`; `pipe` is the other end of `self.pipe`.

    It is killed when the block ends.
    """

    def __init__(self, room: Path, target: Callable[..., Any], *arguments: Any) -> None:
        import forked  # not at the top: programs of tests import this file, and need nothing of pytest

        context = forked.context()
        made = [tempfile.mkstemp(prefix=name, dir=room) for name in (".stdout-", ".stderr-")]
        for handle, _ in made:
            os.close(handle)
        self._files = [Path(name) for _, name in made]
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_begin, args=(self._files, theirs, target, arguments))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()
        for file in self._files:
            file.unlink()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    def alive(self) -> bool:
        """Return whether it has not ended yet."""
        return self._process.is_alive()

    def told(self) -> str:
        """Return its output so far."""
        return "".join(file.read_text() for file in self._files)

    def receive(self, seconds: float = 60) -> Any:
        """Return the child's next message."""
        assert self.pipe.poll(seconds), f"nothing came in {seconds} s: {self.told()}"
        try:
            return self.pipe.recv()
        except EOFError:
            raise AssertionError(f"it ended too early: {self.told()}") from None

    def wait(self, seconds: float = 60) -> Ended:
        """Return how it ends by itself, in this time."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"it hangs: {self.told()}"
        return Ended(self._process.exitcode, *(file.read_text() for file in self._files))


def _begin(files: list[Path], pipe: Any, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    for stream, file in zip((1, 2), files, strict=True):
        handle = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, stream)
        os.close(handle)
    torch.set_num_threads(1)
    target(pipe, *arguments)


def run_script(source: str, words: list[str], environment: dict[str, str | None], seconds: float = 300) -> str:
    """Run a script in a process of its own, which has PyTorch at once; return its output.

    `words` are its arguments. `environment` sets variables, or removes those whose value is None.
    """
    with tempfile.TemporaryDirectory() as room, Child(Path(room), _script, source, words, environment) as child:
        ended = child.wait(seconds)
        assert ended.code == 0, ended.out + ended.err
        return ended.out


def _script(_pipe: Any, source: str, words: list[str], environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv = ["-c", *words]
    exec(compile(source, "<script>", "exec"), {"__name__": "__main__"})
