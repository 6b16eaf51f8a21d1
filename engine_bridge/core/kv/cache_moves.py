"""What is done between two steps to blocks of the device's prefix cache that no running request holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_bridge.core.kv.expected import Hashes
from kvtiers.blocks import Block

NULL_BLOCK_ID = 0
"""Stands in a request's list of blocks where it has none: for what lies before its attention's window. No KV is in that block of the device."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Take blocks of the device, fill them from host memory with `sources`, and leave them as evictable cache behind the first `start` blocks of
    the prefix that `hashes` name, which are there."""

    hashes: Hashes
    start: int
    sources: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Refresh:
    """Put the first `num_blocks` of a prefix behind everything else in the order of eviction."""

    hashes: Hashes
    num_blocks: int
