"""The share of an owner's advisories from one source that come true. Old outcomes decay with every new one, and with time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

PRIOR = 0.7
"""Assumed of an owner of whom nothing is known. Chosen: most people who type do send."""
PRIOR_WEIGHT = 4.0
"""Advisories that the prior counts for. Chosen: four outcomes that agree are believed as much as the prior."""
MAX_WEIGHT = 100.0
"""Outcomes that are remembered; older ones fade. Chosen: the share's standard error is then at most 0.036."""
MAX_REMEMBERED = 4096
"""Owners and sources that are remembered; beyond it, the longest silent ones start anew. Chosen: far more than a server has keys."""
HALF_LIFE_S = 24 * 3600.0
"""Chosen: habits last for days, but nobody is judged for long by what one bad client of theirs did."""


@dataclass(slots=True)
class _Share:
    used_weight: float = 0.0
    weight: float = 0.0
    updated_s: float = 0.0

    def fade(self, now: float) -> float:
        """Return the share that is left at `now` of each unit of weight."""
        left: float = 0.5 ** (max(now - self.updated_s, 0.0) / HALF_LIFE_S)
        return left


class Precision:
    """The share of advisories that a request followed within their lifetime, for each owner and source (typing, calls, hints)."""

    def __init__(self) -> None:
        self._shares: OrderedDict[tuple[str, str], _Share] = OrderedDict()

    def probability(self, owner: str, source: str, now: float) -> float:
        """Return the probability that a request follows this owner's next advisory from this source.

        It is the mean of a Beta distribution, so never quite 0 or 1.
        """
        share = self._shares.get((owner, source))
        if share is None:
            return PRIOR
        left = share.fade(now)
        return min(
            (share.used_weight * left + PRIOR * PRIOR_WEIGHT) / (share.weight * left + PRIOR_WEIGHT), 1.0
        )

    def note(self, owner: str, source: str, was_used: bool, now: float) -> None:
        """Count an ended advisory. was_used: whether a request followed in time."""
        share = self._shares.setdefault((owner, source), _Share(updated_s=now))
        self._shares.move_to_end((owner, source))
        if len(self._shares) > MAX_REMEMBERED:
            self._shares.popitem(last=False)
        left = share.fade(now) * (1 - 1 / MAX_WEIGHT)
        share.weight = share.weight * left + 1.0
        share.used_weight = share.used_weight * left + was_used
        share.updated_s = max(share.updated_s, now)
