"""The conditions under which MKL gives a row the same bits whatever rows are beside it.

This module does without vllm, and uses torch only where it is loaded already. The numbers were measured with torch 2.13 on AMD and Intel processors
with AVX-512; `engine_bridge/driver/lora/lora.py` says what follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import torch

# MKL computes fewer than MIN_ROWS rows of one adapter by other kernels, in another order, and below MIXED_ROWS also the remainder of fours.
MIN_ROWS: Final = 4
MIXED_ROWS: Final = 12

# Sums of up to this many terms came out the same for every number of rows on all processors seen.
SHORT_SUM: Final = 768


class ProductParts(NamedTuple):
    """A way to make one product of several: of at least `rows` rows each, or of at most `terms` terms of the sums each. 0: it is not cut."""

    rows: int = 0
    terms: int = 0


# The cheapest first. An Intel Xeon sums 192 rows and more of over 128 columns in two parts, another processor already 33 rows of 16 columns.
CUTS: Final = (ProductParts(), ProductParts(rows=96), ProductParts(terms=512), ProductParts(terms=256))
# Numbers of rows at which those processors changed their order, and others near and between them: where they change depends on the shape.
PROBED_ROWS: Final = (12, 33, 48, 100, 144, 191, 192, 193, 257, 383, 384, 511, 577, 768, 1024)


class OneThread:
    """A context in which this thread's operations run on it alone."""

    def __enter__(self) -> None:
        import torch

        self._num_threads = torch.get_num_threads()
        # vLLM's CPU worker has replaced torch.set_num_threads by a function that does nothing.
        torch._C.set_num_threads(1)

    def __exit__(self, *exception: object) -> None:
        import torch

        torch._C.set_num_threads(self._num_threads)


def filled(num_rows: int) -> int:
    """Return how many rows to compute so that each comes out the same as in any other number of them."""
    return -(-num_rows // MIN_ROWS) * MIN_ROWS if num_rows < MIXED_ROWS else num_rows


def shrink(x: torch.Tensor, a: torch.Tensor, num_threads: int) -> torch.Tensor:
    """Compute `x @ a` of row-major fp32 `[rows, in]` and `[in, rank]`, on one thread with the bits that any other number of rows gives.

    Rows are cut in 0.97 to 1.11 of one GEMM's time (192 to 1,024 rows, 192 and 384 columns, on an Intel Xeon), long sums in 1.1 to 1.5 times it for
    192 rows, and in 1.2 to 10 times it for four. On several threads long sums depend on the rows in any case, so there the product is one GEMM.
    """
    if num_threads > 1 or a.size(0) <= SHORT_SUM:
        return x.mm(a)
    return cut_product(x, a, cut_for(a.size(0), a.size(1)))


@lru_cache(maxsize=1024)
def cut_for(num_terms: int, num_columns: int) -> ProductParts:
    """Return the cheapest cut with which a row's bits do not depend on its companions, found by comparing; uncut where no cut has that.

    It takes the time of computing some 6,000 rows, once for each shape of A. Call it on one thread. num_terms, num_columns: A's rows and columns.
    """
    import torch

    generator = torch.Generator().manual_seed(num_terms + num_columns)
    x = torch.randn(max(PROBED_ROWS), num_terms, generator=generator)
    a = torch.randn(num_terms, num_columns, generator=generator)

    def has_equal_bits(cut: ProductParts) -> bool:
        """Return whether every probed number of rows gives each row the same bits."""
        few = torch.cat([cut_product(rows, a, cut) for rows in x.split(MIN_ROWS)])
        return all(torch.equal(cut_product(x[:num], a, cut), few[:num]) for num in PROBED_ROWS)

    return next(filter(has_equal_bits, CUTS), CUTS[0])


def cut_product(x: torch.Tensor, a: torch.Tensor, cut: ProductParts) -> torch.Tensor:
    """Compute `x @ a`, made of several products as `cut` says."""
    import torch

    num_rows, num_terms = x.shape
    if cut.rows and num_rows >= 2 * cut.rows:
        return torch.cat([torch.mm(x[part], a) for part in _parts(num_rows, num_rows // cut.rows)])
    if cut.terms and num_terms > cut.terms:
        first, *others = _parts(num_terms, -(-num_terms // cut.terms))
        h = torch.mm(x[:, first], a[first])
        for part in others:
            h += torch.mm(x[:, part], a[part])
        return h
    return torch.mm(x, a)


def _parts(size: int, num_parts: int) -> Iterator[slice]:
    edges = [size * part // num_parts for part in range(num_parts + 1)]
    return (slice(*edge) for edge in pairwise(edges))
