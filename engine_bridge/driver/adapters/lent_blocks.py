"""Blocks of vLLM's free queue that adapters lie in until KV needs them: which adapter has which, and how they are given back. Nothing is copied here.

The blocks count as free all the time, so no request waits for one or is preempted for one; vLLM's `unpin_blocks` tells when it hands one out.

Source: Chameleon §4.1 (adapters in idle memory). Departs in that the memory is never taken away from the free list. Everything here runs on the
engine thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar


@dataclass(slots=True, kw_only=True, eq=False)
class BlockLoan(ABC):
    """One adapter's blocks. is_lost: vLLM has them again, or will before anything else."""

    adapter_id: int
    blocks: list[Any]
    is_lost: bool = False

    @property
    @abstractmethod
    def is_writing(self) -> bool:
        """Whether the adapter is still being written into the blocks."""

    @property
    def is_complete(self) -> bool:
        """Whether the adapter's weights are whole in the blocks that it has borrowed."""
        return not self.is_writing and not self.is_lost

    def lose(self) -> None:
        """Mark the blocks as lost."""
        self.is_lost = True


AnyLoan = TypeVar("AnyLoan", bound=BlockLoan)


class LentBlocks(Generic[AnyLoan]):
    """The loans of one engine. A subclass copies the adapters.

    Args:
        pool: vLLM's block pool; its `get_new_blocks` is wrapped.
        on_lost: called with the id of an adapter whose blocks were taken.
        may_displace: returns whether an adapter may take the place of this number of prefix blocks at the queue's front.
        less_valuable_than_blocks: returns a cached adapter worth less than this number of those prefix blocks; None if all are worth more.
        first_to_go: returns the adapter that leaves first where KV needs an adapter's blocks; None: the one unused for longest leaves.
            Adapters that these two return count as removed.
    """

    def __init__(
        self,
        pool: Any,
        on_lost: Callable[[int], None],
        may_displace: Callable[[int, int], bool],
        less_valuable_than_blocks: Callable[[int], int | None] = lambda num_blocks: None,
        first_to_go: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._pool = pool
        self._on_lost = on_lost
        self._may_displace = may_displace
        self._less_valuable_than_blocks = less_valuable_than_blocks
        self._first_to_go = first_to_go
        self._entries: dict[int, AnyLoan] = {}
        self._lent: set[int] = set()
        self._dirty: list[int] = []
        self._lost: list[AnyLoan] = []
        self._stock_get_new_blocks = pool.get_new_blocks
        pool.get_new_blocks = self._get_new_blocks

    def _clean(self, block_ids: list[int]) -> None:
        """Clear blocks that held an adapter and now go to another user."""

    # -- what lies here ----------------------------------------------------------------------------------------------

    def holds(self, adapter_id: int) -> bool:
        """Return whether this adapter's weights are whole in borrowed blocks."""
        entry = self._entries.get(adapter_id)
        return entry is not None and entry.is_complete

    def entry(self, adapter_id: int) -> AnyLoan:
        """Return this adapter's loan. Raises `KeyError` if it has borrowed nothing."""
        return self._entries[adapter_id]

    def ids(self) -> list[int]:
        """Return the ids of all complete adapters."""
        return [adapter_id for adapter_id, entry in self._entries.items() if entry.is_complete]

    def is_writing(self) -> bool:
        """Return whether any adapter is still being written."""
        return any(entry.is_writing for entry in self._entries.values())

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are lent."""
        return sum(len(entry.blocks) for entry in self._entries.values())

    # -- in and out --------------------------------------------------------------------------------------------------

    def lend(self, adapter_id: int, num_blocks: int, made: Callable[[list[Any]], AnyLoan]) -> bool:
        """Begin a loan of `num_blocks` blocks, which `made` makes of them. False if there is no memory that this adapter may have."""
        if not self._may_take(adapter_id, num_blocks):
            return False
        blocks = self._pool.get_new_blocks(num_blocks)
        entry = self._entries[adapter_id] = made(blocks)
        self._lent.update(block.block_id for block in blocks)
        self._pool.unpin_blocks(blocks, lambda block: self._reused(entry, block))
        return True

    def used(self, adapter_id: int) -> None:
        """Put an adapter behind everything else in the order of eviction."""
        entry = self._entries.get(adapter_id)
        if entry is not None:
            queue = self._pool.free_block_queue
            for block in entry.blocks:
                queue.remove(block)
            queue.append_n(entry.blocks)

    def drop(self, adapter_id: int) -> None:
        """Give an adapter up: its blocks are the next to be taken. Nothing happens if it is not here."""
        entry = self._pop(adapter_id)
        if entry is not None:
            entry.lose()
            queue = self._pool.free_block_queue
            for block in entry.blocks:
                queue.remove(block)
            queue.prepend_n(entry.blocks)

    def close(self) -> None:
        """End all loans, and give the pool its own `get_new_blocks` back."""
        for entry in self._entries.values():
            entry.lose()
        self._entries, self._lent = {}, set()
        self._pool.get_new_blocks = self._stock_get_new_blocks

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _may_take(self, adapter_id: int, num_blocks: int) -> bool:
        """Return whether an adapter may have this many free blocks.

        Blocks that hold nothing may be had; prefix KV and other adapters only give way to an adapter that is worth more.
        """
        if num_blocks > self._pool.get_num_free_blocks():
            return False
        front = list(islice(self._pool.free_block_queue.iter_blocks_after(None), num_blocks))
        if any(block.block_id in self._lent for block in front):
            return False  # the caller makes room first
        num_cached = sum(block.block_hash is not None for block in front)
        return num_cached == 0 or self._may_displace(adapter_id, num_cached)

    def _make_way(self, num_blocks: int) -> None:
        """Make KV take memory from the least valuable content, where vLLM's order is by last use (E3).

        Before prefix KV is overwritten, adapters leave that are worth less; before an adapter is, another one leaves that is worth less.
        """
        while self._entries:
            front = list(islice(self._pool.free_block_queue.iter_blocks_after(None), num_blocks))
            num_cached = sum(block.block_hash is not None for block in front)
            victim = self._less_valuable_than_blocks(num_cached) if num_cached else None
            if victim is None and any(block.block_id in self._lent for block in front):
                victim = self._first_to_go()
            if victim is None:
                return
            self.drop(victim)

    def _get_new_blocks(self, num_blocks: int) -> list[Any]:
        self._make_way(num_blocks)
        blocks: list[Any] = self._stock_get_new_blocks(num_blocks)
        if self._lost:
            self._free_rest({block.block_id for block in blocks})
        if self._dirty:
            self._clean(self._dirty)
            self._dirty = []
        return blocks

    def _reused(self, entry: AnyLoan, block: Any) -> None:
        """Note that vLLM takes a block that holds, or once held, a piece of an adapter."""
        self._dirty.append(block.block_id)
        if not entry.is_lost:
            entry.lose()
            if self._pop(entry.adapter_id) is not None:
                self._lost.append(entry)
                self._on_lost(entry.adapter_id)

    def _pop(self, adapter_id: int) -> AnyLoan | None:
        entry = self._entries.pop(adapter_id, None)
        if entry is not None:
            self._lent.difference_update(block.block_id for block in entry.blocks)
        return entry

    def _free_rest(self, taken: set[int]) -> None:
        """Put the remaining blocks of adapters that lost a block first in the free queue: they are of no use any more."""
        queue = self._pool.free_block_queue
        for entry in self._lost:
            rest = [block for block in entry.blocks if block.block_id not in taken and block.ref_cnt == 0]
            for block in rest:
                queue.remove(block)
            queue.prepend_n(rest)
        self._lost = []
