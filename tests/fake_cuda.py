"""The CUDA runtime of the Rust tests, compiled and driven from Python: it really allocates, and keeps books."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "crates" / "memascend-mem" / "tests" / "fake_cudart.c"
#: The variable that names the library to use.
VARIABLE = "MEMASCEND_CUDART"


def build(folder: Path, *definitions: str) -> Path:
    """Compile the variant that the definitions make, and return the library's path."""
    library = folder / "libcudart.so.12"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread"]
    flags += [f"-D{definition}" for definition in definitions]
    subprocess.run(["cc", *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


class Fake:
    """The runtime of this process, as the variable names it: its settings and its books."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[VARIABLE])
        # The fake keeps the pointers that it was given.
        self._names: list[bytes] = []

    def get(self, name: str) -> int:
        function = self._library[f"fake_{name}"]
        function.restype = ctypes.c_size_t
        return function()

    def set(self, name: str, value: int) -> None:
        function = self._library[f"fake_set_{name}"]
        function.argtypes, function.restype = [ctypes.c_size_t], None
        function(value)

    def calls(self, name: str) -> int:
        """Return how often a function was called."""
        function = self._library["fake_calls"]
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_size_t
        return function(name.encode())

    def fail(self, name: str, code: int) -> None:
        """Make one function fail with a code; 0 ends it."""
        self._names.append(name.encode())
        function = self._library["fake_fail"]
        function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_int], None
        function(self._names[-1], code)

    def live(self) -> int:
        """Return how many allocations and registrations live."""
        return self.get("live_allocations") + self.get("live_registrations")

    def assert_clean(self) -> None:
        """Nothing is live, nothing was called wrongly, and no error is left for the next who asks."""
        books = {name: self.get(name) for name in ("misuses", "cold_pages", "pending_error")}
        books |= {kind: self.get(f"live_{kind}") for kind in ("allocations", "registrations", "events")}
        assert not any(books.values()), books
