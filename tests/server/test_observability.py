"""Metrics, the load line, and what errors and logs must never tell."""

import logging
import pathlib
import re
import types

import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from test_completions import error_of

from jaxserve.obs.metrics import Metrics
from jaxserve.scheduler.guard import Action
from jaxserve.scheduler.stats import Stats
from jaxserve.server import report
from jaxserve.types import RequestRefused
from tests.server.conftest import Client


def scrape(client):
    """{(series, labels): value}"""
    text = client.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples, name, **labels):
    return samples[name, tuple(sorted(labels.items()))]


def test_requests_are_counted_and_timed_under_both_names(client):
    client.complete(prompt="a", max_tokens=3)
    client.complete(prompt="a", max_tokens=5, stream=True)
    samples = scrape(client)
    for prefix, labels in (("jaxserve:", {}), ("vllm:", {"model_name": "fake-model"})):
        count = lambda name, **more: value(samples, prefix + name, **labels, **more)  # noqa: B023
        assert count("request_success_total", finished_reason="length") == 2
        assert count("request_success_total", finished_reason="abort") == 0
        assert count("time_to_first_token_seconds_count") == 2
        assert count("inter_token_latency_seconds_count") == 2
        assert count("e2e_request_latency_seconds_count") == 2
        assert count("request_generation_tokens_sum") == 8
        assert count("num_requests_running") == 0
    assert value(samples, "jaxserve:kv_pages_free") == 100
    assert value(samples, "vllm:kv_cache_usage_perc", model_name="fake-model") == 0


def test_what_a_shadow_policy_would_have_done():
    shadow = types.SimpleNamespace(latest={})
    metrics = Metrics(FakeEngine().stats, "m", shadow)
    assert b"shadow_ttft_seconds{" not in metrics.render()[0]
    times = {"ttft_s": {"p50": 0.25, "p99": 2.0}, "itl_s": {"p99": 0.5}}
    shadow.latest = {"vtc": {"groups": {"all": times}, "output_tokens_per_s": 12.5}}
    text = metrics.render()[0].decode()
    assert 'jaxserve:shadow_ttft_seconds{policy="vtc",quantile="p99"} 2.0' in text
    assert 'jaxserve:shadow_itl_seconds{policy="vtc",quantile="p99"} 0.5' in text
    assert 'jaxserve:shadow_tokens_per_second{policy="vtc"} 12.5' in text


def test_version_tells_what_runs_and_no_file_names(client):
    body = client.get("/version").json()
    assert body["model"] == "fake-model" and body["config"] == {"num_slots": 4}
    assert re.match(r"\d+\.\d+", body["version"])


def test_labels_are_bounded_whatever_clients_send(client):
    client.complete(prompt="a", max_tokens=1)
    client.get("/nowhere/0")
    client.post("/v1/completions", {"model": "m", "prompt": "a"})
    before = len(client.get("/metrics").text.splitlines())
    for i in range(8):
        client.get(f"/nowhere/{i}")
        client.post("/v1/completions", {"model": f"m{i}", "prompt": "a", "user": f"u{i}"})
    assert len(client.get("/metrics").text.splitlines()) <= before + 2  # 200 of /metrics itself


def test_every_route_is_counted_by_its_own_name(client):
    paths = {"/openapi.json", "/", "/dashboard", *client.get("/openapi.json").json()["paths"]}
    for path in paths:
        client.get(path)
    counted = {dict(labels).get("route") for name, labels in scrape(client) if "responses" in name}
    assert {route.replace(":path", "") for route in counted} == paths


def test_ends_by_reason(engine, client):
    engine.expire_at = 1
    client.complete(prompt="a")
    engine.expire_at, engine.fail_at = None, 2
    client.complete(prompt="a")
    samples = scrape(client)
    for reason, count in (("timeout", 1), ("error", 1), ("length", 0), ("stop", 0)):
        name = "jaxserve:request_success_total"
        assert value(samples, name, finished_reason=reason) == count


def test_steps_are_observed_by_kind():
    metrics = Metrics(FakeEngine().stats, "m")

    class Plan:
        num_decode, num_rows, num_tokens, waiting = 2, 2, 2, ()

    metrics.on_step(Plan, 0.01)
    Plan.num_rows = 3
    metrics.on_step(Plan, 0.01)
    text, kind = metrics.render()
    assert kind.startswith("text/plain")
    for step in ("decode", "mixed"):
        assert f'jaxserve:step_seconds_count{{kind="{step}"}} 1.0'.encode() in text


def test_the_guard_and_the_gap_between_tenants():
    stats = Stats(fairness_gap=120.5, guard_actions=(Action.SMALLER_CHUNKS.value,), guard_changes=3)
    text = Metrics(lambda: stats, "m").render()[0].decode()
    assert "jaxserve:fairness_gap 120.5" in text and "jaxserve:guard_changes_total 3.0" in text
    assert 'jaxserve:guard_action{action="smaller chunks"} 1.0' in text
    assert 'jaxserve:guard_action{action="pause admission"} 0.0' in text


@pytest.mark.parametrize("code", ["queue_full", "rate_limited"])
def test_refusals_by_cause(engine, client, code):
    engine.refusal = RequestRefused("not now", code=code, retry_after=7.2)
    response = client.complete(prompt="a")
    assert error_of(response, 429)["code"] == code and response.headers["retry-after"] == "7"
    assert value(scrape(client), "jaxserve:requests_refused_total", code=code) == 1


def test_the_load_line():
    engine = FakeEngine()
    before = engine.stats()
    engine.counts.steps, engine.counts.generation_tokens = 50, 400
    engine.counts.prefix_query_tokens, engine.counts.prefix_hit_tokens = 1000, 250
    engine.counts.pages_free, engine.counts.waiting, engine.counts.running = 25, 3, 4
    assert report.line(before, engine.stats(), 10.0) == (
        "4 running, 3 waiting | 100 prompt and 40 output tokens/s | 5.0 steps/s | "
        "KV 75% used, 25% of prompts cached | 0 preempted"
    )


MARKER = "zq7-secret-marker"
INSIDES = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|site-packages|/work|/root|/home|\.py\b")


def provocations(client, engine):
    user = f"{MARKER}\nINFO fake log line"
    yield client.complete(prompt=MARKER, user=user, temperature="x")
    yield client.complete(prompt={"a": MARKER})
    yield client.get(f"/{MARKER}%0aINFO%20fake")
    yield client.post("/v1/completions", content=f'{{"prompt": "{MARKER}'.encode())
    yield client.chat(messages=[{"role": MARKER, "content": MARKER}])
    engine.fail_at = 1
    yield client.complete(prompt=MARKER)
    engine.fail_at = None
    engine.tokenizer.encode = lambda *a, **k: 1 / 0 if MARKER in a[0] else [1]
    yield client.complete(prompt=MARKER)


def test_errors_tell_no_insides_and_logs_no_prompts(caplog):
    caplog.set_level(logging.INFO)
    engine = FakeEngine()
    client = Client(engine)
    for response in provocations(client, engine):
        assert response.status_code >= 400
        assert not INSIDES.search(response.text), response.text
        assert "\n" not in response.text
    ours = [record for record in caplog.records if not record.name.startswith("httpx")]
    assert len(ours) == 2 and not any(MARKER in caplog.handler.format(record) for record in ours)


def test_a_fault_of_ours_is_a_500_with_an_id(client, engine, caplog, monkeypatch):
    monkeypatch.setattr(engine, "stats", lambda: 1 / 0)
    response = client.complete(prompt="a")
    error = error_of(response, 500)
    request_id = response.headers["x-request-id"]
    assert error["code"] == "internal_error" and request_id in error["message"]
    assert f"request {request_id}: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/nope"])
def test_every_answer_has_a_request_id(client, path):
    answers = [client.get(path), client.get(path)]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 2


def test_the_grafana_dashboard_asks_for_series_that_exist(client):
    client.complete(prompt="a", max_tokens=3)
    known = {name for name, _ in scrape(client)}
    text = (pathlib.Path(__file__).resolve().parents[2] / "configs" / "grafana.json").read_text()
    asked = set(re.findall(r"jaxserve:\w+", text))
    labelled = {"jaxserve:step_seconds_bucket"}  # a series for each kind of step, once seen
    engine_only = {"jaxserve:computed_tokens_total", "jaxserve:compilations_total"}
    assert len(asked) > 15 and asked - labelled - engine_only <= known
