"""Adapters on a device: which lie there, which come, and which leave. Who leaves first is decided by `engine_bridge.policy.adapter_cache`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from bench.sim.core.links import SharedLink
from engine_bridge.policy.adapter_cache import CachedAdapter, EvictionPolicy, UseWindow, choose_victims


class Adapters:
    """Adapters in blocks of the memory that KV lies in, too.

    One that running requests use is pinned. One that nobody uses stays if there is a policy, as long as nothing else needs its blocks (Chameleon
    §4.1); without a policy it goes at once (S-LoRA), unless one of the next requests needs it.

    Args:
        num_bytes: of each adapter; their ids are the places in it.
        policy: who of the unused goes first, None for no cache.
        has_all: all of them are here from the start and stay, in memory of their own: nothing is ever loaded.
    """

    def __init__(
        self,
        num_bytes: Sequence[int],
        block_bytes: int,
        policy: EvictionPolicy | None,
        link: SharedLink,
        window: UseWindow | None = None,
        has_all: bool = False,
    ) -> None:
        self.num_bytes = num_bytes
        self.num_blocks = [0] * len(num_bytes) if has_all else [-(-size // block_bytes) for size in num_bytes]
        self.used_blocks = 0
        """By all that are here or on their way."""
        self.idle_blocks = 0
        """Of these, by those that are here and that nobody uses: they can go."""
        self.counts: Counter[str] = Counter()
        self._policy = policy
        self._link = link
        self._window = window or UseWindow()
        self._num_users: Counter[int] = Counter()
        self._num_waiting: Counter[int] = Counter()
        self._has_all = has_all
        self._here: set[int] = set()
        self._idle: dict[int, float] = {}  # since when unused
        self._coming: set[int] = set()
        self._prefetched: set[int] = set()  # and not used since
        self._wanted_next: Collection[int] = ()

    def is_here(self, adapter_id: int) -> bool:
        return self._has_all or adapter_id in self._here

    def is_known(self, adapter_id: int) -> bool:
        """Here or on its way."""
        return self.is_here(adapter_id) or adapter_id in self._coming

    def missing_blocks(self, adapter_id: int) -> int:
        """What starting a request with it takes of the blocks that are free or idle: none if another one uses it or it is on its way."""
        if self._num_users[adapter_id] or adapter_id in self._coming:
            return 0
        return self.num_blocks[adapter_id]

    def idle_blocks_beyond(self, spared: Collection[int]) -> int:
        """Of adapters that nobody uses, without these."""
        return self.idle_blocks - sum(self.num_blocks[a] for a in spared if a in self._idle)

    # -- requests

    def asked_for(self, adapter_id: int, now: float) -> None:
        """A request came that needs it."""
        self._window.used(adapter_id, now)
        self._num_waiting[adapter_id] += 1

    def waits_again(self, adapter_id: int) -> None:
        self._num_waiting[adapter_id] += 1

    def pin(self, adapter_id: int, now: float, ready: Callable[[int, float], None]) -> str:
        """A request starts with it. Returns `here`, `coming` or `missing`; in the last case it is loaded, `ready` is called when it is here.

        The caller has seen to it that `missing_blocks` are free, then.
        """
        self._num_waiting[adapter_id] -= 1
        self._num_users[adapter_id] += 1
        if self._policy is not None:
            self._policy.touched(self._facts(adapter_id, now, now), now)
        self.counts["prefetches_used"] += adapter_id in self._prefetched
        self._prefetched.discard(adapter_id)
        if self.is_here(adapter_id):
            if adapter_id in self._idle:
                del self._idle[adapter_id]
                self.idle_blocks -= self.num_blocks[adapter_id]
            return "here"
        if adapter_id in self._coming:
            return "coming"
        self._load(adapter_id, ready)
        return "missing"

    def unpin(self, adapter_id: int, now: float) -> None:
        """A request that used it left."""
        self._num_users[adapter_id] -= 1
        if self._num_users[adapter_id] or adapter_id not in self._here:
            return
        self._rest(adapter_id, now)

    def _rest(self, adapter_id: int, now: float) -> None:
        """Nobody uses it."""
        if self._policy is not None:
            self._policy.touched(self._facts(adapter_id, now, now), now)
        self._idle[adapter_id] = now
        self.idle_blocks += self.num_blocks[adapter_id]
        if self._policy is None and adapter_id not in self._wanted_next:
            self._drop(adapter_id)

    # -- memory

    def prefetch(self, adapter_id: int, now: float, ready: Callable[[int, float], None]) -> None:
        """Load it for later; its blocks are free."""
        self._prefetched.add(adapter_id)
        self.counts["prefetched"] += 1
        self._load(adapter_id, ready)

    def want_next(self, adapter_ids: Collection[int]) -> None:
        """Of the requests that will start next. Without a cache, what is neither used nor among these goes."""
        self._wanted_next = adapter_ids
        if self._policy is None:
            for adapter_id in [a for a in self._idle if a not in adapter_ids]:
                self._drop(adapter_id)

    def free(self, num_blocks: int, now: float, spared: Collection[int] = ()) -> None:
        """Make at least so many blocks free. Raises RuntimeError if those of idle adapters do not suffice: the caller counted wrong."""
        candidates = [self._facts(a, since_s, now) for a, since_s in self._idle.items() if a not in spared]
        freed = 0
        for victim in self._victims(candidates, num_blocks, now):
            freed += self.num_blocks[victim]
            self._drop(victim)
            if self._policy is not None:
                self._policy.evicted(victim)
        if freed < num_blocks:
            raise RuntimeError(f"{num_blocks} blocks were to come free, {freed} did")

    def _victims(self, candidates: list[CachedAdapter], num_blocks: int, now: float) -> Sequence[int]:
        if self._policy is None:
            return [adapter.adapter_id for adapter in candidates]
        # Adapters are whole numbers of blocks, so blocks serve as bytes here.
        return choose_victims(candidates, num_blocks, self._policy, now)

    def _facts(self, adapter_id: int, last_used_s: float, now: float) -> CachedAdapter:
        return CachedAdapter(
            adapter_id=adapter_id,
            num_bytes=self.num_blocks[adapter_id],
            last_used_s=last_used_s,
            uses=self._window.uses(adapter_id, now),
            reload_s=self._link.alone_s(self.num_bytes[adapter_id]),
            is_queued=self._num_waiting[adapter_id] > 0,
        )

    def _drop(self, adapter_id: int) -> None:
        del self._idle[adapter_id]
        self._here.discard(adapter_id)
        self._prefetched.discard(adapter_id)
        self.idle_blocks -= self.num_blocks[adapter_id]
        self.used_blocks -= self.num_blocks[adapter_id]
        self.counts["dropped"] += 1

    def _load(self, adapter_id: int, ready: Callable[[int, float], None]) -> None:
        self._coming.add(adapter_id)
        self.used_blocks += self.num_blocks[adapter_id]
        self.counts["loads"] += 1

        def arrived(now: float) -> None:
            self._coming.discard(adapter_id)
            self._here.add(adapter_id)
            if not self._num_users[adapter_id]:
                self._rest(adapter_id, now)
            ready(adapter_id, now)

        self._link.transfer(self.num_bytes[adapter_id], arrived)

    def check_invariants(self) -> None:
        """Raises AssertionError if blocks are lost or counted twice, or an adapter that is used could be evicted."""
        held = self._here | self._coming
        assert self.used_blocks == sum(self.num_blocks[a] for a in held), "blocks lost or counted twice"
        assert self.idle_blocks == sum(self.num_blocks[a] for a in self._idle), "idle blocks"
        assert not any(self._num_users[a] for a in self._idle), "idle and used"
        assert self._has_all or all(a in held for a, num in self._num_users.items() if num), (
            "used and not here"
        )
