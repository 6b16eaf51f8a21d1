"""`POST /v1/chat/completions/batch`, as vLLM has it: several conversations in one call, each answered as a chat completion, in one reply."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from engine_bridge.policy.limits.request_limits import too_much
from engine_bridge.predict.hints import read_body
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.node import JsonReply
from gateway.access.auth import Principal, tenant_of
from gateway.doors.api.call_size import check_call
from gateway.doors.api.openai_routes import as_response, bring_in, count_tokens, take_priority
from gateway.doors.api.recording import adapter_named
from gateway.doors.http.bodies import json_body
from gateway.doors.http.web_policy import LEFT_OUT_HEADER, REQUEST_ID_HEADER, TRACE, Trace, request_id
from gateway.errors import GatewayError
from gateway.services import SERVICES, Services
from gateway.turns.replies import AnswerReader

_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


async def batch(request: web.Request) -> web.Response:
    """Answer several conversations. They belong to no session."""
    services = request.app[SERVICES]
    principal = services.admit(request)
    services.usage.check(principal.owner)
    services.budgets.ask(principal.owner)
    # Before the body is read: waiting bodies take memory, too.
    with services.budgets.enter(principal.owner):
        async with services.calls.of(principal):
            body = await json_body(request)
            priority = take_priority(services, body) or 0
            bodies = _each(services, body)
            await bring_in(services, services.client_of(principal.owner, request), *bodies)
            try:
                async with asyncio.TaskGroup() as group:
                    asked = [
                        group.create_task(_ask(request, services, principal, each, priority))
                        for each in bodies
                    ]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from errors
            return _joined([task.result() for task in asked])


def _each(services: Services, body: Any) -> list[dict[str, Any]]:
    """Return the body of each conversation's chat completion. Raises GatewayError, InvalidRequest."""
    found = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(found, list) or not found or not all(isinstance(each, list) and each for each in found):
        raise GatewayError(
            "bad_request",
            "`messages` should be a list of conversations, each a list of messages.",
            param="messages",
        )
    for name, usual in (("stream", False), ("tools", None), ("use_beam_search", False), ("n", 1)):
        if body.get(name) not in (usual, None):
            raise GatewayError(
                "bad_request",
                f"`{name}` is not for batches: ask for each conversation by itself.",
                param=name,
            )
    config = services.config
    if len(found) > config.max_sequences:
        raise too_much(
            "Conversations in one call", len(found), config.max_sequences, "max_sequences", "messages"
        )
    bodies = [{**body, "messages": each, "stream": False} for each in found]
    for each in bodies:
        check_call("chat", each, max_messages=config.max_messages, max_sequences=config.max_sequences)
    return bodies


async def _ask(
    request: web.Request, services: Services, principal: Principal, body: dict[str, Any], priority: int
) -> JsonReply:
    """Answer one conversation, and count what it took for its owner."""
    trace, reader = request.get(TRACE, Trace()), AnswerReader("chat")
    asked = read_body(body)
    asker = EngineRequest(
        traceparent=trace.traceparent,
        accepted_s=trace.begun_s,
        tenant=tenant_of(principal.owner),
        adapter=adapter_named(services, body) or "",
        weight=principal.weight,
        priority=priority,
        # The text is held only where a user's own length predictor reads it.
        asked=asked if services.config.length_predictor is not None else asked.numbers(),
    )
    has_left = True
    try:
        reply = await services.node.serve("chat", body, {REQUEST_ID_HEADER: request_id(request)}, asker)
        assert isinstance(reply, JsonReply)
        has_left = False
        if reply.status == 200:
            reader.feed_json(reply.body, reply.token_ids, reply.figures)
        if reply.dropped:
            services.metrics.note_left_out(reply.dropped)
        return reply
    finally:
        count_tokens(services, principal.owner, reader, body, has_left=has_left)


def _joined(replies: list[JsonReply]) -> web.Response:
    """Return one reply with a choice of each; the first error where one has failed."""
    for reply in replies:
        if reply.status != 200:
            return as_response(reply)
    found = [orjson.loads(reply.body) for reply in replies]
    choices = [one["choices"][0] | {"index": number} for number, one in enumerate(found)]
    usage = {name: sum(one["usage"][name] for one in found) for name in _COUNTS}
    headers = next(({LEFT_OUT_HEADER: str(reply.dropped)} for reply in replies if reply.dropped), {})
    return web.Response(
        body=orjson.dumps(found[0] | {"choices": choices, "usage": usage}),
        content_type="application/json",
        headers=headers,
    )


ROUTES = (web.post("/v1/chat/completions/batch", batch),)
