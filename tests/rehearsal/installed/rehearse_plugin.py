"""pytest's plugin on the stand-in device: a test fails if the runtime found a race or a misuse during the test.

The kernels in CuPy's place are there without it (`sitecustomize`).
"""

import ctypes
import gc
import os

import pytest


class _Books:
    """Faults that the runtime of this process found."""

    def __init__(self):
        self._library = ctypes.CDLL(os.path.join(os.environ["REHEARSAL"], "libcudart-rehearsal.so"))
        for name in ("fake_races", "fake_misuses"):
            self._library[name].restype = ctypes.c_size_t
        for name in ("fake_race_text", "fake_misuse_text"):
            self._library[name].restype = ctypes.c_char_p

    def counts(self):
        return self._library.fake_races(), self._library.fake_misuses()

    def text(self):
        return (self._library.fake_race_text() + self._library.fake_misuse_text()).decode()


@pytest.fixture(autouse=True)
def _no_races(request):
    books = _Books()
    before = books.counts()
    yield
    gc.collect()
    races, misuses = (now - then for now, then in zip(books.counts(), before, strict=True))
    if (races or misuses) and not request.node.get_closest_marker("provokes_races"):
        pytest.fail(f"{races} races and {misuses} misuses; the first of this process:\n{books.text()}", pytrace=False)
