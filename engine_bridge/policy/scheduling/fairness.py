"""AdaptiveLLM's priority, waiting time over length: of one request, as an order of many, and of two sets. Pure."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterator, Sequence

from engine_bridge.policy.scheduling.queue_policy import remove


def fair_priority(waited_s: float, num_tokens: int, weight: float = 1.0) -> float:
    """Return the seconds per token since the request first came; higher starts first.

    Short requests rise fast, and every request rises while it waits.

    Source: AdaptiveLLM §3.5; there the length is that of the sequence so far, here that of waiting requests includes the prediction. Departs in the
    weight, a tenant's; 1 is the paper's.
    """
    return weight * max(waited_s, 0.0) / max(num_tokens, 1)


def starts_swapped(swapped: Sequence[float], waiting: Sequence[float]) -> bool:
    """Return whether the swapped set starts rather than the waiting one, by their mean priority; the swapped one at a tie.

    An empty set never starts.

    Source: AdaptiveLLM Algorithm 2, line 8.
    """
    if not swapped or not waiting:
        return bool(swapped)
    return math.fsum(waiting) / len(waiting) <= math.fsum(swapped) / len(swapped)


class ByFairness:
    """Requests by `fair_priority`, the highest first.

    The order changes as time passes, so it is not stored: requests are kept by arrival in one list for each power of two of
    length, and the lists' heads are compared. The order is exact between lists; within one, lengths less than a factor of two apart follow arrival.
    At most some 30 lists.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[tuple[float, str, int]]] = {}

    def add(self, request_id: str, arrived_s: float, size_tokens: int) -> None:
        """Add a request."""
        insort(self._lists.setdefault(size_tokens.bit_length(), []), (arrived_s, request_id, size_tokens))

    def remove(self, request_id: str, arrived_s: float, size_tokens: int) -> None:
        """Remove a request, given as it was added."""
        bucket = size_tokens.bit_length()
        remove(self._lists[bucket], (arrived_s, request_id, size_tokens))
        if not self._lists[bucket]:
            del self._lists[bucket]

    def order(self, now: float, min_wait_s: float = -math.inf) -> Iterator[str]:
        """Yield the requests that have waited for at least `min_wait_s`, the highest priority first."""
        heads: list[tuple[float, float, str, int, int]] = []
        for bucket in self._lists:
            self._push(heads, bucket, 0, now, min_wait_s)
        while heads:
            *_, request_id, bucket, at = heapq.heappop(heads)
            yield request_id
            self._push(heads, bucket, at + 1, now, min_wait_s)

    def _push(
        self,
        heads: list[tuple[float, float, str, int, int]],
        bucket: int,
        at: int,
        now: float,
        min_wait_s: float,
    ) -> None:
        entries = self._lists[bucket]
        if at < len(entries) and now - entries[at][0] >= min_wait_s:
            arrived_s, request_id, size_tokens = entries[at]
            heapq.heappush(
                heads, (-fair_priority(now - arrived_s, size_tokens), arrived_s, request_id, bucket, at)
            )
