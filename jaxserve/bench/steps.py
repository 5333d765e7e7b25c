"""What the engine did, step by step: an observer that keeps numbers only."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduler.plan import StepPlan


class StepLog:
    """Observer of an EngineCore.

    A slot is busy in a step when its row computes something: a row that holds a slot and waits for
    its turn to prefill is not. Means are weighed by the time the steps took.
    """

    COLUMNS = ("end", "seconds", "rows", "tokens", "decode_rows", "queued", "pages_used")

    def __init__(self, core):
        self._core = core
        self._start = core.clock()
        self._rows: list[tuple] = []

    def on_step(self, plan: StepPlan, seconds: float) -> None:
        stats = self._core.scheduler.stats()
        self._rows.append(
            (
                self._core.clock() - self._start,
                seconds,
                plan.num_rows,
                plan.num_tokens,
                plan.num_decode,
                bool(plan.waiting),
                stats.pages_total - stats.pages_free,
            )
        )

    def columns(self) -> dict[str, np.ndarray]:
        """By name: end and seconds in seconds, queued 0 or 1 (somebody waited), the rest counts."""
        table = np.array(self._rows, np.float64).reshape(-1, len(self.COLUMNS))
        return dict(zip(self.COLUMNS, np.ascontiguousarray(table.T)))

    def summary(self) -> dict:
        """Figures of a run. occupancy is the share of slots busy; occupancy_queued that over the
        steps while requests waited for a slot, None if none did."""
        steps = self.columns()
        slots = self._core.scheduler.limits.num_slots
        if not len(steps["end"]):
            return {"steps": 0}
        stats = self._core.scheduler.stats()
        queued = steps["queued"] > 0
        mean = lambda where: _weighed(steps["rows"][where], steps["seconds"][where]) / slots
        return {
            "steps": len(queued),
            "step_ms": float(np.median(steps["seconds"]) * 1000),
            "occupancy": mean(slice(None)),
            "occupancy_queued": mean(queued) if queued.any() else None,
            "pages_used_max": float(steps["pages_used"].max()),
            "pages_total": stats.pages_total,
            "preemptions": stats.preemptions,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "prefix_query_tokens": stats.prefix_query_tokens,
        }


def _weighed(values: np.ndarray, weights: np.ndarray) -> float:
    return float(np.average(values, weights=np.maximum(weights, 1e-9)))
