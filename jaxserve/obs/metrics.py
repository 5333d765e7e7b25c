"""Prometheus metrics: every series as jaxserve:*, and under vLLM's name where vLLM has the same.

Gauges and counters of the engine are read from its statistics when scraped, so they cost a step
nothing. Histograms are fed by whoever sees the event: requests by the server through a Stopwatch,
steps by the engine through the observer hook on_step. Labels come from fixed sets only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import prometheus_client as prom
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample

from jaxserve.scheduler.guard import Action

PREFIX, ALIAS = "jaxserve:", "vllm:"
REASONS = ("stop", "length", "abort", "timeout", "error", "tool_calls")
WAITING = ("no", "yes")
REFUSALS = (
    "invalid_value", "context_length_exceeded", "capacity_exceeded", "queue_full", "rate_limited",
    "shutting_down",
)  # fmt: skip

_LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600
)  # fmt: skip
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_COUNT_BUCKETS = tuple(2**i for i in range(18))

# Attribute of the engine's statistics -> (our name, help, vLLM's name or None).
_GAUGES = {
    "running": ("num_requests_running", "Sequences in a slot.", "num_requests_running"),
    "waiting": ("num_requests_waiting", "Sequences in the queue.", "num_requests_waiting"),
    "waiting_tokens": ("num_tokens_waiting", "Prompt tokens in the queue.", None),
    "slots": ("num_slots", "Sequences that can run at once.", None),
    "pages_free": ("kv_pages_free", "KV pages that can be handed out.", None),
    "pages_idle": ("kv_pages_idle", "Of the free ones, those that hold cached prefixes.", None),
    "pages_total": ("kv_pages_total", "KV pages of the pool.", None),
    "fairness_gap": ("fairness_gap", "Difference of service between waiting tenants.", None),
}
_COUNTERS = {
    "steps": ("steps", "Device steps absorbed.", None),
    "requests": ("requests", "Requests accepted.", None),
    "refusals": ("engine_refusals", "Requests the engine refused.", None),
    "preemptions": ("preemptions", "Sequences put back into the queue.", "num_preemptions"),
    "host_pages_kept": ("host_kv_pages", "KV pages that were copied to the host.", None),
    "prefix_query_tokens": ("prompt_tokens", "Prompt tokens admitted.", "prompt_tokens"),
    "prefix_hit_tokens": ("prefix_cache_hits", "Of those, cached.", "prefix_cache_hits"),
    "computed_tokens": ("computed_tokens", "Tokens computed, recomputation included.", None),
    "generation_tokens": ("generation_tokens", "Tokens generated.", "generation_tokens"),
    "guard_changes": ("guard_changes", "Signs of trouble raised or lowered.", None),
    "compilations": ("compilations", "Programs compiled after warm-up.", None),
}


def _histogram(name: str, help: str, buckets, labels=()) -> prom.Histogram:
    return prom.Histogram(PREFIX + name, help, labels, buckets=buckets, registry=None)


class Metrics:
    """All series of one engine. Thread-safe; give it to the engine as an observer.

    stats: returns the engine's statistics; attributes that it lacks leave their series out.
    shadow: what another policy would have done (sim.shadow), if that is being tried.
    """

    def __init__(self, stats: Callable[[], object], model_name: str, shadow=None):
        self._stats = stats
        self._slots = stats().slots
        self._model = model_name
        self._shadow = shadow
        self.ttft = _histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _LATENCY_BUCKETS
        )
        self.inter_token = _histogram(
            "inter_token_latency_seconds", "Mean gap between tokens, a request.", _TOKEN_BUCKETS
        )
        self.e2e = _histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", _LATENCY_BUCKETS
        )
        self.prompt_size = _histogram("request_prompt_tokens", "Prompt tokens.", _COUNT_BUCKETS)
        self.output_size = _histogram("request_generation_tokens", "Output tokens.", _COUNT_BUCKETS)
        self.step_time = _histogram(
            "step_seconds", "One device step, dispatch to absorbed.", _TOKEN_BUCKETS, ("kind",)
        )
        self.step_tokens = _histogram("step_tokens", "Tokens of a step.", _COUNT_BUCKETS)
        self.slot_seconds = prom.Counter(
            PREFIX + "slot_seconds", "Slots times seconds of steps, by whether somebody waited.",
            ("waiting",), registry=None,
        )  # fmt: skip
        self.busy_slot_seconds = prom.Counter(
            PREFIX + "busy_slot_seconds", "Of those, the slots whose row computed something.",
            ("waiting",), registry=None,
        )  # fmt: skip
        self.finished = prom.Counter(
            PREFIX + "request_success", "Requests ended, by reason.", ("finished_reason",),
            registry=None,
        )  # fmt: skip
        self.refused = prom.Counter(
            PREFIX + "requests_refused", "Requests refused, by cause.", ("code",), registry=None
        )
        self.responses = prom.Counter(
            PREFIX + "http_responses", "HTTP responses.", ("route", "status"), registry=None
        )
        for waiting in WAITING:
            self.slot_seconds.labels(waiting)
            self.busy_slot_seconds.labels(waiting)
        for reason in REASONS:
            self.finished.labels(reason)
        for code in REFUSALS:
            self.refused.labels(code)
        self._registry = prom.CollectorRegistry()
        self._registry.register(self)
        prom.ProcessCollector(registry=self._registry)

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its content type."""
        return prom.generate_latest(self._registry), prom.CONTENT_TYPE_LATEST

    # What happened

    def on_step(self, plan, seconds: float) -> None:
        """Observer hook of the engine: one step was absorbed. Called on its thread."""
        kind = "decode" if plan.num_decode == plan.num_rows else "mixed"
        self.step_time.labels(kind).observe(seconds)
        self.step_tokens.observe(plan.num_tokens)
        waiting = WAITING[bool(plan.waiting)]
        self.slot_seconds.labels(waiting).inc(self._slots * seconds)
        self.busy_slot_seconds.labels(waiting).inc(plan.num_rows * seconds)

    def stopwatch(self, arrived: float, prompt_tokens: int) -> Stopwatch:
        """Follows one request; arrived is time.monotonic() of its first byte."""
        return Stopwatch(self, arrived, prompt_tokens)

    def count_response(self, route: str, status: int) -> None:
        """route: a path template of the application, never what the client wrote."""
        self.responses.labels(route, str(status)).inc()

    # Collector protocol

    def collect(self) -> Iterator[Metric]:
        yield from self._engine_families()
        aliased = (self.ttft, self.inter_token, self.e2e, self.prompt_size, self.output_size)
        for metric in (*aliased, self.finished):
            for family in metric.collect():
                yield family
                yield self._alias(family)
        own = (
            self.step_time, self.step_tokens, self.slot_seconds, self.busy_slot_seconds,
            self.refused, self.responses,
        )  # fmt: skip
        for metric in own:
            yield from metric.collect()
        if self._shadow is not None:
            yield from self._shadow_families(self._shadow.latest)

    def _shadow_families(self, reports: Mapping[str, Mapping]) -> Iterator[Metric]:
        """Of each policy's simulation: quantiles of its times, and its throughput."""
        for name, key, help in (
            ("shadow_ttft_seconds", "ttft_s", "Arrival to first token, on paper."),
            ("shadow_itl_seconds", "itl_s", "Gap between tokens, on paper."),
        ):
            family = GaugeMetricFamily(PREFIX + name, help, labels=["policy", "quantile"])
            for policy, summary in reports.items():
                for quantile, seconds in summary["groups"]["all"][key].items():
                    family.add_metric([policy, quantile], seconds)
            yield family
        help = "Tokens generated, on paper."
        family = GaugeMetricFamily(PREFIX + "shadow_tokens_per_second", help, labels=["policy"])
        for policy, summary in reports.items():
            family.add_metric([policy], summary["output_tokens_per_s"])
        yield family

    def _engine_families(self) -> Iterator[Metric]:
        stats = self._stats()
        for table, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for attribute, (name, help, alias) in table.items():
                value = getattr(stats, attribute, None)
                if value is None:
                    continue
                yield kind(PREFIX + name, help, value=value)
                if alias is not None:
                    yield self._labelled(kind, alias, help, value)
        in_force = getattr(stats, "guard_actions", ())
        help = "1 while the guard does this."
        family = GaugeMetricFamily(PREFIX + "guard_action", help, labels=["action"])
        for action in Action:
            family.add_metric([action.value], action.value in in_force)
        yield family
        used = 1 - stats.pages_free / max(1, stats.pages_total)
        help = "Share of the KV pages in use."
        yield GaugeMetricFamily(PREFIX + "kv_cache_usage_ratio", help, value=used)
        yield self._labelled(GaugeMetricFamily, "kv_cache_usage_perc", help, used)
        help = "Prompt tokens looked up in the prefix cache."
        yield self._labelled(
            CounterMetricFamily, "prefix_cache_queries", help, stats.prefix_query_tokens
        )

    def _labelled(self, kind, name: str, help: str, value) -> Metric:
        family = kind(ALIAS + name, help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _alias(self, family: Metric) -> Metric:
        """The same family under vLLM's name, with vLLM's model_name label."""
        alias = Metric(family.name.replace(PREFIX, ALIAS), family.documentation, family.type)
        for sample in family.samples:
            labels = {"model_name": self._model, **sample.labels}
            name = sample.name.replace(PREFIX, ALIAS)
            alias.samples.append(Sample(name, labels, sample.value))
        return alias


class Stopwatch:
    """Times of one request. Ends exactly once; a second end() is ignored."""

    def __init__(self, metrics: Metrics, arrived: float, prompt_tokens: int):
        self._metrics = metrics
        self._arrived = arrived
        self._prompt_tokens = prompt_tokens
        self._first: float | None = None
        self._last = arrived
        self._tokens = 0
        self._ended = False

    def saw_tokens(self, count: int) -> None:
        """count tokens of the request just came out of the engine."""
        if count == 0:
            return
        self._last = time.monotonic()
        self._tokens += count
        if self._first is None:
            self._first = self._last
            self._metrics.ttft.observe(self._first - self._arrived)

    def refused(self, code: str) -> None:
        """The engine did not take it: nothing else is counted."""
        self._metrics.refused.labels(code if code in REFUSALS else "invalid_value").inc()
        self._ended = True

    def end(self, reason: str) -> None:
        """The request ended for this reason, one of REASONS."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.finished.labels(reason if reason in REASONS else "error").inc()
        metrics.e2e.observe(time.monotonic() - self._arrived)
        metrics.prompt_size.observe(self._prompt_tokens)
        metrics.output_size.observe(self._tokens)
        if self._tokens > 1:
            metrics.inter_token.observe((self._last - self._first) / (self._tokens - 1))
