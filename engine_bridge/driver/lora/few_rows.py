"""An adapter's delta for a few rows, which is the case for most adapters in a decode step.

MKL copies a matrix before it multiplies by it, which pays for many rows only, and for equal bits it must be given rows in fours (`gemm.filled`). Here
each matrix is read once for each row, about as fast as memory gives it. Measured on one core of an AMD EPYC, 12 layers of 768 columns, one row for
each of eight adapters of ranks 8 to 128, 90 MB: 6.0 ms a step in place of 20, 4.8 with the weights on pages of 2 MB (`layouts.large_memory`).

A row's bits may not depend on the number of rows, and so not on which of the two computes it: an answer does not depend on the other requests in its
batch (docs/decisions/0005 and 0008). MKL adds an element's products one after the other,
each with one rounding (fused multiply-add), in parts with a fixed number of terms, whose sums are then added: 192 terms on that machine, for up to
384 terms half of them. `terms_at_a_time` finds that number by comparing bits, and where it finds none MKL computes few rows, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic

from engine_bridge.driver.lora.compiled import compiled
from engine_bridge.driver.lora.gemm import OneThread, shrink

# Rows of a matrix that are shorter than this are added four at a time; longer ones one by one, as they lie in memory: that reads at 19 to 26 of
# memory's 30 GB/s, where four at a time are read at 10 to 14.
SHORT_ROW = np.uint64(48)

Floats = Any
"""A numpy.ndarray[float32]."""


@intrinsic
def _fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Emit the fused multiply-add."""
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@compiled("void(float32[::1], float32[::1], int64, int64, float32[::1])")
def _add_products(out: Floats, memory: Floats, start: int, stride: int, factors: Floats) -> None:
    """Compute `out[j] += sum over k of factors[k] * memory[start + k * stride + j]`, in the order of k."""
    # The numbers are unsigned: otherwise numba checks of each index whether it counts from the end, which takes 10% of the time.
    width, num, step = np.uint64(out.shape[0]), np.uint64(factors.shape[0]), np.uint64(stride)
    at, k, one, four = np.uint64(start), np.uint64(0), np.uint64(1), np.uint64(4)
    while width < SHORT_ROW and k + four <= num:
        at1, at2, at3 = at + step, at + step + step, at + step + step + step
        c0, c1, c2, c3 = factors[k], factors[k + one], factors[k + one + one], factors[k + four - one]
        for j in range(width):
            first = _fma(c1, memory[at1 + j], _fma(c0, memory[at + j], out[j]))
            out[j] = _fma(c3, memory[at3 + j], _fma(c2, memory[at2 + j], first))
        at, k = at3 + step, k + four
    while k < num:
        factor = factors[k]
        for j in range(width):
            out[j] = _fma(factor, memory[at + j], out[j])
        at, k = at + step, k + one


@compiled("void(float32[::1], float32[::1], int64, int64, float32[::1], int64, float32[::1])")
def _add_product(
    y: Floats, memory: Floats, start: int, stride: int, x: Floats, at_a_time: int, room: Floats
) -> None:
    """Compute `y += x @ matrix`, the sums in parts of `at_a_time` terms. `room` is at least as wide as `y`.

    Raises:
        IndexError: for a matrix that is not all in `memory`: the loops below have no bounds.
    """
    end = start + (x.shape[0] - 1) * stride + y.shape[0]
    if start < 0 or stride < y.shape[0] or end > memory.shape[0] or room.shape[0] < y.shape[0]:
        raise IndexError("a matrix of an adapter does not lie within its memory")
    part = room[: y.shape[0]]
    for first in range(0, x.shape[0], at_a_time):
        part[:] = 0.0
        _add_products(part, memory, start + first * stride, stride, x[first : first + at_a_time])
        for j in range(y.shape[0]):
            y[j] += part[j]


@compiled(
    "void(float32[:, ::1], float32[:, ::1], int64, int64, float32, float32[::1], int64, int64, int64, int64[:, ::1])"
)
def _add_rows(
    y: Floats,
    x: Floats,
    first: int,
    stop: int,
    scale: float,
    memory: Floats,
    num_in: int,
    num_columns: int,
    at_a_time: int,
    parts: Any,
) -> None:
    if first < 0 or stop > y.shape[0] or stop > x.shape[0] or x.shape[1] != num_in:
        raise IndexError("rows of an adapter are not among those that are computed")
    widest = num_columns
    for part in range(parts.shape[0]):
        low, high, left, right = parts[part, 2], parts[part, 3], parts[part, 4], parts[part, 5]
        if low < 0 or low > high or high > num_columns or left < 0 or left > right or right > y.shape[1]:
            raise IndexError("a part of an adapter has other columns than its layer")
        widest = max(widest, right - left)
    h, room = np.empty(num_columns, np.float32), np.empty(widest, np.float32)
    for row in range(first, stop):
        h[:] = 0.0
        _add_product(h, memory, 0, num_columns, x[row], at_a_time, room)
        if scale != 1.0:
            for column in range(num_columns):
                h[column] *= scale
        for part in range(parts.shape[0]):
            start, stride, low, high, left, right, ranks_at_a_time = parts[part]
            _add_product(y[row, left:right], memory, start, stride, h[low:high], ranks_at_a_time, room)


class FewRows(NamedTuple):
    """One adapter in one layer, as `add` takes it; see `few_rows`."""

    memory: Floats
    num_in: int
    num_columns: int
    at_a_time: int
    parts: Any

    def add(self, y: Floats, x: Floats, first: int, stop: int, scale: float) -> None:
        """Add the delta of rows `first:stop` of fp32 `x` to the same rows of fp32 `y`, both row-major arrays of numpy.

        Raises IndexError, before anything is written, where these have other rows or columns than the adapter.
        """
        _add_rows(y, x, first, stop, scale, *self)


def few_rows(
    storage: torch.Tensor,
    num_in: int,
    num_columns: int,
    parts: Sequence[tuple[int, int, int, int, int, int]],
    products: Sequence[tuple[int, int]],
) -> FewRows | None:
    """Return an object that computes few rows with the bits that MKL gives many; None where that is not possible.

    Args:
        storage: A, `[num_in, num_columns]`, at its beginning, and B.
        num_in: rows of A.
        num_columns: columns of A.
        parts: the parts of B, each `storage[start + k * stride :]` for `k` from 0 to `high - low`: start, stride, and low, high, left and right as in
            `lora_weights.Expand`.
        products: the terms and columns of MKL's products with B: one product for each part, or a single product for all, with zeros about them.
    """
    at_a_time = terms_at_a_time(num_in, num_columns, is_shrink=True)
    of_parts = [terms_at_a_time(*product) for product in products]
    if len(parts) > len(products):
        num_ranks, _ = products[0]
        of_parts = [of_parts[0] if of_parts[0] == num_ranks else None] * len(parts)
    if at_a_time is None or None in of_parts:
        return None
    places = [(*part, ranks) for part, ranks in zip(parts, of_parts, strict=True)]
    return FewRows(storage.numpy(), num_in, num_columns, at_a_time, np.array(places, dtype=np.int64))


@lru_cache(maxsize=1024)
def terms_at_a_time(num_terms: int, num_columns: int, *, is_shrink: bool = False) -> int | None:
    """Return how many products MKL adds to one element before it adds their sum; None if no such number gives MKL's bits.

    num_terms, num_columns: rows and columns of the matrix. is_shrink: whether the matrix is A, which `gemm.shrink` may cut.
    """
    generator = torch.Generator().manual_seed(num_terms)
    x = torch.randn(12, num_terms, generator=generator)
    matrix = torch.randn(num_terms, num_columns, generator=generator)
    y = torch.zeros(12, num_columns) if is_shrink else torch.randn(12, num_columns, generator=generator)

    def product(rows: int) -> Floats:
        """Return MKL's product for the first `rows` rows."""
        added = (
            shrink(x[:rows], matrix, torch.get_num_threads())
            if is_shrink
            else y[:rows].addmm(x[:rows], matrix)
        )
        return added.numpy()

    with OneThread():  # first as few rows are computed, then as many rows are
        wanted = [product(rows) for rows in (12, 4)]
    wanted += [product(rows) for rows in (12, 4)]
    memory, room = matrix.numpy().ravel(), np.empty(num_columns, np.float32)

    def has_its_bits(row: int, at_a_time: int) -> bool:
        """Return whether sums in parts of `at_a_time` terms give a row the bits that MKL gives it."""
        found = y[row].numpy().copy()
        _add_product(found, memory, 0, num_columns, x[row].numpy(), at_a_time, room)
        return all(np.array_equal(found, want[row]) for want in wanted if row < len(want))

    orders = (each for each in _candidates(num_terms) if all(has_its_bits(row, each) for row in range(12)))
    return next(orders, None)


def _candidates(num_terms: int) -> list[int]:
    shares = [-(-num_terms // parts) for parts in range(1, 9)] + [num_terms // parts for parts in range(2, 9)]
    usual = [*range(64, 1025, 64), 336, 1536, 2048]
    return list(dict.fromkeys(each for each in [*shares, *usual] if 0 < each <= num_terms))
