"""How prefill tokens are shared, and how the chunk budget follows a target."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.budget import MIN_CHUNK, ChunkBudget, oldest_first, share_prefill
from tests.scheduler_driver import VOCAB_SIZE, Driver, small_limits


@pytest.mark.parametrize(
    "pending, budget, chunks",
    [
        ([100, 10, 5], 16, [8, 3, 5]),
        ([100, 10, 5], 40, [25, 10, 5]),
        ([3, 100, 200], 16, [3, 13, 0]),
        ([100], 16, [16]),
        ([1, 1], 16, [1, 1]),
        ([50, 50], 1, [1, 0]),
        ([50, 50], 0, [0, 0]),
        ([], 5, []),
    ],
)
def test_sharing(pending, budget, chunks):
    assert share_prefill(np.array(pending, np.int32), budget).tolist() == chunks


def test_oldest_first():
    assert oldest_first(np.array([5, 9, 4], np.int32), 10).tolist() == [5, 5, 0]
    assert oldest_first(np.array([5, 9, 4], np.int32), 0).tolist() == [0, 0, 0]


@settings(deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.integers(1, 600))
def test_sharing_wastes_nothing_and_starves_nobody(pending, budget):
    pending = np.array(pending, np.int32)
    for share in (share_prefill, oldest_first):
        chunks = share(pending, budget)
        assert chunks.dtype == np.int32
        assert (chunks >= 0).all() and (chunks <= pending).all()
        assert chunks.sum() == min(budget, pending.sum())
        assert chunks[0] >= min(pending[0], -(-budget // 2))


def test_budget_follows_the_cost_of_steps():
    """Steps take 4 ms and 0.1 ms a token: 20 ms hold 160 tokens."""
    budget = ChunkBudget(most=1000, target_s=0.020)
    assert budget.tokens(10) == 1000  # nothing measured yet
    for tokens in (10, 300, 12, 500, 10, 160, 14):
        budget.observe(tokens, 0.004 + 1e-4 * tokens)
    assert budget.tokens(10) == pytest.approx(160, abs=1)
    assert budget.predict(200) == pytest.approx(0.024)
    assert budget.tokens(155) == 155 + MIN_CHUNK  # prompts advance however tight it is
    assert budget.tokens(0) == 1000  # no stream waits
    for _ in range(200):  # the machine got twice as slow
        for tokens in (10, 100):
            budget.observe(tokens, 0.008 + 2e-4 * tokens)
    assert budget.tokens(10) == pytest.approx(60, abs=1)


def test_steps_of_one_size_say_nothing_of_the_overhead():
    budget = ChunkBudget(most=1000, target_s=0.020)
    for _ in range(10):
        budget.observe(100, 0.010)
    assert budget.tokens(10) == pytest.approx(200, abs=1)


def test_without_a_target_the_budget_is_the_whole_one():
    budget = ChunkBudget(most=64, target_s=None)
    budget.observe(64, 9.0)
    assert budget.tokens(3) == 64


def test_scheduler_shrinks_chunks_to_the_target_and_outputs_stay():
    """Each token costs a second and the target is 24 s: steps settle at 24 tokens."""
    limits = small_limits(token_budget=60, num_pages=2000, max_model_len=600)
    driver = Driver(limits, SchedulerConfig(itl_target_ms=24_000.0), pipelined=False)
    driver.send([1, 2, 3], max_tokens=200, ignore_eos=True)
    for index in range(4):
        driver.send([(index + i * i) % VOCAB_SIZE for i in range(500)], max_tokens=2)
    sizes = []
    while driver.scheduler.has_work:
        plan = driver.scheduler.plan(driver.now)
        result = driver.runner.dispatch(plan)
        driver.now += plan.num_tokens
        driver.take(driver.scheduler.absorb(plan, result, driver.now))
        driver.plans.append(plan)
        sizes.append(plan.num_tokens)
    driver.check_outputs()
    mixed = [size for size in sizes[5:] if size > 4]
    assert sizes[0] == 60 and max(mixed) <= 25 and np.median(mixed) == 24
