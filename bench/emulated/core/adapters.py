"""Adapters of an emulated node: the core that serves decides (`engine_bridge/core/adapters/residency.py`), copies take their bytes over a link.

A request is gated as live until its adapter could be computed with; what becomes of a step that begins before its adapters' copies are whole,
`ColdStart` says. An adapter that leaves its slot is written into KV blocks that nobody needs, from host memory, slice by slice between the steps, as
the driver does it; from there a slot is filled within the device. Departs in that nothing is prefetched while a node is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.emulated.core.assist import ColdStart
from bench.emulated.core.clock import Clock
from bench.emulated.core.hardware import Gpu
from bench.emulated.core.links import SharedLink
from engine_bridge.core.adapters.adapter_moves import DropCopy, Fill, LoadToHost, Move, WriteCopy
from engine_bridge.core.adapters.adapter_worth import Worth
from engine_bridge.core.adapters.residency import AdapterPlaces, Rules
from engine_bridge.core.adapters.staging import NoPrefetch
from engine_bridge.driver.adapters.device_copies import DeviceCopies
from engine_bridge.driver.adapters.lent_blocks import BlockLoan, LentBlocks
from engine_bridge.policy.adapters.adapter_cache import PrefixFacts


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """The places where adapters of an emulated node may lie.

    Attributes:
        num_slots: adapters that steps compute with, each slot as large as the largest adapter, as on a GPU; 0: all adapters are there.
        policy: which adapter leaves first; None for no cache: an adapter leaves with its last request.
        cold_start: what happens to requests whose adapter is coming.
        in_kv: adapters are also kept in KV blocks that requests do not need.
        loads_are_free: a slot is filled in no time, as if every next use were known.
    """

    num_slots: int = 8
    policy: str | None = "adaptive"
    cold_start: ColdStart = "step waits"
    in_kv: bool = False
    loads_are_free: bool = False


class EmulatedAdapters:
    """The emulated counterpart of `engine_bridge.driver.adapters.residency.Residency`.

    Args:
        link: from host memory to the device.
        num_bytes: of each adapter; ids count from 1, as vLLM's do.
        on_moved: called when a slot can be computed with.
    """

    def __init__(
        self,
        clock: Clock,
        link: SharedLink,
        gpu: Gpu,
        num_bytes: Sequence[int],
        memory: AdapterMemory,
        running: Callable[[], set[int]],
        on_moved: Callable[[], None],
    ) -> None:
        self.link = link
        self._filled_bytes = 0
        # Room for twice as many adapters as there are, so that all are in host memory before the first request.
        rules = Rules(
            host_bytes=2 * sum(num_bytes),
            num_slots=memory.num_slots,
            step_room=memory.num_slots,
            cpu_assist=memory.cold_start == "host helps",
            fills_from_copies=memory.cold_start != "request waits",
        )
        worth = Worth(memory.policy or "lru", copy_bytes_per_s=self.link.bytes_per_s)
        self.core = AdapterPlaces(rules, worth, NoPrefetch())
        self._clock, self._gpu, self._num_bytes = clock, gpu, num_bytes
        self._keeps, self._loads_are_free = memory.policy is not None, memory.loads_are_free
        self._running, self._on_moved = running, on_moved
        self.blocks: CopiedAdapters | None = None
        """Where adapters lie that have left their slots; None where KV blocks are lent to none."""
        self._copies = self._copies_with(lambda num_blocks: PrefixFacts(0, 0.0, 0.0))
        for adapter_id, size in enumerate(num_bytes, 1):
            self.core.add(adapter_id, size, room=1, is_pinned=True, now=clock.now)
        while self.core.has_work(clock.now):
            self.advance(is_busy=False)

    def _copies_with(self, prefix_facts: Callable[[int], PrefixFacts]) -> DeviceCopies:
        device: Any = None  # only the bytes of weights lie on one
        return DeviceCopies(self.core, device, prefix_facts, lambda: self._clock.now)

    def use_blocks(self, pool: Any, block_bytes: int, prefix_facts: Callable[[int], PrefixFacts]) -> None:
        """Keep adapters that leave their slots in free KV blocks from now on."""
        copies = self._copies = self._copies_with(prefix_facts)
        judges = (copies.lost, copies.may_displace, copies.less_valuable_than_blocks, copies.first_to_go)
        self.blocks = CopiedAdapters(pool, block_bytes, *judges)
        copies.blocks = self.blocks  # type: ignore[assignment]  # takes sizes in place of weights

    # -- requests ------------------------------------------------------------------------------------------------------

    def requested(self, request_id: str, adapter_id: int) -> str:
        """Note that a request enters the engine. Return the place that its adapter would be taken from: `slot`, `cached` or `host`."""
        version = self.core.table[adapter_id]
        place = "cached" if version.slot is None and version.copy == "whole" else version.place
        self.core.requested(request_id, adapter_id, self._clock.now)
        self._copies.touch(adapter_id)
        return place

    def released(self, request_id: str, adapter_id: int) -> None:
        """Note that a request has ended."""
        self._do(self.core.released(request_id, adapter_id, self._clock.now))
        self._copies.touch(adapter_id)
        if not self._keeps and not self.core.table[adapter_id].requests:
            self._do(self.core.put_back(adapter_id, keeps_host=True))

    # -- as the scheduler asks -----------------------------------------------------------------------------------------

    def is_at_hand(self, adapter_id: int) -> bool:
        """Return whether a step could compute with the adapter, or soon can; see `AdapterPlaces.is_at_hand`."""
        return self.core.is_at_hand(adapter_id)

    def may_start(self, adapter_id: int) -> bool:
        """Return whether a request for the adapter may start: it is at hand, no other adapter's turn holds it back, and it has a slot's room.

        The questions come in the order of `Residency.may_start`. Asking about turns may begin one, so it comes before the question of room.
        """
        if not self.is_at_hand(adapter_id) or self.is_held_back(adapter_id):
            return False
        return self.core.has_room(adapter_id, self._running())

    def is_held_back(self, adapter_id: int) -> bool:
        """Return whether another adapter's turn holds this one back."""
        return self.core.turns.holds_back(adapter_id, self._running, self._clock.now)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def advance(self, is_busy: bool) -> float:
        """Move adapters between steps. Return the seconds that copying into KV blocks takes of the engine's thread."""
        now = self._clock.now
        self._do(self.core.advance(self._running(), now))
        self._do(self.core.copies_to_write(now))
        if not self.is_writing:
            return 0.0
        return self._write(self.core.copies.write_s(is_busy))

    @property
    def is_writing(self) -> bool:
        """Whether an adapter is being copied into KV blocks."""
        return self._copies.blocks.is_writing()

    def enter(self, adapter_ids: Collection[int]) -> None:
        """Begin a step with these adapters; it runs once it `may_run`."""
        self._do(self.core.enter(adapter_ids, self._running(), self._clock.now))

    def may_run(self, adapter_ids: Iterable[int]) -> bool:
        """Return whether each adapter's copy is whole, or a host helps until it is."""
        return not self._cold(adapter_ids) - self.assisted(adapter_ids)

    def assisted(self, adapter_ids: Iterable[int]) -> set[int]:
        """Return the adapters that the host computes now."""
        return {adapter_id for adapter_id in self._cold(adapter_ids) if self.core.is_assisted(adapter_id)}

    def _cold(self, adapter_ids: Iterable[int]) -> set[int]:
        return {adapter_id for adapter_id in adapter_ids if not self.core.table[adapter_id].is_filled}

    def counts(self) -> dict[str, int]:
        """Return counts since the start: `link_bytes` from host memory to the device, `most_copied_blocks` that copies lay in at once."""
        own = {"link_bytes": self._filled_bytes + self.core.counts["cache_bytes"]}
        if self.blocks is not None:
            own["most_copied_blocks"] = self.blocks.most_blocks
        return dict(self.core.counts) | own

    # -- moves ---------------------------------------------------------------------------------------------------------

    def _do(self, moves: Iterable[Move]) -> None:
        for move in moves:
            if isinstance(move, LoadToHost):
                size = self._num_bytes[move.adapter_id - 1]
                self._do(self.core.loaded(move.adapter_id, size, "disk", 1e-9, self._clock.now))
            elif isinstance(move, Fill):
                self._fill(move)
            elif isinstance(move, WriteCopy):
                self._write_copy(move)
            elif isinstance(move, DropCopy):
                self._copies.drop(move.adapter_id)

    def _fill(self, fill: Fill) -> None:
        size = self._num_bytes[fill.adapter_id - 1]

        def filled(now: float) -> None:
            """Note that the slot can be computed with."""
            self.core.filled(fill.adapter_id, fill.slot)
            self._do(self.core.laid_out(fill.adapter_id))
            self._on_moved()

        if self._loads_are_free:
            self._clock.at(self._clock.now, filled)
            return
        if fill.source == "host":
            self._filled_bytes += size
            self.link.transfer(size, filled)
            return
        self._copies.touch(fill.adapter_id)
        # Within the device each byte is read and written.
        self._clock.at(self._clock.now + 2 * size / self._gpu.achieved_bytes_per_s, filled)

    def _write_copy(self, move: WriteCopy) -> None:
        """Copy an adapter into free memory, else in the place of copies with less worth, as `Residency` does."""
        adapter_id = move.adapter_id
        size: Any = self._num_bytes[adapter_id - 1]
        if not self._copies.begin(adapter_id, size, is_ahead=move.is_ahead):
            drops = [] if move.is_ahead else self.core.copies.room_for(adapter_id, self._clock.now)
            self._do(drops)
            if not drops or not self._copies.begin(adapter_id, size, is_ahead=False):
                return
        if self._copies.blocks.holds(adapter_id):  # it lay there all the time
            self.core.copies.done(adapter_id)

    def _write(self, slice_s: float) -> float:
        writing = [version.id for version in self.core.table if version.copy == "writing"]
        num_bytes = self._copies.blocks.write(int(slice_s * self.link.bytes_per_s))
        for adapter_id in writing:
            if self._copies.blocks.holds(adapter_id):
                self.core.copies.done(adapter_id)
        self.core.counts["cache_bytes"] += num_bytes
        return num_bytes / self.link.bytes_per_s


@dataclass(slots=True, kw_only=True, eq=False)
class Copy(BlockLoan):
    """left_bytes: still to be written."""

    left_bytes: int

    @property
    def is_writing(self) -> bool:
        """Whether bytes are still to be written."""
        return self.left_bytes > 0

    def lose(self) -> None:
        """Give the blocks up."""
        self.is_lost, self.left_bytes = True, 0


class CopiedAdapters(LentBlocks[Copy]):
    """Adapters in KV blocks that requests do not need: the driver's loans of vLLM's own block pool, with modelled bytes.

    The emulated counterpart of `engine_bridge.driver.adapters.blocks.AdapterBlocks`. block_bytes: of one KV block, over all layers.
    """

    def __init__(self, pool: Any, block_bytes: int, *judges: Callable[..., Any]) -> None:
        super().__init__(pool, *judges)
        self.block_bytes = block_bytes
        self.most_blocks = 0
        """That adapters ever lay in at once."""

    def put(self, adapter_id: int, num_bytes: int) -> bool:
        """Begin to copy an adapter, which `write` continues. Return False if there is no memory that it may have."""
        if adapter_id in self._entries:
            return True
        is_lent = self.lend(
            adapter_id,
            -(-num_bytes // self.block_bytes),
            lambda blocks: Copy(adapter_id=adapter_id, blocks=blocks, left_bytes=num_bytes),
        )
        self.most_blocks = max(self.most_blocks, self.num_blocks)
        return is_lent

    def write(self, max_bytes: int) -> int:
        """Write at most this number of bytes of the copies under way; return how many were written."""
        left_bytes = max_bytes
        for copy in list(self._entries.values()):
            part = min(copy.left_bytes, left_bytes)
            copy.left_bytes -= part
            left_bytes -= part
        return max_bytes - left_bytes
