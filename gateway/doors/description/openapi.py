"""`GET /openapi.json`: the OpenAPI 3.1 document of this server's HTTP routes, and `GET /docs`, the page that shows it.

The document is made once, off the event loop, from `gateway/doors/description/operations.py`, from the msgspec structs named there and from the
schemas of vLLM's request models (`Node.api_schemas`). Until the engine is up the answer is 503 `starting`: a document without the bodies of the
model calls would be taken for the whole one by programs that make a client or tests of it. It asks for no key, because it says nothing that is
not in the sources.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
from aiohttp import web

from engine_bridge.protocol.node import COUNTING_APIS, POOLING_APIS, SCHEMA_REFERENCE, ApiSchemas
from gateway.advisories.advisories import Envelope
from gateway.doors.description.bodies import AnthropicError, Error
from gateway.doors.description.operation import TAGS, Body, EngineBody, Operation, ReplyShape, Shape
from gateway.doors.description.operations import MODEL, OPERATIONS, SESSION_ID_SCHEMA
from gateway.doors.description.page_operations import EVENT_STREAM
from gateway.doors.pages.serving import page
from gateway.services import SERVICES, Services
from gateway.settings.priorities import MAX_PRIORITY
from overture_client import __version__

# What each status says, whatever the route. The body's `code` says more: docs/protocol.md, "Error codes".
ERRORS = {
    400: "The request was not understood, or asks for what cannot be had; the message says which field is at fault.",
    401: "An API key is missing or wrong, or does not allow this.",
    403: "The key is no operator's, where one is needed, or a page of an origin asks that may not use this server.",
    404: "There is no such thing here (for this key).",
    408: "The body did not come in time.",
    409: "It cannot be done as things are now; the message says why.",
    413: "The body is larger than the server takes.",
    422: "The request was understood, and cannot be carried out as it is.",
    429: "Too many requests: send it again later.",
    500: "The server failed; its log says why.",
    503: "Not now: the engine starts or goes down, or there is no room. Send it again later.",
}
RETRIED = (429, 503)
HEADERS = {
    "Retry-After": "Seconds after which to try again.",
    "WWW-Authenticate": "How to send a key.",
    "X-Overture-KV-Hints": "What became of the call's hints of KV, such as `retain=granted;ttl=300`.",
    "X-Overture-Left-Out": "What was left out because the prompt did not fit, such as `tools=36`; in a stream, its first comment says so.",
    "X-Overture-Session": "The session that the call was found to be part of, whether or not its client named one.",
    "X-Session-Id": "The session that keeps the call as a turn, where there is one.",
    "X-Request-Id": "The request's name: what the client sent under it, or one made here.",
}
# Fields of other servers that are read as hints of KV, of a request's own session: docs/agents.md.
HINT_FIELDS = {
    "prompt_cache_retention": "OpenAI's: `in_memory` or `24h`.",
    "prompt_cache_options": "OpenAI's: an object with `mode` and `ttl`.",
    "cache_control": "Anthropic's, for the whole call: an object with `ttl`, 5m or 1h.",
    "agent_hint": "That of vLLM's RFC #52113: session, parent, time to live, edits.",
    "nvext": "Dynamo's `agent_hints` and `agent_context`.",
}
# Either will do.
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "As the OpenAI SDKs send a key."},
    "x-api-key": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "As the Anthropic SDKs send a key.",
    },
}


def errors_of(operation: Operation) -> tuple[int, ...]:
    """Return the statuses above 399 that an operation may be answered with."""
    found = {403, 500, *operation.errors}
    if not operation.is_public:
        found |= {401, 429}
    if operation.body is not None:
        found |= {400, 408, 413}
    if operation.is_model_call:
        found.add(503)
    return tuple(sorted(found - operation.replies.keys()))


def document(
    schemas: ApiSchemas, *, model: str, asks_for_keys: bool, lowest_priority: int = 0, root_path: str = ""
) -> dict[str, Any]:
    """Return the OpenAPI document as JSON values.

    Args:
        schemas: vLLM's, by the name of the call.
        model: the served model's name, for the examples.
        asks_for_keys: whether calls need a key here.
        lowest_priority: the lowest value that a client may give as `priority`.
        root_path: the path under which a proxy serves the routes.
    """
    paths: dict[str, Any] = {}
    shapes = _Shapes(schemas, lowest_priority)
    for operation in OPERATIONS:
        item = _operation(operation, shapes, model, asks_for_keys)
        paths.setdefault(operation.path, {})[operation.method] = item
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Overture",
            "version": __version__,
            "summary": "An LLM gateway that starts before you press Enter.",
            "description": "The HTTP routes of this server. Chats go over a websocket, which is described in docs/protocol.md.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": shapes.components,
            "responses": dict(_error_replies()),
            "headers": {
                name: {"description": text, "schema": {"type": "string"}} for name, text in HEADERS.items()
            },
            "securitySchemes": KEYS,
        },
    }


class _Shapes:
    """The schemas of all bodies. `components`: by name, as in the document."""

    def __init__(self, schemas: ApiSchemas, lowest_priority: int) -> None:
        self._engine = schemas
        types: list[Any] = list(dict.fromkeys((*_own_types(), Error, AnthropicError, Envelope)))
        made, own = msgspec.json.schema_components(types, ref_template=SCHEMA_REFERENCE)
        self._own: dict[Any, dict[str, Any]] = dict(zip(types, made, strict=True))
        if clash := own.keys() & schemas.components.keys():
            raise ValueError(f"two schemas are named {sorted(clash)}")
        # By way of JSON: msgspec leaves defaults as they are in Python, tuples for one.
        self.components: dict[str, Any] = orjson.loads(orjson.dumps(own)) | schemas.components
        for operation in OPERATIONS:
            # Models beside the chat model have no queue of ours, and their calls no session.
            if operation.is_model_call and operation.name in schemas.requests.keys() - POOLING_APIS:
                name = schemas.requests[operation.name]
                self.components[name] = self._with_own_fields(
                    self.components[name], operation, lowest_priority
                )

    def _with_own_fields(
        self, schema: dict[str, Any], operation: Operation, lowest_priority: int
    ) -> dict[str, Any]:
        """Return vLLM's request schema with the fields that the gateway itself reads."""
        fields: dict[str, Any] = {
            "priority": {
                "anyOf": [
                    {"type": "integer", "minimum": lowest_priority, "maximum": MAX_PRIORITY},
                    {"type": "null"},
                ],
                "default": 0,
                "description": "How urgent the request is, lower first. It orders requests that wait.",
            },
            "kv_hints": {
                "anyOf": [self._own[Envelope], {"type": "null"}],
                "description": "Advisories for the sessions that come after this request, and hints of KV. Bad ones are passed over.",
            },
        }
        if operation.name not in COUNTING_APIS:
            # Hints may have any form, as on other servers: malformed ones are ignored.
            fields |= {name: {"description": text} for name, text in HINT_FIELDS.items()}
            fields["session_id"] = {
                "anyOf": [SESSION_ID_SCHEMA, {"type": "null"}],
                "description": "The session that the call belongs to, as `X-Session-Id`: it is kept as a turn there.",
            }
        return schema | {"properties": schema["properties"] | fields}

    def of(self, shape: Shape) -> dict[str, Any]:
        """Return a schema that refers to this body."""
        if isinstance(shape, EngineBody):
            names = self._engine.requests if shape.side == "request" else self._engine.replies
            return {"$ref": SCHEMA_REFERENCE.format(name=names[shape.name])}
        if isinstance(shape, tuple):
            return {"anyOf": [self.of(kind) for kind in shape]}
        return self._own[shape]


def _own_types() -> Iterator[type[Any]]:
    for operation in OPERATIONS:
        shapes = (
            [operation.body.shape] if operation.body is not None and operation.body.shape is not None else []
        )
        for shape in [*shapes, *(reply.shape for reply in operation.replies.values())]:
            if shape is None or isinstance(shape, EngineBody):
                continue
            if isinstance(shape, tuple):
                yield from (kind for kind in shape if not isinstance(kind, EngineBody))
            else:
                yield shape


def _operation(operation: Operation, shapes: _Shapes, model: str, asks_for_keys: bool) -> dict[str, Any]:
    keys: list[dict[str, list[str]]] = [{name: []} for name in KEYS]
    item: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {str(status): _reply(reply, shapes) for status, reply in operation.replies.items()}
        | {
            str(status): {"$ref": f"#/components/responses/{_error_name(status, operation.is_anthropic)}"}
            for status in errors_of(operation)
        },
        "security": [] if operation.is_public else keys if asks_for_keys else [{}, *keys],
    }
    if operation.description:
        item["description"] = operation.description
    if parameters := operation.all_parameters:
        item["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": parameter.place == "path",
                "schema": parameter.schema,
                "description": parameter.description,
            }
            for parameter in parameters
        ]
    if operation.body is not None:
        item["requestBody"] = _body(operation.body, shapes, model)
    return item


def _body(body: Body, shapes: _Shapes, model: str) -> dict[str, Any]:
    if body.shape is None:
        binary = {"schema": {"type": "string", "format": "binary"}}
        return {"required": body.is_required, "content": {media: binary for media in body.media}}
    example = {key: model if value == MODEL else value for key, value in body.example.items()}
    return {
        "required": body.is_required,
        "content": {"application/json": {"schema": shapes.of(body.shape), "example": example}},
    }


def _reply(reply: ReplyShape, shapes: _Shapes) -> dict[str, Any]:
    # No schema for a stream: OpenAPI 3.1 cannot say that it is of the parts and not of the whole.
    text = {"schema": {"type": "string"}}
    content: dict[str, Any] = {
        media: {} if media == EVENT_STREAM or media.endswith("+json") else text for media in reply.media
    }
    if reply.shape is not None:
        content = {"application/json": {"schema": shapes.of(reply.shape)}} | content
    item: dict[str, Any] = {"description": reply.description}
    if content:
        item["content"] = content
    if reply.headers:
        item["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in reply.headers}
    return item


def _error_name(status: int, is_anthropic: bool) -> str:
    return f"{'AnthropicError' if is_anthropic else 'Error'}{status}"


def _error_replies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return a response for each status, in both shapes."""
    for status, text in ERRORS.items():
        headers = {"Retry-After"} if status in RETRIED else {"WWW-Authenticate"} if status == 401 else ()
        for shape, is_anthropic in ((Error, False), (AnthropicError, True)):
            schema = {"$ref": SCHEMA_REFERENCE.format(name=shape.__name__)}
            reply: dict[str, Any] = {
                "description": text,
                "content": {"application/json": {"schema": schema}},
            }
            if headers:
                reply["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in headers}
            yield _error_name(status, is_anthropic), reply


class _Document:
    """The document's bytes, made once."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._body: bytes | None = None

    async def body(self, services: Services) -> bytes:
        """Return the document, making it on the first call. Raises EngineUnavailable `starting`."""
        async with self._making:
            if self._body is None:
                schemas = await services.node.api_schemas()
                self._body = await asyncio.to_thread(_encoded, schemas, services)
            return self._body


def _encoded(schemas: ApiSchemas, services: Services) -> bytes:
    config = services.config
    return orjson.dumps(
        document(
            schemas,
            model=config.served_model_name,
            asks_for_keys=config.has_api_keys,
            root_path=config.root_path,
            lowest_priority=-MAX_PRIORITY if config.client_priority else 0,
        )
    )


_DOCUMENT = web.AppKey("document", _Document)


async def openapi_json(request: web.Request) -> web.Response:
    """Handle `GET /openapi.json`: the API's description."""
    body = await request.app[_DOCUMENT].body(request.app[SERVICES])
    headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return web.Response(body=body, content_type="application/json", headers=headers)


def add_routes(app: web.Application) -> None:
    """Add the API's description and the page that shows it."""
    app[_DOCUMENT] = _Document()
    app.add_routes([web.get("/openapi.json", openapi_json), web.get("/docs", page("docs.html"))])
