"""The states that an owner's last advisories went through, and when, for the page's live view. Bounded for any number of advisories."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from msgspec import Struct

# Advisories of one owner. Chosen: more are not read on a page.
MAX_KEPT = 24
# Owners; the longest silent one is forgotten. Chosen: more than a team has keys.
MAX_OWNERS = 1024
# States of one advisory; it may wait in host memory many times, and then the states between are dropped. Chosen.
MAX_STATES = 8


class Passed(Struct, frozen=True):
    """A state, and how long after its beginning the advisory entered it."""

    state: str
    after_s: float


class Trail(Struct, frozen=True, kw_only=True):
    """One advisory so far.

    began_s: on the gateway's monotonic clock. outcome: of its latest report, as in a `done` frame.
    """

    id: str
    session_id: str
    model: str | None
    source: str
    began_s: float
    states: tuple[Passed, ...] = ()
    outcome: dict[str, Any] = {}


class Trails:
    """The latest trails of each owner, the newest last."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, OrderedDict[str, Trail]] = OrderedDict()

    def begin(self, owner: str, trail: Trail) -> None:
        """Keep the trail of a new advisory."""
        kept = self._owners.setdefault(owner, OrderedDict())
        self._owners.move_to_end(owner)
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)
        kept[trail.id] = trail
        if len(kept) > MAX_KEPT:
            kept.popitem(last=False)

    def passed(self, owner: str, advisory_id: str, state: str, outcome: dict[str, Any], now: float) -> None:
        """Note that an advisory has entered a state. An advisory that is no longer kept is ignored."""
        kept = self._owners.get(owner, OrderedDict())
        trail = kept.get(advisory_id)
        if trail is None:
            return
        states = trail.states
        if not states or states[-1].state != state:
            states = (*states, Passed(state, round(now - trail.began_s, 4)))
            # The first tells how it began, the last ones how it ended.
            states = states if len(states) <= MAX_STATES else (states[0], *states[2:])
        kept[advisory_id] = Trail(
            id=trail.id,
            session_id=trail.session_id,
            model=trail.model,
            source=trail.source,
            began_s=trail.began_s,
            states=states,
            outcome=outcome,
        )

    def of(self, owner: str) -> list[Trail]:
        """Return an owner's trails, the newest first."""
        return list(reversed(self._owners.get(owner, OrderedDict()).values()))
