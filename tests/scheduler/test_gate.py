"""Refusals that say when to come back."""

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.gate import MAX_RETRY_S, MIN_RETRY_S, Rate
from jaxserve.types import RequestRefused
from tests.scheduler_driver import Driver, small_limits


def test_rate_of_a_steady_stream():
    rate = Rate(window_s=30.0)
    assert rate.per_second(0.0) == 0.0
    for step in range(1, 1000):
        rate.add(1, step * 0.25)
    assert rate.per_second(250.0) == pytest.approx(4.0, rel=0.03)
    assert rate.per_second(280.0) == pytest.approx(4.0 / 2.718, rel=0.05)


def test_a_young_rate_is_not_underestimated():
    rate = Rate(window_s=30.0)
    for step in range(8):
        rate.add(1, step * 0.5)
    assert rate.per_second(4.0) == pytest.approx(2.0, rel=0.1)


def refusal_of(driver, **send):
    with pytest.raises(RequestRefused) as refusal:
        driver.send([1, 2, 3], **send)
    return refusal.value


def test_retry_after_follows_the_drain_rate():
    """One slot, twenty wait: half of them take 100 s with ten tokens each, far less with one."""
    slow, fast = [], []
    for tokens, waits in ((10, slow), (1, fast)):
        driver = Driver(small_limits(num_slots=1, max_queued=20), check=False)
        for _ in range(20):
            driver.send([1, 2, 3], max_tokens=tokens, ignore_eos=True)
        for _ in range(60):
            driver.step()
            while driver.scheduler.num_waiting < 20:
                driver.send([1, 2, 3], max_tokens=tokens, ignore_eos=True)
        waits.append(refusal_of(driver).retry_after)
    assert slow[0] == MAX_RETRY_S and MIN_RETRY_S < fast[0] < 30


def test_a_queue_that_never_drained_says_the_most():
    driver = Driver(small_limits(num_slots=1, max_queued=2))
    driver.send([1])
    driver.send([1])
    assert refusal_of(driver).retry_after == MAX_RETRY_S


def test_open_requests_of_a_tenant():
    driver = Driver(config=SchedulerConfig(tenant_max_requests=2))
    driver.send([1], tenant="a", n=4)
    driver.send([1], tenant="a")
    refusal = refusal_of(driver, tenant="a")
    assert refusal.code == "rate_limited" and refusal.retry_after >= 1
    driver.send([1], tenant="b")
    driver.run()
    driver.send([1], tenant="a")
    driver.run().check_outputs()


def test_rate_of_a_tenant():
    """Two a second with a burst of four: five at once are one too many, half a second earns one."""
    config = SchedulerConfig(tenant_requests_per_s=2.0, tenant_burst_s=2.0)
    driver = Driver(small_limits(num_slots=8), config)
    for _ in range(4):
        driver.send([1], tenant="a")
    refusal = refusal_of(driver, tenant="a")
    assert refusal.code == "rate_limited" and "2 requests a second" in str(refusal)
    driver.send([1], tenant="b")
    driver.now += 0.5
    driver.send([1], tenant="a")
    refusal_of(driver, tenant="a")
    driver.now += 100
    for _ in range(4):
        driver.send([1], tenant="a")
    refusal_of(driver, tenant="a")
    driver.run().check_outputs()
