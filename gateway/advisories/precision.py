"""How often an owner's advisories come true. What was learned fades: with every new one, and with time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

PRIOR = 0.7
"""Assumed of an owner of whom nothing is known. Chosen: most people who type do send."""
PRIOR_WEIGHT = 4.0
"""Advisories that the prior counts for. Chosen: four outcomes that agree are believed as much as the prior."""
MAX_WEIGHT = 100.0
"""Outcomes that are remembered; older ones fade. Chosen: the share's standard error is then at most 0.036."""
HALF_LIFE_S = 24 * 3600.0
"""Chosen: habits last for days, but nobody is judged for long by what one bad client of theirs did."""


@dataclass(slots=True)
class _Share:
    used_weight: float = 0.0
    weight: float = 0.0
    updated_s: float = 0.0

    def fade(self, now: float, half_life_s: float) -> float:
        """What is left at `now` of each unit of weight."""
        left: float = 0.5 ** (max(now - self.updated_s, 0.0) / half_life_s)
        return left


class Precision:
    """For each owner, the share of advisories that a request followed within their lifetime.

    Args:
        prior, prior_weight: the share that is assumed at first, and the number of outcomes it counts for.
        max_owners: beyond it, the one that was silent for longest starts anew.
        max_weight: outcomes that count; half_life_s: after which an outcome counts half.
    Raises ValueError for a prior outside 0 … 1, a limit below 1, or a weight or half-life that is not positive.
    """

    def __init__(
        self,
        *,
        prior: float = PRIOR,
        prior_weight: float = PRIOR_WEIGHT,
        max_owners: int = 4096,
        max_weight: float = MAX_WEIGHT,
        half_life_s: float = HALF_LIFE_S,
    ) -> None:
        if not 0 <= prior <= 1 or min(prior_weight, half_life_s) <= 0:
            raise ValueError(
                "the prior must lie between 0 and 1; its weight and the half-life must be positive"
            )
        if min(max_owners, max_weight) < 1:
            raise ValueError("at least one owner and one outcome must count")
        self._prior = prior
        self._prior_weight = prior_weight
        self._max_owners = max_owners
        self._max_weight = max_weight
        self._half_life_s = half_life_s
        self._shares: OrderedDict[str, _Share] = OrderedDict()

    @property
    def num_owners(self) -> int:
        """Owners whose shares are remembered."""
        return len(self._shares)

    def probability(self, owner: str, now: float) -> float:
        """That a request follows this owner's next advisory: the mean of a Beta distribution, so never quite 0 or 1 unless the prior is."""
        share = self._shares.get(owner)
        if share is None:
            return self._prior
        left = share.fade(now, self._half_life_s)
        used_weight = share.used_weight * left + self._prior * self._prior_weight
        return min(used_weight / (share.weight * left + self._prior_weight), 1.0)

    def note(self, owner: str, was_used: bool, now: float) -> None:
        """An advisory of this owner has ended: a request followed in time, or none did."""
        share = self._shares.setdefault(owner, _Share(updated_s=now))
        self._shares.move_to_end(owner)
        if len(self._shares) > self._max_owners:
            self._shares.popitem(last=False)
        left = share.fade(now, self._half_life_s) * (1 - 1 / self._max_weight)
        share.weight = share.weight * left + 1.0
        share.used_weight = share.used_weight * left + was_used
        share.updated_s = max(share.updated_s, now)

    def forget(self, owner: str) -> None:
        """Drop what is known of an owner."""
        self._shares.pop(owner, None)
