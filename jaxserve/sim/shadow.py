"""Shadow: the live arrivals served a second time, on paper, under another policy.

A request joins the shadow when it has ended and its length is known. Both the live policy and the
other are simulated with the same cost model, so what differs between the two reports is the policy
and not the model's error.
"""

from __future__ import annotations

import collections
import dataclasses

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.limits import Limits
from jaxserve.sim.cost_model import CostModel
from jaxserve.sim.report import Report
from jaxserve.sim.simulator import VOCAB_SIZE, simulate
from jaxserve.sim.workload import Arrival
from jaxserve.types import Request


class Shadow:
    """Told of arrivals and ends by the engine thread; report() may be called from another."""

    def __init__(
        self,
        limits: Limits,
        config: SchedulerConfig,
        policy: str,
        cost: CostModel,
        *,
        keep: int = 10_000,
    ):
        """policy: the other one. keep: latest requests to simulate; their lengths are all that is
        stored, and prefix hits are left out on both sides."""
        self._limits = dataclasses.replace(
            limits, vocab_size=VOCAB_SIZE, eos_ids=(), prefix_caching=False
        )
        self._configs = {
            name: dataclasses.replace(config, policy=name) for name in (config.policy, policy)
        }
        self._cost = cost
        self._open: dict[str, Request] = {}
        self._ended: collections.deque[Arrival] = collections.deque(maxlen=keep)

    def on_arrival(self, request: Request) -> None:
        self._open[request.id] = request

    def on_end(self, request_id: str, output_tokens: int) -> None:
        """All of its choices have ended, with so many tokens altogether."""
        request = self._open.pop(request_id, None)
        if request is None or not output_tokens:
            return
        self._ended.append(
            Arrival(
                time=request.arrival,
                prompt=len(request.prompt_ids),
                output=output_tokens,
                tenant=request.tenant,
                priority=request.priority,
            )
        )

    def report(self) -> dict[str, Report]:
        """Policy name -> how the kept requests would have fared under it."""
        arrivals = sorted(self._ended.copy(), key=lambda arrival: arrival.time)
        return {
            name: simulate(iter(arrivals), self._limits, config, self._cost)
            for name, config in self._configs.items()
        }
