"""The KV that the tiers hold for requests: staged for a request that waits, loaded when it starts, and saved after each step.

A pure state machine: the driver tells what became of requests, and carries out the moves that `next_step` returns. Each stage is released exactly
once: here, or by the code that carries out the `LoadBlocks` that has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from engine_bridge.core.kv.asked import Known, NewRequest
from engine_bridge.core.kv.cache_moves import CopiesUnderWay, Copy
from engine_bridge.core.kv.restoring import (
    PIECES_AT_ONCE,
    STEP_WAIT_S,
    Behind,
    LoadBlocks,
    Restore,
    RestoreCosts,
    RestoreTurn,
    Whole,
    piece_blocks,
)
from engine_bridge.core.kv.saves import Saves
from engine_bridge.core.kv.sources import Sources, spoiled_blocks
from engine_bridge.core.kv.step_moves import StepMoves
from engine_bridge.core.kv.tier_store import TierStore, block_key, peer_to_ask
from engine_bridge.policy.kv.kv_layout import Entry, KvLayout, StateAt
from engine_bridge.policy.kv.restore_method import LossDecision, SwapOrRecompute, Way
from engine_bridge.policy.scheduling.preemption import is_still_right
from kvtiers.blocks import Stage
from kvtiers.keys import BlockKey
from kvtiers.policy.restore import Action, RestoreFacts, RestorePolicy, disk_s

# The sources of aborted requests are never asked for: this number, and twice the number of requests, are kept. Chosen.
MAX_SPARE_SOURCES = 64
# What a request may wait for beside other requests: the end of reads that no request wants any more, and its turn to be restored in pieces.
STOPPED_READS, TURN = "", " "
# The number of times that a request waits for others to give host memory back, a quarter of a second each time where measured, and the number of
# times that it has one piece copied which does not come to the device. Chosen: so no request waits for ever.
MAX_WAITS = 8
# How often a shorter prefix is looked for after blocks that a whole one needs did not come: mostly once, where a peer has less of a conversation, as
# what a peer has is not known before it has answered. Chosen.
MAX_REPLANS = 2


class Tiers(RestoreCosts, Protocol):
    """The part of a node's tiers that restores ask."""

    @property
    def policy(self) -> RestorePolicy:
        """The policy that chooses whether a request's KV is copied or computed again."""

    @property
    def chosen(self) -> Counter[str]:
        """How often each way to get KV back was chosen when a request was preempted, by its name."""

    @property
    def resumed(self) -> Counter[str]:
        """How often preempted requests continued, by the way their KV came back."""

    @property
    def usable_store(self) -> TierStore | None:
        """The store; None while no KV is to be loaded or saved."""

    def swap_or_recompute(self) -> SwapOrRecompute | None:
        """Return the policy that chooses a way by the costs as they are now; None where `policy` alone is to decide."""

    def num_free_device_blocks(self) -> int:
        """Return the number of device blocks that no running request holds; 0 where no copy can be made between two steps."""


class Restores:
    """Tracks what waits in the tiers for which request, and what the next step moves."""

    def __init__(self, tiers: Tiers, layout: KvLayout) -> None:
        self._tiers = tiers
        self._layout = layout
        self._block_size = layout.unit_tokens
        self.saves = Saves(layout)
        self._known: dict[str, Known] = {}
        self._sources: dict[str, Sources] = {}
        self._loads: list[LoadBlocks] = []
        self._starting: set[str] = set()  # the requests of these loads
        self._turn = RestoreTurn()
        self._in_pieces: set[str] = set()  # requests whose restore goes in pieces, or has
        self._copies: dict[str, Copy] = {}
        self._copying = CopiesUnderWay()  # of these by request

    # -- a request waits -----------------------------------------------------------------------------------------------

    @property
    def are_waiting(self) -> bool:
        """Whether requests wait for host memory through which their KV is restored."""
        return any(known.waits_for for known in self._known.values())

    def enter(self, request: NewRequest) -> None:
        """Note that a request is in the engine: its KV is worth keeping in host memory even while it runs, as it may be preempted."""
        known = self._known[request.request_id] = Known(request)
        store = self._tiers.usable_store
        if store is not None:
            known.entered = request.group
            store.enter(
                known.entered,
                tenant=request.tenant,
                weight=request.weight,
                is_asked=request.is_saved,
                is_session=request.session is not None,
            )

    def match(
        self, request_id: str, num_computed_tokens: int, num_tokens: int, *, is_resumed: bool
    ) -> int | None:
        """Return the tokens behind the device's own that the next step can load; None: they are on their way, ask again.

        Asked in every step while the request waits, so all but the first call only look at how far its stage is. num_computed_tokens: whole blocks of
        which the device holds the KV, in tokens. num_tokens: of the prompt, and of the output from before a preemption (`is_resumed`).
        """
        known = self._known[request_id]
        known.repeat_tokens = (num_tokens - 1) // self._layout.unit_tokens * self._layout.unit_tokens
        self._turn.ask(request_id)
        if not known.request.may_load:
            return 0
        if request_id in self._copying:
            return None
        if not is_resumed:
            self._sources[request_id] = Sources(num_computed_tokens)
        first = num_computed_tokens // self._block_size
        restore = self._find_restore(known, first, num_tokens)
        if restore is None:
            return None if known.waits_for else 0
        if not restore.stages:
            return 0
        if restore.is_damaged(self._store) and known.num_replans < MAX_REPLANS:
            return self._replan(known, restore, first, num_tokens)
        facts = restore.facts(self._store, self._tiers, num_tokens, self._block_size)
        if facts.num_blocks <= 0:
            return 0
        num_blocks = self._num_to_load(known.way if is_resumed else None, facts, first)
        most = restore.most_to_load(facts, self._tiers)
        if num_blocks is None:
            return None
        num_blocks = min(num_blocks, most)
        if not is_resumed and self._goes_beside(known, restore, num_blocks, num_tokens):
            return None
        return num_blocks * restore.block_tokens(self._block_size)

    def common_tokens(self, request_id: str) -> int:
        """Return the tokens that other requests have begun with, too, by the last look at the tiers: see `Prefix`."""
        return self._known[request_id].common_tokens

    def _num_to_load(self, way: Way | None, facts: RestoreFacts, num_on_device: int) -> int | None:
        """Return the number of blocks to load now; None: wait. The way chosen at the preemption is kept, unless another is far better by now."""
        decision = self._tiers.policy.decide(facts)
        num_kept_tokens = num_on_device * self._block_size
        if way is not None and is_still_right(
            way, _loss(self._tiers.swap_or_recompute(), facts, num_kept_tokens)
        ):
            if way is Way.RECOMPUTE:
                return 0
            if facts.num_ready_blocks == facts.num_blocks:
                return facts.num_blocks
        return None if decision.action is Action.WAIT else decision.num_blocks

    def _replan(self, known: Known, restore: Restore, first: int, num_tokens: int) -> int | None:
        """Stage a shorter prefix, because a block of this one did not come. Return None to wait for it, 0 where there is none."""
        known.lacking |= restore.stages[0].first_bad
        known.num_replans += 1
        known.take_restore()
        self._stage(known, first, num_tokens, self._store, set())
        restore.release(self._store)  # not earlier: blocks that have come are wanted again
        return None if known.restore is not None or known.waits_for else 0

    def _find_restore(self, known: Known, first: int, num_tokens: int) -> Restore | None:
        """Return the blocks that the tiers hold for a request, staged at the first call, and anew if the device has lost blocks before them."""
        store = self._tiers.usable_store
        if store is None:
            return None
        if known.has_looked:
            restore = known.restore
            if restore is None:
                return None
            restore.num_skipped = first - restore.first
            is_still_right = restore.num_skipped == 0 or (restore.num_skipped > 0 and restore.whole is None)
            if is_still_right and self._goes_on(known, restore, num_tokens, store):
                return restore
        if known.waits_for:
            known.waits_for = {each for each in known.waits_for if self._holds_memory(each, store)}
            if known.waits_for:
                return None
        before = known.take_restore()
        # If it releases blocks that were read for it, that is memory for its next try.
        self._stage(known, first, num_tokens, store, {STOPPED_READS} if before is not None else set())
        if before is not None:
            if known.restore is not None:
                known.restore.carried = before.carried_before(first)
            before.release(store)  # not earlier, or its blocks might make room for one another
        return known.restore

    def _stage(
        self, known: Known, first: int, num_tokens: int, store: TierStore, giving_back: set[str]
    ) -> None:
        """Stage a request's blocks from `first` on that the tiers hold. giving_back: the requests that will have released some host memory."""
        # The last token is always computed, as its logits are needed.
        last = (num_tokens - 1) // self._block_size
        known.has_looked = True
        if first >= last:
            return
        request, whole, peer = known.request, None, ""
        if self._layout.is_divisible:
            keys, peer = request.block_keys(first, last), _peer_of(known, store, self._tiers, self._layout)
            if not peer and self._begins_pieces(known, first, keys, num_tokens, store):
                return
        else:
            peer = _peer_of(known, store, self._tiers, self._layout)
            whole, keys, known.common_tokens = self._find_whole(known, first, last, store, peer)
        stage = store.stage(request.group, keys, tenant=request.tenant, peer=peer)
        # Computing saves each block's share of the tokens.
        block_s = self._block_s() * (whole.num_tokens / self._block_size / max(len(keys), 1) if whole else 1)
        if known.num_waits < MAX_WAITS and _is_whole_sooner(stage, keys, store, block_s):
            names = (STOPPED_READS, *self._known)
            known.waits_for = giving_back | {name for name in names if self._holds_memory(name, store)}
            known.num_waits += 1
        is_useless = len(stage.blocks) < len(keys) if whole is not None else not stage.blocks
        if known.waits_for or is_useless or not keys:
            store.release(stage)
            known.has_looked = not known.waits_for
        else:
            known.restore = Restore([stage], first, whole)

    def _find_whole(
        self, known: Known, first: int, last: int, store: TierStore, peer: str = ""
    ) -> tuple[Whole, list[BlockKey], int]:
        """Return what the longest prefix that is held needs beyond the device's `first` blocks, the keys of that, and `common_tokens`.

        peer: the address of a node that is assumed to hold each block until it has failed to send it; "" for no node.
        """

        def held(entries: Sequence[Entry]) -> Sequence[bool]:
            """Return of each entry whether it is to be had."""
            keys = [block_key(entry) for entry in entries]
            are_here = store.are_held(keys)
            return [
                (is_here or peer != "") and key not in known.lacking
                for is_here, key in zip(are_here, keys, strict=True)
            ]

        request, start = known.request, first * self._block_size
        prefix = self._layout.longest(request.keys, start, last * self._block_size, held)
        keys = [block_key(entry) for entry in self._layout.entries(request.keys, prefix.blocks)]
        return Whole(prefix.num_tokens - start, prefix.blocks), keys, prefix.common_tokens

    def _begins_pieces(
        self, known: Known, first: int, keys: Sequence[BlockKey], num_tokens: int, store: TierStore
    ) -> bool:
        """Return whether a restore goes in pieces. Only one does at a time, as the disk is one; others await their turn if that pays."""
        num_held = store.num_held(keys)
        num_bytes = store.bytes_to_read(keys[:num_held])
        most_bytes = PIECES_AT_ONCE * piece_blocks(store) * store.shape.block_bytes
        if known.goes_whole or not known.request.is_saved or num_bytes <= most_bytes:
            return False
        request_id = known.request.request_id
        if self._turn.holder != request_id and self._holds_memory(TURN, store):
            holder = self._known[self._turn.holder].restore
            num_ahead = holder.progress(store).disk_bytes_left if holder is not None else 0
            num_ahead += sum(each.turn_bytes for each in self._known.values() if TURN in each.waits_for)
            if (num_ahead + num_bytes) / store.disk_bytes_per_s() >= num_held * self._block_s():
                return False
            known.waits_for, known.has_looked, known.turn_bytes = {TURN}, False, num_bytes
            return True
        restore = Restore([], first, later=Behind(num_held, num_bytes))
        if not self._goes_on(known, restore, num_tokens, store):
            return False
        self._turn.take(request_id)
        self._in_pieces.add(request_id)
        known.restore = restore
        return True

    def _goes_on(self, known: Known, restore: Restore, num_tokens: int, store: TierStore) -> bool:
        """Have a restore in pieces progress. Return False if it cannot: host memory or the device has no room, or copying fails."""
        self._copies.pop(known.request.request_id, None)
        if not restore.is_in_pieces:
            return True
        request, last = known.request, (num_tokens - 1) // self._block_size

        def stage_piece(start: int, num_blocks: int) -> tuple[Stage, Behind]:
            """Stage `num_blocks` from the block `start` on, and say what lies behind them."""
            keys = request.block_keys(start, last)
            stage = store.stage(request.group, keys[:num_blocks], tenant=request.tenant)
            behind = keys[len(stage.blocks) :]
            behind = behind[: store.num_held(behind)]
            return stage, Behind(len(behind), store.bytes_to_read(behind))

        # Count the block of its last tokens, too: then it can start at once. Pieces of other requests are not to make room for it.
        others = (self._known[each].restore for each in self._in_pieces - {request.request_id})
        num_needed = last + 1 + sum(other.first for other in others if other is not None)
        has_room = num_needed <= self._tiers.num_free_device_blocks()
        may_go_on = has_room and restore.num_asked < MAX_WAITS and not known.goes_whole
        if not may_go_on or not restore.go_on(store, stage_piece):
            known.goes_whole = True
            return False
        copy = restore.next_copy(lambda: self._layout.leading_entries(request.keys), store, self._tiers)
        if copy is not None:
            self._copies[request.request_id] = copy
        return True

    def _goes_beside(self, known: Known, restore: Restore, num_blocks: int, num_tokens: int) -> bool:
        """Have ready blocks copied to the device beside the steps, as prefix cache, where a step that loads them would hold up others too long."""
        others = [each for each in self._known.values() if each is not known]
        copy_s = num_blocks * self._store.shape.block_bytes / self._tiers.host_bytes_per_s()
        num_needed = (
            num_tokens - 1
        ) // self._block_size + 1  # as in pieces: with the block of its last tokens
        may_go = self._tiers.copies_beside and restore.whole is None and not known.goes_whole
        if not (may_go and _is_better_beside(known, others, copy_s)) or num_needed > (
            self._tiers.num_free_device_blocks() - _num_awaited(others)
        ):
            return False
        known.goes_beside = True
        entries = self._layout.leading_entries(known.request.keys)
        self._copies[known.request.request_id] = restore.whole_copy(entries, num_blocks)
        return True

    def take_copies(self) -> dict[str, Copy]:
        """Return the pieces to copy to the device now, by request. Call `copied` for each of them; an uncopied piece is returned again."""
        copies, self._copies = self._copies, {}
        self._copying.begin_all(copies)
        return copies

    def copied(self, request_id: str) -> bool:
        """Note that a request's piece is not on its way any more. Return whether the request still waits."""
        self._copying.end(request_id)
        known = self._known.get(request_id)
        return known is not None and known.restore is not None

    def go_whole(self, request_id: str) -> None:
        """Note that a piece could not be copied: this request's restore goes in no pieces."""
        known = self._known.get(request_id)
        if known is not None:
            known.goes_whole = True

    def _holds_memory(self, name: str, store: TierStore) -> bool:
        """Return whether a request, or a read that no request wants, holds host memory that it gives back soon."""
        if name == STOPPED_READS:
            return store.is_stopping_reads
        known = self._known.get(self._turn.holder if name == TURN else name)
        restore = known.restore if known is not None else None
        if name == TURN:
            return self._turn.is_kept and restore is not None and restore.later.num_blocks > 0
        return (restore is not None and bool(restore.stages)) or (
            known is not None and name in self._starting
        )

    def _block_s(self) -> float:
        """Return the seconds to compute a block; infinite before that was measured."""
        return self._block_size * (self._tiers.prefill_s_per_token() or math.inf)

    def admit(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_loaded_tokens: int,
        num_tokens: int,
        *,
        is_resumed: bool,
    ) -> None:
        """Note that the request runs from the next step on, with `num_loaded_tokens` of its `num_tokens` loaded into its `block_ids`.

        block_ids: a list for each group of layers.
        """
        known = self._known[request_id]
        _tell(known, self._tiers.usable_store, is_running=True)
        restore = known.restore
        num_blocks = num_loaded_tokens // (restore.block_tokens(self._block_size) if restore else 1)
        if is_resumed:
            known.num_offered = 0
            num_wanted = (num_tokens - 1) // self._block_size
            if restore is not None and restore.whole is not None:
                num_wanted = restore.first + restore.whole.num_tokens // self._block_size
            self._tiers.resumed[_way_of(restore, num_loaded_tokens // self._block_size, num_wanted)] += 1
        sources = self._sources.get(request_id)
        if restore is not None and sources is not None and not is_resumed:
            sources.load(restore, num_blocks, self._block_size)
        if restore is not None and num_blocks:
            self._loads += restore.loads(block_ids, num_blocks, self._store, self._layout.state_groups)
            self._starting.add(request_id)
        self._release(known)

    def forget(self, request_id: str) -> None:
        """Release all that is held for a request, because it has ended."""
        known = self._known.pop(request_id, None)
        if known is None:
            return
        self._release(known)
        store = self._tiers.usable_store
        _tell(known, store, is_running=False)
        if known.entered is not None and store is not None:
            store.leave(known.entered, tenant=known.request.tenant)
        # An output that ends a request is built before this; an aborted request has no further output.
        if len(self._sources) > 2 * len(self._known) + MAX_SPARE_SOURCES:
            self._sources = {name: kept for name, kept in self._sources.items() if name in self._known}

    def _release(self, known: Known) -> None:
        if known.restore is not None:
            known.restore.release(self._store)
        self._copies.pop(known.request.request_id, None)
        self._in_pieces.discard(known.request.request_id)
        known.restore, known.has_looked, known.goes_whole = None, False, False

    def close(self) -> None:
        """Release all that is held for requests, because the engine shuts down."""
        if self._tiers.usable_store is None:
            return
        for known in self._known.values():
            self._release(known)
        for load in self._loads:
            self._store.release(load.stage)
        self._loads = []

    def take_sources(self, request_id: str) -> Sources | None:
        """Return where a request's KV came from, and forget it; asked once, with the first output."""
        return self._sources.pop(request_id, None)

    # -- preemption ------------------------------------------------------------------------------------------------------

    def preempted(self, request_id: str, num_computed_tokens: int) -> Way | None:
        """Choose how a preempted request gets back the KV of `num_computed_tokens`, by the predicted time of each way; None: no time is predicted.

        KV is written through, so a swap takes no time now. KV that is not saved (mostly the last block) is computed either way.

        Source: AdaptiveLLM Algorithm 1, lines 4 to 14. Departs in taking all of the KV for lost: memory is short, so others will take it.
        """
        store, costs = self._tiers.usable_store, self._tiers.swap_or_recompute()
        known = self._known.get(request_id)
        _tell(known, store, is_running=False)
        if known is None or store is None or costs is None:
            return None
        last = num_computed_tokens // self._block_size
        if self._layout.is_divisible:
            keys = known.request.block_keys(0, last)
            keys = keys[: store.num_held(keys)]
            num_tokens = len(keys) * self._block_size
        else:
            whole, keys, _ = self._find_whole(known, 0, last, store)
            num_tokens = whole.num_tokens
        read_s = store.bytes_to_read(keys) / store.disk_bytes_per_s()
        num_bytes = len(keys) * store.shape.block_bytes
        known.way = costs.decide(num_tokens, num_bytes, read_s=read_s).way
        self._tiers.chosen[known.way.value] += 1
        return known.way

    # -- a step is scheduled -------------------------------------------------------------------------------------------

    def next_step(
        self,
        scheduled: Iterable[tuple[str, int]],
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
        states: Mapping[str, Sequence[StateAt]] = {},
    ) -> StepMoves:
        """Return the loads and saves of the step that was just scheduled.

        scheduled: its requests, with the tokens of each that will have their KV after it. block_ids_of: returns the device's blocks of one of them, a
        list for each group of layers. states: by request, the states of recurrent layers that the step leaves within its tokens, not where it ends.
        """
        moves = StepMoves(self._loads)
        self._loads, self._starting = [], set()
        self._turn.end_step()
        store = self._tiers.usable_store
        if store is None:
            return moves
        for request_id, num_computed_tokens in scheduled:
            known = self._known.get(request_id)
            if known is None or not known.request.is_saved:
                continue
            # From 0 at its start, though the device may hold a prefix: the tiers may have lost it. A block whose last token is not known
            # yet (asynchronous scheduling) has no key; it is offered one step later.
            hash_tokens = self._layout.hash_tokens
            first, request = known.num_offered or 0, known.request
            last = min(num_computed_tokens // hash_tokens, len(request.keys)) * hash_tokens
            known.num_offered = max(first, last)
            if first < last:
                ends, block_ids = [last, known.common_tokens, known.repeat_tokens], block_ids_of(request_id)
                kept = self._layout.to_keep(first, last, ends, num_computed_tokens)
                sources = {at: block_ids[at.group][at.block] for at in kept}
                sources |= self._layout.state_blocks(states.get(request_id, ()))
                job = self.saves.save(request, sources, store)
                if job is not None:
                    moves.saves.append(job)
        return moves

    def spoiled_by(
        self, invalid: set[int], block_ids_of: Callable[[str], Sequence[Sequence[int]]]
    ) -> set[int]:
        """Return the device blocks whose KV cannot be trusted after `invalid` ones did not load: those, and all behind them in any conversation.

        vLLM computes them again for running requests, but leaves them in its prefix cache meanwhile, where another request could take them for
        good. What is computed again is offered to the tiers again.
        """
        ran = {
            name: block_ids_of(name) for name, known in self._known.items() if known.num_offered is not None
        }
        spoiled = spoiled_blocks(invalid, ran, self._sources, self._layout)
        self.saves.forget(spoiled)
        for name, groups in ran.items():
            if any(spoiled.intersection(block_ids) for block_ids in groups):
                self._known[name].num_offered = 0
        return spoiled

    @property
    def _store(self) -> TierStore:
        store = self._tiers.usable_store
        assert store is not None, "a stage without the store that made it"
        return store


def _tell(known: Known | None, store: TierStore | None, *, is_running: bool) -> None:
    """Tell the store whether a request computes or waits: a waiting request needs its KV in host memory most."""
    if known is not None and known.entered is not None and store is not None and known.runs != is_running:
        known.runs = is_running
        store.runs(known.entered, tenant=known.request.tenant, is_running=is_running)


def _is_whole_sooner(stage: Stage, keys: Sequence[BlockKey], store: TierStore, block_s: float) -> bool:
    """Return whether a stage that host memory cut short would be whole, once others' reads end, before its missing blocks could be computed."""
    num_cut = store.num_held(keys) - len(stage.blocks)
    if num_cut <= 0 or block_s == math.inf:
        return False
    progress = store.progress(stage)
    num_bytes = progress.disk_bytes_ahead + num_cut * store.shape.block_bytes
    return num_bytes / progress.disk_bytes_per_s < num_cut * block_s


def _peer_of(known: Known, store: TierStore, tiers: Tiers, layout: KvLayout) -> str:
    """Return the peer to ask for blocks that this node lacks. A request that ran here has left its KV here, so no peer is asked."""
    if known.num_offered is not None:
        return ""
    return peer_to_ask(known.request.kv_from, store, 1 / layout.blocks_per_token, tiers.prefill_s_per_token())


def _loss(costs: SwapOrRecompute | None, facts: RestoreFacts, num_kept_tokens: int) -> LossDecision:
    """Return the present cost of each way back of a preempted request; the device has kept its first `num_kept_tokens`."""
    assert costs is not None, "a way was chosen without costs"
    num_bytes = facts.num_blocks * facts.block_bytes
    num_tokens = num_kept_tokens + facts.num_blocks * facts.block_size_tokens
    return costs.decide(num_tokens, num_bytes, num_kept_tokens, disk_s(facts))


def _is_better_beside(known: Known, others: Sequence[Known], copy_s: float) -> bool:
    """Return whether a restore that takes `copy_s` is to be copied beside the steps: once, and only if a step would hold up requests that run."""
    others_run = any(each.num_offered is not None for each in others)
    return copy_s > STEP_WAIT_S and others_run and not known.goes_beside


def _num_awaited(others: Sequence[Known]) -> int:
    """Return how many blocks of the device requests wait for whose restores go beside the steps."""
    return sum(each.restore.end for each in others if each.goes_beside and each.restore is not None)


def _way_of(restore: Restore | None, num_loaded: int, num_wanted: int) -> str:
    """Return how a preempted request, which loads `num_loaded` blocks, gets back the KV of its first `num_wanted` blocks."""
    if restore is None or not num_loaded:
        return "recompute"
    return "swap" if num_loaded >= num_wanted - restore.first - restore.num_skipped else "split"
