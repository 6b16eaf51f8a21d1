"""API calls as turns of sessions.

The session that a call belongs to, the conversation that it continues, and the turn that is stored once it was answered.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

import orjson

from engine_bridge.calls.prompt_embeds import FIELD, embeddings_of
from engine_bridge.policy.limits.request_limits import measure
from engine_bridge.protocol.node import COUNTING_APIS, Api
from gateway.errors import GatewayError
from gateway.recognition.fingerprints import ends_with_results
from gateway.services import Services
from gateway.sessions import ResponseHistory, StoredResponse, checked_id
from gateway.sessions.pictures import describe
from gateway.turns.replies import (
    AnswerReader,
    as_input,
    as_items,
    is_reference,
    items_of,
    question_of,
    session_named,
    shown_in,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recording:
    """The turn that a finished API call is kept as.

    Attributes:
        items: of a Responses call, its `input` as items; None for a call that is not kept as a response.
        previous: of a Responses call, its `previous_response_id`.
        is_kept: whether it is kept at all; a call with `store` false that goes on from a response is not, unless it names its session, too.
        is_named: whether the call names its session; otherwise it begins a new session, of which only the response is kept.
        brings_results: whether the call brings the results of tools that the answer before has asked for.
        pictures: those of the question, as `data:` URLs.
        history_token_ids: the ids of the conversation so far, packed, as far as they are known.
    """

    owner: str
    session_id: str
    question: str
    adapter: str | None
    items: list[Any] | None = None
    previous: str | None = None
    history_token_ids: bytes = b""
    is_kept: bool = True
    is_named: bool = True
    brings_results: bool = False
    pictures: tuple[str, ...] = ()


async def recording_of(
    services: Services, owner: str, api: Api, body: Any, header: str | None
) -> Recording | None:
    """Return the session that a call belongs to: by its header, its body's `session_id` or `metadata.session_id`, or its `previous_response_id`.

    With `previous_response_id` the conversation up to that response is put in front of `input`, so it works after a restart too; with `conversation`
    all that the session of this name holds. An item that is named by its id is put in its place. Calls that count tokens belong to no session.

    Raises:
        GatewayError: `not_found` for a name that is not stored, `bad_request` for an id that no session may have.
    """
    has_input = api in ("responses", "input_tokens")
    if not isinstance(body, dict) or (api in COUNTING_APIS and not has_input):
        return None
    session_id = session_named(header, body)
    history = b""
    conversation = _take_conversation(body) if has_input else None
    if has_input:
        await _put_items(services, owner, body)
    items = as_items(body) if has_input else None
    keeps_response = api == "responses" and body.get("store") is not False
    is_kept = keeps_response or session_id is not None or conversation is not None
    previous = body.pop("previous_response_id", None) if has_input else None
    previous = str(previous) if previous is not None else None
    if previous is not None or conversation is not None:
        found = await _went_before(services, owner, previous, conversation)
        if conversation is not None:
            last = found.turns[-1][1] if found.turns else None
            previous = orjson.loads(last.reply)["id"] if last is not None else None
        body["input"] = items_of(found.turns) + as_items(body)
        history, session_id = found.token_ids, conversation or session_id or found.session_id
    if api in COUNTING_APIS or (session_id is None and not keeps_response):
        return None
    if session_id is not None:
        if embeddings_of(api, body):
            raise GatewayError(
                "bad_request", "Sessions are of text: a call with `prompt_embeds` names none.", param=FIELD
            )
        session_id = checked_id(session_id, "session_id")
        history = history or await services.store.token_ids(owner, session_id)
    is_named, kept = session_id is not None, items if keeps_response else None
    session_id = session_id or uuid.uuid4().hex
    adapter, question = adapter_named(services, body), question_of(api, body)
    shown = tuple(shown_in(api, body)) if is_named else ()
    how = {"is_kept": is_kept, "is_named": is_named, "brings_results": ends_with_results(body)}
    return Recording(owner, session_id, question, adapter, kept, previous, history, **how, pictures=shown)


async def _went_before(
    services: Services, owner: str, previous: str | None, conversation: str | None
) -> ResponseHistory:
    """Return what a Responses call goes on from: a response, or else a conversation.

    Raises GatewayError: there is none, or it is longer than a body may be, which it soon is with pictures in its turns.
    """
    if previous is not None:
        found, param = await services.store.responses.history(owner, previous), "previous_response_id"
        unknown = f"There is no response {previous[:100]!r} here."
    else:
        name, param = conversation or "", "conversation"
        found = await services.store.responses.of_session(owner, name)
        unknown = f"There is no conversation {name[:100]!r} here. It is one of your sessions: POST /v1/conversations begins one."
    if found is None:
        raise GatewayError("not_found", unknown, param=param)
    stored = [response for _, response in found.turns if response is not None]
    if sum(len(each.items) + len(each.reply) for each in stored) > services.config.max_body_bytes:
        raise GatewayError(
            "frame_too_large",
            f"The conversation is longer than a body may be ({services.config.max_body_bytes} bytes). Begin another, or send what counts of it.",
            param=param,
        )
    return found


def _take_conversation(body: dict[str, Any]) -> str | None:
    """Take `conversation` out of a Responses call's body: an id or an object with it. Raises GatewayError."""
    value = body.pop("conversation", None)
    if value is None:
        return None
    name = value.get("id") if isinstance(value, dict) else value
    if not isinstance(name, str):
        raise GatewayError("bad_request", "'conversation' must be an id.", param="conversation")
    if body.get("previous_response_id") is not None:
        raise GatewayError(
            "bad_request", "Give 'conversation' or 'previous_response_id', not both.", param="conversation"
        )
    return name


async def _put_items(services: Services, owner: str, body: dict[str, Any]) -> None:
    """Put stored items in the places of their names in `input`. Raises GatewayError `not_found`."""
    given = body.get("input")
    if not isinstance(given, list) or not any(map(is_reference, given)):
        return
    if len(given) > services.config.max_messages:
        return  # refused in a moment: see `check_call`
    names = [item["id"] for item in given if is_reference(item)]
    found = await services.store.responses.items(owner, names)
    missing = next((name for name in names if name not in found), None)
    if missing is not None:
        raise GatewayError("not_found", f"There is no item {missing[:100]!r} here.", param="input")
    whole = [as_input(found[item["id"]]) if is_reference(item) else item for item in given]
    if measure(whole)[1] > services.config.max_body_bytes:
        raise GatewayError(
            "frame_too_large",
            f"The items that 'input' names are longer than a body may be ({services.config.max_body_bytes} bytes).",
            param="input",
        )
    body["input"] = whole


def adapter_named(services: Services, body: Any) -> str | None:
    """Return the model that a body names, unless it is the base model. Whether there is such an adapter, the node finds out."""
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) and model not in ("", *services.config.model_names) else None


async def record(
    services: Services, recording: Recording, reader: AnswerReader, reply: dict[str, Any] | None = None
) -> None:
    """Keep a call as a turn, and tell the pages that show its session.

    A full disk or quota must not turn a good answer into an error: it is logged. Of a session that was deleted a moment ago only responses are kept,
    which their client may name again: each begins another session.

    Args:
        services: the gateway's parts.
        recording: the turn.
        reader: has read the answer.
        reply: the response object to keep, where it is another than the reader's.
    """
    if not recording.is_kept:
        return
    turn_id = uuid.uuid4().hex
    response = _stored(recording, reply or reader.reply)
    try:
        await services.store.record_turn(
            recording.owner,
            recording.session_id,
            turn_id,
            recording.question,
            answer=reader.answer,
            status="done" if reader.is_complete else "stopped",
            adapter=recording.adapter,
            finish_reason=reader.finish_reason,
            usage=reader.usage,
            response_id=reader.response_id,
            token_ids=reader.token_ids,
            response=response,
            previous=recording.previous,
            is_version=recording.brings_results and response is None,
            makes_session=True,
            pictures=await _stored_pictures(services, recording),
            now=time.time(),
        )
    except GatewayError as error:
        if error.code == "conflict" and response is not None:
            elsewhere = dataclasses.replace(recording, session_id=uuid.uuid4().hex)
            await record(services, elsewhere, reader, reply)
        else:
            log.error("an API turn could not be stored: %s", error.code)
        return
    services.drafts.renew(recording.owner, recording.session_id)
    services.tell_shown(recording.owner, recording.session_id, turn_id)


async def _stored_pictures(services: Services, recording: Recording) -> list[str]:
    """Store the pictures of a call's question, and return their ids. The model has read them, so what cannot be stored is left out."""
    found: list[str] = []
    for url in recording.pictures:
        try:
            data = await asyncio.to_thread(base64.b64decode, url.partition(",")[2])
            picture = await asyncio.to_thread(describe, data, services.config.max_image_mpixels * 1e6)
        except (GatewayError, ValueError):
            continue
        await services.store.pictures.put(recording.owner, picture, data, time.time())
        found.append(picture.id)
    return found


def _stored(recording: Recording, reply: dict[str, Any] | None) -> StoredResponse | None:
    if reply is None or recording.items is None:
        return None
    reply = reply | {"previous_response_id": recording.previous}
    return StoredResponse(
        reply=orjson.dumps(reply), items=orjson.dumps(recording.items), previous=recording.previous
    )
