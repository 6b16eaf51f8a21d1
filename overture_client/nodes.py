"""`overture nodes`: listing the nodes of a running server, draining them, and starting them again one after the other."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from overture_client.chat import socket_url

REPLY_WITHIN_S = 10.0
# Chosen: what a person takes for live.
LOOK_EVERY_S = 0.5

JsonObject = dict[str, Any]


class NodesError(Exception):
    """A failure, with a text for the person at the terminal."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. Raises ValueError for an invalid `url`."""

    url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        socket_url(self.url)

    def nodes(self) -> JsonObject:
        """Return the nodes as `GET /v1/nodes` does. Raises NodesError."""
        return self._call("GET", "v1/nodes")

    def change(self, what: str, node_id: str, wanted: JsonObject) -> JsonObject:
        """Change a node, which may continue after the reply. Raises NodesError."""
        return self._call("POST", f"v1/nodes/{urllib.parse.quote(node_id, safe='')}/{what}", wanted)

    def erase_person(self, owner: str) -> JsonObject:
        """Erase a person, or wait a while for that; `num_left_sessions` in the reply says that it goes on. Raises NodesError."""
        return self._call("DELETE", f"v1/admin/people/{urllib.parse.quote(owner, safe='')}")

    def _call(self, method: str, path: str, body: JsonObject | None = None) -> JsonObject:
        parts = urllib.parse.urlsplit(socket_url(self.url))
        base = f"{parts.path.removesuffix('/ws')}/{path}"
        scheme = {"ws": "http", "wss": "https"}[parts.scheme]
        address = urllib.parse.urlunsplit((scheme, parts.netloc, base, "", ""))
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        request = urllib.request.Request(address, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=REPLY_WITHIN_S) as response:
                found: JsonObject = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            raise NodesError(_message(error)) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise NodesError(
                f"the server at {self.url} cannot be asked: {reason} (another address: --url)"
            ) from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"


# -- the table ---------------------------------------------------------------------------------------------------------


def show(server: Server, *, as_json: bool) -> None:
    """Print the nodes in a table. Raises NodesError."""
    found = server.nodes()
    if as_json:
        print(json.dumps(found))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("Node", "State"):
        table.add_column(name, no_wrap=name == "Node")
    for name in ("Running", "Waiting", "Device", "Host", "Disk", "Adapters", "For"):
        table.add_column(name, justify="right", no_wrap=True)
    for node in found["nodes"]:
        table.add_row(node["id"], _state(node), *_figures(node))
    console = Console(highlight=False, markup=False)
    console.print(table)
    totals = found["totals"]
    console.print(
        f"{totals['num_open']} of {totals['num_nodes']} take requests; "
        f"{totals['num_running']} running, {totals['num_waiting']} waiting."
    )


def _state(node: JsonObject) -> str:
    is_on_its_way = node["state"] in ("starting", "rebuilding")
    words = f"{node['state']} ({node['stage']})" if is_on_its_way else node["state"]
    return f"{words}: {node['error']}" if node["error"] else words


def _figures(node: JsonObject) -> Iterator[str]:
    load, kv = node["load"], node["kv"]
    if load is None:
        yield from ("-", "-", "-")
    else:
        # vLLM uses one block for nothing.
        num_blocks = load["num_kv_blocks"] - 1
        yield str(load["num_running"])
        yield str(load["num_waiting"])
        yield _share(num_blocks - load["num_free_kv_blocks"], num_blocks)
    for tier in ("host", "disk"):
        use = kv[tier] if kv is not None else None
        yield _share(use["bytes"], use["capacity_bytes"]) if use is not None else "-"
    places = node["adapters"]["num_by_place"]
    num = sum(places.values())
    yield f"{num - places.get('disk', 0)} of {num} in memory" if num else "-"
    yield _age(node["elapsed_s"])


def _share(part: int, whole: int) -> str:
    return f"{100 * max(part, 0) / whole:.0f}%" if whole > 0 else "-"


def _age(seconds: float) -> str:
    for unit, length_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


# -- changes -----------------------------------------------------------------------------------------------------------


class Changes:
    """Changes nodes, and tells the progress.

    Args:
        wanted: sent with each call, as `force`.
        timeout_s: how long one node may take.
        say: takes a line for the person.
    """

    def __init__(
        self,
        server: Server,
        wanted: JsonObject,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._server, self._wanted, self._timeout_s, self._say = server, wanted, timeout_s, say

    def drain(self, node_id: str) -> None:
        """Drain a node, and return when no request runs there any more. Raises NodesError."""
        self._server.change("drain", node_id, self._wanted)
        self._until(node_id, _is_drained)
        self._say(f"{node_id}: drained")

    def reopen(self, node_id: str) -> None:
        """Let a node take requests again. Raises NodesError."""
        self._server.change("reopen", node_id, {})
        self._say(f"{node_id}: takes requests again")

    def restart(self, node_ids: Sequence[str]) -> None:
        """Restart nodes one after the other, each when the one before is ready.

        Raises NodesError for the first that fails; later ones stay as they are.
        """
        for node_id in node_ids:
            before = self._find(node_id)
            if before is None:
                raise NodesError(f"there is no node named {node_id!r}")
            began_s = time.monotonic()
            self._server.change("restart", node_id, self._wanted)
            self._until(node_id, lambda node, before=before: _is_back(node, before))  # type: ignore[misc]
            self._say(f"{node_id}: ready again after {time.monotonic() - began_s:.0f} s")

    def _find(self, node_id: str) -> JsonObject | None:
        return next((node for node in self._server.nodes()["nodes"] if node["id"] == node_id), None)

    def _until(self, node_id: str, is_done: Callable[[JsonObject | None], bool]) -> None:
        """Poll a node until it is in the wanted state, and tell changes meanwhile. Raises NodesError if it fails, or takes too long."""
        deadline_s = time.monotonic() + self._timeout_s
        told = ""
        while True:
            node = self._find(node_id)
            if is_done(node):
                return
            if node is not None and _has_failed(node):
                raise NodesError(f"{node_id}: {node['error'] or node['state']}")
            if (words := _progress(node)) != told:
                told = words
                self._say(f"{node_id}: {told}")
            if time.monotonic() > deadline_s:
                raise NodesError(
                    f"{node_id}: not done after {self._timeout_s:.0f} s ({told}); it goes on without this command"
                )
            time.sleep(LOOK_EVERY_S)


def _is_drained(node: JsonObject | None) -> bool:
    """Return whether a node is drained or has left."""
    if node is None or node["state"] == "closed":
        return True
    load = node["load"]
    return bool(node["is_draining"]) and (load is None or not load["num_running"] + load["num_waiting"])


def _is_back(node: JsonObject | None, before: JsonObject) -> bool:
    return (
        node is not None
        and node["state"] == "ready"
        and node["incarnation"] not in ("", before["incarnation"])
    )


def _has_failed(node: JsonObject) -> bool:
    """Return whether a node has failed. A node that is starting may still show the failure it recovers from."""
    return node["state"] == "failed" or bool(
        node["error"] and node["state"] not in ("starting", "rebuilding")
    )


def _progress(node: JsonObject | None) -> str:
    if node is None:
        return "away"
    state = node["state"]
    if state == "draining" and node["load"] is not None:
        return f"draining, {node['load']['num_running']} running, {node['load']['num_waiting']} waiting"
    return f"{state} ({node['stage']})" if state in ("starting", "rebuilding") else str(state)
