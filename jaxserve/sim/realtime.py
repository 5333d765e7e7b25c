"""Serves a workload on a real engine, by the real clock, and reports it as the simulator does.

What the simulator predicts and what an engine does are compared line by line this way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import numpy as np

from jaxserve.sim.report import Report
from jaxserve.sim.simulator import SHORT_PROMPT, Targets
from jaxserve.sim.workload import Arrival
from jaxserve.types import Request, RequestRefused, SamplingParams


class _Life:
    def __init__(self, arrival: Arrival, sent: float):
        self.arrival = arrival
        self.sent = sent
        self.first: float | None = None
        self.last = sent
        self.tokens = 0


def serve_workload(
    core,
    arrivals: Iterable[Arrival],
    *,
    vocab_size: int,
    targets: Targets | None = None,
    seed: int = 0,
    until: Callable[[Report], bool] = lambda report: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Report:
    """Sends each arrival at its time to the EngineCore and steps it until all have ended, or until
    the report is enough: until(report), asked after each step. What is open then is aborted.

    Prompts are random tokens, so that no two share a prefix; outputs have the arrival's length.
    clock must be the core's own.
    """
    targets = targets or Targets()
    draw = np.random.default_rng(seed)
    report = Report(core.scheduler.config.policy, slots=core.scheduler.limits.num_slots)
    before = core.scheduler.stats()
    start, lives, number = clock(), {}, 0
    waiting = iter(arrivals)
    arrival = next(waiting, None)
    while (arrival is not None or core.has_work) and not until(report):
        while arrival is not None and start + arrival.time <= clock():
            prompt = tuple(draw.integers(10, vocab_size, arrival.prompt).tolist())
            request = _request(f"real{number}", prompt, arrival, start + arrival.time)
            try:
                core.add(request)
                lives[request.id] = _Life(arrival, request.arrival)
            except RequestRefused:
                report.refusals += 1
            arrival, number = next(waiting, None), number + 1
        idle_until = core.plan_due() if core.has_work else math.inf
        if arrival is not None:
            idle_until = min(idle_until, start + arrival.time)
        left = idle_until - clock()
        if left > 0:
            sleep(left)
            continue
        outputs = core.step()
        now = clock()
        for request_id, delta in outputs:
            _take(report, lives, request_id, delta, now, targets)
    report.seconds = clock() - start
    _drop(core, lives)
    after = core.scheduler.stats()
    report.steps = after.steps - before.steps
    report.preemptions = after.preemptions - before.preemptions
    report.computed_tokens = after.computed_tokens - before.computed_tokens
    return report


def _request(name: str, prompt: tuple[int, ...], arrival: Arrival, sent: float) -> Request:
    params = SamplingParams(max_tokens=arrival.output, ignore_eos=True, temperature=0.0)
    return Request(name, prompt, params, tenant=arrival.tenant, arrival=sent)


def _drop(core, request_ids: Iterable[str]) -> None:
    """Ends them, and the step in flight."""
    for request_id in request_ids:
        core.abort(request_id)
    while core.has_work:
        core.step()


def _take(report: Report, lives: dict, request_id: str, delta, now: float, targets) -> None:
    """One piece of news: token times, and at the end what the request was like."""
    life = lives[request_id]
    if delta.token_ids:
        if life.first is None:
            life.first = now
        else:
            report.group("all").itl.add_one(now - life.last)
        life.last = now
        life.tokens += len(delta.token_ids)
    if delta.finish_reason is None:
        return
    del lives[request_id]
    first = now if life.first is None else life.first
    gap = (now - first) / (life.tokens - 1) if life.tokens > 1 else 0.0
    names = ["all"] + ["short"] * (life.arrival.prompt < SHORT_PROMPT)
    for name in names + [life.arrival.tenant] * bool(life.arrival.tenant):
        group = report.group(name)
        group.ttft.add_one(first - life.sent)
        group.e2e.add_one(now - life.sent)
        if name != "all" and life.tokens > 1:
            group.itl.add_one(gap)
        group.good += first - life.sent <= targets.ttft_s and gap <= targets.itl_s
        group.output_tokens += life.tokens
