"""The KV tiers of one node: opened when the engine's cache has a shape, kept over rebuilds of the engine, closed with the node."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from engine_bridge.core.kv.kv_transfers import Restores, StepMoves
from engine_bridge.driver.kv.kv_namespace import namespace_of
from engine_bridge.policy.costs.costs import Copied, CopyTimes, KvBlock, Link, PrefillCost
from engine_bridge.policy.kv.restore_method import FullCost, SwapOrRecompute
from engine_bridge.protocol.errors import SeamMoved
from kvtiers.closing import going_on
from kvtiers.errors import KvTiersError
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.files import Files
from kvtiers.io.io_thread import IoThread
from kvtiers.keys import Namespace
from kvtiers.policy.eviction import ByValue, EvictionPolicy
from kvtiers.policy.rates import Rate
from kvtiers.policy.restore import (
    PRIOR_HOST_BYTES_PER_S,
    PRIOR_PEER_BYTES_PER_S,
    FasterWins,
    RestorePolicy,
)
from kvtiers.stats import PeerStats, TierStats
from kvtiers.store import KvStore

if TYPE_CHECKING:
    from engine_bridge.driver.memory.block_copy import BlockCopier
    from engine_bridge.settings.profile import MachineProfile

log = logging.getLogger(__name__)

# The speed of copies is told by one of so many bytes. Chosen: a long conversation's of a small model, where set-up hardly counts.
RATED_BYTES = 8 << 20

_known: dict[str, KvTiers] = {}
_names = itertools.count()


class TiersConfig(Struct, frozen=True, kw_only=True):
    """Sizes in bytes; 0 turns a tier off. The disk tier needs the host tier, through which all its blocks pass.

    Args:
        folder: under which each model's KV has a folder of its own.
    """

    host_bytes: int
    disk_bytes: int = 0
    folder: Path | None = None


class RequestListener(Protocol):
    """Whoever expects requests hears of them. None of these raises."""

    def arrived(self, request: Any) -> None: ...
    def started(self, request: Any) -> None: ...
    def ended(self, request: Any) -> None: ...
    def num_free_blocks(self) -> int: ...
    def close(self) -> None: ...


class Peering(Protocol):
    """Other nodes, as far as the tiers know them: see `engine_bridge.cluster.peers.Peering`."""

    def open(self) -> str: ...
    def attach(self, store: KvStore, fingerprint: str, io: IoThread) -> None: ...
    def detach(self) -> None: ...
    def close(self) -> None: ...
    def snapshot(self) -> PeerStats: ...


class KvTiers:
    """What the two halves of the connector and the driver share.

    Args:
        policies, files and clock: other than the default ones for benches and tests.
        peering: with other nodes; None: neither lends nor asks.
    """

    def __init__(
        self,
        config: TiersConfig,
        *,
        policy: RestorePolicy | None = None,
        eviction: EvictionPolicy | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
        peering: Peering | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.policy = policy or FasterWins()
        self.store: KvStore | None = None
        self.peering = peering
        self.copier: BlockCopier | None = None
        self.is_step_spoiled = False
        """Whether some rows of the step that is under way are not what their keys say: nothing of it is kept."""
        self.restores: Restores | None = None
        self.on_progress: Callable[[], None] = lambda: None
        """Called on the I/O thread when staged KV has come: the engine may have a request to start."""
        self.has_progressed = False
        """Staged KV has come since somebody last cleared this."""
        self.listener: RequestListener | None = None
        self.arguments: dict[str, Any] = {}
        """Of the engine that is built next: see `kv_namespace.arguments_that_count`."""
        self.loads_must_hold = False
        """See `engine_bridge.core.kv.restoring.Machine`."""
        self.is_off = False
        """The engine reuses no KV: see `switch_off`."""
        self.is_paused = False
        """Nothing is loaded or saved: the engine is warming up with prompts that nobody will repeat."""
        self.chosen: Counter[str] = Counter()
        """Ways by which requests were to get their KV back, as predicted when they were preempted."""
        self.resumed: Counter[str] = Counter()
        """How requests that had been preempted got back what the device had lost: "swap", "split" (part of it) or "recompute"."""
        self.num_failed_loads = 0
        """Blocks that a step had counted on and that did not come; they were computed again."""
        self.num_carried = 0
        """See `HostStats`."""
        self._eviction = eviction or ByValue()
        self._files = files or Files()
        self._namespace: Namespace | None = None
        self._io: IoThread | None = None
        self._prefill: PrefillCost | None = None
        self._prefill_rate: Rate | None = None
        rate = PRIOR_HOST_BYTES_PER_S
        self.copy_times = CopyTimes(Link(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate))
        """What copies between host tier and device take; begins with an assumption, goes on with what each real one took."""
        self.link: Link | None = None
        """What they were measured to take while nobody wanted them; None where nobody has measured."""
        self._copied = (Copied(), Copied())
        self._moving: list[StepMoves] = []
        self.name = f"tiers-{next(_names)}"
        _known[self.name] = self

    # -- life --------------------------------------------------------------------------------------------------------

    def attach(self, kv_caches: dict[str, Any], vllm_config: Any, *, gives_blocks_up: bool = False) -> None:
        """Take the cache of a newly built engine. Opens the store, or keeps it where the shape is still the same.

        gives_blocks_up: while a request runs, the engine takes those of its blocks back that its attention does not look at any more.
        """
        from engine_bridge.driver.memory import block_copy

        self._give_up_moves()

        tensors = list(kv_caches.values())
        sizes = {block_copy.layer_bytes(tensor) for tensor in tensors}
        if len(sizes) != 1:
            raise SeamMoved(f"layers have KV blocks of different sizes: {sorted(sizes)}")
        namespace = namespace_of(tensors, sizes.pop(), vllm_config, self.arguments)
        if namespace != self._namespace:
            self._close_store()
            self._open_store(namespace)
        assert self.store is not None and self._io is not None
        self._copied = (Copied(), Copied())
        self.loads_must_hold = gives_blocks_up or bool(vllm_config.scheduler_config.async_scheduling)
        loop = self._io.loop
        self.copier = block_copy.make_copier(
            tensors,
            self.store.pool.region,
            lambda run: loop.call_soon_threadsafe(loop.run_in_executor, None, run),
        )

    def detach(self) -> None:
        """The engine is gone; what is stored stays."""
        if self.listener is not None:
            with going_on("advisories"):
                self.listener.close()
        if self.restores is not None and self.store is not None:
            with going_on("restores"):
                self.restores.close()
        self._give_up_moves()
        self.listener = self.copier = self.restores = None
        if self.store is not None:
            self.store.leave_all()

    def switch_off(self) -> None:
        """The engine that was built reuses no KV: there is nothing to keep for it, or to lend."""
        if not self.is_off:
            log.warning(
                "vLLM computes every prompt of this model anew here (its prefix caching is off), so the KV tiers are off"
            )
        self.is_off = True
        if self.peering is not None:
            self.peering.close()

    def begin_moves(self, moves: StepMoves) -> None:
        """A step was scheduled that loads and saves these."""
        if moves.loads or moves.saves:
            self._moving.append(moves)

    def end_moves(self, moves: StepMoves) -> None:
        """That step has ended: the host memory that they hold has been given back, or will be when the device has copied."""
        self._moving = [each for each in self._moving if each is not moves]

    def _give_up_moves(self) -> None:
        """The engine is gone: give back the host memory that steps hold which have not ended, as one of them has failed."""
        moving, self._moving = self._moving, []
        store, copier = self.store, self.copier
        if store is None or not moving:
            return

        def let_go() -> None:
            for moves in moving:
                with going_on("a step of the failed engine"):
                    for job in moves.saves:
                        store.abandon(job.save)
                    for load in moves.loads:
                        store.release(load.stage)

        # A device may be copying yet: that must not end in memory which has become another's.
        try:
            copier.end_step(let_go) if copier is not None else let_go()
        except Exception:
            log.exception("the device does not say when it has copied; it is waited for")
            assert copier is not None
            copier.rest()
            let_go()

    def close(self) -> None:
        """Write what waits for the disk and give all memory back."""
        _known.pop(self.name, None)
        with going_on("the KV tiers"):
            self._close_store()
        if self.peering is not None:
            with going_on("what lends KV to other nodes"):
                self.peering.close()

    def peer_address(self) -> str:
        """Where other nodes may ask for KV, from now on; "" for nowhere. Raises OSError."""
        return self.peering.open() if self.peering is not None and not self.is_off else ""

    def _open_store(self, namespace: Namespace) -> None:
        self.peer_address()  # what is wrong with it stops the start before anything is open
        self._io = IoThread()
        disk, problem = None, None
        try:
            disk = self._open_disk(namespace)
        except (OSError, KvTiersError) as error:
            problem = f"the disk tier is off: {error}"
            log.error("%s; KV will not outlive this process", problem)
        self.store = KvStore(namespace.shape, self.config.host_bytes, self._io, disk, self._eviction)
        self.store.problem = problem
        self.store.on_progress = self._on_progress
        self._namespace = namespace
        if self.peering is not None:
            self.peering.attach(self.store, namespace.fingerprint, self._io)
        pool, io = self.store.pool, self._io
        threading.Thread(
            target=pool.populate, args=(lambda: self._io is io,), name="kv-populate", daemon=True
        ).start()

    def _open_disk(self, namespace: Namespace) -> DiskLog | None:
        config = self.config
        if not config.disk_bytes or config.folder is None:
            return None
        assert self._io is not None
        return self._io.start(
            DiskLog.open(
                namespace.folder_in(config.folder),
                namespace.fingerprint,
                namespace.shape,
                config.disk_bytes,
                files=self._files,
                describe=msgspec.json.format(msgspec.json.encode(namespace)),
            )
        ).result()

    def _close_store(self) -> None:
        store, io, self.store, self._io, self._namespace = self.store, self._io, None, None, None
        if store is not None:
            if self.peering is not None:
                with going_on("what lends KV to other nodes"):
                    self.peering.detach()
            with going_on("the KV store"):
                store.close()
        if io is not None:
            io.close()

    def _on_progress(self) -> None:
        self.has_progressed = True
        self.on_progress()

    @property
    def usable_store(self) -> KvStore | None:
        """None while nothing is to be loaded or saved."""
        return None if self.is_paused else self.store

    def num_free_device_blocks(self) -> int:
        """Blocks of the device that no running request holds; 0 where nothing can be copied there between two steps."""
        return self.listener.num_free_blocks() if self.listener is not None and self.copier is not None else 0

    # -- what was measured -------------------------------------------------------------------------------------------

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens in that time."""
        if self._prefill_rate is None:
            self._prefill_rate = Rate(num_tokens / seconds)
        self._prefill_rate.note(num_tokens, seconds, self.clock())

    def use_costs(self, prefill: PrefillCost) -> None:
        """Have restores and the ways back of preempted requests decided by these costs of computing, unless a policy was given."""
        if isinstance(self.policy, FasterWins):
            self.policy, self._prefill = FullCost(prefill=prefill), prefill

    def use_profile(self, profile: MachineProfile) -> None:
        """Believe what was measured of this machine until its copies and its disk are seen at work."""
        if profile.copies is not None:
            self.use_link(profile.copies.link)
        if profile.disk is not None and self.store is not None:
            self.store.assume_disk_rate(profile.disk.read_bytes_per_s)

    def use_link(self, link: Link) -> None:
        """Predicts copies with a link that has been measured, in place of the assumed one."""
        self.link, self.copy_times = link, CopyTimes(link)

    def swap_or_recompute(self) -> SwapOrRecompute | None:
        """What each way back of a preempted request takes, by the costs as they are now; None where a policy was given."""
        if self._prefill is None or self._namespace is None:
            return None
        self.hear_copies()
        block = KvBlock(
            block_size_tokens=self._namespace.block_size_tokens,
            block_bytes=self._namespace.shape.block_bytes,
        )
        return SwapOrRecompute(self._prefill, block, self.copy_times.at(self.clock()))

    def prefill_s_per_token(self) -> float | None:
        """None before the first prefill."""
        return 1 / self._prefill_rate.at(self.clock()) if self._prefill_rate is not None else None

    def host_bytes_per_s(self) -> float:
        """Of copies to the device, by the time that the copying itself takes."""
        self.hear_copies()
        return self._in_bytes_per_s()

    def _in_bytes_per_s(self) -> float:
        return RATED_BYTES / self.copy_times.back.copy_s(RATED_BYTES, self.clock())

    def hear_copies(self) -> None:
        """Learn from what was copied since the last time. Several copies count as so many of their mean size."""
        if self.copier is None or self.store is None:
            return
        ways = (self.copier.out, self.copier.back)
        tables = (self.copy_times.out, self.copy_times.back)
        for table, before, now in zip(tables, self._copied, ways, strict=True):
            num = (now.num_copies - before.num_copies) / self.store.shape.num_layers
            if num > 0:
                num_bytes, seconds = now.num_bytes - before.num_bytes, now.seconds - before.seconds
                table.observe(round(num_bytes / num), seconds / num, self.clock())
        self._copied = (copy(ways[0]), copy(ways[1]))

    def kv_token_s(self) -> tuple[float, float, float | None]:
        """Of a token's KV: seconds from host memory to the device, from disk to host memory, and from another node's; None: nobody is asked.

        As measured lately, else as is assumed of any machine. What other nodes have not is computed instead. From any thread.
        """
        namespace, store = self._namespace, self.store
        if namespace is None or store is None:
            return 0.0, 0.0, None
        token_bytes = namespace.shape.block_bytes / namespace.block_size_tokens
        fetch_s = None
        if self.peering is not None and (peers := self.peering.snapshot()).is_on:
            fetch_s = token_bytes / (peers.bytes_per_s or PRIOR_PEER_BYTES_PER_S)
            fetch_s += (1 - peers.share_found) * (self.prefill_s_per_token() or 0.0)
        device_s = token_bytes / self._in_bytes_per_s()
        return device_s, token_bytes / store.disk_bytes_per_s(), fetch_s

    def way_counts(self) -> dict[str, int]:
        """Of requests that were preempted: `predicted:` and then `preempted:` by the way back, as it was chosen and as it came to be."""
        return {f"predicted:{way}": num for way, num in list(self.chosen.items())} | {
            f"preempted:{way}": num for way, num in list(self.resumed.items())
        }

    def stats(self) -> TierStats | None:
        if self.store is None:
            return None
        stats = self.store.stats()
        stats.host.num_carried = self.num_carried
        if self.peering is not None:
            stats.peers = self.peering.snapshot()
        return stats


def find_tiers(name: str) -> KvTiers:
    """The tiers that a connector's configuration names. Raises SeamMoved where the worker is another process."""
    tiers = _known.get(name)
    if tiers is None:
        raise SeamMoved("KV tiers need the engine's worker in this process (one GPU, no tensor parallelism)")
    return tiers
