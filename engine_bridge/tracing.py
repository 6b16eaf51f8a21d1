"""Traces of requests for an OpenTelemetry collector: one trace goes from the client's socket to the engine's steps.

The gateway opens a span for each request, and its W3C `traceparent` goes with the request. The node that serves the request adds one span for each
stage when the request has ended. Without an endpoint the tracer is OpenTelemetry's own that records nothing.

Source: W3C Trace Context; OpenTelemetry's semantic conventions for generative AI, whose names (`gen_ai.…`) are used where they have one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

SERVICE_NAME = "overture"
# Chosen: a server that goes down waits so long for a collector that does not answer, and before that for requests that are just ending. Its node does
# the same.
SEND_WITHIN_S = 2
NUM_WAITS = 40
_PROPAGATOR = TraceContextTextMapPropagator()
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


class Traces:
    """A tracer of this process, and its way to the collector."""

    def __init__(self, endpoint: str | None) -> None:
        """Prepare to send spans to `endpoint`, by HTTP, or by gRPC where OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says so; None sends none.

        Raises:
            ValueError: for an endpoint that is no http(s) address.
        """
        self._provider = None if endpoint is None else _provider(endpoint)
        self.tracer: Tracer = (
            NoOpTracer() if self._provider is None else self._provider.get_tracer(SERVICE_NAME)
        )
        self._num_open, self._has_ended = 0, threading.Condition()

    @property
    def is_on(self) -> bool:
        """Return whether spans are recorded."""
        return self._provider is not None

    @contextmanager
    def request(
        self, name: str, traceparent: str, attributes: Mapping[str, str], begun_s: float | None = None
    ) -> Iterator[Span]:
        """Keep a span while a request is served; its status is an error where the block raises.

        name: the operation, without anything that clients put in. traceparent: the client's own; "" or a malformed one begins a trace. attributes:
        without texts of users. begun_s: Unix time; now without it.
        """
        start_ns = None if begun_s is None else int(begun_s * 1e9)
        span = self.tracer.start_span(
            name, parent_of(traceparent), SpanKind.SERVER, attributes, start_time=start_ns
        )
        with self._has_ended:
            self._num_open += 1
        try:
            yield span
        except BaseException as error:
            span.set_status(StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()
            with self._has_ended:
                self._num_open -= 1
                self._has_ended.notify_all()

    def close(self) -> None:
        """Send the spans not sent yet. Takes as long as the collector takes, at most `SEND_WITHIN_S`: not for the event loop's thread.

        Before that, requests that are just ending are waited for, as long at most: a web server ends without requests whose clients have left.
        """
        if self._provider is not None:
            with self._has_ended:
                self._has_ended.wait_for(lambda: not self._num_open, SEND_WITHIN_S)
            # OpenTelemetry itself would wait half a minute for a collector that does not answer.
            sending = threading.Thread(target=self._provider.shutdown, name="last-traces", daemon=True)
            sending.start()
            # Many short waits: while an engine ends, Python collects a million objects for seconds, in which nothing is sent either.
            for _ in range(NUM_WAITS):
                sending.join(SEND_WITHIN_S / NUM_WAITS)


NO_TRACES = Traces(None)


def _provider(endpoint: str) -> Any:
    """Return an SDK tracer provider. Its parts are imported here, so that servers without traces do not load them."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{endpoint!r} is no address of a collector, such as http://localhost:4318")
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    exporter: SpanExporter
    if os.environ.get(_PROTOCOL) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        exporter = Grpc(endpoint=endpoint, insecure=parts.scheme == "http")
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        exporter = Http(endpoint=url)
    resource = Resource.create({"service.name": SERVICE_NAME})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `close` does that
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def parent_of(traceparent: str) -> Context:
    """Return the context that a W3C `traceparent` names; an empty one, which begins a trace, where it is "" or malformed."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, Context())


def traceparent_of(span: Span) -> str:
    """Return the W3C `traceparent` of a span, for work done on its behalf; "" for a span that belongs to no trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")
