"""Precedence among requests: the weight of each key's owner against others, and the priority that a client may give its own requests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from gateway.errors import GatewayError

# Far more levels than anybody tells apart. Chosen.
MAX_PRIORITY = 1000
# The name of a key: gateway/access/auth.py.
_WEIGHT = re.compile(r"(?P<name>[^:\s=]{1,64})=(?P<weight>[0-9.eE+-]+)")


def parse_weights(entries: Iterable[str]) -> dict[str, float]:
    """Return weights by the name of the key, from "NAME=2".

    Raises ValueError, fit to show, for any other form, and for a name with two weights.
    """
    weights: dict[str, float] = {}
    for entry in entries:
        match = _WEIGHT.fullmatch(entry.strip())
        weight = _number(match["weight"]) if match is not None else None
        if match is None or weight is None or not 0 < weight < math.inf:
            raise ValueError(f"expected NAME=WEIGHT with a number above 0, such as ada=2, got {entry!r}")
        if weights.setdefault(match["name"], weight) != weight:
            raise ValueError(f"{match['name']} has two weights")
    return weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def checked_priority(value: Any, *, may_hurry: bool) -> int:
    """Return a client's `priority`: lower first, 0 if missing.

    may_hurry: allow values below 0, which go before requests without a priority. Otherwise a client can only let others go first. Raises
    GatewayError `bad_request` for a value that is not an integer or out of range.
    """
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise GatewayError("bad_request", "'priority' must be an integer.", param="priority")
    if value < 0 and not may_hurry:
        raise GatewayError(
            "bad_request",
            f"'priority' must be from 0 to {MAX_PRIORITY}, because this server lets no client go before others (--client-priority).",
            param="priority",
        )
    if abs(value) > MAX_PRIORITY:
        low = -MAX_PRIORITY if may_hurry else 0
        raise GatewayError(
            "bad_request", f"'priority' must be from {low} to {MAX_PRIORITY}.", param="priority"
        )
    return value
