"""Checks of `make wheels` on built wheels, beside the checks of other programs; prints their sizes.

python tests/wheel_contents.py dist/release
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]


def contents(path: Path) -> str:
    """Return a line on a wheel. Raises AssertionError where something is missing, or in it by mistake."""
    with ZipFile(path) as wheel:
        sizes = {info.filename: info.file_size for info in wheel.infolist()}
        (binary,) = (name for name in sizes if name.endswith(".so"))
        assert binary == "memascend/_memascend.abi3.so", binary
        (info,) = (name.split("/")[0] for name in sizes if name.endswith(".dist-info/METADATA"))
        for file in ("LICENSE", "THIRD-PARTY-LICENSES"):
            assert wheel.read(f"{info}/licenses/{file}") == (ROOT / file).read_bytes(), file
        assert not [name for name in sizes if not name.startswith(("memascend/", f"{info}/"))]
        (sbom,) = (name for name in sizes if name.startswith(f"{info}/sboms/"))
        components = json.loads(wheel.read(sbom))["components"]
        unlicensed = [component["name"] for component in components if not component.get("licenses")]
        assert components and not unlicensed, unlicensed
        listed = {f"{component['name']} {component['version']}" for component in components}
        ours = set(re.findall(r"^(\S+ [\d.]+) \(", (ROOT / "THIRD-PARTY-LICENSES").read_text(), flags=re.MULTILINE))
        assert ours and ours <= listed, ours - listed
        # Of the folders of the machine that built it, nothing is told.
        for folder in (str(ROOT), str(Path.home())):
            assert folder.encode() not in wheel.read(binary) + wheel.read(sbom), folder
    total = sum(sizes.values())
    return (
        f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, installed {total / 1e6:.1f} MB in {len(sizes)} files, "
        f"{sizes[binary] / 1e6:.1f} MB of it the module; {len(components)} components in its SBOM"
    )


def main() -> int:
    """Look into all wheels of a folder."""
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    assert wheels, f"{sys.argv[1]} has no wheel"
    for path in wheels:
        print(contents(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
