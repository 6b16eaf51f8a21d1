"""How likely an announced request still comes, the longer it has been waited for. Pure: times in, probabilities out.

Who types for long without asking has mostly given up: of the requests that come at all, most come after a usual time. That time is learned from
those that came. Source: AdaptiveLLM and SYMPHONY have nothing like it; the formula is Bayes' for a request that comes with a prior probability, at a
time of a known distribution, and has not come yet.
"""

from __future__ import annotations

import math
from itertools import accumulate

# Waits are counted in bins whose ends differ by half a power of two, in seconds. Chosen: finer than people's times repeat.
_BINS_PER_OCTAVE, _FIRST_END_S, _NUM_BINS = 2, 0.25, 26
# The waits assumed at first: their number, and a log-normal with the median and spread of typing ten words (bench.live.kv.people), with a longer
# tail.
_PRIOR_WAITS, _PRIOR_MEDIAN_S, _PRIOR_SIGMA = 8.0, 11.5, 0.9
# A learned wait counts half as much after this many others. Chosen: habits change in days, and a server of one user has some hundred a day.
_HALF_LIFE_WAITS = 200.0


class StillComes:
    """The waits of announced requests that came, from the announcement, or from the earliest time that it named."""

    def __init__(self) -> None:
        self._prior = [_PRIOR_WAITS * share for share in _prior_shares()]
        self._came = [0.0] * _NUM_BINS
        self._later = self._survival()

    def came(self, waited_s: float) -> None:
        """Learn from a request that came after this wait."""
        left = 0.5 ** (1 / _HALF_LIFE_WAITS)
        self._came = [num * left for num in self._came]
        self._came[_bin_of(waited_s)] += 1.0
        self._later = self._survival()

    def probability(self, prior: float, waited_s: float) -> float:
        """Return the probability that a request still comes which has not come in this time. prior: when the wait began; 1 stays 1."""
        if prior >= 1:
            return 1.0
        still = prior * self._later_than(waited_s)
        return still / max(still + 1.0 - prior, 1e-12)

    def _later_than(self, waited_s: float) -> float:
        """Return the share of the requests that came which came later than this, within a bin by interpolation."""
        if waited_s <= 0:
            return 1.0
        number = _bin_of(waited_s)
        begin_s, end_s = (_end_s(number - 1) if number else 0.0), _end_s(number)
        part = min((waited_s - begin_s) / (end_s - begin_s), 1.0)
        return self._later[number] + (self._later[number + 1] - self._later[number]) * part

    def _survival(self) -> list[float]:
        """Return for the beginning of each bin, and for the end of the last one, the share of waits that are longer."""
        counts = [own + assumed for own, assumed in zip(self._came, self._prior, strict=True)]
        total = sum(counts)
        return [1.0, *(max(1.0 - num / total, 0.0) for num in accumulate(counts))]


def _end_s(number: int) -> float:
    return _FIRST_END_S * math.pow(2.0, number / _BINS_PER_OCTAVE)


def _bin_of(waited_s: float) -> int:
    number = math.ceil(_BINS_PER_OCTAVE * math.log2(max(waited_s, 1e-9) / _FIRST_END_S))
    return min(max(number, 0), _NUM_BINS - 1)


def _prior_shares() -> list[float]:
    def earlier(seconds: float) -> float:
        """Return the share of assumed waits that are shorter."""
        return 0.5 * (1 + math.erf(math.log(seconds / _PRIOR_MEDIAN_S) / (_PRIOR_SIGMA * math.sqrt(2))))

    ends = [earlier(_end_s(number)) for number in range(_NUM_BINS)]
    return [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
