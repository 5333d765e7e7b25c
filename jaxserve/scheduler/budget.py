"""How many prefill tokens a step gets, and how they are shared between the prompts."""

from __future__ import annotations

import numpy as np

MIN_CHUNK = 16  # prefill tokens of a step, however tight the target: prompts always advance
FORGETTING = 0.98  # weight of a step's measurement one step later


def share_prefill(pending_S: np.ndarray, budget: int) -> np.ndarray:
    """Tokens for each prompt, int32 like pending_S, which is in order of admission.

    Half of the budget (rounded up) belongs to the oldest prompt, so every prompt advances and its
    wait is bounded by the work ahead of it at twice the cost. The other half goes to the shortest
    remainders first: a short prompt is through in a step or two however long its neighbours are.
    What one half leaves over, the other takes.
    """
    if budget <= 0 or not len(pending_S):
        return np.zeros_like(pending_S)
    if pending_S.sum() <= budget:
        return pending_S.copy()
    pending = pending_S.tolist()
    chunks = [min(pending[0], -(-budget // 2))] + [0] * (len(pending) - 1)
    left = budget - chunks[0]
    for row in sorted(range(1, len(pending)), key=pending.__getitem__):
        if not left:
            break
        chunks[row] = min(pending[row], left)
        left -= chunks[row]
    chunks[0] += min(pending[0] - chunks[0], left)
    return np.array(chunks, pending_S.dtype)


def oldest_first(pending_S: np.ndarray, budget: int) -> np.ndarray:
    """Tokens for each prompt, all to the oldest before the next gets any."""
    before_S = np.cumsum(pending_S) - pending_S
    return np.clip(budget - before_S, 0, pending_S).astype(pending_S.dtype)


class ChunkBudget:
    """Fits a step's tokens to the time that a stream may wait for its next one.

    A step takes about overhead + tokens * cost. Both are fitted to the steps measured so far, the
    latest counting most, by least squares; the budget is what the fit says takes target_s.
    """

    def __init__(self, most: int, target_s: float | None):
        self.most = most
        self.target_s = target_s
        # Sums of weights, tokens, seconds, tokens^2, tokens * seconds. Plain floats: five of them
        # are no work for numpy.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def observe(self, tokens: int, seconds: float) -> None:
        weight, x, y, xx, xy = self._sums
        self._sums = (
            FORGETTING * weight + 1.0,
            FORGETTING * x + tokens,
            FORGETTING * y + seconds,
            FORGETTING * xx + tokens * tokens,
            FORGETTING * xy + tokens * seconds,
        )

    def predict(self, tokens: int) -> float | None:
        """Seconds of a step, None before there was one."""
        if not self._sums[0]:
            return None
        overhead, cost = self._fit()
        return overhead + tokens * cost

    def recompute_s(self, tokens: int) -> float:
        """Seconds that so many tokens add to the steps they are in; 0 before there was a step."""
        return tokens * self._fit()[1] if self._sums[0] else 0.0

    def tokens(self, num_decode: int) -> int:
        """Tokens of a step that has num_decode decoding rows, those included. Without any, nobody
        waits for a next token."""
        if self.target_s is None or not num_decode or not self._sums[0]:
            return self.most
        overhead, cost = self._fit()
        fits = int((self.target_s - overhead) / cost) if cost > 0 else self.most
        return min(self.most, max(fits, num_decode + MIN_CHUNK))

    def _fit(self) -> tuple[float, float]:
        weight, x, y, xx, xy = self._sums
        spread = xx / weight - (x / weight) ** 2
        if spread < 1.0:  # steps of one size say nothing of the slope: assume no overhead
            return 0.0, y / x
        cost = max(0.0, (xy / weight - x * y / weight**2) / spread)
        return max(0.0, (y - cost * x) / weight), cost
