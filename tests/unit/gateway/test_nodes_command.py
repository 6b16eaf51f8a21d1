"""`overture nodes` against a server that answers as /v1/nodes does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import cli


class Nodes(ThreadingHTTPServer):
    """states: what each question finds a node to be, the last one from then on. asked: calls that change something, with their bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.states: dict[str, list[dict[str, Any]]] = {"node-1": [{}], "node-2": [{}]}
        self.asked: list[tuple[str, Any, str | None]] = []
        self.refusal: tuple[int, str] | None = None

    def found(self) -> dict[str, Any]:
        nodes = [node(name, **self._next(states)) for name, states in self.states.items()]
        totals = {"num_open": 2, "num_nodes": 2, "num_running": 3, "num_waiting": 1}
        return {"nodes": nodes, "totals": totals}

    @staticmethod
    def _next(states: list[dict[str, Any]]) -> dict[str, Any]:
        return states.pop(0) if len(states) > 1 else states[0]


def node(name: str, **changes: Any) -> dict[str, Any]:
    load = {"num_running": 3, "num_waiting": 1, "num_kv_blocks": 101, "num_free_kv_blocks": 25}
    kv = {"host": {"bytes": 1, "capacity_bytes": 2}, "disk": None}
    found = {
        "id": name,
        "state": "ready",
        "stage": "ready",
        "elapsed_s": 300,
        "incarnation": "a",
        "error": None,
    }
    found |= {
        "is_draining": False,
        "load": load,
        "kv": kv,
        "adapters": {"num_by_place": {"slot": 1, "disk": 4}},
    }
    return found | changes


class Handler(BaseHTTPRequestHandler):
    server: Nodes

    def do_GET(self) -> None:
        self._reply(200, self.server.found())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        if self.server.refusal is not None:
            status, message = self.server.refusal
            self._reply(status, {"error": {"message": message}})
        else:
            self._reply(202, {})

    def _reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Nodes]:
    with Nodes() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overture_client.nodes.LOOK_EVERY_S", 0.0)


def overture(server: Nodes, *arguments: str) -> Result:
    options = ("--url", f"http://127.0.0.1:{server.server_port}", "--api-key", "the-key")
    return CliRunner().invoke(cli, ["nodes", *options, *arguments], env={"COLUMNS": "140"})


def test_the_table_says_what_each_node_does(server: Nodes) -> None:
    server.states["node-2"] = [{"state": "starting", "stage": "loading the model", "load": None, "kv": None}]
    result = overture(server)
    first, second = (line for line in result.output.splitlines() if line.startswith("node-"))
    assert first.split()[1:7] == ["ready", "3", "1", "75%", "50%", "-"]
    assert "1 of 5 in memory" in first and "5 min" in first
    assert "starting (loading the model)" in second
    assert "2 of 2 take requests; 3 running, 1 waiting." in result.output


def test_scripts_get_what_the_server_said(server: Nodes) -> None:
    assert json.loads(overture(server, "--json").output) == server.found()


def test_a_drain_ends_when_nothing_runs_there_any_more(server: Nodes) -> None:
    draining = {"state": "draining", "is_draining": True}
    idle = node("x")["load"] | {"num_running": 0, "num_waiting": 0}
    server.states["node-2"] = [draining, draining | {"load": idle}]
    result = overture(server, "drain", "node-2", "--drain-timeout-s", "7")
    assert server.asked == [("/v1/nodes/node-2/drain", {"force": False, "timeout_s": 7.0}, "Bearer the-key")]
    assert result.output.splitlines() == ["node-2: draining, 3 running, 1 waiting", "node-2: drained"]
    assert result.exit_code == 0


def test_all_nodes_restart_one_after_the_other(server: Nodes) -> None:
    away, back = {"state": "away", "incarnation": ""}, {"incarnation": "b"}
    # Each name is asked for once for all of them, once before its own restart, and then until it is back.
    server.states = {"node-1": [{}, {}, away, back], "node-2": [{}] * 6 + [away, back]}
    result = overture(server, "restart", "--all")
    assert [path for path, _, _ in server.asked] == ["/v1/nodes/node-1/restart", "/v1/nodes/node-2/restart"]
    ready = [line.split(" after")[0] for line in result.output.splitlines() if "again" in line]
    assert ready == ["node-1: ready again", "node-2: ready again"]
    assert result.exit_code == 0


def test_a_node_that_does_not_come_back_stops_the_rest(server: Nodes) -> None:
    server.states["node-1"] = [{}, {}, {"state": "failed", "error": "no such model"}]
    result = overture(server, "restart", "--all")
    assert result.exit_code == 1 and "node-1: no such model" in result.output
    assert [path for path, _, _ in server.asked] == ["/v1/nodes/node-1/restart"]


def test_what_the_server_refuses_is_said_in_its_words(server: Nodes) -> None:
    server.refusal = (409, "node-1 is the only one that takes requests")
    result = overture(server, "drain", "node-1")
    assert result.exit_code == 1
    assert result.output == "overture nodes: node-1 is the only one that takes requests\n"


def test_a_drained_node_takes_requests_again(server: Nodes) -> None:
    result = overture(server, "reopen", "node-1")
    assert server.asked == [("/v1/nodes/node-1/reopen", {}, "Bearer the-key")]
    assert result.output == "node-1: takes requests again\n"


@pytest.mark.parametrize("arguments", [("restart",), ("restart", "node-1", "--all")])
def test_a_restart_wants_one_name_or_all(server: Nodes, arguments: tuple[str, ...]) -> None:
    result = overture(server, *arguments)
    assert result.exit_code == 2 and "say which node, or --all" in result.output
    assert server.asked == []


def test_nobody_there_is_one_line() -> None:
    result = CliRunner().invoke(cli, ["nodes", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1 and "cannot be asked" in result.output and "Traceback" not in result.output
