"""Vitals: what the scheduler measures of its own running, for the guard and the chunk budget."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduler.gate import Rate
from jaxserve.scheduler.plan import StepPlan

GAPS_KEPT = 256


class Vitals:
    """Step times, gaps between tokens, preemptions. Times come in; there is no clock here."""

    def __init__(self):
        self._planned_at: dict[int, float] = {}  # by step, those in flight
        self._absorbed_at = 0.0
        self._gaps_s = np.zeros(GAPS_KEPT)  # of the latest steps with decoding rows, as a ring
        self._num_gaps = 0
        self._preemptions = Rate(window_s=60.0)

    def planned(self, step: int, now: float) -> None:
        self._planned_at[step] = now

    def absorbed(self, plan: StepPlan, now: float) -> float:
        """Seconds that the step took: since its plan, or since the step before it was absorbed."""
        seconds = now - max(self._planned_at.pop(plan.step, now), self._absorbed_at)
        if plan.num_decode:
            self._gaps_s[self._num_gaps % GAPS_KEPT] = now - self._absorbed_at
            self._num_gaps += 1
        self._absorbed_at = now
        return seconds

    def preempted(self, now: float) -> None:
        self._preemptions.add(1, now)

    def forget_steps(self) -> None:
        """Whatever was in flight is lost."""
        self._planned_at.clear()

    def take_itl_p99(self) -> float:
        """Seconds between two tokens of a stream, p99 of the steps since this was last asked."""
        gaps_s = self._gaps_s[: min(self._num_gaps, GAPS_KEPT)]
        self._num_gaps = 0
        return float(np.quantile(gaps_s, 0.99)) if len(gaps_s) else 0.0

    def preemptions_per_min(self, now: float) -> float:
        return self._preemptions.per_second(now) * 60
