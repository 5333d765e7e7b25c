"""The real loop on a device of known speed: what the simulator says of it is what happens."""

import numpy as np
import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.engine.core import EngineCore
from jaxserve.engine.output import OutputStage
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim.cost_model import CostModel
from jaxserve.sim.realtime import serve_workload
from jaxserve.sim.simulator import Simulation
from jaxserve.sim.workload import Arrival, merge, owned_by, poisson
from jaxserve.types import StepResult

LIMITS = Limits(
    num_slots=4,
    num_pages=400,
    page_size=16,
    token_budget=64,
    max_model_len=4096,
    vocab_size=300,
    prefix_caching=False,
)
SECOND_A_STEP = CostModel((1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
WORKING = CostModel((0.01, 1e-3, 0.0, 0.0, 0.0, 0.0))


class Device:
    """Steps one after the other, each for as long as the cost model says, by its own clock."""

    compilations = 0

    def __init__(self, cost):
        self.cost, self.now, self.free = cost, 0.0, 0.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def dispatch(self, plan):
        self.free = max(self.free, self.now) + self.cost.seconds(plan)
        return plan, self.free

    def constrain(self, pending, fill_masks):
        pass

    def is_done(self, pending):
        return pending[1] <= self.now

    def fetch(self, pending):
        plan, done = pending
        self.now = max(self.now, done)
        return StepResult(np.full(plan.num_rows, 7, np.int32))


class Ids:
    vocab_size = LIMITS.vocab_size
    drops_first_space = False

    def table(self, skip_special_tokens=True):
        return tuple(b"x" for _ in range(self.vocab_size))


def serve(arrivals, cost=SECOND_A_STEP, **options):
    device = Device(cost)
    scheduler = Scheduler(LIMITS, SchedulerConfig(policy="vtc"), cache_key=b"test")
    core = EngineCore(scheduler, device, OutputStage(Ids()), device.clock)
    report = serve_workload(
        core,
        arrivals,
        vocab_size=LIMITS.vocab_size,
        clock=device.clock,
        sleep=device.sleep,
        **options,
    )
    return report, device, core


def test_who_arrives_while_a_step_runs_is_in_the_next():
    """Steps of a second; once one of their size is known, the next is planned 0.9 s into it."""
    lone = [Arrival(0.0, 10, 8)]
    for time, wait in ((4.5, 1.5), (4.8, 1.2), (4.95, 2.05)):
        report, _, _ = serve([*lone, Arrival(time, 1, 2, tenant="late")])
        assert report.group("late").ttft.quantile(0.5) == pytest.approx(wait, rel=0.02)
        assert report.seconds == pytest.approx(8.0)  # the device never waited


def test_the_simulator_says_the_same():
    light = lambda: owned_by("light", poisson(1.0, 60, prompt=30, output=20, seed=1))
    heavy = lambda: owned_by("heavy", poisson(3.0, 150, prompt=60, output=20, seed=2))
    real, _, _ = serve(merge(light(), heavy()), WORKING)
    scheduler = Scheduler(LIMITS, SchedulerConfig(policy="vtc"), on_paper=True)
    paper = Simulation(scheduler, WORKING.seconds).run(merge(light(), heavy()))
    for name in ("light", "heavy", "all"):
        ours, theirs = real.group(name), paper.group(name)
        assert len(ours.e2e) == len(theirs.e2e)
        for share in (0.5, 0.9, 0.99):
            assert ours.ttft.quantile(share) == pytest.approx(theirs.ttft.quantile(share), rel=0.03)
            assert ours.e2e.quantile(share) == pytest.approx(theirs.e2e.quantile(share), rel=0.03)
    assert real.seconds == pytest.approx(paper.seconds, rel=0.01)


def test_it_ends_when_there_is_enough():
    few = lambda: owned_by("light", [Arrival(0.0, 4, 2), Arrival(3.0, 4, 2)])
    many = owned_by("heavy", [Arrival(0.0, 4, 100)] * 20)
    enough = lambda report: len(report.group("light").e2e) == 2
    report, _, core = serve(merge(few(), many), until=enough)
    assert len(report.group("light").e2e) == 2 and not len(report.group("heavy").e2e)
    assert report.seconds < 8 and not core.has_work
    stats = core.stats()
    assert stats.running == stats.waiting == 0 and stats.pages_free == stats.pages_total
