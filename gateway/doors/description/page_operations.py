"""The part of the API's description that is about the pages and the chat socket; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from typing import Any

from gateway.doors.description.operation import Operation, ReplyShape, page

EVENT_STREAM = "text/event-stream"
_HTML = {200: ReplyShape("HTML.", media=("text/html",))}
_PAGES = (
    ("/", "page", "The chat page"),
    ("/engine", "engine_page", "The engine room: what the nodes do, live"),
    ("/admin", "admin_page", "The operators' page: people, keys and what they use"),
    ("/sign-in", "sign_in_page", "The page that a sign-in link opens"),
    ("/docs", "docs", "This document as a page"),
    ("/sandbox", "sandbox", "The frame in which the chat page shows HTML and SVG of an answer"),
)

PAGE_OPERATIONS: tuple[Operation, ...] = (
    *(page(f"GET {path}", name, summary, replies=_HTML, is_public=True) for path, name, summary in _PAGES),
    page(
        "GET /openapi.json",
        "openapi",
        "This document",
        replies={200: ReplyShape("OpenAPI 3.1.", dict[str, Any])},
        errors=(503,),
        is_public=True,
    ),
    page(
        "GET /manifest.webmanifest",
        "manifest",
        "What a browser installs the chat page by",
        replies={200: ReplyShape("A web app manifest.", media=("application/manifest+json",))},
        is_public=True,
    ),
    page(
        "GET /static/{path}",
        "static_file",
        "A file of the pages",
        replies={
            200: ReplyShape(
                "The file.",
                media=("text/html", "text/css", "text/javascript", "text/markdown", "image/svg+xml", "*/*"),
            )
        },
        errors=(404,),
        is_public=True,
    ),
    page(
        "GET /ws",
        "chat_socket",
        "The chat socket",
        "A websocket of JSON frames: docs/protocol.md. Its key comes with the upgrade or in the first frame.",
        replies={101: ReplyShape("The connection is a websocket now.")},
        errors=(400,),
        is_public=True,
    ),
    page(
        "GET /sse",
        "open_stream",
        "The chat socket's frames as server-sent events",
        "For networks that let no websocket through. The first event, `stream`, has the `id` to which the page posts its own frames.",
        replies={200: ReplyShape("Events, one for each frame.", media=(EVENT_STREAM,))},
        is_public=True,
    ),
    page(
        "POST /sse/{id}",
        "take_frame",
        "A frame of the page, where no websocket is let through",
        replies={204: ReplyShape("It was taken. What comes of it comes as events.")},
        errors=(400, 404),
        is_public=True,
    ),
)
