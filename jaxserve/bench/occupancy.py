"""Which share of its slots a jaxserve kept busy during a run, by its /metrics before and after.

The figures are those of steps.py: a slot is busy in a step when its row computes something, means
are weighed by the time the steps took, and steps of others' requests count as well. Servers that
have no such counters are measured without.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.bench import client
from jaxserve.bench.client import Api

_ALL, _BUSY = "jaxserve:slot_seconds_total", "jaxserve:busy_slot_seconds_total"

Counts = Mapping[tuple[str, str], float]  # (series, whether somebody waited) -> slot seconds


async def read(api: Api) -> Counts:
    """The server's counters as of now; none of a server that has none, or does not answer."""
    try:
        return parse((await client.read(api.root, "/metrics")).decode())
    except (OSError, ValueError):
        return {}


def parse(text: str) -> Counts:
    """Of an exposition in Prometheus' text format; ValueError for what is none."""
    ours = [line for line in text.splitlines() if line.startswith((_ALL, _BUSY))]
    return {
        (sample.name, sample.labels.get("waiting", "")): sample.value
        for family in text_string_to_metric_families("\n".join(ours))
        for sample in family.samples
    }


def between(before: Counts, after: Counts) -> dict:
    """Figures of the steps between two readings: occupancy, the share of slots busy, and
    occupancy_queued, that while requests waited for a slot, None if none did. {} without steps."""
    spent = {key: value - before.get(key, 0.0) for key, value in after.items()}
    waited, all_of = spent.get((_ALL, "yes"), 0.0), sum(_of(_ALL, spent))
    if all_of <= 0:
        return {}
    return {
        "occupancy": sum(_of(_BUSY, spent)) / all_of,
        "occupancy_queued": spent.get((_BUSY, "yes"), 0.0) / waited if waited > 0 else None,
    }


def _of(series: str, spent: Counts) -> list[float]:
    return [value for (name, _), value in spent.items() if name == series]
