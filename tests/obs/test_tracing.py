"""Spans by hand, over HTTP and with the real scheduler; their times come from clocks set here."""

import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra [otel]")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxserve.obs.tracing import Tracing

SECOND = 10**9
NOW_S, NOW_NS = 50.0, 1_000 * SECOND
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    """A Tracing and what it finished."""

    def __init__(self, **clocks):
        self._memory = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracing = Tracing(provider, **clocks)

    @property
    def finished(self):
        return self._memory.get_finished_spans()


@pytest.fixture
def spans():
    return Spans(clock=lambda: NOW_S, wall_ns=lambda: NOW_NS)


def step_with(*names):
    admits = [(0, SimpleNamespace(request=SimpleNamespace(id=name))) for name in names]
    return SimpleNamespace(admits=admits)


def test_a_life_from_queue_to_end(spans):
    span = spans.tracing.request("cmpl-1", NOW_S - 2, {"traceparent": PARENT}, {"a": 1})
    spans.tracing.on_step(step_with("cmpl-2", "cmpl-1-0"), 0.5)
    spans.tracing.on_step(step_with("cmpl-1-1"), 0.25)  # its second prompt: no news
    span.saw_tokens(0)
    span.saw_tokens(3)
    span.saw_tokens(2)
    span.end("length")
    (found,) = spans.finished
    assert found.start_time == NOW_NS - 2 * SECOND
    names = [(event.name, event.timestamp) for event in found.events]
    assert names == [
        ("queued", NOW_NS - 2 * SECOND),
        ("prefill", NOW_NS - SECOND // 2),
        ("decode", NOW_NS),
    ]
    assert found.end_time == NOW_NS
    assert found.attributes["gen_ai.usage.output_tokens"] == 5 and found.attributes["a"] == 1
    assert found.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert found.status.is_unset or found.status.is_ok
    assert f"{found.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{found.parent.span_id:016x}" == PARENT.split("-")[2]


def test_times_are_in_order_whatever_the_wall_clock_does():
    clock, wall = itertools.count(100), itertools.count(9 * 10**18, -(10**15))
    spans = Spans(clock=lambda: next(clock), wall_ns=lambda: next(wall))
    span = spans.tracing.request("a", 99.5, {}, {})
    spans.tracing.on_step(step_with("a"), 30.0)  # a step that began before the request came
    span.saw_tokens(1)
    span.end("stop")
    (found,) = spans.finished
    times = [event.timestamp for event in found.events]
    assert [time - found.start_time for time in times] == [0, 0, 5 * SECOND // 2]
    assert found.end_time - found.start_time == 7 * SECOND // 2


def test_faults_and_refusals_are_errors(spans):
    spans.tracing.request("a", NOW_S, {}, {}).refused("queue_full")
    spans.tracing.request("b", NOW_S, {"traceparent": "rubbish"}, {}).end("error")
    spans.tracing.on_step(step_with("a", "b"), 0.1)  # ended: nobody to tell
    refused, failed = spans.finished
    assert refused.attributes["error.type"] == "queue_full" and not refused.status.is_ok
    assert failed.attributes["error.type"] == "error" and failed.parent is None


def test_without_the_packages_the_flag_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"jaxserve\[otel\]"):
        Tracing.connect("http://127.0.0.1:1/v1/traces")
