"""The licences of the crates that are compiled into the wheel, as one file that goes with it.

    python tests/crate_licenses.py            # exit code 1 if THIRD-PARTY-LICENSES does not match Cargo.lock
    python tests/crate_licenses.py --write    # after a change of Cargo.lock; needs cargo

Of a crate with a choice of licences the shortest text is taken, which is MIT's where there is one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "THIRD-PARTY-LICENSES"
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
RULE = "-" * 100


def crates() -> dict[str, dict[str, Any]]:
    """Return the crates of others in the binary, by name and version: no build scripts' and no macros'."""
    found: dict[str, dict[str, Any]] = {}
    for target in TARGETS:
        command = ["cargo", "metadata", "--format-version=1", "--locked", f"--filter-platform={target}"]
        metadata = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)
        packages = {package["id"]: package for package in metadata["packages"]}
        edges = {node["id"]: node["deps"] for node in metadata["resolve"]["nodes"]}
        left = [key for key, package in packages.items() if package["name"] == "memascend-py"]
        seen: set[str] = set()
        while left:
            key = left.pop()
            is_macro = any("proc-macro" in made["kind"] for made in packages[key]["targets"])
            if key in seen or is_macro:
                continue
            seen.add(key)
            left += [edge["pkg"] for edge in edges[key] if any(kind["kind"] is None for kind in edge["dep_kinds"])]
        for package in (packages[key] for key in seen):
            if package["source"]:
                found[f"{package['name']} {package['version']}"] = package
    return found


def text_of(package: dict[str, Any]) -> str:
    """Return the text of a crate's licence. Raises SystemExit for a crate that comes without one."""
    folder = Path(package["manifest_path"]).parent
    found = [path.read_text().strip() for path in folder.glob("LICEN[CS]E*") if path.is_file()]
    # A file that only names the others is none.
    texts = [text for text in found if "WARRANT" in text]
    if not texts:
        raise SystemExit(f"{package['name']} {package['version']} has no licence file in {folder}: look for its text")
    return min(texts, key=len)


def document() -> str:
    """Return the file: each text once, below the names of its crates."""
    holders: dict[str, list[str]] = {}
    for name, package in sorted(crates().items()):
        holders.setdefault(text_of(package), []).append(f"{name} ({package['license']})")
    head = (
        "The binary module of memascend contains these crates, under these licences. It contains parts of the Rust\n"
        "standard library too, under the Apache License 2.0, whose text is in LICENSE.\n"
    )
    parts = [f"{RULE}\n{chr(10).join(names)}\n\n{text}\n" for text, names in holders.items()]
    return "\n".join([head, *parts])


def main() -> int:
    """Compare with the record, or write it."""
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(document())
        return 0
    if RECORD.read_text() == document():
        return 0
    print(f"{RECORD} is not that of Cargo.lock: python tests/crate_licenses.py --write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
