"""Runs and resumptions in which calls of the system fail, by faulty_calls.c: a program of test_faulty_calls.py.

    LD_PRELOAD=faulty_calls.so python faulty_runs.py ROOM COUNT SEED

Each of COUNT tries has one kind of call fail, the n-th time or from then on, in a process of its own; another one then
resumes the store without a fault. A line of JSON tells of each try, with what was wrong under "problems".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, WIDTH = 5, 64
#: The calls that fail, with the system's errno values for each, and the engines that make it.
BOTH = ("threads", "ring")
KINDS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "ring write": (("ring",), (errno.EIO, errno.ENOSPC, errno.EAGAIN)),
    "fdatasync": (BOTH, (errno.EIO, errno.ENOSPC)),
    "pwrite64": (BOTH, (errno.EIO, errno.ENOSPC)),
    "fsync": (BOTH, (errno.EIO, errno.ENOSPC)),
    "renameat2": (BOTH, (errno.EINVAL, errno.EIO)),
    "pwritev2": (("threads",), (errno.EIO, errno.ENOSPC, errno.EAGAIN)),
    "preadv2": (("threads",), (errno.EIO, errno.EAGAIN)),
    "ring read": (("ring",), (errno.EIO, errno.EAGAIN)),
    "io_uring_enter": (("ring",), (errno.EBUSY, errno.EINTR, errno.EBADF, errno.ENOMEM)),
    "pread64": (BOTH, (errno.EIO,)),
    "renameat": (BOTH, (errno.EIO, errno.ENOSPC)),
    "openat": (BOTH, (errno.EMFILE, errno.EIO, errno.ENOSPC)),
    "open64": (BOTH, (errno.EMFILE, errno.EACCES)),
    "fallocate": (BOTH, (errno.ENOSPC, errno.EOPNOTSUPP, errno.EINTR)),
    "ftruncate64": (BOTH, (errno.EIO,)),
    "unlinkat": (BOTH, (errno.EIO, errno.EROFS)),
    "fstatvfs": (BOTH, (errno.EIO,)),
    "flock": (BOTH, (errno.ENOLCK,)),
    "mkdir": (BOTH, (errno.ENOSPC, errno.EACCES)),
}
#: Calls without which no step is durable: where they fail for ever, the program is told.
NEEDED = ("pwritev2", "ring write", "pwrite64", "fsync", "fdatasync")
HARMLESS = (errno.EINTR, errno.EAGAIN)
#: Errors after which the kernel has a call tried again at once, and which it never returns for ever.
PASSING = (errno.EINTR,)
LEAST: dict[str, Any] = {"allocator": "pageable", "host_memory": "64MiB"}
SECONDS = 60

library = ctypes.CDLL(None)


def fail(kind: str, nth: int, number: int, for_ever: bool) -> None:
    """Have a kind of call fail from now on, below the folder of the stores."""
    library.fail_calls(kind.encode(), ctypes.c_long(nth), number, int(for_ever), b"/faulty/")


class Net(nn.Module):
    """An embedding, layers, dropout, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        with torch.no_grad():
            self.seen += 1
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        return nn.functional.cross_entropy(self.head(x), ids)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take step `number`, from 0 on: its bits depend on the state before it alone."""
    torch.manual_seed(50 + number)
    model(torch.randint(0, 64, (16,))).backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of the state of weights, optimizer and buffers."""
    found = hashlib.blake2b(digest_size=16)
    named = dict(memascend.parameters_of(model)) | dict(model.named_buffers())
    for key, states in optimizer.state_dict()["state"].items():
        named |= {f"{key} {name}": value for name, value in states.items()}
    for name, value in sorted(named.items()):
        found.update(name.encode())
        found.update(torch.as_tensor(value).detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def reference() -> list[str]:
    model = build()
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    found = [""]
    for number in range(STEPS):
        step(model, optimizer, number)
        found.append(digest(model, optimizer))
    return found


class Teller:
    """Sends a process's messages to the one that watches it."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def __call__(self, what: str, *more: Any) -> None:
        os.write(self.pipe, (json.dumps([what, *more]) + "\n").encode())

    def error(self, where: str, error: BaseException) -> None:
        self("error", where, isinstance(error, memascend.MemascendError), f"{type(error).__name__}: {error}"[:400])


def train(store: Path, engine: str, tell: Teller) -> None:
    """Train and say of each step when it is durable, until something fails."""
    model = None
    try:
        where = "offload"
        model = memascend.offload(build(), store=store, engine=engine, keep_store=True, **LEAST)
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        for number in range(STEPS):
            where = f"step {number + 1}"
            step(model, optimizer, number)
            where = f"flush {number + 1}"
            memascend.flush(model)
            tell("durable", number + 1, digest(model, optimizer))
            if number + 1 in (2, 3):
                where = f"save {number + 1}"
                memascend.save_checkpoint(model, f"at {number + 1}")
                tell("tag", f"at {number + 1}")
            if number + 1 == 4:
                where = "delete"
                tell("untag", "at 2")
                memascend.delete_checkpoint(model, "at 2")
    except Exception as error:
        tell.error(where, error)
    try:
        if model is not None:
            memascend.close(model)
    except Exception as error:
        tell.error("close", error)


def resume(store: Path, engine: str, tell: Teller) -> None:
    """Resume, send the step and the digest of its state, and leave the store as it is."""
    try:
        resumed = memascend.resume(store, model=build(), engine=engine, **LEAST)
        tags = [tag for tag, _, _ in memascend.checkpoints(resumed.model)]
        tell("resumed", resumed.steps, digest(resumed.model, resumed.optimizer), tags)
        memascend.offload_of(resumed.model).close(failed=True)
    except Exception as error:
        tell.error("resume", error)


def in_a_process(work: Callable[[Teller], None]) -> list[list[Any]]:
    """Return the messages of `work` from a child process, and how that ended where it crashed."""
    end, begin = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        tell = Teller(begin)
        try:
            work(tell)
            tell("calls", library.calls_seen())
        except BaseException as error:
            tell("crash", f"{type(error).__name__}: {error}"[:400])
        os._exit(0)
    os.close(begin)
    told, until = b"", time.monotonic() + SECONDS
    while True:
        if not select.select([end], [], [], max(0.0, until - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
            break
        part = os.read(end, 1 << 16)
        if not part:
            break
        told += part
    os.close(end)
    _, status = os.waitpid(pid, 0)
    lines = [json.loads(line) for line in told.decode().splitlines()]
    return lines + ([["crash", f"ended with status {status}"]] if status else [])


def calls(lines: list[list[Any]]) -> int:
    return next((line[1] for line in lines if line[0] == "calls"), 0)


def problems_of(lines: list[list[Any]]) -> list[str]:
    """Return the crashes, and errors of a kind that is not ours: no fault may end so."""
    crashes = [line[1] for line in lines if line[0] == "crash"]
    return crashes + [f"no error of ours: {line[3]}" for line in lines if line[0] == "error" and not line[2]]


def compare(lines: list[list[Any]], found: list[list[Any]], expected: list[str]) -> list[str]:
    """Return the differences of a fresh process's findings from the messages of the faulty one."""
    problems = problems_of(found)
    durable = {line[1]: line[2] for line in lines if line[0] == "durable"}
    problems += [f"step {number} was none" for number, state in durable.items() if state != expected[number]]
    last = max(durable, default=0)
    tags = {line[1] for line in lines if line[0] == "tag"} - {line[1] for line in lines if line[0] == "untag"}
    resumed = next((line for line in found if line[0] == "resumed"), None)
    if resumed is None:
        return [*problems, f"step {last} was durable, and: {found}"] if last else problems
    _, number, state, there = resumed
    if number not in (last, last + 1):
        problems.append(f"step {last} was durable, and step {number} was resumed")
    if number and state != expected[number]:
        problems.append(f"what was resumed is not step {number}")
    return problems + [f"{tag} is lost" for tag in sorted(tags - set(there))]


def attempt(room: Path, expected: list[str], chance: random.Random, kind: str) -> dict[str, Any]:
    """Have one kind of call fail in a run, or in a resumption of one."""
    engines, numbers = KINDS[kind]
    engine, number = chance.choice(engines), chance.choice(numbers)
    phase, for_ever = chance.choice(("train", "train", "resume")), chance.random() < 0.5 and number not in PASSING
    store = room / "faulty" / "store"
    store.parent.mkdir()
    said: dict[str, Any] = {"kind": kind, "engine": engine, "errno": errno.errorcode[number], "phase": phase}
    done: list[list[Any]] = []
    if phase == "resume":
        done = in_a_process(lambda tell: train(store, engine, tell))
    work = train if phase == "train" else resume

    def faulty(tell: Teller, nth: int) -> None:
        fail(kind, nth, number, for_ever)
        work(store, engine, tell)

    count = calls(in_a_process(lambda tell: faulty(tell, 0)))
    if phase == "train":
        shutil.rmtree(store)
    nth = chance.randint(1, max(count, 1))
    lines = in_a_process(lambda tell: faulty(tell, nth))
    errors = [line for line in lines if line[0] == "error"]
    problems = problems_of(lines)
    if count and for_ever and kind in NEEDED and number not in HARMLESS and phase == "train" and not errors:
        problems.append("it failed for ever, and the program was told of nothing")
    if store.exists():
        found = in_a_process(lambda tell: resume(store, engine, tell))
        problems += compare(done or lines, found, expected)
    elif any(line[0] == "durable" for line in lines):
        problems.append("the store is gone")
    shutil.rmtree(store.parent)
    failed = bool(count) and calls(lines) >= nth
    said |= {"nth": nth, "of": count, "for ever": for_ever}
    return said | {"failed": failed, "told": len(errors), "problems": problems}


def main() -> None:
    room, count, seed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    expected = reference()
    kinds = list(KINDS)
    for index in range(count):
        chance = random.Random(f"{seed} {index}")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(room / "faulty")
        said = attempt(room, expected, chance, kinds[index % len(kinds)])
        print(json.dumps({"try": index} | said), flush=True)


if __name__ == "__main__":
    main()
