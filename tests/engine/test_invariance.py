"""The promise: a request's tokens do not depend on its company, its chunks or its history.

Compared to the bit, tokens and log-probabilities, with one pinned step shape.
"""

import dataclasses
import functools

import numpy as np
import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.pallas_kernels import native
from jaxserve.scheduler.guard import Action
from jaxserve.types import FinishReason
from tests.engine.harness import VOCAB, Multiples, constrained, make_core, request, run

RNG = np.random.default_rng(7)
PROMPT = RNG.integers(0, VOCAB, 75).tolist()
SAMPLINGS = {
    "greedy": {},
    "seeded": dict(temperature=0.9, top_p=0.95, top_k=50, seed=42),
    "penalised": dict(temperature=0.7, seed=3, repetition_penalty=1.3, frequency_penalty=0.5),
}


def subject(sampling, name="subject"):
    return request(name, PROMPT, max_tokens=24, logprobs=2, **SAMPLINGS[sampling])


def crowd(count=31):
    """Requests of other lengths and samplings, some for the sampled program, some plain."""
    rng = np.random.default_rng(1)
    others = []
    for i in range(count):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 120)))
        params = dict(max_tokens=int(rng.integers(1, 30)))
        if i % 3:
            params |= dict(temperature=1.0, seed=i, top_k=int(rng.integers(0, 40)))
        if i % 5 == 0:
            params |= dict(presence_penalty=1.0, min_tokens=1, n=2)
        others.append(request(f"other{i}", prompt.tolist(), **params))
    return others, rng.integers(0, 40, count).tolist()


@pytest.fixture(scope="module", params=list(SAMPLINGS))
def alone(request, tiny_model):
    """(sampling, the answer that every other way must give)."""
    core = make_core(tiny_model, pipelined=False)
    answer = run(core, [subject(request.param)])["subject", 0]
    assert len(answer.tokens) == 24 and answer.finish is FinishReason.LENGTH
    return request.param, answer


def same(answer, expected):
    assert answer.tokens == expected.tokens
    assert answer.logprobs == expected.logprobs  # floats, to the bit
    assert answer.text == expected.text


def test_pipelined_loop(alone, tiny_model):
    sampling, expected = alone
    same(run(make_core(tiny_model), [subject(sampling)])["subject", 0], expected)


@pytest.mark.parametrize("pipelined", [False, True])
def test_among_31_others(alone, tiny_model, pipelined):
    sampling, expected = alone
    others, arrivals = crowd()
    core = make_core(tiny_model, pipelined=pipelined)
    answers = run(core, [*others, subject(sampling)], arrivals=[*arrivals, 9])
    same(answers["subject", 0], expected)


@pytest.mark.parametrize("slots", [1, 3])
def test_slots_given_away_before_the_last_token(tiny_model, slots):
    """Every slot is refilled while its last tenant's final step is in flight: neither sees anything
    of the other, whatever they sample by and want to know."""

    def requests():
        draw = np.random.default_rng(5)
        for i in range(18):
            prompt = draw.integers(0, VOCAB, int(draw.integers(1, 40))).tolist()
            params = dict(max_tokens=int(draw.integers(1, 5)), logprobs=1 + i % 2)
            yield request(f"r{i}", prompt, **params, **list(SAMPLINGS.values())[i % 3])

    alone = make_core(tiny_model, pipelined=False)
    core = make_core(tiny_model, slots=slots)
    together = run(core, list(requests()))
    for one in requests():
        same(together[one.id, 0], run(alone, [one])[one.id, 0])
    tokens = sum(len(answer.tokens) for answer in together.values())
    assert core.stats().generation_tokens == tokens
    if slots == 1:
        assert core.scheduler.stats().steps == tokens  # none of them without a row


@pytest.mark.parametrize("pipelined", [False, True])
def test_beside_rows_with_a_grammar(alone, tiny_model, pipelined):
    """They come, decode and end before, with and after the subject."""
    sampling, expected = alone
    held = [constrained(i, [i, 8, 9], temperature=0.5 * i, seed=i) for i in range(4)]
    matchers = {str(i): [Multiples(6 + 5 * i)] for i in range(4)}
    core = make_core(tiny_model, pipelined=pipelined)
    answers = run(core, [*held, subject(sampling)], arrivals=[0, 3, 5, 14, 4], matchers=matchers)
    assert [len(answers[str(i), 0].tokens) for i in range(4)] == [6, 11, 16, 20]
    same(answers["subject", 0], expected)


@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_chunk_sizes(alone, tiny_model, chunk):
    sampling, expected = alone
    same(run(make_core(tiny_model, budget=chunk), [subject(sampling)])["subject", 0], expected)


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_a_long_prompt_in_one_chunk(tiny_model, sampling):
    """210 tokens at once in steps of 256, and in chunks of 64 and of 16; here layers are not
    scanned but unrolled."""
    prompt = np.random.default_rng(3).integers(0, VOCAB, 210).tolist()
    answers = []
    for chunk in (256, 64, 16):
        unrolled = ("reference", "reference", False)
        core = make_core(tiny_model, backend=unrolled, bucket=256, budget=chunk)
        subject = request("subject", prompt, max_tokens=12, logprobs=2, **SAMPLINGS[sampling])
        answers.append(run(core, [subject])["subject", 0])
    assert len(answers[0].tokens) == 12
    same(answers[1], answers[0])
    same(answers[2], answers[0])


@pytest.mark.skipif(not native.available(), reason=native.describe())
@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("int8", "int8")],
)
def test_quantised_weights_in_native_code(tiny_model, dtype, kv_dtype, sampling):
    """What `auto` chooses on a CPU, and what is faster; one pinned shape keeps it from changing its
    arithmetic."""
    backend = ("cpu", "cpu", True, "int8", dtype)
    core = functools.partial(make_core, tiny_model, backend=backend, kv_dtype=kv_dtype)
    expected = run(core(pipelined=False), [subject(sampling)])["subject", 0]
    assert len(expected.tokens) == 24
    for chunk in (8, 16):
        same(run(core(budget=chunk), [subject(sampling)])["subject", 0], expected)
    others, arrivals = crowd()
    answers = run(core(), [*others, subject(sampling)], arrivals=[*arrivals, 9])
    same(answers["subject", 0], expected)
    again = core()
    for cached in (0, 64):
        answer = run(again, [subject(sampling)])["subject", 0]
        assert answer.cached == cached
        same(answer, expected)


@pytest.mark.parametrize("host_pages", [0, 20])
def test_preempted_twice(alone, tiny_model, host_pages):
    """Computed again, or kept on the host and fetched."""
    sampling, expected = alone
    core = make_core(tiny_model, prefix_caching=False, host_pages=host_pages)
    preempted = []

    def preempt(core, step):
        """Takes the slot away after some output, twice."""
        for sequence in core.scheduler._slots.running():
            if sequence.num_output in (5, 11) and sequence.num_output not in preempted:
                preempted.append(sequence.num_output)
                core.scheduler._preempt(sequence.slot, "the test says so", core.clock.now)

    answers = run(core, [subject(sampling)], between=preempt)
    stats = core.scheduler.stats()
    assert stats.preemptions == 2
    # 79 and 85 tokens of KV when it is evicted: all of them fetched, or all computed once more.
    assert stats.host_pages_kept == (11 if host_pages else 0)
    same(answers["subject", 0], expected)


@pytest.mark.parametrize("host_pages", [0, 8])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_page_shortage(alone, tiny_model, prefix_caching, host_pages):
    """Everyone starts in a few pages and grows; the subject comes last: a likely victim."""
    sampling, expected = alone
    growing = [request(i, [i, 2, 3], max_tokens=90, temperature=1.0, seed=i) for i in range(6)]
    core = make_core(
        tiny_model, pool_pages=22, prefix_caching=prefix_caching, host_pages=host_pages
    )
    answers = run(core, [*growing, subject(sampling)], arrivals=[0] * 6 + [20])
    assert core.scheduler.stats().preemptions > 0
    same(answers["subject", 0], expected)


def test_prefix_miss_and_hit(alone, tiny_model):
    sampling, expected = alone
    core = make_core(tiny_model)
    first = run(core, [subject(sampling, "first")])["first", 0]
    second = run(core, [subject(sampling, "second")])["second", 0]
    assert (first.cached, second.cached) == (0, 64)
    same(first, expected)
    same(second, expected)


def test_a_prefix_that_another_computes_now(alone, tiny_model):
    """Three at once: two wait until the first has computed what they share."""
    sampling, expected = alone
    core = make_core(tiny_model, budget=16)
    answers = run(core, [subject(sampling, f"s{i}") for i in range(3)])
    assert [answers[f"s{i}", 0].cached for i in range(3)] == [0, 64, 64]
    for index in range(3):
        same(answers[f"s{index}", 0], expected)


def test_slots_and_pages_used_before(alone, tiny_model):
    sampling, expected = alone
    core = make_core(tiny_model)
    for count in (8, 3, 1, 5):
        run(core, crowd(count)[0])
    same(run(core, [subject(sampling)])["subject", 0], expected)


def test_static_batching(alone, tiny_model):
    sampling, expected = alone
    others, arrivals = crowd(20)
    core = make_core(tiny_model, batching="static")
    answers = run(core, [*others, subject(sampling)], arrivals=[*arrivals, 0])
    same(answers["subject", 0], expected)


@pytest.mark.parametrize(
    "config",
    [dict(policy=name) for name in ("priority", "deadline", "vtc")]
    + [dict(prefill_sharing=False), dict(itl_target_ms=1.0, guard_itl_ratio=None)],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_policies_and_chunk_budgets(alone, tiny_model, config):
    """The subject is among the least important, of the greediest tenant and due last: where the
    policy takes places away it loses its own. A target that no step meets makes the smallest
    chunks."""
    sampling, expected = alone
    others, arrivals = crowd(20)
    others = [
        dataclasses.replace(other, tenant="aaabc"[i // 2 % 5], priority=i % 3, deadline=1e6 - i)
        for i, other in enumerate(others)
    ]
    arrivals = [0 if other.tenant == "a" else 5 + step for other, step in zip(others, arrivals)]
    least = dataclasses.replace(subject(sampling), tenant="a", priority=2, arrival=1.0)
    core = make_core(tiny_model, slots=4, scheduling=SchedulerConfig(**config))
    answers = run(core, [*others, least], arrivals=[*arrivals, 0])
    takes_places = config.get("policy") in ("priority", "vtc")
    assert (core.scheduler.stats().preemptions > 0) == takes_places
    same(answers["subject", 0], expected)


GUARDS = {
    Action.SHED_LOWEST: dict(guard_queue_age_s=1.0),
    Action.SMALLER_CHUNKS: dict(itl_target_ms=200.0, guard_itl_ratio=1.0),
    Action.SHED_GREEDIEST: dict(guard_fairness_gap=1.0),
    Action.PAUSE_ADMISSION: dict(guard_preemptions_per_min=0.1),
    Action.SPARE_PAGES: dict(guard_page_pressure=0.2),
    Action.STATIC_BATCHING: dict(
        guard_page_pressure=0.1, guard_queue_age_s=1.0, guard_static_after_s=3.0
    ),
}


@pytest.mark.parametrize("action", Action, ids=lambda action: action.value)
def test_guard_states(alone, tiny_model, action):
    """The subject comes among others to few pages and slots, and each action is in force while it
    waits or runs."""
    sampling, expected = alone
    growing = [request(i, [i, 2, 3], max_tokens=60, temperature=1.0, seed=i) for i in range(9)]
    crowded = [dataclasses.replace(one, tenant="ab"[i % 2]) for i, one in enumerate(growing)]
    settings = {"guard_preemptions_per_min": None, **GUARDS[action]}
    core = make_core(tiny_model, slots=4, pool_pages=14, scheduling=SchedulerConfig(**settings))
    in_force = set()

    def look(core, step):
        if "subject" in core.scheduler._requests:
            in_force.update(core.scheduler.stats().guard_actions)

    answers = run(core, [*crowded[:5], subject(sampling), *crowded[5:]], between=look)
    assert action.value in in_force
    same(answers["subject", 0], expected)


def test_choices_of_one_request(alone, tiny_model):
    """n choices share the prompt's pages; each equals what its own seed gives."""
    sampling, expected = alone
    core = make_core(tiny_model)
    params = dict(max_tokens=24, logprobs=2, n=3, **SAMPLINGS[sampling])
    answers = run(core, [request("three", PROMPT, **params)])
    same(answers["three", 0], expected)
    assert [answers["three", i].cached for i in (1, 2)] == [64, 64]
    others = [answers["three", i].tokens for i in (1, 2)]
    assert all((tokens == expected.tokens) == (sampling == "greedy") for tokens in others)
