import socket
import time

import pytest
from opentelemetry import trace

from engine_bridge.tracing import Traces, parent_of, traceparent_of

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://localhost", "http://", "/v1/traces"])
def test_an_endpoint_must_be_an_address(endpoint: str) -> None:
    with pytest.raises(ValueError, match="such as http://localhost:4318"):
        Traces(endpoint)


def test_a_clients_traceparent_is_its_spans_parent_and_what_is_none_begins_a_trace() -> None:
    assert traceparent_of(trace.get_current_span(parent_of(TRACEPARENT))) == TRACEPARENT
    for none in ("", "x", TRACEPARENT[:-4], f"00-{'0' * 32}-{'0' * 16}-01"):
        assert not trace.get_current_span(parent_of(none)).get_span_context().is_valid


def test_a_collector_that_never_answers_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has more time while the server runs: a busy one is no reason to lose spans."""
    monkeypatch.setattr("engine_bridge.tracing.SEND_WITHIN_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        traces = Traces(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with traces.request("chat turn", "", {}):
            pass
        began = time.monotonic()
        traces.close()
        assert time.monotonic() - began < 5  # OpenTelemetry's own patience is 10 s for each batch
        with silent.accept()[0] as asked:
            assert asked.recv(4) == b"POST"
