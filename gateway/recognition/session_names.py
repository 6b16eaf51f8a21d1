"""The names of sessions that clients send in fields of their own, beside `X-Session-Id`. Pure.

Sources: the headers of Claude Code, Codex, OpenCode, Pi and LiteLLM as their proxies list them; OpenAI's `prompt_cache_key`;
Anthropic's `metadata.user_id`; vLLM's RFC #52113 (`agent_hint`); NVIDIA Dynamo's `nvext.agent_context` and its header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import orjson

NameSource = Literal["header", "metadata", "agent_hint", "prompt_cache_key", "none"]

KEPT_HEADER, AFFINITY_HEADER = "X-Session-Id", "X-Session-Affinity"
HEADERS = (
    "X-Claude-Code-Session-Id",
    "Session-Id",
    "Session_id",
    "Thread-Id",
    "Conversation-Id",
    "Conversation_id",
    "X-Opencode-Session-Id",
    "X-Opencode-Session",
    AFFINITY_HEADER,
    "X-Dynamo-Session-Id",
    "X-LiteLLM-Session-Id",
)
# Beside a session, the name of the agent in it that asks: Claude Code's helpers and Codex's threads have names of their own.
AGENT_HEADERS = ("X-Claude-Code-Agent-Id", "Thread-Id")
# The session that a helper works for.
CALLER_HEADERS = (
    "X-Opencode-Parent-Session-Id",
    "X-Parent-Session-Id",
    "X-Codex-Parent-Thread-Id",
    "X-Dynamo-Parent-Session-Id",
)
# How the names begin of sessions that no client has named.
MADE = "auto-"
# Longer names are of no use to anybody: the engine keeps them for as long as the session's KV.
MAX_NAME_CHARS = 128
# Claude Code's older form of `metadata.user_id`: user_<hash>_account_<uuid>_session_<uuid>.
_SESSION_IN_USER_ID = re.compile(r"_session_([0-9A-Za-z-]{8,128})$")


class SessionName(NamedTuple):
    """A name that a client gave its session, "" where it gave none, and the field that it stood in.

    agent: the name of the agent in this session that asks; "" for the main one, and where the client names none.
    """

    name: str
    source: NameSource
    agent: str = ""


UNNAMED = SessionName("", "none")


def session_name(headers: Mapping[str, str], body: Mapping[str, Any]) -> SessionName:
    """Return the name of a call's session by the first field that holds one. Fields that are malformed or too long are passed over."""
    for name, source in _names(headers, body):
        if _is_name(name) and not name.startswith(MADE):
            agents = (headers.get(header) for header in AGENT_HEADERS)
            agent = next((each for each in agents if _is_name(each) and each != name), "")
            return SessionName(name, source, agent or "")
    return UNNAMED


def kept_session(headers: Mapping[str, str]) -> str | None:
    """Return the stored conversation that a call is to be kept in; None where its headers name none.

    OpenCode and Kilo Code send their own session's name in this header, too, and the same for routing: they ask for nothing to be stored.
    """
    name = headers.get(KEPT_HEADER)
    return name if name != headers.get(AFFINITY_HEADER) else None


def caller_name(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Return the name of the session that a call's agent works for, as its client names it; "" where it names none."""
    names = (
        *(headers.get(header) for header in CALLER_HEADERS),
        _field(body, "agent_hint", "parent_session_id"),
    )
    return next((name for name in names if _is_name(name)), "")


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def _names(headers: Mapping[str, str], body: Mapping[str, Any]) -> Iterator[tuple[Any, NameSource]]:
    for header in HEADERS:
        yield headers.get(header), "header"
    yield _in_user_id(_field(body, "metadata", "user_id")), "metadata"
    yield _field(body, "agent_hint", "session_id"), "agent_hint"
    yield _field(body, "nvext", "agent_context", "session_id"), "agent_hint"
    yield body.get("prompt_cache_key"), "prompt_cache_key"


def _field(value: Any, *names: str) -> Any:
    """Return a value inside nested objects, None where any of them is something else."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _in_user_id(user_id: Any) -> Any:
    """Return the session inside Anthropic's `metadata.user_id`, in either of the forms that Claude Code has had; None where there is none."""
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{") and len(user_id) <= 4096:
        try:
            return _field(orjson.loads(user_id), "session_id")
        except orjson.JSONDecodeError:
            return None
    found = _SESSION_IN_USER_ID.search(user_id)
    return found[1] if found else None
