"""Rows with a grammar: masked on the device, beside rows without one."""

import pytest

from jaxserve.grammar.compiler import GrammarFailed
from jaxserve.types import FinishReason
from tests.engine.harness import Multiples, constrained, make_core, request, run


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
    assert core.output.num_open == 0


def test_company_chunks_and_preemption_change_nothing(tiny_model):
    alone = run(make_core(tiny_model), [constrained("x")], matchers={"x": [Multiples(15)]})
    others = [request(i, [i] * 30, max_tokens=60, temperature=1.0, seed=i) for i in range(6)]
    core = make_core(tiny_model, budget=8, pool_pages=20)
    answers = run(core, [*others, constrained("x")], arrivals=[0] * 6 + [10],
                  matchers={"x": [Multiples(15)]})  # fmt: skip
    assert core.scheduler.stats().preemptions > 0
    assert answers["x", 0].tokens == alone["x", 0].tokens


@pytest.mark.parametrize("params", [{}, dict(temperature=0.8, seed=9)])
def test_plain_and_pipelined_loops_agree(tiny_model, params):
    answers = [
        run(make_core(tiny_model, pipelined=pipelined), [constrained("x", n=3, **params)],
            matchers={"x": [Multiples(15), Multiples(18), Multiples(99)]})
        for pipelined in (False, True)
    ]  # fmt: skip
    for index in range(3):
        one, other = (answer["x", index] for answer in answers)
        assert one.tokens == other.tokens and one.finish == other.finish


def test_the_device_computes_while_masks_are_worked_out(tiny_model):
    """Beside a row with a grammar each step still leaves before the last one is read."""
    core = make_core(tiny_model)
    runner, calls = core.runner, []

    class Recording:
        reset, is_done, compilations = runner.reset, runner.is_done, 0

        def dispatch(self, plan):
            calls.append(("dispatch", plan.step))
            return runner.dispatch(plan)

        def constrain(self, pending, fill_masks):
            calls.append(("constrain", pending.plan.step))
            runner.constrain(pending, fill_masks)

        def fetch(self, pending):
            calls.append(("fetch", pending.plan.step))
            return runner.fetch(pending)

    core.runner = Recording()
    run(core, [constrained("x"), request("plain", [1, 2])], matchers={"x": [Multiples(9)]})
    for step in range(2, 9):
        at = calls.index(("fetch", step))
        assert calls[at - 1] == ("dispatch", step + 1) and calls[at + 1] == ("constrain", step + 1)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_grammar_that_cannot_go_on_ends_its_choice_alone(tiny_model, pipelined):
    plain = request("plain", [1, 2, 3], max_tokens=12, logprobs=1)
    expected = run(make_core(tiny_model), [plain])["plain", 0]
    core = make_core(tiny_model, pipelined=pipelined)
    matchers = {"x": [Multiples(15, fails_at=4), Multiples(15)]}
    answers = run(core, [constrained("x", n=2), plain], matchers=matchers)
    assert answers["x", 0].finish is FinishReason.ERROR
    assert isinstance(answers["x", 0].error, GrammarFailed)
    assert len(answers["x", 0].tokens) == 4 and len(answers["x", 1].tokens) == 15
    assert answers["plain", 0].logprobs == expected.logprobs


def test_aborted_and_refused_grammars_are_forgotten(tiny_model):
    core = make_core(tiny_model)
    with pytest.raises(ValueError):
        core.add(constrained("long", [1] * 300), [Multiples(1)])
    core.add(constrained("gone"), [Multiples(5)])
    core.abort("gone")
    run(core, [])
    assert core.output.num_open == 0
