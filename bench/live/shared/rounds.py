"""The order in which the arms of a bench take their turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(arms: Sequence[T], number: int) -> Sequence[T]:
    """Return the arms of a round, reversed in every odd one: a machine that becomes slower meets all arms alike."""
    return arms[:: -1 if number % 2 else 1]
