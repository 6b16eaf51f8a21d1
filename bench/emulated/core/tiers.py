"""KV tiers of an emulated node: the connector, the core and the store that serve decide and keep account; only bytes and time are modelled.

The scheduler's side is `engine_bridge.driver.kv.kv_connector.TieredConnector`, asked by vLLM's scheduler, over a real `kvtiers.store.KvStore` whose
slots hold no bytes. Its worker's side is modelled as on a GPU, where copies run beside the kernels. Layers are taken in pieces of several.

Loads: a step's pieces come over the device's link one after the other, beside the step's computation, as `wait_for_layer_load` has it: a piece is
computed when those before it are, and its KV has come. So a step that loads is as long as the slower of both makes it. Saves: copied out after
the step, over the link's other direction; the step does not wait for them, and they may be read when they have come. Promotions: copies that
`engine_bridge.driver.kv.promoter.Promoter` begins between steps; no step waits for them. Blocks that are copied after a step are held meanwhile.

A step that counts on layers which the disk still reads waits for them, up to the live engine's limit, then has the rest computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.emulated.core.clock import Clock, Event
from bench.emulated.core.disk import EmulatedDisk
from bench.emulated.core.links import DeviceNoise, InTurn, NoisyLink, SharedLink
from bench.emulated.core.steps import StepCost, StepPrefill
from bench.emulated.core.virtual_io import VirtualIo
from engine_bridge.core.kv.restoring import LoadBlocks
from engine_bridge.core.kv.step_moves import StepMoves
from engine_bridge.driver.engine.absent import Idle
from engine_bridge.driver.kv.kv_connector import LAYER_TIMEOUT_S
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig, settle
from engine_bridge.driver.kv.last_saves import LastSaves, num_leaving
from engine_bridge.driver.kv.promoter import Promoter
from engine_bridge.driver.scheduling.seam import GatedScheduler
from engine_bridge.policy.costs.costs import Copied, Link, PrefillCost, TablePrefill
from engine_bridge.policy.kv.kv_layout import one_group
from engine_bridge.protocol.node import ADVISORY_ENDS, Advisory, AdvisoryReport
from kvtiers.keys import BlockKey, BlockShape, Namespace
from kvtiers.policy.eviction import ByValue, Lru
from kvtiers.policy.restore import RestorePolicy
from kvtiers.store import KvStore

# Of layers, that move and leave host memory together. Chosen: twice the bands in which KV leaves it.
NUM_PIECES = 8

Done = Callable[[set[int]], None]


@dataclass(frozen=True, slots=True)
class TierSizes:
    """The tiers of one node.

    Attributes:
        disk_bytes_per_s: each way; None for no disk.
        is_plain: whether host memory is as vLLM's own: the block used longest ago leaves first, whatever the device has, and is written once.
    """

    host_bytes: int
    disk_bytes_per_s: float | None = None
    policy: RestorePolicy | None = None
    is_plain: bool = False


class HollowStore(KvStore):
    """The store that serves, with a byte for each slot in the place of its bytes."""

    def __init__(self, shape: BlockShape, sizes: TierSizes, io: VirtualIo, clock: Clock) -> None:
        num_slots, rate = sizes.host_bytes // shape.layer_bytes, sizes.disk_bytes_per_s
        self.disk = EmulatedDisk(clock, io.loop, rate, shape) if rate is not None else None
        super().__init__(
            BlockShape(shape.num_layers, 1),
            num_slots,
            io,
            self.disk,  # type: ignore[arg-type]  # asks the same of it as of a log of files
            Lru() if sizes.is_plain else ByValue(),
            clock=lambda: clock.now,
        )
        if rate is not None:
            self.assume_disk_rate(rate)
        self.shape = self._host.shape = shape
        self._host.stats.capacity_bytes = num_slots * shape.layer_bytes

    def place(self, group: str, keys: Sequence[BlockKey]) -> None:
        """Put KV of earlier times on the disk, and in memory if there is room without an eviction."""
        if self.pool.num_free >= len(keys) * self.shape.num_layers:
            for block in self.begin_save(group, keys).blocks:
                block.ready = self.shape.num_layers
                self._host.unpin(block)
        if self.disk is not None:
            self.disk.keep(keys)

    def check_at_rest(self) -> None:
        """Raise AssertionError if anything is staged, being saved or known to be in the engine."""
        self.check_invariants()
        assert not self._host.live, "a group was never left"
        held = [block.key for block in self._host.blocks.values() if block.pins or block.is_unwritten]
        assert not held, f"{len(held)} blocks are held by nobody"


class EmulatedCopier:
    """The emulated counterpart of `engine_bridge.driver.memory.block_copy.CudaCopier`, for copies between steps."""

    overlaps = True

    def __init__(self, link: SharedLink, link_out: InTurn, layer_bytes: int) -> None:
        self.out, self.back = Copied(), Copied()
        """Empty where copies take what the link says: then it is known."""
        self._link, self._link_out, self._layer_bytes = link, link_out, layer_bytes
        self._num_layers = self._num_out = 0

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Note a copy for the next `end_step`."""
        self._num_out += len(blocks)

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Note a copy for the next `end_step`."""
        self._num_layers += len(blocks)

    def end_step(self, then: Callable[[], None], failed: Callable[[], None]) -> None:
        """Start all copies noted since the last call. then: called when they have been made."""
        num_out, num_back = self._num_out, self._num_layers
        self._num_out = self._num_layers = 0
        if num_out:
            self._link_out.transfer(num_out * self._layer_bytes, lambda now: then())
        else:
            self._link.transfer(num_back * self._layer_bytes, lambda now: then())

    def ask(self) -> None:
        """Do nothing: the clock tells."""


class EmulatedTiers(KvTiers):
    """The emulated counterpart of the tiers that `engine_bridge.local_node` makes for an engine.

    Args:
        link: from host memory to the device; other copies may share it. A second link like it leads the other way.
        noise: of copies, where the link has it.
    """

    def __init__(
        self,
        clock: Clock,
        sizes: TierSizes,
        cost: StepCost,
        block_tokens: int,
        step_tokens: int,
        link: SharedLink,
        noise: DeviceNoise | None = None,
    ) -> None:
        config = TiersConfig(host_bytes=sizes.host_bytes)
        super().__init__(config, policy=sizes.policy, clock=lambda: clock.now)
        num_pieces = min(cost.model.num_layers, NUM_PIECES)
        shape = BlockShape(num_pieces, -(-block_tokens * cost.model.kv_bytes_per_token // num_pieces))
        self._io = io = VirtualIo(clock)
        self.hollow = self.store = HollowStore(shape, sizes, io, clock)
        self.store.on_progress = self._on_progress
        self._namespace = Namespace(
            model=cost.model.name,
            revision="",
            computation="",
            dtype="",
            block_size_tokens=block_tokens,
            layout="",
            hash_algorithm="",
            hash_seed="",
            shape=shape,
        )
        self.steps_clock, self.link_in = clock, link
        self.link_out = SharedLink(clock, link.bytes_per_s, link.setup_s)
        if noise is not None and isinstance(link, NoisyLink):
            self.link_out = NoisyLink(clock, link.bytes_per_s, link.setup_s, noise.out, num_pieces)
        self.out = InTurn(self.link_out)
        self.copies = EmulatedCopier(link, self.out, shape.layer_bytes)
        self.copier = self.copies
        if isinstance(self.link_out, NoisyLink) and isinstance(link, NoisyLink):
            self.copies.out, self.copies.back = self.link_out.copied, link.copied
        self.advised: Counter[str] = Counter()
        """Advisories by how they ended."""
        self._num_advised = 0
        self.layout, self.loads_must_hold = one_group(block_tokens), True
        self._is_plain = sizes.is_plain
        self._step: _Step | None = None
        prefill: PrefillCost = StepPrefill(cost, step_tokens)
        self.use_costs(TablePrefill(cost.table, step_tokens) if cost.table is not None else prefill)
        rate = link.bytes_per_s
        self.use_link(Link(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate, setup_s=link.setup_s))

    def _close_store(self) -> None:
        assert self._io is not None
        self._io.close()

    def _on_progress(self) -> None:
        if self._step is not None:
            self._step.load()
        super()._on_progress()

    def serve(self, scheduler: GatedScheduler, wake: Callable[[], None]) -> None:
        """Promote KV for this scheduler, whose connector leads here. wake: called when there is something to look at."""
        pool = scheduler.kv_cache_manager.block_pool
        self.hold_in(pool)
        self.promoter = Promoter(pool, self, scheduler.get_request_counts, self.clock)
        self.listener, self.on_progress = self.promoter, wake
        self.last_saves = (
            LastSaves(pool, self, num_leaving(scheduler, self.layout)) if not self._is_plain else Idle()
        )

    def advise(self, session: str, arrival_s: float | None, priority: int, probability: float) -> str:
        """Announce a request of a session for `arrival_s` seconds from now or later; None: at an unknown time. Return the advisory's id."""
        self._num_advised += 1
        advisory = Advisory(
            advisory_id=str(self._num_advised),
            session_id=session,
            expected_arrival_s=arrival_s,
            priority=priority,
            probability=probability,
        )
        self.promoter.advise(advisory, (), None, self._note)
        return advisory.advisory_id

    def _note(self, report: AdvisoryReport) -> None:
        if report.state in ADVISORY_ENDS:
            self.advised[report.state] += 1

    def wait_s(self) -> float | None:
        """Return the seconds until there is something to promote; None: until something comes."""
        return 0.0 if self.promoter.has_work() else self.promoter.wait_s()

    def take_over(self) -> None:
        """Give back the blocks of copies that have been made, as the driver does before each step."""
        if self.held is not None:
            self.held.advance()

    def run_step(self, moves: StepMoves, compute_s: float, ended: Done) -> None:
        """Run a step; by itself it takes `compute_s`. ended: called at its end with the device's blocks that did not come in time."""

        def end(failed: set[int]) -> None:
            """End the step."""
            self._step = None
            self.num_failed_loads += len(failed)
            ended(failed)

        self.end_moves(moves)
        self._step = _Step(self, moves, compute_s, end)
        self._step.load()


class _Step:
    """The copies of one step, and when it ends."""

    def __init__(self, tiers: EmulatedTiers, moves: StepMoves, compute_s: float, ended: Done) -> None:
        self._tiers, self._moves, self._ended = tiers, moves, ended
        tiers.hear_copies()
        self._store, self._clock = tiers.hollow, tiers.steps_clock
        self._piece_s = compute_s / self._store.shape.num_layers
        self._num_came = 0
        self._is_moving = False
        self._patience: Event | None = None
        self._failed: set[int] = set()
        self._computed_s = self._clock.now

    def load(self) -> None:
        """Load the next piece of all loads if it is in host memory; after the last one only compute. Called when anything has come."""
        if self._is_moving or self._is_reading():
            return
        self._is_moving = True
        self._cut()
        num_blocks = sum(len(load.block_ids) for load in self._moves.loads)
        num_left = self._store.shape.num_layers - self._num_came
        if not num_blocks or not num_left:
            self._clock.at(max(self._computed_s, self._clock.now) + num_left * self._piece_s, self._end)
            return
        num_bytes = num_blocks * self._store.shape.layer_bytes
        self._tiers.link_in.transfer(num_bytes, self._came, is_set_up=self._num_came > 0)

    def _is_reading(self) -> bool:
        """Return whether the disk still owes some of the next piece, and waiting for it has not taken too long."""
        if self._num_came == self._store.shape.num_layers or not any(map(self._lacks, self._moves.loads)):
            return False
        if self._patience is None:
            self._patience = self._clock.at(self._clock.now + LAYER_TIMEOUT_S, self._give_up)
        return self._patience.action is not None

    def _lacks(self, load: LoadBlocks) -> bool:
        blocks = [load.stage.blocks[position] for position in load.positions]
        return not load.is_whole and any(
            block.ready <= self._num_came and not block.is_bad for block in blocks
        )

    def _give_up(self, now: float) -> None:
        assert self._patience is not None
        self._patience.cancel()
        self.load()

    def _cut(self) -> None:
        """Leave out the blocks that have not come by now, with all behind them."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        for load in self._moves.loads:
            if load.is_whole or not load.positions or self._num_came == self._store.shape.num_layers:
                continue
            num_wanted = load.positions[-1] + 1
            num_ready = self._store.wait_for_layer(load.stage, num_wanted, self._num_came, 0.0)
            self._failed.update(load.cut(num_ready))

    def _came(self, now: float) -> None:
        self._computed_s = max(self._computed_s, now) + self._piece_s
        self._num_came += 1
        self._is_moving = False
        self.load()

    def _end(self, now: float) -> None:
        moves = self._moves
        for load in moves.loads:
            self._store.release(load.stage)
        num_blocks = sum(len(job.save.blocks) for job in moves.saves)
        if num_blocks:
            # KV that was computed on KV which did not come is wrong.
            saved, is_right = StepMoves(saves=moves.saves, ended=moves.ended), not self._failed
            num_bytes = num_blocks * self._store.shape.block_bytes
            self._tiers.out.transfer(num_bytes, lambda now: settle(self._store, saved, is_right=is_right))
        self._ended(self._failed)
