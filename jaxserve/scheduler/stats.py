"""What the scheduler tells about itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """One tenant's part in what goes on."""

    tenant: str
    running: int  # sequences
    waiting: int
    service: float  # weighted tokens, counted from the least that anybody here has had


@dataclasses.dataclass(slots=True)
class Stats:
    """Gauges as of now, and counts since the start."""

    slots: int = 0
    running: int = 0
    waiting: int = 0  # sequences, choices that wait for their first one included
    waiting_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0  # free, or idle in the prefix cache
    pages_idle: int = 0
    fairness_gap: float = 0.0  # of service, between tenants that wait
    guard_actions: tuple[str, ...] = ()
    guard_changes: int = 0
    steps: int = 0
    requests: int = 0
    refusals: int = 0
    preemptions: int = 0
    host_pages_kept: int = 0  # KV pages of preempted sequences that were copied to the host
    prefix_query_tokens: int = 0  # prompt tokens of admitted sequences, each sequence once
    prefix_hit_tokens: int = 0  # of those, served by the prefix cache
    computed_tokens: int = 0  # prompt and output, recomputation included
    generation_tokens: int = 0
