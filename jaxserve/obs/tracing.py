"""OpenTelemetry spans: one a request, with its queueing, prefill and decoding as events.

Names of attributes follow OpenTelemetry's conventions for generative AI. Spans hold counts, times
and the request's id, never text. Needs the extra: pip install 'jaxserve[otel]'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

CONTEXT_HEADERS = ("traceparent", "tracestate")


class Tracing:
    """Makes the spans of one server, and is told of steps by its engine (as an observer).

    provider: OpenTelemetry's TracerProvider. clock, wall_ns: the times that requests and spans are
    measured in, as time.monotonic and time.time_ns.
    """

    def __init__(
        self,
        provider,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("jaxserve")
        self._extract = TraceContextTextMapPropagator().extract
        self.now, self._wall_ns = clock, wall_ns
        self._open: dict[str, RequestSpan] = {}

    @classmethod
    def connect(cls, endpoint: str) -> Tracing:
        """Spans go to a collector over OTLP/HTTP, in batches, off every thread that matters.

        Raises ValueError without the packages.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError(
                f"--otlp_traces_endpoint needs OpenTelemetry ({error}): "
                "pip install 'jaxserve[otel]'"
            ) from None
        provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def request(
        self, request_id: str, arrived: float, headers: Mapping[str, str], attributes: Mapping
    ) -> RequestSpan:
        """Opens a request's span, below the client's own if its headers name one.

        arrived: on the clock. The engine may know the request by this id or as "id-number".
        """
        carrier = {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
        from opentelemetry.trace import SpanKind

        start_ns = self._wall_ns() - int((self.now() - arrived) * 1e9)
        span = self._tracer.start_span(
            "generate",
            context=self._extract(carrier),
            kind=SpanKind.SERVER,
            start_time=start_ns,
            attributes={"gen_ai.response.id": request_id, **attributes},
        )
        span.add_event("queued", timestamp=start_ns)
        followed = RequestSpan(self, request_id, span, arrived, start_ns)
        self._open[request_id] = followed
        return followed

    def on_step(self, plan, seconds: float) -> None:
        """Observer hook of the engine, on its thread: what this step admitted began its prefill
        when the step did."""
        for _, sequence in plan.admits:
            name = sequence.request.id
            span = self._open.get(name) or self._open.get(name.rpartition("-")[0])
            if span is not None:
                span.admitted(self.now() - seconds)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()

    def _forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)


class RequestSpan:
    """One request while it runs. Ends exactly once.

    Only its start is read from the wall clock: the rest is counted from there on the engine's
    clock, so that its times are in order whatever is done to the wall clock.
    """

    def __init__(self, tracing: Tracing, request_id: str, span, arrived: float, start_ns: int):
        self._tracing = tracing
        self._id = request_id
        self._span = span
        self._arrived, self._start_ns = arrived, start_ns
        self._phase = "queued"
        self._tokens = 0

    def admitted(self, moment: float) -> None:
        """Its first sequence got a slot, at this moment of the clock; a later return from
        preemption is no news."""
        if self._phase == "queued":
            self._phase = "prefill"
            # A pipelined step can have begun on the device before the request came.
            self._span.add_event("prefill", timestamp=self._at(max(moment, self._arrived)))

    def saw_tokens(self, count: int) -> None:
        """count tokens of the request just came out of the engine."""
        self._tokens += count
        if count and self._phase != "decode":
            self._phase = "decode"
            self._span.add_event("decode", timestamp=self._at(self._tracing.now()))

    def refused(self, code: str) -> None:
        """The engine did not take it."""
        self._close(error=code)

    def end(self, reason: str) -> None:
        """The request ended for this reason."""
        self._span.set_attribute("gen_ai.response.finish_reasons", [reason])
        self._span.set_attribute("gen_ai.usage.output_tokens", self._tokens)
        self._close(error=reason if reason == "error" else None)

    def _close(self, error: str | None) -> None:
        from opentelemetry.trace import StatusCode

        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(end_time=self._at(self._tracing.now()))
        self._tracing._forget(self._id)

    def _at(self, moment: float) -> int:
        """A moment of the clock as nanoseconds since 1970."""
        return self._start_ns + int((moment - self._arrived) * 1e9)
