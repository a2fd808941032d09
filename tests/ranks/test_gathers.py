"""Units are gathered by all ranks or by none, and their buffers are free afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import rank_programs

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "another order": ("change_order", {}),
    "updates before a step": ("update_between", {"flush": False}),
    "updates before a flush": ("update_between", {"flush": True}),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_gathered_does_not_depend_on_what_there_is_room_for(program: str, tmp_path: Path) -> None:
    name, options = PROGRAMS[program]
    expected = rank_programs.run(name, 1, tmp_path, "alone", least=False, **options)
    for least in (True, "first"):
        results = rank_programs.run(name, 2, tmp_path, str(least), least=least, **options)
        assert bit_equality.difference(results, expected * 2) is None, (least, results)


def test_a_buffer_is_free_although_the_backend_refers_to_it(tmp_path: Path) -> None:
    expected = rank_programs.in_one_process(2)
    for result in rank_programs.run("hold_gathered", 2, tmp_path):
        assert "error" not in result, result
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
