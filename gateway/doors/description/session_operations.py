"""The part of the API's description that is about conversations; see `gateway/doors/description/operations.py`."""

from __future__ import annotations

from gateway.documents.messages import Document
from gateway.doors.description.bodies import SessionPage
from gateway.doors.description.operation import Body, Operation, ReplyShape, query, sessions
from gateway.doors.description.shelf_operations import SHELF_OPERATIONS
from gateway.doors.rest.sessions import ChooseVersion, CreateSession, PatchSession
from gateway.sessions import Session, SessionSummary, StoredPicture
from gateway.sessions.archive import FORMAT, VERSION, Archive
from gateway.sessions.pictures import MEDIA_TYPES

_PICTURES = tuple(MEDIA_TYPES.values())
_DOCUMENTS = ("application/pdf", "text/html", "text/csv", "application/octet-stream")

_ARCHIVE = {
    "format": FORMAT,
    "version": VERSION,
    "turns": [{"id": "1", "content": "Hello!", "answer": "Hello! How can I help you?"}],
}

SESSION_OPERATIONS: tuple[Operation, ...] = (
    sessions(
        "GET /api/sessions",
        "list_sessions",
        "List conversations, newest first",
        parameters=(
            query("q", "Words to look for in titles and texts."),
            query("limit", "Most sessions on the page.", type="integer", minimum=1, maximum=200, default=50),
            query("before", "The `next` of the page before."),
            query(
                "origin",
                "Only conversations that people had, or only those that calls of the APIs made.",
                type="string",
                enum=["all", "chat", "api"],
                default="all",
            ),
        ),
        replies={200: ReplyShape("A page of the list.", SessionPage)},
        errors=(400, 503),
    ),
    sessions(
        "POST /api/sessions/import",
        "import_session",
        "Store a conversation that was exported as a new one",
        "Under new ids, whole or not at all. Also takes messages in OpenAI's chat format. An adapter that is not here is left out.",
        body=Body(Archive, _ARCHIVE),
        replies={201: ReplyShape("The new session.", Session)},
        errors=(400, 503),
    ),
    sessions(
        "GET /api/sessions/{id}/export",
        "export_session",
        "Write a conversation to a file",
        "As JSON all versions of its messages, to be imported; as Markdown what is shown, to be read.",
        parameters=(
            query(
                "format", "The form of the file.", type="string", enum=["json", "markdown"], default="json"
            ),
        ),
        replies={200: ReplyShape("The file.", Archive, media=("text/markdown",))},
        errors=(400, 404, 503),
    ),
    sessions(
        "POST /api/pictures",
        "store_picture",
        "Store a picture for a message",
        "PNG, JPEG, WebP or GIF, for models that read pictures. A message names it by its id; one that no message has is removed after an hour.",
        body=Body(media=_PICTURES),
        replies={201: ReplyShape("The picture's id and size.", StoredPicture)},
        errors=(400, 413, 503),
    ),
    sessions(
        "GET /api/pictures/{id}",
        "read_picture",
        "Return a picture of a message",
        replies={200: ReplyShape("The picture.", media=_PICTURES)},
        errors=(404, 503),
    ),
    sessions(
        "POST /api/documents",
        "read_document",
        "Return the text of a document",
        "PDF, DOCX, XLSX, HTML and CSV, for the text of a message. Nothing of it is kept.",
        body=Body(media=_DOCUMENTS),
        replies={200: ReplyShape("The document's kind, text and pages.", Document)},
        errors=(400, 413, 503),
    ),
    sessions(
        "POST /api/sessions",
        "create_session",
        "Make a conversation",
        body=Body(CreateSession, {"title": "Lisbon"}, is_required=False),
        replies={201: ReplyShape("The new session.", Session)},
        errors=(404, 503),
    ),
    sessions(
        "GET /api/sessions/{id}",
        "read_session",
        "Read a conversation with its turns",
        replies={200: ReplyShape("The session.", Session)},
        errors=(404, 503),
    ),
    sessions(
        "PATCH /api/sessions/{id}",
        "change_session",
        "Change a conversation's title, adapter or settings",
        body=Body(PatchSession, {"title": "A week in Lisbon"}, is_required=False),
        replies={200: ReplyShape("The session as it is now, without its turns.", SessionSummary)},
        errors=(404, 503),
    ),
    sessions(
        "DELETE /api/sessions/{id}",
        "delete_session",
        "Delete a conversation",
        "For 30 s it can be brought back.",
        replies={204: ReplyShape("It is deleted.")},
        errors=(404, 503),
    ),
    sessions(
        "POST /api/sessions/{id}/restore",
        "restore_session",
        "Bring a deleted conversation back",
        replies={200: ReplyShape("The session.", Session)},
        errors=(404, 503),
    ),
    sessions(
        "DELETE /api/sessions/{id}/turns/{turn_id}",
        "discard_turn",
        "Remove a message whose answer failed",
        "What followed it follows the message before it. 409 for a message that was answered.",
        replies={200: ReplyShape("The session as it is shown now.", Session)},
        errors=(404, 409, 503),
    ),
    sessions(
        "POST /api/sessions/{id}/choose",
        "choose_version",
        "Show another version of a message",
        "With what it follows, and with what followed it last. 409 while an answer of the session is written.",
        body=Body(ChooseVersion, {"turn_id": "3b2e"}),
        replies={200: ReplyShape("The session as it is shown now.", Session)},
        errors=(404, 409, 503),
    ),
    *SHELF_OPERATIONS,
)
