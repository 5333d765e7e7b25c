"""Faults that other engines have had, each reproduced in kind against this scheduler."""

import numpy as np
import pytest

from jaxserve.types import FinishReason, RequestRefused
from tests.scheduler_driver import VOCAB_SIZE, Driver, small_limits


def prompt_of(length, first=10):
    return [(first + 7 * i + i * i) % VOCAB_SIZE for i in range(length)]


def test_b029_what_can_never_fit_is_refused_and_blocks_nobody():
    driver = Driver(small_limits(num_pages=5, page_size=16, max_model_len=2048, token_budget=64))
    with pytest.raises(RequestRefused, match=r"needs 7 KV pages .* has 4") as refusal:
        driver.send(prompt_of(100), "never")
    assert refusal.value.code == "capacity_exceeded"
    driver.send(prompt_of(10), "short")
    driver.send(prompt_of(40), "long", max_tokens=100, ignore_eos=True)
    driver.run().check_outputs()
    assert driver.ends["long", 0] is FinishReason.LENGTH
    assert len(driver.output("long")) == 64 + 1 - 40  # all the pool holds, and one more token


def test_b029_the_model_length_is_named():
    with pytest.raises(RequestRefused, match="has 64 tokens and the model takes 64") as refusal:
        Driver().send(prompt_of(64))
    assert refusal.value.code == "context_length_exceeded"


def test_b031_decodes_keep_their_pace_under_prefills():
    """A new long prompt every other step: a running stream still gets a token in every step."""
    driver = Driver(small_limits(num_pages=400))
    stream = driver.send(prompt_of(5), max_tokens=50, ignore_eos=True)
    for step in range(60):
        if step % 2 == 0 and step < 50:
            driver.send(prompt_of(50, first=step), max_tokens=2)
        driver.step()
    driver.run().check_outputs()
    gaps = np.diff(driver.token_times[stream, 0])
    assert len(gaps) == 49 and gaps.max() == 1


def test_b031_a_long_prompt_does_not_hold_up_a_short_one():
    driver = Driver(small_limits(max_model_len=600, num_pages=400))
    driver.send(prompt_of(500), "long")
    driver.step()
    driver.send(prompt_of(6), "short", max_tokens=2)
    driver.run().check_outputs()
    assert driver.token_times["short", 0][0] <= 4


@pytest.mark.parametrize("budget", [4, 7, 16, 99, 100, 101, 256])
def test_b032_chunking_changes_nothing(budget):
    driver = Driver(small_limits(token_budget=budget, max_model_len=120, num_pages=200))
    driver.send(prompt_of(100), max_tokens=16)
    driver.send(prompt_of(33), max_tokens=16)
    driver.run().check_outputs()
    assert max(plan.num_tokens for plan in driver.plans) <= budget


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("pipelined", [False, True])
def test_b033_preempted_sequences_continue_with_their_tokens(prefix_caching, pipelined):
    limits = small_limits(
        num_slots=6, num_pages=3 * 15, token_budget=8, prefix_caching=prefix_caching
    )
    driver = Driver(limits, pipelined=pipelined)
    for index in range(6):
        driver.send(prompt_of(9, first=index), max_tokens=40, ignore_eos=True)
    driver.run().check_outputs()
    stats = driver.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.generation_tokens == 6 * 40  # usage counts no token twice
    assert all(len(driver.output(f"r{i}")) == 40 for i in range(6))


@pytest.mark.parametrize("num_slots, budget", [(64, 256), (4, 16)])
def test_b035_many_at_once_get_their_own_first_token(num_slots, budget):
    driver = Driver(small_limits(num_slots=num_slots, token_budget=budget, num_pages=1000))
    for index in range(64):
        driver.send(prompt_of(1 + index % 23, first=index))
    driver.run().check_outputs()


def test_b036_one_requests_failure_stays_its_own():
    """The engine ends a sequence that it could not prepare; its batch mates do not notice."""
    driver = Driver()
    for request_id in ("good", "bad", "fine"):
        driver.send(prompt_of(12, first=len(request_id)), request_id)
    plan = driver.step()
    bad = next(s for s in plan.sequences if s.request.id == "bad")
    driver.scheduler.finish(bad, FinishReason.ERROR)
    driver.scheduler.finish(bad, FinishReason.ERROR)  # once is enough, twice is harmless
    driver.ends["bad", 0] = FinishReason.ERROR
    driver.run().check_outputs()
    assert driver.output("bad") == [] and len(driver.output("good")) > 0


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_b037_a_fully_cached_prompt_recomputes_its_end(length, max_tokens):
    driver = Driver(small_limits(page_size=16, num_pages=40))
    prompt = prompt_of(length)
    for attempt in range(3):
        driver.send(prompt, f"a{attempt}", max_tokens=max_tokens)
        driver.run().check_outputs()
        cached = driver.sequences[f"a{attempt}", 0].num_cached
        assert cached == (0 if attempt == 0 else (length - 1) // 16 * 16) < length
    longer = prompt + driver.output("a0")
    driver.send(longer, "longer", max_tokens=max_tokens)
    driver.run().check_outputs()
    # The last output token has no KV, so the pages that hold the others are what can be found.
    assert driver.sequences["longer", 0].num_cached == (len(longer) - 1) // 16 * 16


def test_b038_cancelled_after_its_first_chunk():
    driver = Driver(small_limits(token_budget=8))
    driver.send(prompt_of(60), "a")
    driver.step()
    driver.step()  # the first chunk is absorbed, the second in flight
    driver.abort("a")
    driver.send(prompt_of(60), "b", max_tokens=4)
    driver.run().check_outputs()
    cached = driver.sequences["b", 0].num_cached
    assert cached == 8, "only what an absorbed step has written may be found"


@pytest.mark.parametrize("length, cached", [(15, 0), (60, 56)])
def test_b038_both_start_in_the_same_step(length, cached):
    """A short one computes what the other does, a long one waits until that is written."""
    driver = Driver(small_limits(token_budget=8))
    driver.send(prompt_of(length), "a", max_tokens=4)
    driver.send(prompt_of(length), "b", max_tokens=4)
    driver.run().check_outputs()
    assert driver.sequences["b", 0].num_cached == cached


@pytest.mark.parametrize("steps", range(12))
def test_b039_an_abort_frees_everything_wherever_it_comes(steps):
    """While queued, in prefill, in decode, in the last step, and after the end."""
    driver = Driver(small_limits(num_slots=2))
    ids = [driver.send(prompt_of(20, first=i), max_tokens=5, ignore_eos=True) for i in range(6)]
    for _ in range(steps):
        driver.step()
    for request_id in ids:
        driver.abort(request_id)
        driver.abort(request_id)
    driver.abort("unknown")
    stats = driver.scheduler.stats()
    assert stats.running == stats.waiting == 0 and stats.pages_free == stats.pages_total
    driver.run().check_outputs()


def test_b040_tenants_with_another_salt_share_nothing():
    driver = Driver()
    for request_id, salt in (("a", "A"), ("b", "B"), ("none", ""), ("again", "A")):
        driver.send(prompt_of(30), request_id, salt=salt)
        driver.run().check_outputs()
    cached = {key: driver.sequences[key, 0].num_cached for key in ("a", "b", "none", "again")}
    assert cached == {"a": 0, "b": 0, "none": 0, "again": 28}


def test_b041_waves_leave_no_stale_rows():
    driver = Driver(small_limits(num_slots=8, num_pages=200))
    for wave, count in enumerate((8, 3, 1, 5)):
        for index in range(count):
            # The middle ones end first.
            tokens = 3 + 4 * abs(index - count // 2)
            driver.send(prompt_of(4 + 3 * index, first=wave), max_tokens=tokens)
        driver.run().check_outputs()
        slots = driver.scheduler._slots
        assert not slots.page_table_NP.any() and not slots.tokens_N.any()
