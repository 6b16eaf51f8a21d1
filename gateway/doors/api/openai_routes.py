"""The OpenAI and Anthropic routes: bytes in, the node's replies out, and the session that a request may name."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import orjson
from aiohttp import web

from engine_bridge.calls.context_overflow import dropped_of
from engine_bridge.predict.hints import read_body
from engine_bridge.protocol.api_errors import unknown_model
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import BridgeError
from engine_bridge.protocol.node import COUNTING_APIS, Api, JsonReply, SseReply, is_for_gateway
from gateway.access.auth import Principal, tenant_of
from gateway.advisories.followers import AgentCall
from gateway.doors.api import anthropic_models
from gateway.doors.api.call_size import check_call
from gateway.doors.api.document_reading import read_documents
from gateway.doors.api.picture_fetching import fetch_pictures
from gateway.doors.api.recording import Recording, adapter_named, record, recording_of
from gateway.doors.http.admission import RareLine
from gateway.doors.http.bodies import json_body
from gateway.doors.http.web_policy import (
    FOUND_SESSION_HEADER,
    HINTS_HEADER,
    LEFT_OUT_HEADER,
    REQUEST_ID_HEADER,
    RETRY_AFTER_S,
    TRACE,
    Trace,
    error_body,
    request_id,
    speaks_anthropic,
)
from gateway.errors import GatewayError
from gateway.hints.kv_hints import Asker
from gateway.hints.parsing import CallHints, hints_of, strip
from gateway.people.usage import num_chars_of, spent_on
from gateway.recognition.fingerprints import turn_of
from gateway.recognition.recognition import SessionCall
from gateway.recognition.session_names import KEPT_HEADER, kept_session
from gateway.services import SERVICES, Services
from gateway.settings.priorities import checked_priority
from gateway.turns.background_responses import BackgroundResponse
from gateway.turns.failures import from_bridge
from gateway.turns.replies import AnswerReader, with_previous

log = logging.getLogger(__name__)

SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# The agent's name and the run of its workflow, from which learned advisories are learned.
AGENT_HEADER, WORKFLOW_HEADER = "X-Agent-Name", "X-Workflow-Id"
# What became of the hints of KV that a call brought.
HINTS_TOLD = web.RequestKey("hints_told", str)
# How a call of `/invocations`, which is SageMaker's name for all of them, says what it asks for.
INVOKED: dict[str, Api] = {"messages": "chat", "prompt": "completions", "prompt_embeds": "completions"}
SLOW_READER_S = 20.0  # as for chat sockets: docs/protocol.md, rule 5
_slow_line = RareLine()


def endpoint(api: Api | None) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the handler of one API family's main call; None: of chat or text completions, as the body says."""

    async def handle(request: web.Request) -> web.StreamResponse:
        """Answer one call."""
        services = request.app[SERVICES]
        principal = services.admit(request)
        if api not in COUNTING_APIS:
            services.usage.check(principal.owner)
            services.budgets.ask(principal.owner)
        # Before the body is read: waiting bodies take memory, too.
        with services.budgets.enter(principal.owner):
            async with services.calls.of(principal):
                return await _handle(request, services, principal, api)

    return handle


def _check_size(services: Services, api: Api, body: Any) -> None:
    """Raise InvalidRequest for a call that asks for too much. Called after history was put in front of it, which counts as well."""
    config = services.config
    check_call(api, body, max_messages=config.max_messages, max_sequences=config.max_sequences)


def _refuse(services: Services, api: Api, body: Any) -> None:
    """Raise GatewayError for a call that asks a model beside the chat model for an answer, or whose conversation the server is to hold (`thread`).

    Of such a conversation later calls would come without what was said before. Tool runners of Anthropic's SDKs ask for it, and send whole
    conversations where the server cannot. Source: SDK for Python 2.14, `_thread_state`.
    """
    if not isinstance(body, dict):
        return
    for other in services.models_beside:
        if body.get("model") == other.name:
            does = (
                "makes embeddings only (POST /v1/embeddings)"
                if other is services.embeddings
                else "scores texts only (POST /rerank)"
            )
            message = f"The model `{other.name}` {does}. Ask `{services.config.served_model_name}`."
            raise GatewayError("bad_request", message, param="model")
    if api == "messages" and body.get("thread") is not None:
        raise GatewayError(
            "bad_request",
            "This server holds no message threads: send the whole conversation with each call, without `thread`.",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )


async def bring_in(services: Services, sender: str, *bodies: Any) -> None:
    """Put into the bodies of one call what they name or pack: pictures by their address, the text of documents. Raises GatewayError."""
    for body in bodies:
        await fetch_pictures(services.config, body)
    whole = (
        {"messages": [each for body in bodies for each in body["messages"]]} if len(bodies) > 1 else bodies[0]
    )
    await read_documents(services.documents, whole, sender, services.config.max_body_bytes)


async def _handle(
    request: web.Request, services: Services, principal: Principal, named: Api | None
) -> web.StreamResponse:
    owner = principal.owner
    body = await json_body(request)
    api = named or _invoked(body)
    _refuse(services, api, body)
    priority = take_priority(services, body)
    hints = _hints(services, api, body, request.headers)
    is_background = _take_background(api, body)
    sender = services.client_of(owner, request)
    await bring_in(services, sender, body)
    recording = await recording_of(services, owner, api, body, kept_session(request.headers))
    _check_size(services, api, body)
    asked = read_body(body)
    trace = request.get(TRACE, Trace())
    adapter = adapter_named(services, body)
    stored, is_named = (recording.session_id, recording.is_named) if recording else ("", False)
    call = await services.recognition.began(
        owner, api, request.headers, body, adapter, stored, is_named=is_named
    )
    strip(body)
    whose = Asker(owner, sender, adapter)
    if text := services.kv_hints.heard(whose, call, hints):
        request[HINTS_TOLD] = text
    asker = EngineRequest(
        traceparent=trace.traceparent,
        accepted_s=trace.begun_s,
        tenant=tenant_of(owner),
        session_id=call.session_id if call else stored,
        adapter=adapter or "",
        history_token_ids=recording.history_token_ids if recording else b"",
        weight=principal.weight,
        priority=hints.priority or 0 if priority is None else priority,
        turn=turn_of(body),
        caller=call.caller if call else "",
        keeps_ids=recording is not None,
        expected_tokens=hints.expected_tokens,
        is_marked=hints.is_marked,
        # The text is held only where a user's own length predictor reads it.
        asked=asked if services.config.length_predictor is not None else asked.numbers(),
    )
    arrival = _arrival(request, owner, recording)
    services.learned.arrived(arrival)
    reader = AnswerReader(api)
    has_left = False
    try:
        if is_background and recording is not None:
            return await _answer_in_background(request, principal, body, recording, asker, call)
        response = await _answer(request, services, api, body, recording, asker, reader)
        services.recognition.ended(call, reader)
        return response
    except BaseException as error:
        has_left = isinstance(error, asyncio.CancelledError | ConnectionError)
        services.recognition.ended(call, reader)  # unless it has ended
        raise
    finally:
        services.learned.ended(arrival)
        if api not in COUNTING_APIS:
            count_tokens(services, owner, reader, body, has_left=has_left)


def count_tokens(
    services: Services, owner: str, reader: AnswerReader, body: Any, *, has_left: bool = False
) -> None:
    """Count what a call has used for its owner. has_left: its client did, so there may be no count of the engine's."""
    spent = spent_on(
        reader.usage,
        reader.figures,
        num_choices=reader.num_choices,
        num_events=reader.num_events,
        num_prompt_chars=num_chars_of(body) if has_left or reader.num_events else 0,
    )
    services.usage.add(owner, spent)


def _invoked(body: Any) -> Api:
    """Return the API that a body of `/invocations` is for. Raises GatewayError `bad_request`."""
    for field, api in INVOKED.items():
        if isinstance(body, dict) and field in body:
            return api
    raise GatewayError("bad_request", f"Send one of these fields: {', '.join(INVOKED)}.")


def _arrival(request: web.Request, owner: str, recording: Recording | None) -> AgentCall:
    """Return which agent and workflow the request names, for learned advisories."""
    session_id, adapter = (recording.session_id, recording.adapter) if recording else ("", None)
    agent = request.headers.get(AGENT_HEADER, "") if recording else ""
    return AgentCall(owner, request.headers.get(WORKFLOW_HEADER, ""), agent, session_id, adapter)


async def _answer_in_background(
    request: web.Request,
    principal: Principal,
    body: dict[str, Any],
    recording: Recording,
    asker: EngineRequest,
    call: SessionCall | None,
) -> web.StreamResponse:
    """Begin a response whose client need not stay, and answer as soon as it has begun; a bad request is refused as any other."""
    services = request.app[SERVICES]
    owner, is_streamed = recording.owner, body.get("stream") is True
    with ExitStack() as places:
        places.enter_context(services.budgets.enter(owner))
        headers = {REQUEST_ID_HEADER: request_id(request)}
        # Always as a stream: it begins once nothing can be refused any more.
        reply = await services.node.serve("responses", body | {"stream": True}, headers, asker)
        if isinstance(reply, JsonReply):
            services.recognition.ended(call, AnswerReader("responses"))
            return as_response(reply)
        reply = _naming_previous(reply, recording)
        running = places.pop_all()

    async def scope(reading: Awaitable[None]) -> None:
        """Read the response as one of the owner's calls."""
        async with services.calls.of(principal):
            await reading

    async def store(job: BackgroundResponse) -> None:
        """Keep the response as a turn."""
        count_tokens(services, owner, job.reader, body)
        await record(services, recording, job.reader, job.reply())
        services.recognition.ended(call, job.reader)

    job = await services.background.start(
        owner, reply, is_streamed=is_streamed, scope=scope, record=store, ended=running.close
    )
    if job.reader.response_id is None:
        raise job.error or GatewayError("internal", "The response could not be begun.")
    session = _headers(request, recording, asker)
    if not is_streamed:
        reply_now = job.reply() | ({} if job.is_over else {"status": "queued"})
        return web.Response(body=orjson.dumps(reply_now), content_type="application/json", headers=session)
    response = web.StreamResponse(headers=SSE_HEADERS | session)
    await response.prepare(request)
    await write_events(request, services, response, job.follow())
    await response.write_eof()
    return response


def _take_background(api: Api, body: Any) -> bool:
    """Take out of a body whether its client need not stay. Raises GatewayError `bad_request` where its answer is not to be stored."""
    is_background = api == "responses" and isinstance(body, dict) and body.pop("background", None) is True
    if is_background and body.get("store") is False:
        raise GatewayError(
            "bad_request",
            "A background response is read after it has ended, so it must be stored: leave out `store`.",
            param="background",
        )
    return is_background


async def _answer(
    request: web.Request,
    services: Services,
    api: Api,
    body: Any,
    recording: Recording | None,
    asker: EngineRequest,
    reader: AnswerReader,
) -> web.StreamResponse:
    """Answer a call while a reader reads along."""
    reply = await services.node.serve(api, body, {REQUEST_ID_HEADER: request_id(request)}, asker)
    headers = _headers(request, recording, asker)
    if isinstance(reply, JsonReply):
        if reply.dropped:
            headers[LEFT_OUT_HEADER] = str(reply.dropped)
            services.metrics.note_left_out(reply.dropped)
        if api not in COUNTING_APIS and reply.status == 200:
            reader.feed_json(reply.body, reply.token_ids, reply.figures)
        if recording is not None and reader.is_complete:
            await record(services, recording, reader)
            if recording.previous is not None and reader.reply is not None:
                # The gateway has resolved it, so vLLM does not know of it.
                whole = reader.reply | {"previous_response_id": recording.previous}
                return web.Response(
                    body=orjson.dumps(whole), content_type="application/json", headers=headers
                )
        return as_response(reply, headers)
    return await _stream(request, services, _naming_previous(reply, recording), headers, recording, reader)


def _headers(request: web.Request, recording: Recording | None, asker: EngineRequest) -> dict[str, str]:
    """Return the headers of an answer: the session that it is kept in or belongs to, and what became of the hints that its call brought."""
    told = {HINTS_HEADER: request[HINTS_TOLD]} if HINTS_TOLD in request else {}
    if recording is not None:
        told[KEPT_HEADER] = recording.session_id
    # A name in other letters is left out: clients read headers as Latin-1.
    if asker.session_id and asker.session_id.isascii():
        told[FOUND_SESSION_HEADER] = asker.session_id
    return told


def as_response(reply: JsonReply, headers: Mapping[str, str] = MappingProxyType({})) -> web.Response:
    """Return a node's reply as an HTTP response; an engine that is not available now is worth another try soon."""
    again = {"Retry-After": str(RETRY_AFTER_S)} if reply.status == 503 else {}
    return web.Response(
        body=reply.body, status=reply.status, content_type="application/json", headers={**headers, **again}
    )


def _naming_previous(reply: SseReply, recording: Recording | None) -> SseReply:
    """Return the same stream, with response objects that name the response before them."""
    if recording is None or recording.previous is None:
        return reply
    return SseReply(_Named(reply.events, recording.previous))


class _Named:
    """Events whose response objects name the response before them. No generator: closing a generator that was never read does nothing."""

    def __init__(self, events: AsyncIterator[bytes], previous: str) -> None:
        self._events, self._previous = events, previous

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return with_previous(await anext(self._events), self._previous)

    async def aclose(self) -> None:
        """End the stream. Its request leaves the engine."""
        await self._events.aclose()  # type: ignore[attr-defined]


def take_priority(services: Services, body: Any) -> int | None:
    """Take vLLM's own extra field `priority` out of a body; None without it. Raises GatewayError `bad_request`."""
    value = body.pop("priority", None) if isinstance(body, dict) else None
    return checked_priority(value, may_hurry=services.config.client_priority) if value is not None else None


def _hints(services: Services, api: Api, body: Any, headers: Mapping[str, str]) -> CallHints:
    """Return what a call says of KV, with a priority that its key may have. Hints are advice: bad ones fail no request."""
    found = CallHints() if api in COUNTING_APIS else hints_of(api, body, headers)
    found.limit_priority(may_hurry=services.config.client_priority)
    return found


async def _stream(
    request: web.Request,
    services: Services,
    reply: SseReply,
    headers: dict[str, str],
    recording: Recording | None,
    reader: AnswerReader,
) -> web.StreamResponse:
    response = web.StreamResponse(headers=SSE_HEADERS | headers)
    try:
        await response.prepare(request)
        await write_events(request, services, response, reply.events, reader)
    finally:
        # Also when the client's connection has ended: closing the events aborts the request in the engine.
        try:
            await reply.events.aclose()  # type: ignore[attr-defined]
        finally:  # many clients leave as soon as they have read [DONE], which cancels this
            if recording is not None and reader.has_begun:
                await asyncio.shield(record(services, recording, reader))
    await response.write_eof()
    return response


async def write_events(
    request: web.Request,
    services: Services,
    response: web.StreamResponse,
    events: AsyncIterator[bytes],
    reader: AnswerReader | None = None,
) -> None:
    """Send events as they come, and a failure of theirs as the last event.

    Raises:
        ConnectionResetError: the client reads too slowly, or its connection has ended.
    """
    try:
        async for event in events:
            if reader is not None:
                reader.feed(event)
            if is_for_gateway(event):
                continue
            if dropped := dropped_of(event):
                services.metrics.note_left_out(dropped)
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
        # The head was sent with 200, so the error is the stream's last event.
        body = error_body(request, from_bridge(error))
        await response.write(b"event: error\ndata: " + orjson.dumps(body) + b"\n\n")


async def models(request: web.Request) -> web.Response:
    """Answer `GET /v1/models`, in OpenAI's or Anthropic's form."""
    shown = await _models(request)
    if speaks_anthropic(request):
        shown = anthropic_models.page(shown["data"], request.query)
    return web.Response(body=orjson.dumps(shown), content_type="application/json")


async def _models(request: web.Request) -> dict[str, Any]:
    """Return the body of `/v1/models`. vLLM's `root` is a path on this machine, which only operators see: others get the name again.

    Anthropic's API has no embeddings and no scores, so its clients are not told of the models for them.
    """
    services = request.app[SERVICES]
    principal = services.admit(request)
    shown: dict[str, Any] = orjson.loads((await services.node.models()).body)
    if not speaks_anthropic(request):
        # Behind all others: clients that take the first one want to chat.
        shown["data"] += [
            shown["data"][0]
            | {"id": other.name, "root": other.path, "max_model_len": other.max_model_len or None}
            for other in services.models_beside
        ]
    if not services.keys.is_operator(principal):
        for card in shown["data"]:
            card["root"] = card["id"]
    return shown


async def model(request: web.Request) -> web.Response:
    """Answer `GET /v1/models/{name}`, one card."""
    cards = (await _models(request))["data"]
    name = request.match_info["name"]
    card = next((card for card in cards if card["id"] == name), None)
    if card is None:
        raise GatewayError(
            "unknown_model", unknown_model(name, [card["id"] for card in cards]), param="model"
        )
    if speaks_anthropic(request):
        card = anthropic_models.card_of(card)
    return web.Response(body=orjson.dumps(card), content_type="application/json")


async def tokenizer_info(request: web.Request) -> web.Response:
    """Answer as `vllm serve --enable-tokenizer-info-endpoint` does: with the tokenizer's settings, special tokens and chat template."""
    services = request.app[SERVICES]
    principal = services.admit(request)
    async with services.calls.of(principal):
        asker = EngineRequest(tenant=tenant_of(principal.owner), weight=principal.weight)
        reply = await services.node.serve(
            "tokenizer_info", {}, {REQUEST_ID_HEADER: request_id(request)}, asker
        )
    assert isinstance(reply, JsonReply)
    return web.Response(body=reply.body, status=reply.status, content_type="application/json")


def adapter_call(method: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that loads or unloads an adapter, where the operator allows it: the body names a path on this machine."""

    async def handle(request: web.Request) -> web.Response:
        """Load or unload an adapter."""
        services = request.app[SERVICES]
        principal = services.admit(request)
        services.check_may_change_adapters(principal)
        services.note_operator(request, principal)
        async with services.calls.of(principal):
            reply = await getattr(services.node, method)(await json_body(request))
        return as_response(reply)

    return handle


ROUTES = (
    web.get("/v1/models", models),
    web.get("/v1/models/{name:.+}", model),
    web.post("/v1/chat/completions", endpoint("chat")),
    web.post("/v1/completions", endpoint("completions")),
    web.post("/invocations", endpoint(None)),
    web.post("/v1/responses", endpoint("responses")),
    web.post("/v1/responses/input_tokens", endpoint("input_tokens")),
    web.post("/v1/messages", endpoint("messages")),
    web.post("/v1/messages/count_tokens", endpoint("count_tokens")),
    web.post("/tokenize", endpoint("tokenize")),
    web.post("/detokenize", endpoint("detokenize")),
    web.get("/tokenizer_info", tokenizer_info),
    web.post("/v1/load_lora_adapter", adapter_call("load_adapter")),
    web.post("/v1/unload_lora_adapter", adapter_call("unload_adapter")),
)
