"""The part of the store of KV blocks (`kvtiers.store.KvStore`) that restores and promotions call, and whether it is to ask another node."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from engine_bridge.policy.kv.kv_layout import GROUP_BYTES, Entry
from kvtiers.blocks import Save, Stage, StageProgress
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.restore import is_worth_fetching


class TierStore(Protocol):
    """Blocks in host memory and on disk, and those of other nodes; `KvStore` says what each method does."""

    @property
    def shape(self) -> BlockShape:
        """The size of a block and the number of layers in which it is copied."""

    @property
    def num_host_blocks(self) -> int:
        """The number of blocks that host memory has room for."""

    @property
    def is_stopping_reads(self) -> bool:
        """Whether reads that no request wants any more are still under way."""

    def enter(self, group: str, *, tenant: str, weight: float, is_asked: bool, is_session: bool) -> None:
        """Note that a request of this group is in the engine."""

    def runs(self, group: str, *, tenant: str = "", is_running: bool) -> None:
        """Note that a request of this group that waited runs from now on, or the other way round."""

    def leave(self, group: str, *, tenant: str = "") -> None:
        """Note that a request of this group has ended."""

    def expect(self, group: str, at_s: float | None, *, tenant: str = "") -> None:
        """Note when a group's next request is expected; None: no longer."""

    def stage(
        self,
        group: str,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        peer: str = "",
        gives_way: bool = False,
    ) -> Stage:
        """Have the leading blocks that the tiers hold brought to host memory."""

    def progress(self, stage: Stage) -> StageProgress:
        """Return how far a stage has come."""

    def release(self, stage: Stage) -> None:
        """Give up a stage."""

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks the tiers hold."""

    def are_held(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return of each block whether the tiers hold it."""

    @property
    def is_reading_for_requests(self) -> bool:
        """Whether requests wait for reads that are under way."""

    def bytes_to_read(self, keys: Sequence[BlockKey]) -> int:
        """Return the size of the blocks that are not in host memory."""

    def begin_save(
        self, group: str, keys: Sequence[BlockKey], *, tenant: str = "", again: bool = False
    ) -> Save:
        """Reserve slots for the blocks that no tier holds. again: they are not new, and the session is not in use."""

    def disk_bytes_per_s(self) -> float:
        """Return the measured speed of the disk."""

    def peer_bytes_per_s(self, address: str) -> float | None:
        """Return the speed of reads from a peer; None if it cannot be asked."""


def block_key(entry: Entry) -> BlockKey:
    """Return the key under which the tiers keep a block of a group: of the first group the content's hash itself, of others a hash of both."""
    content, group = entry[:-GROUP_BYTES], entry[-GROUP_BYTES:]
    return BlockKey(hashlib.sha256(entry).digest() if any(group) else content)


def peer_to_ask(
    address: str, store: TierStore, block_size_tokens: float, prefill_s_per_token: float | None
) -> str:
    """Return the address of a peer that is worth asking, or "": only where fetching is expected to be faster than computing.

    address: where KV may be; "" for no peer. block_size_tokens: the tokens of a long prefix for each of the store's blocks. prefill_s_per_token: None
    where that was not measured.
    """
    rate = store.peer_bytes_per_s(address) if address else None
    if rate is None:
        return ""
    is_worth_it = is_worth_fetching(store.shape.block_bytes, block_size_tokens, rate, prefill_s_per_token)
    return address if is_worth_it else ""
