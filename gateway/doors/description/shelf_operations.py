"""The part of the API's description that is about links, presets and tools; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from gateway.doors.description.operation import SESSIONS, Body, Operation, Parameter, ReplyShape
from gateway.doors.rest.shelf import Link, PresetList, SharedConversation
from gateway.doors.rest.tools import ToolServers
from gateway.sessions.pictures import MEDIA_TYPES
from gateway.shelf.store import PresetBody

_TEXT = {"type": "string"}
_SESSION = Parameter("id", "path", _TEXT, "The session's id.")
_PRESET = Parameter("id", "path", _TEXT, "The preset's id, which its maker chooses.")
_TOKEN = Parameter("token", "path", _TEXT, "The link's token.")
_DONE = {204: ReplyShape(description="It is done.")}

SHELF_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "post",
        "/api/sessions/{id}/link",
        "share_session",
        SESSIONS,
        "Share a conversation, read-only",
        "All who may use this server can read it by the link, as it is then, until the link is withdrawn.",
        parameters=(_SESSION,),
        replies={200: ReplyShape(description="The link's token.", shape=Link)},
        errors=(404, 503),
    ),
    Operation(
        "delete",
        "/api/sessions/{id}/link",
        "withdraw_link",
        SESSIONS,
        "Withdraw a conversation's link",
        parameters=(_SESSION,),
        replies=_DONE,
        errors=(503,),
    ),
    Operation(
        "get",
        "/api/shared/{token}",
        "read_shared",
        SESSIONS,
        "Read a shared conversation",
        "Without its system prompt and its settings.",
        parameters=(_TOKEN,),
        replies={200: ReplyShape(description="The conversation as it is now.", shape=SharedConversation)},
        errors=(404, 503),
    ),
    Operation(
        "get",
        "/api/shared/{token}/pictures/{id}",
        "read_shared_picture",
        SESSIONS,
        "Return a picture of a shared conversation",
        "One that the conversation shows now.",
        parameters=(_TOKEN, Parameter("id", "path", _TEXT, "The picture's id, as its turn has it.")),
        replies={200: ReplyShape(description="The picture.", media=tuple(MEDIA_TYPES.values()))},
        errors=(404, 503),
    ),
    Operation(
        "get",
        "/api/tools",
        "list_tools",
        SESSIONS,
        "List the MCP servers whose tools conversations may use",
        "A conversation uses those that its settings name (`tools`).",
        replies={200: ReplyShape(description="The servers with their tools.", shape=ToolServers)},
    ),
    Operation(
        "get",
        "/api/presets",
        "list_presets",
        SESSIONS,
        "List the presets of new conversations",
        "The caller's own, and those that operators share.",
        replies={200: ReplyShape(description="The presets, by name.", shape=PresetList)},
        errors=(503,),
    ),
    Operation(
        "put",
        "/api/presets/{id}",
        "put_preset",
        SESSIONS,
        "Store a preset",
        "In place of the caller's preset of that id. `is_shared` takes an operator's key.",
        parameters=(_PRESET,),
        body=Body(shape=PresetBody, example={"name": "Patient", "settings": {"temperature": 0.5}}),
        replies=_DONE,
        errors=(403, 429, 503),
    ),
    Operation(
        "delete",
        "/api/presets/{id}",
        "delete_preset",
        SESSIONS,
        "Delete a preset",
        parameters=(_PRESET,),
        replies=_DONE,
        errors=(404, 503),
    ),
)
