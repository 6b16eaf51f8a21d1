"""Moves, made between two steps, of blocks in the device's prefix cache that no running request holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_bridge.policy.kv.kv_layout import Entry
from kvtiers.blocks import Block

NULL_BLOCK_ID = 0
"""Fills a request's list of blocks where it has none, before its attention's window. The device's block of this id holds no KV."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Take blocks of the device, fill them from host memory with `sources`, and leave them there as evictable cache.

    They follow the first `start` of the prefix's `entries`, which are on the device already.
    """

    entries: Sequence[Entry]
    start: int
    sources: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Refresh:
    """Move the first `num_blocks` of a prefix's `entries` to the end of the order of eviction, so that they are evicted last."""

    entries: Sequence[Entry]
    num_blocks: int
