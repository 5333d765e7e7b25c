"""Each early sign, its action and its way back, with a clock in hand."""

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.guard import LOWER_S, RAISE_S, Action, Guard
from jaxserve.types import RequestRefused
from tests.scheduler_driver import VOCAB_SIZE, Driver, small_limits

OFF = dict(guard_preemptions_per_min=None)
CALM = dict(
    queue_age_s=0.0, itl_p99_s=0.0, fairness_gap=0.0, preemptions_per_min=0.0, page_pressure=0.0
)


def prompt_of(length, first=10):
    return [(first + 7 * i + i * i) % VOCAB_SIZE for i in range(length)]


SIGNS = [
    ("queue_age_s", dict(guard_queue_age_s=10.0), 10.0, Action.SHED_LOWEST),
    ("itl_p99_s", dict(itl_target_ms=100.0, guard_itl_ratio=2.0), 0.2, Action.SMALLER_CHUNKS),
    ("fairness_gap", dict(guard_fairness_gap=5000.0), 5000.0, Action.SHED_GREEDIEST),
    ("preemptions_per_min", dict(guard_preemptions_per_min=60.0), 60.0, Action.PAUSE_ADMISSION),
    ("page_pressure", dict(guard_page_pressure=0.9), 0.9, Action.SPARE_PAGES),
]


def look(guard, values, now):
    return guard.look({name: lambda value=value: value for name, value in values.items()}, now)


@pytest.mark.parametrize("sign, config, threshold, action", SIGNS)
def test_sign_action_and_recovery(sign, config, threshold, action):
    guard = Guard(SchedulerConfig(**{**OFF, **config}))
    high, hovering, low = (CALM | {sign: threshold * f} for f in (1.0, 0.8, 0.5))
    now = 100.0
    assert look(guard, high, now) == [] and not guard.actions  # once is not yet trouble
    assert look(guard, hovering, now + RAISE_S) == []  # and starts over when it eases
    assert look(guard, high, now + 10) == []
    (change,) = look(guard, high, now + 10 + RAISE_S)
    assert change.raised and change.sign == sign and guard.actions == {action}
    assert f"{sign} raised" in str(change) and f"start: {action.value}" in str(change)
    for step in range(30):  # between the two thresholds nothing changes
        assert look(guard, hovering, now + 20 + step) == []
    assert look(guard, low, now + 60) == []
    assert look(guard, low, now + 60 + LOWER_S / 2) == []
    (change,) = look(guard, low, now + 60 + LOWER_S)
    assert not change.raised and guard.actions == set()
    assert guard.num_changes == 2


def test_static_batching_is_the_last_resort():
    config = SchedulerConfig(
        guard_queue_age_s=10.0, guard_page_pressure=0.9, guard_static_after_s=30.0, **OFF
    )
    guard = Guard(config)
    bad = CALM | dict(queue_age_s=20.0, page_pressure=1.0)
    for step in range(32):
        look(guard, bad, float(step))
    assert Action.STATIC_BATCHING not in guard.actions and len(guard.actions) == 2
    look(guard, bad, 32.0)
    assert Action.STATIC_BATCHING in guard.actions
    one_left = CALM | dict(queue_age_s=20.0)
    for step in range(33, 50):
        look(guard, one_left, float(step))
    assert Action.STATIC_BATCHING in guard.actions  # until every sign is lowered
    for step in range(50, 50 + int(LOWER_S) + 1):
        look(guard, CALM, float(step))
    assert guard.actions == set()


def test_no_threshold_no_guard():
    guard = Guard(SchedulerConfig(**OFF))
    assert not guard.is_due(10.0)


def raised(driver):
    return set(driver.scheduler.stats().guard_actions)


def changes(driver):
    return [change for plan in driver.plans for change in plan.guard]


def calm_down(driver):
    """Whatever was in force ends by itself once the trouble is over."""
    for _ in range(300):
        if not raised(driver):
            return
        driver.step()
    raise AssertionError(f"still in force: {raised(driver)}")


def test_old_queue_sheds_the_lowest_priority():
    config = SchedulerConfig(policy="priority", guard_queue_age_s=20.0, **OFF)
    driver = Driver(small_limits(num_slots=1), config)
    for index in range(8):
        driver.send(prompt_of(4, index), priority=index % 2, max_tokens=12, ignore_eos=True)
    for _ in range(30):
        driver.step()
    assert raised(driver) == {Action.SHED_LOWEST.value}
    with pytest.raises(RequestRefused) as refusal:
        driver.send(prompt_of(4), priority=1)
    assert refusal.value.code == "queue_full" and refusal.value.retry_after >= 1
    driver.send(prompt_of(4), priority=0)
    driver.run().check_outputs()
    for _ in range(int(LOWER_S) + 2):
        driver.step()
    assert raised(driver) == set()
    driver.send(prompt_of(4), priority=1)
    driver.run().check_outputs()


def test_nobody_is_shed_while_nobody_waits():
    """An engine without work makes no plans, so a sign that was up stays up; it must not keep
    everyone out for good. Its fall is told by the next plan, even if no step ran when it fell."""
    driver = Driver(small_limits(num_slots=1), SchedulerConfig(guard_queue_age_s=5.0, **OFF))
    for index in range(3):
        driver.send(prompt_of(4, index), max_tokens=4, ignore_eos=True)
    while driver.scheduler.num_waiting:
        driver.step()
    assert raised(driver) == {Action.SHED_LOWEST.value}
    driver.run()
    assert raised(driver) == {Action.SHED_LOWEST.value}
    driver.send(prompt_of(4), max_tokens=2)
    driver.run().check_outputs()
    for _ in range(int(LOWER_S) + 2):
        driver.step()
    assert raised(driver) == set() and "lowered" not in "".join(changes(driver))
    driver.send(prompt_of(4))
    driver.run().check_outputs()
    assert (
        changes(driver)[-1]
        == "queue_age_s lowered at 0: stop: refuse arrivals of the lowest priority"
    )


def test_unfairness_sheds_the_greediest_tenant():
    driver = Driver(small_limits(num_slots=1), SchedulerConfig(guard_fairness_gap=100.0, **OFF))
    for index in range(8):
        driver.send(prompt_of(9, index), tenant="greedy", max_tokens=20, ignore_eos=True)
    driver.send(prompt_of(9), tenant="modest")
    for _ in range(80):
        driver.step()
    assert raised(driver) == {Action.SHED_GREEDIEST.value}
    with pytest.raises(RequestRefused):
        driver.send(prompt_of(5), tenant="greedy")
    driver.send(prompt_of(6), tenant="modest")
    driver.run()
    calm_down(driver)
    driver.send(prompt_of(5), tenant="greedy")
    driver.run().check_outputs()


def thrashing(**config):
    driver = Driver(
        small_limits(num_slots=8, num_pages=129, max_model_len=128, prefix_caching=False),
        SchedulerConfig(**config),
        check=False,
    )
    for index in range(40):
        driver.send(prompt_of(9, index), max_tokens=100, ignore_eos=True)
    return driver


def test_preemptions_pause_admission_and_pages_are_kept_spare():
    """With the guard, the same work is done with fewer preemptions and the same outputs."""
    preemptions = {}
    for name, config in (
        ("none", OFF),
        ("pause", dict(guard_preemptions_per_min=4.0)),
        ("spare", dict(guard_page_pressure=0.5) | OFF),
    ):
        driver = thrashing(**config)
        driver.run().check_outputs()
        preemptions[name] = driver.scheduler.stats().preemptions
        assert bool(changes(driver)) == (name != "none")
        waiting = {decision.reason for plan in driver.plans for decision in plan.waiting}
        assert ("the guard paused admission" in waiting) == (name == "pause")
        calm_down(driver)
        both = [driver.send(prompt_of(5, first), max_tokens=9) for first in (1, 2)]
        driver.run().check_outputs()
        assert driver.token_times[both[0], 0][0] == driver.token_times[both[1], 0][0]
    assert preemptions["pause"] < preemptions["none"]
    assert preemptions["spare"] <= preemptions["none"]


def test_slow_tokens_halve_the_chunks():
    """Steps take a second; the target is 0.1: p99 is ten times that."""
    config = SchedulerConfig(itl_target_ms=100.0, guard_itl_ratio=2.0, **OFF)
    limits = small_limits(token_budget=40, num_pages=2000, max_model_len=4000, num_slots=4)
    driver = Driver(limits, config, check=False)
    driver.send(prompt_of(4), max_tokens=100, ignore_eos=True)
    driver.send(prompt_of(1000), max_tokens=2)
    for _ in range(30):
        driver.step()
    assert raised(driver) == {Action.SMALLER_CHUNKS.value}
    assert driver.plans[1].num_tokens == 40 and driver.plans[-1].num_tokens == 1 + 39 // 2 + 1
    driver.run()
    calm_down(driver)
    driver.send(prompt_of(1000), max_tokens=2)
    assert driver.step().budget == driver.scheduler._budget.tokens(0)  # not half of it
    driver.run().check_outputs()


def test_static_fallback_admits_only_to_an_empty_batch():
    driver = thrashing(
        guard_preemptions_per_min=2.0, guard_page_pressure=0.3, guard_static_after_s=5.0
    )
    driver.run().check_outputs()
    texts = changes(driver)
    assert any("start: static batching" in text for text in texts)
    waiting = [d.reason for plan in driver.plans for d in plan.waiting]
    assert "the guard fell back to static batching" in waiting
    calm_down(driver)
    driver.send(prompt_of(5), max_tokens=20, ignore_eos=True)
    driver.step()
    driver.send(prompt_of(6), max_tokens=20)
    assert len(driver.step().admits) == 1 and driver.scheduler.num_running == 2
    driver.run().check_outputs()


def test_outputs_do_not_depend_on_the_guard():
    """check_outputs compares with the same request alone, whatever the guard was up to."""
    driver = thrashing(
        guard_preemptions_per_min=1.0,
        guard_page_pressure=0.1,
        guard_static_after_s=3.0,
        itl_target_ms=100.0,
        guard_itl_ratio=1.0,
    )
    driver.run().check_outputs()
    assert len(changes(driver)) >= 4
