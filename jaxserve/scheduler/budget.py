"""How a step's prefill tokens are shared between the prompts that want them."""

from __future__ import annotations

import numpy as np


def share_prefill(pending_S: np.ndarray, budget: int) -> np.ndarray:
    """Tokens for each prompt, int32 like pending_S, which is in order of admission.

    Half of the budget (rounded up) belongs to the oldest prompt, so every prompt advances and its
    wait is bounded by the work ahead of it at twice the cost. The other half goes to the shortest
    remainders first: a short prompt is through in a step or two however long its neighbours are.
    What one half leaves over, the other takes.
    """
    chunk_S = np.zeros_like(pending_S)
    if not len(pending_S) or budget <= 0:
        return chunk_S
    left = budget
    chunk_S[0] = min(pending_S[0], -(-budget // 2))
    left -= chunk_S[0]
    for row in np.argsort(pending_S[1:], kind="stable") + 1:
        if not left:
            break
        chunk_S[row] = min(pending_S[row], left)
        left -= chunk_S[row]
    chunk_S[0] += min(pending_S[0] - chunk_S[0], left)
    return chunk_S
