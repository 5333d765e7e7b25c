"""Random lives of a scheduler: whatever comes, in whatever order, every invariant holds."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler import policy
from jaxserve.types import FinishReason, RequestRefused
from tests.scheduler_driver import VOCAB_SIZE, Driver, small_limits

POLICIES = ("fcfs", "priority", "deadline", "vtc")


@pytest.fixture(scope="module", autouse=True)
def prompts_of_two_lengths():
    """Prompts here are small: some of them shall count as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "SHORT", 8)
        yield


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, failures and steps in any order; outputs are compared at the end."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        num_pages=st.integers(8, 40),
        num_slots=st.integers(1, 5),
        budget=st.integers(5, 24),
        prefix_caching=st.booleans(),
        sharing=st.booleans(),
        batching=st.sampled_from(["continuous", "continuous", "static"]),
        pipelined=st.booleans(),
        host_pages=st.sampled_from([0, 0, 5, 60]),
    )
    def start(
        self,
        policy,
        num_pages,
        num_slots,
        budget,
        prefix_caching,
        sharing,
        batching,
        pipelined,
        host_pages,
    ):
        limits = small_limits(
            num_pages=num_pages,
            num_slots=num_slots,
            token_budget=budget,
            prefix_caching=prefix_caching,
            batching=batching,
            max_queued=12,
            host_pages=host_pages,
        )
        config = SchedulerConfig(policy=policy, prefill_sharing=sharing)
        self.driver = Driver(limits, config, pipelined=pipelined)

    @rule(
        length=st.integers(1, 40),
        family=st.integers(0, 2),
        max_tokens=st.integers(0, 20),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("abc"),
        patience=st.sampled_from([None, None, 5.0, 30.0]),
    )
    def send(self, length, family, max_tokens, n, priority, tenant, patience):
        prompt = [(family + i * i) % VOCAB_SIZE for i in range(length)]  # families share prefixes
        deadline = None if patience is None else self.driver.now + patience
        try:
            self.driver.send(
                prompt,
                max_tokens=max_tokens,
                n=n,
                priority=priority,
                tenant=tenant,
                deadline=deadline,
            )
        except RequestRefused as refusal:
            assert refusal.code in ("capacity_exceeded", "queue_full")

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.driver.step()

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.requests))))

    @rule(lateness=st.sampled_from([0.0, 0.1, 0.6]))
    def be_late(self, lateness):
        self.driver.lateness = lateness

    @rule()
    def lose_the_pool(self):
        self.driver.lose_device(keep_running=True)
        self.driver.scheduler.check_invariants()

    @rule()
    def lose_what_runs(self):
        self.driver.lose_device(keep_running=False)
        self.driver.scheduler.check_invariants()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.run().check_outputs()


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("policy, host_pages", [*zip(POLICIES, (0, 12, 0, 80))])
def test_5000_steps_of_shortage_aborts_and_ties(policy, host_pages):
    """Four policies make 20,000 steps. Too few pages, bursts that tie in time, many aborts."""
    draw = random.Random(policy)
    limits = small_limits(
        num_slots=8, num_pages=40, token_budget=24, max_queued=25, host_pages=host_pages
    )
    driver = Driver(limits, SchedulerConfig(policy=policy, tenant_max_requests=12), check=False)
    driver.lateness = 0.03
    refusals = set()
    for step in range(5000):
        for _ in range(draw.choice((1, 3, 12)) if draw.random() < 0.06 else 0):
            try:
                send_anything(driver, draw)
            except RequestRefused as refusal:
                refusals.add(refusal.code)
        if driver.requests and draw.random() < 0.03:
            driver.abort(draw.choice(list(driver.requests)[-30:]))
        driver.step()
        if step % 10 == 0:
            driver.scheduler.check_invariants()
    driver.run().check_outputs()
    stats = driver.scheduler.stats()
    assert stats.preemptions > 20 and stats.prefix_hit_tokens > 0
    assert (stats.host_pages_kept > 20) == (host_pages > 0)
    assert any("prefix they share" in d.reason for plan in driver.plans for d in plan.waiting)
    assert refusals == {"queue_full", "rate_limited"}
    assert set(driver.ends.values()) == set(FinishReason) - {FinishReason.ERROR}
    assert stats.requests == len(driver.requests)


def send_anything(driver, draw):
    prompt = [(draw.randrange(4) + i * i) % VOCAB_SIZE for i in range(draw.randint(1, 45))]
    driver.send(
        prompt,
        max_tokens=draw.randint(0, 25),
        n=draw.choice([1, 1, 1, 1, 2, 4]),
        priority=draw.randrange(3),
        tenant=draw.choice("aaaabcd"),
        deadline=driver.now + draw.choice([20, 500]) if draw.random() < 0.3 else None,
    )
