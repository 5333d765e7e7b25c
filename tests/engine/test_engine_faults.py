"""Faults that engines like this one have had, each as a test of its kind on a whole engine."""

import time

import numpy as np
import pytest

from jaxserve.types import EngineFailed, FinishReason, RequestRefused
from tests.engine.harness import VOCAB, make_core, request, run

RNG = np.random.default_rng(3)


def prompt(length, seed=None):
    rng = RNG if seed is None else np.random.default_rng(seed)
    return rng.integers(0, VOCAB, length).tolist()


def solo(tiny_model, asked, **settings):
    """The answer to one request, with the engine to itself."""
    return run(make_core(tiny_model, **settings), [asked])[asked.id, 0]


@pytest.mark.parametrize("chunk", [8, 16, 63, 64])
def test_chunks_neither_repeat_nor_lose_prompt_tokens(tiny_model, chunk):
    """B032: per-chunk preprocessing. The prompt ends before, at and after a chunk's end."""
    asked = request("a", prompt(64, seed=1), logprobs=0)
    core = make_core(tiny_model, budget=chunk)
    answer = run(core, [asked])["a", 0]
    assert answer.logprobs == solo(tiny_model, asked).logprobs
    assert core.scheduler.stats().computed_tokens == 64 + 15  # each token but the last, once


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_resumed_rows_neither_repeat_nor_miss_tokens(tiny_model, prefix_caching):
    """B033: six requests of 40 tokens, pages for about three of them, small chunks."""
    asked = [request(i, prompt(30, seed=i), max_tokens=40) for i in range(6)]
    plenty = run(make_core(tiny_model), asked)
    core = make_core(tiny_model, pool_pages=16, budget=8, prefix_caching=prefix_caching)
    short = run(core, asked)
    assert core.scheduler.stats().preemptions > 0
    assert {k: a.tokens for k, a in short.items()} == {k: a.tokens for k, a in plenty.items()}
    assert all(len(answer.tokens) == 40 for answer in short.values())


@pytest.mark.parametrize("slots", [8, 4])
def test_overlapped_steps_do_not_mix_rows(tiny_model, slots):
    """B035: 64 prompts at once, pipelined, against the plain loop one at a time."""
    asked = [request(i, prompt(3 + i % 40, seed=i), max_tokens=8) for i in range(64)]
    core = make_core(tiny_model, slots=slots)
    together = run(core, asked)
    alone = make_core(tiny_model, slots=slots, pipelined=False, prefix_caching=False)
    for one in asked[::7]:
        assert together[one.id, 0].tokens == run(alone, [one])[one.id, 0].tokens


@pytest.mark.parametrize("length", [15, 16, 17, 32])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_full_prefix_hits_recompute_a_token(tiny_model, length, max_tokens):
    """B037: the same prompt again, then with its own answer appended."""
    core = make_core(tiny_model)
    asked = request("cold", prompt(length, seed=9), max_tokens=max_tokens, logprobs=1)
    cold = run(core, [asked])["cold", 0]
    warm = run(core, [request("warm", asked.prompt_ids, max_tokens=max_tokens, logprobs=1)])
    warm = warm["warm", 0]
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    assert warm.cached < length and warm.cached % 16 == 0
    longer = request("longer", [*asked.prompt_ids, *cold.tokens], logprobs=1)
    assert run(core, [longer])["longer", 0].logprobs == solo(tiny_model, longer).logprobs


def test_pages_of_a_cancelled_prefill_are_not_shared_half_written(tiny_model):
    """B038: A leaves after its first chunk; B has the same prompt; then two start together."""
    ids = prompt(64, seed=5)
    expected = solo(tiny_model, request("x", ids, logprobs=1))
    core = make_core(tiny_model, budget=8)

    def leave(core, step):
        return core.abort("a") if step == 2 else None

    answers = run(core, [request("a", ids), request("b", ids, logprobs=1)], arrivals=[0, 3],
                  between=leave)  # fmt: skip
    assert answers["a", 0].finish is FinishReason.ABORT
    assert answers["b", 0].logprobs == expected.logprobs
    both = run(make_core(tiny_model), [request(i, ids, logprobs=1) for i in "cd"])
    assert both["c", 0].logprobs == both["d", 0].logprobs == expected.logprobs


@pytest.mark.parametrize("pipelined", [False, True])
def test_aborts_at_every_stage_give_everything_back(tiny_model, pipelined):
    """B039: queued, in prefill, in decode, at the end, and after it. run() checks the pages."""
    asked = [request(i, prompt(40, seed=i), max_tokens=12) for i in range(30)]
    core = make_core(tiny_model, budget=16, pipelined=pipelined)
    at = np.random.default_rng(0).integers(0, 60, 30).tolist()

    def leave(core, step):
        return [out for i in range(30) if at[i] == step for out in core.abort(str(i))]

    answers = run(core, asked, between=leave)
    assert len(answers) == 30
    finishes = {answer.finish for answer in answers.values()}
    assert finishes == {FinishReason.ABORT, FinishReason.LENGTH}
    assert core.abort("0") == [] and core.abort("never heard of") == []


def test_rows_of_ended_neighbours_leave_nothing_behind(tiny_model):
    """B041: waves of different sizes and lengths, so that middle slots end first."""
    core = make_core(tiny_model)
    for wave, count in enumerate((8, 3, 1, 5)):
        asked = [
            request(
                f"{wave}-{i}", prompt(5 + 9 * i, seed=wave * 10 + i), max_tokens=3 + (5 * i) % 7
            )
            for i in range(count)
        ]
        answers = run(core, asked)
        slots = core.scheduler._slots
        assert not slots.page_table_NP.any() and not slots.num_pages_N.any()
        middle = asked[count // 2]
        assert answers[middle.id, 0].tokens == solo(tiny_model, middle).tokens


def test_seeded_rows_agree_wherever_they_sit(tiny_model):
    """B050: A has a seed, B a drawn one; A alone, before, after and beside itself."""
    a = lambda name: request(name, prompt(9, seed=2), temperature=1.0, seed=42)
    b = lambda name, drawn: request(name, prompt(9, seed=2), temperature=1.0, seed=drawn)
    expected = solo(tiny_model, a("a")).tokens
    for rows in ([a("a"), b("b", 1)], [b("b", 2), a("a")], [a("a"), a("a2"), b("b", 3)]):
        answers = run(make_core(tiny_model, prefix_caching=False), rows)
        assert all(
            (answer.tokens == expected) == name.startswith("a")
            for (name, _), answer in answers.items()
        )


def test_one_request_that_breaks_the_text_stage_fails_alone(tiny_model):
    """B036: a fault in one request's own processing."""
    core = make_core(tiny_model)
    plain = core.output.open

    def open_or_break(asked, matchers):
        if asked.prompt_ids[0] == 333:
            raise RuntimeError("no such text")
        plain(asked, matchers)

    core.output.open = open_or_break
    core.add(request("good", prompt(20, seed=1)))
    with pytest.raises(RuntimeError):
        core.add(request("bad", [333, 4]))
    answers = run(core, [request("also good", prompt(20, seed=2))])
    assert {answer.finish for answer in answers.values()} == {FinishReason.LENGTH}
    assert len(answers) == 2


def test_a_token_that_breaks_the_text_stage_ends_its_sequence_alone(tiny_model):
    core = make_core(tiny_model)
    asked = [request(i, prompt(20, seed=i)) for i in range(3)]
    for one in asked:
        core.add(one)
    core.output._choices["1", 0].stream.push = lambda token: 1 / 0
    answers = run(core, [])
    assert [answers[str(i), 0].finish.value for i in range(3)] == ["length", "error", "length"]
    assert isinstance(answers["1", 0].error, ZeroDivisionError)


class Breaking:
    """A runner whose `at`-th fetch raises, as when the device lost the donated pool."""

    def __init__(self, inner, at):
        self.inner, self.left, self.resets = inner, at, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def fetch(self, pending):
        self.left -= 1
        if self.left == 0:
            self.inner.state = None
            raise RuntimeError("the device is gone")
        return self.inner.fetch(pending)

    def reset(self):
        self.resets += 1
        self.inner.reset()


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_failed_step_ends_what_ran_and_the_engine_goes_on(tiny_model, pipelined):
    core = make_core(tiny_model, pipelined=pipelined)
    core.runner = Breaking(core.runner, at=5)
    asked = [request(i, prompt(20, seed=i)) for i in range(3)]
    answers = run(core, asked)
    assert {answer.finish for answer in answers.values()} == {FinishReason.ERROR}
    assert all(isinstance(answer.error, EngineFailed) for answer in answers.values())
    assert core.runner.resets == 1
    # The prefix cache was forgotten with the pool, and a new request gets the right answer.
    again = run(core, [request("again", asked[0].prompt_ids)])["again", 0]
    assert again.cached == 0
    assert again.tokens == solo(tiny_model, asked[0]).tokens


def test_logits_that_are_not_finite_end_their_row_with_an_error(tiny_model):
    core = make_core(tiny_model)
    fetch = core.runner.fetch

    def break_row(pending):
        result = fetch(pending)
        token_S = result.token_S.copy()
        rows = [s.request.id for s in pending.plan.sequences]
        if "1" in rows:
            token_S[rows.index("1")] = -1  # what the step returns for such logits
        return type(result)(token_S)

    core.runner.fetch = break_row
    try:
        answers = run(core, [request(i, prompt(10, seed=i)) for i in range(3)])
    finally:
        del core.runner.fetch
    assert [answers[str(i), 0].finish.value for i in range(3)] == ["length", "error", "length"]
    assert "not finite" in str(answers["1", 0].error)


@pytest.mark.parametrize("ids", [[], [VOCAB], [-1], [2**31], [1] * 256])
def test_prompts_that_cannot_run_are_refused_before_the_device_sees_them(tiny_model, ids):
    core = make_core(tiny_model)
    with pytest.raises(RequestRefused):
        core.add(request("bad", ids))
    assert core.output.num_open == 0 and not core.has_work


def test_scoring_a_prompt_matches_generating_it(tiny_model):
    """Prompt log-probabilities, in chunks, against the log-probabilities of the same tokens when
    they were sampled; max_tokens=0 brings scores alone."""
    first = solo(tiny_model, request("a", prompt(6, seed=4), max_tokens=70, logprobs=3))
    whole = [*prompt(6, seed=4), *first.tokens]
    score = request("s", whole, max_tokens=0, prompt_logprobs=3)
    scored = solo(tiny_model, score, budget=16)
    assert scored.finish is FinishReason.LENGTH and scored.tokens == []
    assert scored.prompt_logprobs[0] is None and len(scored.prompt_logprobs) == len(whole)
    # Scores are computed in blocks of another shape: equal but for the last bits.
    for seen, expected in zip(scored.prompt_logprobs[6:], first.logprobs, strict=True):
        assert seen.token_id == expected.token_id
        assert seen.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [i for i, _ in seen.top] == [i for i, _ in expected.top]


def test_no_program_is_compiled_under_a_mixed_load(tiny_model):
    """Counted from jax's own monitoring events since the programs, for steps of 1 and of 4 tokens,
    were warm."""
    core = make_core(tiny_model, deterministic=False, num_slots=4, bucket=4)
    before = core.runner.compilations
    kinds = [{}, dict(temperature=1.0, seed=1), dict(logprobs=5), dict(repetition_penalty=1.2),
             dict(logit_bias={3: 5.0}), dict(min_tokens=2), dict(prompt_logprobs=2), dict(n=3),
             dict(top_p=0.5, temperature=1.0), dict(max_tokens=0)]  # fmt: skip
    asked = [request(i, prompt(1 + 11 * i % 90), **kinds[i % len(kinds)]) for i in range(30)]
    arrivals = np.random.default_rng(2).integers(0, 40, 30).tolist()
    run(core, asked, arrivals=arrivals)
    assert core.runner.compilations == before == 0


def test_an_interrupted_start_compiles_no_more(tiny_model, monkeypatch):
    runner, begun = make_core(tiny_model).runner, []

    def compile(name, job):
        begun.append(name)
        time.sleep(0.05)

    def interrupt(name, done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_timed", compile)
    with pytest.raises(KeyboardInterrupt):
        runner.compile(interrupt)
    assert len(begun) <= 4  # two at a time, and who took the places of the first to end
