"""What the scheduler promises, one promise a test, against a runner that notices wrong pages."""

import gc

import numpy as np
import pytest

from jaxserve.scheduler.plan import ON_DEVICE
from jaxserve.sim.fake_runner import expected_output
from jaxserve.types import FinishReason, PromptScores, Request, RequestRefused, StepResult
from tests.scheduler_driver import EOS, VOCAB_SIZE, Driver, small_limits


def prompt_of(length, first=10):
    """Tokens that differ from position to position and from prompt to prompt."""
    return [(first + 7 * i + i * i) % VOCAB_SIZE for i in range(length)]


def test_plan_arrays_are_fresh_int32():
    driver = Driver()
    driver.send(prompt_of(20))
    driver.send(prompt_of(3))
    first, second = driver.step(), driver.step()
    for plan in (first, second):
        for name in ("slot_S", "generation_S", "start_S", "cu_q_len_S1", "token_ids_T"):
            assert getattr(plan, name).dtype == np.int32, name
        assert plan.page_table_SP.dtype == np.int32 and plan.samples_S.dtype == bool
        assert plan.page_table_SP.shape == (plan.num_rows, 5)  # 20 tokens: five pages
    assert not np.shares_memory(first.page_table_SP, second.page_table_SP)
    assert not np.shares_memory(first.page_table_SP, driver.scheduler._slots.page_table_NP)


def test_first_plan_of_two_prompts():
    """Budget 16: the oldest gets half, the short one all it wants, the oldest the rest."""
    driver = Driver()
    driver.send(prompt_of(20))
    driver.send(prompt_of(3))
    plan = driver.step()
    assert plan.num_decode == 0
    assert np.diff(plan.cu_q_len_S1).tolist() == [13, 3]
    assert plan.samples_S.tolist() == [False, True]
    assert plan.token_ids_T.tolist() == prompt_of(20)[:13] + prompt_of(3)
    plan = driver.step()  # before the first was absorbed: the short one decodes from the device
    assert plan.num_decode == 1 and plan.token_ids_T[0] == ON_DEVICE
    assert np.diff(plan.cu_q_len_S1).tolist() == [1, 7]
    assert plan.start_S.tolist() == [3, 13]
    assert plan.samples_S.tolist() == [True, True]


def test_the_plain_loop_knows_every_token():
    driver = Driver(pipelined=False)
    for length in (1, 5, 30):
        driver.send(prompt_of(length))
    driver.run().check_outputs()
    assert all((plan.token_ids_T != ON_DEVICE).all() for plan in driver.plans)


@pytest.mark.parametrize("pipelined", [False, True])
def test_no_row_is_scheduled_past_its_length(pipelined):
    driver = Driver(pipelined=pipelined)
    driver.send(prompt_of(5), max_tokens=4, ignore_eos=True)
    driver.run().check_outputs()
    last = max(int((p.start_S + np.diff(p.cu_q_len_S1)).max()) for p in driver.plans)
    assert last == 5 + 4 - 1  # the last token's own KV is of no use to anyone


def test_no_token_at_all():
    """max_tokens=0 computes the prompt, samples nothing, ends with LENGTH."""
    driver = Driver()
    driver.send(prompt_of(21), max_tokens=0)
    driver.run().check_outputs()
    assert driver.ends == {("r0", 0): FinishReason.LENGTH}
    assert not any(plan.samples_S.any() for plan in driver.plans)
    assert sum(plan.num_tokens for plan in driver.plans) == 21


def test_output_is_clipped_to_the_model_length():
    driver = Driver(small_limits(max_model_len=30))
    driver.send(prompt_of(25), max_tokens=None, ignore_eos=True)
    driver.send(prompt_of(29), max_tokens=50, ignore_eos=True)
    driver.run().check_outputs()
    assert len(driver.output("r0")) == 5 and len(driver.output("r1")) == 1
    assert set(driver.ends.values()) == {FinishReason.LENGTH}


def test_b019_an_end_token_at_the_last_place_is_a_stop():
    request = Request("x", tuple(prompt_of(6)), seed=6)
    tokens = expected_output(request, 0, 40, VOCAB_SIZE)
    at = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i > 2)
    driver = Driver()
    driver.send(prompt_of(6), max_tokens=at + 1, stop_token_ids=[tokens[at]], ignore_eos=True)
    driver.run().check_outputs()
    assert driver.ends["r0", 0] is FinishReason.STOP
    assert driver.sequences["r0", 0].stop_reason == tokens[at]


@pytest.mark.parametrize("named", [False, True])
def test_the_reason_of_a_stop_is_an_id_that_the_client_named(named):
    driver = Driver(small_limits(vocab_size=5, eos_ids=(3,)))
    driver.send([1] * 4, max_tokens=60, stop_token_ids=[3] if named else [])
    driver.run()
    assert driver.ends["r0", 0] is FinishReason.STOP
    assert driver.sequences["r0", 0].stop_reason == (3 if named else None)


def test_min_tokens_holds_back_every_kind_of_end():
    driver = Driver(small_limits(vocab_size=5, eos_ids=(3,)))
    for length in range(1, 12):
        driver.send([1] * length, max_tokens=20, min_tokens=10, stop_token_ids=[2])
    driver.run()
    for index in range(11):
        output = driver.output(f"r{index}")
        assert not {2, 3} & set(output[:10]) and len(output) > 10


def test_static_batching_waits_for_the_slowest():
    driver = Driver(small_limits(batching="static"))
    for tokens in (2, 2, 2, 12, 3, 3):
        driver.send(prompt_of(4, first=tokens), max_tokens=tokens, ignore_eos=True)
    driver.run().check_outputs()
    starts = [driver.token_times[f"r{i}", 0][0] for i in range(6)]
    assert min(starts[4:]) > max(driver.token_times["r3", 0])
    admitted = [len(plan.admits) for plan in driver.plans if plan.admits]
    assert admitted == [4, 2]
    decoding = [plan for plan in driver.plans if plan.num_decode == plan.num_rows]
    assert {(plan.num_rows, plan.size) for plan in decoding} == {(4, 4), (1, 4), (2, 2)}


def test_continuous_batching_refills_at_once():
    driver = Driver()
    for tokens in (2, 2, 2, 12, 3, 3):
        driver.send(prompt_of(4, first=tokens), max_tokens=tokens, ignore_eos=True)
    driver.run().check_outputs()
    assert max(driver.token_times["r5", 0]) < max(driver.token_times["r3", 0])


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_slot_is_refilled_in_the_plan_after_its_last_token(pipelined, tokens):
    """Nobody needs to know that token first: with one slot, each plan has a row."""
    driver = Driver(small_limits(num_slots=1), pipelined=pipelined)
    for first in range(3):
        driver.send(prompt_of(4, first), max_tokens=tokens, ignore_eos=True)
    driver.run().check_outputs()
    assert len(driver.plans) == driver.now - pipelined == 3 * max(tokens, 1)


@pytest.mark.parametrize("end", ["abort", "fail", "requeue"])
def test_one_that_moved_out_of_its_slot_ends_like_anybody(end):
    """Between the plan that gives its slot away and the absorb that brings its last token."""
    driver = Driver(small_limits(num_slots=1))
    scheduler = driver.scheduler
    for first in range(2):
        driver.send(prompt_of(4, first), max_tokens=2, ignore_eos=True)
    driver.step()
    driver.step()  # r0's last token is planned, its first is known
    plan = scheduler.plan(3.0)
    assert [sequence.request.id for sequence in plan.sequences] == ["r1"]
    assert scheduler.num_running == 1 and len(scheduler._slots.running()) == 2
    scheduler.check_invariants()
    if end == "abort":
        driver.runner.dispatch(plan)
        driver.take(scheduler.abort("r0"))
        driver.take(scheduler.abort("r1"))
    else:
        driver.lose_device(keep_running=end == "requeue")
    scheduler.check_invariants()
    driver.run().check_outputs()
    ended = {
        "abort": FinishReason.ABORT,
        "fail": FinishReason.ERROR,
        "requeue": FinishReason.LENGTH,
    }
    assert driver.ends == {("r0", 0): ended[end], ("r1", 0): ended[end]}


def test_choices_share_the_prompt_pages():
    driver = Driver()
    driver.send(prompt_of(18), n=4, max_tokens=6)
    while driver.scheduler.num_running < 4:
        driver.step()
    table = driver.scheduler._slots.page_table_NP[:4]
    assert (table[:, :4] == table[0, :4]).all() and table[0, :4].all()
    assert len(set(table[:, 4].tolist())) == 4  # 18 tokens: the fifth page is half full, not shared
    driver.run().check_outputs()
    cached = [driver.sequences["r0", i].num_cached for i in range(4)]
    assert cached == [0, 16, 16, 16]
    assert len({tuple(driver.output("r0", i)) for i in range(4)}) == 4


def test_choices_without_a_prefix_cache_recompute():
    driver = Driver(small_limits(prefix_caching=False))
    driver.send(prompt_of(18), n=3, max_tokens=6)
    driver.run().check_outputs()
    assert driver.scheduler.stats().prefix_hit_tokens == 0


def test_choices_survive_the_first_ones_failure():
    driver = Driver()
    driver.send(prompt_of(40), n=3, max_tokens=3)
    driver.step()
    first = driver.plans[0].sequences[0]
    driver.scheduler.finish(first, FinishReason.ERROR)
    driver.ends["r0", 0] = FinishReason.ERROR
    driver.run().check_outputs()
    assert len(driver.ends) == 3


def test_deadlines_pass_in_the_queue_and_in_flight():
    driver = Driver(small_limits(num_slots=1))
    driver.send(prompt_of(5), deadline=6.0, max_tokens=40, ignore_eos=True)
    driver.send(prompt_of(6), deadline=4.0)
    driver.send(prompt_of(7), deadline=100.0)
    driver.run().check_outputs()
    assert driver.ends["r0", 0] is FinishReason.TIMEOUT and driver.output("r0")
    assert driver.ends["r1", 0] is FinishReason.TIMEOUT and not driver.output("r1")
    assert driver.ends["r2", 0] in (FinishReason.STOP, FinishReason.LENGTH)


def test_far_deadlines_keep_no_ended_request_in_memory():
    driver = Driver(check=False)
    for _ in range(300):
        driver.send(prompt_of(3), "same", max_tokens=1, deadline=1e9)
        driver.run()
        driver.plans.clear(), driver.ends.clear(), driver.outputs.clear()
    alive = [x for x in gc.get_objects() if type(x) is Request and x.deadline == 1e9]
    assert len(alive) < 100


def test_an_old_deadline_does_not_end_a_new_request_of_the_same_id():
    driver = Driver()
    driver.send(prompt_of(3), "same", deadline=20.0, max_tokens=1)
    driver.run()
    driver.ends.clear()
    driver.outputs.clear()
    driver.send(prompt_of(3), "same", max_tokens=40, ignore_eos=True)
    driver.run().check_outputs()
    assert driver.now > 20.0 and driver.ends["same", 0] is FinishReason.LENGTH


def test_request_ids_are_unique_while_in_use():
    driver = Driver()
    driver.send(prompt_of(3), "same")
    with pytest.raises(RequestRefused, match="'same' is in use"):
        driver.send(prompt_of(3), "same")
    driver.run()
    assert driver.scheduler.stats().refusals == 1


@pytest.mark.parametrize("prompt", [[], [0, VOCAB_SIZE], [-1]])
def test_bad_prompts_are_refused(prompt):
    with pytest.raises(RequestRefused):
        Driver().send(prompt)


def test_the_queue_is_capped_by_count_and_by_tokens():
    driver = Driver(small_limits(max_queued=3, max_queued_tokens=50))
    driver.send(prompt_of(20), n=2)
    with pytest.raises(RequestRefused, match="2 sequences wait and at most 3") as refusal:
        driver.send(prompt_of(4), n=2)
    assert refusal.value.code == "queue_full" and refusal.value.retry_after > 0
    with pytest.raises(RequestRefused, match="20 prompt tokens wait and at most 50") as refusal:
        driver.send(prompt_of(40))
    assert refusal.value.code == "queue_full"
    driver.send(prompt_of(30))
    driver.run().check_outputs()


def test_fail_all_ends_everything_with_the_error():
    driver = Driver(small_limits(num_slots=2))
    for length in (5, 6, 7, 8):
        driver.send(prompt_of(length), n=2)
    driver.step()
    driver.step()
    error = RuntimeError("lost")
    events = driver.scheduler.fail_all(error)
    assert len(events) == 8 and all(event.error is error for event in events)
    driver.take(events)
    driver.run()
    assert set(driver.ends.values()) == {FinishReason.ERROR}
    driver.scheduler.check_invariants()


def test_requeue_all_goes_on_with_another_pool():
    driver = Driver()
    for length in (5, 9, 13, 30):
        driver.send(prompt_of(length), max_tokens=12)
    for _ in range(6):
        driver.step()
    driver.scheduler.requeue_all()
    driver.runner.reset()  # whoever reads a page that was not rewritten gets a wrong token
    driver.run().check_outputs()
    assert driver.scheduler.stats().preemptions == 4


def test_prompt_scores_pass_on_each_position_once():
    """Chunks, the prefix cache and a preemption must not lose or repeat a position."""
    driver = Driver(small_limits(num_slots=2))
    driver.send(prompt_of(33), "warm", max_tokens=1)
    driver.run()
    driver.send(prompt_of(33), "scored", prompt_logprobs=1, max_tokens=3, ignore_eos=True)
    scheduler, seen = driver.scheduler, []
    for step in range(40):
        plan = scheduler.plan(float(step))
        if plan is None:
            break
        start = int(plan.start_S[0]) + 1
        count = max(0, min(int(plan.cu_q_len_S1[1]), 33 - start))
        scores = {
            0: PromptScores(start, np.arange(start, start + count), *[np.zeros((count, 20))] * 2)
        }
        events = scheduler.absorb(
            plan, StepResult(np.full(1, 50, np.int32), prompt_scores=scores), 0.0
        )
        for event in events:
            if event.prompt_scores is not None:
                assert event.prompt_scores.start == event.prompt_scores.logprob[0]
                seen += event.prompt_scores.logprob.tolist()
        if step == 1:
            scheduler.requeue_all()
    assert seen == list(range(1, 33))
    assert scheduler.num_running == 0


def test_logprobs_are_passed_on_to_who_asked():
    driver = Driver(pipelined=False)
    driver.send(prompt_of(4), "plain", max_tokens=1)
    driver.send(prompt_of(5), "two", max_tokens=1, logprobs=2)
    driver.send(prompt_of(6), "none", max_tokens=1, logprobs=0)
    plan = driver.scheduler.plan(1.0)
    result = StepResult(
        np.array([50, 51, 52], np.int32),
        logprob_S=np.array([-1, -2, -3], np.float32),
        top_ids_SK=np.tile(np.arange(20, dtype=np.int32), (3, 1)),
        top_logprobs_SK=np.tile(-np.arange(20, dtype=np.float32), (3, 1)),
    )
    events = {e.sequence.request.id: e for e in driver.scheduler.absorb(plan, result, 1.0)}
    assert events["plain"].logprob is None and events["plain"].top is None
    assert events["two"].logprob == -2 and events["two"].top == [(0, 0.0), (1, -1.0)]
    assert events["none"].logprob == -3 and events["none"].top == []


def test_an_end_token_is_the_models_unless_ignored():
    prompts = [prompt_of(length) for length in range(1, 40)]
    driver = Driver(small_limits(max_model_len=400, num_pages=401))
    for prompt in prompts:
        driver.send(prompt, max_tokens=150)
        driver.send(prompt, max_tokens=150, ignore_eos=True)
    driver.run().check_outputs()
    reasons = [driver.ends[f"r{i}", 0] for i in range(len(driver.requests))]
    assert FinishReason.STOP in reasons[::2] and FinishReason.STOP not in reasons[1::2]
    assert any(EOS in driver.output(f"r{i}")[:-1] for i in range(1, len(reasons), 2))
