"""One adapter in one layer, laid out for the GEMMs. `engine_bridge/driver/lora.py` says why in fp32."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine_bridge.driver.gemm import shrink

# Up to this size the B matrices of a fused layer (q, k, v) become one block-diagonal matrix and one GEMM: the zeros cost less
# than two launches. Measured, 2048 columns: rank 16 (384 KiB) 15 µs against 44, rank 32 (768 KiB) 67 against 54.
BLOCK_DIAGONAL_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Expand:
    """`y[:, left:right] += h[:, low:high] @ b`, with `b` fp32 `[high - low, right - left]`."""

    low: int
    high: int
    left: int
    right: int
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """One adapter's weights in one layer at their true rank: fp32, row-major, so that no GEMM copies or transposes.

    `a` is `[in, sum of the slices' ranks]`: one GEMM shrinks for q, k and v together. None for embeddings, where vLLM looks A
    up itself. `storage` holds all of it and is used again by the slot's next adapter if that is not much smaller, because fresh pages cost more than
    the copy.
    """

    a: torch.Tensor | None
    expands: tuple[Expand, ...]
    storage: torch.Tensor

    def add_to(self, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """Add the adapter's delta for fp32 rows `x` to fp32 rows `y`. Embeddings pass A's rows, padded to the maximum rank."""
        h = x if self.a is None else shrink(x, self.a, torch.get_num_threads())
        if scale != 1.0:
            h = h * scale
        for part in self.expands:
            y_part = y if part.left == 0 and part.right == y.size(1) else y[:, part.left : part.right]
            h_part = h if part.low == 0 and part.high == h.size(1) else h[:, part.low : part.high]
            y_part.addmm_(h_part, part.b)


# Adds a layer's delta for fp32 rows x, scaled, to fp32 rows y: (y, x, scale). False: it did not.
Compute = Callable[[torch.Tensor, torch.Tensor, float], bool]


@dataclass(eq=False, slots=True)
class Pending:
    """Weights of one layer that are not laid out yet: whoever needs them first does it.

    Args:
        packs: of the layer, by slot; `pack`'s result takes this object's place there.
        lock: of the slot, so that two threads never work in its memory.
        compute: what adds the delta until then, in place of laying it out now.
    """

    _packs: list[Any]
    _slot: int
    _pack: Callable[[], SlotWeights | None]
    _lock: threading.Lock
    _compute: Compute | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether these weights are still the next ones for their slot."""
        return self._packs[self._slot] is self

    def add_to(self, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """As `SlotWeights.add_to`."""
        if self._compute is not None and self.is_waiting and self._compute(y, x, scale):
            return
        weights = self.take()
        if weights is not None:
            weights.add_to(y, x, scale)

    def take(self) -> SlotWeights | None:
        """The weights, laid out now if nobody has. What lies in the slot by then, if it has another adapter."""
        with self._lock:
            if self.is_waiting:
                self._packs[self._slot] = self._pack()
            weights = self._packs[self._slot]
        return weights.take() if isinstance(weights, Pending) else weights


# Slots are filled inside steps (inference mode) and by add_lora (outside it): a tensor made inside may be rewritten only inside.
@torch.inference_mode()
def pack_slot(
    a_slices: Sequence[torch.Tensor] | None,
    b_slices: Sequence[torch.Tensor],
    ranks: Sequence[int],
    storage: torch.Tensor | None = None,
) -> SlotWeights | None:
    """Lay out one adapter's weights in one layer.

    Args:
        a_slices: per slice `[max rank, in]`; None for an embedding, which needs only B.
        b_slices: per slice `[out, max rank]`, in the order of the layer's output columns.
        ranks: true rank per slice; 0 where the adapter does not touch the slice.
        storage: fp32 memory to use if its size suits; whatever lay there is overwritten.

    Returns None if the adapter does not touch the layer.
    """
    total = sum(ranks)
    if total == 0:
        return None
    width = sum(b.size(0) for b in b_slices)
    is_one_matrix = len(ranks) == 1 or 4 * total * width <= BLOCK_DIAGONAL_BYTES
    num_in = a_slices[0].size(1) if a_slices is not None else 0
    num_b = (
        total * width if is_one_matrix else sum(r * b.size(0) for r, b in zip(ranks, b_slices, strict=True))
    )
    num_all = total * num_in + num_b
    # Twice as much as is needed would be kept for nothing.
    if storage is None or not num_all <= storage.numel() <= 2 * num_all:
        storage = torch.empty(num_all, dtype=torch.float32)
    a = None
    if a_slices is not None:
        a = storage[: total * num_in].view(num_in, total)
        _fill_a(a, a_slices, ranks)
    expands = _fill_b(storage[total * num_in : total * num_in + num_b], b_slices, ranks, is_one_matrix)
    return SlotWeights(a, expands, storage)


def _fill_a(a: torch.Tensor, a_slices: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
    low = 0
    for part, rank in zip(a_slices, ranks, strict=True):
        a[:, low : low + rank].copy_(part[:rank].t())
        low += rank


def _fill_b(
    memory: torch.Tensor, b_slices: Sequence[torch.Tensor], ranks: Sequence[int], is_one_matrix: bool
) -> tuple[Expand, ...]:
    """Write the B matrices: one block-diagonal matrix, or one after the other."""
    total, width = sum(ranks), sum(b.size(0) for b in b_slices)
    whole = memory.view(total, width).zero_() if is_one_matrix else None
    expands: list[Expand] = []
    low = left = used = 0
    for part, rank in zip(b_slices, ranks, strict=True):
        high, right = low + rank, left + part.size(0)
        if rank:
            size = rank * part.size(0)
            b = (
                whole[low:high, left:right]
                if whole is not None
                else memory[used : used + size].view(rank, -1)
            )
            b.copy_(part[:, :rank].t())
            expands.append(Expand(low, high, left, right, b))
            used += size
        low, left = high, right
    return (Expand(0, total, 0, width, whole),) if whole is not None else tuple(expands)
