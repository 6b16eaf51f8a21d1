"""Adapters that advisories name: how long a request for them is expected, and how many bytes were moved for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from engine_bridge.protocol.node import ADVISORY_ENDS, LIKELY, AdvisoryReport

# Where no tier knows the session, its advisory ends at once, and a request for its adapter is expected for this many seconds more. Chosen: the
# lifetime of advisories that are not renewed.
EXPECTED_FOR_S = 60.0


@dataclass(slots=True)
class _Announcement:
    """An advisory that names an adapter. num_bytes: moved for the advisory so far. is_used: whether its request has come."""

    adapter_id: int
    is_likely: bool
    num_bytes: int = 0
    is_used: bool = False


class Announcements:
    """The adapters that advisories name, by advisory id. In the end every byte moved for an advisory counts as `used` or `in_vain`.

    Args:
        counts: `announced_bytes:used` and `announced_bytes:in_vain` are added here.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._by_advisory: dict[str, _Announcement] = {}
        self._alone_until_s: dict[
            str, float
        ] = {}  # advisories of which no tier knows the session, the oldest first
        # advisories whose request has not come, by adapter
        self._waited_for: dict[int, dict[str, _Announcement]] = {}

    def begin(self, advisory_id: str, adapter_id: int, probability: float) -> None:
        """Note that an advisory names this adapter. An advisory that is already known begins anew."""
        self.end(advisory_id)
        announcement = _Announcement(adapter_id, probability > LIKELY)
        self._by_advisory[advisory_id] = announcement
        self._waited_for.setdefault(adapter_id, {})[advisory_id] = announcement

    def is_expected(self, adapter_id: int) -> bool:
        """Return whether a request for this adapter is likely to come."""
        return any(each.is_likely for each in self._waited_for.get(adapter_id, {}).values())

    def moved(self, adapter_id: int, num_bytes: int) -> None:
        """Note that `num_bytes` of the adapter were brought nearer ahead of any request. They count for its latest advisory."""
        for announcement in reversed(self._waited_for.get(adapter_id, {}).values()):
            announcement.num_bytes += num_bytes
            return

    def requested(self, adapter_id: int) -> None:
        """Note that a request for the adapter came, so that the bytes moved for it were of use."""
        for advisory_id, announcement in self._waited_for.pop(adapter_id, {}).items():
            announcement.is_used = True
            if advisory_id in self._alone_until_s:
                self.end(advisory_id)

    def end(self, advisory_id: str) -> None:
        """End an advisory. An unknown id changes nothing."""
        announcement = self._by_advisory.pop(advisory_id, None)
        self._alone_until_s.pop(advisory_id, None)
        if announcement is None:
            return
        waited_for = self._waited_for.get(announcement.adapter_id, {})
        waited_for.pop(advisory_id, None)
        if not waited_for:
            self._waited_for.pop(announcement.adapter_id, None)
        name = "used" if announcement.is_used else "in_vain"
        self._counts[f"announced_bytes:{name}"] += announcement.num_bytes

    def expire(self, now: float) -> None:
        """End the expectations of requests that did not come in time after their advisory was over."""
        while self._alone_until_s:
            oldest = next(iter(self._alone_until_s))
            if self._alone_until_s[oldest] > now:
                return
            self.end(oldest)

    def accounted(
        self, advisory_id: str, is_late: bool, report: AdvisoryReport, now: float
    ) -> AdvisoryReport:
        """Return the report on an advisory's KV with its adapter added. is_late: whether no step could compute with the adapter yet."""
        self.expire(now)
        announcement = self._by_advisory.get(advisory_id)
        num_bytes = announcement.num_bytes if announcement is not None else 0
        state = report.state
        if state == "hit" and is_late:
            state = "late"
        elif state == "expired" and num_bytes:
            state = "wasted"
        if report.state == "unknown" and announcement is not None:
            self._alone_until_s[advisory_id] = now + EXPECTED_FOR_S
        elif report.state in ADVISORY_ENDS:
            self.end(advisory_id)
        return msgspec.structs.replace(report, state=state, adapter_bytes=num_bytes)
