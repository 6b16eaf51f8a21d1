"""`/v1/responses/{id}`: answers of the Responses API that are stored or under way, for the key that asked for them."""

from __future__ import annotations

import time
from typing import Any

import orjson
from aiohttp import web

from gateway.doors.api.openai_routes import SSE_HEADERS, write_events
from gateway.doors.http.bodies import in_place, json_reply
from gateway.errors import GatewayError
from gateway.services import SERVICES, Services
from gateway.sessions import StoredResponse, Turn
from gateway.turns.background_responses import BackgroundResponse
from gateway.turns.replies import listed_items, reply_of_turn

# Source: OpenAI's API reference, "List input items".
DEFAULT_ITEMS, MAX_ITEMS = 20, 100


async def read(request: web.Request) -> web.StreamResponse:
    """Answer with a response as it is now; with `?stream=true` with the events of a response that was begun in the background with `stream`."""
    services, _, _, job = _asked_for(request)
    if _is_true(request, "stream"):
        if job is None or not job.is_streamed:
            await _stored(request)  # an unknown response is `not_found`, whatever is asked of it
            raise GatewayError(
                "bad_request",
                "The events of this response are not kept: only those of a response that was begun with `background` and `stream` are, "
                "for two minutes after its end.",
                param="stream",
            )
        after = _number(request, "starting_after", -1)
        if after < 0 and "starting_after" in request.query:
            raise GatewayError(
                "bad_request", "'starting_after' must not be negative.", param="starting_after"
            )
        response = web.StreamResponse(headers=SSE_HEADERS)
        await response.prepare(request)
        await write_events(request, services, response, job.follow(after))
        await response.write_eof()
        return response
    if job is not None and not job.is_over:
        return json_reply(job.reply())
    turn, stored = await _stored(request)
    return _reply(stored.reply if stored else _of_turn(request, turn))


async def delete(request: web.Request) -> web.Response:
    """Answer `DELETE /v1/responses/{id}`."""
    services, owner, response_id, job = _asked_for(request)
    if job is not None:
        await services.background.cancel(job)
        services.background.forget(owner, response_id)
    if not await services.store.responses.delete(owner, response_id, time.time()):
        raise _not_found(response_id)
    services.drafts.renew_owner(owner)
    return json_reply({"id": response_id, "object": "response.deleted", "deleted": True})


async def cancel(request: web.Request) -> web.Response:
    """End a response that runs in the background; a response that is over is answered as it is, as OpenAI's API does."""
    services, _, _, job = _asked_for(request)
    if job is not None:
        await services.background.cancel(job)
    _, stored = await _stored(request)
    reply = orjson.loads(stored.reply) if stored else {}
    if not reply.get("background"):
        raise GatewayError(
            "bad_request", "Only a response that was begun with `background` can be cancelled.", param="id"
        )
    return json_reply(reply)


async def input_items(request: web.Request) -> web.Response:
    """Answer `GET /v1/responses/{id}/input_items`: with the input of a stored response, the newest item first unless `order=asc`."""
    turn, stored = await _stored(request)
    items = orjson.loads(stored.items) if stored else [{"role": "user", "content": turn.content}]
    return page_of(request, listed_items(items, request.match_info["id"]))


def page_of(request: web.Request, listed: list[dict[str, Any]]) -> web.Response:
    """Return the page of items that a request asks for by `order`, `after` and `limit`. listed: all of them, the oldest first."""
    if request.query.get("order", "desc") == "desc":
        listed = listed[::-1]
    after = request.query.get("after")
    if after is not None:
        places = [number for number, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise GatewayError("not_found", "There is no such input item.", param="after")
        listed = listed[places[0] + 1 :]
    limit = _number(request, "limit", DEFAULT_ITEMS)
    if not 1 <= limit <= MAX_ITEMS:
        raise GatewayError("bad_request", f"'limit' must be from 1 to {MAX_ITEMS}.", param="limit")
    page = listed[:limit]
    ends = (
        {"first_id": page[0]["id"], "last_id": page[-1]["id"]}
        if page
        else {"first_id": None, "last_id": None}
    )
    return json_reply({"object": "list", "data": page, "has_more": len(listed) > limit, **ends})


def _asked_for(request: web.Request) -> tuple[Services, str, str, BackgroundResponse | None]:
    """Return the services, the owner, the response's id, and its work in the background, if any. Counts as one of the owner's calls."""
    services = request.app[SERVICES]
    owner, response_id = services.admit(request).owner, request.match_info["id"]
    return services, owner, response_id, services.background.find(owner, response_id)


async def _stored(request: web.Request) -> tuple[Turn, StoredResponse | None]:
    """Return a stored response. Raises GatewayError `not_found`, also for a response of another key."""
    services = request.app[SERVICES]
    response_id = request.match_info["id"]
    found = await services.store.responses.read(services.principal(request).owner, response_id)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> GatewayError:
    return GatewayError("not_found", f"There is no response {response_id[:100]!r} here.", param="id")


def _of_turn(request: web.Request, turn: Turn) -> bytes:
    model = request.app[SERVICES].config.served_model_name
    return orjson.dumps(reply_of_turn(turn, request.match_info["id"], model))


def _reply(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _is_true(request: web.Request, name: str) -> bool:
    return request.query.get(name, "").lower() in ("true", "1")


def _number(request: web.Request, name: str, default: int) -> int:
    value: Any = request.query.get(name, default)
    try:
        return int(value)
    except ValueError as error:
        raise GatewayError("bad_request", f"'{name}' must be a whole number.", param=name) from error


ROUTES = (
    web.get("/v1/responses/{id}", in_place(read)),
    web.delete("/v1/responses/{id}", in_place(delete)),
    web.post("/v1/responses/{id}/cancel", in_place(cancel)),
    web.get("/v1/responses/{id}/input_items", in_place(input_items)),
)
