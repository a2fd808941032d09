"""The CUDA runtime of the Rust tests, compiled and driven from Python: it really allocates, and keeps books."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

SOURCE = Path(__file__).resolve().parents[2] / "crates" / "memascend-mem" / "tests" / "fake_cudart.c"
#: The variable that names the library to use.
VARIABLE = "MEMASCEND_CUDART"


def build(folder: Path, *definitions: str) -> Path:
    """Compile the variant that the definitions make, and return the library's path. Skips where nothing compiles C."""
    import requirements  # Not where only a process that uses the library imports this.

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        requirements.unmet("compiler", "there is no C compiler for the CUDA runtime of tests")
    library = folder / "libcudart.so.12"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread"]
    flags += [f"-D{definition}" for definition in definitions]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


class Fake:
    """The runtime of this process, as the variable names it: its settings and its books."""

    #: The fake keeps the pointers that it was given, longer than any `Fake` lives.
    _names: ClassVar[dict[str, bytes]] = {}

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[VARIABLE])
        self._name = self._library["fake_name"]
        self._name.argtypes, self._name.restype = [ctypes.c_char_p], None
        self._access = self._library["fake_access"]
        self._access.argtypes, self._access.restype = [ctypes.c_size_t] * 3, None

    def get(self, name: str) -> int:
        function = self._library[f"fake_{name}"]
        function.restype = ctypes.c_size_t
        return function()

    def set(self, name: str, value: int) -> None:
        function = self._library[f"fake_set_{name}"]
        function.argtypes, function.restype = [ctypes.c_size_t], None
        function(value)

    def text(self, name: str) -> str:
        """Return the faults of kind "race" or "misuse", a line for each of the first few."""
        function = self._library[f"fake_{name}_text"]
        function.restype = ctypes.c_char_p
        return function().decode()

    def wait_was_redundant(self, number: int) -> bool:
        """Return whether that call of cudaStreamWaitEvent, counted from 1, ordered nothing anew."""
        return self._wait_was("redundant", number)

    def wait_was_used(self, number: int) -> bool:
        """Return whether that call, counted from 1, was the first to order two accesses that would have been a race."""
        return self._wait_was("used", number)

    def _wait_was(self, what: str, number: int) -> bool:
        function = self._library[f"fake_wait_was_{what}"]
        function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_size_t
        return bool(function(number))

    def calls(self, name: str) -> int:
        """Return how often a function was called."""
        function = self._library["fake_calls"]
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_size_t
        return function(name.encode())

    def fail(self, name: str, code: int) -> None:
        """Make one function fail with a code; 0 ends it."""
        function = self._library["fake_fail"]
        function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_int], None
        function(self._kept(name), code)

    def access(self, address: int, nbytes: int, write: bool, name: str) -> None:
        """Register an access of the computing stream, called `name` in the text of a race."""
        self._name(self._kept(name))
        self._access(address, nbytes, write)

    def _kept(self, name: str) -> bytes:
        return self._names.setdefault(name, name.encode())

    def live(self) -> int:
        """Return how many allocations and registrations live."""
        return self.get("live_allocations") + self.get("live_registrations")

    def assert_clean(self, early_reuses: int = 0) -> None:
        """Nothing is live or waits to run, nothing was called wrongly, and no error is left for the next who asks.

        `early_reuses` events were recorded again on purpose before the host knew them done.
        """
        names = ("misuses", "races", "streams", "pending", "cold_pages", "early_reuses", "pending_error")
        books = {name: self.get(name) for name in names}
        books["early_reuses"] -= early_reuses
        books |= {kind: self.get(f"live_{kind}") for kind in ("allocations", "registrations", "events")}
        assert not any(books.values()), f"{books}\n{self.text('misuse')}{self.text('race')}"
