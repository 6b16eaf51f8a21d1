"""How one operation of the HTTP API is described: its parameters, its body and its replies. The operations are in `operations.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class EngineBody:
    """A body that vLLM's classes read (`request`) or write (`reply`), by the name in `engine_bridge.protocol.node.ApiSchemas`."""

    side: Literal["request", "reply"]
    name: str


Shape = type[Any] | EngineBody | tuple[type[Any] | EngineBody, ...]


class Parameter(NamedTuple):
    """A part of the path, the query or the head. schema: JSON Schema."""

    name: str
    place: Literal["path", "query", "header"]
    description: str
    schema: dict[str, Any]


def query(name: str, description: str, **schema: Any) -> Parameter:
    """Return a parameter of the query, a text where no JSON Schema is given."""
    return Parameter(name, "query", description, schema or {"type": "string"})


# What stands in a path, by the word before it and its name.
PATH_PARTS = {
    "adapters/{name}": "The adapter's name.",
    "advisories/{id}": "The advisory's id.",
    "conversations/{id}": "The conversation's id, which is its session's.",
    "keys/{key}": "The key's first characters, as the list shows them.",
    "kv_hints/{id}": "The hint's id.",
    "models/{name}": "The model's or adapter's name.",
    "nodes/{id}": "The node's id, as the list of nodes gives it.",
    "people/{id}": "The person's owner id, or a name that one person alone has.",
    "pictures/{id}": "The picture's id, as its turn has it.",
    "presets/{id}": "The preset's id, which its maker chooses.",
    "responses/{id}": "The response's id.",
    "sessions/{id}": "The session's id.",
    "shared/{token}": "The link's token.",
    "sse/{id}": "The id that the stream's first event has.",
    "static/{path}": "Its path under `static`.",
    "turns/{turn_id}": "The turn's id.",
}


@dataclass(frozen=True, slots=True)
class Body:
    """A body. example: a valid one; the name of the served model replaces `MODEL`. media: its types, where it is no JSON."""

    shape: Shape | None = None
    example: dict[str, Any] = field(default_factory=dict)
    is_required: bool = True
    media: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """A response. shape: of its JSON body, None for none. media: other types that a body may have."""

    description: str
    shape: Shape | None = None
    media: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route.

    route: such as `GET /v1/nodes`. parameters: of the query and the head; those of the path are in `PATH_PARTS`. errors: statuses besides those of
    every operation (see `openapi.errors_of`).
    """

    tag: str
    route: str
    name: str
    summary: str
    description: str = ""
    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    replies: dict[int, ReplyShape] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    is_public: bool = False

    @property
    def method(self) -> str:
        """The method in lower case, as OpenAPI writes it."""
        return self.route.partition(" ")[0].lower()

    @property
    def path(self) -> str:
        """The path, with names in braces for its parameters."""
        return self.route.partition(" ")[2]

    @property
    def all_parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the path, then the others."""
        parts = pairwise(self.path.split("/"))
        in_path = (
            Parameter(part[1:-1], "path", PATH_PARTS[f"{before}/{part}"], {"type": "string"})
            for before, part in parts
            if part.startswith("{")
        )
        return (*in_path, *self.parameters)

    @property
    def is_anthropic(self) -> bool:
        """Whether the operation belongs to Anthropic's API, whose errors have another shape."""
        return self.path.startswith("/v1/messages")

    @property
    def is_model_call(self) -> bool:
        """Whether the gateway takes its own fields out of the body before vLLM reads it."""
        return self.body is not None and isinstance(self.body.shape, EngineBody) and self.tag == GENERATE


GENERATE, SESSIONS, ADVISORIES = "Generate", "Sessions", "Advisories"
MODELS, OPERATE, PAGE = "Models and adapters", "Operate", "Page"
TAGS = {
    GENERATE: "The OpenAI and Anthropic APIs. Their SDKs work as they are; what is said here beyond them is optional.",
    SESSIONS: "Conversations that the server keeps. Each key sees its own.",
    ADVISORIES: "Word that a request of a session will come, so that what it needs is there in time. Advice only: a wrong one changes no answer.",
    MODELS: "What is served, and where each adapter is. Changing adapters needs --allow-adapter-loading.",
    OPERATE: "Health, figures and the engine's own state.",
    PAGE: "The chat page, its socket (docs/protocol.md) and this document.",
}

# An operation of each tag.
generate = partial(Operation, GENERATE)
sessions = partial(Operation, SESSIONS)
advisories = partial(Operation, ADVISORIES)
models = partial(Operation, MODELS)
operate = partial(Operation, OPERATE)
page = partial(Operation, PAGE)
