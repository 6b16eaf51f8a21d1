"""The part of the API's description that is about links, presets and tools; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from gateway.doors.description.operation import Body, Operation, ReplyShape, sessions
from gateway.doors.rest.shelf import Link, PresetList, SharedConversation
from gateway.doors.rest.tools import ToolServers
from gateway.sessions.pictures import MEDIA_TYPES
from gateway.shelf.store import PresetBody

_DONE = {204: ReplyShape("It is done.")}

SHELF_OPERATIONS: tuple[Operation, ...] = (
    sessions(
        "POST /api/sessions/{id}/link",
        "share_session",
        "Share a conversation, read-only",
        "All who may use this server can read it by the link, as it is then, until the link is withdrawn.",
        replies={200: ReplyShape("The link's token.", Link)},
        errors=(404, 503),
    ),
    sessions(
        "DELETE /api/sessions/{id}/link",
        "withdraw_link",
        "Withdraw a conversation's link",
        replies=_DONE,
        errors=(503,),
    ),
    sessions(
        "GET /api/shared/{token}",
        "read_shared",
        "Read a shared conversation",
        "Without its system prompt and its settings.",
        replies={200: ReplyShape("The conversation as it is now.", SharedConversation)},
        errors=(404, 503),
    ),
    sessions(
        "GET /api/shared/{token}/pictures/{id}",
        "read_shared_picture",
        "Return a picture of a shared conversation",
        "One that the conversation shows now.",
        replies={200: ReplyShape("The picture.", media=tuple(MEDIA_TYPES.values()))},
        errors=(404, 503),
    ),
    sessions(
        "GET /api/tools",
        "list_tools",
        "List the MCP servers whose tools conversations may use",
        "A conversation uses those that its settings name (`tools`).",
        replies={200: ReplyShape("The servers with their tools.", ToolServers)},
    ),
    sessions(
        "GET /api/presets",
        "list_presets",
        "List the presets of new conversations",
        "The caller's own, and those that operators share.",
        replies={200: ReplyShape("The presets, by name.", PresetList)},
        errors=(503,),
    ),
    sessions(
        "PUT /api/presets/{id}",
        "put_preset",
        "Store a preset",
        "In place of the caller's preset of that id. `is_shared` takes an operator's key.",
        body=Body(PresetBody, {"name": "Patient", "settings": {"temperature": 0.5}}),
        replies=_DONE,
        errors=(403, 429, 503),
    ),
    sessions(
        "DELETE /api/presets/{id}", "delete_preset", "Delete a preset", replies=_DONE, errors=(404, 503)
    ),
)
