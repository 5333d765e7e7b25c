"""The asyncio door: many coroutines, one engine thread, nothing lost whatever happens."""

import asyncio
import contextlib
import pathlib
import queue
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.async_engine import AsyncEngine, _Stream
from jaxserve.engine.core import EngineCore
from jaxserve.engine.output import OutputStage
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import (
    EngineFailed,
    EngineStopped,
    FinishReason,
    OutputDelta,
    RequestRefused,
    SamplingParams,
    StepResult,
)
from tests.engine.harness import VOCAB, IdTokenizer

CONFIG = EngineConfig(
    num_slots=4, token_budget=16, num_pages=65, page_size=4, max_model_len=64, max_queued=16
)


class CountingRunner:
    """Every row's next token is its position modulo the vocabulary. gate: closed, steps wait."""

    compilations = 0

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.fail_next = False
        self.dispatched = threading.Event()
        self.rows = []  # of each step

    def dispatch(self, plan):
        self.rows.append(plan.num_rows)
        self.dispatched.set()
        return plan

    def constrain(self, plan, fill_masks):
        pass

    def is_done(self, plan):
        return False

    def fetch(self, plan):
        self.gate.wait()
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is gone")
        end_S = plan.start_S + np.diff(plan.cu_q_len_S1)
        return StepResult((end_S % VOCAB).astype(np.int32))

    def reset(self):
        pass


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@contextlib.contextmanager
def engine(warm_up=lambda: None):
    scheduler = Scheduler.from_config(CONFIG, eos_ids=(), vocab_size=VOCAB, cache_key=b"test")
    core = EngineCore(scheduler, CountingRunner(), OutputStage(IdTokenizer()), Clock())
    made = AsyncEngine(core, IdTokenizer(), config=CONFIG, model_name="m", warm_up=warm_up)
    try:
        yield made
    finally:
        core.runner.gate.set()
        made.shutdown()
        stats = core.stats()
        assert stats.running == stats.waiting == 0 and stats.pages_free == stats.pages_total


async def gather(engine, prompt, **params):
    """Tokens and finish reasons by choice."""
    params = SamplingParams(**{"max_tokens": 5, "temperature": 0.0, **params})
    tokens, reasons = {}, {}
    async for deltas in engine.generate(prompt, params):
        for delta in deltas:
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                reasons[delta.index] = delta.finish_reason
    return tokens, reasons


def test_many_coroutines_each_get_their_own():
    async def main(engine):
        lengths = range(1, 9)
        found = await asyncio.gather(*(gather(engine, [7] * length, n=2) for length in lengths))
        for length, (tokens, reasons) in zip(lengths, found):
            expected = list(range(length, length + 5))
            assert tokens == {0: expected, 1: expected}
            assert set(reasons.values()) == {FinishReason.LENGTH}

    with engine() as made:
        asyncio.run(main(made))


def test_a_loop_of_its_own_in_each_thread():
    found = {}
    with engine() as made:
        threads = [
            threading.Thread(
                target=lambda i=i: found.update({i: asyncio.run(gather(made, [1] * i))})
            )
            for i in (2, 3, 4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {i: tokens[0] for i, (tokens, _) in found.items()} == {
        i: list(range(i, i + 5)) for i in (2, 3, 4)
    }


def test_leaving_early_frees_everything():
    async def main(engine):
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=50, temperature=0.0))
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(gather(engine, [5] * 9, max_tokens=50))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await gather(engine, [1])

    with engine() as made:
        asyncio.run(main(made))


def test_refusals_reach_the_one_who_asked():
    async def main(engine):
        with pytest.raises(RequestRefused, match="64") as refused:
            await gather(engine, [1] * 64)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(RequestRefused, match="between 0 and 383"):
            await gather(engine, [VOCAB])
        engine.core.runner.gate.clear()  # all are in the inbox before the engine looks again
        tasks = [asyncio.create_task(gather(engine, [1] * 30, max_tokens=30)) for _ in range(40)]
        await asyncio.sleep(0)
        engine.core.runner.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        assert {error.code for error in errors} == {"queue_full"}
        assert errors[0].retry_after > 0
        assert len(results) - len(errors) >= 16

    with engine() as made:
        asyncio.run(main(made))


def test_a_request_id_is_used_once_at_a_time():
    async def main(engine):
        params = SamplingParams(max_tokens=50, temperature=0.0)
        engine.core.runner.gate.clear()
        first = engine.generate([1], params, request_id="x")
        tasks = [asyncio.create_task(anext(first))]
        while not engine.core.has_work:
            await asyncio.sleep(0)
        second = engine.generate([1], params, request_id="x")
        tasks.append(asyncio.create_task(anext(second)))
        await asyncio.sleep(0)
        engine.core.runner.gate.set()
        _, refused = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(refused, RequestRefused) and "in use" in str(refused)
        async for _ in first:
            pass
        async for _ in engine.generate([1], params, request_id="x"):
            pass

    with engine() as made:
        asyncio.run(main(made))


def test_a_failed_step_fails_its_requests_and_serves_the_next():
    async def main(engine):
        engine.core.runner.fail_next = True
        with pytest.raises(EngineFailed):
            await gather(engine, [1, 2])
        tokens, _ = await gather(engine, [1, 2])
        assert tokens == {0: [2, 3, 4, 5, 6]}

    with engine() as made:
        asyncio.run(main(made))


def test_deadlines_end_queued_and_running_requests():
    async def main(engine):
        params = SamplingParams(max_tokens=50, temperature=0.0)
        engine.core.runner.gate.clear()
        stream = engine.generate([1], params, timeout_s=5)
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        engine.core.clock.now += 10
        engine.core.runner.gate.set()
        deltas = await task
        while deltas[-1].finish_reason is None:
            deltas = await anext(stream)
        assert deltas[-1].finish_reason is FinishReason.TIMEOUT

    with engine() as made:
        asyncio.run(main(made))


def test_an_idle_engine_takes_no_time():
    """It sleeps until somebody wakes it, without a time at which it would look again."""
    with engine() as made:
        made.wait_until_ready()
        waits, wait = queue.SimpleQueue(), made._wake.wait
        made._wake.wait = lambda timeout=None: (waits.put(timeout), wait(timeout))
        asyncio.run(gather(made, [1]))
        assert None in (waits.get(timeout=60) for _ in range(100)), "every wait has an end"
        for _ in range(2000):
            made.health()
        assert waits.empty()


def test_the_next_step_waits_for_arrivals_while_it_may():
    async def main(engine):
        core, runner = engine.core, engine.core.runner
        core.plan_due = lambda: 1e6 if core.in_flight else 0.0
        first = asyncio.create_task(gather(engine, [1]))
        await asyncio.to_thread(runner.dispatched.wait)
        second = asyncio.create_task(gather(engine, [2]))
        while not core.scheduler.num_waiting:
            await asyncio.sleep(0)
        assert runner.rows == [1]  # it was let in, and the engine waits on
        del core.plan_due
        engine.abort("nobody")  # wakes it up
        await asyncio.gather(first, second)
        assert runner.rows[:3] == [1, 2, 2]

    with engine() as made:
        asyncio.run(main(made))


def test_it_ends_while_it_waits_for_arrivals():
    with engine() as made:
        made.core.plan_due = lambda: 1e6 if made.core.in_flight else 0.0

        async def ask():
            task = asyncio.create_task(gather(made, [1]))
            await asyncio.to_thread(made.core.runner.dispatched.wait)
            await asyncio.to_thread(made.shutdown)
            with pytest.raises(EngineFailed):
                await task

        asyncio.run(ask())
        made.core.abort(*made.core.scheduler._requests.ids)


def test_health_from_start_to_end():
    compiled = threading.Event()
    with engine(warm_up=compiled.wait) as made:
        clock = made.core.clock
        assert made.health().state == "starting"
        clock.now += 1000
        assert made.health().state == "starting"  # a long compile is not a stuck device
        compiled.set()
        made.wait_until_ready()
        assert made.health().state == "ready"
        clock.now += 1000
        assert made.health().state == "ready"  # idle is healthy

        async def get_stuck():
            made.core.runner.gate.clear()
            task = asyncio.create_task(gather(made, [1]))
            while not made.core.has_work:
                await asyncio.sleep(0)
            assert made.health().state == "ready"
            clock.now += 121
            assert made.health().state == "stuck"
            made.core.runner.gate.set()
            await task
            assert made.health().state == "ready"

        asyncio.run(get_stuck())
        assert made.drain(timeout_s=60)
        assert made.health().state == "draining"
        with pytest.raises(RequestRefused) as refused:
            asyncio.run(gather(made, [1]))
        assert refused.value.code == "shutting_down"


def test_a_warm_up_that_fails_is_told_to_everyone():
    def broken():
        raise ValueError("no such instruction")

    with engine(warm_up=broken) as made:
        with pytest.raises(EngineFailed, match="no such instruction"):
            made.wait_until_ready()
        assert made.health().state == "dead"
        with pytest.raises(EngineFailed):
            asyncio.run(gather(made, [1]))


def test_draining_lets_running_requests_finish():
    async def main(engine):
        engine.core.runner.gate.clear()  # it must not be done before we see it run
        task = asyncio.create_task(gather(engine, [1], max_tokens=40))
        while not engine.core.has_work:
            await asyncio.sleep(0)
        draining = asyncio.create_task(asyncio.to_thread(engine.drain, 60))
        engine.core.runner.gate.set()
        assert await draining
        tokens, reasons = await task
        assert len(tokens[0]) == 40 and reasons == {0: FinishReason.LENGTH}

    with engine() as made:
        asyncio.run(main(made))


def test_shutting_down_fails_what_is_open():
    async def main(engine):
        engine.core.runner.gate.clear()
        task = asyncio.create_task(gather(engine, [1], max_tokens=40))
        while not engine.core.has_work:
            await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        while engine.health().state != "stopped":
            await asyncio.sleep(0)
        engine.core.runner.gate.set()
        await closing
        with pytest.raises(EngineStopped):
            await task

    scheduler = Scheduler.from_config(CONFIG, eos_ids=(), vocab_size=VOCAB, cache_key=b"test")
    core = EngineCore(scheduler, CountingRunner(), OutputStage(IdTokenizer()), Clock())
    asyncio.run(main(AsyncEngine(core, IdTokenizer(), config=CONFIG)))


def test_python_ends_after_the_engine_thread():
    """Python's end kills what threads are left wherever they are: in native code, with an abort."""
    code = """
import atexit, asyncio
from tests.engine import test_async_engine as tests
atexit.register(lambda: print("thread alive:", engine._thread.is_alive()))
scheduler = tests.Scheduler.from_config(tests.CONFIG, eos_ids=(), vocab_size=tests.VOCAB)
output = tests.OutputStage(tests.IdTokenizer())
core = tests.EngineCore(scheduler, tests.CountingRunner(), output, tests.Clock())
engine = tests.AsyncEngine(core, tests.IdTokenizer(), config=tests.CONFIG)
asyncio.run(tests.gather(engine, [1]))
raise KeyboardInterrupt
"""
    root = pathlib.Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert ended.stdout == "thread alive: False\n", ended.stderr


def test_an_end_that_arrives_with_the_last_tokens_is_not_missed():
    """Tokens and the failure reach the loop in one turn: both must come out."""

    async def main():
        stream = _Stream(asyncio.get_running_loop(), 1)
        stream.put(OutputDelta(0, token_ids=[3]))
        stream.fail(EngineFailed("gone"))
        assert [delta.token_ids for delta in await stream.take()] == [[3]]
        with pytest.raises(EngineFailed, match="gone"):
            await asyncio.wait_for(stream.take(), 60)

    asyncio.run(main())
