"""Requests that cannot start yet, whatever room there is: their adapter is being loaded, or their grammar compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class Unready:
    """Requests grouped by the thing that they wait for, so that asking costs one call per adapter and not per request.

    Requests that wait for the same become ready together, and do so in their order.
    """

    def __init__(self) -> None:
        self._groups: dict[Hashable, dict[str, None]] = {}
        self._group_of: dict[str, Hashable] = {}

    def add(self, request_id: str, waits_for: Hashable) -> None:
        """Note that a request waits for this adapter or grammar."""
        self._group_of[request_id] = waits_for
        self._groups.setdefault(waits_for, {})[request_id] = None

    def remove(self, request_id: str) -> None:
        """Forget a request. An unknown one is ignored."""
        if request_id not in self._group_of:
            return
        group = self._group_of.pop(request_id)
        del self._groups[group][request_id]
        if not self._groups[group]:
            del self._groups[group]

    def take_ready(self, is_ready: Callable[[str], bool], max_requests: int) -> list[str]:
        """Return the requests that are ready now, at most `max_requests`, and forget them here."""
        found: list[str] = []
        for group in self._groups.values():
            for request_id in group:
                if len(found) >= max_requests or not is_ready(request_id):
                    break
                found.append(request_id)
        for request_id in found:
            self.remove(request_id)
        return found

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._group_of

    def __len__(self) -> int:
        return len(self._group_of)
