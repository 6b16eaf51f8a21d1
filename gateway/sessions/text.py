"""Titles, ids and cursors: what a client may send, and how it is stored."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

import msgspec

from gateway.errors import GatewayError
from gateway.sessions.records import TurnStatus

MAX_ID_CHARS: Final = 128
MAX_TITLE_CHARS: Final = 200  # Chosen: what a person types; titles made from a message are shorter.
MAX_AUTO_TITLE_CHARS: Final = 60

# SQLite's text is UTF-8, which has no lone surrogates, and its text functions (LIKE, FTS5) stop at a NUL.
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")


def clean_text(text: str) -> str:
    """Return `text` as the store keeps it: NUL and lone surrogates become U+FFFD. Compare stored texts with this, not with the raw text."""
    text = text.replace("\0", "\ufffd")
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def clean(text: str | None) -> str | None:
    """Return `clean_text` of a text, and None for None."""
    return None if text is None else clean_text(text)


def is_id(value: str) -> bool:
    """Whether a session or a turn may have this id; SQLite would choke on some others."""
    return _ID.fullmatch(value) is not None


def checked_id(value: str, param: str) -> str:
    """Return `value`, which the client gave as `param`. Raises GatewayError `bad_request` if no session or turn may have that id."""
    if not is_id(value):
        raise GatewayError(
            "bad_request", f"'{param}' must have 1 to {MAX_ID_CHARS} visible ASCII characters.", param=param
        )
    return value


# The head of a file at the beginning of a message: its name, a colon and the fence before its text (static/js/files/blocks.js).
_FILE_HEAD: Final = re.compile(r"([^\n]{1,255}):\n(`{3,})[^\n`]*\n")
_FIRST_CHAR: Final = re.compile(r"\S")
MAX_FILES: Final = 1000  # Chosen: more files than anybody attaches to one message.


def checked_title(title: str | None) -> str | None:
    """Return the title on one line without outer blanks, and None for a blank one. Raises GatewayError `bad_request` if it is too long."""
    tidy = " ".join((clean(title) or "").split())
    if len(tidy) > MAX_TITLE_CHARS:
        raise GatewayError(
            "bad_request", f"'title' may have {MAX_TITLE_CHARS} characters at most.", param="title"
        )
    return tidy or None


def title_from(content: str) -> str | None:
    """Return a title for a session that begins with `content`: its first line with text, cut at a word's end to 60 characters with the "…".

    Files that the message begins with, as the page writes them, name the session only if the message has no other text.
    """
    names: list[str] = []
    place = 0
    while len(names) < MAX_FILES and (found := _file_at(content, place)):
        name, place = found
        names.append(name)
    first = _FIRST_CHAR.search(content, place)
    said, start = (content, first.start()) if first else (", ".join(names), 0)
    # A first line of 1 MB is looked at no further than a title can reach.
    lines = said[start : start + 4 * MAX_AUTO_TITLE_CHARS].splitlines()
    text = " ".join(lines[0].split()) if lines else ""
    if len(text) <= MAX_AUTO_TITLE_CHARS:
        return text or None
    head = text[:MAX_AUTO_TITLE_CHARS]
    words, space, _ = head.rpartition(" ")
    return (words if space else head[:-1]).rstrip() + "…"


def _file_at(content: str, place: int) -> tuple[str, int] | None:
    """Return the name of the file that begins at `place`, and where it ends; None if no file begins there."""
    head = _FILE_HEAD.match(content, place)
    if head is None:
        return None
    closing = f"\n{head[2]}"
    end = content.find(f"{closing}\n\n", head.end())
    if end >= 0:
        return head[1], end + len(closing) + 2
    is_last = content.endswith(closing, head.end())
    return (head[1], len(content)) if is_last else None


def checked_end(status: TurnStatus) -> TurnStatus:
    """Return `status`. Raises ValueError if a turn that is over cannot have it."""
    if status not in ("done", "stopped", "failed"):
        raise ValueError(f"a turn does not end as {status!r}")
    return status


def encoded(value: object) -> str | None:
    """Return the value as JSON text, which is how it is stored; None for None."""
    return None if value is None else msgspec.json.encode(value).decode()


def encode_cursor(updated_at: float, session_id: str) -> str:
    """Return an opaque cursor, with which a client asks for the page that follows this session."""
    return base64.urlsafe_b64encode(msgspec.json.encode((updated_at, session_id))).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[float, str]:
    """Return the time and the session id of a cursor. Raises GatewayError `bad_request`."""
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(raw, type=tuple[float, str])
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise GatewayError(
            "bad_request", "'before' is not a cursor of this server.", param="before"
        ) from error
