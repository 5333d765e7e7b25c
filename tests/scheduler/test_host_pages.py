"""KV of preempted sequences on the host: fetched, not computed again; bounded; never stale."""

import dataclasses

import pytest

from jaxserve.config import EngineConfig
from jaxserve.obs.decision_log import RecordingScheduler, replay
from jaxserve.obs.explain import explain
from jaxserve.scheduler.host_pages import HostPages
from jaxserve.scheduler.limits import Limits
from jaxserve.types import Request, Sequence
from tests.scheduler_driver import VOCAB_SIZE, Driver, small_limits


def tokens(length, first=10):
    return [(first + 7 * i + i * i) % VOCAB_SIZE for i in range(length)]


def crowded(host_pages, swap_s_per_page=0.0, *, prefix_caching=False, num_pages=24, wrap=None):
    """Six sequences that outgrow their pages."""
    limits = small_limits(
        num_slots=6, num_pages=num_pages, token_budget=8, prefix_caching=prefix_caching
    )
    limits = dataclasses.replace(limits, host_pages=host_pages, swap_s_per_page=swap_s_per_page)
    driver = Driver(limits, wrap=wrap)
    for index in range(6):
        driver.send(tokens(9, index), f"r{index}", max_tokens=25, ignore_eos=True)
    return driver


def test_nothing_is_computed_twice():
    """Without the host it is; with it every position is computed once, and nobody can tell."""
    computed = {}
    for host_pages in (0, 60):
        driver = crowded(host_pages)
        driver.run().check_outputs()
        stats = driver.scheduler.stats()
        assert stats.preemptions > 3
        computed[host_pages] = stats.computed_tokens
    assert computed[60] == 6 * (9 + 25 - 1) < computed[0]
    assert stats.host_pages_kept == sum(len(plan.swap_out) for plan in driver.plans) > 10
    assert sum(len(plan.swap_in) for plan in driver.plans) == stats.host_pages_kept


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("pipelined", [False, True])
def test_what_the_prefix_cache_still_has_is_not_fetched(prefix_caching, pipelined):
    driver = crowded(60, prefix_caching=prefix_caching)
    driver.pipelined = pipelined
    driver.run().check_outputs()
    kept = sum(len(plan.swap_out) for plan in driver.plans)
    fetched = sum(len(plan.swap_in) for plan in driver.plans)
    assert 0 < fetched <= kept and (fetched < kept) == prefix_caching


def test_it_is_computed_again_where_that_is_quicker():
    driver = crowded(60, swap_s_per_page=1e9)
    driver.run().check_outputs()
    reasons = [d.reason for plan in driver.plans for d in plan.preempted]
    assert reasons and all("; not kept: " in reason for reason in reasons)
    assert driver.scheduler.stats().host_pages_kept == 0


def test_a_full_host_keeps_no_more():
    driver = crowded(3)
    driver.run().check_outputs()
    reasons = [d.reason for plan in driver.plans for d in plan.preempted]
    assert any("the host has no room" in reason for reason in reasons)
    assert all(len(plan.swap_out) <= 3 for plan in driver.plans)


@pytest.mark.parametrize("end", ["abort", "lose what runs", "lose the pool"])
def test_copies_go_with_their_sequence_and_with_a_failed_step(end):
    driver = crowded(60)
    while not any(sequence.host_pages for sequence in driver.scheduler._queue):
        driver.step()
    kept = [sequence for sequence in driver.scheduler._queue if sequence.host_pages]
    if end == "abort":
        for sequence in kept:
            driver.abort(sequence.request.id)
    else:
        driver.lose_device(keep_running=end == "lose the pool")
    assert not any(sequence.host_pages for sequence in kept)
    driver.scheduler.check_invariants()
    driver.run().check_outputs()
    assert driver.scheduler._host.take_copies() == ((), ())
    assert len(driver.scheduler._host._free) == 60


def test_pages_given_up_are_not_written_to_by_the_same_plan():
    host = HostPages(2, 0.0)
    first, second = (Sequence(Request(name, (1, 2)), 0, 9) for name in "ab")
    assert "1 page kept on the host: 0 ms to fetch" in host.keep(first, 1, [7], 1.0)
    assert host.take_copies() == (((7, 0),), ())
    host.fetch(first, ((0, 8),))
    assert "2 pages" not in host.keep(second, 2, [5, 6], 1.0), "one is still to be read"
    assert host.take_copies() == ((), ((0, 8),))
    assert "2 pages kept" in host.keep(second, 2, [5, 6], 1.0)


def test_it_is_told_and_made_again(tmp_path):
    driver = crowded(60, wrap=lambda scheduler: RecordingScheduler(scheduler, tmp_path / "log"))
    driver.run().check_outputs()
    driver.scheduler.close()
    result = replay(tmp_path / "log")
    assert result.differs is None and result.plans == len(driver.plans)
    victim = next(plan.preempted[0].sequence_id[0] for plan in driver.plans if plan.preempted)
    story = "\n".join(explain(tmp_path / "log", victim))
    assert "pages kept on the host: 0 ms to fetch" in story and "resumed" in story


def test_limits_of_the_settings():
    engine = EngineConfig(num_pages=100, max_model_len=64, host_kv_gib=0.5, host_kv_gib_per_s=4.0)
    limits = Limits.of_engine(engine, (), 100, page_bytes=2**20)
    assert limits.host_pages == 512
    assert limits.swap_s_per_page == pytest.approx(2 / 4096)
    plain = Limits.of_engine(EngineConfig(num_pages=100, max_model_len=64), (), 100)
    assert (plain.host_pages, plain.swap_s_per_page) == (0, 0.0)
