"""A unit read straight into device memory by cuFile, beside our way through pinned memory.

    python -m device.cufile --store DIR --out cufile.json         # with `benches` on PYTHONPATH

Ours reads requests of 1 MiB into pinned buffers, many in flight, and copies each buffer up while the next is read.
cuFile (libcufile, of nvidia-cufile) may find no driver of its own in the kernel (nvidia-fs) and then goes through host
memory too, in its compatibility mode. That is allowed first; where cuFile refuses the file, it is forced, which leaves
out cuFile's look at the drive. Where neither works, the row has the errors of cuFile's log. Both sides read the same
file without the page cache, and the bytes read are compared with those written. Each side is a process of its own:
libcufile may abort where it finds no driver.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from .timing import MIB, host_memory, rate

#: Bytes of a pinned buffer, and how many there are.
PIECE, BUFFERS = 8 * MIB, 8
#: Threads that call cuFile at once, and bytes of one call.
THREADS, CALL = (1, 4, 8, 16), 16 * MIB
UNIT = {"full": 512 * MIB, "toy": 32 * MIB}
SEED = 3
#: Keys of cuFile's configuration. It is read when the driver is opened, from where CUFILE_ENV_PATH_JSON names.
PROPERTIES = {"allow_compat_mode": True, "use_poll_mode": False}
#: How many errors of cuFile's log are kept.
LOGGED = 4
#: Names of errors that say what a machine lacks (cufile.h).
ERRORS = {
    5001: "nvidia-fs is not loaded",
    5007: "not supported on this platform",
    5008: "not supported for this file",
    5011: "an error of CUDA's driver",
    5018: "file of an unsupported type",
    5027: "the file descriptor is not registered",
    5030: "internal error",
}


class Descriptor(ctypes.Structure):
    """CUfileDescr_t: an open file on Linux."""

    class _Handle(ctypes.Union):
        _fields_ = (("fd", ctypes.c_int), ("handle", ctypes.c_void_p))

    _fields_ = (("type", ctypes.c_int), ("handle", _Handle), ("operations", ctypes.c_void_p))


class Status(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = (("code", ctypes.c_int), ("driver", ctypes.c_int))


def checked(what: str, status: Status) -> None:
    if status.code:
        name = ERRORS.get(status.code)
        told = f"error {status.code}" + (f", {name}" if name else "")
        raise RuntimeError(f"{what} returned {told} (driver {status.driver})")


def library() -> ctypes.CDLL:
    """Load libcufile of the wheel beside PyTorch, or of the system."""
    site = Path(torch.__file__).resolve().parents[1]
    found = sorted(glob.glob(str(site / "nvidia" / "*" / "lib" / "libcufile.so.0")))
    loaded = ctypes.CDLL(found[0] if found else "libcufile.so.0")
    for name in ("cuFileDriverOpen", "cuFileHandleRegister", "cuFileBufRegister", "cuFileBufDeregister"):
        getattr(loaded, name).restype = Status
    loaded.cuFileHandleDeregister.restype = None
    loaded.cuFileHandleRegister.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(Descriptor)]
    loaded.cuFileHandleDeregister.argtypes = [ctypes.c_void_p]
    loaded.cuFileBufRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    loaded.cuFileBufDeregister.argtypes = [ctypes.c_void_p]
    loaded.cuFileRead.restype = ctypes.c_ssize_t
    loaded.cuFileRead.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64]
    return loaded


def content(nbytes: int) -> torch.Tensor:
    """Return the contents of the file: shape [nbytes], uint8, the same in every process."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(SEED))


def repeated(read: Callable[[], None], device: torch.Tensor, expected: torch.Tensor, repeats: int) -> dict:
    """Return the median rate of reads, after one whose bytes are compared."""
    device.zero_()
    torch.cuda.synchronize()
    read()
    equal = bool(torch.equal(device.cpu(), expected))
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        read()
        taken.append(time.perf_counter() - began)
    return {"bytes_per_s": rate(expected.numel(), statistics.median(taken)), "equal": equal}


def ours(file: Path, nbytes: int, repeats: int) -> list[dict]:
    """Read through pinned buffers, one being copied while the others are read."""
    from memascend._memascend import FileEngine, FileTransfers

    engine = FileEngine()
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    piece = min(PIECE, nbytes)
    buffers = [host_memory("cuda", piece) for _ in range(BUFFERS)]
    copied = [torch.cuda.Event() for _ in buffers]
    stream = torch.cuda.Stream()

    def read() -> None:
        flights: list[tuple[int, int, list]] = []

        def land() -> None:
            number, offset, transfers = flights.pop(0)
            for transfer in transfers:
                transfer.wait()
            with torch.cuda.stream(stream):
                device[offset : offset + piece].copy_(buffers[number], non_blocking=True)
                copied[number].record()

        for count, offset in enumerate(range(0, nbytes, piece)):
            number = count % BUFFERS
            if len(flights) == BUFFERS // 2:
                land()
            copied[number].synchronize()
            transfers = []
            for start in range(0, piece, MIB):
                transfer, part = FileTransfers(engine), buffers[number][start : start + MIB]
                transfer.start("read", file, offset + start, part.data_ptr(), MIB, part)
                transfers.append(transfer)
            flights.append((number, offset, transfers))
        while flights:
            land()
        stream.synchronize()

    return [{"way": "pinned memory", "engine": engine.name} | repeated(read, device, content(nbytes), repeats)]


@contextmanager
def configured(beside: Path, force: bool) -> Iterator[None]:
    """Have cuFile allow its compatibility mode, or `force` it; an error is raised with what cuFile's log says of it."""
    with tempfile.TemporaryDirectory(dir=beside) as directory:
        config = Path(directory) / "cufile.json"
        properties = PROPERTIES | {"force_compat_mode": force}
        # Else the log is written to the working directory.
        logging = {"dir": directory, "level": "NOTICE"}
        config.write_text(json.dumps({"logging": logging, "properties": properties}))
        os.environ["CUFILE_ENV_PATH_JSON"] = str(config)
        try:
            yield
        except (OSError, RuntimeError) as error:
            logged = errors_of(Path(directory))
            raise RuntimeError(f"{error}; cuFile's log: {'; '.join(logged) or 'empty'}") from error


def errors_of(directory: Path) -> list[str]:
    """Return the last errors that cuFile has logged, without times and processes."""
    lines = [line for log in sorted(directory.glob("cufile*.log")) for line in log.read_text().splitlines()]
    errors = [line.partition("ERROR")[2].strip() for line in lines if " ERROR " in line]
    return list(dict.fromkeys(errors))[-LOGGED:]


def allowed(file: Path, nbytes: int, repeats: int) -> list[dict]:
    """Read with cuFile, which may take its compatibility mode."""
    with configured(file.parent, force=False):
        return by_cufile(file, nbytes, repeats)


def forced(file: Path, nbytes: int, repeats: int) -> list[dict]:
    """Read with cuFile in its compatibility mode."""
    with configured(file.parent, force=True):
        return [row | {"way": "cuFile, compatibility mode"} for row in by_cufile(file, nbytes, repeats)]


def by_cufile(file: Path, nbytes: int, repeats: int) -> list[dict]:
    """Read with cuFile into registered device memory, by threads."""
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    cufile = library()
    checked("cuFileDriverOpen", cufile.cuFileDriverOpen())
    descriptor, handle = Descriptor(type=1), ctypes.c_void_p()
    number = os.open(file, os.O_RDONLY | os.O_DIRECT)
    rows = []
    try:
        descriptor.handle.fd = number
        checked("cuFileHandleRegister", cufile.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(descriptor)))
        checked("cuFileBufRegister", cufile.cuFileBufRegister(device.data_ptr(), nbytes, 0))
        call = min(CALL, nbytes)

        def one(offset: int) -> None:
            length = min(call, nbytes - offset)
            done = cufile.cuFileRead(handle, device.data_ptr(), length, offset, offset)
            if done != length:
                raise RuntimeError(f"cuFileRead returned {done} of {length} bytes")

        for threads in THREADS:
            with ThreadPoolExecutor(threads) as pool:

                def read(pool=pool) -> None:
                    list(pool.map(one, range(0, nbytes, call)))

                rows.append({"way": "cuFile", "threads": threads} | repeated(read, device, content(nbytes), repeats))
        cufile.cuFileBufDeregister(device.data_ptr())
        cufile.cuFileHandleDeregister(handle)
    finally:
        os.close(number)
    kernel = Path("/proc/driver/nvidia-fs/version").exists()
    return [row | {"nvidia_fs": kernel} for row in rows]


SIDES = {"ours": ours, "cufile": allowed, "cufile-compatible": forced}


def compare(store: Path, out: Path, size: str) -> int:
    """Run each side in a process of its own, and keep its measurements or the reason why there are none."""
    nbytes = UNIT[size]
    file = store / "cufile.tmp"
    found: dict = {"bytes": nbytes, "rows": []}
    try:
        file.write_bytes(content(nbytes).numpy().tobytes())
        with file.open("rb") as written:
            os.fsync(written.fileno())
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for side in SIDES:
            if side == "cufile-compatible" and any(row["way"] == "cuFile" for row in found["rows"]):
                break
            command = [sys.executable, "-m", "device.cufile", "--side", side, "--store", str(store), "--out", str(out)]
            done = subprocess.run([*command, *(["--toy"] if size == "toy" else [])], stdout=subprocess.PIPE, text=True)
            lines = done.stdout.strip().splitlines()
            if done.returncode == 0 and lines:
                found["rows"] += json.loads(lines[-1])
            else:
                found["rows"].append({"way": side, "failed": f"exit status {done.returncode}: {' '.join(lines[-1:])}"})
            out.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        file.unlink(missing_ok=True)
    for row in found["rows"]:
        print(row)
    if not any(row["way"].startswith("cuFile") for row in found["rows"]):
        print("cuFile cannot be had on this machine, not even in its compatibility mode: the rows say why")
    # That cuFile does not work here is a finding, too.
    return 0 if any(row["way"] == "pinned memory" and row["equal"] for row in found["rows"] if "equal" in row) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side", choices=SIDES, help="measure one side of a file that is there, and print it")
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    size = "toy" if args.toy else "full"
    if args.side is None:
        return compare(args.store, args.out, size)
    try:
        rows = SIDES[args.side](args.store / "cufile.tmp", UNIT[size], 2 if args.toy else 5)
    except (OSError, RuntimeError) as error:
        print(error)
        return 1
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
