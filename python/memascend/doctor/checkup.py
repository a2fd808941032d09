"""The whole of the doctor's page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.doctor.sizes import sizes
from memascend.doctor.software import software
from memascend.doctor.storage import storage
from memascend.doctor.system import system

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.doctor.findings import Finding
    from memascend.hardware.drives import Location


def check(
    stores: Sequence[Location] = (), *, measure: bool = True, progress: Callable[[str], None] = lambda _: None
) -> list[Finding]:
    """Look at software, machine and the drives of `stores`.

    `measure`: time each drive, with a file of 1 GiB that is removed again, in about ten seconds.
    """
    findings = [*software(), *system()]
    for location in stores:
        progress(f"{location}: looking at the drive ...")
        findings += storage(location, measure)
    findings.append(sizes(stores))
    return findings
