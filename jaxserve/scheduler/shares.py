"""Shares: under the fair policy a tenant that has fewer slots than its part of them need not wait.

The virtual counters (fairness.py) say whose turn it is when a slot comes free. That alone bounds
service, not waiting: where a greedy tenant's sequences hold every slot for long, the others wait
for one to end, and then behind its prompts; and who sends two requests in a row waits with the
second one until the others have had as much. So a tenant below its share has the turn of one that
has its own, as far as the bound of service allows (refill.py), takes a slot at once from one above,
and while its prompt is computed, prompts of the others only just advance.
"""

from __future__ import annotations

import numpy as np

from jaxserve.scheduler.preemption import open_to_eviction
from jaxserve.scheduler.slots import SlotArray


def _beyond_share(slots: SlotArray, num_tenants: int) -> np.ndarray:
    """Slots that each tenant holds beyond its share, negative below it. By tenant number, as far as
    the highest that holds any. A share is the num_tenants-th part of all slots."""
    share = max(1, slots.num_slots // num_tenants)
    taken_N = slots.active_N[: slots.num_slots]
    return np.bincount(slots.tenant_N[: slots.num_slots][taken_N]) - share


def below_their_share(slots: SlotArray, tenants: np.ndarray, num_tenants: int) -> np.ndarray:
    """Those of the tenants, by number, that hold fewer slots than their share."""
    beyond_U = _beyond_share(slots, num_tenants)
    known = tenants[tenants < len(beyond_U)]
    return np.concatenate([known[beyond_U[known] < 0], tenants[tenants >= len(beyond_U)]])


def most_to_come(slots: SlotArray, tenant: int) -> int:
    """Output tokens that the tenant's running sequences may still get."""
    own_N = slots.active_N & (slots.tenant_N == tenant)
    return int((slots.max_total_N[own_N] - slots.known_N[own_N]).sum())


def over_their_share(slots: SlotArray, tenant: int, num_tenants: int) -> list[int]:
    """Slots that this tenant may take from others: none when it has its share; otherwise those of
    tenants above theirs, the last admitted of each.

    Nobody is brought below the share by it, so two tenants never take slots from each other.
    """
    beyond_U = _beyond_share(slots, num_tenants)
    if tenant < len(beyond_U) and beyond_U[tenant] >= 0:
        return []
    found, candidates = [], open_to_eviction(slots)
    for slot in candidates[np.argsort(-slots.order_N[candidates])].tolist():
        owner = slots.tenant_N[slot]
        if beyond_U[owner] > 0:
            beyond_U[owner] -= 1
            found.append(slot)
    return found


def right_of_way(slots: SlotArray, prefill: np.ndarray, num_tenants: int) -> np.ndarray:
    """Which of these slots belong to tenants that have no more than their share, where others have
    more. bool like prefill."""
    beyond_U = _beyond_share(slots, num_tenants)
    return beyond_U[slots.tenant_N[prefill]] <= 0
