"""Copies to and from devices, gathers and exchanges have an order, and all of it is needed: each omission shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import bit_equality
import devices_of_ranks
import pytest
import rank_programs
from test_gathers import PROGRAMS

if TYPE_CHECKING:
    from pathlib import Path

#: The device has no buffer to spare and the host one for each unit, so that units are gathered where they were copied
#: from.
LEAST = {"device_memory": "least"}
#: The programs in which orders are left out. Where the host waits for gradients, it knows that all copies before them
#: have ended.
LEFT_OUT = {
    "gather_at_once": {"doing": "evaluate"},
    "send_at_once": {"doing": "train"},
    "copy_at_once": {"doing": "train"},
    "drop_at_once": {"doing": "train"},
}


@pytest.mark.core
@pytest.mark.parametrize("omission", devices_of_ranks.OMISSIONS)
def test_every_order_is_needed(omission: str, tmp_path: Path, library: Path) -> None:
    for without in (None, omission):
        folder = tmp_path / str(without)
        folder.mkdir()
        # Copies at once where an order is left out: one that is late could read memory that has gone.
        settings = {"lazy": int(without is None), "lateness": 1000}
        options = {"library": library, "without": without, "computing": LEAST, "settings": settings}
        results = rank_programs.run("on_device", 2, folder, **options, **LEFT_OUT[omission])
        for result in results:
            assert "error" not in result, result
            noticed = "nothing orders them" in result["left"] or "does not know that" in result["left"]
            assert noticed == (without is not None) == (result["left"] != ""), result["left"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_gathered_does_not_depend_on_what_devices_have_room_for(
    program: str, tmp_path: Path, library: Path
) -> None:
    name, options = PROGRAMS[program]
    expected = rank_programs.run(name, 1, tmp_path, "alone", least=False, **options)
    for number, memory in enumerate(("1GiB", "least", "least on the first")):
        least = (False, True, "first")[number]
        results = rank_programs.run(
            "on_device",
            2,
            tmp_path,
            str(number),
            doing=name,
            library=library,
            computing={"device_memory": memory},
            least=least,
            **options,
        )
        for result in results:
            if isinstance(result, dict):
                assert result.pop("left", "") == "", result
        assert bit_equality.difference(results, expected * 2) is None, (memory, results)
