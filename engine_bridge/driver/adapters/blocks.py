"""Adapters in KV blocks that nobody needs now.

A cached adapter lies in blocks of vLLM's free queue: they count as free, so no request ever waits for one or is preempted for one, and vLLM's
`unpin_blocks` tells when it hands one out; then the adapter is gone, and the block is zeroed before anybody sees it, because weights read
as KV may be NaN, which poisons whoever uses the block next (docs/decisions/0008). Layer l's weights lie in layer l's rows.

Source: Chameleon §4.1 (adapters in idle memory). Departs in that the memory is never taken away from the free list.
Everything here runs on the engine thread, but for `Entry.read`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_bridge.driver.adapters.weights import AdapterWeights, ModuleWeights
from engine_bridge.driver.block_copy import kv_rows

ALIGNMENT_BYTES = 64
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor among the bytes that an adapter has in one KV layer. `place`: module, "a" or "b", slice."""

    place: tuple[str, str, int]
    start: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(slots=True)
class Entry:
    """One adapter in blocks. `layers[l]`: the pieces in KV layer l; `num_slices`, `is_list`: by module."""

    adapter_id: int
    blocks: list[Any]
    layers: list[list[Piece]]
    modules: dict[str, tuple[int, bool]]
    num_bytes: int
    num_written: int = 0
    is_lost: bool = False
    source: AdapterWeights | None = None
    """What is being written; None once all is."""
    rows: Sequence[torch.Tensor] = field(default=(), repr=False)

    @property
    def is_complete(self) -> bool:
        return self.source is None and not self.is_lost

    @property
    def size_bytes(self) -> int:
        """Of the layers' bytes, laid one after the other."""
        return sum(_end(pieces) for pieces in self.layers)

    def read(self, buffer: torch.Tensor) -> AdapterWeights | None:
        """Copy the adapter into host memory (uint8, `size_bytes` long). None if its blocks were taken meanwhile. On any thread."""
        ids = torch.tensor([block.block_id for block in self.blocks])
        parts: dict[tuple[str, str, int], torch.Tensor] = {}
        start = 0
        for rows, pieces in zip(self.rows, self.layers, strict=True):
            flat = buffer[start : start + _end(pieces)]
            _gather(rows, ids, flat)
            parts |= {
                piece.place: flat[piece.start : piece.start + piece.num_bytes]
                .view(piece.dtype)
                .view(piece.shape)
                for piece in pieces
            }
            start += _end(pieces)
        # The engine's thread marks the loss before it lets anybody write.
        return None if self.is_lost else AdapterWeights(self._modules(parts), self.num_bytes, buffer)

    def _modules(self, parts: dict[tuple[str, str, int], torch.Tensor]) -> dict[str, ModuleWeights]:
        return {
            name: ModuleWeights(
                tuple(parts.get((name, "a", i)) for i in range(num_slices)),
                tuple(parts.get((name, "b", i)) for i in range(num_slices)),
                is_list,
            )
            for name, (num_slices, is_list) in self.modules.items()
        }


class NoBlocks:
    """KV keeps its memory to itself."""

    block_bytes = num_bytes = num_blocks = 0

    def holds(self, adapter_id: int) -> bool:
        return False

    def entry(self, adapter_id: int) -> Entry:
        raise KeyError(adapter_id)

    def ids(self) -> list[int]:
        return []

    def put(self, adapter_id: int, weights: AdapterWeights) -> bool:
        return False

    def is_writing(self) -> bool:
        return False

    def write(self, max_bytes: int) -> int:
        return 0

    def used(self, adapter_id: int) -> None: ...

    def drop(self, adapter_id: int) -> None: ...

    def close(self) -> None: ...


class AdapterBlocks:
    """Adapters in the free blocks of one engine.

    Args:
        pool: vLLM's block pool; its `get_new_blocks` is wrapped.
        kv_caches: a tensor per layer, shape (num_blocks, ...).
        on_lost: called with the id of an adapter whose blocks were taken.
        may_displace: whether an adapter may take the place of prefix blocks that lie in the queue's front.
        worth_less: of the cached adapters, one that is worth less than so many of those prefix blocks; None if all are worth more.
    """

    def __init__(
        self,
        pool: Any,
        kv_caches: Sequence[torch.Tensor],
        on_lost: Callable[[int], None],
        may_displace: Callable[[int, int], bool],
        worth_less: Callable[[int], int | None] = lambda num_blocks: None,
    ) -> None:
        self._pool = pool
        self._worth_less = worth_less
        self._rows = [kv_rows(tensor) for tensor in kv_caches]
        self._row_bytes = self._rows[0].shape[1]
        self._on_lost = on_lost
        self._may_displace = may_displace
        self._entries: dict[int, Entry] = {}
        self._dirty: list[int] = []
        self._lost: list[Entry] = []
        self._stock_get_new_blocks = pool.get_new_blocks
        pool.get_new_blocks = self._get_new_blocks

    # -- what lies here ----------------------------------------------------------------------------------------------

    def holds(self, adapter_id: int) -> bool:
        entry = self._entries.get(adapter_id)
        return entry is not None and entry.is_complete

    def entry(self, adapter_id: int) -> Entry:
        return self._entries[adapter_id]

    def ids(self) -> list[int]:
        """Of all complete adapters."""
        return [adapter_id for adapter_id, entry in self._entries.items() if entry.is_complete]

    @property
    def block_bytes(self) -> int:
        """Of one KV block, over all layers."""
        return self._row_bytes * len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Of device memory that adapters lie in."""
        return self.num_blocks * self.block_bytes

    @property
    def num_blocks(self) -> int:
        return sum(len(entry.blocks) for entry in self._entries.values())

    # -- in and out --------------------------------------------------------------------------------------------------

    def put(self, adapter_id: int, weights: AdapterWeights) -> bool:
        """Begin to cache an adapter; `write` goes on. False if there is no memory that it may have."""
        if adapter_id in self._entries:
            return True
        layers = self._lay_out(weights)
        num_blocks = -(-max(_end(pieces) for pieces in layers) // self._row_bytes)
        if not self._may_take(adapter_id, num_blocks):
            return False
        blocks = self._pool.get_new_blocks(num_blocks)
        modules = {name: (len(module.a), module.is_list) for name, module in weights.modules.items()}
        entry = Entry(adapter_id, blocks, layers, modules, weights.num_bytes, source=weights, rows=self._rows)
        self._entries[adapter_id] = entry
        self._pool.unpin_blocks(blocks, lambda block: self._reused(entry, block))
        return True

    def is_writing(self) -> bool:
        return any(entry.source is not None for entry in self._entries.values())

    def write(self, max_bytes: int) -> int:
        """Go on with adapters that are on their way in, whole layers, until about so many bytes are written; returns how many were."""
        num_bytes = 0
        for entry in list(self._entries.values()):
            while entry.source is not None and num_bytes < max_bytes:
                num_bytes += self._write_layer(entry, entry.num_written, entry.source)
                entry.num_written += 1
                if entry.num_written == len(entry.layers):
                    entry.source = None
        return num_bytes

    def used(self, adapter_id: int) -> None:
        """Put an adapter behind everything else in the order of eviction."""
        queue = self._pool.free_block_queue
        entry = self._entries.get(adapter_id)
        if entry is not None:
            for block in entry.blocks:
                queue.remove(block)
            queue.append_n(entry.blocks)

    def drop(self, adapter_id: int) -> None:
        """Give an adapter up: its blocks are the next to be taken. Nothing happens if it is not here."""
        entry = self._entries.pop(adapter_id, None)
        if entry is not None:
            entry.is_lost, entry.source = True, None
            queue = self._pool.free_block_queue
            for block in entry.blocks:
                queue.remove(block)
            queue.prepend_n(entry.blocks)

    def close(self) -> None:
        for entry in self._entries.values():
            entry.is_lost, entry.source = True, None
        self._entries = {}
        self._pool.get_new_blocks = self._stock_get_new_blocks

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _may_take(self, adapter_id: int, num_blocks: int) -> bool:
        """Free blocks that hold nothing may be had; prefix KV and other adapters only for what is worth more."""
        if num_blocks > self._pool.get_num_free_blocks():
            return False
        front = _front(self._pool.free_block_queue, num_blocks)
        borrowed = {block.block_id for entry in self._entries.values() for block in entry.blocks}
        if any(block.block_id in borrowed for block in front):
            return False  # the caller makes room first
        num_cached = sum(block.block_hash is not None for block in front)
        return num_cached == 0 or self._may_displace(adapter_id, num_cached)

    def _make_way(self, num_blocks: int) -> None:
        """Before prefix KV is overwritten, adapters go that are worth less: one order by value for both, where vLLM's is by last use (E3)."""
        while self._entries:
            front = _front(self._pool.free_block_queue, num_blocks)
            num_cached = sum(block.block_hash is not None for block in front)
            victim = self._worth_less(num_cached) if num_cached else None
            if victim is None:
                return
            self.drop(victim)

    def _get_new_blocks(self, num_blocks: int) -> list[Any]:
        self._make_way(num_blocks)
        blocks: list[Any] = self._stock_get_new_blocks(num_blocks)
        if self._lost:
            self._free_rest({block.block_id for block in blocks})
        if self._dirty:
            self._zero(self._dirty)
            self._dirty = []
        return blocks

    def _zero(self, block_ids: list[int]) -> None:
        if self._rows[0].is_cuda:
            ids = torch.tensor(block_ids, device=self._rows[0].device)
            for rows in self._rows:
                rows.index_fill_(0, ids, 0)
        else:  # a memset each: index_fill_ goes element by element there
            for rows in self._rows:
                for block_id in block_ids:
                    rows[block_id].zero_()

    def _reused(self, entry: Entry, block: Any) -> None:
        """vLLM takes a block that holds, or once held, a piece of an adapter."""
        self._dirty.append(block.block_id)
        if not entry.is_lost:
            entry.is_lost, entry.source = True, None
            if self._entries.pop(entry.adapter_id, None) is not None:
                self._lost.append(entry)
                self._on_lost(entry.adapter_id)

    def _free_rest(self, taken: set[int]) -> None:
        """What is left of adapters that lost a block is of no use: it goes before anything else."""
        queue = self._pool.free_block_queue
        for entry in self._lost:
            rest = [block for block in entry.blocks if block.block_id not in taken and block.ref_cnt == 0]
            for block in rest:
                queue.remove(block)
            queue.prepend_n(rest)
        self._lost = []

    # -- bytes -------------------------------------------------------------------------------------------------------

    def _lay_out(self, weights: AdapterWeights) -> list[list[Piece]]:
        layers: list[list[Piece]] = [[] for _ in self._rows]
        for name, module in weights.modules.items():
            found = _LAYER.search(f".{name}")
            number = int(found[1]) if found else 0
            pieces = layers[number % len(layers)]
            for kind, tensors in (("a", module.a), ("b", module.b)):
                for index, tensor in enumerate(tensors):
                    if tensor is not None:
                        start = -(-_end(pieces) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                        num_bytes = tensor.numel() * tensor.element_size()
                        pieces.append(
                            Piece((name, kind, index), start, num_bytes, tensor.shape, tensor.dtype)
                        )
        return layers

    def _write_layer(self, entry: Entry, layer: int, weights: AdapterWeights) -> int:
        """Returns the bytes written."""
        rows, ids = self._rows[layer], [block.block_id for block in entry.blocks]
        for piece in entry.layers[layer]:
            name, kind, index = piece.place
            tensor = getattr(weights.modules[name], kind)[index]
            data = tensor.contiguous().view(-1).view(torch.uint8)
            for row, column, start, stop in _spans(piece.start, piece.num_bytes, self._row_bytes):
                rows[ids[row], column : column + stop - start].copy_(data[start:stop], non_blocking=True)
        return _end(entry.layers[layer])


def _end(pieces: Sequence[Piece]) -> int:
    return pieces[-1].start + pieces[-1].num_bytes if pieces else 0


def _spans(start: int, num_bytes: int, row_bytes: int) -> Iterable[tuple[int, int, int, int]]:
    """(row, column, first, last) of each stretch of a tensor's bytes that lies in one row."""
    done = 0
    while done < num_bytes:
        row, column = divmod(start + done, row_bytes)
        size = min(row_bytes - column, num_bytes - done)
        yield row, column, done, done + size
        done += size


def _gather(rows: torch.Tensor, ids: torch.Tensor, flat: torch.Tensor) -> None:
    """The first bytes of these rows, one after the other."""
    row_bytes = rows.shape[1]
    for index, start in enumerate(range(0, flat.numel(), row_bytes)):
        part = flat[start : start + row_bytes]
        part.copy_(rows[ids[index], : part.numel()])


def _front(queue: Any, num_blocks: int) -> list[Any]:
    """The blocks that the queue gives next."""
    blocks: list[Any] = []
    block = queue.fake_free_list_head.next_free_block
    while len(blocks) < num_blocks and block is not queue.fake_free_list_tail:
        blocks.append(block)
        block = block.next_free_block
    return blocks
