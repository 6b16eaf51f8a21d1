"""Requests that only compute KV ahead of one that may come, told by their ids."""

from __future__ import annotations

# Begins the id of such a request.
BACKGROUND_PREFIX = "background-"


def is_background(request_id: str) -> bool:
    """Whether a request only computes KV ahead of one that may come: it neither uses up an advisory nor says how a session goes on."""
    return request_id.startswith(BACKGROUND_PREFIX)
