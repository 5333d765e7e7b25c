"""What another policy would have done with the same arrivals."""

import threading
import types

import pytest

from jaxserve import verbs
from jaxserve.config import SchedulerConfig, ServerConfig
from jaxserve.scheduler.limits import Limits, step_sizes
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim import shadow as shadows
from jaxserve.sim.cost_model import CostModel
from jaxserve.sim.shadow import Shadow, ShadowedScheduler, simulate_job
from jaxserve.types import FinishReason, Request, Sequence
from tests.scheduler_driver import Driver, small_limits

LIMITS = Limits(
    num_slots=2, num_pages=200, page_size=16, token_budget=32, max_model_len=512, vocab_size=100
)
SECOND_A_STEP = CostModel((1.0, 0.0, 0.0, 0.0, 0.0, 0.0))


def ended(request):
    """A sequence with ten tokens of output."""
    sequence = Sequence(request, 0, 100)
    sequence.tokens += [1] * 10
    return sequence


def shadow_of(requests, **options):
    shadow = Shadow(LIMITS, SchedulerConfig(), "vtc", SECOND_A_STEP, **options)
    for request in reversed(requests):  # the last to come may be the first to end
        shadow.on_end(ended(request))
    return shadow


def flood():
    heavy = [Request(f"h{i}", (1,) * 20, tenant="heavy", arrival=0.0) for i in range(30)]
    light = [Request(f"l{i}", (1,) * 20, tenant="light", arrival=1.0) for i in range(3)]
    return heavy + light


def test_the_other_policy_is_fairer():
    """In a process of its own, as when serving."""
    shadow = shadow_of(flood())
    report = shadow.report()
    assert list(report) == ["fcfs", "vtc"] and report is shadow.latest
    waits = {name: summary["groups"]["light"]["ttft_s"]["p50"] for name, summary in report.items()}
    assert waits["vtc"] < waits["fcfs"] / 3
    assert {summary["groups"]["all"]["requests"] for summary in report.values()} == {33}
    assert "fcfs: TTFT p50" in shadow.line() and "| vtc: TTFT p50" in shadow.line()


def test_only_the_latest_and_only_what_produced_tokens():
    shadow = shadow_of(flood(), keep=5)
    shadow.on_end(Sequence(Request("none", (1,), arrival=2.0), 0, 100))
    summaries = simulate_job(shadow.job())
    assert summaries["fcfs"]["groups"]["all"]["requests"] == 5


def test_nothing_to_tell_yet():
    shadow = shadow_of([])
    assert shadow.job() is None and shadow.report() == {} and shadow.line() == ""


def test_the_policy_that_serves_is_no_shadow():
    with pytest.raises(ValueError, match="--shadow_policy=fcfs: that is what serves already"):
        Shadow(LIMITS, SchedulerConfig(), "fcfs")


def test_every_end_of_a_scheduler_is_seen():
    """Tokens and cached tokens as they were; ends by length, abort, stop string and failure."""
    shadow = Shadow(small_limits(), SchedulerConfig(), "vtc", SECOND_A_STEP)
    driver = Driver(wrap=lambda scheduler: ShadowedScheduler(scheduler, shadow))
    options = dict(max_tokens=9, ignore_eos=True)
    driver.send([5] * 12, "whole", **options)
    driver.run()
    driver.send([5] * 14, "cached", tenant="t", priority=3, n=2, **options)
    driver.run()
    driver.send([6] * 2, "aborted", **options)
    driver.send([7] * 2, "stopped", **options)
    for _ in range(4):
        driver.step()
    driver.abort("aborted")
    stopped = next(s for s in driver.scheduler._slots.running() if s.request.id == "stopped")
    driver.scheduler.finish(stopped, FinishReason.STOP, "text")
    driver.scheduler.finish(stopped, FinishReason.STOP, "text")  # once is enough
    driver.send([8] * 2, "failed", **options)
    for _ in range(3):
        driver.step()
    driver.take(driver.scheduler.fail_running(RuntimeError("lost")))
    seen = [(a.prompt, a.output, a.tenant, a.priority) for a in shadow._ended]
    assert seen == [
        (12, 9, "", 0),
        (2, 9, "t", 3),  # three of its four pages were cached
        (1, 9, "t", 3),  # the second choice found all there is in the first one's pages
        (2, 3, "", 0),
        (2, 3, "", 0),
        (2, 2, "", 0),
    ]
    assert {a.time for a in shadow._ended} == {r.arrival for r in driver.requests.values()}


def test_prices_are_fitted_to_the_steps_seen():
    """As good as being told: the same reports as with the prices that the steps had."""
    sizes = step_sizes(small_limits().token_budget)
    truth = CostModel((0.5, 0.01, 0.0, 0.0, 0.0, 0.0), sizes, (1.0,) * len(sizes))
    fitted = Shadow(small_limits(), SchedulerConfig(), "vtc")
    told = Shadow(small_limits(), SchedulerConfig(), "vtc", truth)
    driver = Driver(wrap=lambda scheduler: ShadowedScheduler(scheduler, fitted))
    for length in (3, 40, 17):
        driver.send([length] * length, max_tokens=20, ignore_eos=True)
    driver.run()
    assert fitted.job() is None, "no step was told of"
    for plan in driver.plans:
        fitted.on_step(plan, truth.seconds(plan))
    for sequence in driver.sequences.values():
        told.on_end(sequence)
    found, expected = (simulate_job(shadow.job())["vtc"] for shadow in (fitted, told))
    assert found["seconds"] == pytest.approx(expected["seconds"], rel=1e-6)
    assert found["seconds"] > 10


def test_reports_come_by_themselves_and_at_the_end(monkeypatch, caplog):
    """With news only; a simulation that fails is a warning in the log."""
    monkeypatch.setattr(shadows, "PERIOD_S", 0.001)
    shadow, came, reports = shadow_of(flood()), threading.Event(), []

    def report():
        reports.append(shadow.job())
        came.set()
        raise OSError("no more processes")

    shadow.report = report
    shadow.start()
    assert came.wait(30)
    shadow.on_end(Sequence(flood()[0], 0, 100))  # no token: no news
    shadow.close()
    assert len(reports) == 1 and "no shadow report: no more processes" in caplog.text
    shadow.on_end(ended(flood()[0]))
    shadow.close()
    assert len(reports) == 2


def test_the_flag_puts_it_to_work(tmp_path):
    SECOND_A_STEP.save(tmp_path / "cost.json")
    core = types.SimpleNamespace(scheduler=Scheduler(LIMITS), observers=[])
    assert verbs._shadow(ServerConfig(), None, core) is None
    config = ServerConfig(shadow_policy="vtc", shadow_cost_model=str(tmp_path / "cost.json"))
    shadow = verbs._shadow(config, verbs._shadow_cost(config), core)
    assert isinstance(core.scheduler, ShadowedScheduler) and core.observers == [shadow]
    assert shadow._cost == SECOND_A_STEP and shadow._thread.is_alive()
    shadow.close()
    with pytest.raises(ValueError, match="--shadow_policy=lifo: choose one of fcfs"):
        ServerConfig(shadow_policy="lifo").validate()
