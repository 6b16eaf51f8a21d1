"""KV tiers of an emulated node: the connector, the core and the store that serve decide and keep account; only bytes and time are modelled.

The scheduler's side is `engine_bridge.driver.kv_connector.TieredConnector`, asked by vLLM's scheduler, over a real `kvtiers.store.KvStore` whose
slots hold no bytes. Its worker's side is modelled as on a GPU, where copies run beside the kernels. Layers are taken in pieces of several.

Loads: a step's pieces come over the device's link one after the other, beside the step's computation, as `wait_for_layer_load` has it: a piece is
computed when those before it are, and its KV has come. So a step that loads is as long as the slower of both makes it. Saves: copied out after
the step, over the link's other direction; the step does not wait for them, and they may be read when they have come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.emulated.virtual_io import VirtualIo
from bench.sim.core.clock import Clock
from bench.sim.core.links import SharedLink
from bench.sim.core.session_node import StepPrefill
from bench.sim.core.steps import StepCost
from engine_bridge.core.restores import StepMoves
from engine_bridge.driver.kv_tiers import KvTiers, TiersConfig
from engine_bridge.policy.costs import Link, PrefillCost, TablePrefill
from kvtiers.blocks import Save
from kvtiers.io.io_thread import IoThread
from kvtiers.keys import BlockKey, BlockShape, Namespace
from kvtiers.policy.eviction import ByValue, EvictionPolicy
from kvtiers.policy.restore import RestorePolicy
from kvtiers.store import KvStore

# Of layers, that move and leave host memory together. Chosen: twice the bands in which KV leaves it.
NUM_PIECES = 8

Done = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Of one node. policy, eviction: other than the ones that serve."""

    host_bytes: int
    policy: RestorePolicy | None = None
    eviction: EvictionPolicy | None = None


class HollowStore(KvStore):
    """The store that serves, with a byte for each slot in the place of its bytes."""

    def __init__(
        self, shape: BlockShape, host_bytes: int, io: IoThread, eviction: EvictionPolicy, clock: Clock
    ) -> None:
        num_slots = host_bytes // shape.layer_bytes
        super().__init__(
            BlockShape(shape.num_layers, 1), num_slots, io, None, eviction, clock=lambda: clock.now
        )
        self.shape = self._host.shape = shape
        self._host.stats.capacity_bytes = num_slots * shape.layer_bytes

    def check_at_rest(self) -> None:
        """Nothing is staged, saved or known to be in the engine. Raises AssertionError."""
        self.check_invariants()
        assert not self._host.live, "a group was never left"
        held = [block.key for block in self._host.blocks.values() if block.pins or block.is_unwritten]
        assert not held, f"{len(held)} blocks are held by nobody"


class EmulatedTiers(KvTiers):
    """In the place of what `engine_bridge.local_node` makes for an engine.

    Args:
        link: from host memory to the device; other copies may share it. Its like leads the other way.
    """

    def __init__(
        self,
        clock: Clock,
        sizes: TierSizes,
        cost: StepCost,
        block_tokens: int,
        step_tokens: int,
        link: SharedLink,
    ) -> None:
        config = TiersConfig(host_bytes=sizes.host_bytes)
        super().__init__(config, policy=sizes.policy, clock=lambda: clock.now)
        num_pieces = min(cost.model.num_layers, NUM_PIECES)
        shape = BlockShape(num_pieces, -(-block_tokens * cost.model.kv_bytes_per_token // num_pieces))
        self._io = VirtualIo(clock)
        self.hollow = self.store = HollowStore(
            shape, sizes.host_bytes, self._io, sizes.eviction or ByValue(), clock
        )
        self._namespace = Namespace(
            model=cost.model.name,
            revision="",
            dtype="",
            block_size_tokens=block_tokens,
            layout="",
            hash_algorithm="",
            shape=shape,
        )
        self.steps_clock, self.link_in = clock, link
        self.link_out = SharedLink(clock, link.bytes_per_s, link.setup_s)
        prefill: PrefillCost = StepPrefill(cost, step_tokens)
        self.use_costs(TablePrefill(cost.table, step_tokens) if cost.table is not None else prefill)
        rate = link.bytes_per_s
        self.use_link(Link(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate, setup_s=link.setup_s))

    def _close_store(self) -> None:
        """What waits for the disk is not written."""
        assert self._io is not None
        self._io.close()

    def ways_back(self) -> dict[str, Callable[..., Any]]:
        """What scheduling is told of requests that are preempted, as the live engine tells it."""
        return {"ways": self.way_counts, "swap_s": self.swap_s}

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of these that the tiers could bring."""
        return self.hollow.num_held([BlockKey(bytes(block_hash)) for block_hash in hashes]) if hashes else 0

    def run_step(self, moves: StepMoves, compute_s: float, ended: Done) -> None:
        """A step begins now that takes `compute_s` by itself."""
        _Step(self, moves, compute_s, ended).load()


class _Step:
    """The copies of one step, and when it ends."""

    def __init__(self, tiers: EmulatedTiers, moves: StepMoves, compute_s: float, ended: Done) -> None:
        self._tiers, self._moves, self._ended = tiers, moves, ended
        self._store, self._clock = tiers.hollow, tiers.steps_clock
        self._piece_s = compute_s / self._store.shape.num_layers
        self._num_came = 0
        self._computed_s = self._clock.now

    def load(self) -> None:
        """The next piece of all loads; after the last one the step only computes."""
        num_blocks = sum(len(load.block_ids) for load in self._moves.loads)
        num_left = self._store.shape.num_layers - self._num_came
        if not num_blocks or not num_left:
            self._clock.at(self._computed_s + num_left * self._piece_s, self._end)
            return
        num_bytes = num_blocks * self._store.shape.layer_bytes
        self._tiers.link_in.transfer(num_bytes, self._came, is_set_up=self._num_came > 0)

    def _came(self, now: float) -> None:
        self._computed_s = max(self._computed_s, now) + self._piece_s
        self._num_came += 1
        self.load()

    def _end(self, now: float) -> None:
        for load in self._moves.loads:
            self._store.release(load.stage)
        saves = [job.save for job in self._moves.saves]
        num_blocks = sum(len(save.blocks) for save in saves)
        if num_blocks:
            self._tiers.link_out.transfer(
                num_blocks * self._store.shape.block_bytes, lambda now: self._commit(saves)
            )
        self._ended(now)

    def _commit(self, saves: list[Save]) -> None:
        for save in saves:
            self._store.commit(save)
