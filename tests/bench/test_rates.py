"""Searching the rate that a server sustains, and the workers that peers answer from."""

import numpy as np
import pytest

from jaxserve.bench import serve
from jaxserve.bench.settings import BenchConfig, WorkloadConfig
from jaxserve.bench.workload import Item, Workload
from tools import drift
from tools.peers import answering

ITEMS = (Item("a", (5, 6), 1), Item("b", (7, 8, 9), 1), Item("c", (5,), 2, after="a"))


@pytest.mark.parametrize("limit", [0.21, 1.0, 3.7, 12.0])
@pytest.mark.parametrize("start", [0.5, 3.0])
def test_search_brackets_the_limit(limit, start):
    tried = serve.search(lambda rate: rate <= limit, bool, start=start)
    rates = [rate for rate, _ in tried]
    best = max(rate for rate, kept in tried if kept)
    assert best <= limit < 1.1 * best and rates == sorted(rates) and len(rates) <= 12


def test_search_gives_up():
    assert min(serve.search(lambda rate: False, bool, start=1.0))[0] >= 1 / 16
    assert len(serve.search(lambda rate: True, bool, start=1.0)) == 12


def summary(ttft, itl, failed=0):
    return {"failed": failed, "ttft_ms": {"p99": ttft}, "itl_ms": itl and {"p99": itl}}


def test_highest_rate_has_none_below_that_fails():
    bench = BenchConfig(ttft_p99_ms=2000, itl_p99_ms=200)
    good, late, slow, failed = (
        summary(1999, 199), summary(2001, 10), summary(10, 201), summary(10, 10, failed=1),
    )  # fmt: skip
    assert serve.highest([(1, [good]), (2, [good]), (3, [late]), (4, [good])], bench) == 2
    for broken in (late, slow, failed):
        assert serve.highest([(1, [broken]), (2, [good])], bench) == 0
    assert serve.highest([(1, [summary(5, None)])], bench) == 1  # one token each: no gaps


def test_sustained_goes_on_with_prompts_not_seen_before():
    config = WorkloadConfig(seed=3)
    made = serve.sustained(Workload("w", ITEMS), 20.0, 1.0, config)
    assert len(made.items) == 20 and len({item.id for item in made.items}) == 20
    laps = [made.items[n : n + 3] for n in range(0, 18, 3)]
    assert len({lap[0].prompt_ids[0] for lap in laps[:4]}) == 4  # the pool has five tokens
    assert all(lap[2].after == lap[0].id for lap in laps)
    times = [item.arrival for item in made.items if item.after is None]
    assert times == sorted(times) and 0.3 < times[-1] < 3.0
    assert len(serve.sustained(Workload("w", ITEMS), 0.01, 1.0, config).items) == 16


def test_worker_waits_for_arrivals_and_counts_tokens():
    left = {}

    def step():
        for number in list(left):
            left[number] -= 1
            yield number, 1, not left[number]
            if not left[number]:
                del left[number]

    submit = lambda number, request: left.update({number: request["max_tokens"]})
    engine = answering.Engine("1.0", submit, step)
    requests = [{"max_tokens": 2, "arrival_s": 0.01}, {"max_tokens": 3}]
    answer = answering.run(engine, requests)
    later, first = answer["requests"]
    assert answer["output_tokens"] == 5 and (later["tokens"], first["tokens"]) == (2, 3)
    assert later["sent"] == 0.01 and first["sent"] == 0.0
    assert first["stamps"][-1] < 0.01 <= later["stamps"][0] <= later["stamps"][1]
    assert answer["seconds"] == later["stamps"][1]


def test_drift_is_the_perplexity_lost():
    reference = drift.Scores(np.log([0.5, 0.25]), np.array([1, 2]), np.array([0.3, 0.1]))
    found = drift.Scores(np.log([0.5, 0.24]), np.array([1, 9]), np.array([0.0, 0.0]))
    lost = drift.compare(found, reference)
    assert reference.perplexity == pytest.approx(8**0.5)
    assert lost.perplexity == pytest.approx((0.25 / 0.24) ** 0.5 - 1)
    assert (lost.alike, lost.widest_flip) == (0.5, 0.1)
    assert lost.largest == pytest.approx(np.log(0.25 / 0.24)) == 2 * lost.mean
    assert drift.windows(range(4500))[2] == list(range(4000, 4500))
    assert len(drift.text(100_000)) == 100_000
