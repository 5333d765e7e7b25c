"""Masks that are late, or always slow: their rows wait for them, and nobody else does."""

import threading
import time

import pytest

from jaxserve.engine.masks import SLOW_S, Constraint, MaskMaker
from jaxserve.grammar.spec import TakesLonger
from jaxserve.obs.decision_log import RecordingScheduler, replay
from jaxserve.types import FinishReason
from tests.engine.harness import VOCAB, Multiples, collect, constrained, make_core, request, run

WORDS = VOCAB // 32


class Stuck(Multiples):
    """No mask after `at` tokens until the gate opens, and none at once."""

    def __init__(self, length, at):
        super().__init__(length)
        self.at, self.gate = at, threading.Event()

    def fill_mask(self, row):
        if self.count == self.at:
            if not self.patient:
                raise TakesLonger
            assert self.gate.wait(60)
        super().fill_mask(row)


class Slow(Multiples):
    """Every mask takes more of a processor than a quick one may."""

    def __init__(self, length):
        super().__init__(length, patient=True)

    def fill_mask(self, row):
        end = time.thread_time() + 1.2 * SLOW_S
        while time.thread_time() < end:
            pass
        super().fill_mask(row)


def plain(name="plain"):
    return request(name, [1, 2, 3], max_tokens=30, logprobs=1)


def alone(model, params, matchers):
    return run(make_core(model), [constrained("x", **params)], matchers={"x": matchers})


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("params", [{}, dict(temperature=1.0, seed=4, repetition_penalty=1.2)])
def test_a_row_waits_for_its_mask_alone(tiny_model, pipelined, at, params):
    expected = alone(tiny_model, params, [Multiples(9)]) | run(make_core(tiny_model), [plain()])
    core = make_core(tiny_model, pipelined=pipelined)
    stuck, answers = Stuck(9, at), {}
    core.add(constrained("x", **params), [stuck])
    core.add(plain())
    while ("plain", 0) not in answers or answers["plain", 0].finish is None:
        collect(core, answers, core.step())
        core.scheduler.check_invariants()
    told = answers["x", 0].tokens if ("x", 0) in answers else []
    assert told == expected["x", 0].tokens[: max(0, at - 1)]  # what the grammar has not taken
    stuck.gate.set()
    while core.has_work:
        collect(core, answers, core.step())
    assert answers["x", 0].tokens == expected["x", 0].tokens
    assert answers["x", 0].finish is FinishReason.STOP
    assert answers["plain", 0].logprobs == expected["plain", 0].logprobs


def test_slow_rows_are_not_planned_before_their_masks(tiny_model):
    """So they are computed once a token, as if nothing overlapped."""
    expected = alone(tiny_model, {}, [Multiples(9)])
    core = make_core(tiny_model)
    answers = run(core, [constrained("x", n=2), plain()], matchers={"x": [Slow(9), Slow(9)]})
    for index in range(2):
        assert answers["x", index].tokens == expected["x", 0].tokens
    planned = 30 + 2 * (3 + 8) - 1
    assert core.scheduler.stats().computed_tokens <= planned + 2 + 2


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_request_that_leaves_while_its_mask_is_made_leaves_nothing(tiny_model, pipelined):
    core, stuck = make_core(tiny_model, pipelined=pipelined), Stuck(9, 3)
    core.add(constrained("x"), [stuck])
    answers = {}
    for _ in range(12):
        collect(core, answers, core.step())
    collect(core, answers, core.abort("x"))
    assert answers["x", 0].finish is FinishReason.ABORT
    assert len(answers["x", 0].tokens) == 3  # the last one too, which its grammar never took
    assert not core.output.waits and core.output.num_open == 0
    run(core, [plain()])  # and the others go on
    stuck.gate.set()


def test_preempted_while_its_mask_is_made(tiny_model):
    expected = alone(tiny_model, {}, [Multiples(9)])
    core, stuck = make_core(tiny_model), Stuck(9, 4)

    def between(core, step):
        if step == 10:
            core.scheduler.requeue_all()
        if step == 14:
            stuck.gate.set()

    answers = run(core, [constrained("x"), plain()], matchers={"x": [stuck]}, between=between)
    assert answers["x", 0].tokens == expected["x", 0].tokens
    assert core.scheduler.stats().preemptions == 2


def test_what_masks_decide_is_in_the_log(tiny_model, tmp_path):
    core = make_core(tiny_model)
    core.scheduler = RecordingScheduler(core.scheduler, tmp_path / "log")
    run(core, [constrained("x"), plain()], matchers={"x": [Slow(9)]})
    core.scheduler.close()
    assert '"hold"' in (tmp_path / "log").read_text()
    assert replay(tmp_path / "log").differs is None


class Named:
    """A patient matcher that says when it is asked."""

    done, patient = False, True

    def __init__(self, name, order, gate=None):
        self.name, self.order, self.gate = name, order, gate

    def fill_mask(self, row):
        if self.gate is not None:
            assert self.gate.wait(60)
        self.order.append(self.name)


def test_the_least_slow_goes_first_and_the_unwanted_never():
    masks, order, gate, constraints = MaskMaker(), [], threading.Event(), []
    for name, seconds in (("first", 1.0), ("slowest", 9.0), ("unwanted", 2.0), ("slow", 3.0)):
        constraint = Constraint(Named(name, order, gate if name == "first" else None), WORDS)
        constraint.seconds = seconds
        constraints.append(constraint)
    masks.begin(constraints)
    constraints[2].wanted = False
    masks.wait(0)  # for nobody: all of them are slow
    gate.set()
    while any(constraint.busy for constraint in constraints):
        masks.wait_for_any(1.0)
    assert order == ["first", "slow", "slowest"]


def test_most_masks_need_no_thread():
    masks = MaskMaker()
    constraints = [Constraint(Multiples(9), WORDS) for _ in range(4)]
    masks.begin(constraints)
    assert not any(constraint.busy for constraint in constraints)
    assert not masks._soon._threads and not masks._later._threads
