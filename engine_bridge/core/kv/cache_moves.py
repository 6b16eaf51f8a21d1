"""Moves, made between two steps, of blocks in the device's prefix cache that no running request holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine_bridge.policy.kv.kv_layout import Entry
from kvtiers.blocks import Block

NULL_BLOCK_ID = 0
"""Fills a request's list of blocks where it has none, before its attention's window. The device's block of this id holds no KV."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Take blocks of the device, fill them from host memory with `sources`, and leave them there as evictable cache.

    They follow the first `start` of the prefix's `entries`, which are on the device already. advisory_id: of the advisory that they are copied for;
    "" for a request.
    """

    entries: Sequence[Entry]
    start: int
    sources: Sequence[Block]
    advisory_id: str = ""


class CopiesUnderWay:
    """Copies that were begun and have not been made yet, by the advisory or the request that they are for."""

    def __init__(self) -> None:
        self._copies: dict[str, Copy] = {}

    def __contains__(self, whose: str) -> bool:
        return whose in self._copies

    @property
    def num_held_blocks(self) -> int:
        """The number of the device's blocks that copies hold: the blocks to fill, and all blocks before these."""
        return sum(copy.start + len(copy.sources) for copy in self._copies.values())

    def begin_all(self, copies: Mapping[str, Copy]) -> None:
        """Note that copies are begun."""
        self._copies.update(copies)

    def end(self, whose: str) -> None:
        """Note that its copy has been made, or cannot be made."""
        self._copies.pop(whose, None)

    def clear(self) -> None:
        """Forget all of them, because no request waits for them any more."""
        self._copies.clear()


@dataclass(frozen=True, slots=True)
class Refresh:
    """Move the first `num_blocks` of a prefix's `entries` to the end of the order of eviction, so that they are evicted last."""

    entries: Sequence[Entry]
    num_blocks: int
