"""A prefix that many share is computed once: who comes while it is being computed waits for it."""

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.obs.decision_log import RecordingScheduler
from jaxserve.obs.explain import explain
from jaxserve.scheduler.coming import WORTH_WAITING
from jaxserve.types import FinishReason
from tests.scheduler_driver import VOCAB_SIZE, Driver, small_limits

PAGE = 4


def tokens(length, first=10):
    return [(first + 7 * i + i * i) % VOCAB_SIZE for i in range(length)]


def alike(index, common=40, own=5):
    """A prompt of `common` tokens that all share and some that nobody else has."""
    return tokens(common) + tokens(own, first=30 + index)


def admissions(driver):
    """Request ids in order of admission, with the plan's number."""
    return [(s.request.id, at) for at, plan in enumerate(driver.plans) for _, s in plan.admits]


def waiting_for_prefix(plan):
    return [d.sequence_id[0] for d in plan.waiting if d.reason.endswith("the prefix they share")]


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline", "vtc"])
def test_a_common_prefix_is_computed_once(policy, pipelined):
    """16 requests at once, 512 tokens in common and 20 of their own: 512 + 16 * 20 computed."""
    limits = small_limits(
        num_slots=16, num_pages=16 * 40, page_size=16, token_budget=64, max_model_len=640
    )
    driver = Driver(limits, SchedulerConfig(policy=policy), pipelined=pipelined)
    for index in range(16):
        driver.send(alike(index, 512, 20), max_tokens=1)
    driver.run().check_outputs()
    assert driver.scheduler.stats().computed_tokens == 512 + 16 * 20
    cached = [driver.sequences[f"r{i}", 0].num_cached for i in range(16)]
    assert cached == [0] + [512] * 15
    assert len(driver.plans) < 17  # 832 tokens at 64 a step, and the wait for the last page


def test_without_a_cache_nobody_waits():
    driver = Driver(small_limits(prefix_caching=False))
    for index in range(3):
        driver.send(alike(index))
    assert len(driver.step().admits) == 3


@pytest.mark.parametrize("common, waits", [(PAGE * WORTH_WAITING, True), (PAGE * 4 - 1, False)])
def test_a_short_beginning_is_not_waited_for(common, waits):
    driver = Driver()
    driver.send(alike(0, common, 20))
    driver.send(alike(1, common, 20))
    plan = driver.step()
    assert waiting_for_prefix(plan) == ["r1"] * waits and len(plan.admits) == 2 - waits
    driver.run().check_outputs()


def test_other_salts_and_scored_prompts_do_not_wait():
    driver = Driver()
    driver.send(alike(0))
    driver.send(alike(1), salt="other")
    driver.send(alike(2), prompt_logprobs=1)  # every position must be computed to be scored
    assert len(driver.step().admits) == 3


@pytest.mark.parametrize("end", ["abort", "finish", "preempt", "lose what runs", "lose the pool"])
def test_who_waits_goes_on_when_the_source_is_gone(end):
    """The next one takes over where the first stopped, and the third waits for that one."""
    driver = Driver()
    for index in range(3):
        driver.send(alike(index), max_tokens=3, ignore_eos=True)
    driver.step()
    driver.step()
    assert waiting_for_prefix(driver.plans[-1]) == ["r1", "r2"]
    source = driver.scheduler._slots.running()[0]
    if end == "abort":
        driver.abort("r0")
    elif end == "finish":
        driver.scheduler.finish(source, FinishReason.ERROR)
        driver.ends["r0", 0] = FinishReason.ERROR
    elif end == "preempt":
        driver.scheduler._preempt(source.slot, "the test says so")
    else:
        driver.lose_device(keep_running=end == "lose the pool")
    driver.scheduler.check_invariants()
    plan = driver.step()
    gone = end in ("abort", "finish", "lose what runs")
    assert [s.request.id for _, s in plan.admits] == ["r1" if gone else "r0"]
    assert waiting_for_prefix(plan) == (["r2"] if gone else ["r1", "r2"])
    driver.run().check_outputs()
    assert driver.sequences["r2", 0].num_cached == 40


def test_others_pass_but_the_place_is_kept():
    """Three slots: one computes, one is kept for whoever waits, one is for somebody else."""
    alone = SchedulerConfig(prefill_sharing=False)
    driver = Driver(small_limits(num_slots=3, token_budget=6), alone)
    driver.send(alike(0), "source", max_tokens=2)
    driver.send(alike(1), "waits", max_tokens=2)
    driver.send(tokens(9, first=60), "passes", max_tokens=40, ignore_eos=True)
    driver.send(tokens(9, first=70), "queues", max_tokens=40, ignore_eos=True)
    plan = driver.step()
    assert [s.request.id for _, s in plan.admits] == ["source", "passes"]
    assert [(d.sequence_id[0], d.reason) for d in plan.waiting] == [
        ("waits", "source computes the prefix they share"),
        ("queues", "every slot is taken"),
    ]
    driver.run().check_outputs()
    order = [request_id for request_id, _ in admissions(driver)]
    assert order == ["source", "passes", "waits", "queues"]


def test_pages_are_kept_too():
    alone = SchedulerConfig(prefill_sharing=False)
    driver = Driver(small_limits(num_pages=28, token_budget=6), alone)
    driver.send(alike(0), "source", max_tokens=2)  # 12 of 27 pages
    driver.send(alike(1), "waits", max_tokens=2)  # 12 are kept for it
    driver.send(tokens(9, first=60), "passes")  # needs 3
    plan = driver.step()
    assert plan.waiting[1].reason == "needs 3 pages beside 13 to spare; 15 are free"
    driver.run().check_outputs()


def test_a_source_that_gets_no_tokens_is_not_waited_for():
    """Two prompts in front of it take the whole budget: computing it again is no slower."""
    driver = Driver(small_limits(token_budget=8, max_model_len=200, num_pages=200))
    driver.send(tokens(150, first=60), "oldest")
    driver.send(alike(0, 120), "source", max_tokens=1)
    driver.step()
    driver.send(tokens(16, first=80), "short", max_tokens=1)
    driver.send(alike(1, 20), "other", max_tokens=1)
    plan = driver.step()
    assert waiting_for_prefix(plan) == ["other"]
    assert [plan.count_S[i] for i in range(plan.num_rows)] == [4, 4]  # oldest and short
    assert [s.request.id for _, s in driver.step().admits] == ["other"]
    driver.run().check_outputs()


def test_a_static_batch_starts_whole():
    driver = Driver(small_limits(batching="static"))
    for index in range(4):
        driver.send(alike(index))
    assert len(driver.step().admits) == 4


def test_priority_is_not_given_away():
    """Nobody loses a slot to one that could not use it yet; behind it the order stays."""
    driver = Driver(small_limits(num_slots=2, token_budget=6), SchedulerConfig(policy="priority"))
    driver.send(tokens(20, first=60), "low", priority=9, max_tokens=40, ignore_eos=True)
    for _ in range(6):
        driver.step()
    driver.send(alike(0), "source", priority=1, max_tokens=8, ignore_eos=True)
    driver.send(alike(1), "waits", priority=1, max_tokens=8, ignore_eos=True)
    while not any(s.request.id == "source" for _, s in driver.step().admits):
        pass
    assert driver.scheduler.stats().preemptions == 0
    driver.run().check_outputs()
    (preempted,) = [d for plan in driver.plans for d in plan.preempted]
    assert preempted.sequence_id[0] == "low" and preempted.reason == "waits goes first"


def test_another_tenant_does_not_pass_the_one_whose_turn_it_is():
    driver = Driver(small_limits(num_slots=6), SchedulerConfig(policy="vtc"))
    driver.send(tokens(40, first=60), tenant="b")
    driver.step()
    driver.send(alike(0), "source", tenant="a")
    driver.step()
    driver.scheduler._ledger.charge_input(driver.scheduler._ledger.number("b"), 1000)
    driver.send(alike(1), "waits", tenant="a")
    driver.send(tokens(10, first=70), "other", tenant="b")
    driver.send(tokens(10, first=80), "passes", tenant="a")
    plan = driver.step()
    assert waiting_for_prefix(plan) == ["waits"]
    assert [s.request.id for _, s in plan.admits] == ["passes"]
    driver.run().check_outputs()
    assert [request_id for request_id, _ in admissions(driver)][-2:] == ["waits", "other"]


def test_the_reason_is_told(tmp_path):
    driver = Driver(wrap=lambda scheduler: RecordingScheduler(scheduler, tmp_path / "log"))
    driver.send(alike(0), "first", max_tokens=2)
    driver.send(alike(1), "second", max_tokens=2)
    driver.send(alike(2), "third", max_tokens=2)
    driver.run().check_outputs()
    driver.scheduler.close()
    for name in ("second", "third"):
        story = "\n".join(explain(tmp_path / "log", name))
        assert "admitted, 40 of 45 tokens cached, having waited" in story
        assert "because first computes the prefix they share (" in story
