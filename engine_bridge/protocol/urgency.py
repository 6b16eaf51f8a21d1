"""What counts as urgent: one definition for routing, for KV that is promoted, and for whom others are paused. Pure."""

from __future__ import annotations


def is_urgent(priority: int) -> bool:
    """Return whether the priority of a request or an advisory goes before the usual one, 0; lower goes first."""
    return priority < 0
