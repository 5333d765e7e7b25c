"""Gate: who may join the queue now.

Limits (limits.py) refuse what can never run; the gate refuses what may come back later, and says
when: the queue is full, or the tenant is over its own share of requests or of their rate.
"""

from __future__ import annotations

import math

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.limits import Limits
from jaxserve.types import Request, RequestRefused

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Rate:
    """Events per second, forgetting exponentially: a moment `window_s` ago counts 1/e."""

    def __init__(self, window_s: float):
        self._window_s = window_s
        self._sum = 0.0
        self._first: float | None = None
        self._last = 0.0

    def add(self, count: int, now: float) -> None:
        if self._first is None:
            self._first = self._last = now
        self._sum = self._decayed(now) + count
        self._last = max(self._last, now)

    def per_second(self, now: float) -> float:
        if self._first is None:
            return 0.0
        # What a steady rate of 1 would have summed up to since the first event.
        seen = self._window_s * -math.expm1(-max(now - self._first, 1.0) / self._window_s)
        return self._decayed(now) / seen

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp(-max(0.0, now - self._last) / self._window_s)


class Gate:
    """Told of arrivals and departures; asked before each arrival. Raises RequestRefused."""

    def __init__(self, limits: Limits, config: SchedulerConfig):
        self._limits = limits
        self._most_open = config.tenant_max_requests
        self._rate = config.tenant_requests_per_s
        self._burst = max(1.0, config.tenant_burst_s * (self._rate or 0.0))
        self._open: dict[str, int] = {}  # tenant -> requests that have not ended
        self._credit: dict[str, tuple[float, float]] = {}  # tenant -> (requests allowed, when)
        self._drain = Rate(window_s=30.0)  # sequences leaving the queue

    def check(self, request: Request, waiting: int, waiting_tokens: int) -> None:
        """waiting, waiting_tokens: sequences in the queue and their prompt tokens."""
        self._check_queue(request, waiting, waiting_tokens)
        self._check_tenant(request)

    def opened(self, request: Request) -> None:
        tenant = request.tenant
        self._open[tenant] = self._open.get(tenant, 0) + 1
        if self._rate is not None:
            self._credit[tenant] = (self._credit_at(tenant, request.arrival) - 1, request.arrival)

    def closed(self, request: Request) -> None:
        left = self._open[request.tenant] - 1
        if left:
            self._open[request.tenant] = left
        else:
            del self._open[request.tenant]

    def drained(self, count: int, now: float) -> None:
        """`count` sequences left the queue for a slot."""
        self._drain.add(count, now)

    def retry_after(self, waiting: int, now: float) -> float:
        """Seconds until half of the queue has left it, at the rate of the last half minute; within
        MIN_RETRY_S and MAX_RETRY_S, the most when none has left it yet."""
        rate = self._drain.per_second(now)
        seconds = waiting / 2 / rate if rate > 0 else MAX_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))

    def _check_queue(self, request: Request, waiting: int, tokens: int) -> None:
        limits = self._limits
        if waiting + request.params.n > limits.max_queued:
            full = f"{waiting} sequences wait and at most {limits.max_queued} may"
        elif tokens and tokens + len(request.prompt_ids) > limits.max_queued_tokens:
            full = f"{tokens} prompt tokens wait and at most {limits.max_queued_tokens} may"
        else:
            return
        raise RequestRefused(
            f"{full}; try again later",
            code="queue_full",
            retry_after=self.retry_after(waiting, request.arrival),
        )

    def _check_tenant(self, request: Request) -> None:
        running = self._open.get(request.tenant, 0)
        if self._most_open is not None and running >= self._most_open:
            raise RequestRefused(
                f"{running} of your requests are running and at most {self._most_open} may; "
                "wait for one to end",
                code="rate_limited",
                retry_after=MIN_RETRY_S,
            )
        if self._rate is None:
            return
        credit = self._credit_at(request.tenant, request.arrival)
        if credit < 1:
            raise RequestRefused(
                f"you may send {self._rate:g} requests a second",
                code="rate_limited",
                retry_after=max(MIN_RETRY_S, (1 - credit) / self._rate),
            )

    def _credit_at(self, tenant: str, now: float) -> float:
        """A bucket that fills at the allowed rate. Tenants that are not in it have a full one."""
        credit, when = self._credit.get(tenant, (self._burst, now))
        credit = min(self._burst, credit + (now - when) * self._rate)
        if len(self._credit) > 4096:
            full = lambda entry: entry[0] + (now - entry[1]) * self._rate >= self._burst
            self._credit = {t: entry for t, entry in self._credit.items() if not full(entry)}
        return credit
