"""One request's KV in host memory: all of it at once, or, where that would fill much of the host tier, one piece after the other.

A piece goes to the device between two steps, as ordinary prefix cache, while the next one is read, and makes room for the one after that. So a late
request takes a quarter of the host tier, however long its conversation is. Other requests' blocks there stay, and even a conversation that is
larger than the host tier is read. The last pieces are loaded by the step in which the request starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from engine_bridge.core.kv.cache_moves import NULL_BLOCK_ID, Copy
from engine_bridge.core.kv.tier_store import TierStore
from engine_bridge.policy.kv.kv_layout import BlockAt, Entry
from kvtiers.blocks import Origin, Stage, StageProgress
from kvtiers.policy.restore import RestoreFacts

# The share of the host tier that one piece takes, and how many pieces a request has there: one goes to the device while the other is read. Chosen.
PIECE_OF_HOST, PIECES_AT_ONCE = 0.125, 2
# Seconds that copying a piece to the device between two steps may take: other requests wait for their next token meanwhile. Chosen.
COPY_S = 0.015
# Seconds by which a step's loads may hold up the requests that run, where all is loaded before a step. Chosen: a tenth of a step of a large model.
STEP_WAIT_S = 0.001


class RestoreCosts(Protocol):
    """The facts beside its own by which a restore is decided."""

    @property
    def loads_must_hold(self) -> bool:
        """Whether a load must not fail, so that a step loads only blocks of which all layers have come.

        So it is where the engine schedules a step before it knows what the step before has loaded, and where it gives up blocks that an attention
        window has left: computing again from a block in the middle would need the blocks before it.
        """

    @property
    def copies_beside(self) -> bool:
        """Whether blocks can be copied to the device beside the steps, while a step would wait for all that it loads."""

    def prefill_s_per_token(self) -> float | None:
        """Return the seconds to compute one token's KV; None before that was measured."""

    def host_bytes_per_s(self) -> float:
        """Return the speed of copies between host memory and device."""


@dataclass(slots=True)
class LoadBlocks:
    """The blocks at `positions` of a stage go to the device's `block_ids` in the next step. The code that copies them releases the stage.

    Attributes:
        is_whole: whether all layers are in host memory, so that the copy waits for none.
    """

    stage: Stage
    positions: list[int]
    block_ids: list[int]
    is_whole: bool

    def cut(self, num_blocks: int) -> list[int]:
        """Load only the blocks that lie in the stage's first `num_blocks`. Return the device's blocks that are left out."""
        num_left = bisect_left(self.positions, num_blocks)
        left_out = self.block_ids[num_left:]
        del self.positions[num_left:], self.block_ids[num_left:]
        return left_out


class Behind(NamedTuple):
    """Blocks of a request that the tiers hold and that are not staged yet; `read_bytes` of them are not in host memory."""

    num_blocks: int = 0
    read_bytes: int = 0


NOTHING = Behind()


class Whole(NamedTuple):
    """Blocks that add `num_tokens` to what the device has, and are of no use without one another."""

    num_tokens: int
    blocks: Sequence[BlockAt]


@dataclass(slots=True)
class Restore:
    """Stages of a request's blocks from `first` on, one behind the other. The device has the leading `num_skipped` of these blocks by now.

    Attributes:
        whole: where the blocks are of use together only, all of them; they are one stage then, and count as one block, however many they are.
        later: the blocks that follow in further pieces.
        carried: for the blocks before `first` that went to the device in pieces, where each was found.
        asked_at: the first block of the latest copy that was asked for, if any was; num_asked: how often it was asked for.
    """

    stages: list[Stage]
    first: int
    whole: Whole | None = None
    num_skipped: int = 0
    later: Behind = NOTHING
    carried: list[Origin] = field(default_factory=list)
    asked_at: int = -1
    num_asked: int = 0

    @property
    def end(self) -> int:
        """The index of the request's block behind the staged ones."""
        return self.first + sum(len(stage.blocks) for stage in self.stages)

    def block_tokens(self, unit_tokens: int) -> int:
        """Return the tokens of one block. unit_tokens: of a block that is of use by itself."""
        return self.whole.num_tokens if self.whole is not None else unit_tokens

    def is_damaged(self, store: TierStore) -> bool:
        """Return whether blocks that are of use together only will not all come."""
        return self.whole is not None and store.progress(self.stages[0]).num_blocks < len(self.whole.blocks)

    @property
    def is_in_pieces(self) -> bool:
        """Whether the restore is more than one stage."""
        return self.later.num_blocks > 0 or len(self.stages) > 1

    @property
    def origins(self) -> list[Origin]:
        """The tier or peer where each of the staged blocks was found."""
        return [origin for stage in self.stages for origin in stage.origins]

    def carried_before(self, first: int) -> list[Origin]:
        """Return `carried` for a restore that replaces this one and begins at another block, as the device has lost or gained some blocks."""
        if first < self.first:
            return self.carried[: max(len(self.carried) - (self.first - first), 0)]
        return self.carried + (self.origins[: first - self.first] if self.asked_at >= 0 else [])

    def progress(self, store: TierStore) -> StageProgress:
        """Return the progress of all blocks that are staged or follow, as if they were one stage."""
        parts = [store.progress(stage) for stage in self.stages]
        if self.whole is not None:
            return _as_one(parts[0], len(self.whole.blocks))
        if len(parts) == 1 and not self.later.num_blocks:
            return parts[0]
        behind = sum(part.disk_bytes_left for part in parts[1:])
        # A stage that is read completely says nothing about the disk any more, however long ago that was.
        reading = next((part for part in parts if part.num_ready_blocks < part.num_blocks), None)
        return replace(
            reading or parts[0],
            num_blocks=self.later.num_blocks + sum(part.num_blocks for part in parts),
            num_ready_blocks=_num_ready(parts),
            num_ready_layers=0 if self.later.num_blocks else min(part.num_ready_layers for part in parts),
            waited_s=reading.waited_s if reading is not None else 0.0,
            disk_bytes_left=parts[0].disk_bytes_left + behind + self.later.read_bytes,
            disk_bytes_ahead=max(parts[0].disk_bytes_ahead - behind, 0),
        )

    def facts(
        self, store: TierStore, machine: RestoreCosts, num_tokens: int, block_size: int
    ) -> RestoreFacts:
        """Return the facts by which a policy chooses to load, to wait or to compute.

        store: holds the stages. machine: its measured speeds. num_tokens: of the prompt, and of the output that was generated before a preemption.
        block_size: tokens in a block that is of use by itself.
        """
        progress, block_tokens = self.progress(store), self.block_tokens(block_size)
        return RestoreFacts(
            num_blocks=progress.num_blocks - self.num_skipped,
            num_ready_blocks=max(progress.num_ready_blocks - self.num_skipped, 0),
            num_tail_tokens=num_tokens - self.first * block_size - progress.num_blocks * block_tokens,
            num_context_tokens=(self.first + self.num_skipped) * block_size,
            block_size_tokens=block_tokens,
            block_bytes=store.shape.block_bytes * (len(self.whole.blocks) if self.whole is not None else 1),
            num_layers=store.shape.num_layers,
            num_ready_layers=0 if machine.loads_must_hold else progress.num_ready_layers,
            disk_bytes_done=progress.disk_bytes_done,
            disk_bytes_left=progress.disk_bytes_left,
            disk_bytes_ahead=progress.disk_bytes_ahead,
            waited_s=progress.waited_s,
            prefill_s_per_token=machine.prefill_s_per_token(),
            disk_bytes_per_s=progress.disk_bytes_per_s,
            host_bytes_per_s=machine.host_bytes_per_s(),
            is_from_peer=progress.is_from_peer,
        )

    def most_to_load(self, facts: RestoreFacts, machine: RestoreCosts) -> int:
        """Return the number of blocks that a step can load now, whatever a policy decides. Blocks of further pieces have no memory yet."""
        is_all = machine.loads_must_hold or self.whole is not None
        return facts.num_ready_blocks if is_all else self.end - self.first - self.num_skipped

    def go_on(self, store: TierStore, stage_piece: Callable[[int, int], tuple[Stage, Behind]]) -> bool:
        """Release the pieces that the device has by now, and have more read. Return False if host memory has room for no piece.

        stage_piece: given the first of the request's blocks and their number, stages these, and returns the stage and the blocks behind it.
        """
        while self.stages and self.num_skipped >= len(self.stages[0].blocks):
            stage = self.stages.pop(0)
            num_blocks = len(stage.blocks)
            self.first, self.num_skipped = self.first + num_blocks, self.num_skipped - num_blocks
            self.carried += stage.origins
            store.release(stage)
        if not self.stages:  # the device has still more blocks by now
            num_left = max(self.later.num_blocks - self.num_skipped, 0)
            self.later = self.later._replace(num_blocks=num_left)
            self.first, self.num_skipped = self.first + self.num_skipped, 0
        while self.later.num_blocks and len(self.stages) < PIECES_AT_ONCE:
            stage, behind = stage_piece(self.end, min(piece_blocks(store), self.later.num_blocks))
            if not stage.blocks:
                store.release(stage)
                break
            self.stages.append(stage)
            self.later = behind
        self._cut_at_damage(store)
        return bool(self.stages) or not self.later.num_blocks

    def _cut_at_damage(self, store: TierStore) -> None:
        """Release the stages behind a block that cannot be read: they are of no use."""
        for index, stage in enumerate(self.stages):
            if store.progress(stage).num_blocks < len(stage.blocks):
                for behind in self.stages[index + 1 :]:
                    store.release(behind)
                del self.stages[index + 1 :]
                self.later = NOTHING
                return

    def next_copy(
        self,
        entries: Callable[[], Sequence[Entry]],
        store: TierStore,
        machine: RestoreCosts,
    ) -> Copy | None:
        """Return a copy of the ready blocks of the first piece: of all of them where no request waits for it, else of what may be copied at once.

        Returns:
            None if no block is ready, or if all blocks are: then the request's own step loads them.
        """
        if not self.is_in_pieces or not self.stages:
            return None
        parts = [store.progress(stage) for stage in self.stages]
        is_all_there = all(part.num_ready_blocks == part.num_blocks for part in parts)
        num_ready = parts[0].num_ready_blocks - self.num_skipped
        if num_ready <= 0 or (is_all_there and not self.later.num_blocks):
            return None
        start = self.first + self.num_skipped
        num_blocks = max(int(COPY_S * machine.host_bytes_per_s() / store.shape.block_bytes), 1)
        if machine.copies_beside:
            num_blocks = num_ready
        self.num_asked = self.num_asked + 1 if start == self.asked_at else 1
        self.asked_at = start
        sources = self.stages[0].blocks[self.num_skipped : self.num_skipped + min(num_ready, num_blocks)]
        return Copy(entries(), start, sources)

    def whole_copy(self, entries: Sequence[Entry], num_blocks: int) -> Copy:
        """Return a copy of the next `num_blocks`, which are ready, to the device before the request starts: only the request waits for it."""
        self.asked_at = start = self.first + self.num_skipped
        sources = [block for stage in self.stages for block in stage.blocks]
        return Copy(entries, start, sources[self.num_skipped : self.num_skipped + num_blocks])

    def loads(
        self,
        block_ids: Sequence[Sequence[int]],
        num_blocks: int,
        store: TierStore,
        state_groups: Collection[int] = frozenset(),
    ) -> list[LoadBlocks]:
        """Load the leading `num_blocks` beyond the device's own into the request's `block_ids`, a list for each group of layers.

        Stages that are not needed are released. A state of `state_groups` goes to the request's last block as well: there the step computes with it,
        and the engine has made that copy before the step loads anything.
        """
        if self.whole is not None:
            (stage,), self.stages = self.stages, []
            targets = [
                (position, block_ids[group][at])
                for position, (group, index) in enumerate(self.whole.blocks)
                for at in ((index, -1) if group in state_groups else (index,))
            ]
            assert all(own_id != NULL_BLOCK_ID for _, own_id in targets), "the engine lacks a needed block"
            positions, own_ids = [list(each) for each in zip(*targets, strict=True)]
            return [LoadBlocks(stage, positions, own_ids, is_whole=True)]
        loads, at, skipped = [], self.first + self.num_skipped, self.num_skipped
        for stage in self.stages:
            num = min(len(stage.blocks) - skipped, num_blocks)
            if num > 0:
                is_whole = store.progress(stage).num_ready_blocks >= skipped + num
                positions = list(range(skipped, skipped + num))
                loads.append(LoadBlocks(stage, positions, list(block_ids[0][at : at + num]), is_whole))
            else:
                store.release(stage)
            at, num_blocks = at + max(num, 0), num_blocks - max(num, 0)
            skipped = max(skipped - len(stage.blocks), 0)
        self.stages = []
        return loads

    def release(self, store: TierStore) -> None:
        """Release all stages."""
        for stage in self.stages:
            store.release(stage)
        self.stages = []


class RestoreTurn:
    """The request whose restore goes in pieces, or did last. It keeps its turn while the engine asks for it, in every step or every other."""

    def __init__(self) -> None:
        self.holder = ""
        self._step = self._asked_in = 0

    def take(self, request_id: str) -> None:
        """Give the turn to this request."""
        self.holder, self._asked_in = request_id, self._step

    def ask(self, request_id: str) -> None:
        """Note that the engine would start this request."""
        if request_id == self.holder:
            self._asked_in = self._step

    def end_step(self) -> None:
        """Note that another step is scheduled from now on."""
        self._step += 1

    @property
    def is_kept(self) -> bool:
        """Whether the request that holds the turn makes progress.

        A request that has no place in the engine's plan does not, and may stand behind the ones that wait for it.
        """
        return self._step - self._asked_in <= 1


def piece_blocks(store: TierStore) -> int:
    """Return the number of blocks in one piece."""
    return max(int(store.num_host_blocks * PIECE_OF_HOST), 1)


def _as_one(progress: StageProgress, num_blocks: int) -> StageProgress:
    """Return the progress of `num_blocks` that are of use together only, as that of one block."""
    return replace(
        progress,
        num_blocks=int(progress.num_blocks == num_blocks),
        num_ready_blocks=int(progress.num_ready_blocks == num_blocks),
    )


def _num_ready(parts: Sequence[StageProgress]) -> int:
    """Return the number of leading blocks that are ready, over stages that follow one another."""
    num = 0
    for part in parts:
        num += part.num_ready_blocks
        if part.num_ready_blocks < part.num_blocks:
            break
    return num
