"""A stand-in for the network peer: a real HTTP server that keeps to the gateway's contract for advisories and chat calls, without a model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.served import served

REFUSED = {"error": {"message": "Too many advisories.", "code": "rate_limited"}}
UNKNOWN = {"error": {"message": "No such advisory.", "code": "not_found"}}


class ContractServer:
    """What it was sent is in `advisories` (bodies) and `requests` (session, agent, body), in the order of arrival."""

    def __init__(self) -> None:
        self.url = ""
        self.advisories: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.requests: list[tuple[str | None, str | None, dict[str, Any]]] = []
        self.authorizations: set[str | None] = set()
        self.log: list[tuple[str, str | None]] = []
        """("advisory" or "request", session), in the order of arrival."""
        self.refuses = False
        self.is_holding = threading.Event()
        """While set, advisories are not answered."""
        self.num_held = 0
        self.max_held = 0
        self._records: dict[str, dict[str, Any]] = {}
        self._under_way: dict[str, str] = {}
        """The advisory of each session whose request has not come yet."""

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/advisories", self._post),
                web.get("/v1/advisories/{id}", self._get),
                web.delete("/v1/advisories/{id}", self._delete),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        return app

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_held += 1
        self.max_held = max(self.max_held, self.num_held)
        try:
            while self.is_holding.is_set():
                await asyncio.sleep(0.005)
        finally:
            self.num_held -= 1
        if self.refuses:
            return web.json_response(REFUSED, status=429)
        self.authorizations.add(request.headers.get("Authorization"))
        self.advisories.append(body)
        session_id = body["session_id"]
        self.log.append(("advisory", session_id))
        # A session has one advisory under way: the same again renews it, another replaces it.
        old = self._records.get(self._under_way.get(session_id, ""))
        if old is not None and old["told"] == body.get("expected_arrival_s"):
            return web.json_response(_public(old) | {"is_merged": True}, status=202)
        if old is not None:
            old["state"] = "cancelled"
        record = {"id": f"adv-{len(self._records)}", "object": "advisory", "session_id": session_id}
        record |= {"state": "accepted", "is_merged": False, "expires_in_s": 30.0}
        self._records[record["id"]] = record | {"told": body.get("expected_arrival_s")}
        self._under_way[session_id] = record["id"]
        return web.json_response(record, status=202)

    async def _get(self, request: web.Request) -> web.Response:
        record = self._records.get(request.match_info["id"])
        if record is None:
            return web.json_response(UNKNOWN, status=404)
        extra = {"tier": "device", "num_tokens": 96, "device_tokens": 96, "host_bytes": 0, "disk_bytes": 0}
        times = {"lead_ms": 12.5 if record["state"] == "hit" else None, "late_ms": None}
        return web.json_response(_public(record) | extra | times)

    async def _delete(self, request: web.Request) -> web.Response:
        record = self._records.pop(request.match_info["id"], None)
        if record is None:
            return web.json_response(UNKNOWN, status=404)
        self.cancelled.append(record["session_id"])
        return web.Response(status=204)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        session_id = request.headers.get("X-Session-Id")
        self.requests.append((session_id, request.headers.get("X-Agent-Name"), body))
        self.log.append(("request", session_id))
        if body["model"] == "nobody":
            error = {"message": "The model `nobody` does not exist.", "code": "model_not_found"}
            return web.json_response({"error": error}, status=404)
        if session_id in self._under_way:
            self._records[self._under_way.pop(session_id)]["state"] = "hit"
        # "Final Answer" is how CrewAI's text protocol ends.
        text = f"Thought: I know.\nFinal Answer: answer {len(self.requests)}"
        base = {"id": f"chat-{len(self.requests)}", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
        if body.get("stream"):
            return await _stream(request, base, text)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(base | {"object": "chat.completion", "choices": [choice], "usage": usage})


def _public(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "told"}


async def _stream(request: web.Request, base: dict[str, Any], text: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for delta, reason in (({"role": "assistant", "content": text}, None), ({}, "stop")):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        event = base | {"object": "chat.completion.chunk", "choices": [choice]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture
def server() -> Iterator[ContractServer]:
    """A contract server on a free loopback port."""
    contract = ContractServer()
    with served(contract.app()) as contract.url:
        yield contract
        contract.is_holding.clear()
