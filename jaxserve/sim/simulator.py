"""Simulator: the real scheduler, a virtual clock, and a cost model in place of the device.

The clock moves as the pipelined engine's does: a step is planned and dispatched while the step
before it runs, as late as the engine would (pace.py) where arrivals can be let in, else at once.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.pace import Pace
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim.cost_model import EXAMPLE, CostModel
from jaxserve.sim.report import Report
from jaxserve.sim.workload import Arrival, sped_up, workload, workload_size
from jaxserve.types import (
    FinishReason,
    Request,
    RequestRefused,
    SamplingParams,
    Sequence,
    StepResult,
)

SHORT_PROMPT = 512  # tokens; requests below it are reported as a group
MAX_TENANT_GROUPS = 20
VOCAB_SIZE = 1 << 20  # room for the ids of prefix blocks; no model is behind them


@dataclasses.dataclass(frozen=True)
class Targets:
    """A request is good when its first token came within ttft_s and the others, in the mean, within
    itl_s of the one before."""

    ttft_s: float = 2.0
    itl_s: float = 0.2


@dataclasses.dataclass(slots=True)
class _Life:
    """first, last: when its first token came, and its last one before it lost its slot."""

    arrival: Arrival
    slot: int = -1
    first: float = 0.0
    last: float = 0.0


class Simulation:
    """One run of a workload. step_hook(plan, seconds) is called after each step, when given."""

    def __init__(
        self,
        scheduler: Scheduler,
        seconds_of,
        *,
        pipelined: bool = True,
        targets: Targets | None = None,
        host_s: float = 0.0,
        step_hook=None,
    ):
        """seconds_of(plan) -> seconds of the step; host_s: seconds of the host in each step that
        the device waits for."""
        self.scheduler = scheduler
        self.seconds_of = seconds_of
        self.pipelined = pipelined
        self.targets = targets or Targets()
        self.host_s = host_s
        self.step_hook = step_hook
        self.report = Report(scheduler.config.policy, slots=scheduler.limits.num_slots)
        self._gaps = self.report.group("all").itl
        self._lives: dict[str, _Life] = {}
        num_slots = scheduler.limits.num_slots
        self._last_token_N = np.zeros(num_slots)  # when a slot's came
        self._unbegun_N = np.zeros(num_slots, bool)  # slots whose first token is still to come
        tokens = np.ones(num_slots, np.int32)
        self._result_of = [StepResult(tokens[:rows]) for rows in range(num_slots + 1)]
        self._device_free = 0.0
        self._pace = Pace(scheduler.limits.token_budget)

    def run(self, arrivals: Iterable[Arrival]) -> Report:
        """Until every arrival has been served. Times in the report begin at the first arrival."""
        arrivals = iter(arrivals)
        waiting = next(arrivals, None)
        start = now = waiting.time if waiting else 0.0
        number, in_flight = 0, None
        while waiting is not None or self.scheduler.has_work or in_flight is not None:
            if in_flight is not None and self.scheduler.admits_arrivals:
                now = max(now, self._plan_due(*in_flight))
            while waiting is not None and waiting.time <= now:
                self._add(waiting, f"s{number}")
                waiting, number = next(arrivals, None), number + 1
            pending = self._dispatch(now)
            if pending is not None and in_flight is not None:
                self._pace.planned(too_late=in_flight[1] <= now)
            for event in self.scheduler.take_events():
                self._close(event, now)
            ready, in_flight = (in_flight, pending) if self.pipelined else (pending, None)
            if ready is not None:
                plan, now, seconds = ready
                self._absorb(plan, now, seconds)
            elif in_flight is None and waiting is not None:
                now = max(now, waiting.time)
        return self._finished(now - start)

    def _add(self, arrival: Arrival, request_id: str) -> None:
        request = Request(
            request_id,
            arrival.prompt_ids(VOCAB_SIZE),
            _params(arrival.output),
            tenant=arrival.tenant,
            priority=arrival.priority,
            arrival=arrival.time,
        )
        try:
            self.scheduler.add(request)
        except RequestRefused:
            return
        self._lives[request_id] = _Life(arrival)

    def _plan_due(self, plan: StepPlan, done: float, seconds: float) -> float:
        """When the step after this one is planned."""
        return done - seconds + self._pace.spare_s(plan.size)

    def _dispatch(self, now: float) -> tuple[StepPlan, float, float] | None:
        """(plan, when it is done, its seconds), or None when there is nothing to run."""
        plan = self.scheduler.plan(now)
        if plan is None:
            return None
        for lost in plan.preempted:
            life = self._lives[lost.sequence_id[0]]
            life.last = float(self._last_token_N[life.slot])
        seconds = self.seconds_of(plan) + self.host_s
        self._device_free = max(self._device_free, now) + seconds
        return plan, self._device_free, seconds

    def _absorb(self, plan: StepPlan, now: float, seconds: float) -> None:
        report = self.report
        self._pace.ran(plan.size, seconds)
        report.steps += 1
        report.busy_seconds += seconds
        report.slot_seconds += self.scheduler.num_running * seconds
        for slot, sequence in plan.admits:
            self._seat(slot, sequence)
        self._record_tokens(plan, now)
        for event in self.scheduler.absorb(plan, self._result_of[plan.num_rows], now):
            if event.finish is not None:
                self._close(event, now)
        if self.step_hook is not None:
            self.step_hook(plan, seconds)

    def _seat(self, slot: int, sequence: Sequence) -> None:
        """The slot's next token is this sequence's first one, or follows its last one."""
        life = self._lives.get(sequence.request.id)
        if life is not None:  # None: ended since it was planned
            life.slot = slot
            self._unbegun_N[slot] = not sequence.num_output
            self._last_token_N[slot] = life.last

    def _record_tokens(self, plan: StepPlan, now: float) -> None:
        """First tokens one by one, the gaps before all others at once."""
        sampled = plan.slot_S[plan.samples_S].astype(np.intp)
        begins_S = self._unbegun_N[sampled]
        if np.count_nonzero(begins_S):
            for row in plan.samples_S.nonzero()[0][begins_S].tolist():
                life = self._lives.get(plan.sequences[row].request.id)
                if life is not None:  # ended while the step was in flight
                    life.first = now
            self._unbegun_N[sampled] = False
            self._gaps.add(now - self._last_token_N[sampled[~begins_S]])
        else:
            self._gaps.add(now - self._last_token_N[sampled])
        self._last_token_N[sampled] = now

    def _close(self, event, now: float) -> None:
        sequence = event.sequence
        life = self._lives.pop(sequence.request.id)
        if event.finish not in (FinishReason.LENGTH, FinishReason.STOP):
            return
        arrival, outputs = life.arrival, sequence.num_output
        ttft, e2e = life.first - arrival.time, now - arrival.time
        gap = (now - life.first) / (outputs - 1) if outputs > 1 else 0.0
        good = ttft <= self.targets.ttft_s and gap <= self.targets.itl_s
        for name in self._groups(arrival):
            group = self.report.group(name)
            group.ttft.add_one(ttft)
            group.e2e.add_one(e2e)
            if name != "all" and outputs > 1:
                group.itl.add_one(gap)  # its mean gap; "all" has every single one
            group.good += good
            group.output_tokens += outputs

    def _groups(self, arrival: Arrival) -> Iterator[str]:
        yield "all"
        if arrival.prompt < SHORT_PROMPT:
            yield "short"
        if arrival.tenant and (
            arrival.tenant in self.report.groups or len(self.report.groups) < MAX_TENANT_GROUPS
        ):
            yield arrival.tenant

    def _finished(self, seconds: float) -> Report:
        stats, report = self.scheduler.stats(), self.report
        report.seconds = seconds
        report.preemptions = stats.preemptions
        report.refusals = stats.refusals
        report.computed_tokens = stats.computed_tokens
        report.hit_tokens = stats.prefix_hit_tokens
        report.query_tokens = stats.prefix_query_tokens
        return report


@functools.lru_cache(4096)
def _params(output: int) -> SamplingParams:
    return SamplingParams(max_tokens=output, ignore_eos=True)


def simulate(
    arrivals: Iterable[Arrival],
    limits: Limits,
    config: SchedulerConfig,
    cost: CostModel,
    targets: Targets | None = None,
) -> Report:
    """Serves the arrivals on paper."""
    scheduler = Scheduler(limits, config, cache_key=b"simulation", on_paper=True)
    cost = cost.with_budget(limits.token_budget)
    return Simulation(scheduler, cost.seconds, targets=targets).run(arrivals)


def _counted(arrivals: Iterable[Arrival], size: int, policy: str, progress) -> Iterator[Arrival]:
    """The same arrivals, and every hundredth of them is told to `progress`."""
    often = max(1, size // 100)
    for number, arrival in enumerate(arrivals):
        if number % often == 0:
            progress(policy, min(number, size), size)
        yield arrival
    progress(policy, size, size)


def run(
    *,
    workload_name: str,
    policies: Iterable[str] = ("fcfs",),
    cost_model: str | None = None,
    traces: str = "traces",
    rate: float = 1.0,
    count: int = 1000,
    speed: float = 1.0,
    num_slots: int = 256,
    num_pages: int = 40_000,
    page_size: int = 16,
    token_budget: int = 2048,
    max_model_len: int = 32_768,
    host_pages: int = 0,
    config: SchedulerConfig | None = None,
    plot: str | None = None,
    out=print,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Report]:
    """`jaxserve simulate`: serves a workload under each policy, prints and returns the reports.

    Prefixes are cached if the workload tells which prompts begin alike. speed: factor on its
    arrival times. plot: file for a picture of policy against policy. progress(policy, arrivals, of
    how many) is called as time goes by. Raises ValueError for a workload, a policy or a cost model
    that is not there.
    """
    config = config or SchedulerConfig()
    cost = EXAMPLE if cost_model is None else CostModel.load(pathlib.Path(cost_model))
    out(f"cost model: {cost.source}")
    make = lambda: workload(workload_name, traces=pathlib.Path(traces), rate=rate, count=count)
    first = next(make(), None)
    limits = Limits(
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=page_size,
        token_budget=token_budget,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        prefix_caching=first is not None and bool(first.blocks),
        host_pages=host_pages,
        swap_s_per_page=2 * cost.price[-1],
        max_queued=1_000_000,
        max_queued_tokens=10**12,
    )
    configs = [dataclasses.replace(config, policy=policy) for policy in policies]
    for chosen in configs:
        chosen.validate()
    reports = []
    for chosen in configs:
        arrivals = make()
        if progress is not None:
            size = workload_size(workload_name, traces=pathlib.Path(traces), count=count)
            arrivals = _counted(arrivals, size, chosen.policy, progress)
        reports.append(simulate(sped_up(arrivals, speed), limits, chosen, cost))
        for line in reports[-1].lines():
            out(line)
    if plot is not None:
        from jaxserve.sim.plot import compare

        compare(reports, pathlib.Path(plot))
        out(f"plot: {plot}")
    return reports
