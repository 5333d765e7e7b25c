"""A recorded run is made again byte for byte, and can be told."""

import contextlib
import errno
import os
import pathlib
import random
import stat

import numpy as np
import orjson
import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.obs.decision_log import (
    RecordingScheduler,
    calibrate,
    plan_record,
    read,
    replay,
    run_calibrate,
    run_replay,
)
from jaxserve.obs.explain import explain
from jaxserve.obs.explain import run as run_explain
from jaxserve.scheduler.limits import step_sizes
from jaxserve.sim.cost_model import PARTS, CostModel
from jaxserve.types import FinishReason, RequestRefused
from tests.scheduler_driver import VOCAB_SIZE, Driver, small_limits


def prompt_of(length, first=10):
    return [(first + 7 * i + i * i) % VOCAB_SIZE for i in range(length)]


def recorded_run(path, policy="fcfs", steps=300, pipelined=True, **limits):
    """A run with everything in it: shortage, aborts, refusals, failures, deadlines, stops."""
    draw = random.Random(7)
    limits = small_limits(
        **{**dict(num_slots=4, num_pages=24, token_budget=12, max_queued=10), **limits}
    )
    config = SchedulerConfig(policy=policy, itl_target_ms=900.0, guard_queue_age_s=60.0)
    driver = Driver(
        limits,
        config,
        pipelined=pipelined,
        check=False,
        wrap=lambda scheduler: RecordingScheduler(scheduler, path, {"model": "fake"}),
    )
    driver.lateness = 0.1
    for step in range(steps):
        if draw.random() < 0.4:
            with contextlib.suppress(RequestRefused):
                driver.send(
                    prompt_of(draw.randint(1, 40), draw.randrange(3)),
                    max_tokens=draw.randint(0, 20),
                    n=draw.choice([1, 1, 3]),
                    priority=draw.randrange(3),
                    tenant=draw.choice("ab"),
                    salt=draw.choice(["", "s"]),
                    deadline=driver.now + 40 if draw.random() < 0.3 else None,
                    logit_bias={5: 1.5},
                    stop_token_ids=[9],
                )
        if driver.requests and draw.random() < 0.05:
            driver.abort(draw.choice(list(driver.requests)))
        plan = driver.step()
        if step == 150:
            driver.scheduler.requeue_all()
        if step == 200:
            driver.take(driver.scheduler.fail_running(RuntimeError("lost")))
        if plan is not None and draw.random() < 0.05 and plan.sequences[0].finish is None:
            driver.scheduler.finish(plan.sequences[0], FinishReason.STOP, "stop string")
            driver.ends[plan.sequences[0].id] = FinishReason.STOP
    driver.run()
    driver.scheduler.close()
    return driver


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline", "vtc"])
def test_replay_makes_the_same_plans(tmp_path, policy):
    driver = recorded_run(tmp_path / "log", policy)
    result = replay(tmp_path / "log")
    assert result.differs is None, (result.recorded, result.replayed)
    assert result.plans == len(driver.plans) > 150
    assert driver.scheduler.stats().preemptions > 0


def test_replay_at_another_speed(tmp_path):
    """The pace is the clock's, the times are the log's."""
    driver = recorded_run(tmp_path / "log", pipelined=False)
    slept = []
    result = replay(tmp_path / "log", speed=4.0, sleep=slept.append)
    assert result.differs is None and result.plans == len(driver.plans)
    assert sum(slept) == pytest.approx((driver.now - 1) / 4.0)


def test_replay_finds_the_first_plan_that_differs(tmp_path):
    """Another decision anywhere shows: here the log says that an arrival had one token less."""
    recorded_run(tmp_path / "log")
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines[1:], 1):
        record = orjson.loads(line)
        adds = [call for call in record["calls"] if call[0] == "add"]
        if adds and len(adds[0][1]["prompt_ids"]) > 5:
            adds[0][1]["prompt_ids"].pop()
            lines[number] = orjson.dumps(record) + b"\n"
            break
    (tmp_path / "changed").write_bytes(b"".join(lines))
    result = replay(tmp_path / "changed")
    assert result.differs is not None and result.recorded != result.replayed


def test_the_check_covers_pages_and_tokens():
    driver = Driver()
    driver.send(prompt_of(20))
    plan = driver.step()
    check = plan_record(plan)["check"]
    for name in ("page_table_SP", "token_ids_T", "generation_S"):
        array = getattr(plan, name)
        array.flat[-1] += 1
        assert plan_record(plan)["check"] != check, name
        array.flat[-1] -= 1
    assert plan_record(plan)["check"] == check


def test_the_log_is_private_and_survives_a_crash(tmp_path):
    recorded_run(tmp_path / "log", steps=50)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    whole = (tmp_path / "log").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) - len(whole) // 10])
    plans = replay(tmp_path / "cut").plans
    assert 0 < plans < replay(tmp_path / "log").plans


def test_a_full_disk_ends_the_log_and_nothing_else(caplog):
    full = pathlib.Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    recorded_run(full)
    assert [record.getMessage() for record in caplog.records] == [
        f"the decision log ends here: {os.strerror(errno.ENOSPC)}"
    ]


def test_what_is_not_a_log_is_refused(tmp_path):
    (tmp_path / "x").write_text('{"format": 99}\n')
    with pytest.raises(ValueError, match="not a decision log of format 1"):
        list(read(tmp_path / "x"))
    (tmp_path / "y").write_text("hello\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        list(read(tmp_path / "y"))
    (tmp_path / "torn").write_text('{"format": 1')
    with pytest.raises(ValueError, match="line 1: not JSON"):
        list(read(tmp_path / "torn"))
    (tmp_path / "empty").write_text("")
    for use in (list, replay, calibrate):
        with pytest.raises(ValueError, match="empty, not a decision log"):
            use(read(tmp_path / "empty") if use is list else tmp_path / "empty")


def test_explain_tells_a_life(tmp_path):
    """Two slots, long neighbours: it waits, comes in chunks, is preempted and ends."""
    driver = Driver(
        small_limits(num_slots=3, num_pages=22, token_budget=8),
        check=False,
        wrap=lambda scheduler: RecordingScheduler(scheduler, tmp_path / "log"),
    )
    for index in range(4):
        driver.send(prompt_of(15, index), f"r{index}", max_tokens=25, ignore_eos=True, tenant="t")
    driver.run().check_outputs()
    driver.scheduler.close()
    victim = next(p.preempted[0].sequence_id[0] for p in driver.plans if p.preempted)
    story = "\n".join(explain(tmp_path / "log", victim))
    assert "Arrived with 15 prompt tokens, asking for 1 choice of up to 25 tokens" in story
    assert "lost its place: slot" in story and "resumed" in story
    assert "ended (length)" in story and "first token, after" in story
    last = "\n".join(explain(tmp_path / "log", "r3"))
    assert "because every slot is taken" in last or "was ahead" in last or "too few pages" in last
    with pytest.raises(ValueError, match=r"knows no request 'nobody'$"):
        explain(tmp_path / "log", "nobody")
    with pytest.raises(ValueError, match=r"knows no request '3'; did you mean r3\?"):
        explain(tmp_path / "log", "3")


@pytest.mark.parametrize("end", ["abort", "finish", "fail"])
def test_explain_knows_how_many_run(tmp_path, end):
    """Whatever ends them: of two that run one ends, then the other by its length."""
    driver = Driver(
        small_limits(num_slots=2),
        check=False,
        wrap=lambda scheduler: RecordingScheduler(scheduler, tmp_path / "log"),
    )
    for name in ("r0", "r1"):
        driver.send(prompt_of(4), name, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        driver.step()
    if end == "abort":
        driver.abort("r0")
    elif end == "finish":
        (first, _) = driver.plans[-1].sequences
        driver.scheduler.finish(first, FinishReason.STOP, "stop")
    else:
        driver.lose_device(keep_running=False)
    driver.send(prompt_of(5), "r2", max_tokens=2)
    driver.run()
    driver.send(prompt_of(5), "r3", max_tokens=2)
    driver.run()
    driver.scheduler.close()
    (arrival, *_) = explain(tmp_path / "log", "r2")
    assert arrival.endswith(" 0 sequences ran." if end == "fail" else " 1 sequence ran.")
    (arrival, *_) = explain(tmp_path / "log", "r3")
    assert arrival.endswith(" 0 sequences ran.")


def test_the_verbs(tmp_path):
    recorded_run(tmp_path / "log")
    lines = []
    assert run_replay(tmp_path / "log", out=lines.append) == 0
    assert run_calibrate(tmp_path / "log", cost_model=tmp_path / "cost", out=lines.append) == 0
    assert run_explain(tmp_path / "log", request="r0", out=lines.append) == 0
    text = "\n".join(lines)
    assert "byte for byte the same" in text and "steps, mean error" in text and "Arrived" in text
    assert CostModel.load(tmp_path / "cost").steps > 100


def test_explain_tells_of_a_refusal(tmp_path):
    driver = Driver(wrap=lambda s: RecordingScheduler(s, tmp_path / "log"))
    with pytest.raises(RequestRefused):
        driver.send(prompt_of(64), "big")
    driver.scheduler.close()
    (sentence,) = explain(tmp_path / "log", "big")
    assert "Refused: the prompt has 64 tokens" in sentence


def test_calibrate_finds_the_prices_back(tmp_path):
    """The clock of the recording is moved by known prices; the fit returns them."""
    prices = np.array([5e-3, 2e-4, 1e-4, 3e-6, 1e-6, 4e-3])
    sizes = step_sizes(64)
    truth = CostModel(tuple(prices), sizes, (1.0,) * len(sizes))
    driver = Driver(
        small_limits(
            num_slots=8,
            num_pages=64,
            token_budget=64,
            max_model_len=200,
            host_pages=100,
            prefix_caching=False,
        ),
        pipelined=False,
        check=False,
        wrap=lambda scheduler: RecordingScheduler(scheduler, tmp_path / "log"),
    )
    draw = random.Random(1)
    for _ in range(60):
        driver.send(prompt_of(draw.randint(1, 150), 3), max_tokens=draw.randint(1, 30))
    scheduler = driver.scheduler
    while scheduler.has_work:
        plan = scheduler.plan(driver.now)
        result = driver.runner.dispatch(plan)
        driver.now += truth.seconds(plan)
        scheduler.absorb(plan, result, driver.now)
    scheduler.close()
    model = calibrate(tmp_path / "log")
    np.testing.assert_allclose(model.price, prices, rtol=1e-3)
    assert model.error < 1e-6 and model.steps > 50
    model.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == model
    assert len(model.price) == len(PARTS)


def test_cost_models_that_are_not(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is not a cost model"):
        CostModel.load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="too few"):
        CostModel.fit(np.ones((3, 6)), np.ones(3))


def test_the_log_of_an_idle_server_is_complete(tmp_path):
    """Nothing is closed: the last ends are in the file, twice, and the plans between them too."""
    driver = Driver(
        small_limits(num_slots=1),
        wrap=lambda scheduler: RecordingScheduler(scheduler, tmp_path / "log"),
    )
    for name in ("first", "second"):
        driver.send(prompt_of(5), name, max_tokens=3, ignore_eos=True)
        driver.run()
        assert "ended (length)" in explain(tmp_path / "log", name)[-1]
    assert replay(tmp_path / "log").plans == len(driver.plans)


def test_a_deadline_in_the_queue_is_told(tmp_path):
    driver = Driver(
        small_limits(num_slots=1),
        wrap=lambda scheduler: RecordingScheduler(scheduler, tmp_path / "log"),
    )
    driver.send(prompt_of(5), "runs", max_tokens=30, ignore_eos=True)
    driver.step()
    driver.send(prompt_of(5), "waits", deadline=driver.now + 6)
    driver.run()
    told = explain(tmp_path / "log", "waits")
    assert "still queued because every slot is taken (5 steps)" in told[-2]
    assert "ended (timeout)" in told[-1] and "Of 6.000 s it queued 6.000 s" in told[-1]


@pytest.mark.parametrize("names", [("one", "one", "one"), ("one", "two", "three")])
def test_one_that_gave_its_slot_away_before_its_end_is_not_said_to_wait(tmp_path, names):
    """Three choices by one slot, of one request or of three: each ends in the step after the next
    one has the slot."""
    driver = Driver(
        small_limits(num_slots=1),
        wrap=lambda scheduler: RecordingScheduler(scheduler, tmp_path / "log"),
    )
    for name in sorted(set(names)):
        count = names.count(name)
        driver.send(prompt_of(5), name, n=count, max_tokens=3, ignore_eos=True)
    driver.run()
    for name in names:
        told = "\n".join(explain(tmp_path / "log", name))
        assert told.count("ended (length) after 2 decoding steps") == names.count(name)
        assert told.count("having waited") == names.count(name) and "still queued" not in told
