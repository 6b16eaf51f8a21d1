"""What restores need of the store of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtiers.blocks import Save, Stage, StageProgress
from kvtiers.keys import BlockKey, BlockShape


class TransferStore(Protocol):
    """The part of `kvtiers.store.KvStore` that restores call; the store says what each method does."""

    @property
    def shape(self) -> BlockShape:
        """The size of a block and the number of layers in which it is copied."""

    @property
    def num_host_blocks(self) -> int:
        """The number of blocks that host memory has room for."""

    def enter(self, group: str, *, tenant: str, weight: float, is_asked: bool, is_session: bool) -> None:
        """Note that a request of this group is in the engine."""

    def leave(self, group: str, *, tenant: str = "") -> None:
        """Note that a request of this group has ended."""

    def stage(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "", peer: str = "") -> Stage:
        """Have the leading blocks that the tiers hold brought to host memory."""

    def peer_bytes_per_s(self, address: str) -> float | None:
        """Return the speed of reads from a peer; None if it cannot be asked."""

    def progress(self, stage: Stage) -> StageProgress:
        """Return how far a stage has come."""

    def release(self, stage: Stage) -> None:
        """Give up a stage."""

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks the tiers hold."""

    def bytes_to_read(self, keys: Sequence[BlockKey]) -> int:
        """Return the size of the blocks that are not in host memory."""

    @property
    def is_stopping_reads(self) -> bool:
        """Whether reads that no request wants any more are still under way."""

    def disk_bytes_per_s(self) -> float:
        """Return the measured speed of the disk."""

    def begin_save(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "") -> Save:
        """Reserve slots for the blocks that no tier holds yet."""
