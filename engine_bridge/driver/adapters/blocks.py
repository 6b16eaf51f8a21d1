"""The bytes of adapters in KV blocks that no request needs now.

A block that vLLM takes back is zeroed before any request sees it, because weights read as KV may be NaN, which poisons the request that uses the
block next (docs/decisions/0008). Layer l's weights lie in layer l's rows.

Everything here runs on the engine thread, except `AdapterInBlocks.read`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_bridge.driver.adapters.lent_blocks import BlockLoan, LentBlocks
from engine_bridge.driver.adapters.weights import AdapterWeights, ModuleWeights
from engine_bridge.driver.memory.block_copy import kv_rows

ALIGNMENT_BYTES = 64
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One tensor among the bytes that an adapter has in one KV layer. `place`: module, "a" or "b", slice."""

    place: tuple[str, str, int]
    start: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True, eq=False)
class AdapterInBlocks(BlockLoan):
    """One adapter in blocks.

    `layers[l]`: the pieces in KV layer l. `modules`: by module, the number of slices and whether the layer takes lists.
    """

    layers: list[list[TensorPiece]]
    modules: dict[str, tuple[int, bool]]
    num_bytes: int
    num_written: int = 0
    source: AdapterWeights | None = None
    """The weights that are being written, and read meanwhile; None once all are written."""
    is_copied: Callable[[], bool] = lambda: True
    """Once all copies have begun: says whether all are made."""
    rows: Sequence[torch.Tensor] = field(default=(), repr=False)

    @property
    def is_writing(self) -> bool:
        """Whether the adapter is still being written into the blocks."""
        return self.source is not None

    def lose(self) -> None:
        """Mark the blocks as lost and stop writing."""
        self.is_lost, self.source = True, None

    @property
    def size_bytes(self) -> int:
        """The size of the layers' bytes, laid one after the other."""
        return sum(_end(pieces) for pieces in self.layers)

    def read(self, buffer: torch.Tensor) -> AdapterWeights | None:
        """Copy the adapter into `buffer` (uint8, `size_bytes` long) in host memory; None if the blocks were taken meanwhile. On any thread."""
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
        # The engine's thread marks the loss before it lets any request write.
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


class AdapterBlocks(LentBlocks[AdapterInBlocks]):
    """Adapters in the free blocks of one engine.

    Args:
        kv_caches: a tensor per layer, shape (num_blocks, ...).
        pool, on_lost, may_displace, less_valuable_than_blocks, first_to_go: see `LentBlocks`.
    """

    def __init__(
        self,
        pool: Any,
        kv_caches: Sequence[torch.Tensor],
        on_lost: Callable[[int], None],
        may_displace: Callable[[int, int], bool],
        less_valuable_than_blocks: Callable[[int], int | None] = lambda num_blocks: None,
        first_to_go: Callable[[], int | None] = lambda: None,
    ) -> None:
        super().__init__(pool, on_lost, may_displace, less_valuable_than_blocks, first_to_go)
        self._rows = [kv_rows(tensor) for tensor in kv_caches]
        self._row_bytes = self._rows[0].shape[1]
        self._is_cuda = self._rows[0].is_cuda

    @property
    def block_bytes(self) -> int:
        """The bytes of one KV block, over all layers."""
        return self._row_bytes * len(self._rows)

    @property
    def num_bytes(self) -> int:
        """The bytes of device memory that adapters lie in."""
        return self.num_blocks * self.block_bytes

    def put(self, adapter_id: int, weights: AdapterWeights) -> bool:
        """Begin to cache an adapter; `write` continues. False if there is no memory that the adapter may have."""
        if adapter_id in self._entries:
            return True
        layers = self._lay_out(weights)
        num_blocks = -(-max(_end(pieces) for pieces in layers) // self._row_bytes)
        modules = {name: (len(module.a), module.is_list) for name, module in weights.modules.items()}
        return self.lend(
            adapter_id,
            num_blocks,
            lambda blocks: AdapterInBlocks(
                adapter_id=adapter_id,
                blocks=blocks,
                layers=layers,
                modules=modules,
                num_bytes=weights.num_bytes,
                source=weights,
                rows=self._rows,
            ),
        )

    def write(self, max_bytes: int) -> int:
        """Continue to write adapters, whole layers, until about `max_bytes` are written; returns the bytes written.

        A GPU copies behind the kernels launched so far. Until it has, an adapter counts as being written: its weights in host memory must stay.
        """
        num_bytes = 0
        for entry in list(self._entries.values()):
            while (
                entry.source is not None and entry.num_written < len(entry.layers) and num_bytes < max_bytes
            ):
                num_bytes += self._write_layer(entry, entry.num_written, entry.source)
                entry.num_written += 1
                if entry.num_written == len(entry.layers) and self._is_cuda:
                    entry.is_copied = _here_on_the_stream()
            if entry.num_written == len(entry.layers) and entry.is_copied():
                entry.source = None
        return num_bytes

    def _clean(self, block_ids: list[int]) -> None:
        if self._is_cuda:
            ids = torch.tensor(block_ids, device=self._rows[0].device)
            for rows in self._rows:
                rows.index_fill_(0, ids, 0)
        else:  # a memset each: index_fill_ works element by element on a CPU
            for rows in self._rows:
                for block_id in block_ids:
                    rows[block_id].zero_()

    # -- bytes -------------------------------------------------------------------------------------------------------

    def _lay_out(self, weights: AdapterWeights) -> list[list[TensorPiece]]:
        layers: list[list[TensorPiece]] = [[] for _ in self._rows]
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
                            TensorPiece((name, kind, index), start, num_bytes, tensor.shape, tensor.dtype)
                        )
        return layers

    def _write_layer(self, entry: AdapterInBlocks, layer: int, weights: AdapterWeights) -> int:
        """Write an adapter's pieces of one layer; returns the bytes written."""
        rows, ids = self._rows[layer], [block.block_id for block in entry.blocks]
        for piece in entry.layers[layer]:
            name, kind, index = piece.place
            tensor = getattr(weights.modules[name], kind)[index]
            data = tensor.contiguous().view(-1).view(torch.uint8)
            for row, column, start, stop in _spans(piece.start, piece.num_bytes, self._row_bytes):
                rows[ids[row], column : column + stop - start].copy_(data[start:stop], non_blocking=True)
        return _end(entry.layers[layer])


class NoBlocks(AdapterBlocks):
    """Stands in where KV blocks are lent to no adapter: it holds nothing and accepts nothing."""

    def __init__(self) -> None:
        self._entries, self._rows, self._row_bytes = {}, [], 0

    def put(self, adapter_id: int, weights: AdapterWeights) -> bool:
        """Return False: there is no memory for an adapter."""
        return False

    def drop(self, adapter_id: int) -> None:
        """Do nothing: no adapter is here."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


def _here_on_the_stream() -> Callable[[], bool]:
    """Return what says whether the GPU has done all that was launched up to now."""
    event = torch.cuda.Event()
    event.record()
    is_done: Callable[[], bool] = event.query
    return is_done


def _end(pieces: Sequence[TensorPiece]) -> int:
    return pieces[-1].start + pieces[-1].num_bytes if pieces else 0


def _spans(start: int, num_bytes: int, row_bytes: int) -> Iterable[tuple[int, int, int, int]]:
    """Yield (row, column, first, last) for each stretch of a tensor's bytes that lies in one row."""
    done = 0
    while done < num_bytes:
        row, column = divmod(start + done, row_bytes)
        size = min(row_bytes - column, num_bytes - done)
        yield row, column, done, done + size
        done += size


def _gather(rows: torch.Tensor, ids: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy the first bytes of these rows, one row after the other, until `flat` is full."""
    row_bytes = rows.shape[1]
    for index, start in enumerate(range(0, flat.numel(), row_bytes)):
        part = flat[start : start + row_bytes]
        part.copy_(rows[ids[index], : part.numel()])
