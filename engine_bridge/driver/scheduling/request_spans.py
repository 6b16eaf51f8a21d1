"""The stages of requests in the engine, as spans of the traces that the gateway began. On the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Tracer

from engine_bridge.core.kv.sources import Sources
from engine_bridge.tracing import parent_of

# Tiers whose KV was moved to the device for this request, or before it by an advisory.
_RESTORED = ("host", "disk", "peer")


@dataclass
class _Traced:
    traceparent: str
    accepted_s: float  # Unix time; 0 where the gateway did not say
    rendered_s: float
    waited_s: dict[str, float] = field(default_factory=dict)
    kv_tokens: dict[str, int] = field(default_factory=dict)


class RequestSpans:
    """Makes the spans `render`, `queue`, `prefill` and `decode` of each request when it ends, as far as it came.

    Args:
        reasons: returns the ids of the requests that wait now, each with the reason.
    """

    def __init__(self, tracer: Tracer, reasons: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._tracer, self._reasons = tracer, reasons
        self._requests: dict[str, _Traced] = {}
        self._looked_s = time.monotonic()

    def added(self, request_id: str, traceparent: str, accepted_s: float) -> None:
        """Begin with a request whose prompt has just been rendered. One without a `traceparent` is not followed."""
        if traceparent:
            self._requests[request_id] = _Traced(traceparent, accepted_s, time.time())

    def before_step(self) -> None:
        """Note why requests wait, for the time since the last step."""
        now_s = time.monotonic()
        since_s, self._looked_s = now_s - self._looked_s, now_s
        if not self._requests:
            return
        for request_id, reason in self._reasons():
            if (known := self._requests.get(request_id)) is not None:
                known.waited_s[reason] = known.waited_s.get(reason, 0.0) + since_s

    def first_output(self, request_id: str, sources: Sources) -> None:
        """Note how many tokens of the prompt's KV came from each tier."""
        if (known := self._requests.get(request_id)) is not None:
            known.kv_tokens = {tier: getattr(sources, tier) for tier in ("device", *_RESTORED)}

    def ended(self, request_id: str, times: Any, finish_reason: str) -> None:
        """Make the spans of a request that has ended, by itself or because its client left. An unknown request gets none.

        times: vLLM's `RequestStateStats`, in seconds of the monotonic clock, 0 for events that did not happen; None where vLLM noted no times.
        finish_reason: "stop", "length", "abort" or "error".
        """
        known = self._requests.pop(request_id, None)
        if known is not None:
            self._make(known, times, finish_reason)

    def _make(self, known: _Traced, times: Any, finish_reason: str) -> None:
        parent, now_s, offset_s = parent_of(known.traceparent), time.time(), time.time() - time.monotonic()

        def span(
            name: str, start_s: float, end_s: float, attributes: dict[str, Any], event: str = "", **named: int
        ) -> None:
            """Make a span from `start_s` to `end_s`, in seconds of Unix time; with an event at its start that has the numbers of `named`."""
            made = self._tracer.start_span(name, parent, start_time=_ns(start_s), attributes=attributes)
            if named:
                made.add_event(event, named, _ns(start_s))
            made.end(_ns(max(start_s, end_s)))

        def wall(monotonic_s: float) -> float:
            """Return seconds of the monotonic clock as Unix time; 0, for an event that did not happen, as now."""
            return monotonic_s + offset_s if monotonic_s else now_s

        if known.accepted_s:
            span("render", known.accepted_s, known.rendered_s, {})
        reason = max(known.waited_s, key=lambda each: known.waited_s[each], default=None)
        waited = {} if reason is None else {"overture.queue.reason": reason}
        if times is None:
            span("queue", known.rendered_s, now_s, waited)
            return
        span("queue", known.rendered_s, wall(times.scheduled_ts), waited)
        if times.scheduled_ts:
            kv = {f"overture.kv_tokens.{tier}": num for tier, num in known.kv_tokens.items()}
            restored = {tier: known.kv_tokens[tier] for tier in _RESTORED if known.kv_tokens.get(tier)}
            span("prefill", wall(times.scheduled_ts), wall(times.first_token_ts), kv, "restored", **restored)
        if times.first_token_ts:
            tokens = {
                "gen_ai.usage.output_tokens": times.num_generation_tokens,
                "gen_ai.response.finish_reasons": [finish_reason],
            }
            span("decode", wall(times.first_token_ts), wall(times.last_token_ts), tokens)


def _ns(time_s: float) -> int:
    return int(time_s * 1e9)
