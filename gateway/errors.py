"""The gateway's errors, and the one table that says how each looks to each kind of client.

The codes are those of ``docs/protocol.md``. A message is shown to clients, so it says what happened and what to do, and never holds a path,
a key or a stack trace: causes are chained (``raise … from …``) and end in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engine_bridge.protocol.api_errors import HTTP_CODES, cut


class CloseCode(IntEnum):
    """Why the server closes a chat socket. Source: docs/protocol.md, "Close codes"; below 4000 they are those of RFC 6455 §7.4.1."""

    NORMAL = 1000
    GOING_AWAY = 1001
    TOO_LARGE = 1009
    NO_HELLO = 4400
    UNAUTHORIZED = 4401
    SLOW_READER = 4408
    TOO_MANY_SOCKETS = 4429


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one error code looks outside: HTTP status, OpenAI error ``type``, close code (None: the socket stays open)."""

    http_status: int
    openai_type: str
    is_retryable: bool = False
    close_code: CloseCode | None = None


# 409 for `conflict` and `busy`: the OpenAI and Anthropic SDKs retry it by themselves, which is what a busy session wants and what a
# conflict survives. 503 rather than 429 for `overloaded`: the server has no room, the client did nothing wrong.
KINDS: dict[str, ErrorKind] = {
    "bad_request": ErrorKind(400, "invalid_request_error"),
    "prompt_too_long": ErrorKind(400, "invalid_request_error"),
    "unauthorized": ErrorKind(401, "authentication_error", close_code=CloseCode.UNAUTHORIZED),
    "forbidden": ErrorKind(403, "permission_error"),
    "not_found": ErrorKind(404, "invalid_request_error"),
    "unknown_model": ErrorKind(404, "invalid_request_error"),
    "request_timeout": ErrorKind(408, "invalid_request_error", is_retryable=True),
    "conflict": ErrorKind(409, "invalid_request_error"),
    "busy": ErrorKind(409, "invalid_request_error"),
    "frame_too_large": ErrorKind(413, "invalid_request_error"),
    "rate_limited": ErrorKind(429, "rate_limit_error", is_retryable=True),
    "quota_exceeded": ErrorKind(429, "insufficient_quota"),
    "overloaded": ErrorKind(503, "overloaded_error", is_retryable=True),
    "draining": ErrorKind(503, "server_error", is_retryable=True),
    "asleep": ErrorKind(503, "server_error", is_retryable=True),
    "starting": ErrorKind(503, "server_error", is_retryable=True),
    # Not retryable by itself: a damaged file does not mend. What may pass (a disk that is away for a moment) says so where it is raised.
    "storage_failed": ErrorKind(503, "server_error"),
    "adapter_changing": ErrorKind(503, "server_error", is_retryable=True),
    "engine_failed": ErrorKind(503, "server_error", is_retryable=True),
    "internal": ErrorKind(500, "server_error"),
}


class GatewayError(Exception):
    """An error with a code of docs/protocol.md, raised anywhere in the gateway and turned into bytes at its doors.

    Args:
        code: a key of ``KINDS``; another one is a mistake in the program and raises ValueError.
        message: safe to show to a client.
        retryable: None takes the table's value.
        param: the name of the field at fault, if any.
        retry_after_s: seconds after which another try makes sense, if known.
        close_code: None takes the table's value.
        details: what Anthropic's API says of such an error for programs, beside its text; None for nothing.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retryable: bool | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        close_code: CloseCode | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        if code not in KINDS:
            raise ValueError(f"{code!r} is not an error code of docs/protocol.md")
        super().__init__(message)
        self.code = code
        self.message = cut(message)
        self.retryable = KINDS[code].is_retryable if retryable is None else retryable
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details
        self.close_code = close_code if close_code is not None else KINDS[code].close_code
        """What to close a chat socket with after the error frame; None leaves it open."""

    @property
    def http_status(self) -> int:
        """The status of the HTTP response that carries this error."""
        return KINDS[self.code].http_status

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code!r}, {self.message!r})"


class StartupError(GatewayError):
    """Something that the operator must mend before the server can serve.

    Raised only before a client is there, so its message may name files; print it and exit.
    """

    def __init__(self, message: str) -> None:
        super().__init__("internal", message)


def as_gateway_error(error: BaseException) -> GatewayError:
    """Return what a client may see of any exception: a GatewayError as it is, all others as ``internal`` with no detail.

    The caller logs `error` itself, where the detail belongs.
    """
    # A StartupError's text is the operator's: it may name files.
    if isinstance(error, GatewayError) and not isinstance(error, StartupError):
        return error
    return GatewayError("internal", "Something went wrong on the server. Its log says what.")


def to_openai_body(err: GatewayError) -> dict[str, Any]:
    """Return the JSON body of a REST or OpenAI-style response that failed with `err`."""
    error = {
        "message": err.message,
        "type": KINDS[err.code].openai_type,
        "param": err.param,
        "code": HTTP_CODES.get(err.code, err.code),
    }
    return {"error": error}


def to_frame(err: GatewayError, id: str | None = None) -> dict[str, Any]:
    """Return the chat socket's ``error`` frame. id: the turn that `err` ends; None if it belongs to no turn."""
    frame: dict[str, Any] = {
        "type": "error",
        "code": err.code,
        "message": err.message,
        "retryable": err.retryable,
    }
    if err.retry_after_s is not None:
        frame["retry_after_s"] = round(err.retry_after_s, 3)
    if id is not None:
        frame["id"] = id
    return frame
