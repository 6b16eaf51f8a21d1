"""One adapter in one layer, laid out for the GEMMs. `engine_bridge/driver/lora/lora.py` says why in fp32."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine_bridge.driver.lora.gemm import filled, shrink

if TYPE_CHECKING:
    from engine_bridge.driver.lora.few_rows import FewRows

# Up to this size the B matrices of a fused layer (q, k, v) become one block-diagonal matrix and one GEMM: the zeros cost less
# than two launches. Measured, 2048 columns: rank 16 (384 KiB) 15 µs against 44, rank 32 (768 KiB) 67 against 54.
BLOCK_DIAGONAL_BYTES = 512 * 1024
# Up to this many rows `SlotWeights.few` is faster than MKL. Measured on one core, 768 columns: with four rows it takes 0.5 to 0.9 of MKL's time.
FEW_ROWS = 6
# A has at least this many columns, the last ones zeros: MKL adds up the products for fewer in another order, which `few_rows` does not have.
MIN_COLUMNS = 16
LINE_FLOATS = 16


@dataclass(frozen=True, slots=True)
class Expand:
    """The sum `y[:, left:right] += h[:, low:high] @ b`, with `b` fp32 `[high - low, right - left]`."""

    low: int
    high: int
    left: int
    right: int
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """One adapter's weights in one layer at their true rank: fp32, row-major, so that no GEMM copies or transposes.

    `a` is `[in, sum of the slices' ranks]`, at least MIN_COLUMNS wide: one GEMM shrinks for q, k and v together. None for embeddings, where vLLM
    looks A up itself. `storage` holds all of it and is used again by another adapter, because fresh pages cost more than the copy. `few` computes few
    rows, None where MKL does.
    """

    a: torch.Tensor | None
    expands: tuple[Expand, ...]
    storage: torch.Tensor
    few: FewRows | None = None

    def add_to(self, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """Add the adapter's delta for fp32 rows `x` to fp32 rows `y`. Embeddings pass A's rows, padded to the maximum rank."""
        num_rows, num_filled = x.size(0), filled(x.size(0))
        if num_filled == num_rows:
            self._add_to(y, x, scale)
            return
        rows = torch.arange(num_filled).clamp_(max=num_rows - 1)
        more = y.index_select(0, rows)
        self._add_to(more, x.index_select(0, rows), scale)
        y.copy_(more[:num_rows])

    def _add_to(self, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        h = x if self.a is None else shrink(x, self.a, torch.get_num_threads())
        if scale != 1.0:
            h = h * scale
        for part in self.expands:
            y_part = y if part.left == 0 and part.right == y.size(1) else y[:, part.left : part.right]
            h_part = h if part.low == 0 and part.high == h.size(1) else h[:, part.low : part.high]
            y_part.addmm_(h_part, part.b)


MakeFew = Callable[..., "FewRows | None"]
# Adds a layer's delta for fp32 rows x, scaled, to fp32 rows y: (y, x, scale). False: nothing was added.
Compute = Callable[[torch.Tensor, torch.Tensor, float], bool]


class Pending:
    """Weights of one layer that are not laid out yet: the thread that needs them first lays them out.

    Args:
        lock: the lock of everything laid out in the same memory; held while a thread works in it.
    """

    __slots__ = (
        "_compute",
        "_failed",
        "_lock",
        "_pack",
        "_place",
        "_took",
        "_weights",
        "is_waiting",
        "size_bytes",
    )

    def __init__(
        self, pack: Callable[[], SlotWeights | None], lock: threading.Lock, size_bytes: int = 0
    ) -> None:
        self.size_bytes = size_bytes
        self.is_waiting = True
        """Whether the weights are still to be laid out."""
        self._pack: Callable[[], SlotWeights | None] | None = pack
        self._lock = lock
        self._weights: SlotWeights | None = None
        self._place: tuple[list[Any], int] | None = None
        self._compute: Compute | None = None
        self._took: Callable[[float, float], None] = lambda pack_s, all_s: None
        self._failed: Callable[[Exception], None] | None = None

    def put(
        self,
        packs: list[Any],
        slot: int,
        compute: Compute | None = None,
        took: Callable[[float, float], None] = lambda pack_s, all_s: None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Make a layer compute with these weights from now on.

        This does not wait for a thread that is laying them out: the weights are found when they are needed.

        Args:
            packs: the layer's weights by slot.
            slot: the place in `packs`.
            compute: adds the delta until the weights are laid out, so that the step does not lay them out itself; None: the step lays them out.
            took: called with the seconds that a step took to lay the weights out, 0 if another thread did, and the seconds that it waited in all.
            failed: called with the error of a step's laying out; the step then continues without the adapter. None: the error is raised.
        """
        self._place, self._compute, self._took, self._failed = (packs, slot), compute, took, failed
        packs[slot] = self if self.is_waiting else self._weights

    def add_to(self, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """Add the adapter's delta: see `SlotWeights.add_to`. Lays the weights out first, unless `compute` adds the delta."""
        try:
            self._add_to(y, x, scale)
        except Exception as error:
            if self._failed is None:
                raise
            self.drop()
            self._failed(error)

    def _add_to(self, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        if self._compute is not None and self.is_waiting and self._compute(y, x, scale):
            return
        started_s = time.perf_counter()
        weights, pack_s = self._taken()
        self._install()
        self._took(pack_s, time.perf_counter() - started_s)
        if weights is not None:
            weights.add_to(y, x, scale)

    def take(self) -> SlotWeights | None:
        """Return the weights, laid out now if they were not before. None if they were dropped, or if the adapter leaves the layer alone."""
        return self._taken()[0]

    def drop(self) -> None:
        """Give up weights that are computed with no more.

        If a thread is laying them out, it continues; then they are to be dropped again once the lock has been free.
        """
        self.is_waiting, self._pack, self._weights, self._place = False, None, None, None

    def _taken(self) -> tuple[SlotWeights | None, float]:
        """Return the weights, and the seconds that laying them out took; 0 if another thread had done it."""
        if not self.is_waiting:
            return self._weights, 0.0
        with self._lock:
            pack = self._pack
            if pack is None:
                return self._weights, 0.0
            started_s = time.perf_counter()
            self._weights = pack()
            self._pack = None  # and with it the host's weights
            self._install()
            self.is_waiting = False
            return self._weights, time.perf_counter() - started_s

    def _install(self) -> None:
        """Put the laid-out weights in this object's place, so that the next step need not ask it."""
        if self._place is not None:
            packs, slot = self._place
            packs[slot] = self._weights


# Slots are filled inside steps (inference mode) and by add_lora (outside it): a tensor made inside may be rewritten only inside.
@torch.inference_mode()
def pack_slot(
    a_slices: Sequence[torch.Tensor] | None,
    b_slices: Sequence[torch.Tensor],
    ranks: Sequence[int],
    storage: torch.Tensor | None = None,
    make_few: MakeFew | None = None,
) -> SlotWeights | None:
    """Lay out one adapter's weights in one layer.

    Args:
        a_slices: per slice `[max rank, in]`; None for an embedding, which needs only B.
        b_slices: per slice `[out, max rank]`, in the order of the layer's output columns.
        ranks: true rank per slice; 0 where the adapter does not touch the slice.
        storage: fp32 memory to use if its size suits; its contents are overwritten.
        make_few: `few_rows.few_rows`, where few rows are computed often; it brings numba along.

    Returns:
        The weights; None if the adapter does not touch the layer.
    """
    total = sum(ranks)
    if total == 0:
        return None
    num_in, num_columns = a_slices[0].size(1) if a_slices is not None else 0, max(total, MIN_COLUMNS)
    is_one_matrix = _is_one_matrix(b_slices, ranks)
    parts, num_all = _parts_of_b(num_in * num_columns, b_slices, ranks, is_one_matrix)
    # Storage of more than twice the needed size would waste memory.
    if storage is None or not num_all <= storage.numel() <= 2 * num_all:
        storage = torch.empty(num_all, dtype=torch.float32)
    a = None
    if a_slices is not None:
        a = storage[: num_in * num_columns].view(num_in, num_columns)
        _fill_a(a, a_slices, ranks)
    expands = _fill_b(storage, parts, b_slices, ranks, is_one_matrix)
    few = None
    if a is not None and make_few is not None:
        products = [tuple(part.b.shape) for part in expands]
        few = make_few(
            storage, num_in, num_columns, [each for each in parts if each.high > each.low], products
        )
    return SlotWeights(a, expands, storage, few)


def packed_size(
    a_slices: Sequence[torch.Tensor], b_slices: Sequence[torch.Tensor], ranks: Sequence[int]
) -> int:
    """Return the number of floats of `storage` that `pack_slot` uses, filled up to a line of the processor's cache."""
    total = sum(ranks)
    if total == 0:
        return 0
    num_a = a_slices[0].size(1) * max(total, MIN_COLUMNS)
    _, num_all = _parts_of_b(num_a, b_slices, ranks, _is_one_matrix(b_slices, ranks))
    return -(-num_all // LINE_FLOATS) * LINE_FLOATS


def _is_one_matrix(b_slices: Sequence[torch.Tensor], ranks: Sequence[int]) -> bool:
    width = sum(b.size(0) for b in b_slices)
    return len(ranks) == 1 or 4 * sum(ranks) * width <= BLOCK_DIAGONAL_BYTES


class _Part(NamedTuple):
    """A slice's B in the storage: element `(k, j)` is at `start + k * stride + j`; the other fields as in `Expand`."""

    start: int
    stride: int
    low: int
    high: int
    left: int
    right: int


def _parts_of_b(
    start: int, b_slices: Sequence[torch.Tensor], ranks: Sequence[int], is_one_matrix: bool
) -> tuple[list[_Part], int]:
    """Return a part for each slice, also of rank 0, and where the storage ends."""
    total, width = sum(ranks), sum(b.size(0) for b in b_slices)
    parts, low, left, at = [], 0, 0, start
    for b, rank in zip(b_slices, ranks, strict=True):
        num_out = b.size(0)
        own, stride = (start + low * width + left, width) if is_one_matrix else (at, num_out)
        parts.append(_Part(own, stride, low, low + rank, left, left + num_out))
        low, left, at = low + rank, left + num_out, at + rank * num_out
    return parts, start + total * width if is_one_matrix else at


def _fill_a(a: torch.Tensor, a_slices: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
    low = 0
    for part, rank in zip(a_slices, ranks, strict=True):
        a[:, low : low + rank].copy_(part[:rank].t())
        low += rank
    a[:, low:].zero_()


def _fill_b(
    storage: torch.Tensor,
    parts: Sequence[_Part],
    b_slices: Sequence[torch.Tensor],
    ranks: Sequence[int],
    is_one_matrix: bool,
) -> tuple[Expand, ...]:
    """Write the B matrices: one block-diagonal matrix, or one after the other."""
    total, width, start = sum(ranks), parts[-1].right, parts[0].start
    whole = storage[start : start + total * width].view(total, width).zero_() if is_one_matrix else None
    expands = []
    for part, b_slice, rank in zip(parts, b_slices, ranks, strict=True):
        if rank:
            b = storage[part.start :].as_strided((rank, b_slice.size(0)), (part.stride, 1))
            b.copy_(b_slice[:, :rank].t())
            expands.append(Expand(part.low, part.high, part.left, part.right, b))
    return (Expand(0, total, 0, width, whole),) if whole is not None else tuple(expands)
