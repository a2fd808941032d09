"""Versions of Python and of the packages that memascend works with."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

import memascend
from memascend.doctor.findings import Finding, note, ok, problem

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Packages that memascend needs.
NEEDED = ("torch", "numpy")
#: Packages that parts of it integrate with; their absence is no fault.
OPTIONAL = (
    "transformers",
    "safetensors",
    "accelerate",
    "peft",
    "trl",
    "datasets",
    "deepspeed",
    "lightning",
    "liger-kernel",
    "cupy-cuda12x",
    "cupy-cuda13x",
)


def software() -> Iterator[Finding]:
    """Yield a line for memascend, for Python and for each package that is installed or needed."""
    yield ok("memascend", f"{importlib.metadata.version('memascend')}, {os.path.dirname(memascend.__file__)}")
    yield _python()
    supported = _supported()
    if supported is None:
        yield note("versions", "not compared with what is supported", "pip install packaging")
    for name in (*NEEDED, *OPTIONAL):
        yield from _package(name, (supported or {}).get(name))


def _python() -> Finding:
    text = f"{sys.version.split()[0]}, {sys.executable}"
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return ok("Python", text)
    return note(
        "Python",
        f"{text}, free-threaded: memascend needs the GIL, which Python turns on again when it is imported",
        "Use the ordinary Python of this version, without PYTHON_GIL=0 and -X gil=0",
    )


def _package(name: str, specifier: Any) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name in NEEDED:
            yield problem(name, "not installed", f"pip install '{name}{specifier or ''}'")
        return
    if specifier is None or specifier.contains(version, prereleases=True):
        yield ok(name, version)
    else:
        report = problem if name in NEEDED else note
        yield report(name, f"{version}, and {specifier} is supported", f"pip install '{name}{specifier}'")


def _supported() -> dict[str, Any] | None:
    """Return the versions that the wheel's own requirements name, of all extras; None without `packaging`."""
    try:
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return None
    supported: dict[str, Any] = {}
    for line in importlib.metadata.requires("memascend") or ():
        requirement = Requirement(line)
        # One extra may ask for more than another: all have to be content.
        supported[requirement.name] = supported.get(requirement.name, SpecifierSet()) & requirement.specifier
    return supported
