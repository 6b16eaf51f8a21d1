"""What MKL needs so that a row's bits do not depend on the rows beside it. Without vllm, and torch only where it is loaded already.

The numbers were measured with torch 2.13 on AMD and Intel processors with AVX-512; `engine_bridge/driver/lora.py` says what follows from them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

# MKL computes fewer rows of one adapter by other kernels, in another order, and below MIXED_ROWS also what is left of fours.
MIN_ROWS: Final = 4
MIXED_ROWS: Final = 12

# From so many rows on MKL cuts long sums in two on one thread, if there are more columns than SHORT_COLUMNS (Intel Xeon with AVX-512, not AMD):
# inner dimensions of 896 and more differed, those up to 768 did not.
MANY_ROWS: Final = 192
SHORT_COLUMNS: Final = 128


def filled(num_rows: int) -> int:
    """How many rows to compute so that each comes out the same as in any other number of them."""
    return -(-num_rows // MIN_ROWS) * MIN_ROWS if num_rows < MIXED_ROWS else num_rows


def shrink(x: torch.Tensor, a: torch.Tensor, num_threads: int) -> torch.Tensor:
    """`x @ a` of row-major fp32 `[rows, in]` and `[in, rank]`, on one thread with the bits that any other number of rows gives.

    There it takes 0.97 to 1.11 of one GEMM's time (192 to 1,024 rows, 192 and 384 columns, on an Intel Xeon). On several threads long sums depend
    on the rows in any case, and parts would take up to 1.4 times as long, so there it is one GEMM.
    """
    num_rows = x.size(0)
    if num_threads > 1 or num_rows < MANY_ROWS or a.size(1) <= SHORT_COLUMNS:
        return x.mm(a)
    num_parts = num_rows // (MANY_ROWS // 2)
    edges = [num_rows * part // num_parts for part in range(num_parts + 1)]
    h = x.new_empty(num_rows, a.size(1))
    for start, stop in pairwise(edges):
        h[start:stop] = x[start:stop].mm(a)
    return h
