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

from engine_bridge.core.kv.kv_transfers import Restores
from engine_bridge.core.kv.step_moves import SaveJob, StepMoves
from engine_bridge.driver.kv.held_blocks import HeldBlocks
from engine_bridge.driver.kv.kv_namespace import namespace_of
from engine_bridge.policy.costs.costs import Copied, CopyTimes, Link, PrefillCost
from engine_bridge.policy.kv.kv_layout import KvLayout
from engine_bridge.policy.kv.restore_method import FullCost, SwapOrRecompute
from engine_bridge.protocol.errors import SeamMoved
from kvtiers.closing import going_on
from kvtiers.errors import KvTiersError
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.files import Files
from kvtiers.io.host_pool import HostPool
from kvtiers.io.inspect import bytes_beside, erase
from kvtiers.io.io_thread import IoThread
from kvtiers.keys import Namespace
from kvtiers.policy.eviction import ByValue
from kvtiers.policy.rates import Rate
from kvtiers.policy.restore import (
    PRIOR_HOST_BYTES_PER_S,
    PRIOR_PEER_BYTES_PER_S,
    FasterWins,
    RestorePolicy,
)
from kvtiers.stats import TierStats
from kvtiers.store import KvStore

if TYPE_CHECKING:
    from engine_bridge.cluster.peers import Peering
    from engine_bridge.driver.kv.layer_groups import LayerFacts
    from engine_bridge.driver.memory.block_copy import BlockCopier
    from engine_bridge.settings.profile import MachineProfile

log = logging.getLogger(__name__)

# Of what KV may take on disk: what others take beside it is told from there on. Chosen.
TOLD_SHARE = 1 / 8

# The speed of copies is reported for a copy of this many bytes. Chosen: a long conversation of a small model, where set-up hardly counts.
RATED_BYTES = 8 << 20

Waiter = Callable[[Callable[[], None]], object]
"""Runs a function on a thread that may block."""

_known: dict[str, KvTiers] = {}
_names = itertools.count()


class TiersConfig(Struct, frozen=True, kw_only=True):
    """Sizes of the tiers in bytes; 0 turns a tier off. The disk tier needs the host tier, through which all its blocks pass.

    Args:
        folder: the folder under which each model's KV has its own folder.
    """

    host_bytes: int
    disk_bytes: int = 0
    folder: Path | None = None


class RequestListener(Protocol):
    """A component that expects requests and hears of them on the engine thread. None of these methods raises."""

    def arrived(self, request: Any) -> None:
        """Note that a request has come to the scheduler."""

    def started(self, request: Any) -> None:
        """Note that a request has been given blocks."""

    def ended(self, request: Any) -> None:
        """Note that a request has finished."""

    def num_free_blocks(self) -> int:
        """Return how many blocks of the device no running request holds."""

    def close(self) -> None:
        """Give up everything that is expected: the engine closes."""


class KvTiers:
    """The state that the two halves of the connector and the driver share.

    Args:
        policy, files, clock: differ from the defaults in benches and tests only.
        peering: exchanges KV with other nodes; None: this node neither lends nor asks.
    """

    def __init__(
        self,
        config: TiersConfig,
        *,
        policy: RestorePolicy | None = None,
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
        """Whether some rows of the step under way differ from what their keys say: then nothing of the step is kept."""
        self.restores: Restores | None = None
        self.held: HeldBlocks | None = None
        """The device's blocks that copies hold; None before there is an engine."""
        self.on_progress: Callable[[], None] = lambda: None
        """Called on the I/O thread when staged KV has come: the engine may have a request to start."""
        self.has_progressed = False
        """Whether staged KV has come since this was last set to False."""
        self.listener: RequestListener | None = None
        self.arguments: dict[str, Any] = {}
        """Arguments of the engine that is built next: see `kv_namespace.arguments_that_count`."""
        self.layout: KvLayout | None = None
        """What a prefix needs of the engine's layers; None before there is an engine."""
        self.loads_must_hold = False
        """Whether a step may load only blocks of which all layers have come: see `engine_bridge.core.kv.restoring.Machine`."""
        self.is_off = False
        """Whether the engine reuses no KV: see `switch_off`."""
        self.is_paused = False
        """Whether nothing is loaded or saved because the engine is warming up with prompts that will not come again."""
        self.chosen: Counter[str] = Counter()
        """Counts of the ways by which requests were to get their KV back, as predicted when they were preempted."""
        self.resumed: Counter[str] = Counter()
        """Counts of how preempted requests got back what the device had lost: "swap", "split" (part of it) or "recompute"."""
        self.num_failed_loads = 0
        """Number of blocks that a step had counted on and that did not come; they were computed again."""
        self.num_carried = 0
        """Number of blocks that waiting requests got from host memory in pieces: see `HostStats`."""
        self._files = files or Files()
        self._namespace: Namespace | None = None
        self._io: IoThread | None = None
        self._prefill: PrefillCost | None = None
        self._prefill_rate: Rate | None = None
        rate = PRIOR_HOST_BYTES_PER_S
        self.copy_times = CopyTimes(Link(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate))
        """How long copies between host tier and device take: an assumption at first, corrected by each real copy."""
        self.link: Link | None = None
        """The link as measured while no request was there; None where it has not been measured."""
        self._copied = [Copied(), Copied()]
        self._moving: list[StepMoves] = []
        self.name = f"tiers-{next(_names)}"
        _known[self.name] = self

    # -- life --------------------------------------------------------------------------------------------------------

    def attach(
        self,
        layers: LayerFacts,
        layout: KvLayout,
        vllm_config: Any,
        make_copier: Callable[[HostPool, Waiter], BlockCopier],
        num_ranks: int = 1,
    ) -> None:
        """Take the cache of a newly built engine. Opens the store, or keeps it where the namespace is still the same.

        layers: how the cache is kept, on each rank. layout: what a prefix needs of the layers. make_copier: makes what copies between the host tier's
        memory and the device. num_ranks: how many processes share the engine's model and its cache. Raises OSError where the address for other nodes
        cannot be opened.
        """
        self._give_up_moves()
        self.layout = layout
        if layout.state_groups:
            log.info("KV is reused in whole blocks of %d tokens: recurrent layers", layout.unit_tokens)
        namespace = namespace_of(layers, layout, num_ranks, vllm_config, self.arguments)
        if namespace != self._namespace:
            self._close_store()
            self._open_store(namespace, is_shared=num_ranks > 1)
        assert self.store is not None and self._io is not None
        self._copied = [Copied(), Copied()]
        self.loads_must_hold = (
            not layout.is_divisible
            or num_ranks > 1
            or layers.device_type != "cpu"  # where all layers are loaded before a step
            or bool(vllm_config.scheduler_config.async_scheduling)
        )
        loop = self._io.loop
        self.copier = make_copier(
            self.store.pool, lambda run: loop.call_soon_threadsafe(loop.run_in_executor, None, run)
        )

    def detach(self) -> None:
        """Let go of an engine that is closed or has failed; stored KV stays."""
        if self.listener is not None:
            with going_on("advisories"):
                self.listener.close()
        if self.restores is not None and self.store is not None:
            with going_on("restores"):
                self.restores.close()
        self._give_up_moves()
        if self.copier is not None:
            with going_on("copies of KV"):
                self.copier.rest()
        self.listener = self.copier = self.restores = self.held = None
        if self.store is not None:
            self.store.leave_all()

    def switch_off(self, why: str) -> None:
        """Turn the tiers off: there is nothing to keep for the engine, or to lend. `why` is said in the log, once."""
        if not self.is_off:
            log.warning("the KV tiers are off: %s", why)
        self.is_off = True
        if self.peering is not None:
            self.peering.close()

    def hold_in(self, block_pool: Any) -> HeldBlocks:
        """Hold blocks of this pool, the engine's, while copies beside its steps read or write them."""
        self.held = HeldBlocks(block_pool, lambda: self.on_progress())
        return self.held

    def finish_copies(self) -> None:
        """Return when no copy holds blocks of the device any more, or when that takes too long."""
        if self.held is not None and self.copier is not None:
            self.held.finish(self.copier.ask)

    def begin_moves(self, moves: StepMoves) -> None:
        """Remember a scheduled step's loads and saves until `end_moves`. Blocks to save are held where they are copied beside the steps."""
        if moves.loads or moves.saves:
            self._moving.append(moves)
        if moves.saves and self.held is not None and self.copier is not None and self.copier.overlaps:
            moves.ended = self.held.hold(block_id for job in moves.saves for block_id in job.block_ids)

    def copy_out(self, job: SaveJob, then: Callable[[], None]) -> None:
        """Copy the blocks that are given away next to host memory, between two steps. Raises the copier's errors.

        job: the save, which is abandoned where the copy fails. then: called on the engine thread when no copy reads the blocks any more.
        """
        store, copier, held, moves = self.store, self.copier, self.held, StepMoves(saves=[job])
        assert store is not None and copier is not None and held is not None
        let_go: Callable[[], None] = lambda: settle(store, moves, is_right=False)  # noqa: E731
        moves.ended = held.hold(job.block_ids, lambda is_made: then(), go_first=True)
        self._moving.append(moves)
        try:
            for region in range(store.shape.num_layers):
                slots = [of_block[region] for of_block in job.save.slots]
                copier.to_host(region, job.block_ids, slots)
            copier.end_step(lambda: settle(store, moves, is_right=True), let_go)
        except BaseException:
            # What a device was asked to copy may still come: its host memory must have no other use before.
            copier.end_step(let_go, let_go)
            raise
        finally:
            self.end_moves(moves)
            held.advance()

    def end_moves(self, moves: StepMoves) -> None:
        """Forget a step that has ended: its host memory has been given back, or will be once the device has copied."""
        self._moving = [each for each in self._moving if each is not moves]

    def _give_up_moves(self) -> None:
        """Give back the host memory of steps that have not ended: their engine has failed in one of them, or is closed."""
        moving, self._moving = self._moving, []
        copier, store = self.copier, self.store
        if store is None or not moving:
            return

        def let_go() -> None:
            """Abandon the saves and release the loads of those steps."""
            for moves in moving:
                with going_on("a step of the failed engine"):
                    settle(store, moves, is_right=False)

        # A device may still be copying: that must not write to memory that has another use by then.
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

    def erase(self, tenant: str) -> int:
        """Erase all that a tenant has in host memory, on disk, and in stores of other models there; return the number of blocks on disk.

        Not on the engine's thread. Raises OSError.
        """
        num_blocks = self.store.erase(tenant) if self.store is not None else 0
        folder = self.config.folder
        return num_blocks + (
            erase(folder, tenant, skips_held=True) if folder is not None and folder.is_dir() else 0
        )

    def peer_address(self) -> str:
        """Return the address where other nodes may ask for KV from now on; "" if they may not. Raises OSError."""
        return self.peering.open() if self.peering is not None and not self.is_off else ""

    def _open_store(self, namespace: Namespace, *, is_shared: bool) -> None:
        self.peer_address()  # a wrong address stops the start before anything is open
        self._io = IoThread()
        disk, problem = None, None
        try:
            disk = self._open_disk(namespace)
        except (OSError, KvTiersError) as error:
            problem = f"the disk tier is off: {error}"
            log.error("%s; KV will not outlive this process", problem)
        self.store = KvStore(
            namespace.shape, self.config.host_bytes, self._io, disk, ByValue(), is_shared=is_shared
        )
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
        folder = namespace.folder_in(config.folder)
        disk = self._io.start(
            DiskLog.open(
                folder,
                namespace.fingerprint,
                namespace.shape,
                config.disk_bytes,
                files=self._files,
                describe=msgspec.json.format(msgspec.json.encode(namespace)),
            )
        ).result()
        tell_of_other_stores(folder, config.disk_bytes)
        return disk

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
        """The store; None while nothing is to be loaded or saved."""
        return None if self.is_paused else self.store

    @property
    def copies_beside(self) -> bool:
        """Whether blocks can be copied to the device beside the steps, while a step would wait for all that it loads."""
        return self.loads_must_hold and self.copier is not None and self.copier.overlaps

    def num_free_device_blocks(self) -> int:
        """Return how many device blocks no running request holds; 0 where nothing can be copied there between two steps."""
        return self.listener.num_free_blocks() if self.listener is not None and self.copier is not None else 0

    # -- measurements ------------------------------------------------------------------------------------------------

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note that a step computed `num_tokens` tokens in `seconds`."""
        if self._prefill_rate is None:
            self._prefill_rate = Rate(num_tokens / seconds)
        self._prefill_rate.note(num_tokens, seconds, self.clock())

    def use_costs(self, prefill: PrefillCost) -> None:
        """Let these costs of computing decide restores and the ways back of preempted requests, unless a policy was given."""
        if isinstance(self.policy, FasterWins):
            self.policy, self._prefill = FullCost(prefill=prefill), prefill

    def use_profile(self, profile: MachineProfile) -> None:
        """Use the measurements of this machine until its copies and its disk are seen at work."""
        if profile.copies is not None:
            self.use_link(profile.copies.link)
        if profile.disk is not None and self.store is not None:
            self.store.assume_disk_rate(profile.disk.read_bytes_per_s)

    def use_link(self, link: Link) -> None:
        """Predict copies with a link that has been measured, in place of the assumed one."""
        self.link, self.copy_times = link, CopyTimes(link)

    def swap_or_recompute(self) -> SwapOrRecompute | None:
        """Return what each way back of a preempted request takes, by the costs as they are now; None where a policy was given."""
        if self._prefill is None or self._namespace is None:
            return None
        self.hear_copies()
        now, namespace = self.clock(), self._namespace
        return SwapOrRecompute(
            self._prefill,
            namespace.block_size_tokens,
            lambda num_bytes: self.copy_times.back.copy_s(num_bytes, now),
        )

    def prefill_s_per_token(self) -> float | None:
        """Return the seconds that computing a token of a prompt takes; None before the first prefill."""
        return 1 / self._prefill_rate.at(self.clock()) if self._prefill_rate is not None else None

    def host_bytes_per_s(self) -> float:
        """Return the speed of copies to the device in bytes per second, by the time that the copying itself takes."""
        self.hear_copies()
        return self._in_bytes_per_s()

    def _in_bytes_per_s(self) -> float:
        return RATED_BYTES / self.copy_times.back.copy_s(RATED_BYTES, self.clock())

    def hear_copies(self) -> None:
        """Learn from the copies made since the last call. Several copies count as that number of copies of their mean size."""
        if self.copier is None or self.store is None:
            return
        ways = (self.copier.out, self.copier.back)
        tables = (self.copy_times.out, self.copy_times.back)
        for way, (table, before, now) in enumerate(zip(tables, self._copied, ways, strict=True)):
            if now.num_copies > before.num_copies:
                self._copied[way] = copy(now)
                made = self._copied[way].since(before)
                num = made.num_copies / self.store.shape.num_layers
                table.observe(round(made.num_bytes / num), made.seconds / num, self.clock())

    def kv_token_s(self) -> tuple[float, float, float | None]:
        """Return the seconds that moving a token's KV takes: from host memory to the device, from disk to host memory, and from another node.

        The last is None where no other node is asked. Values are as measured lately, else as assumed of any machine. The third includes computing
        what other nodes turn out not to have. From any thread.
        """
        namespace, store = self._namespace, self.store
        if namespace is None or store is None:
            return 0.0, 0.0, None
        token_bytes = namespace.shape.block_bytes * (self.layout.blocks_per_token if self.layout else 0.0)
        fetch_s = None
        if self.peering is not None and (peers := self.peering.snapshot()).is_on:
            fetch_s = token_bytes / (peers.bytes_per_s or PRIOR_PEER_BYTES_PER_S)
            fetch_s += (1 - peers.share_found) * (self.prefill_s_per_token() or 0.0)
        device_s = token_bytes / self._in_bytes_per_s()
        return device_s, token_bytes / store.disk_bytes_per_s(), fetch_s

    def way_counts(self) -> dict[str, int]:
        """Return counts of preempted requests: `predicted:` and the way back as chosen, `preempted:` and the way back as taken."""
        return {f"predicted:{way}": num for way, num in list(self.chosen.items())} | {
            f"preempted:{way}": num for way, num in list(self.resumed.items())
        }

    def stats(self) -> TierStats | None:
        """Return the tiers' figures; None while no store is open."""
        if self.store is None:
            return None
        stats = self.store.stats()
        stats.host.num_carried = self.num_carried
        if self.peering is not None:
            stats.peers = self.peering.snapshot()
        return stats


def settle(store: KvStore, moves: StepMoves, *, is_right: bool) -> None:
    """Commit the saves of a step that has copied, or abandon them unless `is_right`, and release its loads' host memory. From any thread.

    store: the store of these saves and loads. By the time a device has copied, the tiers may have another store, or none.
    """
    for job in moves.saves:
        if is_right:
            store.commit(job.save)
        else:
            store.abandon(job.save)
    for load in moves.loads:
        store.release(load.stage)
    moves.ended(is_right)


def find_tiers(vllm_config: Any) -> KvTiers:
    """Return the tiers that the connector of an engine's configuration names. Raises SeamMoved outside of the engine's own process."""
    tiers = _known.get(vllm_config.kv_transfer_config.kv_connector_extra_config["tiers"])
    if tiers is None:
        raise SeamMoved("the KV tiers are not in this process")
    return tiers


def tell_of_other_stores(folder: Path, disk_bytes: int) -> None:
    """Log how much KV beside a store nothing uses now: after an upgrade, or with another model, a new store begins and the old one stays.

    Args:
        folder: the store's own.
        disk_bytes: what it may take.
    """
    try:
        others = bytes_beside(folder)
    except OSError as error:
        log.info("what other stores beside %s take is not known: %s", folder, error.strerror)
        return
    if others > disk_bytes * TOLD_SHARE:
        log.info(
            "%.1f GiB of KV in %s are of other models, or of this one as it was served before: they stay until `overture kv prune` "
            "removes them, while the server is stopped",
            others / (1 << 30),
            folder.parent,
        )
