"""Frozen weights that are quantised as a model is opened, in files beside its store, from which they are streamed.

They are not tensors of the store: nothing writes them again, so they need neither its slots nor its generations, and
the executor already dequantises weights that it reads from files. Each directory of the store has a file, and units
take turns among them. A file has no name, so that it goes with the process, however that ends, and no later run can
take it for its own. A run that goes on quantises the same weights to the same bytes again. Each block of 4 KiB that is
read is compared with its checksum, as in the store.

A file has the units one behind the other, each from a page on: the numbers of its quantised weights, then the scales of
each with their factors, then the weights that stay as they are.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memascend._memascend import PAGE_BYTES, ExternalFile, Packing
from memascend.errors import CheckpointError
from memascend.layout.bits import BLOCK, NESTED_BLOCK, PIECE_ELEMENTS, parts_of
from memascend.layout.quantising import NF4, dynamic_code, quantise_scales, to_bytes, to_four_bits
from memascend.layout.units import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend.layout.units import ParameterEntry, Unit
    from memascend.session.session import Session

    #: Fills a tensor of one dimension with the elements of a weight, as the model has them, from a number on.
    Read = Callable[[ParameterEntry, torch.Tensor, int], None]


#: Bytes that are read again at once, for their checksums.
_SUMMED_BYTES = 1 << 20


@dataclass(slots=True)
class _Written:
    """Where a weight lies in its file: where its numbers, scales and factors begin; and the offset of scales."""

    numbers: int
    scales: int = 0
    factors: int = 0
    offset: float = 0.0


@dataclass(slots=True)
class _File:
    """A file that is written, and the weights that it has."""

    fd: int
    directory: Path
    end: int = 0
    sums: bytearray = field(default_factory=bytearray)
    written: dict[ParameterEntry, _Written] = field(default_factory=dict)

    def write(self, values: torch.Tensor, position: int) -> None:
        """Write the bytes of a contiguous tensor to `position`."""
        view, done = values.view(torch.uint8).numpy().data, 0
        with self._named():
            while done < len(view):
                done += os.pwrite(self.fd, view[done:], position + done)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the directory in the errors of the drive, since the file has no name."""
        try:
            yield
        except OSError as error:
            error.filename = str(self.directory)
            raise

    def finish(self, begin: int, end: int) -> None:
        """Have the bytes `begin .. end`, which begin at a page, reach the drive and leave the page cache."""
        self.end = round_up(end, PAGE_BYTES)
        with self._named():
            self._finish(begin)

    def _finish(self, begin: int) -> None:
        os.ftruncate(self.fd, self.end)
        buffer = torch.empty(min(_SUMMED_BYTES, self.end - begin), dtype=torch.uint8)
        for position in range(begin, self.end, _SUMMED_BYTES):
            part = buffer[: min(_SUMMED_BYTES, self.end - position)]
            nbytes = os.preadv(self.fd, [part.numpy().data], position)
            assert nbytes == len(part), "a file is read whole, but for its end"
            self.sums += ExternalFile.sums_of(part.data_ptr(), len(part))
        os.fdatasync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def opened(self, direct: bool, checksums: bool) -> ExternalFile:
        """Open it to be read."""
        stat = os.fstat(self.fd)
        sums = bytes(self.sums) if checksums else None
        return ExternalFile(f"/proc/self/fd/{self.fd}", stat.st_size, stat.st_mtime_ns, direct, sums)


def quantise_beside(session: Session, read: Read, progress: Callable[[int, int], None]) -> None:
    """Quantise the units of `session` that are marked for it, and have them read from the files beside the store.

    `read` gives the values of weights. `progress` is called with (bytes done, bytes in all), of the weights as the
    model has them, after each unit.

    Raises CheckpointError for weights that are infinite or NaN, and OSError where a drive has no room.
    """
    units = [unit for unit in session.units if unit.bits is not None]
    total, done = sum(unit.nbytes for unit in units), 0
    directories = [Path(path) for path in session.paths]
    with ExitStack() as opened:
        files = []
        for directory in directories[: len(units)]:
            # Its name is gone at once.
            unnamed = opened.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0))
            files.append(_File(unnamed.fileno(), directory))
        for number, unit in enumerate(units):
            _write(files[number % len(files)], unit, read)
            done += unit.nbytes
            progress(done, total)
        tuning = session.options.tuning
        externals = [file.opened(tuning.get("direct", True), tuning.get("checksums", True)) for file in files]
    for number, unit in enumerate(units):
        at = number % len(files)
        for place in unit.places:
            unit.sources[place] = [_source(place, files[at].written[place], externals[at])]
        session.read_outside(unit)


def _write(file: _File, unit: Unit, read: Read) -> None:
    """Write a unit to the end of a file."""
    quantised = [(place, place.bits) for place in unit.places if place.bits is not None]
    begin = end = file.end
    for place, bits in quantised:
        file.written[place] = _Written(end)
        end += parts_of(place.numel, bits)[0]
    for place, bits in quantised:
        written = file.written[place]
        _, scales, factors = parts_of(place.numel, bits)
        written.scales, written.factors = end, end + scales
        _quantise(file, place, bits, written, read)
        end += scales + factors
    for place in (place for place in unit.places if place.bits is None):
        file.written[place] = _Written(end)
        for first, values in _pieces(place, read):
            file.write(values, end + first * place.dtype.itemsize)
        end += place.nbytes
    file.finish(begin, end)


def _quantise(file: _File, place: ParameterEntry, bits: int, written: _Written, read: Read) -> None:
    """Write a weight that is quantised to `bits`."""
    scales = []
    try:
        for first, values in _pieces(place, read):
            numbers, of_piece = to_bytes(values) if bits == 8 else to_four_bits(values)
            file.write(numbers, written.numbers + first * bits // 8)
            scales.append(of_piece)
    except ValueError as error:
        raise CheckpointError(
            f"{place.name} has {error}, which have no scale in {bits} bits: leave frozen_bits out"
        ) from None
    if bits == 8:
        file.write(torch.cat(scales), written.scales)
        return
    nested = quantise_scales(torch.cat(scales))
    file.write(nested.scales, written.scales)
    file.write(nested.factors, written.factors)
    written.offset = nested.offset


def _pieces(place: ParameterEntry, read: Read) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the values of a weight in pieces of whole blocks, each with the number of its first element."""
    buffer = torch.empty(min(PIECE_ELEMENTS, place.numel), dtype=place.dtype)
    for first in range(0, place.numel, PIECE_ELEMENTS):
        values = buffer[: min(PIECE_ELEMENTS, place.numel - first)]
        read(place, values, first)
        yield first, values


def _source(place: ParameterEntry, at: _Written, file: ExternalFile) -> tuple[ExternalFile, int, int, Packing | None]:
    """Return the source of a weight as `Unit.sources` has it."""
    packing = None
    if place.bits == 8:
        packing = Packing.bytes(BLOCK[8], dynamic_code().tolist(), (file, at.scales))
    elif place.bits == 4:
        nested = NESTED_BLOCK, (file, at.factors), dynamic_code().tolist(), at.offset
        packing = Packing.four_bits(BLOCK[4], NF4, (file, at.scales), nested)
    return file, at.numbers, place.nbytes, packing
