"""Adapters that could not be taken into service: why, and when another try is worth it. Pure."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from engine_bridge.adapters.errors import FINAL_CODES

# The first wait, doubled after each try up to the longest. Chosen: room on a disk is noticed while its operator still looks.
FIRST_WAIT_S: Final = 2.0
LONGEST_WAIT_S: Final = 10.0
MAX_DOUBLED: Final = math.ceil(math.log2(LONGEST_WAIT_S / FIRST_WAIT_S))


class AdapterRefusal(NamedTuple):
    """Why an adapter is not served as its files are. code: as of `AdapterRejected` or `RegistryFailed`; "" for none."""

    reason: str
    code: str = ""


class _Failed(NamedTuple):
    refusal: AdapterRefusal
    num_tries: int
    at_s: float

    @property
    def wait_s(self) -> float | None:
        """The wait before the next try; None: only other files or another name help."""
        if self.refusal.code in FINAL_CODES:
            return None
        # Of a disk that is full for hours there are thousands of tries.
        num_doubled = min(self.num_tries - 1, MAX_DOUBLED)
        return float(min(FIRST_WAIT_S * 2**num_doubled, LONGEST_WAIT_S))


class Retries:
    """Failed adapters by name. A fault of the files or of the name is final: the watcher calls `forget` when the files change."""

    def __init__(self) -> None:
        self._failed: dict[str, _Failed] = {}

    def failed(self, name: str, refusal: AdapterRefusal, now: float) -> bool:
        """Note a failed try. Returns whether its reason is another one than the last time."""
        before = self._failed.get(name)
        num_tries = before.num_tries + 1 if before is not None else 1
        self._failed[name] = _Failed(refusal, num_tries, now)
        return before is None or before.refusal != refusal

    @property
    def names(self) -> set[str]:
        """The names of all failed adapters."""
        return set(self._failed)

    def forget(self, name: str) -> None:
        """Forget an adapter that is served now, has been removed, or has other files."""
        self._failed.pop(name, None)

    def is_due(self, name: str, now: float) -> bool:
        """Return whether a failed adapter is due for another try. A clock that was set back does not put that off."""
        failed = self._failed.get(name)
        return failed is not None and failed.wait_s is not None and not 0 <= now - failed.at_s < failed.wait_s

    def due(self, now: float) -> list[str]:
        """Return the names that are due for another try, in order."""
        return sorted(name for name in self._failed if self.is_due(name, now))

    def texts(self) -> dict[str, str]:
        """Return the reason of each failure by name. From any thread."""
        return {name: _text(failed) for name, failed in sorted(self._failed.copy().items())}


def _text(failed: _Failed) -> str:
    again = "" if failed.wait_s is None else " It is tried again by itself."
    return f"{failed.refusal.reason}{again}"
