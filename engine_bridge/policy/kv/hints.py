"""What a client may say of a session's KV, in one form whatever field it came in, and how much of it a key is granted. Pure.

A hint is advice: it changes no answer, holds no memory that a request needs, and reaches no other key's sessions. What it asks beyond the key's share
is clipped, and the client is told. Sources: vLLM's RFC #51428 (the actions), RFC #52113 (evict).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

KvAction = Literal["prefetch", "retain", "pin", "demote", "evict", "share"]
ACTIONS: frozenset[str] = frozenset(get_args(KvAction))
HintSource = Literal["openai", "anthropic", "kv_hints", "agent_hint", "nvext", "rest"]
# `granted` as asked; `clipped` to a shorter time; `full`: the key has no place left, and nothing is done.
Outcome = Literal["granted", "clipped", "full"]

# Seconds that an action may last at most. A day, as OpenAI's longest retention has it: host memory only prefers these sessions among those of one
# tenant. The device is dearer: as long as the tools of nearly all agents take. Chosen.
MAX_TTL_S: dict[KvAction, float] = {
    "prefetch": 3600.0,
    "retain": 86400.0,
    "share": 86400.0,
    "demote": 86400.0,
    "pin": 600.0,
    "evict": 0.0,
}
# Seconds that an action lasts if its hint does not say, from when the next request may come. Source: Anthropic's and RFC #52113's five minutes; a
# prefetch as an advisory.
DEFAULT_TTL_S: dict[KvAction, float] = dict.fromkeys(MAX_TTL_S, 300.0) | {"prefetch": 60.0, "evict": 0.0}
# Sessions that a key may have pinned at once, and kept in host memory at once; and all keys together (some 10 MB). Chosen.
MAX_PINS, MAX_KEPT, MAX_OF_ALL = 16, 512, 32768


@dataclass(frozen=True, slots=True)
class KvHint:
    """One wish about the KV of a session.

    Attributes:
        session: its name; "" for the session of the request that the hint came with.
        ttl_s: for how long; None where the client does not say; 0 ends an earlier wish.
        arrival_s: a lower bound on when its next request comes, from now; None where that is not known.
    """

    action: KvAction
    source: HintSource
    session: str = ""
    ttl_s: float | None = None
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """The part of a hint that a key is granted. ttl_s: for how long; 0 where nothing lasts."""

    outcome: Outcome
    ttl_s: float


class HintShares:
    """Sessions that each key has pinned or kept, until when. Actions that last nowhere take no place."""

    def __init__(self) -> None:
        self._until_s: dict[
            str, dict[tuple[str, bool], float]
        ] = {}  # by key; by session and whether it is pinned
        self._num = 0

    def grant(self, key: str, session: str, hint: KvHint, now: float) -> Grant:
        """Return what a key gets of a hint about this session, and take its place."""
        action = hint.action
        asked_s = DEFAULT_TTL_S[action] + (hint.arrival_s or 0.0) if hint.ttl_s is None else hint.ttl_s
        ttl_s = min(asked_s, MAX_TTL_S[action])
        outcome: Outcome = "granted" if ttl_s == asked_s or not MAX_TTL_S[action] else "clipped"
        if action in ("prefetch", "evict"):
            if action == "evict":
                self.end(key, session)
            return Grant(outcome, ttl_s)
        name = (session, action == "pin")
        if ttl_s <= 0:
            self._drop(key, name)
            return Grant("granted", 0.0)
        own = self._until_s.get(key, {})
        if name not in own and not self._has_room(key, is_pin=name[1], now=now):
            return Grant("full", 0.0)
        self._num += name not in own
        self._until_s.setdefault(key, own)[name] = now + ttl_s
        return Grant(outcome, ttl_s)

    def left_s(self, key: str, session: str, now: float, *, is_pin: bool) -> float:
        """Return for how many more seconds a key has this session pinned, or kept; 0 if it has not."""
        return max(self._until_s.get(key, {}).get((session, is_pin), now) - now, 0.0)

    def end(self, key: str, session: str) -> None:
        """Give up the places of a session."""
        for is_pin in (False, True):
            self._drop(key, (session, is_pin))

    def _has_room(self, key: str, *, is_pin: bool, now: float) -> bool:
        """Return whether one more session has a place; drop expired sessions if needed."""
        most = MAX_PINS if is_pin else MAX_KEPT
        if sum(name[1] == is_pin for name in self._until_s.get(key, ())) >= most:
            self._drop_over(key, now)
            if sum(name[1] == is_pin for name in self._until_s.get(key, ())) >= most:
                return False
        if self._num >= MAX_OF_ALL:
            for other in list(self._until_s):
                self._drop_over(other, now)
        return self._num < MAX_OF_ALL

    def _drop_over(self, key: str, now: float) -> None:
        for name in [name for name, until_s in self._until_s.get(key, {}).items() if until_s <= now]:
            self._drop(key, name)

    def _drop(self, key: str, name: tuple[str, bool]) -> None:
        own = self._until_s.get(key, {})
        self._num -= own.pop(name, None) is not None
        if not own:
            self._until_s.pop(key, None)

    def check_invariants(self) -> None:
        """Raise AssertionError if a share is exceeded or a count is wrong. For tests."""
        assert self._num == sum(map(len, self._until_s.values())) <= MAX_OF_ALL
        for own in self._until_s.values():
            assert own and sum(name[1] for name in own) <= MAX_PINS
            assert sum(not name[1] for name in own) <= MAX_KEPT
