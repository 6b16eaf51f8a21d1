"""Brings the KV of expected sessions up: disk to host behind the engine's back, host to device between its steps.

What is promoted becomes ordinary prefix cache: blocks are taken from the free queue, filled, registered under their hashes and freed again before
the next step begins. So no guess ever holds a block while requests run: none can be refused or preempted for it, and vLLM may overwrite
what was promoted at any moment, because host or disk have it. Source: SYMPHONY §3.3.

All methods run on the engine thread, but for `note_progress`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine_bridge.driver.kv_tiers import KvTiers
from engine_bridge.node import Advisory, AdvisoryReport, AdvisoryState
from engine_bridge.policy.guesses import GuessFacts, Target, due_s, plan
from kvtiers.keys import BlockKey
from kvtiers.store import KvStore, Stage, StageProgress

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

# Copying to the device between two steps may take so long: with nobody waiting, and while requests run. Chosen. Where copies take the engine
# thread's own time (on a CPU), nothing is copied while requests run: they would wait now for what another may not wait for later.
IDLE_SLICE_S, BUSY_SLICE_S = 0.005, 0.002
# Promoted blocks are looked after this often: what was used meanwhile may have pushed them out.
LOOK_EVERY_S = 0.5
# Of the host tier, what guesses may hold there at once while it is read or waits for the device. Chosen.
STAGED_SHARE = 0.25
# Prefixes of ended requests that are remembered, in block hashes (32 bytes each, 16 MB in all). Chosen.
MAX_REMEMBERED_HASHES = 1 << 19

OnChange = Callable[[AdvisoryReport], None]
Hashes = Sequence[Any]
"""Of a conversation's whole blocks, as vLLM makes them."""
Whose = tuple[str, str | None]
"""A session, and the salt that keeps its tenant's and adapter's KV apart: nobody can say anything about another's."""


class _Guess:
    """One advisory under way. `first`: the block at which its stage begins; `limit`: blocks that the tiers or the device hold."""

    def __init__(
        self, advisory: Advisory, salt: str | None, hashes: Hashes, now: float, on_change: OnChange
    ) -> None:
        self.advisory = advisory
        self.whose: Whose = (advisory.session_id, salt)
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


class Promoter:
    """Acts on advisories.

    Args:
        pool: vLLM's block pool of the one KV cache group.
        tiers: where KV comes from, and what copies it.
        count_requests: (running, waiting).
    """

    def __init__(
        self,
        pool: Any,
        tiers: KvTiers,
        block_size: int,
        count_requests: Callable[[], tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._block_size = block_size
        self._count_requests = count_requests
        self._clock = clock
        self._guesses: dict[str, _Guess] = {}  # by advisory id
        self._expected: dict[Whose, _Guess] = {}  # the same
        self._remembered: OrderedDict[Whose, Hashes] = OrderedDict()
        self._num_remembered = 0
        self._has_news = False
        self._released: list[Stage] = []  # of requests that came; held until those have staged for themselves
        self._look_at_s: float | None = None
        self._was_busy = False
        self._idle_since_s = 0.0

    def safely(self, method: Callable[..., None], *args: Any) -> None:
        """Call one of our methods; if it fails, every advisory is over, and the engine goes on: advice may be lost, answers may not."""
        try:
            method(*args)
        except Exception:
            log.exception("an advisory failed; all are given up")
            guesses = list(self._guesses.values())
            self._guesses, self._expected = {}, {}
            for guess in guesses:
                self._drop(guess, "cancelled")

    # -- what comes in -----------------------------------------------------------------------------------------------

    def advise(self, advisory: Advisory, hashes: Hashes, salt: str | None, on_change: OnChange) -> None:
        """Expect a request of a session. A new advisory for the same session and salt takes the place of the old one.

        hashes: of what its prompt will begin with; empty for what its last request left.
        """
        now = self._clock()
        whose = (advisory.session_id, salt)
        if whose in self._expected:
            self._end(self._expected[whose], "cancelled")
        guess = _Guess(advisory, salt, hashes or self._remembered.get(whose, ()), now, on_change)
        if not guess.hashes or self._tiers.store is None:
            self._report(guess, "unknown")
            return
        self._guesses[advisory.advisory_id] = self._expected[whose] = guess
        self._tiers.store.expect(advisory.session_id, guess.arrival_s or now, tenant=advisory.tenant)
        self._has_news = True
        self._report(guess, "staging")

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        """Stop paying for an advisory. Nothing happens if it is over."""
        guess = self._guesses.get(advisory_id)
        if guess is not None:
            is_wasted = is_expired and guess.host_blocks + guess.disk_blocks > 0
            self._end(guess, ("wasted" if is_wasted else "expired") if is_expired else "cancelled")

    def arrived(self, request: Request) -> None:
        """A request came: score the advisory that expected it, before the request takes anything."""
        guess = self._expected.pop((str(request.session_id), request.cache_salt), None)
        if guess is None:
            return
        del self._guesses[guess.advisory.advisory_id]
        resident = len(self._resident(guess))
        common = _count_common(guess.hashes, request.block_hashes)
        guess.num_on_device = resident
        self._hand_over(guess)
        if common == 0:
            self._report(guess, "wasted")  # the session went on as another conversation
        elif resident >= min(guess.limit, common):
            self._report(guess, "hit")
        else:
            self._report(guess, "late", late_s=self._left_s(guess, min(guess.limit, common) - resident))

    def remember(self, request: Request) -> None:
        """A request ends: its session's next one will begin with what it leaves."""
        if request.session_id is None or not request.block_hashes:
            return
        whose = (str(request.session_id), request.cache_salt)
        self._forget(whose)
        self._remembered[whose] = list(request.block_hashes)
        self._num_remembered += len(request.block_hashes)
        while self._num_remembered > MAX_REMEMBERED_HASHES:
            self._forget(next(iter(self._remembered)))

    def remembers(self, session_id: str, salt: str | None) -> bool:
        """Whether a request of this session, tenant and adapter has ended here."""
        return (session_id, salt) in self._remembered

    def close(self) -> None:
        """The engine goes: every advisory is over."""
        for guess in list(self._guesses.values()):
            self._end(guess, "cancelled")
        self._let_go()

    # -- between steps -----------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Would `advance` move something now?"""
        if not self._guesses:
            return bool(self._released)
        return self._has_news or self._tiers.has_progressed or self.wait_s() == 0

    def wait_s(self) -> float | None:
        """How long until there is something to do by itself; None: until something comes."""
        return None if self._look_at_s is None else max(self._look_at_s - self._clock(), 0.0)

    def advance(self) -> None:
        """Do a bounded piece of what there is to do."""
        self._let_go()
        now = self._clock()
        is_busy = self._is_busy()
        if self._was_busy and not is_busy:
            # What ran may have pushed out what was promoted, and it no longer forbids copies.
            self._has_news, self._idle_since_s = True, now
        self._was_busy = is_busy
        if not self._guesses:
            self._has_news, self._look_at_s = False, None
            return
        if not self.has_work():
            return
        self._has_news = self._tiers.has_progressed = False
        room = self._num_blocks_to_copy()
        if room > 0:
            self._bring_up(room, now)
            self._look_at_s = self._next_look(now)
        else:
            # The engine's thread has better to do than to look after every guess: only let the disk begin with new ones.
            self._stage_new(now)
            self._look_at_s = None

    def _bring_up(self, room: int, now: float) -> None:
        """Move every guess towards its target, with at most `room` blocks copied."""
        num_staged = 0
        for target in self._plan(now):
            guess = self._guesses[target.name]
            room -= self._move(guess, target, max(room, 0), now, may_stage=num_staged < self._max_staged())
            num_staged += len(guess.stage.blocks) if guess.stage is not None else 0

    def _stage_new(self, now: float) -> None:
        guesses = list(self._guesses.values())
        num_staged = sum(len(guess.stage.blocks) for guess in guesses if guess.stage is not None)
        for guess in guesses:
            if guess.looked_s < guess.issued_s and num_staged < self._max_staged():
                guess.looked_s = now
                self._restage(guess, len(self._resident(guess)))
                assert guess.stage is not None
                num_staged += len(guess.stage.blocks)

    def _max_staged(self) -> float:
        """Blocks that guesses may hold in host memory."""
        return self._store.pool.num_slots * STAGED_SHARE / self._store.shape.num_layers

    def _num_blocks_to_copy(self) -> int:
        """Between these two steps."""
        is_busy = self._is_busy()
        copier = self._tiers.copier
        if copier is None or (is_busy and not copier.overlaps):
            return 0
        slice_s = BUSY_SLICE_S if is_busy else IDLE_SLICE_S
        return max(int(slice_s * self._tiers.host_bytes_per_s() / self._store.shape.block_bytes), 1)

    def _is_busy(self) -> bool:
        return sum(self._count_requests()) > 0

    def _plan(self, now: float) -> list[Target]:
        pool = self._pool
        return plan(
            [self._facts(guess) for guess in self._guesses.values()],
            pool.get_num_free_blocks(),
            pool.num_gpu_blocks,
            now,
        )

    def _facts(self, guess: _Guess) -> GuessFacts:
        advisory, block_bytes = guess.advisory, self._store.shape.block_bytes
        copy_s = guess.limit * block_bytes / self._tiers.host_bytes_per_s()
        on_disk = guess.limit if guess.stage is None else sum(guess.stage.is_from_disk)
        read_s = on_disk * block_bytes / self._store.disk_bytes_per_s()
        return GuessFacts(
            name=advisory.advisory_id,
            tenant=advisory.tenant,
            num_blocks=guess.limit,
            probability=advisory.probability,
            priority=advisory.priority or 0,
            arrival_s=guess.arrival_s,
            issued_s=guess.issued_s,
            saved_s=copy_s + read_s,
            copy_s=copy_s,
        )

    def _next_look(self, now: float) -> float | None:
        """When something changes by itself: a guess becomes due, or it is time to look after what was promoted."""
        # While nothing runs, nothing pushes out what was promoted.
        times = [now + LOOK_EVERY_S] if self._guesses and self._is_busy() else []
        for guess in self._guesses.values():
            due = due_s(self._facts(guess))
            if due is not None and due > now:
                times.append(due)
        return min(times, default=None)

    def _move(self, guess: _Guess, target: Target, room: int, now: float, *, may_stage: bool) -> int:
        """Bring one guess further; returns the blocks that were copied to the device."""
        was_looked_at = guess.looked_s >= self._idle_since_s and now - guess.looked_s < LOOK_EVERY_S
        if guess.state == "warm" and was_looked_at:
            return 0
        guess.looked_s = now
        resident = self._resident(guess)
        guess.num_on_device = len(resident)
        if len(resident) >= guess.limit:
            self._refresh(resident)
            self._finish(guess, "warm")
            return 0
        if guess.stage is None or len(resident) < guess.first:
            if guess.state == "host" and target.num_device_blocks <= len(resident):
                return 0
            if not may_stage:
                return 0
            self._restage(guess, len(resident))
        assert guess.stage is not None
        progress = self._store.progress(guess.stage)
        guess.limit = max(guess.first + progress.num_blocks, len(resident))
        if guess.limit == 0:
            self._end(guess, "unknown")
            return 0
        end = min(guess.first + progress.num_ready_blocks, target.num_device_blocks, len(resident) + room)
        num_copied = max(end - len(resident), 0)
        num_copied = min(num_copied, self._pool.get_num_free_blocks() - sum(b.ref_cnt == 0 for b in resident))
        if num_copied > 0:
            self._promote(guess, resident, num_copied)
            guess.num_on_device += num_copied
        self._settle(guess, progress, target)
        return max(num_copied, 0)

    def _settle(self, guess: _Guess, progress: StageProgress, target: Target) -> None:
        """Whether a guess is where it may go."""
        if guess.num_on_device >= guess.limit:
            self._finish(guess, "warm")
        elif progress.num_ready_blocks < progress.num_blocks:
            pass  # the disk reads on; `has_progressed` tells
        elif guess.num_on_device >= target.num_device_blocks:
            self._finish(guess, "host")
        elif self._num_blocks_to_copy():
            self._has_news = True  # cut short by the slice
        # else the end of the last running request is news enough

    def _promote(self, guess: _Guess, resident: list[Any], num_blocks: int) -> None:
        """Copy the next blocks to the device and leave them there as evictable prefix cache."""
        stage, copier, pool = guess.stage, self._tiers.copier, self._pool
        assert stage is not None and copier is not None
        start = len(resident)
        pool.touch(resident)  # or the new blocks might be these
        blocks = pool.get_new_blocks(num_blocks)
        block_ids = [block.block_id for block in blocks]
        offset = start - guess.first
        sources = stage.blocks[offset : offset + num_blocks]
        try:
            for layer in range(self._store.shape.num_layers):
                copier.to_device(layer, block_ids, [source.slots[layer] for source in sources])
            copier.end_step(lambda: None)
        except BaseException:
            pool.free_blocks(reversed([*resident, *blocks]))
            raise
        prefix = [*resident, *blocks]
        pool.cache_full_blocks(
            request=SimpleNamespace(block_hashes=guess.hashes),
            blocks=prefix,
            num_cached_blocks=start,
            num_full_blocks=start + num_blocks,
            block_size=self._block_size,
            kv_cache_group_id=0,
        )
        # Last blocks first: where memory is short, what is left of a conversation is its beginning, which is still of use.
        pool.free_blocks(reversed(prefix))
        num_from_disk = sum(stage.is_from_disk[offset : offset + num_blocks])
        guess.disk_blocks += num_from_disk
        guess.host_blocks += num_blocks - num_from_disk

    def _refresh(self, resident: list[Any]) -> None:
        """Put a prefix that is expected behind everything else in the order of eviction."""
        self._pool.touch(resident)
        self._pool.free_blocks(reversed(resident))

    def _resident(self, guess: _Guess) -> list[Any]:
        """The device's blocks of a guess's prefix, without a gap."""
        blocks = []
        for block_hash in guess.hashes[: guess.limit]:
            found = self._pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            blocks.append(found[0])
        return blocks

    def _restage(self, guess: _Guess, first: int) -> None:
        if guess.stage is not None:
            self._store.release(guess.stage)
        session_id, tenant = guess.advisory.session_id, guess.advisory.tenant
        keys = [BlockKey(bytes(block_hash)) for block_hash in guess.hashes[first:]]
        guess.stage, guess.first = self._store.stage(session_id, keys, tenant=tenant), first
        self._store.expect(session_id, guess.arrival_s or guess.issued_s, tenant=tenant)

    # -- how it ends -------------------------------------------------------------------------------------------------

    def _finish(self, guess: _Guess, state: AdvisoryState) -> None:
        """As far up as it may go: hold no host memory for it any more."""
        if guess.stage is not None:
            self._store.release(guess.stage)
            guess.stage = None
        if guess.state != state:
            self._report(guess, state)

    def _end(self, guess: _Guess, outcome: AdvisoryState) -> None:
        del self._guesses[guess.advisory.advisory_id], self._expected[guess.whose]
        self._drop(guess, outcome)

    def _drop(self, guess: _Guess, outcome: AdvisoryState) -> None:
        store = self._tiers.store
        if guess.stage is not None and store is not None:
            store.release(guess.stage)
            guess.stage = None
        if store is not None:
            store.expect(guess.advisory.session_id, None, tenant=guess.advisory.tenant)
        self._report(guess, outcome)

    def _hand_over(self, guess: _Guess) -> None:
        """The request stages for itself when it is scheduled; until then its reads must not be stopped."""
        if guess.stage is not None:
            self._released.append(guess.stage)
            guess.stage = None

    def _let_go(self) -> None:
        if self._released and self._tiers.store is not None:
            for stage in self._released:
                self._tiers.store.release(stage)
        self._released = []

    def _left_s(self, guess: _Guess, num_blocks: int) -> float:
        """How long moving the rest would have taken, at the speeds measured."""
        num_bytes = num_blocks * self._store.shape.block_bytes
        return num_bytes / self._store.disk_bytes_per_s() + num_bytes / self._tiers.host_bytes_per_s()

    def _report(self, guess: _Guess, state: AdvisoryState, late_s: float | None = None) -> None:
        guess.state = state
        block_bytes = self._tiers.store.shape.block_bytes if self._tiers.store is not None else 0
        is_scored = state in ("hit", "late", "wasted")
        guess.on_change(
            AdvisoryReport(
                advisory_id=guess.advisory.advisory_id,
                session_id=guess.advisory.session_id,
                state=state,
                num_tokens=guess.limit * self._block_size,
                missing_tokens=(len(guess.hashes) - guess.limit) * self._block_size,
                device_tokens=guess.num_on_device * self._block_size,
                host_bytes=guess.host_blocks * block_bytes,
                disk_bytes=guess.disk_blocks * block_bytes,
                lead_s=self._clock() - guess.issued_s if is_scored else None,
                late_s=late_s,
            )
        )

    def _forget(self, whose: Whose) -> None:
        self._num_remembered -= len(self._remembered.pop(whose, ()))

    @property
    def _store(self) -> KvStore:
        store = self._tiers.store
        assert store is not None
        return store


def _count_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
