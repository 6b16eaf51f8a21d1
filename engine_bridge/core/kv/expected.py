"""Expected requests: the guesses under way, and the prefixes that sessions' last requests left."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine_bridge.policy.kv.kv_layout import Entry
from engine_bridge.protocol.node import Advisory, AdvisoryReport, AdvisoryState
from engine_bridge.protocol.urgency import is_urgent
from kvtiers.blocks import Origin, Stage
from kvtiers.keys import BlockKey

log = logging.getLogger(__name__)

# Prefixes of ended requests that are remembered, in block hashes (32 bytes each, 16 MB in total). Chosen.
MAX_REMEMBERED_HASHES = 1 << 19

OnChange = Callable[[AdvisoryReport], None]
Hashes = Sequence[bytes]
"""Hashes of a conversation's whole blocks, as the engine makes them."""
Whose = tuple[str, str | None]
"""A session, and the salt that keeps its tenant's and adapter's KV apart, so that no advisory concerns another tenant's KV."""


class ExpectedSession:
    """One advisory under way.

    Attributes:
        hashes: of the content that its prompt will begin with.
        entries: the blocks of the longest prefix of it that is to be brought up, of `num_tokens`.
        lacking: blocks that did not come, though they were to be had.
        first: the block at which its stage, a piece of the prefix, begins.
        is_likely: whether it is likelier to come than not.
        limit: blocks that the tiers or the device hold.
        is_known: whether the tiers were asked which of its blocks they hold.
        is_ahead: whether the stage lies behind blocks that the device lacks, and is only to be in host memory.
        num_hosted: leading blocks that were read as far as host memory because the device had no room.
        is_far: whether some of its KV lay on disk or on another node.
        num_copied: blocks copied to the device; num_beside: the part of these that was copied while requests ran.
    """

    def __init__(
        self,
        advisory: Advisory,
        salt: str | None,
        hashes: Hashes,
        block_bytes: int,
        now: float,
        on_change: OnChange,
    ) -> None:
        self.advisory = advisory
        self._block_bytes = block_bytes
        self.whose: Whose = (advisory.session_id, salt)
        self.priority = advisory.priority or 0
        self.is_urgent = is_urgent(self.priority)
        self.hashes = hashes
        self.on_change = on_change
        self.issued_s = now
        wait_s = advisory.expected_arrival_s
        self.arrival_s = now + wait_s if wait_s is not None else None
        self.state: AdvisoryState = "staging"
        self.stage: Stage | None = None
        self.first = 0
        self.entries: Sequence[Entry] = ()
        self.num_tokens = self.num_content_tokens = 0
        self.lacking: set[BlockKey] = set()
        self.limit, self.is_known = 0, False
        self.is_likely = True
        self.num_on_device = 0
        self.is_ahead = False
        self.num_hosted = 0
        self.is_far = True
        self.num_copied = self.num_beside = 0
        self.looked_s = -math.inf
        self._stages: list[Stage] = []  # this stage and earlier ones, where something had to be read

    def plan(self, entries: Sequence[Entry], num_tokens: int) -> None:
        """Expect these blocks to be needed, of a prefix of `num_tokens`."""
        self.entries, self.num_tokens = entries, num_tokens
        self.limit, self.is_known = len(entries), False

    def waited_s(self, now: float) -> float:
        """Return for how many seconds its request could have come; 0 before the time that was announced for it."""
        return max(now - (self.issued_s if self.arrival_s is None else self.arrival_s), 0.0)

    def tokens_of(self, num_blocks: int) -> int:
        """Return the tokens that this many of its blocks stand for."""
        return num_blocks * self.num_tokens // max(len(self.entries), 1)

    def hold(self, stage: Stage, first: int) -> None:
        """Take a piece, from the block `first` on."""
        is_far = any(origin != "host" for origin in stage.origins)
        if self.first == 0 and not self._stages:
            self.is_far = is_far
        self.stage, self.first, self.is_ahead = stage, first, False
        if is_far:
            self._stages.append(stage)

    def count_copy(self, num_blocks: int, *, is_beside: bool) -> None:
        """Count blocks that are copied to the device. is_beside: while requests run."""
        self.num_copied += num_blocks
        self.num_beside += num_blocks * is_beside

    def let_go(self) -> list[Stage]:
        """Give up the piece, and return its stage, if it has one, for the caller to release."""
        stage, self.stage = self.stage, None
        return [] if stage is None else [stage]

    @property
    def has_moved(self) -> bool:
        """Whether anything was read or copied for this guess."""
        return self.num_copied > 0 or self._bytes_read("disk") + self._bytes_read("peer") > 0

    @property
    def is_read_for(self) -> bool:
        """Whether a reading that was begun for this guess is still under way, though the guess may not want it any more."""
        return any(stage.num_readings for stage in self._stages)

    def _bytes_read(self, origin: Origin) -> int:
        return sum(stage.bytes_read[origin] for stage in self._stages)

    def report(
        self,
        state: AdvisoryState,
        *,
        lead_s: float | None = None,
        late_s: float | None = None,
    ) -> None:
        """Report the guess's state, which it has from now on, to its follower.

        An error of the follower is only logged, so that the memory held for this and other guesses is still given back. lead_s: from the advisory to
        its end. late_s: by which the KV came too late.
        """
        self.state = state
        report = AdvisoryReport(
            advisory_id=self.advisory.advisory_id,
            session_id=self.advisory.session_id,
            state=state,
            num_tokens=self.tokens_of(self.limit),
            missing_tokens=self.num_content_tokens - self.tokens_of(self.limit),
            device_tokens=self.tokens_of(self.num_on_device),
            host_bytes=self.num_copied * self._block_bytes,
            disk_bytes=self._bytes_read("disk"),
            peer_bytes=self._bytes_read("peer"),
            lead_s=lead_s,
            late_s=late_s,
        )
        try:
            self.on_change(report)
        except Exception:
            log.exception("a follower of an advisory failed")


class OpenAccounts:
    """Ended advisories whose reads are still in flight: each is reported when its reads have ended, with all of its bytes."""

    def __init__(self) -> None:
        self._open: list[tuple[ExpectedSession, AdvisoryState, float | None]] = []

    def close(self, guess: ExpectedSession, outcome: AdvisoryState, lead_s: float | None) -> None:
        """End an advisory's account with this outcome, and report it once its reads have ended.

        An `expired` one is reported as `wasted` if anything was moved for it; otherwise it is reported without `lead_s`.
        """
        self._open.append((guess, outcome, lead_s))
        self.settle()

    def settle(self, *, is_last: bool = False) -> None:
        """Report the accounts whose reads have ended. is_last: report all of them as they are."""
        accounts, self._open = self._open, []
        for account in accounts:
            guess, outcome, lead_s = account
            if guess.is_read_for and not is_last:
                self._open.append(account)
            elif outcome == "expired" and guess.has_moved:
                guess.report("wasted", lead_s=lead_s)
            else:
                guess.report(outcome, lead_s=lead_s if outcome != "expired" else None)


class Memory:
    """The prefixes that sessions' last requests left, under a salt: their next prompts will begin with them. The oldest is forgotten first."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[Whose, Hashes] = OrderedDict()
        self._tenants: dict[Whose, str] = {}
        self._num_hashes = 0

    def __contains__(self, whose: Whose) -> bool:
        return whose in self._hashes

    def of(self, whose: Whose) -> Hashes:
        """Return the block hashes kept for this session and salt; empty if there are none."""
        return self._hashes.get(whose, ())

    def num_shared(self, whose: Whose) -> int:
        """Return how many leading blocks the session shares with another one under the same salt. A hash covers all content before it."""
        own, num = self.of(whose), 0
        for other, hashes in self._hashes.items():
            if other == whose or other[1] != whose[1]:
                continue
            most = min(len(own), len(hashes))
            while num < most and own[num] == hashes[num]:
                num += 1
        return num

    def forget_session(self, session: str, tenant: str = "") -> None:
        """Forget the prefixes of a tenant's session, under every adapter: no further prompt begins with them."""
        for whose in [each for each, own in self._tenants.items() if each[0] == session and own == tenant]:
            self._forget(whose)

    def keep(self, whose: Whose, hashes: Hashes, tenant: str = "") -> None:
        """Remember these hashes in place of the ones that were kept for this session and salt before."""
        self._forget(whose)
        self._hashes[whose], self._tenants[whose] = list(hashes), tenant
        self._num_hashes += len(hashes)
        while self._num_hashes > MAX_REMEMBERED_HASHES:
            self._forget(next(iter(self._hashes)))

    def _forget(self, whose: Whose) -> None:
        self._num_hashes -= len(self._hashes.pop(whose, ()))
        self._tenants.pop(whose, None)
