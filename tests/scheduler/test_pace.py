"""Planning waits as long as steps have always taken, and not so long that the device does."""

import pytest

from jaxserve.scheduler.pace import (
    CERTAIN,
    FEWEST_STEPS,
    LONGEST_LEAD_S,
    LONGEST_SPARE_S,
    SHORTEST_LEAD_S,
    Pace,
)


def in_time(pace, steps=2000):
    for _ in range(steps):
        pace.planned(too_late=False)


def ran(pace, num_tokens, seconds, steps=FEWEST_STEPS):
    for _ in range(steps):
        pace.ran(num_tokens, seconds)


def test_nothing_is_spared_of_a_step_that_nobody_knows():
    pace = Pace(256)
    ran(pace, 16, 1.0, FEWEST_STEPS - 1)
    assert pace.spare_s(16) == 0.0
    pace.ran(16, 1.0)
    assert pace.spare_s(16) > 0.8 and pace.spare_s(17) == 0.0


def test_steps_padded_alike_take_as_long():
    """Of 33 to 64 tokens in a budget of 256; those of 64 are known by those of 40."""
    pace = Pace(256)
    ran(pace, 40, 1.0)
    assert pace.spare_s(64) == pace.spare_s(33) > 0 == pace.spare_s(32)


def test_the_shortest_counts_at_once_and_longer_ones_slowly():
    pace = Pace(64)
    in_time(pace)
    for seconds in (0.9, 0.5, 0.7):
        pace.ran(4, seconds)
    assert pace.spare_s(4) == pytest.approx(CERTAIN * 0.51 - SHORTEST_LEAD_S)  # 0.5 + 0.05 * 0.2
    ran(pace, 4, 1.2, 200)
    assert pace.spare_s(4) == pytest.approx(LONGEST_SPARE_S)


def test_the_lead_grows_with_each_lateness_and_shrinks_slowly():
    pace = Pace(64)
    ran(pace, 4, 1.0)
    in_time(pace)
    assert pace.spare_s(4) == pytest.approx(CERTAIN - SHORTEST_LEAD_S)
    for _ in range(40):
        pace.planned(too_late=True)
    assert pace.spare_s(4) == pytest.approx(CERTAIN - LONGEST_LEAD_S)
    in_time(pace, 10)
    assert pace.spare_s(4) == pytest.approx(CERTAIN - LONGEST_LEAD_S * 0.99**10)


def test_one_long_pause_is_not_what_steps_take():
    """The device was stuck in the first step of a size for a minute."""
    pace = Pace(64)
    pace.ran(1, 60.0)
    assert pace.spare_s(1) == 0.0
    ran(pace, 1, 0.01)
    assert pace.spare_s(1) < 0.01


def test_a_step_shorter_than_the_lead_is_not_waited_for():
    pace = Pace(64)
    ran(pace, 1, 1e-3)
    assert pace.spare_s(1) == 0.0
