"""The documents name what exists: every room, files that are there, and names that can be imported."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGE, CRATES = ROOT / "python" / "memascend", ROOT / "crates"


def rooms() -> dict[str, str]:
    """Return the text under each heading that names a room."""
    parts = re.split(r"^##+ (.*)$", TEXT, flags=re.MULTILINE)[1:]
    named = zip(parts[::2], parts[1::2], strict=True)
    return {match[1]: text for heading, text in named if (match := re.match(r"`([\w-]+)/?`: ", heading))}


def test_every_room_has_a_heading() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    crates = {path.parent.name for path in CRATES.glob("*/Cargo.toml")}
    assert len(folders) > 10 and len(crates) > 4
    assert set(rooms()) == folders | crates


def test_the_files_that_it_names_are_there() -> None:
    checked, missing = 0, []
    for room, text in rooms().items():
        homes = [PACKAGE / room, CRATES / room / "src", ROOT, PACKAGE]
        for name in re.findall(r"`([\w./-]+(?:\.py|\.rs|\.cu|\.c|\.cpp|/))`", text):
            checked += 1
            if not any((home / name).exists() for home in homes):
                missing.append((room, name))
    assert missing == []
    assert checked > 40


def test_the_names_of_the_package_can_be_imported() -> None:
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benches/README.md")]
    text = "\n".join(page.read_text() for page in [*pages, *sorted((ROOT / "docs").rglob("*.md"))])
    names = set(re.findall(r"(?:`|::: )(memascend(?:\.[A-Za-z_]+)+)", text))
    assert len(names) > 30
    for name in sorted(names):
        pkgutil.resolve_name(name)


def test_the_targets_of_make_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = set(
        re.findall(r"^(?:make|\| `make) ([a-z-]+)", "\n".join(page.read_text() for page in pages), re.MULTILINE)
    )
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "docs"} <= named
    assert named - targets == set()
