"""Figures of the tiers: plain data for metrics, `/stats` and the command line."""

from __future__ import annotations

from msgspec import Struct, field


class HostStats(Struct, kw_only=True):
    """Figures of the host tier. Counts are blocks since the start unless a unit says otherwise."""

    bytes: int = 0
    capacity_bytes: int = 0
    num_blocks: int = 0
    num_sessions: int = 0
    num_saved: int = 0
    num_hits: int = 0
    """Blocks that a restore found in host memory, all layers."""
    num_misses: int = 0
    """Blocks of prompts that neither device, host nor disk held."""
    num_evicted: int = 0
    """Blocks that lost their last layer here; those that lost some of them count in `num_trimmed`."""
    num_trimmed: int = 0
    num_dropped_saves: int = 0
    """Finished blocks that found no room, because all of it was in use or waited for the disk."""
    num_carried: int = 0
    """Blocks that requests waited for and that went through host memory to the device in pieces."""


class DiskTierStats(Struct, kw_only=True):
    """Figures of the disk tier as the store sees it. Counts are blocks since the start."""

    is_on: bool = False
    bytes: int = 0
    capacity_bytes: int = 0
    """What it may take now: less than was configured while the disk has no room for that."""
    num_blocks: int = 0
    num_hits: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0
    """Records or blocks whose checksum or shape was wrong: served as misses."""
    num_read_errors: int = 0
    num_write_errors: int = 0
    num_skipped_writes: int = 0
    """Blocks that were not written, because too many waited for the disk already, or the disk was full or failed."""
    num_unwritten: int = 0
    """Blocks waiting to be written: the queue's depth."""
    write_lag_s: float = 0.0
    """How long the oldest of them has waited."""
    num_reads_queued: int = 0
    """Blocks being read, or waiting to be."""
    bytes_written: int = 0
    bytes_read: int = 0
    bytes_per_s: float = 0.0
    """Measured rate of recent reads; 0 before the first."""


class PeerStats(Struct, kw_only=True):
    """KV that came from other nodes, and that was lent to them. Counts are since the start."""

    is_on: bool = False
    num_asked: int = 0
    """Questions to peers."""
    num_fetched: int = 0
    """Blocks that came whole."""
    bytes_fetched: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    """Questions that brought nothing, or less than was offered, by reason."""
    bytes_per_s: float = 0.0
    """Measured rate of the last answer; 0 before the first."""
    share_found: float = 1.0
    """Of the blocks that were asked for lately, those that the peers had."""
    num_lent: int = 0
    """Blocks."""
    bytes_lent: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    """Others' questions that were cut off, by reason."""


class TierStats(Struct, kw_only=True):
    """Figures of both tiers behind the device, and of the other nodes. problem: why a tier is off, in words; None if both are on."""

    host: HostStats
    disk: DiskTierStats
    peers: PeerStats = field(default_factory=PeerStats)
    problem: str | None = None
