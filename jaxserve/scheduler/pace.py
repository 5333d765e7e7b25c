"""Pace: how late the next step may be planned without keeping the device waiting for it.

A step that is dispatched as soon as the one before it begins to run is planned too early: whoever
arrives while that one runs is not in it and waits for a whole step more. The device only needs its
next step when it has done the last one. So planning waits, for as long as steps of that size have
always taken, less what the host needs.
"""

from __future__ import annotations

import collections

from jaxserve.scheduler.limits import padded, step_sizes

CERTAIN = 0.9  # part of the shortest time that is relied on
RISE = 0.05  # how fast the shortest time known follows longer ones
LATER_BY, EARLIER_BY = 0.99, 1.5  # factors on the lead: after each step in time, after one too late
SHORTEST_LEAD_S, LONGEST_LEAD_S = 0.5e-3, 0.1
FEWEST_STEPS = 3  # of a size, to know it: the first may have been held up by anything
LONGEST_SPARE_S = 1.0


class Pace:
    """Told of steps and of how the host kept up with them; owns no clock.

    token_budget: tells the sizes that steps are padded to. Steps of one size take about as long.
    """

    def __init__(self, token_budget: int):
        self._sizes = step_sizes(token_budget)
        self._shortest_s: dict[int, float] = {}  # by size; forgets slowly
        self._steps: collections.Counter[int] = collections.Counter()  # by size
        self._lead_s = 2e-3

    def ran(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        size = padded(num_tokens, self._sizes)
        known = self._shortest_s.get(size, seconds)
        self._shortest_s[size] = min(seconds, known + RISE * (seconds - known))
        self._steps[size] += 1

    def planned(self, *, too_late: bool) -> None:
        """A step was dispatched; too_late: the device had done the one before by then."""
        lead_s = self._lead_s * (EARLIER_BY if too_late else LATER_BY)
        self._lead_s = min(LONGEST_LEAD_S, max(SHORTEST_LEAD_S, lead_s))

    def spare_s(self, num_tokens: int) -> float:
        """Seconds from the beginning of a step until the next one is to be planned; none where too
        little is known of its size."""
        size = padded(num_tokens, self._sizes)
        if self._steps[size] < FEWEST_STEPS:
            return 0.0
        return min(LONGEST_SPARE_S, max(0.0, CERTAIN * self._shortest_s[size] - self._lead_s))
