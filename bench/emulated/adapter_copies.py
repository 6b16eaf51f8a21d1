"""Adapters in KV blocks that requests do not need, of an emulated node: the driver's loans of vLLM's own block pool, with modelled bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine_bridge.driver.adapters.lent_blocks import BlockLoan, LentBlocks


@dataclass(slots=True, kw_only=True, eq=False)
class Copy(BlockLoan):
    """left_bytes: still to be written."""

    left_bytes: int

    @property
    def is_writing(self) -> bool:
        return self.left_bytes > 0

    def lose(self) -> None:
        self.is_lost, self.left_bytes = True, 0


class CopiedAdapters(LentBlocks[Copy]):
    """In the place of `engine_bridge.driver.adapters.blocks.AdapterBlocks`. block_bytes: of one KV block, over all layers."""

    def __init__(self, pool: Any, block_bytes: int, **judgements: Callable[..., Any]) -> None:
        super().__init__(pool, **judgements)
        self.block_bytes = block_bytes
        self.most_blocks = 0
        """That adapters ever lay in at once."""

    def put(self, adapter_id: int, num_bytes: int) -> bool:
        """Begin to copy it; `write` goes on. False if there is no memory that it may have."""
        if adapter_id in self._entries:
            return True
        is_lent = self.lend(
            adapter_id,
            -(-num_bytes // self.block_bytes),
            lambda blocks: Copy(adapter_id=adapter_id, blocks=blocks, left_bytes=num_bytes),
        )
        self.most_blocks = max(self.most_blocks, self.num_blocks)
        return is_lent

    def write(self, max_bytes: int) -> int:
        """So many bytes of what is on its way; returns how many there were."""
        left_bytes = max_bytes
        for copy in list(self._entries.values()):
            part = min(copy.left_bytes, left_bytes)
            copy.left_bytes -= part
            left_bytes -= part
        return max_bytes - left_bytes
