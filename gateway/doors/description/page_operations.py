"""The part of the API's description that is about the pages and the chat socket; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from typing import Any

from gateway.doors.description.operation import PAGE, Operation, Parameter, ReplyShape

EVENT_STREAM = "text/event-stream"
_TEXT = {"type": "string"}
_HTML = {200: ReplyShape(description="HTML.", media=("text/html",))}
_PAGES = (
    ("/", "page", "The chat page"),
    ("/engine", "engine_page", "The engine room: what the nodes do, live"),
    ("/admin", "admin_page", "The operators' page: people, keys and what they use"),
    ("/sign-in", "sign_in_page", "The page that a sign-in link opens"),
    ("/docs", "docs", "This document as a page"),
    ("/sandbox", "sandbox", "The frame in which the chat page shows HTML and SVG of an answer"),
)

PAGE_OPERATIONS: tuple[Operation, ...] = (
    *(
        Operation("get", path, name, PAGE, summary, replies=_HTML, is_public=True)
        for path, name, summary in _PAGES
    ),
    Operation(
        "get",
        "/openapi.json",
        "openapi",
        PAGE,
        "This document",
        replies={200: ReplyShape(description="OpenAPI 3.1.", shape=dict[str, Any])},
        errors=(503,),
        is_public=True,
    ),
    Operation(
        "get",
        "/manifest.webmanifest",
        "manifest",
        PAGE,
        "What a browser installs the chat page by",
        replies={200: ReplyShape(description="A web app manifest.", media=("application/manifest+json",))},
        is_public=True,
    ),
    Operation(
        "get",
        "/static/{path}",
        "static_file",
        PAGE,
        "A file of the pages",
        parameters=(Parameter("path", "path", _TEXT, "Its path under `static`."),),
        replies={
            200: ReplyShape(
                description="The file.",
                media=("text/html", "text/css", "text/javascript", "text/markdown", "image/svg+xml", "*/*"),
            )
        },
        errors=(404,),
        is_public=True,
    ),
    Operation(
        "get",
        "/ws",
        "chat_socket",
        PAGE,
        "The chat socket",
        "A websocket of JSON frames: docs/protocol.md. Its key comes with the upgrade or in the first frame.",
        replies={101: ReplyShape(description="The connection is a websocket now.")},
        errors=(400,),
        is_public=True,
    ),
    Operation(
        "get",
        "/sse",
        "open_stream",
        PAGE,
        "The chat socket's frames as server-sent events",
        "For networks that let no websocket through. The first event, `stream`, has the `id` to which the page posts its own frames.",
        replies={200: ReplyShape(description="Events, one for each frame.", media=(EVENT_STREAM,))},
        is_public=True,
    ),
    Operation(
        "post",
        "/sse/{id}",
        "take_frame",
        PAGE,
        "A frame of the page, where no websocket is let through",
        parameters=(Parameter("id", "path", _TEXT, "The id that the stream's first event has."),),
        replies={204: ReplyShape(description="It was taken. What comes of it comes as events.")},
        errors=(400, 404),
        is_public=True,
    ),
)
