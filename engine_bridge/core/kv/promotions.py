"""Brings the KV of expected sessions up: disk to host while the engine works, host to device between its steps.

What is promoted becomes ordinary prefix cache: nothing holds it, so no guess ever holds a block of the device while requests run, none can be
refused or preempted for it, and the engine may overwrite what was promoted at any moment, because host or disk have it. Host memory is passed through
a piece at a time, and a piece gives way to any request that wants its memory.
Source: SYMPHONY §3.3.

A pure state machine: advisories and requests come in with the time; `advance` returns what to copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_bridge.core.kv.cache_moves import Copy, Refresh
from engine_bridge.core.kv.eviction_order import Device, EvictionOrder
from engine_bridge.core.kv.expected import Guess, Hashes, Memory, OnChange, OpenAccounts, Whose
from engine_bridge.core.kv.fetching import peer_to_ask
from engine_bridge.policy.kv.copy_share import WorkShare
from engine_bridge.policy.kv.guesses import GuessFacts, Target, due_s, plan
from engine_bridge.protocol.node import Advisory, AdvisoryState
from kvtiers.blocks import Stage, StageProgress
from kvtiers.keys import BlockKey, BlockShape

# Copying to the device between two steps may take so long: with nobody waiting, and while requests run. Chosen. Where copies take the engine
# thread's own time (on a CPU), it has a share of that of the requests which run (`policy/beside.py`). But for urgent sessions: others wait for them.
IDLE_SLICE_S, BUSY_SLICE_S = 0.005, 0.002
# Promoted blocks are looked after this often: what was used meanwhile may have pushed them out.
LOOK_EVERY_S = 0.5
# Of the host tier, what guesses may hold there at once while it is read or waits for the device, and each of them at once. Chosen.
STAGED_SHARE, PIECE_SHARE = 0.25, 0.125
# Of the host tier, what may be read at most for guesses that have no room on the device. More would push out what was read for others before. Chosen.
HOSTED_SHARE = 0.5


class KvBlocks(Protocol):
    """What promotions need of `kvtiers.store.KvStore`, which says what each does."""

    @property
    def shape(self) -> BlockShape:
        """How large a block is and in how many layers it is copied."""

    @property
    def num_host_blocks(self) -> int: ...
    def stage(
        self,
        group: str,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        peer: str = "",
        gives_way: bool = False,
    ) -> Stage: ...
    def num_held(self, keys: Sequence[BlockKey]) -> int: ...
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


class Promotions:
    """Acts on advisories. Each that it has taken reports its end exactly once. memory: what sessions' next prompts will begin with.

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
        self._block_bytes = store.shape.block_bytes
        self._host_bytes_per_s = host_bytes_per_s
        self._prefill_s_per_token = prefill_s_per_token
        self._guesses: dict[str, Guess] = {}  # by advisory id
        self._expected: dict[Whose, Guess] = {}  # the same
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
        self._look_from_s = 0.0  # what was found before this may be gone

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
        block = self._store.shape, self._block_size
        guess = Guess(advisory, salt, hashes or self.memory.of(whose), block, now, on_change)
        if not guess.hashes:
            guess.report("unknown")
            return
        self._guesses[advisory.advisory_id] = self._expected[whose] = guess
        self._store.expect(advisory.session_id, guess.arrival_s or now, tenant=advisory.tenant)
        self._has_news = True
        self._order.disturb()  # what the device still has of it lies among what nobody expects
        guess.report("staging")

    def retract(self, advisory_id: str, *, is_expired: bool, now: float) -> None:
        """Stop paying for an advisory. Nothing happens if it is over. It is reported when what is being read for it has ended."""
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
        """A request came: score the advisory that expected it, before the request takes anything. What is read on from now is read for the request.

        Returns what is to be carried out at once: while it waits for the rest of its KV, others' guesses are not to push out what it has.
        """
        guess = self._expected.pop((session, salt), None)
        kept = self._order.came(request_id, hashes) if guess is not None or self._guesses else None
        if guess is None:
            return kept
        del self._guesses[guess.advisory.advisory_id]
        resident = self._device.resident(guess.hashes, guess.limit).num_blocks
        common = _count_common(guess.hashes, hashes)
        guess.num_on_device = resident
        self._share.used(min(guess.num_beside, resident, common))
        lead_s = now - guess.issued_s
        if common == 0:
            self._drop(guess, "wasted", lead_s)  # the session went on as another conversation
            return kept
        # The request stages for itself when it is scheduled; until then its reads must not be stopped.
        self._released += guess.let_go()
        if resident >= min(guess.limit, common):
            guess.report("hit", lead_s=lead_s)
        else:
            late_s = sum(self._seconds_of(min(guess.limit, common) - resident))
            guess.report("late", lead_s=lead_s, late_s=late_s)
        return kept

    def carried(self, request_id: str, hashes: Hashes) -> None:
        """A piece of what a waiting request needs has come to the device, and lies behind everything else."""
        self._order.came(request_id, hashes)

    def started(self, request_id: str) -> None:
        """A request has its blocks of the device, which expected sessions may have lost by it."""
        self._order.left(request_id)
        self._has_news = True

    def ended(self, request_id: str) -> None:
        """What a request leaves on the device is now evicted after everything else."""
        self._order.left(request_id)
        self._order.disturb()
        self._has_news = True

    def staged(self) -> None:
        """KV that was being read has come, or a reading has ended."""
        self._has_news = True
        self._accounts.settle()

    def give_up(self) -> None:
        """Every advisory is over."""
        while self._guesses:
            self._end(next(iter(self._guesses.values())), "cancelled")

    def close(self) -> None:
        """The engine goes."""
        self.give_up()
        self._let_go()
        self._accounts.settle(is_last=True)

    # -- between steps -----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing is expected, and nothing is left to let go: there is nothing to advance."""
        return not self._guesses and not self._released

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
            self._has_news, self._look_from_s = True, now
        self._was_busy = beside.is_busy
        self._num_turn_blocks = 0
        slice_s = self._slice_s(beside, now)
        only_urgent = slice_s == 0
        if not (self.has_work(now) or (self._is_owed and not only_urgent)):
            return
        self._has_news, self._is_owed, self._look_at_s = False, only_urgent, None
        if self._order.has_lost():
            self._look_from_s = now
        facts = [self._facts(guess) for guess in self._guesses.values()]
        num_free = self._device.num_free_blocks() - self._order.num_waiting_blocks
        targets = plan(facts, num_free, self._device.num_blocks, now)
        if self._order.is_due(now, is_busy=beside.is_busy):
            shares = [(self._guesses[target.name], target.num_device_blocks) for target in targets]
            yield from self._order.moves([(guess.hashes, num) for guess, num in shares], now)
        if beside.can_copy:
            num_blocks = int((slice_s or BUSY_SLICE_S) * self._host_bytes_per_s() / self._block_bytes)
            yield from self._bring_up(targets, max(num_blocks, 1), now, only_urgent=only_urgent)
            self._look_at_s = self._next_look(now, beside)
        if only_urgent or not beside.can_copy:
            # The engine's thread has better to do than to look after every guess: only let the disk begin with new ones.
            self._stage_new(now)
        if self._order.is_owed:
            self._look_at_s = min(self._order.due_s, self._look_at_s or math.inf)

    def took(self, seconds: float, now: float) -> None:
        """What `advance` returned was carried out beside requests, which took the engine's thread so long."""
        self._share.took(seconds, self._num_turn_blocks, now)

    def _slice_s(self, beside: Beside, now: float) -> float:
        """How long copying may take now; 0: only for urgent sessions."""
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
            for copy in self._move(guess, target, room, now):
                room -= len(copy.sources)
                yield copy

    def _stage_new(self, now: float) -> None:
        for guess in sorted(self._guesses.values(), key=lambda guess: not guess.is_urgent):
            if guess.looked_s < guess.issued_s:
                guess.looked_s = now
                self._restage(guess, self._device.resident(guess.hashes, guess.limit).num_blocks)

    def _facts(self, guess: Guess) -> GuessFacts:
        return _facts_of(guess, *self._seconds_of(guess.limit))

    def _seconds_of(self, num_blocks: int) -> tuple[float, float]:
        """To copy so many blocks to the device, and to read them from disk."""
        num_bytes = num_blocks * self._block_bytes
        return num_bytes / self._host_bytes_per_s(), num_bytes / self._store.disk_bytes_per_s()

    def _next_look(self, now: float, beside: Beside) -> float | None:
        """When something changes by itself: a guess becomes due, or it is time to look after what was promoted."""
        # While nothing runs, nothing pushes out what was promoted.
        is_short = any(guess.state == "staging" and guess.stage is None for guess in self._guesses.values())
        times = [now + LOOK_EVERY_S] if self._guesses and (beside.is_busy or is_short) else []
        for guess in self._guesses.values():
            due = due_s(self._facts(guess))
            if due is not None and due > now:
                times.append(due)
        return min(times, default=None)

    def _move(self, guess: Guess, target: Target, room: int, now: float) -> Iterator[Copy]:
        """Bring one guess further, with at most `room` blocks."""
        was_looked_at = guess.looked_s >= self._look_from_s and now - guess.looked_s < LOOK_EVERY_S
        if was_looked_at and guess.state == "warm" and guess.num_on_device >= guess.limit:
            return
        guess.looked_s = now
        resident = self._device.resident(guess.hashes, guess.limit)
        num_there = guess.num_on_device = resident.num_blocks
        if num_there >= guess.limit:
            self._finish(guess, "warm")
            return
        may_copy = target.num_device_blocks > num_there
        if guess.stage is not None and guess.stage.is_revoked:
            self._release(guess)
        # What is read ahead for host memory begins behind what the device lacks.
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
            guess.limit = max(guess.first + progress.num_blocks, num_there)  # the next one is damaged
        if guess.limit == 0:
            self._end(guess, "unknown")
            return
        end = min(guess.first + progress.num_ready_blocks, target.num_device_blocks, num_there + room)
        num_free = self._device.num_free_blocks() - self._order.num_waiting_blocks
        num_wanted = min(end - num_there, num_free - resident.num_unused)
        num_copied = num_wanted if guess.is_urgent else self._order.num_unexpected(num_wanted)
        if num_copied <= 0 < num_wanted:
            return  # others that are expected lie in front: `advance` looks again when the order is due
        if num_copied > 0 and num_there >= guess.first:
            offset = num_there - guess.first
            yield Copy(guess.hashes, num_there, guess.stage.blocks[offset : offset + num_copied])
            guess.num_copied += num_copied
            guess.num_beside += num_copied * self._was_busy
            guess.num_on_device += num_copied
            self._num_turn_blocks += num_copied
        self._settle(guess, progress, target)

    def _settle(self, guess: Guess, progress: StageProgress, target: Target) -> None:
        """Whether a guess, or a piece of it, is where it may go."""
        staged_end = guess.first + progress.num_blocks
        if guess.num_on_device >= guess.limit:
            self._finish(guess, "warm")
        elif progress.num_ready_blocks < progress.num_blocks:
            pass  # the disk reads on; `staged` tells
        elif guess.num_on_device >= target.num_device_blocks:
            self._release(guess)
            guess.num_hosted = max(guess.num_hosted, staged_end)
            if staged_end >= guess.limit or not _has_host_room(self._guesses.values(), self._store):
                self._finish(guess, "host")
            elif self._restage(guess, staged_end):
                guess.is_ahead = self._has_news = True
        elif guess.num_on_device < staged_end or self._restage(guess, guess.num_on_device):
            self._has_news = True  # cut short by the slice, or the next piece may be there

    def _restage(self, guess: Guess, first: int) -> bool:
        """Hold the next piece of it in host memory, from the block `first` on. False where there is no room for it now."""
        self._release(guess)
        is_full = not guess.is_urgent and _is_full(self._guesses.values(), self._store)
        if is_full and guess.is_known:
            return False
        session_id, tenant = guess.advisory.session_id, guess.advisory.tenant
        peer = peer_to_ask(guess.advisory.kv_from, self._store, self._block_size, self._prefill_s_per_token())
        keys = [BlockKey(bytes(block_hash)) for block_hash in guess.hashes[first:]]
        num_held = len(keys) if peer else self._store.num_held(keys)
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
        self._store.expect(session_id, guess.arrival_s or guess.issued_s, tenant=tenant)
        if num_held and not stage.blocks:
            self._release(guess)
            return False
        return True

    # -- how it ends -------------------------------------------------------------------------------------------------

    def _finish(self, guess: Guess, state: AdvisoryState) -> None:
        """As far up as it may go: hold no host memory for it any more. What the device has whole leaves host memory before what others still need."""
        self._release(guess)
        if state == "warm":
            guess.num_hosted = 0
            self._store.expect(guess.advisory.session_id, None, tenant=guess.advisory.tenant)
        if guess.num_copied:
            self._order.disturb()  # by copies: they lie behind what others have, more deserving ones too
        if guess.state != state:
            guess.report(state)

    def _end(self, guess: Guess, outcome: AdvisoryState, lead_s: float | None = None) -> None:
        del self._guesses[guess.advisory.advisory_id], self._expected[guess.whose]
        self._drop(guess, outcome, lead_s)

    def _drop(self, guess: Guess, outcome: AdvisoryState, lead_s: float | None = None) -> None:
        self._release(guess)
        self._store.expect(guess.advisory.session_id, None, tenant=guess.advisory.tenant)
        self._accounts.close(guess, outcome, lead_s)

    def _release(self, guess: Guess) -> None:
        for stage in guess.let_go():
            self._store.release(stage)

    def _let_go(self) -> None:
        released, self._released = self._released, []
        for stage in released:
            self._store.release(stage)


def _facts_of(guess: Guess, copy_s: float, read_s: float) -> GuessFacts:
    """copy_s: to the device; read_s: from where it lay at first, as what is under way is worth no less for being half done."""
    advisory = guess.advisory
    return GuessFacts(
        name=advisory.advisory_id,
        tenant=advisory.tenant,
        num_blocks=guess.limit,
        probability=advisory.probability,
        priority=guess.priority,
        is_ordered=advisory.is_ordered,
        arrival_s=guess.arrival_s,
        issued_s=guess.issued_s,
        saved_s=copy_s + read_s * guess.is_far,
        copy_s=copy_s,
    )


def _num_staged(guesses: Iterable[Guess]) -> int:
    """Blocks that guesses hold in host memory."""
    return sum(len(guess.stage.blocks) for guess in guesses if guess.stage is not None)


def _is_full(guesses: Iterable[Guess], store: KvBlocks) -> bool:
    """Whether guesses hold as much of the host tier as they may, but for urgent ones."""
    return _num_staged(guesses) >= store.num_host_blocks * STAGED_SHARE


def _has_host_room(guesses: Iterable[Guess], store: KvBlocks) -> bool:
    """Whether more may be read as far as host memory for guesses that have no room on the device. What is read there stays when one of them comes,
    however long it is: a long restore goes in pieces (`restoring.py`)."""
    num_there = _num_staged(guesses) + sum(max(g.num_hosted - g.num_on_device, 0) for g in guesses)
    return num_there < store.num_host_blocks * HOSTED_SHARE


def _count_common(first: Hashes, second: Hashes) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
