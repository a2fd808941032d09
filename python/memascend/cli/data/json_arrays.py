"""JSON files that hold an array of objects: where each object lies, while the file is only mapped.

Libraries that stream JSON (ijson, pyarrow) tell an object's value and not its place. The index of documents
keeps places, so that documents can be read in another order without a copy of the file.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator

#: Characters that open or close an object or array, and strings, in which the same characters mean nothing.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_OBJECT, _ARRAY, _CLOSING = b"{"[0], b"["[0], b"]}"
#: Bytes after which the pages that were read are released, so that they do not count as this process's memory.
_WINDOW_BYTES = 16 << 20


def objects(data: mmap.mmap, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of each object of the array in `data`, which begins with it at byte `start`.

    Raises ValueError where it is no such array, or only the beginning of one.
    """
    depth, begin, end, let_go = 0, 0, 0, 0
    for token in _TOKEN.finditer(data, start):
        at, byte = token.start(), data[token.start()]
        if depth == 0 and (byte != _ARRAY or data[start:at].strip()):
            raise ValueError("it does not begin with an array")
        if byte in _CLOSING:
            depth -= 1
        elif depth == 1 and byte != _OBJECT:
            raise ValueError(f"at byte {at} the array holds something other than an object")
        elif byte in (_OBJECT, _ARRAY):
            if depth == 1:
                _check_between(data, end, at, b"," if begin else b"")
                begin = at
            depth += 1
        if depth == 1:
            end = token.end()
            if byte in _CLOSING:
                yield begin, end - begin
        if depth == 0:
            _check_between(data, end, at, b"")
            _check_between(data, token.end(), len(data), b"")
            return
        if at - let_go > _WINDOW_BYTES:
            let_go = at // mmap.PAGESIZE * mmap.PAGESIZE
            data.madvise(mmap.MADV_DONTNEED, 0, let_go)
    raise ValueError("it ends within the array")


def _check_between(data: mmap.mmap, begin: int, end: int, expected: bytes) -> None:
    if data[begin:end].strip() != expected:
        raise ValueError(f"at byte {begin} there is no JSON")
