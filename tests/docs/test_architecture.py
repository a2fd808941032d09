"""The documents name every room, existing files, and names that can be imported."""

from __future__ import annotations

import pkgutil
import re
import tomllib
from pathlib import Path

import prose_lint
import pytest

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGE, CRATES = ROOT / "python" / "memascend", ROOT / "crates"


def rooms() -> list[str]:
    """Return the names in the first column of the tables of rooms."""
    section = TEXT.split("\n## Rooms\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w-]+)/?` \|", section, flags=re.MULTILINE)


def test_every_room_has_a_line() -> None:
    folders = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    crates = [path.parent.name for path in CRATES.glob("*/Cargo.toml")]
    assert len(folders) > 10 and len(crates) > 4
    assert sorted(rooms()) == sorted(folders + crates)


def test_rooms_stand_below_those_that_they_import() -> None:
    """As the contract of import-linter and Cargo have it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["containers"] == ["memascend"])
    section = TEXT.split("\n## Rooms\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", section, flags=re.MULTILINE)
    assert "options" in listed and listed == [layer for layer in reversed(layers) if layer in listed]
    crates = [name for name in rooms() if name.startswith("memascend-")]
    for position, name in enumerate(crates):
        with (CRATES / name / "Cargo.toml").open("rb") as file:
            uses = tomllib.load(file).get("dependencies", {})
        assert uses.keys() & set(crates[position:]) == set(), name


def test_the_files_that_it_names_are_there() -> None:
    names = re.findall(r"`([\w./-]+(?:\.py|\.rs|\.cu|\.c|\.cpp|/))`", TEXT)
    assert len(names) > 30
    assert [name for name in names if not any((home / name).exists() for home in (ROOT, PACKAGE))] == []


def test_the_files_that_a_change_touches_are_there() -> None:
    names = re.findall(r"`((?:crates|docs|python|tests)/[\w./-]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 50
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_it_can_be_read_in_a_quarter_of_an_hour() -> None:
    assert len(TEXT.split()) <= 3500


def test_the_names_of_the_package_can_be_imported() -> None:
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benches/README.md")]
    text = "\n".join(page.read_text() for page in [*pages, *sorted((ROOT / "docs").rglob("*.md"))])
    names = set(re.findall(r"(?:`|::: )(memascend(?:\.[A-Za-z_]+)+)", text))
    assert len(names) > 30
    for name in sorted(names):
        pkgutil.resolve_name(name)


def test_the_modules_that_comments_name_are_there() -> None:
    """In full, as `memascend.errors.StoreError`, or by folder and module: a folder that was renamed is noticed."""
    folders: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        folders.setdefault(path.parent.name, set()).add(path.stem)
    modules = set().union(*folders.values())
    named, wrong = 0, []
    a_name = re.compile(r"`((?!torch\.)[a-z]\w*(?:\.\w+)+)`")
    sources = [path for folder in (PACKAGE, ROOT / "tests", ROOT / "benches") for path in folder.rglob("*.py")]
    naming = [source for source in sources if a_name.search(source.read_text())]
    prose = [(source, number, text) for source in naming for number, text in prose_lint.prose_of(source)]
    for source, number, text in prose:
        for name in a_name.findall(text):
            first, second, *_ = name.split(".")
            named += first == "memascend"
            if not is_there(name) if first == "memascend" else second in modules - folders.get(first, {first}):
                wrong.append(f"{source.relative_to(ROOT)}:{number}: {name}")
    assert named > 100
    assert wrong == [], wrong


def is_there(name: str) -> bool:
    """Return whether the sources have a module of such a dotted name, or one with its next part as a word."""
    path, parts = PACKAGE, name.split(".")[1:]
    while parts and path.is_dir():
        below = [path / f"{parts[0]}{ending}" for ending in ("", ".py", ".pyi")]
        if not (found := [each for each in below if each.exists()]):
            break
        path, parts = found[0], parts[1:]
    # The package has the names of its library, and that the names of the optimizers.
    inside = [path / "library.py", path / "optim/__init__.py"] if path == PACKAGE else [path / "__init__.py"]
    sources = [path] if path.is_file() else inside
    return not parts or any(re.search(rf"\b{parts[0]}\b", source.read_text()) for source in sources)


def test_the_targets_of_make_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = set(
        re.findall(r"^(?:make|\| `make) ([a-z-]+)", "\n".join(page.read_text() for page in pages), re.MULTILINE)
    )
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "docs"} <= named
    assert named - targets == set()
