"""How one operation of the HTTP API is described: its parameters, its body and its replies. The operations are in `operations.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    schema: dict[str, Any]
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body. example: a valid one; the name of the served model replaces `MODEL`. media: its types, where it is no JSON."""

    shape: Shape | None = None
    example: dict[str, Any] = field(default_factory=dict)
    is_required: bool = True
    media: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """A response. shape: of its JSON body, None for none. media: other types that a body may have."""

    description: str
    shape: Shape | None = None
    media: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route. errors: statuses besides those of every operation (see `openapi.errors_of`)."""

    method: Literal["get", "post", "put", "patch", "delete"]
    path: str
    name: str
    tag: str
    summary: str
    description: str = ""
    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    replies: dict[int, ReplyShape] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    is_public: bool = False

    @property
    def is_anthropic(self) -> bool:
        """Whether the operation belongs to Anthropic's API, whose errors have another shape."""
        return self.path.startswith("/v1/messages")

    @property
    def is_model_call(self) -> bool:
        """Whether the gateway takes its own fields out of the body before vLLM reads it."""
        return (
            isinstance(self.body, Body) and isinstance(self.body.shape, EngineBody) and self.tag == GENERATE
        )


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
