"""The part of the API's description that is about conversations; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from gateway.documents.messages import Document
from gateway.doors.description.bodies import SessionPage
from gateway.doors.description.operation import SESSIONS, Body, Operation, Parameter, ReplyShape
from gateway.doors.description.shelf_operations import SHELF_OPERATIONS
from gateway.doors.rest.sessions import ChooseVersion, CreateSession, PatchSession
from gateway.sessions import Session, SessionSummary, StoredPicture
from gateway.sessions.archive import FORMAT, VERSION, Archive
from gateway.sessions.pictures import MEDIA_TYPES

_TEXT = {"type": "string"}
_PICTURES = tuple(MEDIA_TYPES.values())
_DOCUMENTS = ("application/pdf", "text/html", "text/csv", "application/octet-stream")
_SESSION = Parameter("id", "path", _TEXT, "The session's id.")

_ARCHIVE = {
    "format": FORMAT,
    "version": VERSION,
    "turns": [{"id": "1", "content": "Hello!", "answer": "Hello! How can I help you?"}],
}

SESSION_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "get",
        "/api/sessions",
        "list_sessions",
        SESSIONS,
        "List conversations, newest first",
        parameters=(
            Parameter("q", "query", _TEXT, "Words to look for in titles and texts."),
            Parameter(
                "limit",
                "query",
                {"type": "integer", "minimum": 1, "maximum": 200, "default": 50},
                "Most sessions on the page.",
            ),
            Parameter("before", "query", _TEXT, "The `next` of the page before."),
            Parameter(
                "origin",
                "query",
                {"type": "string", "enum": ["all", "chat", "api"], "default": "all"},
                "Only conversations that people had, or only those that calls of the APIs made.",
            ),
        ),
        replies={200: ReplyShape(description="A page of the list.", shape=SessionPage)},
        errors=(400, 503),
    ),
    Operation(
        "post",
        "/api/sessions/import",
        "import_session",
        SESSIONS,
        "Store a conversation that was exported as a new one",
        "Under new ids, whole or not at all. Also takes messages in OpenAI's chat format. An adapter that is not here is left out.",
        body=Body(shape=Archive, example=_ARCHIVE),
        replies={201: ReplyShape(description="The new session.", shape=Session)},
        errors=(400, 503),
    ),
    Operation(
        "get",
        "/api/sessions/{id}/export",
        "export_session",
        SESSIONS,
        "Write a conversation to a file",
        "As JSON all versions of its messages, to be imported; as Markdown what is shown, to be read.",
        parameters=(
            _SESSION,
            Parameter(
                "format",
                "query",
                {"type": "string", "enum": ["json", "markdown"], "default": "json"},
                "The form of the file.",
            ),
        ),
        replies={200: ReplyShape(description="The file.", shape=Archive, media=("text/markdown",))},
        errors=(400, 404, 503),
    ),
    Operation(
        "post",
        "/api/pictures",
        "store_picture",
        SESSIONS,
        "Store a picture for a message",
        "PNG, JPEG, WebP or GIF, for models that read pictures. A message names it by its id; one that no message has is removed after an hour.",
        body=Body(media=_PICTURES),
        replies={201: ReplyShape(description="The picture's id and size.", shape=StoredPicture)},
        errors=(400, 413, 503),
    ),
    Operation(
        "get",
        "/api/pictures/{id}",
        "read_picture",
        SESSIONS,
        "Return a picture of a message",
        parameters=(Parameter("id", "path", _TEXT, "The picture's id, as its turn has it."),),
        replies={200: ReplyShape(description="The picture.", media=_PICTURES)},
        errors=(404, 503),
    ),
    Operation(
        "post",
        "/api/documents",
        "read_document",
        SESSIONS,
        "Return the text of a document",
        "PDF, DOCX, XLSX, HTML and CSV, for the text of a message. Nothing of it is kept.",
        body=Body(media=_DOCUMENTS),
        replies={200: ReplyShape(description="The document's kind, text and pages.", shape=Document)},
        errors=(400, 413, 503),
    ),
    Operation(
        "post",
        "/api/sessions",
        "create_session",
        SESSIONS,
        "Make a conversation",
        body=Body(shape=CreateSession, example={"title": "Lisbon"}, is_required=False),
        replies={201: ReplyShape(description="The new session.", shape=Session)},
        errors=(404, 503),
    ),
    Operation(
        "get",
        "/api/sessions/{id}",
        "read_session",
        SESSIONS,
        "Read a conversation with its turns",
        parameters=(_SESSION,),
        replies={200: ReplyShape(description="The session.", shape=Session)},
        errors=(404, 503),
    ),
    Operation(
        "patch",
        "/api/sessions/{id}",
        "change_session",
        SESSIONS,
        "Change a conversation's title, adapter or settings",
        parameters=(_SESSION,),
        body=Body(shape=PatchSession, example={"title": "A week in Lisbon"}, is_required=False),
        replies={
            200: ReplyShape(description="The session as it is now, without its turns.", shape=SessionSummary)
        },
        errors=(404, 503),
    ),
    Operation(
        "delete",
        "/api/sessions/{id}",
        "delete_session",
        SESSIONS,
        "Delete a conversation",
        "For 30 s it can be brought back.",
        parameters=(_SESSION,),
        replies={204: ReplyShape(description="It is deleted.")},
        errors=(404, 503),
    ),
    Operation(
        "post",
        "/api/sessions/{id}/restore",
        "restore_session",
        SESSIONS,
        "Bring a deleted conversation back",
        parameters=(_SESSION,),
        replies={200: ReplyShape(description="The session.", shape=Session)},
        errors=(404, 503),
    ),
    Operation(
        "delete",
        "/api/sessions/{id}/turns/{turn_id}",
        "discard_turn",
        SESSIONS,
        "Remove a message whose answer failed",
        "What followed it follows the message before it. 409 for a message that was answered.",
        parameters=(_SESSION, Parameter("turn_id", "path", _TEXT, "The turn's id.")),
        replies={200: ReplyShape(description="The session as it is shown now.", shape=Session)},
        errors=(404, 409, 503),
    ),
    Operation(
        "post",
        "/api/sessions/{id}/choose",
        "choose_version",
        SESSIONS,
        "Show another version of a message",
        "With what it follows, and with what followed it last. 409 while an answer of the session is written.",
        parameters=(_SESSION,),
        body=Body(shape=ChooseVersion, example={"turn_id": "3b2e"}),
        replies={200: ReplyShape(description="The session as it is shown now.", shape=Session)},
        errors=(404, 409, 503),
    ),
    *SHELF_OPERATIONS,
)
