"""Brings the KV of expected sessions up: from disk to host memory while the engine works, from host memory to the device between its steps.

Promoted blocks become ordinary prefix cache and stay in the free list, so a running request can take them at any time: no guess ever holds a block
of the device while requests run, and no request is refused or preempted for one. The engine may overwrite promoted blocks at any moment, because
host memory or disk have them. KV passes through host memory a piece at a time, and a piece gives way to any request that wants its memory.
Source: SYMPHONY §3.3.

A pure state machine: advisories and requests come in with the time; `advance` returns the copies to make, and `copied` hears when they are made.
Where copies run beside the steps that is later, and no more is copied for a session until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine_bridge.core.kv.cache_moves import CopiesUnderWay, Copy, Refresh
from engine_bridge.core.kv.eviction_order import Device, EvictionOrder
from engine_bridge.core.kv.expected import ExpectedSession, Hashes, Memory, OnChange, OpenAccounts, Whose
from engine_bridge.core.kv.guess_worth import GuessWorth
from engine_bridge.core.kv.tier_store import TierStore, block_key, peer_to_ask
from engine_bridge.policy.kv.copy_share import WorkShare
from engine_bridge.policy.kv.guesses import GuessFacts, Target, due_s, plan
from engine_bridge.policy.kv.kv_layout import Entry, Held, KvLayout
from engine_bridge.protocol.node import Advisory, AdvisoryState
from kvtiers.blocks import Stage, StageProgress, count_while

# Seconds that copying to the device between two steps may take: with no request waiting, and while requests run. Chosen. Where copies take the
# engine thread's own time (on a CPU), they get a share of the time of the requests that run (`policy/kv/copy_share.py`). That share does not bound
# copies for urgent sessions: other requests wait for those.
IDLE_SLICE_S, BUSY_SLICE_S = 0.005, 0.002
# Seconds between two looks at promoted blocks: blocks used meanwhile may have pushed them out.
LOOK_EVERY_S = 0.5
# The share of the host tier that guesses may hold at once while KV is read or waits for the device, and the share of each of them. Chosen.
STAGED_SHARE, PIECE_SHARE = 0.25, 0.125
# The share of the host tier that may be read at most for guesses that have no room on the device. More would push out KV that was read for other
# guesses before. Chosen.
HOSTED_SHARE = 0.5
# A peer that lacked more blocks than this of a whole prefix is asked no more for it. Chosen: mostly it lacks the last one of full attention.
MAX_LACKING = 2


@dataclass(frozen=True, slots=True)
class Beside:
    """The circumstances in which KV could be copied to the device.

    Attributes:
        is_busy: whether requests run. can_copy: whether the engine has the means to copy. overlaps: whether a copy leaves the engine's thread free.
    """

    is_busy: bool
    can_copy: bool
    overlaps: bool


class Promotions:
    """Acts on advisories. Each accepted advisory reports its end exactly once. memory: the prefixes that sessions' next prompts will begin with.

    Args:
        host_bytes_per_s: returns the measured speed of copies between the two.
        prefill_s_per_token: returns the time to compute KV instead; None before it was measured.
        are_waiting: returns whether requests wait for host memory to restore their KV through.
    """

    def __init__(
        self,
        device: Device,
        store: TierStore,
        layout: KvLayout,
        host_bytes_per_s: Callable[[], float],
        prefill_s_per_token: Callable[[], float | None] = lambda: None,
        are_waiting: Callable[[], bool] = lambda: False,
    ) -> None:
        self._are_waiting, self._may_read = are_waiting, True
        self._device = device
        self._store = store
        self._layout = layout
        self._block_bytes = store.shape.block_bytes
        self._host_bytes_per_s = host_bytes_per_s
        self._worth = GuessWorth(store, host_bytes_per_s, is_divisible=layout.is_divisible)
        self._prefill_s_per_token = prefill_s_per_token
        self._guesses: dict[str, ExpectedSession] = {}  # by advisory id
        self._copying = CopiesUnderWay()  # by advisory id
        self._begun: Copy | None = None  # the copy among these that is being begun
        self._expected: dict[Whose, ExpectedSession] = {}  # the same guesses, by session and salt
        self._accounts = OpenAccounts()
        self.memory = Memory()
        self._has_news = False
        self._released: list[Stage] = []  # of requests that came; held until those have staged for themselves
        self._look_at_s: float | None = None
        self._share = WorkShare()
        self._order = EvictionOrder(device)
        self._num_turn_blocks = 0
        self._is_owed = False  # there is news that only urgent guesses have heard of
        self._was_busy = False
        self._look_from_s = 0.0  # facts found before this time may be outdated

    # -- what comes in -----------------------------------------------------------------------------------------------

    def advise(
        self, advisory: Advisory, hashes: Hashes, salt: str | None, on_change: OnChange, now: float
    ) -> None:
        """Expect a request of a session. A new advisory for the same session and salt replaces the old one.

        hashes: of the blocks that its prompt will begin with; empty: the blocks that the session's last request left. salt: keeps its tenant's and
        adapter's KV apart. on_change: called with a report at each change of its state.
        """
        whose = (advisory.session_id, salt)
        for replaced in (self._expected.get(whose), self._guesses.get(advisory.advisory_id)):
            if replaced is not None and replaced.advisory.advisory_id in self._guesses:
                self._end(replaced, "cancelled")
        hashes = hashes or self.memory.of(whose)
        guess = ExpectedSession(advisory, salt, hashes, self._block_bytes, now, on_change)
        self._plan(guess)
        if not guess.entries:
            guess.report("unknown")
            return
        self._guesses[advisory.advisory_id] = self._expected[whose] = guess
        self._tell_host(guess, self._worth.facts(guess, now))
        self._has_news = True
        self._order.disturb()  # its blocks on the device lie among blocks of unexpected sessions
        guess.report("staging")

    def retract(self, advisory_id: str, *, is_expired: bool, now: float) -> None:
        """Stop all work for an advisory, unless it has ended. It is reported when its reads have ended."""
        guess = self._guesses.get(advisory_id)
        if guess is None:
            return
        if is_expired:
            self._end(guess, "expired", lead_s=now - guess.issued_s)
        else:
            self._end(guess, "cancelled")

    def arrived(
        self, request_id: str, session: str, salt: str | None, hashes: Hashes, now: float
    ) -> Refresh | None:
        """Score the advisory that expected a request, before the request takes anything. Reads that continue are from now on the request's.

        Returns:
            A move to carry out at once: while the request waits for its missing KV, guesses for others must not push out the KV that it has.
        """
        guess = self._expected.pop((session, salt), None)
        kept = None
        self._order.awaits(
            request_id, round(len(hashes) * self._layout.hash_tokens * self._layout.blocks_per_token)
        )
        if guess is not None or self._guesses:
            _, entries = prefix_of(self._layout, hashes, self._device.holds)
            kept = self._order.came(request_id, entries)
        if guess is None:
            return kept
        del self._guesses[guess.advisory.advisory_id]
        resident = self._device.resident(guess.entries, guess.limit).num_blocks
        common = _num_useful(self._layout, guess, hashes)
        guess.num_on_device = resident
        self._share.used(min(guess.num_beside, resident, common))
        lead_s = now - guess.issued_s
        if common == 0:
            self._drop(guess, "wasted", lead_s)  # the session's new request belongs to another conversation
            return kept
        # The request stages for itself when it is scheduled; until then its reads must not be stopped.
        self._released += guess.let_go()
        if resident >= min(guess.limit, common):
            guess.report("hit", lead_s=lead_s)
        else:
            late_s = sum(self._worth.seconds_of(min(guess.limit, common) - resident))
            guess.report("late", lead_s=lead_s, late_s=late_s)
        self._worth.came(guess, now)
        return kept

    def carried(self, request_id: str, entries: Sequence[Entry]) -> None:
        """Note that a piece of a waiting request's KV has come to the device, at the end of the order of eviction."""
        self._order.came(request_id, entries)

    def started(self, request_id: str) -> None:
        """Note that a request has its blocks of the device, which expected sessions may have lost by that."""
        self._order.left(request_id)
        self._has_news = True

    def ended(self, request_id: str) -> None:
        """Note that a request has ended: its blocks are now evicted after all others."""
        self._order.left(request_id)
        self._order.disturb()
        self._has_news = True

    def staged(self) -> None:
        """Note that KV has been read, or that a reading has ended."""
        self._has_news = True
        self._accounts.settle()

    def copied(self, copy: Copy) -> None:
        """Note that a copy which `advance` returned has been made, and its blocks are on the device, or that it cannot be made."""
        self._copying.end(copy.advisory_id)
        self._has_news = self._has_news or copy is not self._begun

    def give_up(self) -> None:
        """End every advisory as cancelled."""
        self._copying.clear()
        while self._guesses:
            self._end(next(iter(self._guesses.values())), "cancelled")

    def close(self) -> None:
        """End every advisory and release all stages, because the engine shuts down."""
        self.give_up()
        self._let_go()
        self._accounts.settle(is_last=True)

    def idle_entries(self, whose: Whose) -> list[Entry]:
        """Return the blocks that only this session's next prompt begins with, as far as is known, the last one first."""
        hashes, held = self.memory.of(whose), self._device.holds
        _, kept = prefix_of(self._layout, hashes[: self.memory.num_shared(whose)], held)
        wanted = {*kept, *self._order.waiting_blocks}
        return [each for each in reversed(prefix_of(self._layout, hashes, held)[1]) if each not in wanted]

    # -- between steps -----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to advance: no request is expected, and no stage is left to release."""
        return not self._guesses and not self._released

    def has_work(self, now: float) -> bool:
        """Return whether `advance` would move something now."""
        if not self._guesses:
            return bool(self._released)
        return self._has_news or self.wait_s(now) == 0

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until there is something to do even if no event comes; None: not before an event."""
        # When the last guess has ended there is nothing left to look at: a thread that sleeps by this time would wake again and again.
        if self._look_at_s is None or not self._guesses:
            return None
        return max(self._look_at_s - now, 0.0)

    def advance(self, beside: Beside, now: float) -> Iterator[Copy | Refresh]:
        """Do a bounded part of the work that is due. Begin each item before taking the next one, and tell `copied` when a copy has been made."""
        self._let_go()
        if self._was_busy and not beside.is_busy:
            # Running requests may have pushed out promoted blocks, and now they no longer forbid copies.
            self._has_news, self._look_from_s = True, now
        self._was_busy = beside.is_busy
        self._num_turn_blocks = 0
        slice_s = self._slice_s(beside, now)
        only_urgent = slice_s == 0
        if not (self.has_work(now) or (self._is_owed and not only_urgent)):
            return
        self._has_news, self._is_owed, self._look_at_s = False, only_urgent, None
        # Requests that wait for the disk or for host memory have all of it that guesses would take.
        self._may_read = not (self._store.is_reading_for_requests or self._are_waiting())
        if self._order.has_lost():
            self._look_from_s = now
        facts = [self._worth.facts(guess, now) for guess in self._guesses.values()]
        for guess, each in zip(self._guesses.values(), facts, strict=True):
            if guess.is_likely and not each.is_likely:
                self._tell_host(guess, each)
        # Blocks that are being copied, and those before them, are held until they have come.
        num_free = self._num_free_blocks() + self._copying.num_held_blocks
        targets = plan(facts, num_free, self._device.num_blocks, now)
        if self._order.is_due(now, is_busy=beside.is_busy):
            shares = [(self._guesses[target.name], target.num_device_blocks) for target in targets]
            yield from self._order.moves([(guess.entries, num) for guess, num in shares], now)
        if beside.can_copy:
            num_blocks = int((slice_s or BUSY_SLICE_S) * self._host_bytes_per_s() / self._block_bytes)
            yield from self._bring_up(targets, max(num_blocks, 1), now, only_urgent=only_urgent)
            self._look_at_s = self._next_look(now, beside)
        if only_urgent or not beside.can_copy:
            # The engine's thread has no time to look at every guess: only let the disk begin with new ones.
            self._stage_new(now)
        if self._order.is_owed:
            self._look_at_s = min(self._order.due_s, self._look_at_s or math.inf)

    def took(self, seconds: float, now: float) -> None:
        """Note that the moves which `advance` returned were carried out beside requests and took the engine's thread this many seconds."""
        self._share.took(seconds, self._num_turn_blocks, now)

    def _slice_s(self, beside: Beside, now: float) -> float:
        """Return the seconds that copying may take now; 0: only for urgent sessions."""
        if not beside.is_busy:
            return IDLE_SLICE_S
        return BUSY_SLICE_S if beside.overlaps else self._share.allowed_s(now)

    def _bring_up(
        self, targets: Sequence[Target], room: int, now: float, *, only_urgent: bool
    ) -> Iterator[Copy]:
        """Move every guess towards its target, with at most `room` blocks copied."""
        for target in targets:
            guess = self._guesses[target.name]
            if only_urgent and not guess.is_urgent:
                break
            if target.name in self._copying:
                continue
            for copy in self._move(guess, target, room, now):
                room -= len(copy.sources)
                yield copy

    def _stage_new(self, now: float) -> None:
        for guess in sorted(self._guesses.values(), key=lambda guess: not guess.is_urgent):
            if guess.looked_s < guess.issued_s:
                guess.looked_s = now
                self._restage(guess, self._device.resident(guess.entries, guess.limit).num_blocks)

    def _num_free_blocks(self) -> int:
        """Return the device's blocks that no running request holds, less the blocks that waiting requests will take when they start."""
        return max(self._device.num_free_blocks() - self._order.num_awaited_blocks, 0)

    def _next_look(self, now: float, beside: Beside) -> float | None:
        """Return when something changes even without an event: a guess becomes due, or promoted blocks are to be looked at."""
        # While no request runs, promoted blocks are not pushed out.
        is_short = any(guess.state == "staging" and guess.stage is None for guess in self._guesses.values())
        times = [now + LOOK_EVERY_S] if self._guesses and (beside.is_busy or is_short) else []
        for guess in self._guesses.values():
            due = due_s(self._worth.facts(guess, now))
            if due is not None and due > now:
                times.append(due)
        return min(times, default=None)

    def _move(self, guess: ExpectedSession, target: Target, room: int, now: float) -> Iterator[Copy]:
        """Bring one guess further, with at most `room` blocks."""
        was_looked_at = guess.looked_s >= self._look_from_s and now - guess.looked_s < LOOK_EVERY_S
        if was_looked_at and guess.state == "warm" and guess.num_on_device >= guess.limit:
            return
        if guess.limit == 0:
            self._end(guess, "unknown")
            return
        guess.looked_s = now
        resident = self._device.resident(guess.entries, guess.limit)
        num_there = guess.num_on_device = resident.num_blocks
        if num_there >= guess.limit:
            self._finish(guess, "warm")
            return
        may_copy = target.num_device_blocks > num_there
        if guess.stage is not None and guess.stage.is_revoked:
            self._release(guess)
        # A piece that is read ahead for host memory begins behind blocks that the device lacks.
        is_needed = guess.stage is None or (num_there < guess.first and (may_copy or not guess.is_ahead))
        is_settled = not may_copy and (
            guess.num_hosted >= guess.limit or not _has_host_room(self._guesses.values(), self._store)
        )
        if is_needed:
            first = num_there if may_copy else max(num_there, guess.num_hosted)
            if is_settled or not self._restage(guess, first):
                return
            guess.is_ahead = first > num_there
        assert guess.stage is not None
        progress = self._store.progress(guess.stage)
        if progress.num_blocks < len(guess.stage.blocks):
            guess.limit = max(guess.first + progress.num_blocks, num_there)  # the next block is damaged
            if not self._layout.is_divisible:
                guess.lacking |= guess.stage.first_bad
                self._release(guess)
                self._plan(guess)
                self._has_news = True
                return
        if guess.limit == 0:
            self._end(guess, "unknown")
            return
        end = min(guess.first + progress.num_ready_blocks, target.num_device_blocks, num_there + room)
        num_free = self._num_free_blocks()
        num_wanted = min(end - num_there, num_free - resident.num_unused)
        num_copied = num_wanted if guess.is_urgent else self._order.num_unexpected(num_wanted)
        if num_copied <= 0 < num_wanted:
            # blocks of other expected sessions lie in front: `advance` looks again when the order is due
            return
        if num_copied > 0 and num_there >= guess.first:
            offset = num_there - guess.first
            sources = guess.stage.blocks[offset : offset + num_copied]
            self._begun = copy = Copy(guess.entries, num_there, sources, target.name)
            self._copying.begin_all({target.name: copy})
            yield copy
            self._begun = None
            guess.count_copy(num_copied, is_beside=self._was_busy)
            self._num_turn_blocks += num_copied
            if target.name in self._copying:
                return  # the rest is decided when it has been made
            guess.num_on_device += num_copied
        self._settle(guess, progress, target)

    def _settle(self, guess: ExpectedSession, progress: StageProgress, target: Target) -> None:
        """Decide what follows for a guess after a move: it has arrived, its piece has, or it needs the next piece."""
        staged_end = guess.first + progress.num_blocks
        if guess.num_on_device >= guess.limit:
            self._finish(guess, "warm")
        elif progress.num_ready_blocks < progress.num_blocks:
            pass  # the disk is still reading; `staged` tells when it has ended
        elif guess.num_on_device >= target.num_device_blocks:
            self._release(guess)
            guess.num_hosted = max(guess.num_hosted, staged_end)
            if staged_end >= guess.limit or not _has_host_room(self._guesses.values(), self._store):
                self._finish(guess, "host")
            elif self._restage(guess, staged_end):
                guess.is_ahead = self._has_news = True
        elif guess.num_on_device < staged_end or self._restage(guess, guess.num_on_device):
            self._has_news = True  # the slice cut it short, or the next piece may be there

    def _restage(self, guess: ExpectedSession, first: int) -> bool:
        """Hold the guess's next piece in host memory, from the block `first` on. Return False where there is no room for it now."""
        self._release(guess)
        # Guesses hold their whole share of the host tier, which only urgent ones may exceed.
        is_full = (
            not guess.is_urgent
            and _num_staged(self._guesses.values()) >= self._store.num_host_blocks * STAGED_SHARE
        )
        is_full = is_full or not (guess.is_urgent or self._may_read)
        if is_full and guess.is_known:
            return False
        session_id, tenant = guess.advisory.session_id, guess.advisory.tenant
        peer = self._peer_of(guess)
        keys = [block_key(entry) for entry in guess.entries[first:]]
        num_held = len(keys) if peer else self._store.num_held(keys)
        if num_held < len(keys) and not self._layout.is_divisible:
            self._plan(guess)  # blocks have gone, without which the others are of no use
            self._has_news = True
            return False
        guess.limit, guess.is_known = first + num_held, True
        if is_full and num_held:
            return False
        stage = self._store.stage(
            session_id,
            keys[: min(max(int(self._store.num_host_blocks * PIECE_SHARE), 1), num_held)],
            tenant=tenant,
            peer=peer,
            gives_way=True,
        )
        guess.hold(stage, first)
        if guess.is_likely:
            self._store.expect(session_id, guess.arrival_s or guess.issued_s, tenant=tenant)
        if num_held and not stage.blocks:
            self._release(guess)
            return False
        return True

    # -- what a prefix needs ---------------------------------------------------------------------------------------------

    def _plan(self, guess: ExpectedSession) -> None:
        """Plan for the longest prefix that is to be had. Its blocks on the device need not be in the tiers."""
        is_asked = self._peer_of(guess) != ""

        def are_held(entries: Sequence[Entry]) -> list[bool]:
            """Return of each entry whether it is to be had."""
            on_device, keys = self._device.holds(entries), [block_key(entry) for entry in entries]
            in_tiers = self._store.are_held(keys)
            return [
                here or ((there or is_asked) and key not in guess.lacking)
                for here, there, key in zip(on_device, in_tiers, keys, strict=True)
            ]

        num_tokens, entries = prefix_of(self._layout, guess.hashes, are_held)
        guess.plan(entries, num_tokens)
        guess.num_content_tokens = len(guess.hashes) * self._layout.hash_tokens

    def _peer_of(self, guess: ExpectedSession) -> str:
        """Return the address of a peer that is worth asking for the guess's KV; "" for none, or once it has lacked too many blocks."""
        if len(guess.lacking) > MAX_LACKING:
            return ""
        seconds, block_tokens = self._prefill_s_per_token(), 1 / self._layout.blocks_per_token
        return peer_to_ask(guess.advisory.kv_from, self._store, block_tokens, seconds)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _tell_host(self, guess: ExpectedSession, facts: GuessFacts) -> None:
        """Have host memory keep a session's KV longest while its request is likelier to come than not, and no longer."""
        guess.is_likely = facts.is_likely
        at_s = (guess.arrival_s or guess.issued_s) if guess.is_likely else None
        self._store.expect(guess.advisory.session_id, at_s, tenant=guess.advisory.tenant)

    def _finish(self, guess: ExpectedSession, state: AdvisoryState) -> None:
        """Give up the host memory held for a guess that has come as far up as it may.

        KV that is whole on the device leaves host memory before KV that other requests still need.
        """
        self._release(guess)
        if state == "warm":
            guess.num_hosted = 0
            self._store.expect(guess.advisory.session_id, None, tenant=guess.advisory.tenant)
        if guess.num_copied:
            # by copies: they lie behind blocks of other guesses, more deserving ones too
            self._order.disturb()
        if guess.state != state:
            guess.report(state)

    def _end(self, guess: ExpectedSession, outcome: AdvisoryState, lead_s: float | None = None) -> None:
        del self._guesses[guess.advisory.advisory_id], self._expected[guess.whose]
        self._drop(guess, outcome, lead_s)

    def _drop(self, guess: ExpectedSession, outcome: AdvisoryState, lead_s: float | None = None) -> None:
        self._release(guess)
        self._store.expect(guess.advisory.session_id, None, tenant=guess.advisory.tenant)
        self._accounts.close(guess, outcome, lead_s)

    def _release(self, guess: ExpectedSession) -> None:
        for stage in guess.let_go():
            self._store.release(stage)

    def _let_go(self) -> None:
        released, self._released = self._released, []
        for stage in released:
            self._store.release(stage)


def prefix_of(layout: KvLayout, hashes: Hashes, held: Held) -> tuple[int, list[Entry]]:
    """Return the tokens and the blocks of the longest prefix that is held; of all of it where each leading block is of use by itself."""
    num_tokens = len(hashes) * layout.hash_tokens
    if layout.is_divisible:
        return num_tokens, layout.leading_entries(hashes)
    prefix = layout.longest(hashes, 0, num_tokens, held)
    return prefix.num_tokens, layout.entries(hashes, prefix.blocks)


def _num_useful(layout: KvLayout, guess: ExpectedSession, hashes: Hashes) -> int:
    """Return how many of a guess's leading blocks are of use to a request with this content."""
    common = _count_common(guess.hashes, hashes)
    if layout.is_divisible:
        return common
    return len(guess.entries) if common * layout.hash_tokens >= guess.num_tokens else 0


def _num_staged(guesses: Iterable[ExpectedSession]) -> int:
    """Return the number of blocks that guesses hold in host memory."""
    return sum(len(guess.stage.blocks) for guess in guesses if guess.stage is not None)


def _has_host_room(guesses: Collection[ExpectedSession], store: TierStore) -> bool:
    """Return whether more may be read as far as host memory for guesses that have no room on the device.

    KV that is read there stays when a request comes, however long it is: a long restore goes in pieces (`restoring.py`).
    """
    num_hosted = sum(max(each.num_hosted - each.num_on_device, 0) for each in guesses)
    return _num_staged(guesses) + num_hosted < store.num_host_blocks * HOSTED_SHARE


def _count_common(first: Hashes, second: Hashes) -> int:
    return count_while(one == other for one, other in zip(first, second, strict=False))
