"""The options of the subcommands that look at the machine: `bench`, `format` and `doctor`."""

from __future__ import annotations

from typing import Any

from memascend.cli.arguments.parsing import subcommand
from memascend.cli.arguments.values import duration, path, size


def add_bench(subcommands: Any) -> None:
    """Add the subcommand `bench`."""
    parser = subcommand(
        subcommands,
        "bench",
        help="measure drives and the GPU, for the shares of a store and for `memascend plan --gpu`",
        description="Measure drives with memascend's engine, and remember the rates. A directory gets a temporary\n"
        "file; on a raw device (formatted by `memascend format`) the data area is written over, unless it\n"
        "holds a kept store. With --gpu, measure the GPU, the copies to and from it, and host memory.",
    )
    add = parser.add_argument
    add("places", type=path, nargs="*", metavar="DIR_OR_DEVICE", help="where a store will be")
    add("--gpu", action="store_true", help="measure the GPU, with or without drives")
    text = "bytes to write and read there; take more than the drive's cache holds (default: %(default)s)"
    add("--size", type=size, default="1GiB", metavar="SIZE", help=text)
    add("--seconds", type=duration, default=2.0, metavar="X", help="for each workload (default: %(default)s)")
    add("--engine", choices=("auto", "ring", "threads"), default="auto", help="default: %(default)s")
    add("--no-remember", action="store_true", help="do not remember the measurements")
    add("--json", action="store_true", help="a JSON list instead of tables")


def add_format(subcommands: Any) -> None:
    """Add the subcommand `format`."""
    parser = subcommand(
        subcommands,
        "format",
        help="prepare a raw block device for stores; everything on it is lost",
        description="Write memascend's superblock to a block device. A device that is mounted, in use or partitioned,\n"
        "or that holds a filesystem, RAID, another store or any data where it is looked at, is refused.",
    )
    add = parser.add_argument
    add("device", type=path, metavar="DEVICE", help="such as /dev/nvme1n1, or a partition of it")
    text = "DEVICE again, to allow that its contents are destroyed; a mounted or used device is always refused"
    add("--destroy", type=path, metavar="DEVICE", help=text)


def add_doctor(subcommands: Any) -> None:
    """Add the subcommand `doctor`."""
    parser = subcommand(
        subcommands,
        "doctor",
        help="say what of this machine and its software fits memascend, with remedies",
        description="Look at versions, kernel, memory, processors and the drives of stores. Each line is ok,\n"
        "note (works, but not as well as it could) or problem (does not work; the exit code is 1).\n"
        "Put the page into bug reports.",
    )
    add = parser.add_argument
    text = (
        "where a store will be; a file of 1 GiB is written there for ten seconds and removed; several times for several"
    )
    add("--store", type=path, action="append", default=[], metavar="DIR_OR_DEVICE", help=text)
    add("--no-measure", action="store_true", help="do not time the drives")
    add("--json", action="store_true", help="a JSON list of lines instead of a page")
