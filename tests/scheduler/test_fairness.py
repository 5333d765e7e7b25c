"""The virtual token counter keeps backlogged tenants within the bound of its paper."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.budget import MIN_CHUNK
from jaxserve.scheduler.fairness import MAX_IDLE_TENANTS, ServiceLedger
from jaxserve.scheduler.policy import by_arrival
from jaxserve.scheduler.queue import FairQueue
from jaxserve.scheduler.stats import Standing
from jaxserve.types import Request, Sequence
from tests.scheduler_driver import VOCAB_SIZE, Driver, small_limits

MOST_INPUT = 30
LIMITS = dict(num_slots=4, num_pages=21, token_budget=12, prefix_caching=False, max_queued=10_000)


class CountingDriver(Driver):
    """Adds up the service of generated tokens as they come."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.served = {"a": 0.0, "b": 0.0}

    def take(self, events):
        super().take(events)
        for event in events:
            if event.token is not None:
                self.served[event.sequence.request.tenant] += self.output_weight


def service_differences(policy, arrivals, weights=(1.0, 2.0), *, alike=False):
    """Runs two tenants' arrivals, (step, tenant, prompt length, output length) each.

    alike: prompts begin alike and are cached, so that some wait for others to compute them.

    Returns, for each stretch of steps in which both had a sequence waiting throughout, the
    difference of service received between any of its two moments, at most. Service is counted here
    from plans and events, not taken from the scheduler's own books.
    """
    config = SchedulerConfig(
        policy=policy, vtc_input_weight=weights[0], vtc_output_weight=weights[1]
    )
    limits = small_limits(**{**LIMITS, "prefix_caching": alike})
    driver = CountingDriver(limits, config, check=False)
    arrivals = sorted(arrivals)
    served, admitted = driver.served, set()
    driver.output_weight = weights[1]
    stretch, spans = [], []
    for step in range(50_000):
        while arrivals and arrivals[0][0] <= step:
            _, tenant, prompt, output = arrivals.pop(0)
            tokens = [((0 if alike else step) + i * i) % VOCAB_SIZE for i in range(prompt)]
            driver.send(tokens, tenant=tenant, max_tokens=output, ignore_eos=True)
        if not arrivals and not driver.scheduler.has_work and driver.in_flight is None:
            break
        plan = driver.step()
        for _, sequence in plan.admits if plan else ():
            if sequence.id not in admitted:
                admitted.add(sequence.id)
                computed = sequence.num_prompt - sequence.num_cached
                served[sequence.request.tenant] += weights[0] * computed
        waiting = {sequence.request.tenant for sequence in driver.scheduler._queue}
        if len(waiting) == 2:
            stretch.append(served["a"] - served["b"])
        elif stretch:
            spans.append(np.ptp(stretch))
            stretch = []
    driver.run().check_outputs()
    return spans + ([np.ptp(stretch)] if stretch else [])


def bound(weights=(1.0, 2.0)):
    """Theorem 4.4: twice max(w_p * longest input, w_q * tokens of a running batch).

    A batch holds one token more a row than there is KV: the last one is sampled, never computed.
    """
    limits = small_limits(**LIMITS)
    batch_tokens = limits.kv_tokens + limits.num_slots
    return 2 * max(weights[0] * MOST_INPUT, weights[1] * batch_tokens)


arrival = st.tuples(
    st.integers(0, 60), st.sampled_from("ab"), st.integers(1, MOST_INPUT), st.integers(1, 30)
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(arrival, min_size=10, max_size=120),
    st.sampled_from([(1.0, 2.0), (1.0, 1.0)]),
    st.booleans(),
)
def test_two_backlogged_tenants_stay_within_the_bound(arrivals, weights, alike):
    for difference in service_differences("vtc", arrivals, weights, alike=alike):
        assert difference <= bound(weights)


def flood():
    """One tenant sends sixty at once, the other a steady few."""
    return [(0, "a", 30, 20)] * 60 + [(3 * i, "b", 20, 10) for i in range(60)]


def test_a_flood_stays_within_the_bound():
    spans = service_differences("vtc", flood())
    assert spans and max(spans) <= bound()


def test_first_come_first_served_breaks_it():
    """The bound is worth something: without the counters the same flood exceeds it."""
    assert max(service_differences("fcfs", flood())) > 3 * bound()


def test_a_flood_does_not_delay_the_other_tenant():
    first = {}
    for policy in ("vtc", "fcfs"):
        driver = Driver(small_limits(**LIMITS), SchedulerConfig(policy=policy), check=False)
        for _ in range(100):
            driver.send([5] * 20, tenant="flood", max_tokens=10, ignore_eos=True)
        light = [driver.send([7] * 20, tenant="light", max_tokens=5) for _ in range(3)]
        driver.run()
        first[policy] = max(driver.token_times[key, 0][0] for key in light)
    assert first["vtc"] < 25 < 200 < first["fcfs"]


def test_a_tenant_below_its_share_of_slots_need_not_wait_for_one():
    """The flood runs for long in every slot; the other gets its first token as if it were alone."""
    limits = small_limits(num_pages=4 * 40, max_model_len=160)
    driver = Driver(limits, SchedulerConfig(policy="vtc"))
    for first in range(8):
        prompt = [first + i for i in range(8)]
        driver.send(prompt, tenant="flood", max_tokens=100, ignore_eos=True)
    for _ in range(12):
        driver.step()
    sent = driver.now
    light = [driver.send([50 + i] * 6, tenant="light", max_tokens=30) for i in range(4)]
    driver.run().check_outputs()
    waited = sorted(driver.token_times[key, 0][0] - sent for key in light)
    assert waited[1] <= 3  # two of four slots are its share
    assert 2 <= driver.scheduler.stats().preemptions <= len(light)
    reasons = [d.reason for plan in driver.plans for d in plan.preempted]
    assert all(reason.endswith("goes first") for reason in reasons)


@pytest.mark.parametrize("kv_pages, at_once", [(160, True), (48, False)])
def test_two_in_a_row_of_a_tenant_below_its_share(kv_pages, at_once):
    """The second of two long prompts need not wait until the flood has had as much as the first
    one cost; unless both together might cost more than the bound, twice the tokens in the pool."""
    limits = small_limits(num_pages=kv_pages + 1, max_model_len=160, token_budget=64)
    driver = Driver(limits, SchedulerConfig(policy="vtc"))
    for first in range(8):
        driver.send([first + i for i in range(8)], tenant="flood", max_tokens=40, ignore_eos=True)
    for _ in range(12):
        driver.step()
    for first in (10, 30):
        prompt = [(first + i * i) % VOCAB_SIZE for i in range(60)]
        driver.send(prompt, f"light{first}", tenant="light", max_tokens=90, ignore_eos=True)
    driver.run().check_outputs()
    plans = driver.plans[::-1]  # so that the first admission of each is what stays
    admitted = {s.request.id: plan.step for plan in plans for _, s in plan.admits}
    waited = admitted["light30"] - admitted["light10"]
    assert waited == 0 if at_once else waited > 5


def test_a_prompt_of_a_tenant_below_its_share_is_computed_first():
    """The flood holds three slots and computes long prompts; a short one of another tenant has the
    step to itself, but for the few tokens with which prompts always advance."""
    limits = small_limits(num_pages=4 * 40, max_model_len=160, token_budget=64)
    driver = Driver(limits, SchedulerConfig(policy="vtc"))
    for first in range(3):
        prompt = [(7 * first + i * i) % VOCAB_SIZE for i in range(150)]
        driver.send(prompt, tenant="flood", max_tokens=5, ignore_eos=True)
    driver.step()
    driver.send([50 + i for i in range(30)], "short", tenant="light", max_tokens=5)
    plan = driver.step()
    tokens = dict(zip((s.request.id for s in plan.sequences), plan.count_S.tolist()))
    assert tokens.pop("short") == 30 and sum(tokens.values()) == MIN_CHUNK
    driver.run().check_outputs()


def test_work_conserving():
    """A tenant alone gets everything: the counters hold nobody back."""
    steps = {}
    for policy in ("vtc", "fcfs"):
        driver = Driver(small_limits(**LIMITS), SchedulerConfig(policy=policy), check=False)
        for _ in range(30):
            driver.send([5] * 20, tenant="only", max_tokens=10, ignore_eos=True)
        driver.run()
        steps[policy] = len(driver.plans)
    assert steps["vtc"] == steps["fcfs"]


def test_a_pause_earns_no_credit():
    ledger = ServiceLedger()
    busy, back = ledger.number("busy"), ledger.number("back")
    ledger.enter(busy)
    ledger.charge_input(busy, 1000)
    ledger.enter(back)
    assert ledger.service_U[back] == 1000 and ledger.gap() == 0
    ledger.leave(back)
    ledger.leave(busy)
    ledger.charge_input(busy, 50)
    third = ledger.number("third")
    ledger.enter(third)  # nobody waits: the level of the last to leave, then 1000
    assert ledger.service_U[third] == pytest.approx(1000)


def test_of_equals_the_longest_without_a_turn_is_next():
    """Lifted to the others' level, who returns has had no more than they. A newcomer goes behind
    all of them, however often newcomers come: nobody at the level is passed over for ever."""
    ledger = ServiceLedger()
    queue = FairQueue(ledger, by_arrival)
    serials = itertools.count()

    def send(tenant):
        ledger.enter(ledger.number(tenant))
        serial = next(serials)
        queue.push(Sequence(Request(f"r{serial}", (1,), tenant=tenant), 0, 8, serial))

    def serve(tokens):
        sequence = queue.peek()
        queue.take(sequence)
        ledger.charge_input(ledger.number(sequence.request.tenant), tokens)
        ledger.leave(ledger.number(sequence.request.tenant))
        return sequence.request.tenant

    send("light")
    assert serve(20) == "light"
    for _ in range(3):
        send("heavy")
    assert serve(500) == "heavy"
    send("light")  # lifted to 500
    for number in range(3):
        send(f"new{number}")
    assert [serve(10) for _ in range(6)] == ["light", "heavy", "new0", "new1", "new2", "heavy"]


def test_how_tenants_stand():
    ledger = ServiceLedger(input_weight=1, output_weight=2)
    one, other, gone = map(ledger.number, ("one", "other", "gone"))
    for number, count in ((one, 3), (other, 1), (gone, 1)):
        ledger.opened(number, count)
        ledger.charge_input(number, 100)
    ledger.closed(gone)
    ledger.enter(one)
    ledger.charge_outputs(np.array([one, one, one, other]))
    assert ledger.standings() == [Standing("one", 2, 1, 4.0), Standing("other", 1, 0, 0.0)]
    assert ledger.standings(most=1) == [Standing("one", 2, 1, 4.0)]


def test_idle_tenants_are_forgotten_and_lose_nothing():
    ledger = ServiceLedger()
    for index in range(3 * MAX_IDLE_TENANTS):
        number = ledger.number(f"t{index}")
        ledger.opened(number, 1)
        ledger.enter(number)
        ledger.charge_input(number, 10)
        ledger.leave(number)
        ledger.closed(number)
    assert len(ledger._number_of) <= MAX_IDLE_TENANTS + 1
    assert len(ledger.names) <= MAX_IDLE_TENANTS + 1
    assert ledger.service_U[ledger.number(f"t{index}")] > 0
