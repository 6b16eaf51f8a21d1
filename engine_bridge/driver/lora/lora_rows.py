"""Which adapter computes which rows of a step.

Source: Punica (arXiv:2310.18547) for computing by segments of equal adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

NO_ADAPTER = -1

# Runs of one adapter shorter than this are sorted together with their neighbours; longer ones are computed where they lie.
# Measured at hidden 1024: sorting costs about 1.3 µs a row and layer, one group more about 40 µs.
LONG_RUN_ROWS = 32


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Neighbouring rows `start:stop` of a step, and how they are cut into groups with one adapter each.

    `slots[i]` owns the next `sizes[i]` rows; NO_ADAPTER rows are left as they are. With `order` the rows are first sorted: row `j` of the sorted
    block is row `order[j]` of the block, and `inverse` leads back.
    """

    start: int
    stop: int
    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the block's rows in group order, in fp32. Unsorted fp32 input comes back as a view, not a copy.

        Raises IndexError where `rows` ends before the block does: these are not the rows that were planned.
        """
        if rows.size(0) < self.stop:
            raise IndexError(f"a layer computes {rows.size(0)} rows, the step's plan has {self.stop} or more")
        part = rows[self.start : self.stop]
        return (part if self.order is None else part.index_select(0, self.order)).float()

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Put the rows that `read` returned back to their places, rounded to the type of `rows`."""
        part = rows[self.start : self.stop]
        if self.inverse is None:
            part.copy_(values)
        else:
            torch.index_select(values.to(rows.dtype), 0, self.inverse, out=part)


def plan_rows(slots: Sequence[int]) -> tuple[RowBlock, ...]:
    """Decide how the rows of a step are grouped.

    `slots[i]` is the adapter slot of row `i`, or NO_ADAPTER. Long runs (prefills) stay in place; the short ones between them
    (decodes) are sorted by adapter so that each adapter needs one GEMM. Rows outside every block need no work.
    """
    blocks: list[RowBlock] = []
    stretch: list[tuple[int, int, int]] = []
    start = 0
    for slot, run in groupby(slots):
        stop = start + sum(1 for _ in run)
        if stop - start < LONG_RUN_ROWS:
            stretch.append((slot, start, stop))
        else:
            blocks += _plan_stretch(stretch)
            stretch = []
            if slot != NO_ADAPTER:
                blocks.append(RowBlock(start, stop, (slot,), (stop - start,)))
        start = stop
    return tuple(blocks + _plan_stretch(stretch))


def _plan_stretch(runs: list[tuple[int, int, int]]) -> list[RowBlock]:
    """Turn neighbouring short runs `(slot, start, stop)` into at most one block."""
    with_adapter = [i for i, run in enumerate(runs) if run[0] != NO_ADAPTER]
    if not with_adapter:
        return []
    runs = runs[with_adapter[0] : with_adapter[-1] + 1]
    used = [slot for slot, _, _ in runs if slot != NO_ADAPTER]
    if len(set(used)) == len(used):
        return [
            RowBlock(
                runs[0][1],
                runs[-1][2],
                *zip(*((slot, stop - start) for slot, start, stop in runs), strict=True),
            )
        ]
    return [_sorted_block(runs)]


def _sorted_block(runs: list[tuple[int, int, int]]) -> RowBlock:
    first = runs[0][1]
    rows_of: dict[int, list[int]] = {}
    for slot, start, stop in runs:
        rows_of.setdefault(slot, []).extend(range(start - first, stop - first))
    order = [row for rows in rows_of.values() for row in rows]
    inverse = [order.index(row) for row in range(runs[-1][2] - first)]
    sizes = tuple(len(rows) for rows in rows_of.values())
    return RowBlock(first, runs[-1][2], tuple(rows_of), sizes, torch.tensor(order), torch.tensor(inverse))
