"""What counts as urgent: one definition for routing, for KV that is promoted, and for whom others are paused. Pure."""

from __future__ import annotations


def is_urgent(priority: int) -> bool:
    """Of a request or an advisory; lower goes first, 0 is as any other. The gateway lets clients below 0 only where the operator allows it."""
    return priority < 0
