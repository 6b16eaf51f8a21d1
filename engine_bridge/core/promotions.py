"""Brings the KV of expected sessions up: disk to host while the engine works, host to device between its steps.

What is promoted becomes ordinary prefix cache: nothing holds it, so no guess ever holds a block of the device while requests run, none can be
refused or preempted for it, and the engine may overwrite what was promoted at any moment, because host or disk have it.
Source: SYMPHONY §3.3.

A pure state machine: advisories and requests come in with the time; `advance` returns what to copy.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_bridge.core.fetching import peer_to_ask
from engine_bridge.node import Advisory, AdvisoryReport, AdvisoryState
from engine_bridge.policy.guesses import GuessFacts, Target, due_s, plan
from engine_bridge.policy.urgency import is_urgent
from kvtiers.blocks import Block, Origin, Stage, StageProgress
from kvtiers.keys import BlockKey, BlockShape

# Copying to the device between two steps may take so long: with nobody waiting, and while requests run. Chosen. Where copies take the engine
# thread's own time (on a CPU), nothing is copied while requests run: they would wait now for what another may not wait for later. But for urgent
# sessions: others wait for them.
IDLE_SLICE_S, BUSY_SLICE_S = 0.005, 0.002
# Promoted blocks are looked after this often: what was used meanwhile may have pushed them out.
LOOK_EVERY_S = 0.5
# Of the host tier, what guesses may hold there at once while it is read or waits for the device. Chosen.
STAGED_SHARE = 0.25
# Prefixes of ended requests that are remembered, in block hashes (32 bytes each, 16 MB in all). Chosen.
MAX_REMEMBERED_HASHES = 1 << 19

OnChange = Callable[[AdvisoryReport], None]
Hashes = Sequence[bytes]
"""Of a conversation's whole blocks, as the engine makes them."""
Whose = tuple[str, str | None]
"""A session, and the salt that keeps its tenant's and adapter's KV apart: nobody can say anything about another's."""


@dataclass(frozen=True, slots=True)
class Resident:
    """The leading blocks of a prefix that the device holds, without a gap; `num_unused` of them belong to no running request."""

    num_blocks: int
    num_unused: int


class Device(Protocol):
    """The device's prefix cache, to look at."""

    @property
    def num_blocks(self) -> int: ...
    def num_free_blocks(self) -> int:
        """That no running request holds, whatever lies in them."""
        ...

    def resident(self, hashes: Hashes) -> Resident:
        """How many of these blocks are on the device, from the first one on."""


class KvBlocks(Protocol):
    """What promotions need of `kvtiers.store.KvStore`, which says what each does."""

    @property
    def shape(self) -> BlockShape:
        """How large a block is and in how many layers it is copied."""

    @property
    def num_host_blocks(self) -> int: ...
    def stage(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "", peer: str = "") -> Stage: ...
    def peer_bytes_per_s(self, address: str) -> float | None: ...
    def progress(self, stage: Stage) -> StageProgress: ...
    def release(self, stage: Stage) -> None: ...
    def expect(self, group: str, at_s: float | None, *, tenant: str = "") -> None: ...
    def disk_bytes_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Beside:
    """What goes on while KV could be copied to the device. can_copy: there is something to copy with; overlaps: it does not take the engine
    thread's time."""

    is_busy: bool
    can_copy: bool
    overlaps: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Take blocks of the device, fill them from host memory with `sources`, and leave them as evictable cache behind the first `start` blocks of
    the prefix that `hashes` name, which are there."""

    hashes: Hashes
    start: int
    sources: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Refresh:
    """Put the first `num_blocks` of a prefix behind everything else in the order of eviction."""

    hashes: Hashes
    num_blocks: int


class _Guess:
    """One advisory under way. `first`: the block at which its stage begins; `limit`: blocks that the tiers or the device hold."""

    def __init__(
        self, advisory: Advisory, salt: str | None, hashes: Hashes, now: float, on_change: OnChange
    ) -> None:
        self.advisory = advisory
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
        self.limit = len(hashes)
        self.num_on_device = 0
        self.host_blocks = 0
        self.disk_blocks = 0
        self.looked_s = -math.inf

    @property
    def num_staged(self) -> int:
        return len(self.stage.blocks) if self.stage is not None else 0

    def report(
        self,
        state: AdvisoryState,
        block_size: int,
        block_bytes: int,
        *,
        lead_s: float | None = None,
        late_s: float | None = None,
    ) -> None:
        self.state = state
        self.on_change(
            AdvisoryReport(
                advisory_id=self.advisory.advisory_id,
                session_id=self.advisory.session_id,
                state=state,
                num_tokens=self.limit * block_size,
                missing_tokens=(len(self.hashes) - self.limit) * block_size,
                device_tokens=self.num_on_device * block_size,
                host_bytes=self.host_blocks * block_bytes,
                disk_bytes=self.disk_blocks * block_bytes,
                lead_s=lead_s,
                late_s=late_s,
            )
        )


class _Memory:
    """What sessions' last requests left, the longest ago forgotten first."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[Whose, Hashes] = OrderedDict()
        self._num_hashes = 0

    def __contains__(self, whose: Whose) -> bool:
        return whose in self._hashes

    def of(self, whose: Whose) -> Hashes:
        return self._hashes.get(whose, ())

    def forget_session(self, session: str) -> None:
        for whose in [whose for whose in self._hashes if whose[0] == session]:
            self._forget(whose)

    def keep(self, whose: Whose, hashes: Hashes) -> None:
        self._forget(whose)
        self._hashes[whose] = list(hashes)
        self._num_hashes += len(hashes)
        while self._num_hashes > MAX_REMEMBERED_HASHES:
            self._forget(next(iter(self._hashes)))

    def _forget(self, whose: Whose) -> None:
        self._num_hashes -= len(self._hashes.pop(whose, ()))


class Promotions:
    """Acts on advisories. Each that it has taken reports its end exactly once.

    Args:
        device: where promoted KV goes.
        store: where it comes from.
        host_bytes_per_s: of copies between the two, as measured.
        prefill_s_per_token: of computing KV instead; None before it was measured.
    """

    def __init__(
        self,
        device: Device,
        store: KvBlocks,
        block_size: int,
        host_bytes_per_s: Callable[[], float],
        prefill_s_per_token: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._device = device
        self._store = store
        self._block_size = block_size
        self._host_bytes_per_s = host_bytes_per_s
        self._prefill_s_per_token = prefill_s_per_token
        self._guesses: dict[str, _Guess] = {}  # by advisory id
        self._expected: dict[Whose, _Guess] = {}  # the same
        self._memory = _Memory()
        self._has_news = False
        self._released: list[Stage] = []  # of requests that came; held until those have staged for themselves
        self._look_at_s: float | None = None
        self._was_busy = False
        self._idle_since_s = 0.0

    # -- what comes in -----------------------------------------------------------------------------------------------

    def advise(
        self, advisory: Advisory, hashes: Hashes, salt: str | None, on_change: OnChange, now: float
    ) -> None:
        """Expect a request of a session. A new advisory for the same session and salt takes the place of the old one.

        hashes: of what its prompt will begin with; empty for what its last request left.
        """
        whose = (advisory.session_id, salt)
        for replaced in (self._expected.get(whose), self._guesses.get(advisory.advisory_id)):
            if replaced is not None and replaced.advisory.advisory_id in self._guesses:
                self._end(replaced, "cancelled")
        guess = _Guess(advisory, salt, hashes or self._memory.of(whose), now, on_change)
        if not guess.hashes:
            self._report(guess, "unknown")
            return
        self._guesses[advisory.advisory_id] = self._expected[whose] = guess
        self._store.expect(advisory.session_id, guess.arrival_s or now, tenant=advisory.tenant)
        self._has_news = True
        self._report(guess, "staging")

    def retract(self, advisory_id: str, *, is_expired: bool, now: float) -> None:
        """Stop paying for an advisory. Nothing happens if it is over."""
        guess = self._guesses.get(advisory_id)
        if guess is None:
            return
        if not is_expired:
            self._end(guess, "cancelled")
        elif guess.host_blocks + guess.disk_blocks > 0:
            self._end(guess, "wasted", lead_s=now - guess.issued_s)
        else:
            self._end(guess, "expired")

    def arrived(self, session: str, salt: str | None, hashes: Hashes, now: float) -> None:
        """A request came: score the advisory that expected it, before the request takes anything."""
        guess = self._expected.pop((session, salt), None)
        if guess is None:
            return
        del self._guesses[guess.advisory.advisory_id]
        resident = self._resident(guess).num_blocks
        common = _count_common(guess.hashes, hashes)
        guess.num_on_device = resident
        self._hand_over(guess)
        lead_s = now - guess.issued_s
        if common == 0:
            self._report(guess, "wasted", lead_s=lead_s)  # the session went on as another conversation
        elif resident >= min(guess.limit, common):
            self._report(guess, "hit", lead_s=lead_s)
        else:
            late_s = self._left_s(min(guess.limit, common) - resident)
            self._report(guess, "late", lead_s=lead_s, late_s=late_s)

    def remember(self, session: str, salt: str | None, hashes: Hashes) -> None:
        """A request ends: its session's next one will begin with what it leaves."""
        self._memory.keep((session, salt), hashes)

    def remembers(self, session: str, salt: str | None) -> bool:
        """Whether a request of this session, tenant and adapter has ended here."""
        return (session, salt) in self._memory

    def forget(self, session: str) -> None:
        """No further prompt of this session begins with what its last requests left, under no adapter. A tenant's session of the same id is
        forgotten as well: its next advisory then names its own token ids."""
        self._memory.forget_session(session)

    def staged(self) -> None:
        """KV that was being read has come."""
        self._has_news = True

    def give_up(self) -> None:
        """Every advisory is over."""
        guesses = list(self._guesses.values())
        self._guesses, self._expected = {}, {}
        for guess in guesses:
            self._drop(guess, "cancelled")

    def close(self) -> None:
        """The engine goes."""
        self.give_up()
        self._let_go()

    # -- between steps -----------------------------------------------------------------------------------------------

    def has_work(self, now: float) -> bool:
        """Would `advance` move something now?"""
        if not self._guesses:
            return bool(self._released)
        return self._has_news or self.wait_s(now) == 0

    def wait_s(self, now: float) -> float | None:
        """How long until there is something to do by itself; None: until something comes."""
        # When the last guess has ended, nothing is left to look at: whoever sleeps by this would wake again and again.
        if self._look_at_s is None or not self._guesses:
            return None
        return max(self._look_at_s - now, 0.0)

    def advance(self, beside: Beside, now: float) -> Iterator[Copy | Refresh]:
        """Do a bounded piece of what there is to do. Each item is to be carried out before the next one is taken."""
        self._let_go()
        if self._was_busy and not beside.is_busy:
            # What ran may have pushed out what was promoted, and it no longer forbids copies.
            self._has_news, self._idle_since_s = True, now
        self._was_busy = beside.is_busy
        if not self._guesses:
            self._has_news, self._look_at_s = False, None
            return
        if not self.has_work(now):
            return
        self._has_news = False
        only_urgent = beside.is_busy and not beside.overlaps
        has_urgent = any(guess.is_urgent for guess in self._guesses.values())
        self._look_at_s = None
        if beside.can_copy and (has_urgent or not only_urgent):
            yield from self._bring_up(self._num_blocks_to_copy(beside), now, only_urgent=only_urgent)
            self._look_at_s = self._next_look(now, beside)
        if only_urgent or not beside.can_copy:
            # The engine's thread has better to do than to look after every guess: only let the disk begin with new ones.
            self._stage_new(now)

    def _num_blocks_to_copy(self, beside: Beside) -> int:
        """Between these two steps."""
        slice_s = BUSY_SLICE_S if beside.is_busy else IDLE_SLICE_S
        return max(int(slice_s * self._host_bytes_per_s() / self._store.shape.block_bytes), 1)

    def _bring_up(self, room: int, now: float, *, only_urgent: bool) -> Iterator[Copy | Refresh]:
        """Move every guess towards its target, with at most `room` blocks copied."""
        num_staged = 0
        urgent: list[_Guess] = []  # those before, which keep their place
        for target in self._plan(now):
            guess = self._guesses[target.name]
            if guess.is_urgent:
                urgent.append(guess)
            elif only_urgent:
                break
            for move in self._move(guess, target, room, now, may_stage=num_staged < self._max_staged()):
                if isinstance(move, Copy):
                    if not guess.is_urgent:
                        yield from self._refreshed(urgent)
                        urgent = []
                    room -= len(move.sources)
                yield move
            num_staged += guess.num_staged

    def _refreshed(self, guesses: Sequence[_Guess]) -> Iterator[Refresh]:
        """Put what the device has of them behind what a copy takes room from."""
        for guess in guesses:
            num_there = self._resident(guess).num_blocks
            if num_there:
                yield Refresh(guess.hashes, num_there)

    def _stage_new(self, now: float) -> None:
        guesses = sorted(self._guesses.values(), key=lambda guess: not guess.is_urgent)
        num_staged = sum(guess.num_staged for guess in guesses)
        for guess in guesses:
            if guess.looked_s < guess.issued_s and num_staged < self._max_staged():
                guess.looked_s = now
                self._restage(guess, self._resident(guess).num_blocks)
                num_staged += guess.num_staged

    def _max_staged(self) -> float:
        """Blocks that guesses may hold in host memory."""
        return self._store.num_host_blocks * STAGED_SHARE

    def _plan(self, now: float) -> list[Target]:
        facts = [self._facts(guess) for guess in self._guesses.values()]
        return plan(facts, self._device.num_free_blocks(), self._device.num_blocks, now)

    def _facts(self, guess: _Guess) -> GuessFacts:
        advisory, block_bytes = guess.advisory, self._store.shape.block_bytes
        copy_s = guess.limit * block_bytes / self._host_bytes_per_s()
        on_disk = guess.limit if guess.stage is None else _num_read(guess.stage.origins)
        read_s = on_disk * block_bytes / self._store.disk_bytes_per_s()
        return GuessFacts(
            name=advisory.advisory_id,
            tenant=advisory.tenant,
            num_blocks=guess.limit,
            probability=advisory.probability,
            priority=guess.priority,
            arrival_s=guess.arrival_s,
            issued_s=guess.issued_s,
            saved_s=copy_s + read_s,
            copy_s=copy_s,
        )

    def _next_look(self, now: float, beside: Beside) -> float | None:
        """When something changes by itself: a guess becomes due, or it is time to look after what was promoted."""
        # While nothing runs, nothing pushes out what was promoted.
        times = [now + LOOK_EVERY_S] if self._guesses and beside.is_busy else []
        for guess in self._guesses.values():
            due = due_s(self._facts(guess))
            if due is not None and due > now:
                times.append(due)
        return min(times, default=None)

    def _move(
        self, guess: _Guess, target: Target, room: int, now: float, *, may_stage: bool
    ) -> Iterator[Copy | Refresh]:
        """Bring one guess further, with at most `room` blocks."""
        was_looked_at = guess.looked_s >= self._idle_since_s and now - guess.looked_s < LOOK_EVERY_S
        if guess.state == "warm" and was_looked_at:
            return
        guess.looked_s = now
        resident = self._resident(guess)
        num_there = guess.num_on_device = resident.num_blocks
        if num_there >= guess.limit:
            yield Refresh(guess.hashes, num_there)
            self._finish(guess, "warm")
            return
        if guess.stage is None or num_there < guess.first:
            if (guess.state == "host" and target.num_device_blocks <= num_there) or not may_stage:
                return
            self._restage(guess, num_there)
        assert guess.stage is not None
        progress = self._store.progress(guess.stage)
        guess.limit = max(guess.first + progress.num_blocks, num_there)
        if guess.limit == 0:
            self._end(guess, "unknown")
            return
        end = min(guess.first + progress.num_ready_blocks, target.num_device_blocks, num_there + room)
        num_copied = min(end - num_there, self._device.num_free_blocks() - resident.num_unused)
        if num_copied > 0:
            yield self._promote(guess, guess.stage, num_there, num_copied)
            guess.num_on_device += num_copied
        self._settle(guess, progress, target)

    def _promote(self, guess: _Guess, stage: Stage, start: int, num_blocks: int) -> Copy:
        offset = start - guess.first
        num_from_disk = _num_read(stage.origins[offset : offset + num_blocks])
        guess.disk_blocks += num_from_disk
        guess.host_blocks += num_blocks - num_from_disk
        return Copy(guess.hashes, start, stage.blocks[offset : offset + num_blocks])

    def _settle(self, guess: _Guess, progress: StageProgress, target: Target) -> None:
        """Whether a guess is where it may go."""
        if guess.num_on_device >= guess.limit:
            self._finish(guess, "warm")
        elif progress.num_ready_blocks < progress.num_blocks:
            pass  # the disk reads on; `staged` tells
        elif guess.num_on_device >= target.num_device_blocks:
            self._finish(guess, "host")
        else:
            self._has_news = True  # cut short by the slice

    def _resident(self, guess: _Guess) -> Resident:
        return self._device.resident(guess.hashes[: guess.limit])

    def _restage(self, guess: _Guess, first: int) -> None:
        self._release(guess)
        session_id, tenant = guess.advisory.session_id, guess.advisory.tenant
        seconds = self._prefill_s_per_token()
        peer = peer_to_ask(guess.advisory.kv_from, self._store, self._block_size, seconds)
        keys = [BlockKey(bytes(block_hash)) for block_hash in guess.hashes[first:]]
        guess.stage, guess.first = self._store.stage(session_id, keys, tenant=tenant, peer=peer), first
        self._store.expect(session_id, guess.arrival_s or guess.issued_s, tenant=tenant)

    # -- how it ends -------------------------------------------------------------------------------------------------

    def _finish(self, guess: _Guess, state: AdvisoryState) -> None:
        """As far up as it may go: hold no host memory for it any more."""
        self._release(guess)
        if guess.state != state:
            self._report(guess, state)

    def _end(self, guess: _Guess, outcome: AdvisoryState, lead_s: float | None = None) -> None:
        del self._guesses[guess.advisory.advisory_id], self._expected[guess.whose]
        self._drop(guess, outcome, lead_s)

    def _drop(self, guess: _Guess, outcome: AdvisoryState, lead_s: float | None = None) -> None:
        self._release(guess)
        self._store.expect(guess.advisory.session_id, None, tenant=guess.advisory.tenant)
        self._report(guess, outcome, lead_s=lead_s)

    def _release(self, guess: _Guess) -> None:
        stage, guess.stage = guess.stage, None
        if stage is not None:
            self._store.release(stage)

    def _hand_over(self, guess: _Guess) -> None:
        """The request stages for itself when it is scheduled; until then its reads must not be stopped."""
        if guess.stage is not None:
            self._released.append(guess.stage)
            guess.stage = None

    def _let_go(self) -> None:
        released, self._released = self._released, []
        for stage in released:
            self._store.release(stage)

    def _left_s(self, num_blocks: int) -> float:
        """How long moving so many would have taken, at the speeds measured."""
        num_bytes = num_blocks * self._store.shape.block_bytes
        return num_bytes / self._store.disk_bytes_per_s() + num_bytes / self._host_bytes_per_s()

    def _report(
        self,
        guess: _Guess,
        state: AdvisoryState,
        *,
        lead_s: float | None = None,
        late_s: float | None = None,
    ) -> None:
        guess.report(state, self._block_size, self._store.shape.block_bytes, lead_s=lead_s, late_s=late_s)


def _num_read(origins: Sequence[Origin]) -> int:
    """How many were not in host memory."""
    return len(origins) - origins.count("host")


def _count_common(first: Hashes, second: Hashes) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
