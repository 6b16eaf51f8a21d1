"""One trace goes from a client's own span to the engine's steps, and reaches a collector.

Runs before the shared engine starts (conftest), on an engine of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from engine_bridge.local_node import LocalNode
from engine_bridge.tracing import Traces
from gateway.app import node_config

from .conftest import connected, demo_config, engine_is_empty, served, settle
from .facts import CHAT, MODEL, Http

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ("render", "queue", "prefill", "decode")


class Collector:
    """An OpenTelemetry collector, as far as its door for traces goes. It has a thread of its own, so that a busy event loop does not hold it up."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Door(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                collector.take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self.door = ThreadingHTTPServer(("127.0.0.1", 0), Door)

    def take(self, body: bytes) -> None:
        sent = ExportTraceServiceRequest.FromString(body)
        self.spans += [
            span for resource in sent.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]

    def of(self, trace: str) -> dict[str, Span]:
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace}


def named(span: Span) -> dict[str, object]:
    """The attributes of a span."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def check_stages(spans: dict[str, Span], root: Span) -> None:
    assert all(spans[stage].parent_span_id == root.span_id for stage in STAGES)
    times = [root.start_time_unix_nano]
    for stage in STAGES:
        times += [spans[stage].start_time_unix_nano, spans[stage].end_time_unix_nano]
    assert times == sorted(times)


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector, and its address."""
    collector = Collector()
    with collector.door as door:
        thread = threading.Thread(target=door.serve_forever, daemon=True)
        thread.start()
        yield collector, f"http://127.0.0.1:{door.server_port}"
        door.shutdown()
        thread.join()


async def test_calls_and_turns_are_one_trace_from_the_clients_span_to_the_last_token(tmp_path: Path) -> None:
    """What a server has sent by the time that it is closed, after two API calls, a chat turn and a call whose client went away."""
    traceparents, left = {}, "a" * 32
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me of the sea. " * 20}]}
    with collecting() as (collector, endpoint):
        config = demo_config(tmp_path, otlp_endpoint=endpoint)
        node = LocalNode(node_config(config))
        async with served(config, node) as server, Http(server.url) as http:
            await node.start()
            for trace in (f"{number}{TRACE[1:]}" for number in (1, 2)):
                headers = {"traceparent": f"00-{trace}-{CLIENT}-01"}
                async with http.post(CHAT, json=body | {"max_tokens": 5}, headers=headers) as reply:
                    assert reply.status == 200
                    traceparents[trace] = reply.headers["traceparent"]
            async with connected(server) as socket:
                await socket.ask("m", traceparent=f"00-{TRACE}-{CLIENT}-01", sampling={"max_tokens": 5})
                await socket.receive("done")
            endless = body | {"stream": True, "max_tokens": 2000, "ignore_eos": True}
            headers = {"traceparent": f"00-{left}-{CLIENT}-01"}
            async with http.post(CHAT, json=endless, headers=headers) as reply:
                await reply.content.readany()
                reply.close()
            await engine_is_empty(node)
        # A server that goes down does not wait long for its collector; on a busy machine the last spans come a little later.
        waited_for = {*traceparents, left}
        with suppress(TimeoutError):
            await settle(lambda: all(f"POST {CHAT}" in collector.of(trace) for trace in waited_for), 60)
        found = sorted((span.trace_id.hex()[:4], span.name) for span in collector.spans)
        assert not [trace for trace in waited_for if f"POST {CHAT}" not in collector.of(trace)], found
        await settle(lambda: "chat turn" in collector.of(TRACE))
    for trace, traceparent in traceparents.items():
        spans = collector.of(trace)
        root = spans[f"POST {CHAT}"]
        assert traceparent == f"00-{trace}-{root.span_id.hex()}-01"
        assert root.parent_span_id.hex() == CLIENT
        assert named(root)["http.response.status_code"] == 200
        check_stages(spans, root)
        assert named(spans["decode"])["gen_ai.usage.output_tokens"] == 5
    first, second = (named(collector.of(trace)["prefill"]) for trace in traceparents)
    assert first["overture.kv_tokens.device"] == 0 < second["overture.kv_tokens.device"]
    spans = collector.of(TRACE)
    assert spans["chat turn"].parent_span_id.hex() == CLIENT
    check_stages(spans, spans["chat turn"])
    spans = collector.of(left)
    assert spans[f"POST {CHAT}"].status.code == Status.STATUS_CODE_ERROR
    [reason] = [each for each in spans["decode"].attributes if each.key == "gen_ai.response.finish_reasons"]
    assert reason.value.array_value.values[0].string_value == "abort"


async def test_a_call_that_ends_while_the_server_closes_is_sent() -> None:
    entered, may_end = threading.Event(), threading.Event()
    with collecting() as (collector, endpoint):
        traces = Traces(endpoint)

        def serve() -> None:
            with traces.request("late", "", {}):
                entered.set()
                may_end.wait()

        serving, closing = threading.Thread(target=serve), threading.Thread(target=traces.close)
        serving.start()
        entered.wait()
        closing.start()
        await asyncio.to_thread(closing.join, 0.1)
        may_end.set()
        await settle(lambda: [span for span in collector.spans if span.name == "late"], 60)
        for thread in (serving, closing):
            await asyncio.to_thread(thread.join)
