"""Rows with a grammar: masked on the device, beside rows without one."""

import numpy as np
import pytest

from jaxserve.grammar import GrammarSpec
from jaxserve.types import FinishReason
from tests.engine.harness import VOCAB, make_core, request, run

SPEC = GrammarSpec.choice(["stands for", "any grammar"])


class Multiples:
    """Allows multiples of the count of tokens so far plus three; complete after `length`."""

    def __init__(self, length):
        self.length, self.count = length, 0

    @property
    def allowed(self):
        return np.arange(VOCAB) % (self.count + 3) == 0

    @property
    def done(self):
        return self.count == self.length

    def fill_mask(self, row):
        row[:] = np.packbits(self.allowed, bitorder="little").view(np.int32)

    def advance(self, token):
        fits = bool(self.allowed[token])
        self.count += 1
        return fits


def constrained(name, **params):
    return request(name, [5, 6, 7], grammar=SPEC, max_tokens=20, **params)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("params", [{}, dict(temperature=1.0, seed=4, top_k=30)])
def test_every_token_is_allowed_and_neighbours_are_untouched(tiny_model, pipelined, params):
    plain = request("plain", [1, 2, 3], max_tokens=12, logprobs=1)
    expected = run(make_core(tiny_model), [plain])["plain", 0]
    core = make_core(tiny_model, pipelined=pipelined)
    asked = [constrained("a", n=2, **params), plain, constrained("b", **params)]
    matchers = {"a": [Multiples(8), Multiples(8)], "b": [Multiples(100)]}
    answers = run(core, asked, arrivals=[0, 2, 4], matchers=matchers)
    for key, length in ((("a", 0), 8), (("a", 1), 8), (("b", 0), 20)):
        tokens = answers[key].tokens
        assert len(tokens) == length
        assert all(token % (count + 3) == 0 for count, token in enumerate(tokens))
    finishes = [answers[key].finish for key in (("a", 0), ("a", 1), ("b", 0))]
    assert finishes == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert answers["plain", 0].logprobs == expected.logprobs
    assert core.output.num_grammars == 0


def test_company_chunks_and_preemption_change_nothing(tiny_model):
    alone = run(make_core(tiny_model), [constrained("x")], matchers={"x": [Multiples(15)]})
    others = [request(i, [i] * 30, max_tokens=60, temperature=1.0, seed=i) for i in range(6)]
    core = make_core(tiny_model, budget=8, pool_pages=20)
    answers = run(core, [*others, constrained("x")], arrivals=[0] * 6 + [10],
                  matchers={"x": [Multiples(15)]})  # fmt: skip
    assert core.scheduler.stats().preemptions > 0
    assert answers["x", 0].tokens == alone["x", 0].tokens


def test_aborted_and_refused_grammars_are_forgotten(tiny_model):
    core = make_core(tiny_model)
    with pytest.raises(ValueError):
        core.add(request("long", [1] * 300, grammar=SPEC), [Multiples(1)])
    core.add(constrained("gone"), [Multiples(5)])
    core.abort("gone")
    run(core, [])
    assert core.output.num_grammars == 0
