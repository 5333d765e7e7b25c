"""Shadow: the live arrivals served a second time, on paper, under another policy.

A sequence joins the shadow when it has ended and its length is known. Both the live policy and the
other are simulated with the same cost model, so what differs between the two reports is the policy
and not the model's error. Prompt tokens that the prefix cache served are left out on both sides.

Bounded in every way: the latest sequences only, lengths and times only, at most one simulation a
minute, and that in a process of its own at the lowest priority, so that the engine keeps its core
and its interpreter lock.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import subprocess
import sys
import threading

import numpy as np
import orjson

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.limits import Limits, step_sizes
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim.cost_model import FEWEST_STEPS, CostModel, features_of
from jaxserve.sim.simulator import VOCAB_SIZE, simulate
from jaxserve.sim.workload import Arrival
from jaxserve.types import FinishReason, Sequence, StepResult

SEQUENCES_KEPT = 1000
STEPS_KEPT = 1024
PERIOD_S = 60.0
TIMEOUT_S = 120.0  # of one simulation

logger = logging.getLogger("jaxserve")


class Shadow:
    """Told of steps and ends by the engine thread; reports from a thread of its own.

    latest: what the last simulation said, policy -> Report.summary(); empty before the first.
    """

    def __init__(
        self,
        limits: Limits,
        config: SchedulerConfig,
        policy: str,
        cost: CostModel | None = None,
        *,
        keep: int = SEQUENCES_KEPT,
    ):
        """policy: the other one. cost: None fits prices to the steps that are seen.

        Raises ValueError when the other policy is the one that serves.
        """
        if policy == config.policy:
            raise ValueError(f"--shadow_policy={policy}: that is what serves already; try another")
        self._limits = dataclasses.replace(
            limits, vocab_size=VOCAB_SIZE, eos_ids=(), prefix_caching=False
        )
        self._configs = {
            name: dataclasses.replace(config, policy=name) for name in (config.policy, policy)
        }
        self._cost = cost
        self._steps: collections.deque[tuple[np.ndarray, float]] = collections.deque(
            maxlen=STEPS_KEPT
        )
        self._ended: collections.deque[Arrival] = collections.deque(maxlen=keep)
        self._news = 0  # ends since the last report
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-shadow", daemon=True)
        self.latest: dict[str, dict] = {}

    # ---- what the engine thread tells ----------------------------------------------------------

    def on_step(self, plan: StepPlan, seconds: float) -> None:
        """Observer hook of the engine."""
        if self._cost is None:
            sizes = step_sizes(self._limits.token_budget)
            self._steps.append((features_of(plan, sizes), seconds))

    def on_end(self, sequence: Sequence) -> None:
        if not sequence.num_output:
            return
        request = sequence.request
        # Choices 2..n share the first one's prompt pages.
        prompt = 1 if sequence.index else sequence.num_prompt - sequence.num_cached
        self._ended.append(
            Arrival(
                time=request.arrival,
                prompt=prompt,
                output=sequence.num_output,
                tenant=request.tenant,
                priority=request.priority,
            )
        )
        self._news += 1

    # ---- what it makes of it -------------------------------------------------------------------

    def start(self) -> None:
        """Reports once a minute from now on, when there is news."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, with a last report."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(TIMEOUT_S)
        self._report_news()

    def job(self) -> dict | None:
        """What a simulation needs, as plain values; None while there is too little to go by."""
        arrivals = sorted(self._ended.copy(), key=lambda arrival: arrival.time)
        steps = self._steps.copy()
        if not arrivals or (self._cost is None and len(steps) < FEWEST_STEPS):
            return None
        return {
            "limits": dataclasses.asdict(self._limits),
            "configs": {name: dataclasses.asdict(c) for name, c in self._configs.items()},
            "cost": None if self._cost is None else dataclasses.asdict(self._cost),
            "parts": [parts.tolist() for parts, _ in steps],
            "seconds": [seconds for _, seconds in steps],
            "arrivals": [dataclasses.astuple(arrival) for arrival in arrivals],
        }

    def report(self) -> dict[str, dict]:
        """Simulates the kept sequences in another process and returns `latest`."""
        job = self.job()
        if job is not None:
            done = subprocess.run(
                [sys.executable, "-P", "-m", __name__],
                input=orjson.dumps(job),
                capture_output=True,
                timeout=TIMEOUT_S,
                check=True,
            )
            self.latest = orjson.loads(done.stdout)
        return self.latest

    def line(self) -> str:
        """The latest report in a sentence; empty before the first."""
        told = []
        for name, summary in self.latest.items():
            everyone = summary["groups"]["all"]
            ttft, itl = everyone["ttft_s"], everyone["itl_s"]
            told.append(
                f"{name}: TTFT p50 {ttft['p50']:.3f} s, p99 {ttft['p99']:.3f} s, gaps p99 "
                f"{1e3 * itl['p99']:.1f} ms, {summary['output_tokens_per_s']:.1f} tokens/s"
            )
        return f"the last arrivals on paper | {' | '.join(told)}" if told else ""

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self._report_news()

    def _report_news(self) -> None:
        """A failure of the simulation is no failure of the server: it is logged."""
        if not self._news:
            return
        self._news = 0
        try:
            if self.report():
                logger.info("%s", self.line())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            logger.warning("no shadow report: %s", error)


class ShadowedScheduler:
    """A Scheduler that tells a Shadow of each sequence's end. Same doors as Scheduler."""

    def __init__(self, scheduler: Scheduler, shadow: Shadow):
        self._scheduler = scheduler
        self._shadow = shadow

    def __getattr__(self, name):
        """All other doors, gauges and settings are the scheduler's own."""
        return getattr(self._scheduler, name)

    def absorb(self, plan: StepPlan, result: StepResult, now: float):
        return self._heard(self._scheduler.absorb(plan, result, now))

    def take_events(self):
        return self._heard(self._scheduler.take_events())

    def abort(self, request_id: str):
        return self._heard(self._scheduler.abort(request_id))

    def fail_all(self, error: Exception):
        return self._heard(self._scheduler.fail_all(error))

    def fail_running(self, error: Exception):
        return self._heard(self._scheduler.fail_running(error))

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason=None) -> None:
        ends = sequence.finish is None
        self._scheduler.finish(sequence, reason, stop_reason)
        if ends:
            self._shadow.on_end(sequence)

    def _heard(self, events):
        for event in events:
            if event.finish is not None:
                self._shadow.on_end(event.sequence)
        return events


def simulate_job(job: dict) -> dict[str, dict]:
    """Policy -> summary of how the arrivals of Shadow.job() fare under it."""
    limits = Limits(**{**job["limits"], "eos_ids": ()})
    if job["cost"] is None:
        cost = CostModel.fit(
            np.array(job["parts"]),
            np.array(job["seconds"]),
            sizes=step_sizes(limits.token_budget),
            page_s=limits.swap_s_per_page / 2,
        )
    else:
        cost = CostModel(**job["cost"])
    arrivals = [Arrival(*values[:-1]) for values in job["arrivals"]]
    return {
        name: simulate(iter(arrivals), limits, SchedulerConfig(**config), cost).summary()
        for name, config in job["configs"].items()
    }


def main() -> None:
    """The other process: a job on standard input, summaries on standard output."""
    os.nice(19)
    summaries = simulate_job(orjson.loads(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(orjson.dumps(summaries))


if __name__ == "__main__":
    main()
