"""Background requests: they only compute KV ahead of a request that may come, and are recognised by their ids."""

from __future__ import annotations

# The prefix of a background request's id.
BACKGROUND_PREFIX = "background-"


def is_background(request_id: str) -> bool:
    """Return whether a request only computes KV ahead of a request that may come.

    Such a request neither uses up an advisory nor says how a session continues.
    """
    return request_id.startswith(BACKGROUND_PREFIX)
