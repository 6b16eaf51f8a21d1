"""The part of the server's HTTP API that a chat uses beside its socket."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from overture_client.chat_frames import ChatError

TIMEOUT_S = 10.0  # chosen: the server answers such calls from its database


def call_api(socket_url: str, path: str, headers: Mapping[str, str], body: Any = None) -> bytes:
    """Return the reply to `GET path`, or to `POST path` with a body, which is sent as JSON. Blocks for TIMEOUT_S at most.

    Args:
        socket_url: of the server's chat socket (`overture_client.chat.socket_url`).
        path: of the route, with its query.
        headers: the key, for example.
        body: sent as JSON; None for GET.

    Raises:
        ChatError: the server's own code and message, or `unreachable`.
    """
    parts = urlsplit(socket_url)
    scheme = {"ws": "http", "wss": "https"}[parts.scheme]
    request = urllib.request.Request(
        f"{scheme}://{parts.netloc}{parts.path.removesuffix('/ws')}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            reply: bytes = response.read()
            return reply
    except urllib.error.HTTPError as error:
        raise _refused(error) from error
    except (OSError, http.client.HTTPException) as error:
        raise ChatError("unreachable", f"the server does not answer: {error}", retryable=True) from error


def _refused(error: urllib.error.HTTPError) -> ChatError:
    is_retryable = error.code in (408, 429, 503)
    try:
        found = json.loads(error.read())["error"]
        return ChatError(str(found["code"]), str(found["message"]), is_retryable)
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return ChatError("internal", f"the server answered with status {error.code}", is_retryable)
