"""Lines through costs, against points whose line is known."""

import pytest

from tools import bench_growth


def test_the_knee_is_where_the_line_begins():
    x, y = [1, 2, 4, 8, 16, 32], [10, 10, 10, 18, 34, 66]  # 2 + 2 x from 4 on
    line = bench_growth.line_past_knee(x, y, 0.05)
    assert line.knee == 4 and line.worst == pytest.approx(0, abs=1e-9)
    assert (line.slope, line.intercept) == (pytest.approx(2), pytest.approx(2))
    assert line.at(100) == pytest.approx(202)


def test_what_grows_faster_is_on_no_line():
    x = [1, 2, 4, 8, 16, 32]
    assert bench_growth.line_past_knee(x, [n**2 for n in x], 0.1).worst > 0.1
