"""Runs in process, over the real loop and scheduler with a made-up device."""

import types

import numpy as np
import pytest

from jaxserve.bench import offline
from jaxserve.bench.steps import StepLog
from jaxserve.bench.workload import Item, Workload
from jaxserve.config import EngineConfig
from jaxserve.engine.core import EngineCore
from jaxserve.engine.output import OutputStage
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim.fake_runner import FakeRunner

VOCAB, SLOTS, PAGES, PAGE = 64, 2, 65, 4


class IdTokenizer:
    vocab_size = VOCAB
    drops_first_space = False

    def table(self, skip_special_tokens=True):
        return [f"{i} ".encode() for i in range(VOCAB)]


class Clock:
    """Stands still until somebody sleeps, or a step is absorbed."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def make_core(clock, **settings):
    config = EngineConfig(
        num_slots=SLOTS,
        num_pages=PAGES,
        page_size=PAGE,
        token_budget=16,
        max_model_len=64,
        **settings,
    )
    scheduler = Scheduler.from_config(config, eos_ids=(), vocab_size=VOCAB, cache_key=b"test")
    runner = FakeRunner(SLOTS, PAGES, PAGE, VOCAB)
    core = EngineCore(scheduler, runner, OutputStage(IdTokenizer()), clock, pipelined=False)
    fetch = runner.fetch

    def timed(pending):
        clock.now += 0.5  # every step takes half a second
        return fetch(pending)

    runner.fetch = timed
    return core


def test_times_of_a_run():
    clock = Clock()
    items = (Item("a", tuple(range(8)), 3), Item("b", (1, 2, 3), 1, arrival=10.0))
    records, log = offline.run(make_core(clock), Workload("w", items), sleep=clock.sleep)
    first, second = records
    assert first.sent == 100.0 and first.stamps == [100.5, 101.0, 101.5]
    assert (first.output_tokens, first.prompt_tokens, first.error) == (3, 8, None)
    assert second.sent == 110.0 and second.stamps == [110.5]  # it slept until its time
    assert log.columns()["rows"].tolist() == [1, 1, 1, 1]
    assert log.columns()["end"].tolist() == [0.5, 1.0, 1.5, 10.5]


def test_a_turn_follows_the_one_before():
    clock = Clock()
    items = (Item("a", (1, 2), 2), Item("b", (1, 2, 3), 1, arrival=4.0, after="a"))
    records, _ = offline.run(make_core(clock), Workload("w", items), sleep=clock.sleep)
    assert records[0].stamps[-1] == 101.0 and records[1].sent == 105.0


@pytest.mark.parametrize(
    ("batching", "steps", "busy"), [("continuous", 8, 1.0), ("static", 11, None)]
)
def test_static_leaves_slots_empty(batching, steps, busy):
    """Two slots; outputs of 8, 2, 3 and 3 tokens. Continuous fits the three short ones beside the
    long one: 8 steps. Static serves (8, 2), then (3, 3): 11, and slots idle while two wait."""
    clock = Clock()
    sizes = (8, 2, 3, 3)
    items = tuple(Item(f"r{n}", (n, n + 1), size) for n, size in enumerate(sizes))
    core = make_core(clock, batching=batching)
    records, log = offline.run(core, Workload("w", items), sleep=clock.sleep)
    assert [record.output_tokens for record in records] == list(sizes)
    summary = log.summary()
    assert summary["steps"] == steps
    assert summary["occupancy"] == pytest.approx(sum(sizes) / (steps * SLOTS))
    if busy is not None:
        assert summary["occupancy_queued"] == busy
    else:
        assert summary["occupancy_queued"] == pytest.approx(10 / 16)  # 8 steps, two wait in each


def test_occupancy_is_weighed_by_time():
    log = StepLog(make_core(Clock()))
    none = np.zeros(0, np.int32)
    for rows, seconds in ((2, 3.0), (1, 1.0)):
        slots = np.zeros(rows, np.int32)
        arrays = (slots, none, none, np.zeros(1, np.int32), none, none, none)
        plan = StepPlan(1, (), *arrays, num_decode=rows, waiting=("somebody",))
        log.on_step(plan, seconds)
    assert log.summary()["occupancy_queued"] == pytest.approx((1.0 * 3 + 0.5 * 1) / 4)


def test_any_number_of_requests_may_come_at_once():
    config = EngineConfig(num_slots=SLOTS, num_pages=PAGES, token_budget=16, max_model_len=64)
    runner = FakeRunner(SLOTS, PAGES, config.page_size, VOCAB)
    runner.spec = types.SimpleNamespace(num_tokens=VOCAB)
    engine = types.SimpleNamespace(
        config=config,
        core=types.SimpleNamespace(runner=runner),
        model=types.SimpleNamespace(eos_ids=()),
        tokenizer=IdTokenizer(),
    )
    items = tuple(Item(f"r{n}", (1, 2), 1) for n in range(config.max_queued + 10))
    records, _ = offline.run(offline.fresh_core(engine), Workload("many", items))
    assert len(records) == len(items) and all(record.output_tokens == 1 for record in records)
