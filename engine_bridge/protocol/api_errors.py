"""The error body of OpenAI-shaped replies: `{"error": {"message", "type", "param", "code"}}`, with `type` and `code` as words.

vLLM's own bodies carry the HTTP status as `code` and the name of a Python class as `type`. OpenAI's API and its clients have words in both, so
every reply of this server has, too, whichever part of it found the error. The words are in docs/protocol.md, "Error codes".
"""

from __future__ import annotations

import re
from typing import Any

from engine_bridge.policy.limits.request_limits import CHARS_PER_TOKEN
from engine_bridge.protocol.errors import ADAPTER_CHANGING, ADAPTER_CHANGING_CODE

UNKNOWN_MODEL, TOO_LONG = "model_not_found", "context_length_exceeded"
# Codes that have another name over HTTP than on the chat socket: those by which clients of OpenAI's API decide what to do.
HTTP_CODES = {"unknown_model": UNKNOWN_MODEL, "prompt_too_long": TOO_LONG}
# (type, code) of an error of which nothing but the status is known. Source: the statuses that vLLM 0.32's serving classes answer.
_WORDS = {
    400: ("invalid_request_error", "bad_request"),
    404: ("invalid_request_error", "not_found"),
    422: ("invalid_request_error", "bad_request"),
    429: ("rate_limit_error", "rate_limited"),
    501: ("invalid_request_error", "not_supported"),
    503: ("server_error", "engine_failed"),
}
# How Anthropic's API names errors, by HTTP status. Source: its documentation of errors.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Names are clients' text, of any length; a list of adapters may be long, too.
_TOO_LONG_WORDS = ("context length", "longer than the maximum", "(max_prompt_chars)")
_MAX_NAME_CHARS, _MAX_NAMES = 100, 20
# Of a message to a client. Chosen: what a person reads; vLLM's quote what a client has sent, of any length.
MAX_MESSAGE_CHARS = 4096


def anthropic_type(status: int) -> str:
    """Return the type by which Anthropic's API names an error with this HTTP status."""
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_body(status: int, message: str, *, param: str | None = None, code: str = "") -> dict[str, Any]:
    """Return the body of an error that is answered with this HTTP status. code: a more exact code than the status; "" for none."""
    kind, usual = _WORDS.get(
        status, ("invalid_request_error", "bad_request") if status < 500 else ("server_error", "internal")
    )
    if not code and status == 400 and is_too_long(message):
        code = TOO_LONG
    if not code and message == ADAPTER_CHANGING:
        code = ADAPTER_CHANGING_CODE
    return {
        "error": {
            "message": cut(message),
            "type": kind,
            "param": param,
            "code": HTTP_CODES.get(code, code) or usual,
        }
    }


def cut(message: str) -> str:
    """Return a message without the part beyond MAX_MESSAGE_CHARS."""
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"


def is_too_long(message: str) -> bool:
    """Return whether this message, vLLM's or ours, means that a prompt does not fit into the model's context. vLLM has no other sign of it."""
    return any(words in message for words in _TOO_LONG_WORDS)


def anthropic_words(message: str, max_model_len: int) -> str:
    """Return a message as Anthropic's server words it.

    By these words clients of its API know that they have to shorten the conversation, and by how much.
    """
    if not is_too_long(message):
        return message
    tokens, chars = (
        re.search(r"(\d+) input tokens, which", message),
        re.search(r"([\d,]+) characters", message),
    )
    # The text was not split into tokens: this is the least number that it can have.
    least = int(chars[1].replace(",", "")) // CHARS_PER_TOKEN if chars else 0
    num_tokens = int(tokens[1]) if tokens else max(max_model_len + 1, least)
    return f"prompt is too long: {num_tokens} tokens > {max_model_len} maximum"


def unknown_model(name: str, known: list[str]) -> str:
    """Return the message for a model that is not served. known: the base model and the adapters, in the order in which they are to be shown."""
    shown = name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}…"
    others = f" and {len(known) - _MAX_NAMES} more" if len(known) > _MAX_NAMES else ""
    return (
        f"The model `{shown}` does not exist. This server has: {', '.join(known[:_MAX_NAMES])}{others}."
        if known
        else f"The model `{shown}` does not exist."
    )
