"""Print the oldest versions that pyproject.toml allows, as requirements of pip: `make oldest` tests with them.

    python tests/oldest.py EXTRA [EXTRA ...] > requirements.txt

Of a package that several of these extras name, the highest of the lower bounds counts. CuPy is left out: the oldest
NumPy is older than any that it takes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

#: Packages that cannot be beside the oldest versions of the others.
LEFT_OUT = ("cupy", "nvidia")
PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(extras: list[str]) -> list[Requirement]:
    """Return the requirements of the package and these extras, extras within extras too.

    Raises SystemExit for an extra that there is not.
    """
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    found, seen, left = [Requirement(line) for line in project["dependencies"]], set(), list(extras)
    while left:
        extra = left.pop()
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in optional:
            raise SystemExit(f"{PYPROJECT.name} has no extra {extra!r}: it has {', '.join(optional)}")
        for requirement in map(Requirement, optional[extra]):
            if requirement.name == project["name"]:
                left += requirement.extras
            else:
                found.append(requirement)
    return found


def oldest(extras: list[str]) -> dict[str, Version]:
    """Return the lower bound of each package. Raises SystemExit for a requirement that has none."""
    bounds: dict[str, Version] = {}
    for requirement in requirements(extras):
        lower = [Version(clause.version) for clause in requirement.specifier if clause.operator in (">=", "==")]
        if len(lower) != 1:
            raise SystemExit(f"{PYPROJECT.name}: {requirement} has no lower bound that could be tested")
        bounds[requirement.name] = max(lower[0], bounds.get(requirement.name, lower[0]))
    return bounds


if __name__ == "__main__":
    for name, version in sorted(oldest(sys.argv[1:]).items()):
        if not name.startswith(LEFT_OUT):
            print(f"{name}=={version}")
