"""The OpenAI and Anthropic routes: bytes in, the node's replies out, and the session that a request may name."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from engine_bridge.api_errors import unknown_model
from engine_bridge.errors import BridgeError
from engine_bridge.node import COUNTING_APIS, Api, JsonReply, SseReply
from engine_bridge.predict.hints import read_body
from engine_bridge.request_context import RequestContext
from gateway.api_turns import AnswerReader, history_as_input, question_of, session_named
from gateway.auth import Principal, tenant_of
from gateway.errors import GatewayError
from gateway.policy.call_size import check_call
from gateway.policy.connections import RareLine
from gateway.policy.followers import Arrival
from gateway.request_priority import checked_priority
from gateway.rest import json_body
from gateway.services import SERVICES, Services
from gateway.sessions import checked_id
from gateway.turns import from_bridge
from gateway.web_policy import REQUEST_ID_HEADER, error_body, request_id

log = logging.getLogger(__name__)

SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
SESSION_HEADER = "X-Session-Id"
# Which agent asks, and in which run of its workflow: what learned advisories are learned from.
AGENT_HEADER, WORKFLOW_HEADER = "X-Agent-Name", "X-Workflow-Id"
SLOW_READER_S = 20.0  # as for chat sockets: docs/protocol.md, rule 5
_slow_line = RareLine()


@dataclass(frozen=True, slots=True)
class _Recording:
    """Where a finished API call is written down as a turn."""

    owner: str
    session_id: str
    question: str
    adapter: str | None


def endpoint(api: Api) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The handler of one API family's main call."""

    async def handle(request: web.Request) -> web.StreamResponse:
        services = request.app[SERVICES]
        principal = services.admit(request)
        # Before the body is read: what waits to be read takes memory, too.
        with services.budgets.enter(principal.owner):
            async with services.calls.of(principal.owner):
                return await _handle(request, services, principal, api)

    return handle


def _check_size(services: Services, api: Api, body: Any) -> None:
    """Raises InvalidRequest for a call that asks for too much. After history was put in front of it, which counts as well."""
    config, max_model_len = services.config, services.node.max_model_len
    if not max_model_len:
        return  # the engine is not up: the node says so
    check_call(
        api,
        body,
        max_messages=config.max_messages,
        max_prompt_chars=config.request_limits.prompt_chars(max_model_len),
        max_sequences=config.max_sequences,
    )


async def _handle(
    request: web.Request, services: Services, principal: Principal, api: Api
) -> web.StreamResponse:
    owner = principal.owner
    body = await json_body(request)
    priority = _take_priority(services, body)
    _take_hints(services, owner, body)
    recording = await _recording(services, owner, api, body, request.headers.get(SESSION_HEADER))
    _check_size(services, api, body)
    asked = read_body(body)
    context = RequestContext(
        tenant=tenant_of(owner),
        session_id=recording.session_id if recording else "",
        adapter=_adapter_named(services, body) or "",
        weight=principal.weight,
        priority=priority,
        # Text is held only where somebody reads it.
        asked=asked if services.config.length_predictor is not None else asked.numbers(),
    )
    arrival = _arrival(request, owner, recording)
    services.learned.arrived(arrival)
    try:
        return await _answer(request, services, api, body, recording, context)
    finally:
        services.learned.ended(arrival)


def _arrival(request: web.Request, owner: str, recording: _Recording | None) -> Arrival:
    """Whose request this is, as far as it says."""
    session_id, adapter = (recording.session_id, recording.adapter) if recording else ("", None)
    agent = request.headers.get(AGENT_HEADER, "") if recording else ""
    return Arrival(owner, request.headers.get(WORKFLOW_HEADER, ""), agent, session_id, adapter)


async def _answer(
    request: web.Request,
    services: Services,
    api: Api,
    body: Any,
    recording: _Recording | None,
    context: RequestContext,
) -> web.StreamResponse:
    reply = await services.node.serve(api, body, {REQUEST_ID_HEADER: request_id(request)}, context)
    headers = {SESSION_HEADER: recording.session_id} if recording else {}
    reader = AnswerReader(api) if recording else None
    if isinstance(reply, JsonReply):
        if reader is not None and recording is not None and reply.status == 200:
            reader.feed_json(reply.body)
            await _record(services, recording, reader)
        return web.Response(
            body=reply.body, status=reply.status, content_type="application/json", headers=headers
        )
    return await _stream(request, services, reply, headers, recording, reader)


def _take_priority(services: Services, body: Any) -> int:
    """`priority`, vLLM's own extra field. Raises GatewayError `bad_request`."""
    value = body.pop("priority", None) if isinstance(body, dict) else None
    return checked_priority(value, may_hurry=services.config.client_priority)


def _take_hints(services: Services, owner: str, body: Any) -> None:
    """Act on `kv_hints`, by which a request says which sessions come after it. They are advice: bad ones fail no request."""
    hints = body.pop("kv_hints", None) if isinstance(body, dict) else None
    if hints is not None:
        try:
            services.advisories.hint(owner, hints)
        except GatewayError as error:
            log.info("the hints of a request were dropped: %s", error.code)


async def _recording(
    services: Services, owner: str, api: Api, body: Any, header: str | None
) -> _Recording | None:
    """The session that a call belongs to, in this order: header, body `session_id`, `previous_response_id`.

    With `previous_response_id` the history of that response is put in front of `input`, so it works after a restart too.
    """
    if not isinstance(body, dict) or api in COUNTING_APIS:
        return None
    session_id = session_named(header, body)
    previous = body.pop("previous_response_id", None) if api == "responses" else None
    if previous is not None:
        found = await services.store.find_response(owner, str(previous))
        if found is None:
            raise GatewayError(
                "not_found", f"There is no response {previous!r} here.", param="previous_response_id"
            )
        body["input"] = history_as_input(await services.store.history_until(owner, *found)) + as_items(body)
        session_id = session_id or found[0]
    keeps_response = api == "responses" and body.get("store") is not False
    if session_id is None and not keeps_response:
        return None
    session_id = checked_id(session_id, "session_id") if session_id else uuid.uuid4().hex
    return _Recording(owner, session_id, question_of(api, body), _adapter_named(services, body))


def _adapter_named(services: Services, body: Any) -> str | None:
    """What a body calls its model, unless that is the base model; whether there is such an adapter, the node finds out."""
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) and model not in ("", services.config.served_model_name) else None


def as_items(body: dict[str, Any]) -> list[Any]:
    """`input` of a Responses call as a list of items."""
    value = body.get("input")
    return list(value) if isinstance(value, list) else [{"role": "user", "content": value}]


async def _stream(
    request: web.Request,
    services: Services,
    reply: SseReply,
    headers: dict[str, str],
    recording: _Recording | None,
    reader: AnswerReader | None,
) -> web.StreamResponse:
    response = web.StreamResponse(headers=SSE_HEADERS | headers)
    try:
        await response.prepare(request)
        async for event in reply.events:
            if reader is not None:
                reader.feed(event)
            try:
                async with asyncio.timeout(SLOW_READER_S):
                    await response.write(event)
            except TimeoutError:
                services.metrics.slow_readers.inc()
                _slow_line.add()
                if num := _slow_line.due(time.monotonic()):
                    log.info("cut off %d clients that do not read their streams", num)
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("slow reader") from None
    except BridgeError as error:
        # The head has gone out with 200: the error is the stream's last event.
        body = error_body(request, from_bridge(error))
        await response.write(b"event: error\ndata: " + orjson.dumps(body) + b"\n\n")
    finally:
        # Also when the client has gone: closing the events aborts the request in the engine.
        await reply.events.aclose()  # type: ignore[attr-defined]
        if reader is not None and recording is not None and (reader.has_answer or reader.response_id):
            await asyncio.shield(_record(services, recording, reader))
    await response.write_eof()
    return response


async def _record(services: Services, recording: _Recording, reader: AnswerReader) -> None:
    """Write the call down as a turn. A full disk or quota must not turn a good answer into an error: it is logged."""
    try:
        await services.store.record_turn(
            recording.owner,
            recording.session_id,
            uuid.uuid4().hex,
            recording.question,
            answer=reader.answer,
            status="done" if reader.is_complete else "stopped",
            adapter=recording.adapter,
            finish_reason=reader.finish_reason,
            usage=reader.usage,
            response_id=reader.response_id,
            makes_session=True,
            now=time.time(),
        )
    except GatewayError as error:
        log.error("an API turn could not be stored: %s", error.code)


async def models(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    shown = await _models(services, services.admit(request))
    return web.Response(body=orjson.dumps(shown), content_type="application/json")


async def _models(services: Services, principal: Principal) -> dict[str, Any]:
    """The body of `/v1/models`. vLLM's `root` is a path on this machine, which is the operator's to know: others get the name again."""
    shown: dict[str, Any] = orjson.loads((await services.node.models()).body)
    if not services.keys.is_operator(principal):
        for card in shown["data"]:
            card["root"] = card["id"]
    return shown


async def model(request: web.Request) -> web.Response:
    """One card of `/v1/models`."""
    services = request.app[SERVICES]
    cards = (await _models(services, services.admit(request)))["data"]
    name = request.match_info["name"]
    card = next((card for card in cards if card["id"] == name), None)
    if card is None:
        raise GatewayError(
            "unknown_model", unknown_model(name, [card["id"] for card in cards]), param="model"
        )
    return web.Response(body=orjson.dumps(card), content_type="application/json")


def adapter_call(method: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Load or unload an adapter, where the operator allows it: the body names a path on this machine."""

    async def handle(request: web.Request) -> web.Response:
        services = request.app[SERVICES]
        principal = services.admit(request)
        services.check_may_change_adapters(principal)
        async with services.calls.of(principal.owner):
            reply = await getattr(services.node, method)(await json_body(request))
        return web.Response(body=reply.body, status=reply.status, content_type="application/json")

    return handle


def add_routes(app: web.Application) -> None:
    app.add_routes(
        [
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", model),
            web.post("/v1/chat/completions", endpoint("chat")),
            web.post("/v1/completions", endpoint("completions")),
            web.post("/v1/responses", endpoint("responses")),
            web.post("/v1/messages", endpoint("messages")),
            web.post("/v1/messages/count_tokens", endpoint("count_tokens")),
            web.post("/tokenize", endpoint("tokenize")),
            web.post("/detokenize", endpoint("detokenize")),
            web.post("/v1/load_lora_adapter", adapter_call("load_adapter")),
            web.post("/v1/unload_lora_adapter", adapter_call("unload_adapter")),
        ]
    )
