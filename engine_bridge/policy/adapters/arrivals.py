"""Which adapters will be asked for soon, by the times of their earlier requests. Pure: arrivals in, forecasts out.

An adapter that a timer or an agent calls comes back after much the same time; one that people share comes at any time, and cannot be predicted.
Each adapter has a histogram of the gaps between its requests. Where the gaps crowd in few bins, it predicts the next request; where they
do not, it makes no prediction, and the eviction policy decides which adapters are worth keeping.

Source: Shahrad et al., Serverless in the Wild, ATC 2020, §4.2, named by Chameleon §4.1. Departs in: bins that grow by a constant factor instead of
one-minute bins up to four hours, since gaps here range from fractions of a second to hours, and since memoryless gaps look alike in such bins at
any rate, so that one threshold tells them from regular ones; a probability instead of a window alone, since loads compete for one link; no
time-series model for gaps out of range; counts that fade.
"""

from __future__ import annotations

import math

# Bins: the first ends at 0.3 s, the last at 8 hours, each is a fifth longer than the one before. Chosen.
NUM_BINS = 64
FIRST_EDGE_S = 0.25
GROWTH = 1.2
# The window: 5% of gaps are shorter than the head, 1% longer than the tail. Source: Serverless in the Wild §4.2. Its margins of 10% are left out:
# the edges are rounded outward to bins of 20%.
HEAD, TAIL = 0.05, 0.99
# The coefficient of variation of the counts per bin. Memoryless gaps have 1.4 in these bins, log-normal ones with sigma 0.33 have 3. Chosen; the
# paper's is 2, in other bins.
MIN_VARIATION = 3.0
MIN_GAPS = 8  # Chosen: fewer say little.
MAX_GAPS = 128  # At this number all counts are halved, so that new habits show. Chosen.
MAX_ADAPTERS = 4096  # 0.7 KB each. Chosen.


class ArrivalHistogram:
    """The times between one adapter's requests. Bounded: NUM_BINS counts, no more than MAX_GAPS in all."""

    def __init__(self) -> None:
        self._counts = [0] * NUM_BINS
        self._num_inside = 0
        self._num_beyond = 0
        self._window: tuple[float, float] | None = None

    @property
    def num_gaps(self) -> int:
        """The number of gaps between arrivals that were counted."""
        return self._num_inside + self._num_beyond

    @property
    def window(self) -> tuple[float, float] | None:
        """Seconds after a request between which the next one is expected: load it before the first, keep it until the second.

        None where the gaps predict nothing: too few of them, too many out of range, or too evenly spread.
        """
        return self._window

    def note(self, gap_s: float) -> None:
        """Note the time between two requests, in seconds."""
        at = bin_of(gap_s)
        if at < NUM_BINS:
            self._counts[at] += 1
            self._num_inside += 1
        else:
            self._num_beyond += 1
        if self.num_gaps >= MAX_GAPS:
            self._fade()
        self._window = self._find_window()

    def variation(self) -> float:
        """Coefficient of variation of the bins' counts, without the part that comes from having few gaps.

        The share of pairs of gaps that fall in one bin estimates the sum of the bins' squared probabilities without bias; the counts' own
        coefficient would call any few gaps regular.
        """
        num = self._num_inside
        if num < 2:
            return 0.0
        same = sum(count * (count - 1) for count in self._counts) / (num * (num - 1))
        return math.sqrt(max(NUM_BINS * same - 1, 0.0))

    def probability(self, idle_s: float, lead_s: float) -> float:
        """Return the probability that the next request comes within `lead_s`, given that none came for `idle_s`.

        It is 0 where the gaps predict nothing.
        """
        if self._window is None or lead_s <= 0 or idle_s > self._window[1]:
            return 0.0
        left = self._num_after(idle_s)
        return (left - self._num_after(idle_s + lead_s)) / left if left > 0 else 0.0

    def _num_after(self, gap_s: float) -> float:
        """Return the number of gaps longer than this one; within a bin they are taken as evenly spread."""
        at = bin_of(gap_s)
        if at >= NUM_BINS:
            return float(self._num_beyond)
        low_s, high_s = edges_s(at)
        share = (high_s - gap_s) / (high_s - low_s)
        return self._counts[at] * share + sum(self._counts[at + 1 :]) + self._num_beyond

    def _find_window(self) -> tuple[float, float] | None:
        is_enough = self.num_gaps >= MIN_GAPS and self._num_inside > self._num_beyond
        if not is_enough or self.variation() < MIN_VARIATION:
            return None
        head_s, _ = edges_s(self._percentile(HEAD))
        _, tail_s = edges_s(self._percentile(TAIL))
        return head_s, tail_s

    def _percentile(self, share: float) -> int:
        """Return the bin in which that share of the gaps within range is reached."""
        missing = share * self._num_inside
        for at, count in enumerate(self._counts):
            missing -= count
            if count and missing <= 0:
                return at
        return NUM_BINS - 1

    def _fade(self) -> None:
        self._counts = [count // 2 for count in self._counts]
        self._num_inside, self._num_beyond = sum(self._counts), self._num_beyond // 2


def bin_of(gap_s: float) -> int:
    """Return the bin of a gap; NUM_BINS if it is out of range. Negative gaps, from a clock that went back, count as 0."""
    if gap_s < FIRST_EDGE_S * GROWTH:
        return 0
    at = min(int(math.log(gap_s / FIRST_EDGE_S) / math.log(GROWTH)), NUM_BINS)
    # The logarithm is inexact at the edges themselves.
    while at < NUM_BINS and gap_s >= edges_s(at)[1]:
        at += 1
    while at > 0 and gap_s < edges_s(at)[0]:
        at -= 1
    return at


_EDGES_S = (0.0, *(FIRST_EDGE_S * GROWTH**at for at in range(1, NUM_BINS + 2)))


def edges_s(at: int) -> tuple[float, float]:
    """Return the seconds at which a bin begins and ends; the end belongs to the next bin."""
    return _EDGES_S[at], _EDGES_S[at + 1]


class Arrivals:
    """The histograms of all adapters. Bounded: beyond `MAX_ADAPTERS` the adapter unused for the longest time is forgotten."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, ArrivalHistogram]] = {}  # the longest unused first

    def arrived(self, adapter_id: int, now: float) -> None:
        """Note a request for the adapter."""
        known = self._last.pop(adapter_id, None)
        histogram = ArrivalHistogram() if known is None else known[1]
        if known is not None:
            histogram.note(now - known[0])
        elif len(self._last) >= MAX_ADAPTERS:
            del self._last[next(iter(self._last))]
        self._last[adapter_id] = (now, histogram)

    def due(self, now: float, lead_s: float) -> list[tuple[int, float]]:
        """Return the adapters whose next request may come within `lead_s`, with the probability that it does, the most probable first."""
        found = []
        for adapter_id, (last_s, histogram) in self._last.items():
            window, idle_s = histogram.window, max(now - last_s, 0.0)
            if window is not None and window[0] <= idle_s + lead_s:
                probability = histogram.probability(idle_s, lead_s)
                if probability > 0:
                    found.append((adapter_id, probability))
        return sorted(found, key=lambda item: (-item[1], item[0]))

    def forget(self, adapter_id: int) -> None:
        """Forget an adapter that was unloaded for good. An unknown one is ignored."""
        self._last.pop(adapter_id, None)
