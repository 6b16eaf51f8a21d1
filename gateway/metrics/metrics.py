"""Figures for Prometheus. vLLM's own (`vllm:…`) live in the same registry; ours start with `overture_`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from engine_bridge.engine_metrics import own_metrics
from engine_bridge.protocol.node import AdvisoryReport, Api, Delta, Dropped
from gateway.recognition.runs import PromptTokens

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
STALL_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
LEAD_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
STALL_PROBE_S = 0.1
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The gateway's own metrics.

    Args:
        registry: where they are registered; tests pass one of their own.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self._counter = partial(Counter, registry=registry)
        self._gauge = partial(Gauge, registry=registry)
        self._histogram = partial(Histogram, registry=registry)
        self._count_turns()
        self._count_embeddings()
        self._count_connections()
        self._count_advisories()
        self._count_the_process()

    def _count_turns(self) -> None:
        self._turns_running = self._gauge("overture_turns_running", "Turns under way")
        self._turns = self._counter("overture_turns", "Turns that ended, by how", ["outcome"])
        self._ttft = self._histogram(
            "overture_ttft_seconds",
            "Time to first token of chat turns, by where most of the prompt's KV came from",
            ["kv_source"],
            buckets=TTFT_BUCKETS_S,
        )
        self._prompt_tokens = self._counter(
            "overture_prompt_tokens",
            "Prompt tokens of chat turns, by where their KV came from",
            ["kv_source"],
        )
        self._prompts = self._counter(
            "overture_turn_prompts",
            "Prompts of chat turns, by whether they continue the session's token ids",
            ["origin"],
        )
        self._kept_tokens = self._counter(
            "overture_kept_tokens", "Prompt tokens of chat turns that are the session's stored token ids"
        )

        self.tool_calls = self._counter(
            "overture_tool_calls",
            "Calls of MCP servers' tools in chat turns, by server and what became of them",
            ["server", "outcome"],
        )

    def _count_embeddings(self) -> None:
        self._pooling = tuple(
            (
                self._counter(f"overture_{name}_prompt_tokens", f"Tokens of inputs that were {done}"),
                self._histogram(
                    f"overture_{name}_seconds",
                    f"Time of calls for {what}, also of those that were refused",
                    buckets=TTFT_BUCKETS_S,
                ),
            )
            for name, done, what in (("embedding", "embedded", "embeddings"), ("scoring", "scored", "scores"))
        )

    def pooling(self, api: Api) -> tuple[Counter, Histogram]:
        """Return the tokens and seconds of calls for embeddings, or of those for scores."""
        return self._pooling[api != "embeddings"]

    def _count_connections(self) -> None:
        self.sockets = self._gauge("overture_sockets", "Chat sockets open")
        self.socket_errors = self._counter("overture_socket_errors", "Error frames sent", ["code"])
        self.left_out = self._counter(
            "overture_left_out",
            "Tools and messages left out of calls whose prompt did not fit (--context-overflow)",
            ["what"],
        )
        self.slow_readers = self._counter(
            "overture_slow_readers", "Chat sockets and streams closed because they were read too slowly"
        )
        self.connections = self._gauge("overture_connections", "Connections open, by what they do", ["state"])
        self.connections_closed = self._counter(
            "overture_connections_closed", "Connections closed or refused", ["reason"]
        )
        self.open_files = self._gauge("overture_open_files", "Open files of the process")
        self.refused = self._counter("overture_requests_refused", "Requests refused by a budget", ["budget"])
        self.tokens = self._counter(
            "overture_tokens",
            "Tokens of prompts and answers, by person (--metrics-by-user)",
            ["user", "kind"],
        )
        self.http = self._counter("overture_http_requests", "HTTP requests", ["route", "status"])

    def note_left_out(self, dropped: Dropped) -> None:
        """Count the tools and messages left out of a call."""
        self.left_out.labels("tools").inc(dropped.tools)
        self.left_out.labels("messages").inc(dropped.messages)

    def _count_advisories(self) -> None:
        self.typing = self._counter("overture_typing_frames", "Typing frames received")
        self.advisories = self._counter("overture_advisories", "Advisories acted on", ["source"])
        self.session_calls = self._counter(
            "overture_session_calls",
            "API calls by how their session was found: named, continued, retried, rewritten, new, stored",
            ["how"],
        )
        self._run_tokens = self._counter(
            "overture_agent_run_tokens",
            "Prompt tokens of sessions that call tools, by what became of their KV since the turn before",
            ["outcome"],
        )
        self.kv_hints = self._counter(
            "overture_kv_hints",
            "Hints of KV by the field that they came in, what they ask for, and what became of it",
            ["source", "action", "outcome"],
        )
        self.advisories_merged = self._counter(
            "overture_advisories_merged", "Advisories that only renewed one under way"
        )
        self.advisories_refused = self._counter(
            "overture_advisories_refused", "Advisories above a key's rate"
        )
        self._advisory_outcomes = self._counter(
            "overture_advisory_outcomes", "How advisories ended", ["source", "outcome"]
        )
        self._advisory_bytes = self._counter(
            "overture_advisory_bytes",
            "Moved for advisories: KV by the tier it came from, and adapters; by how the advisory ended",
            ["tier", "outcome"],
        )
        self._advisory_lead = self._histogram(
            "overture_advisory_lead_seconds", "From an advisory to its request", buckets=LEAD_BUCKETS_S
        )
        self._advisory_late = self._histogram(
            "overture_advisory_late_seconds",
            "How much longer a late advisory would have needed",
            buckets=TTFT_BUCKETS_S,
        )
        self.computed_ahead = self._counter(
            "overture_computed_ahead_tokens",
            "Prompt tokens prepared before their request came, with those that were cached already",
            ["what"],
        )

    def _count_the_process(self) -> None:
        self.session_wal_lost_frames = self._gauge(
            "overture_session_wal_lost_frames",
            "Frames of the session database's log that were damaged and lost at the start",
        )
        self.engine_rebuilds = self._gauge("overture_engine_rebuilds", "Engine rebuilds since the start")
        self.engine_steps = self._gauge("overture_engine_steps", "Engine steps since the start")
        self._stall = self._histogram(
            "overture_loop_stall_seconds",
            "How late the event loop ran a timer: how long something blocked it",
            buckets=STALL_BUCKETS_S,
        )

    @contextlib.contextmanager
    def turn_running(self) -> Iterator[None]:
        """Count a turn as running while the context is open."""
        with self._turns_running.track_inprogress():
            yield

    def turn_ended(self, outcome: str, final: Delta | None) -> None:
        """Count a turn. outcome: a turn status or an error code."""
        self._turns.labels(outcome).inc()
        if final is not None and final.prompt is not None:
            self._prompts.labels(final.prompt.origin).inc()
            self._kept_tokens.inc(final.prompt.num_kept_tokens)
        if final is None or final.timings is None:
            return
        kv = {
            name: getattr(final.timings.kv, name) for name in ("device", "host", "disk", "peer", "recomputed")
        }
        for source, num_tokens in kv.items():
            self._prompt_tokens.labels(source).inc(num_tokens)
        if final.timings.ttft_ms is not None:
            self._ttft.labels(max(kv, key=lambda source: kv[source])).observe(final.timings.ttft_ms / 1000)

    def advisory_ended(self, source: str, report: AdvisoryReport) -> None:
        """Count how an advisory ended, the bytes that it moved and its lead over its request in seconds."""
        self._advisory_outcomes.labels(source, report.state).inc()
        for tier in ("host", "disk", "peer", "adapter"):
            self._advisory_bytes.labels(tier, report.state).inc(getattr(report, f"{tier}_bytes"))
        if report.state in ("hit", "late") and report.lead_s is not None:
            self._advisory_lead.observe(report.lead_s)
        if report.late_s is not None:
            self._advisory_late.observe(report.late_s)

    def note_run_tokens(self, tokens: PromptTokens) -> None:
        """Count a prompt of a session that calls tools."""
        for outcome in tokens.__struct_fields__:
            self._run_tokens.labels(outcome).inc(getattr(tokens, outcome))

    async def watch_loop(self) -> None:
        """Measure for ever how late the event loop runs its timers. A late loop is late for every socket."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + STALL_PROBE_S
            await asyncio.sleep(STALL_PROBE_S)
            self._stall.observe(max(loop.time() - due, 0.0))

    async def exposition(self, engine: str = "") -> bytes:
        """Return the text that Prometheus reads, rendered off the event loop. engine: the figures of the engine, which may be in another process."""
        return await asyncio.to_thread(own_metrics, self.registry) + engine.encode()
