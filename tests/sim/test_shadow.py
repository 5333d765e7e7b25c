"""What another policy would have done with the same arrivals."""

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.limits import Limits
from jaxserve.sim.cost_model import CostModel
from jaxserve.sim.shadow import Shadow
from jaxserve.types import Request

LIMITS = Limits(
    num_slots=2, num_pages=200, page_size=16, token_budget=32, max_model_len=512, vocab_size=100
)
SECOND_A_STEP = CostModel((1.0, 0.0, 0.0, 0.0, 0.0))


def shadow_of(requests, **options):
    shadow = Shadow(LIMITS, SchedulerConfig(), "vtc", SECOND_A_STEP, **options)
    for request in requests:
        shadow.on_arrival(request)
    for request in reversed(requests):  # the last to come may be the first to end
        shadow.on_end(request.id, 10)
    return shadow


def flood():
    heavy = [Request(f"h{i}", (1,) * 20, tenant="heavy", arrival=0.0) for i in range(30)]
    light = [Request(f"l{i}", (1,) * 20, tenant="light", arrival=1.0) for i in range(3)]
    return heavy + light


def test_the_other_policy_is_fairer():
    reports = shadow_of(flood()).report()
    assert set(reports) == {"fcfs", "vtc"}
    waits = {name: report.group("light").ttft.quantile(0.5) for name, report in reports.items()}
    assert waits["vtc"] < waits["fcfs"] / 3
    counts = {len(report.group("all").e2e) for report in reports.values()}
    assert counts == {33}


def test_only_the_latest_and_only_what_produced_tokens():
    shadow = shadow_of(flood(), keep=5)
    shadow.on_arrival(Request("none", (1,), arrival=2.0))
    shadow.on_end("none", 0)
    shadow.on_end("unknown", 7)
    assert len(shadow.report()["fcfs"].group("all").e2e) == 5


def test_nothing_to_tell_yet():
    assert shadow_of([]).report()["vtc"].seconds == 0.0
