"""The lines that a plan begins with."""

from __future__ import annotations

import pytest

from memascend.forecast.headline import _time

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("least", "most", "told"),
    [
        (1.3, 1.98, "1.3 to 1.98 s"),
        (60, 62, "1 min"),
        (3000, 3700, "50 to 61.7 min"),
        (168_000, 200_000, "46.7 to 55.6 h"),
        (154_043_000, 154_043_000, "1,783 days"),
    ],
)
def test_a_run_has_a_time_in_units_that_can_be_read(least: float, most: float, told: str) -> None:
    assert _time(least, most) == told
