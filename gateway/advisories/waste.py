"""Whether to act on a guess: its expected gain, and how many bytes may be moved in vain."""

from __future__ import annotations

from typing import Literal


def worth(probability: float, saved_s: float, cost_s: float) -> bool:
    """Return whether preparing for a request of this probability has a positive expected gain.

    Args:
        probability: that the request comes.
        saved_s: how much sooner the request's first token comes when its KV is there.
        cost_s: seconds that others wait if no request comes: the bytes keep a link busy, and KV that they pushed out is read back.
    """
    return probability * saved_s > (1 - probability) * cost_s


Outcome = Literal["used", "wasted", "not_moved"]


class WasteBudget:
    """Bounds the bytes that learned advisories move in vain: a bucket that useful bytes and time refill.

    At any time, bytes wasted and bytes still out are at most `allowance_bytes`, plus `share` of the bytes that were used, plus `allowance_bytes`
    for each `refill_s`. An advisory larger than the allowance is never let through.

    Args:
        share: of each useful byte, how much may be wasted later. Chosen: with 0.25, four of five bytes are useful in the long run.
        allowance_bytes: bytes that may be out or lost before anything was useful; the bucket holds no more.
        refill_s: in which an empty bucket fills by itself, so that an owner whose guesses failed gets another chance.
    """

    def __init__(self, share: float = 0.25, allowance_bytes: float = 1e9, refill_s: float = 3600.0) -> None:
        self._share = share
        self._allowance_bytes = allowance_bytes
        self._refill_bytes_per_s = allowance_bytes / refill_s
        self._level_bytes = allowance_bytes
        self._updated_s: float | None = None
        self._out_bytes = 0.0

    @property
    def out_bytes(self) -> float:
        """Bytes of started advisories whose outcome is unknown."""
        return self._out_bytes

    def allows(self, num_bytes: float, now: float) -> bool:
        """Return whether an advisory that moves this many bytes may start. Nothing is taken: `start` does that."""
        self._refill(now)
        return num_bytes <= self._level_bytes

    def start(self, num_bytes: float, now: float) -> bool:
        """Take an advisory's bytes, no fewer than it may move; return False, taking nothing, if they are not allowed.

        The caller must `note` the outcome of all of them.
        """
        if not self.allows(num_bytes, now):
            return False
        self._level_bytes -= max(num_bytes, 0.0)
        self._out_bytes += max(num_bytes, 0.0)
        return True

    def note(self, outcome: Outcome, num_bytes: float, now: float) -> None:
        """Settle bytes that were started, for an advisory's parts one by one. Bytes beyond those under way are ignored."""
        self._refill(now)
        num_bytes = min(max(num_bytes, 0.0), self._out_bytes)
        self._out_bytes -= num_bytes
        if outcome == "wasted":
            return
        # More than the bucket holds runs over in `_refill`, before anybody looks.
        self._level_bytes += num_bytes * (1 + self._share) if outcome == "used" else num_bytes

    def _refill(self, now: float) -> None:
        """Let time fill the bucket. A clock that goes back changes nothing."""
        passed_s = 0.0 if self._updated_s is None else max(now - self._updated_s, 0.0)
        self._updated_s = now if self._updated_s is None else max(now, self._updated_s)
        refilled = self._level_bytes + passed_s * self._refill_bytes_per_s
        self._level_bytes = min(refilled, self._allowance_bytes)
