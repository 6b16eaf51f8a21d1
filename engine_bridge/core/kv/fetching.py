"""Whether a request's KV is asked of another node: only where that is expected to be faster than computing it."""

from __future__ import annotations

from typing import Protocol

from kvtiers.keys import BlockShape
from kvtiers.policy.restore import is_worth_fetching


class Peers(Protocol):
    """The part of `kvtiers.store.KvStore` that this module calls."""

    @property
    def shape(self) -> BlockShape:
        """The size of a block and the number of layers in which it is sent."""

    def peer_bytes_per_s(self, address: str) -> float | None:
        """Return the speed of reads from this peer; None if it cannot be asked."""


def peer_to_ask(address: str, store: Peers, block_size_tokens: int, prefill_s_per_token: float | None) -> str:
    """Return the address of a peer that is worth asking, or "".

    Args:
        address: where KV may be; "" for no peer.
        store: knows the size of a block and the speed of each peer.
        block_size_tokens: tokens in one of the store's blocks.
        prefill_s_per_token: None where that was not measured.
    """
    rate = store.peer_bytes_per_s(address) if address else None
    if rate is None:
        return ""
    is_worth_it = is_worth_fetching(store.shape.block_bytes, block_size_tokens, rate, prefill_s_per_token)
    return address if is_worth_it else ""
