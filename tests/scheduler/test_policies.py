"""Who goes first, who gives way, and that it never changes what anyone gets."""

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.fairness import ServiceLedger
from jaxserve.scheduler.policy import POLICIES
from jaxserve.scheduler.queue import FairQueue, WaitingQueue
from jaxserve.types import FinishReason, Request, Sequence
from tests.scheduler_driver import VOCAB_SIZE, Driver, small_limits


def prompt_of(length, first=10):
    return [(first + 7 * i + i * i) % VOCAB_SIZE for i in range(length)]


def order_of_service(policy, sends):
    """Request ids in order of admission, one slot, all sent at the same moment."""
    driver = Driver(small_limits(num_slots=1), SchedulerConfig(policy=policy))
    for send in sends:
        driver.send(prompt_of(5), max_tokens=2, **send)
    driver.run()
    return [s.request.id for plan in driver.plans for _, s in plan.admits]


SENDS = [
    dict(request_id="late", priority=1, deadline=900.0, tenant="x"),
    dict(request_id="urgent", priority=-3, deadline=None, tenant="x"),
    dict(request_id="soon", priority=1, deadline=100.0, tenant="y"),
    dict(request_id="last", priority=1, deadline=None, tenant="x"),
]


@pytest.mark.parametrize(
    "policy, order",
    [
        ("fcfs", ["late", "urgent", "soon", "last"]),
        ("priority", ["urgent", "late", "soon", "last"]),
        ("deadline", ["soon", "late", "urgent", "last"]),
        ("vtc", ["late", "soon", "urgent", "last"]),
    ],
)
def test_order_of_service(policy, order):
    assert order_of_service(policy, SENDS) == order


@pytest.mark.parametrize("by_pages", [False, True])
def test_priority_takes_slot_and_pages_of_the_less_important(by_pages):
    limits = small_limits(num_slots=5, num_pages=21) if by_pages else small_limits(num_slots=2)
    driver = Driver(limits, SchedulerConfig(policy="priority"))
    for index in range(4):
        driver.send(prompt_of(16, index), f"low{index}", priority=5, max_tokens=12, ignore_eos=True)
    for _ in range(6):
        driver.step()
    driver.send(prompt_of(12), "high", priority=0, max_tokens=6, ignore_eos=True)
    sent = driver.now
    driver.run().check_outputs()
    assert driver.token_times["high", 0][0] <= sent + 3
    assert driver.scheduler.stats().preemptions >= 1
    assert all(len(driver.output(f"low{i}")) == 12 for i in range(4))


def test_priority_never_evicts_its_equals_for_an_arrival():
    driver = Driver(small_limits(num_slots=2), SchedulerConfig(policy="priority"))
    for index in range(6):
        driver.send(prompt_of(10, index), priority=1)
    driver.run().check_outputs()
    assert driver.scheduler.stats().preemptions == 0


def test_nobody_is_evicted_for_an_arrival_that_would_not_fit_even_then():
    driver = Driver(small_limits(num_pages=17), SchedulerConfig(policy="priority"))
    driver.send(prompt_of(40), "equal", priority=0, max_tokens=10, ignore_eos=True)
    driver.send(prompt_of(8), "low", priority=5, max_tokens=8, ignore_eos=True)
    for _ in range(5):
        driver.step()
    driver.send(prompt_of(50), "big", priority=0, max_tokens=2)
    driver.step()
    assert driver.scheduler.stats().preemptions == 0
    driver.run().check_outputs()


def test_victims_return_with_progress_and_are_not_evicted_for_nothing():
    """Between two evictions of a sequence it got at least one token further."""
    driver = Driver(small_limits(num_slots=6, num_pages=30, token_budget=8))
    for index in range(12):
        driver.send(prompt_of(9, index), max_tokens=30, ignore_eos=True)
    lengths = {}
    while driver.scheduler.has_work or driver.in_flight:
        known = {s.id: len(s.tokens) for s in driver.scheduler._slots.running()}
        plan = driver.step()
        for decision in plan.preempted if plan else ():
            if decision.sequence_id in known:
                before = lengths.get(decision.sequence_id, -1)
                assert known[decision.sequence_id] > before
                lengths[decision.sequence_id] = known[decision.sequence_id]
    driver.check_outputs()
    assert len(lengths) > 3


def test_the_victim_is_whoever_loses_least_for_its_pages():
    """A long prompt that has just begun gives its pages before one that has computed everything."""
    driver = Driver(small_limits(num_slots=3, num_pages=27, token_budget=5, prefix_caching=False))
    driver.send(prompt_of(8), "first", max_tokens=40, ignore_eos=True)
    driver.send(prompt_of(16), "done", max_tokens=40, ignore_eos=True)
    for _ in range(8):
        driver.step()
    driver.send(prompt_of(45), "begun", max_tokens=1)
    while not driver.scheduler.stats().preemptions:
        plan = driver.step()
    assert [d.sequence_id for d in plan.preempted] == [("begun", 0)]
    assert plan.preempted[0].reason.endswith("needed its pages")
    driver.run().check_outputs()


OUTPUTS = {}


@pytest.mark.parametrize(
    "policy, sharing, budget, pages, batching",
    [
        *((policy, True, 16, 65, "continuous") for policy in POLICIES),
        ("fcfs", False, 7, 30, "continuous"),
        ("fcfs", True, 64, 65, "static"),
        ("priority", True, 7, 30, "continuous"),
        ("vtc", False, 9, 30, "continuous"),
    ],
)
def test_outputs_do_not_depend_on_the_policy(policy, sharing, budget, pages, batching):
    limits = small_limits(token_budget=budget, num_pages=pages, batching=batching)
    driver = Driver(limits, SchedulerConfig(policy=policy, prefill_sharing=sharing))
    for index in range(12):
        if index % 3 == 0:
            driver.step()
        driver.send(
            prompt_of(5 + 4 * index, index), priority=-index, tenant=str(index % 3), max_tokens=9
        )
    driver.run().check_outputs()
    outputs = {key: tuple(tokens) for key, tokens in driver.outputs.items()}
    assert OUTPUTS.setdefault("first", outputs) == outputs


def sequence(serial, tenant="", length=1):
    request = Request(f"r{serial}", (1,) * length, tenant=tenant, arrival=0.0)
    return Sequence(request, 0, 100, serial)


def test_a_sequence_may_enter_again_while_its_ghost_is_in_the_heap():
    queue = WaitingQueue(POLICIES["fcfs"].key)
    first, second = sequence(1), sequence(2)
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    queue.push(first)
    assert queue.peek() is first and len(queue) == 2 and queue.num_tokens == 2
    queue.remove(first)
    assert queue.peek() is second and first not in queue


def test_ghosts_do_not_pile_up():
    ledger = ServiceLedger()
    fcfs, vtc = POLICIES["fcfs"], POLICIES["vtc"]
    queues = (
        WaitingQueue(fcfs.key, fcfs.short_key),
        FairQueue(ledger, vtc.key, vtc.short_key),
    )
    keep = sequence(0, "kept")
    for queue in queues:
        queue.push(keep)
        for serial in range(1, 2000):
            passing = sequence(serial, f"t{serial % 7}")
            queue.push(passing)
            queue.remove(passing)
        inner = queue if isinstance(queue, WaitingQueue) else queue._queues[ledger.number("kept")]
        assert all(len(heap) < 200 for heap in inner._heaps)
        assert len(queue) == 1 and queue.peek() is keep
    assert len(queue._heap) < 200  # of tenants


def pop(queue):
    first = queue.peek()
    queue.take(first)
    return first


def test_short_prompts_take_three_turns_of_four():
    """Long ones came first. By turns of length a short one goes first, alike ones by arrival, and
    every fourth turn is the oldest's: so a long one with k before it waits for 4k + 3 at most."""
    queue = WaitingQueue(POLICIES["fcfs"].key, POLICIES["fcfs"].short_key)
    for serial, length in enumerate([900, 1000, 40, 33, 520, 60, 700, 20, 48, 50]):
        queue.push(sequence(serial, length=length))
    order, overtakes = [], []
    while len(queue):
        overtakes.append(queue.overtakes(queue.peek()))
        order.append(pop(queue).serial)
    assert order == [0, 2, 3, 5, 1, 7, 8, 9, 4, 6]
    assert overtakes == [False, True, True, True, False, True, True, True, False, False]


def test_short_prompts_do_not_overtake_each_other():
    queue = WaitingQueue(POLICIES["fcfs"].key, POLICIES["fcfs"].short_key)
    for serial, length in enumerate([511, 20, 300, 5, 510, 1]):
        queue.push(sequence(serial, length=length))
    assert [pop(queue).serial for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_one_that_lost_its_place_goes_before_shorter_ones():
    queue = WaitingQueue(POLICIES["fcfs"].key, POLICIES["fcfs"].short_key)
    for serial, length in enumerate([5000, 4000, 3000, 8]):
        queue.push(sequence(serial, length=length))
    assert pop(queue).serial == 0
    back = sequence(9, length=8000)
    back.num_preemptions = 1
    queue.push(back)
    assert pop(queue) is back and pop(queue).serial == 3


def test_set_aside_by_one_key_is_set_aside_by_the_other():
    queue = WaitingQueue(POLICIES["fcfs"].key, POLICIES["fcfs"].short_key)
    for serial, length in enumerate([9000, 10, 8000, 12]):
        queue.push(sequence(serial, length=length))
    queue.set_aside(queue.peek())  # 0, the oldest
    assert pop(queue).serial == 1  # the oldest of the others
    queue.set_aside(queue.peek())  # 3, the shortest
    assert pop(queue).serial == 2 and queue.peek() is None
    queue.bring_back()
    assert [pop(queue).serial, pop(queue).serial] == [3, 0]


@pytest.mark.parametrize("policy", ["fcfs", "vtc", "priority"])
def test_a_long_prompt_is_not_starved_by_short_ones(policy):
    """However many short ones come each step, it gets a slot within its turns."""
    limits = small_limits(num_slots=1, num_pages=300, max_model_len=1024)
    driver = Driver(limits, SchedulerConfig(policy=policy), check=False)
    driver.send(prompt_of(5), max_tokens=1)
    driver.send(prompt_of(600), "long", max_tokens=2)
    while ("long", 0) not in driver.ends:
        for _ in range(3):
            driver.send(prompt_of(4), max_tokens=1)
        driver.step()
    order = [s.request.id for plan in driver.plans for _, s in plan.admits]
    assert order.index("long") <= 4
    assert "before longer ones" in driver.plans[1].admitted[0].reason


def test_deadline_policy_times_out_what_it_must():
    driver = Driver(small_limits(num_slots=1), SchedulerConfig(policy="deadline"))
    driver.send(prompt_of(5), "hopeless", deadline=2.0, max_tokens=30, ignore_eos=True)
    driver.send(prompt_of(5), "fine", deadline=60.0, max_tokens=5)
    driver.run().check_outputs()
    assert driver.ends["hopeless", 0] is FinishReason.TIMEOUT
    assert driver.ends["fine", 0] is not FinishReason.TIMEOUT
