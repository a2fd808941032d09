"""A server that runs Python programs: each in a process forked from it, with slow modules imported.

`python forked_program.py SOCKET` serves, in the background. It ends when no test process is connected any more.

`python -IS forked_program.py SOCKET [OPTION...] (-c CODE | -m MODULE | FILE) [WORD...]` runs a program, as `python`
would: with the streams, the directory and the environment of this process. It hands signals on, ends as the program
ends, and if it is killed, so is the program. The program's process has another number than this one, the parent, the
process group and the limits of the server; its variables are set after Python has started, and the interpreter is not
taken apart at its end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

TYPE_CHECKING = False  # as in `typing`, whose import would cost every program time
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

#: The first byte of a connection: a process that needs the server for longer, or a program that is to run.
STAY, RUN = b"s", b"r"
HANDED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
#: Has the program be killed, and is told once it has ended. After SIGKILL it may live for a moment more.
KILL = signal.SIGRTMIN
_STREAMS = (0, 1, 2)


# ---- the process that stands for the program -----------------------------------------------------------------


def run(address: str, words: list[str]) -> NoReturn:
    """Have the server run a program, and end as it ends."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
    except OSError as error:
        with open(os.path.join(os.path.dirname(address), "told")) as told:
            raise SystemExit(f"the server of forked programs has ended: {error}\n{told.read()[-5000:]}") from None
    asked = json.dumps({"words": words, "directory": os.getcwd(), "environment": dict(os.environ)}).encode()
    socket.send_fds(server, [RUN + len(asked).to_bytes(4, "little")], _STREAMS)
    server.sendall(asked)
    # A signal that comes just before a call that waits would be handled after it: its byte in the pipe ends the wait.
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    for number in (*HANDED_ON, KILL):
        signal.signal(number, lambda number, _: server.send(bytes([signal.SIGKILL if number == KILL else number])))
    while server not in (ready := select.select([server, woken], [], [])[0]):
        for reader in ready:
            reader.recv(64)
    told = server.recv(4)
    code = int.from_bytes(told, "little", signed=True) if told else 1
    if code < 0:
        if -code in HANDED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---- the server ----------------------------------------------------------------------------------------------


class Server:
    """Waits for programs and for the ends of their processes, and never has a thread."""

    def __init__(self, listening: socket.socket) -> None:
        import selectors

        self._select = selectors.DefaultSelector()
        self._listening = listening
        #: The connection of each program that runs, by the number of its process, and a handle of that process.
        self._running: dict[int, tuple[socket.socket, int]] = {}
        self._staying: set[socket.socket] = set()
        self._begun = False
        self._watch(listening, self._accept)

    def serve(self) -> None:
        """Serve until the last test process has gone."""
        while not self._begun or self._staying or self._running:
            for key, _ in self._select.select():
                # A program that an earlier event has ended is watched no more, and its number may be another's.
                if self._select.get_map().get(key.fd) is key:
                    self._do(key.data)

    def _do(self, what: Callable[[], Any]) -> None:
        """Do one thing: an error in it ends that program, and is told in the server's record, but ends no other."""
        try:
            what()
        except Exception:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()

    def _watch(self, what: Any, then: Callable[[], Any]) -> None:
        import selectors

        self._select.register(what, selectors.EVENT_READ, then)

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        head, streams, _, _ = socket.recv_fds(connection, 5, len(_STREAMS))
        if head[:1] == STAY:
            self._begun = True
            self._staying.add(connection)
            self._watch(connection, lambda: self._leave(connection))
            return
        left = int.from_bytes(head[1:], "little") if len(head) == 5 else 0
        parts = []
        while left and (part := connection.recv(left)):
            parts.append(part)
            left -= len(part)
        try:
            if len(streams) != len(_STREAMS) or left or not parts:  # killed before it has asked
                connection.close()
                return
            process = os.fork()
            if process == 0:
                self._become(connection, streams, b"".join(parts))
        finally:
            for stream in streams:
                os.close(stream)
        handle = os.pidfd_open(process)
        self._running[process] = connection, handle
        self._watch(connection, lambda: self._hand_on(process))
        self._watch(handle, lambda: self._end(process))

    def _become(self, connection: socket.socket, streams: list[int], asked: bytes) -> NoReturn:
        """Run a program: this is its process, and must not serve whatever fails."""
        try:
            self._forget()
            connection.close()
            for ours, theirs in zip(_STREAMS, streams, strict=True):
                os.dup2(theirs, ours)
                os.close(theirs)
            begin(**json.loads(asked))
        finally:
            os._exit(1)

    def _leave(self, connection: socket.socket) -> None:
        self._select.unregister(connection)
        self._staying.remove(connection)
        connection.close()

    def _hand_on(self, process: int) -> None:
        """Pass signals on; the end of the process that stands for the program is SIGKILL."""
        connection, _ = self._running[process]
        try:
            numbers = connection.recv(16)
        except ConnectionError:
            numbers = b""
        if not numbers:
            self._select.unregister(connection)
        for number in numbers or [signal.SIGKILL]:
            os.kill(process, number)

    def _end(self, process: int) -> None:
        connection, handle = self._running.pop(process)
        _, status = os.waitpid(process, 0)
        self._select.unregister(handle)
        os.close(handle)
        if connection in self._select.get_map():
            self._select.unregister(connection)
        try:
            connection.send(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
        except OSError:  # it was killed before
            pass
        connection.close()

    def _forget(self) -> None:
        """Close the server's descriptors, in the process of a program: no end of a connection must stay open there."""
        self._select.close()
        self._listening.close()
        for connection in self._staying:
            connection.close()
        for connection, handle in self._running.values():
            connection.close()
            os.close(handle)


def begin(words: list[str], directory: str, environment: dict[str, str]) -> NoReturn:
    """Run a program in this process, which is its own, and end as Python would."""
    import atexit
    import threading

    code, error = 1, None
    try:
        prepare(words, directory, environment)
        code = 0
    except SystemExit as asked:
        if asked.code is None or isinstance(asked.code, int):
            code = asked.code or 0
        else:
            print(asked.code, file=sys.stderr)
    except BaseException as caught:
        error = caught
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if error is not None:
        # Handlers at the end of a program look there.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # The interpreter is not taken apart, which takes as long as a small program.
    os._exit(code & 0xFF)


def prepare(words: list[str], directory: str, environment: dict[str, str]) -> None:
    """Apply the options of Python, and execute."""
    import numpy

    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    numpy.random.seed()
    options = set()
    while words[0] in ("-P", "-u"):
        options.add(words.pop(0))
    if "-u" in options or environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    kind = words.pop(0) if words[0] in ("-c", "-m") else ""
    if not words or (kind != "-c" and words[0].startswith("-")):
        raise SystemExit(f"forked_program.py: options are -P and -u, and then -c, -m or a file: {words}")
    found = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    first = {"-c": "", "-m": directory}.get(kind, os.path.dirname(os.path.abspath(words[0])))
    sys.path[:] = ([] if "-P" in options else [first]) + found + [path for path in sys.path if path not in found]
    execute(kind, words)


def execute(kind: str, words: list[str]) -> None:
    """Run code, a module or a file in a new __main__."""
    import runpy
    import types

    if kind == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv = ["-c", *words[1:]]
        code = compile(words[0], "<string>", "exec")
    else:
        sys.argv = words
        main.__file__ = words[0]
        with open(words[0], "rb") as file:
            code = compile(file.read(), words[0], "exec")
    exec(code, vars(main))


def serve(address: str) -> None:
    """Serve in the background: this process ends once connections are taken."""
    import shutil

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(128)
    if os.fork():
        os._exit(0)
    os.setsid()
    import forked_imports  # noqa: F401

    Server(listening).serve()
    shutil.rmtree(os.path.dirname(address))
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run(sys.argv[1], sys.argv[2:])
    serve(sys.argv[1])
