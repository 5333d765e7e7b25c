"""A log line every ten seconds under load: what the engine did, never what anybody asked."""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger("jaxserve.server")

PERIOD_S = 10.0


async def report_forever(engine) -> None:
    """Logs the last period's rates whenever there was work in it. Cancelled at shutdown."""
    before = engine.stats()
    while True:
        await asyncio.sleep(PERIOD_S)
        now = engine.stats()
        if now.steps != before.steps or now.waiting:
            logger.info("%s", line(before, now, PERIOD_S))
        before = now


def line(before, now, seconds: float) -> str:
    """One line of rates between two readings of the engine's statistics."""
    rate = lambda name: (getattr(now, name) - getattr(before, name)) / seconds
    prompt = now.prefix_query_tokens - before.prefix_query_tokens
    hits = (now.prefix_hit_tokens - before.prefix_hit_tokens) / prompt if prompt else 0.0
    used = 1 - now.pages_free / max(1, now.pages_total)
    return (
        f"{now.running} running, {now.waiting} waiting | "
        f"{rate('prefix_query_tokens'):.0f} prompt and "
        f"{rate('generation_tokens'):.0f} output tokens/s | {rate('steps'):.1f} steps/s | KV "
        f"{used:.0%} used, {hits:.0%} of prompts cached | "
        f"{now.preemptions - before.preemptions} preempted"
    )
