"""The cost of a step, a prefill and a swap. Pure: facts in, seconds out. `restore_method` decides by it.

`StepTable` predicts in microseconds how long a step takes, and learns from each real one; the time of a prefill is computed from it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from kvtiers.policy.rates import HALF_LIFE_S

# Share of an error that one real step or copy corrects where it was made. Chosen: seven take away half of it. While this and the next are at most 1
# together, a prediction cannot overshoot the measured time.
LEARNING_RATE = 0.1
# Share of an error by which all others are taken to be slower, too. Chosen: two steps believe half of a change of the machine's speed, which
# changes from one second to the next; of rates from 0.1 to 0.5 in live plays, the rates from 0.3 on were within 0.3% of each other (bench/LOG.md).
SLOWNESS_RATE = 0.3
# The same share for copies. Chosen: a copy in a step finds other caches than the one before it, so that equal ones differ by a fifth, mostly at
# random; of rates from 0.1 to 0.3 in live plays the lowest was best both ways (bench/LOG.md).
COPY_SLOWNESS_RATE = 0.1
# A step's error counts as at most this many times the usual error, which each step moves by this share. Chosen: a stall of the machine (collection,
# another tenant) then moves a prediction by about the usual error, for some steps, and a lasting change is believed after a few more.
OUTLIER_ERRORS = 3.0
ERROR_RATE = 0.05
MIN_USUAL_ERROR = 0.02
# A step counts as at most this much faster than predicted. Chosen: a clock that stands still must not make all steps take no time for ever.
LEAST_TIMES = 0.01
# The usual error before any copy was measured: the first ones are believed, however far off they are. Chosen.
UNKNOWN_COPY_ERROR = 1.0
# Sizes between which copies are taken to be linear in size. Chosen: few, so that each real copy teaches others of about its size.
COPY_SIZES_BYTES = (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 29)
# Of a long prefill, at most this many chunks are looked up, evenly spread: exact where a step's cost is linear in its context. Chosen.
MAX_CHUNK_LOOKUPS = 4


def believed(share: float, usual_error: float, error_rate: float = ERROR_RATE) -> tuple[float, float]:
    """Return the part of a relative error that is believed, and the usual error after it."""
    most = OUTLIER_ERRORS * usual_error
    share = max(min(share, most), -most)
    return share, max(usual_error + error_rate * (abs(share) - usual_error), MIN_USUAL_ERROR)


# -- steps -------------------------------------------------------------------------------------------------------------


class StepGrid(Struct, frozen=True, kw_only=True):
    """A table's content, to be stored as it is.

    The axes rise from 0: tokens prefilled in a step, requests that decode a token in it, tokens in KV that all of them attend to. A step without
    work (0, 0) is never asked for.

    Attributes:
        seconds: by prefill, then decodes, then context.
    """

    num_prefill_tokens: tuple[int, ...]
    num_decodes: tuple[int, ...]
    num_context_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The three axes: prefill tokens, decodes, context tokens."""
        return self.num_prefill_tokens, self.num_decodes, self.num_context_tokens


class StepTable:
    """Seconds of a step, by linear interpolation between grid points; more work never takes less time.

    Beyond the grid the slopes at its edge continue, and those of several axes add up. Each real step corrects its own cell, and the factor by which
    the machine is slower just now than the whole table says. Memory is that of the grid. Call it from one thread.

    Source: AdaptiveLLM §3.2 and §4.6 (prediction must cost under 1% of the run); the table, so that any regressor will do, and its online learning
    are ours.

    Raises:
        ValueError: a grid whose axes do not rise from 0, whose sizes do not fit, or with times that are not finite.
    """

    def __init__(self, grid: StepGrid) -> None:
        _check(grid)
        self._prefill, self._decodes, self._context = grid.axes
        self._sizes = tuple(len(axis) for axis in grid.axes)
        self._seconds = _rising([max(seconds, 0.0) for seconds in grid.seconds], self._sizes)
        self._slowness = 1.0
        self.usual_error = 0.1
        """Mean share by which real steps differ from the prediction, recent ones first; each counted at no more than OUTLIER_ERRORS of it."""

    @classmethod
    def of(
        cls,
        predict: Callable[[Sequence[tuple[int, int, int]]], Sequence[float]],
        num_prefill_tokens: Sequence[int],
        num_decodes: Sequence[int],
        num_context_tokens: Sequence[int],
    ) -> StepTable:
        """Build a table from a regressor: given all grid points as (prefill tokens, decodes, context tokens), it returns the seconds of each.

        num_prefill_tokens, num_decodes, num_context_tokens: the axes: prefilled in a step, requests that decode in it, in KV that these attend to.
        """
        axes = (tuple(num_prefill_tokens), tuple(num_decodes), tuple(num_context_tokens))
        points = [(p, d, c) for p in axes[0] for d in axes[1] for c in axes[2]]
        # A step without work is never run, and no regressor has seen one.
        seconds = [float(s) if p or d else 0.0 for (p, d, _), s in zip(points, predict(points), strict=True)]
        return cls(
            StepGrid(
                num_prefill_tokens=axes[0],
                num_decodes=axes[1],
                num_context_tokens=axes[2],
                seconds=tuple(seconds),
            )
        )

    def grid(self) -> StepGrid:
        """Return the table as it is now, with the corrections from real steps."""
        return StepGrid(
            num_prefill_tokens=self._prefill,
            num_decodes=self._decodes,
            num_context_tokens=self._context,
            seconds=tuple(self._slowness * seconds for seconds in self._seconds),
        )

    def step_s(self, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int) -> float:
        """Return the predicted seconds of a step with this work; 0 for a step without any."""
        if num_prefill_tokens <= 0 and num_decodes <= 0:
            return 0.0
        i, x = _locate(self._prefill, num_prefill_tokens)
        j, y = _locate(self._decodes, num_decodes)
        k, z = _locate(self._context, num_context_tokens)
        low = (i * self._sizes[1] + j) * self._sizes[2] + k
        if x <= 1 and y <= 1 and z <= 1:
            return self._within(low, (x, y, z)) * self._slowness
        # The interpolation says nothing beyond its cell: where either of two kinds of work takes all the time, both would take less than none.
        edge = min(x, 1.0), min(y, 1.0), min(z, 1.0)
        at_edge = seconds = self._within(low, edge)
        for axis, share in enumerate((x, y, z)):
            if share > 1:
                u, v, w = (0.0 if other == axis else edge[other] for other in range(3))
                seconds += (share - 1) * (at_edge - self._within(low, (u, v, w)))
        return seconds * self._slowness

    def prefill_sizes(self, least: int, most: int) -> Sequence[int]:
        """Return the grid's numbers of prefilled tokens from `least` to below `most`."""
        return self._prefill[bisect_left(self._prefill, least) : bisect_left(self._prefill, most)]

    def _within(self, low: int, shares: tuple[float, float, float]) -> float:
        """Return the seconds of a point in a cell, on a machine of the usual speed.

        low: the number of the cell's point with the least work. shares: how far into the cell the point is along each axis, as a share of its length.
        """
        x, y, z = shares
        _, along_j, along_k = self._sizes
        seconds = self._seconds
        high = low + along_j * along_k
        # Along the context, then the decodes, then the prefill: written out, since this is asked thousands of times a step.
        a = seconds[low] + z * (seconds[low + 1] - seconds[low])
        c = seconds[high] + z * (seconds[high + 1] - seconds[high])
        low += along_k
        high += along_k
        b = seconds[low] + z * (seconds[low + 1] - seconds[low])
        d = seconds[high] + z * (seconds[high + 1] - seconds[high])
        a += y * (b - a)
        c += y * (d - c)
        return a + x * (c - a)

    def observe(
        self, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int, seconds: float
    ) -> None:
        """Note the seconds of a real step: move the prediction a part of the way there, never past it. Steps without work or time are ignored."""
        work = (num_prefill_tokens, num_decodes, num_context_tokens)
        predicted = self.step_s(*work)
        if (num_prefill_tokens <= 0 and num_decodes <= 0) or not 0 < seconds < math.inf:
            return
        if predicted <= 0:  # a time that was never predicted (a table of zeros) is believed at once
            self._correct(work, LEARNING_RATE * seconds / self._slowness)
            return
        share, self.usual_error = believed(seconds / predicted - 1, self.usual_error)
        # Powers: errors up and down cancel in both. With sums noise lowers the slowness for ever, and with it the times that no step corrects.
        times = max(1 + share, LEAST_TIMES)
        self._correct(work, (times**LEARNING_RATE - 1) * predicted / self._slowness)
        self._slowness *= times**SLOWNESS_RATE

    def _correct(self, work: tuple[int, int, int], change_s: float) -> None:
        """Move the prediction at a point by a change, each corner of its cell by its weight in it.

        Beyond the grid both ends of the last cell move alike: the slope stays, and the change is not multiplied by how far out the point is.
        """
        axes = (self._prefill, self._decodes, self._context)
        places = [_locate(axis, amount) for axis, amount in zip(axes, work, strict=True)]
        (i, _), (j, _), (k, _) = places
        ends = [(1.0, 1.0) if share > 1 else (1 - share, share) for _, share in places]
        corners = [
            ((i + up[0], j + up[1], k + up[2]), math.prod(end[u] for u, end in zip(up, ends, strict=True)))
            for up in itertools.product((0, 1), repeat=3)
        ]
        num_alike = 2 ** sum(share > 1 for _, share in places)
        norm = sum(weight * weight for _, weight in corners) / num_alike
        targets = [
            (corner, self._seconds[self._index(*corner)] + change_s * weight / norm)
            for corner, weight in corners
            if weight > 0
        ]
        for corner, target in targets:
            if change_s > 0:
                self._raise_from(*corner, target)
            else:
                self._lower_from(*corner, max(target, 0.0))

    def _index(self, i: int, j: int, k: int) -> int:
        return (i * self._sizes[1] + j) * self._sizes[2] + k

    def _raise_from(self, i: int, j: int, k: int, least_s: float) -> None:
        """Raise all points with at least this much work to at least this time. Behind a point that takes so long, all others do."""
        for a in range(i, self._sizes[0]):
            for b in range(j, self._sizes[1]):
                at = self._index(a, b, k)
                end = at + self._sizes[2] - k
                if self._seconds[at] >= least_s:
                    if b == j:
                        return
                    break
                while at < end and self._seconds[at] < least_s:
                    self._seconds[at] = least_s
                    at += 1

    def _lower_from(self, i: int, j: int, k: int, most_s: float) -> None:
        """Lower all points with at most this much work to at most this time."""
        for a in range(i, -1, -1):
            for b in range(j, -1, -1):
                at = self._index(a, b, k)
                end = at - k
                if self._seconds[at] <= most_s:
                    if b == j:
                        return
                    break
                while at >= end and self._seconds[at] > most_s:
                    self._seconds[at] = most_s
                    at -= 1


def _check(grid: StepGrid) -> None:
    for axis in grid.axes:
        if len(axis) < 2 or axis[0] != 0 or any(b <= a for a, b in itertools.pairwise(axis)):
            raise ValueError("a step table's axes rise from 0 and have two points or more")
    if len(grid.seconds) != math.prod(len(axis) for axis in grid.axes):
        raise ValueError("a step table has one time for each grid point")
    if not all(math.isfinite(seconds) for seconds in grid.seconds):
        raise ValueError("a step table's times are finite")


def _rising(seconds: list[float], sizes: tuple[int, ...]) -> list[float]:
    """Return the times with each point at least as slow as the points with less work: regressors such as forests are not monotone."""
    along_i, along_j, along_k = sizes
    for i in range(along_i):
        for j in range(along_j):
            for k in range(along_k):
                at = (i * along_j + j) * along_k + k
                before = [at - 1] * (k > 0) + [at - along_k] * (j > 0) + [at - along_j * along_k] * (i > 0)
                seconds[at] = max(seconds[at], *(seconds[b] for b in before)) if before else seconds[at]
    return seconds


def _locate(axis: Sequence[int], amount: int) -> tuple[int, float]:
    """Return the cell in which an amount lies, and how far into it as a share of its length: more than 1 beyond the last cell."""
    at = bisect_right(axis, amount) - 1
    if at < 0:
        return 0, 0.0
    at = min(at, len(axis) - 2)
    low = axis[at]
    return at, (amount - low) / (axis[at + 1] - low)


# -- prefills ----------------------------------------------------------------------------------------------------------


class PrefillCost(Protocol):
    """Predicts the time of a prefill."""

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Return the seconds to compute `num_tokens` of a request behind `num_context_tokens` that have their KV; 0 for none. Never less for more."""
        ...


@dataclass(frozen=True, slots=True)
class TablePrefill:
    """The time of the steps of a prefill that runs alone, chunk by chunk.

    Source: AdaptiveLLM §3.2.

    Args:
        chunk_tokens: tokens prefilled in a step at most.
    """

    table: StepTable
    chunk_tokens: int

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Return the seconds of such a prefill; 0 for no tokens."""
        if num_tokens <= 0:
            return 0.0
        num_chunks, num_rest = divmod(num_tokens, self.chunk_tokens)
        seconds = self.table.step_s(num_rest, 0, num_context_tokens + num_chunks * self.chunk_tokens)
        num_looked = min(num_chunks, MAX_CHUNK_LOOKUPS)
        for look in range(num_looked):
            # The middle of each of `num_looked` equal runs of chunks.
            chunk = (look + 0.5) * num_chunks / num_looked - 0.5
            context = num_context_tokens + round(chunk * self.chunk_tokens)
            seconds += self.table.step_s(self.chunk_tokens, 0, context) * num_chunks / num_looked
        return seconds


# -- swaps -------------------------------------------------------------------------------------------------------------


class Link(Struct, frozen=True, kw_only=True):
    """The measured speeds between device and host. setup_s: seconds that a copy of any size takes to set up, each way."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    setup_s: float = 0.0

    def out_s(self, num_bytes: int) -> float:
        """Return the seconds of a copy from the device; 0 for no bytes."""
        return self.setup_s + num_bytes / self.d2h_bytes_per_s if num_bytes > 0 else 0.0

    def in_s(self, num_bytes: int) -> float:
        """Return the seconds of a copy to the device; 0 for no bytes."""
        return self.setup_s + num_bytes / self.h2d_bytes_per_s if num_bytes > 0 else 0.0


@dataclass(slots=True)
class Copied:
    """The copies made so far, one way. num_copies: of a layer each. seconds: spent in copies, without the work between two copies."""

    num_bytes: int = 0
    num_copies: int = 0
    seconds: float = 0.0

    def add(self, num_bytes: int, seconds: float, num_copies: int = 1) -> None:
        """Count one more copy, or several that took these seconds together."""
        self.num_bytes += num_bytes
        self.num_copies += num_copies
        self.seconds += seconds

    def since(self, before: Copied) -> Copied:
        """Return the copies made after `before`, an earlier copy of these counts."""
        num_bytes, num_copies = self.num_bytes - before.num_bytes, self.num_copies - before.num_copies
        return Copied(num_bytes, num_copies, self.seconds - before.seconds)

    def beside(self, other: Copied) -> Copied:
        """Return the copies that two processes made at the same time, each its part: all bytes, in the slower one's time."""
        seconds = max(self.seconds, other.seconds)
        return Copied(self.num_bytes + other.num_bytes, max(self.num_copies, other.num_copies), seconds)


class CopyTable:
    """Seconds of a copy one way, by linear interpolation between COPY_SIZES_BYTES; more bytes never take less.

    Each real copy corrects the two sizes about it, and all others by less. A time that is slower than was assumed fades back to the assumed one:
    slow copies are avoided, so they would never be measured again. Below the first size the first one's time holds, beyond the last the slope of
    its cell continues.

    Source: AdaptiveLLM formula 2, bytes over a bandwidth; departs in setting up, in a table, since the fastest way of copying changes with the
    size, and in learning from each copy.

    Args:
        copy_s: returns the seconds that a copy of this many bytes is assumed to take, more for more bytes.
    """

    def __init__(self, copy_s: Callable[[int], float]) -> None:
        self._assumed = [copy_s(size) for size in COPY_SIZES_BYTES]
        self._seconds = list(self._assumed)
        self._updated_s = 0.0
        self.num_copies = 0
        self.usual_error = UNKNOWN_COPY_ERROR
        """The usual error, as in `StepTable.usual_error`."""

    def copy_s(self, num_bytes: int, now: float) -> float:
        """Return the predicted seconds of a copy; 0 for no bytes."""
        if num_bytes <= 0:
            return 0.0
        at, share = _locate(COPY_SIZES_BYTES, num_bytes)
        learned = self._seconds[at] + share * (self._seconds[at + 1] - self._seconds[at])
        assumed = self._assumed[at] + share * (self._assumed[at + 1] - self._assumed[at])
        return assumed + (learned - assumed) * self._trust(now) if learned > assumed else learned

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        """Note the seconds of a real copy. One without bytes or time is ignored."""
        if num_bytes <= 0 or not 0 < seconds < math.inf:
            return
        self.num_copies += 1
        # The first copies say more than a speed that was measured or assumed while the engine was unused.
        average = 1 / (self.num_copies + 1)
        error = seconds / self.copy_s(num_bytes, now) - 1
        share, self.usual_error = believed(error, self.usual_error, max(ERROR_RATE, average))
        trust, slowness = self._trust(now), 1 + max(COPY_SLOWNESS_RATE, average) * share
        at, place = _locate(COPY_SIZES_BYTES, num_bytes)
        weights = {at: 1 - min(place, 1.0), at + 1: min(place, 1.0)}
        norm = sum(weight * weight for weight in weights.values())
        found = [
            assumed + (seconds - assumed) * trust if seconds > assumed else seconds
            for assumed, seconds in zip(self._assumed, self._seconds, strict=True)
        ]
        found = [seconds * slowness for seconds in found]
        for size, weight in weights.items():
            found[size] *= 1 + LEARNING_RATE * share * weight / norm
        if share > 0:
            self._seconds = list(itertools.accumulate(found, max))
        else:
            self._seconds = list(itertools.accumulate(reversed(found), min))[::-1]
        self._updated_s = now
        after = self.copy_s(num_bytes, now)
        if (
            after - seconds
        ) * error > 0:  # beyond the measured time: slopes of sizes never copied are so far off
            self._seconds = [value * seconds / after for value in self._seconds]

    def _trust(self, now: float) -> float:
        """Return the trust, from 0 to 1, in the copies that seemed slow."""
        return float(0.5 ** (max(now - self._updated_s, 0.0) / HALF_LIFE_S))


class CopyTimes:
    """The times of copies both ways; begins with a link as it was measured or is assumed."""

    def __init__(self, link: Link) -> None:
        self.out, self.back = CopyTable(link.out_s), CopyTable(link.in_s)
