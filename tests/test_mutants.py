"""The lines that `make mutants` leaves out are there: a change to a text that it replaces is noticed."""

from __future__ import annotations

import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.missing)
def test_the_text_of_a_mutant_is_there_once(mutant: mutants.Mutant) -> None:
    assert (mutants.ROOT / mutant.file).read_text().count(mutant.text) == 1
    assert mutant.replacement != mutant.text
