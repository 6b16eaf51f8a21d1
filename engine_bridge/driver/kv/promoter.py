"""Carries out promotions in vLLM's block pool, as `engine_bridge/core/kv/promotions.py` decides them.

Blocks are taken from the free queue, filled, registered under their hashes and freed again: before the next step begins, or, where copies run beside
the steps, when theirs is made. All methods run on the engine thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from engine_bridge.core.kv.cache_moves import Copy, Refresh
from engine_bridge.core.kv.eviction_order import Entries, Resident
from engine_bridge.core.kv.expected import Hashes, OnChange
from engine_bridge.core.kv.promotions import Beside, Promotions
from engine_bridge.driver.carried import facts_of
from engine_bridge.driver.kv.kv_tiers import KvTiers
from engine_bridge.driver.kv.layer_groups import cached_block, register
from engine_bridge.policy.kv.kv_layout import Entry
from engine_bridge.protocol.node import Advisory
from kvtiers.blocks import count_while

if TYPE_CHECKING:
    from engine_bridge.core.kv.kv_transfers import Restores
    from engine_bridge.driver.vllm_api import Request

log = logging.getLogger(__name__)

# The blocks remembered are at most this many times the device's blocks: several prefixes may begin with the same blocks. Chosen.
MOST_FOUND = 4


class PrefixCache:
    """vLLM's block pool, as promotions see it.

    Sessions of thousands of blocks are looked up many times a second, so the blocks found for each prefix are remembered. A block that carries
    another hash by now has lost its old content. Checking each remembered block takes a seventh of the time of looking all of them up.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        # Prefixes that were found, by their last entry; the longest unused first.
        self._found: OrderedDict[bytes, _Found] = OrderedDict()
        self._num_found = 0

    @property
    def num_blocks(self) -> int:
        """How many blocks the device has."""
        return int(self._pool.num_gpu_blocks)

    def num_free_blocks(self) -> int:
        """Return how many blocks of the device no running request holds."""
        return int(self._pool.get_num_free_blocks())

    def holds(self, entries: Entries) -> list[bool]:
        """Return of each block whether it is on the device."""
        return [cached_block(self._pool, entry) is not None for entry in entries]

    def resident(self, entries: Entries, limit: int) -> Resident:
        """Return how many of the first `limit` blocks are on the device, without a gap, and how many of those no request uses."""
        blocks = self.find(entries, limit)
        return Resident(len(blocks), [block.ref_cnt for block in blocks].count(0))

    def num_evicted_before(self, entries: Collection[Entry], limit: int) -> int | None:
        """Return how many blocks would be evicted before the first of these: see `eviction_order.Device`."""
        found = [cached_block(self._pool, entry) for entry in entries]
        if not all(found):
            return None
        kept_ids = {block.block_id for block in found}
        front = islice(self._pool.free_block_queue.iter_blocks_after(None), limit)
        return count_while(block.block_id not in kept_ids for block in front)

    def find(self, entries: Entries, limit: int) -> list[Any]:
        """Return the pool's blocks of the first `limit` entries of a prefix, up to the first gap."""
        if not entries:
            return []
        found = self._found.pop(entries[-1], None) or _Found()
        self._num_found -= len(found.blocks)
        found.forget_lost(entries)
        for entry in entries[len(found.blocks) : limit]:
            cached = cached_block(self._pool, entry)
            if cached is None:
                break
            found.blocks.append(cached)
            found.names.append(entry)
        if found.blocks:
            self._remember(entries[-1], found)
        return found.blocks[:limit]

    def _remember(self, last: Entry, found: _Found) -> None:
        self._found[last] = found
        self._num_found += len(found.blocks)
        while self._num_found > MOST_FOUND * self.num_blocks:
            _, forgotten = self._found.popitem(last=False)
            self._num_found -= len(forgotten.blocks)


class _Found:
    """The blocks of a prefix from the first one on, and the entry that each of them held when it was found."""

    __slots__ = ("blocks", "names")

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.names: list[Entry] = []

    def forget_lost(self, entries: Entries) -> None:
        """Keep only the leading blocks that still hold these entries."""
        wanted = entries[: len(self.names)]
        if self.names == wanted and [block.block_hash for block in self.blocks] == wanted:
            return
        triples = zip(self.blocks, self.names, wanted, strict=False)
        num_left = count_while(name == entry == block.block_hash for block, name, entry in triples)
        del self.blocks[num_left:], self.names[num_left:]


class Promoter:
    """Acts on advisories. If that fails, every advisory ends and the engine continues: advice may be lost, answers may not.

    Args:
        tiers: the tiers that KV comes from, with their copier, the blocks that copies hold and the engine's layout. Their store is open.
    """

    def __init__(
        self,
        pool: Any,
        tiers: KvTiers,
        count_requests: Callable[[], tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert tiers.store is not None and tiers.layout is not None and tiers.held is not None
        self._pool, self._layout, self._held = pool, tiers.layout, tiers.held
        self._cache = PrefixCache(pool)
        self._tiers = tiers
        self._num_layers = tiers.store.shape.num_layers
        self._count_requests = count_requests
        self._clock = clock
        self._has_carried = False
        self._core = Promotions(
            self._cache,
            tiers.store,
            tiers.layout,
            tiers.host_bytes_per_s,
            tiers.prefill_s_per_token,
            lambda: tiers.restores is not None and tiers.restores.are_waiting,
        )

    # -- what comes in -----------------------------------------------------------------------------------------------

    def advise(self, advisory: Advisory, hashes: Hashes, salt: str | None, on_change: OnChange) -> None:
        """Act on an advisory whose prompt begins with blocks of these hashes; `on_change` hears of its states."""
        self._core.advise(advisory, hashes, salt, on_change, self._clock())

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        """End an advisory: its lifetime has passed (`is_expired`), or it was withdrawn."""
        self._core.retract(advisory_id, is_expired=is_expired, now=self._clock())

    def arrived(self, request: Request) -> None:
        """Note that a request has come, and refresh the blocks that were promoted for it."""
        with self._contained():
            move = self._core.arrived(
                request.request_id,
                str(request.session_id),
                request.cache_salt,
                request.block_hashes,
                self._clock(),
            )
            if move is not None:
                self._refresh(move)

    def started(self, request: Request) -> None:
        """Note that a request has been given blocks."""
        self._core.started(request.request_id)

    def ended(self, request: Request) -> None:
        """Note that a request has finished, and remember its blocks."""
        self._core.ended(request.request_id)
        self.remember(request)

    def remember(self, request: Request) -> None:
        """Remember a request's blocks as the beginning of its session's next prompt."""
        if request.session_id is None or not request.block_hashes:
            return
        with self._contained():
            whose = (str(request.session_id), request.cache_salt)
            self._core.memory.keep(whose, request.block_hashes, facts_of(request).tenant)

    def remembers(self, session_id: str, salt: str | None) -> bool:
        """Return whether the prefix of a session's next prompt is known, for the tenant and adapter of this salt."""
        return (session_id, salt) in self._core.memory

    def set_idle(self, session_id: str, salt: str | None) -> None:
        """Have the device take a session's blocks before any other; blocks that other sessions share, or requests use, keep their places."""
        with self._contained():
            found = (cached_block(self._pool, entry) for entry in self._core.idle_entries((session_id, salt)))
            idle = {each.block_id: each for each in found if each is not None and each.ref_cnt == 0}
            for block in idle.values():
                self._pool.free_block_queue.remove(block)
            self._pool.free_block_queue.prepend_n(list(idle.values()))

    def forget(self, session_id: str, tenant: str) -> None:
        """Forget the prefix of a tenant's session: its next prompt, if one comes, begins with something else."""
        self._core.memory.forget_session(session_id, tenant)

    def give_up(self) -> None:
        """End all advisories as cancelled; later ones are acted on."""
        self._core.give_up()

    def close(self) -> None:
        """End all advisories."""
        self._core.close()

    # -- between steps -----------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Return whether `advance` has something to do now."""
        self._hear()
        # The request whose piece has come can have its next piece now.
        return self._has_carried or self._core.has_work(self._clock())

    def wait_s(self) -> float | None:
        """Return the seconds until there may be work; None: until something happens."""
        return self._core.wait_s(self._clock())

    def num_free_blocks(self) -> int:
        """Return how many device blocks no running request holds."""
        return self._cache.num_free_blocks()

    def advance(self) -> None:
        """Do a bounded piece of the work there is."""
        self._held.advance()  # a copy that ended during the step makes room for the next one
        self._hear()
        self._carry_pieces()
        if self._core.is_idle:  # between most steps of most servers
            return
        copier = self._tiers.copier
        beside = Beside(
            is_busy=sum(self._count_requests()) > 0,
            can_copy=copier is not None,
            overlaps=copier is not None and copier.overlaps,
        )
        started_s = self._clock()
        with self._contained():
            for move in self._core.advance(beside, started_s):
                if isinstance(move, Copy):
                    self._copy(move, functools.partial(self._promoted, move))
                else:
                    self._refresh(move)
            if beside.is_busy:
                now = self._clock()
                self._core.took(now - started_s, now)

    def _hear(self) -> None:
        if self._tiers.has_progressed:
            self._tiers.has_progressed = False
            self._core.staged()

    def _carry_pieces(self) -> None:
        """Copy to the device the pieces of KV that have come for waiting requests which are restored piece by piece."""
        restores, self._has_carried = self._tiers.restores, False
        if restores is None:
            return
        for request_id, copy in restores.take_copies().items():
            try:
                resident = self._cache.resident(copy.entries, copy.start)
                has_room = len(copy.sources) <= self._cache.num_free_blocks() - resident.num_unused
                if resident.num_blocks == copy.start and has_room:  # otherwise a step has taken it meanwhile
                    self._copy(copy, functools.partial(self._carried, restores, request_id, copy))
                else:
                    restores.copied(request_id)
            except Exception:
                log.exception("a piece of a request's KV could not be copied to the device")
                restores.copied(request_id)
                restores.go_whole(request_id)

    def _carried(self, restores: Restores, request_id: str, copy: Copy, is_made: bool) -> None:
        still_waits = restores.copied(request_id)
        if not is_made:
            restores.go_whole(request_id)
        elif still_waits:
            self._core.carried(request_id, copy.entries)
            self._tiers.num_carried += len(copy.sources)
            self._has_carried = True

    def _promoted(self, copy: Copy, is_made: bool) -> None:
        self._core.copied(copy)
        if not is_made:
            self._core.give_up()

    def _copy(self, copy: Copy, ended: Callable[[bool], None]) -> None:
        """Fill blocks of the device, and register them when they have been filled. `ended` is told then whether they have."""
        copier, pool, store, restores = (
            self._tiers.copier,
            self._pool,
            self._tiers.store,
            self._tiers.restores,
        )
        assert copier is not None and store is not None and restores is not None
        saves = restores.saves
        resident = self._cache.find(copy.entries, copy.start)
        assert len(resident) == copy.start, "blocks that were found a moment ago are gone"
        pool.touch(resident)  # or the new blocks might be these
        blocks = pool.get_new_blocks(len(copy.sources))
        block_ids = [block.block_id for block in blocks]
        owners = [source.group.id for source in copy.sources]

        def filled(is_made: bool) -> None:
            """Let the blocks be found."""
            entries = copy.entries[copy.start : copy.start + len(blocks)]
            with self._contained():
                try:
                    if is_made:
                        register(pool, entries, blocks, copy.start if self._layout.is_divisible else 0)
                        for number, entry, (tenant, group) in zip(block_ids, entries, owners, strict=True):
                            saves.note(number, entry, tenant, group)
                finally:
                    ended(is_made)

        end = self._held.keep([*resident, *blocks], filled)
        release = None
        try:
            # By the time that a device has copied the advisory may be over and its host memory reused, so the store holds it until then. Before
            # the copier is asked: it then copies whatever fails here, and meanwhile the blocks must not be another's.
            release = store.begin_copy(copy.sources)
            for layer in range(self._num_layers):
                copier.to_device(layer, block_ids, [source.slots[layer] for source in copy.sources])
            copier.end_step(_in_turn(release, end, is_made=True), _in_turn(release, end, is_made=False))
        except BaseException:
            if release is not None:
                release()
            end(False)
            raise
        finally:
            self._held.advance()

    def _refresh(self, refresh: Refresh) -> None:
        resident = self._cache.find(refresh.entries, refresh.num_blocks)
        self._pool.touch(resident)
        self._pool.free_blocks(reversed(resident))

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("an advisory failed; all are given up")
            self._core.give_up()


def _in_turn(
    release: Callable[[], None], end: Callable[[bool], None], *, is_made: bool
) -> Callable[[], None]:
    """Return the callback for the end of a copy: it releases the host memory first, then calls `end`."""

    def call() -> None:
        """Release the copy's host memory, and tell that it has ended."""
        release()
        end(is_made)

    return call
