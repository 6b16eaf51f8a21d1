"""What the KV tiers hold for requests: what is staged for one that waits, loaded when it starts, and saved of each step.

A pure state machine: the driver tells what became of requests, and carries out what `next_step` returns. Each stage is released exactly once:
here, or by whoever carries out the `Load` that has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine_bridge.core.kv.cache_moves import NULL_BLOCK_ID, Copy
from engine_bridge.core.kv.fetching import peer_to_ask
from engine_bridge.core.kv.restoring import PIECES_AT_ONCE, Behind, Load, Machine, Restore, Turn, piece_blocks
from engine_bridge.policy.kv.restore_method import LossDecision, SwapOrRecompute, Way
from engine_bridge.policy.scheduling.preemption import is_still_right
from kvtiers.blocks import Save, Stage, StageProgress
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.restore import Action, RestoreFacts, RestorePolicy, disk_s

# A step with fewer tokens says little about the speed of prefill.
MIN_PREFILL_TOKENS = 128
# Sources of requests that were aborted are never asked for: so many, and twice as many as there are requests, are kept. Chosen.
MAX_SPARE_SOURCES = 64
# What a request may wait for beside other requests: that reads end which nobody wants any more, and its turn to be restored in pieces.
STOPPED_READS, TURN = "", " "
# A request waits so often for others to give host memory back, a quarter of a second each time where measured; and has one piece copied so often
# that does not come to the device. Chosen: nobody waits for ever.
MAX_WAITS = 8


class KvBlocks(Protocol):
    """What restores need of `kvtiers.store.KvStore`, which says what each does."""

    @property
    def shape(self) -> BlockShape:
        """How large a block is and in how many layers it is copied."""

    @property
    def num_host_blocks(self) -> int: ...
    def enter(self, group: str, *, tenant: str, weight: float, is_asked: bool, is_session: bool) -> None: ...
    def leave(self, group: str, *, tenant: str = "") -> None: ...
    def stage(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "", peer: str = "") -> Stage: ...
    def peer_bytes_per_s(self, address: str) -> float | None: ...
    def progress(self, stage: Stage) -> StageProgress: ...
    def release(self, stage: Stage) -> None: ...
    def num_held(self, keys: Sequence[BlockKey]) -> int: ...
    def bytes_to_read(self, keys: Sequence[BlockKey]) -> int: ...
    @property
    def is_stopping_reads(self) -> bool: ...
    def disk_bytes_per_s(self) -> float: ...
    def begin_save(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "") -> Save: ...


class Tiers(Machine, Protocol):
    """The tiers of a node, as far as restores ask them.

    chosen, resumed: count the ways that were chosen when requests were preempted, and those by which they came back.
    """

    @property
    def policy(self) -> RestorePolicy:
        """What decides whether a request's KV is copied or computed again."""

    @property
    def chosen(self) -> Counter[str]:
        """How often each way to get KV back was chosen, by its name."""

    @property
    def resumed(self) -> Counter[str]:
        """How often preempted requests went on, by the way their KV came back."""

    @property
    def usable_store(self) -> KvBlocks | None:
        """None while nothing is to be loaded or saved."""
        ...

    def swap_or_recompute(self) -> SwapOrRecompute | None:
        """By the costs as they are now; None where `policy` alone is to decide."""
        ...

    def num_free_device_blocks(self) -> int:
        """Blocks of the device that no running request holds; 0 where nothing can be copied there between two steps."""
        ...


@dataclass(slots=True)
class SaveJob:
    """The device's `block_ids` go to the slots of `save` in the next step. Whoever copies them commits or abandons the save."""

    save: Save
    block_ids: list[int]


@dataclass(slots=True)
class StepMoves:
    """What one step loads and saves."""

    loads: list[Load] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


@dataclass(slots=True)
class Sources:
    """Where the KV of a request's prompt came from, in tokens; the rest was computed."""

    device: int
    host: int = 0
    disk: int = 0
    peer: int = 0

    def load(self, restore: Restore, num_blocks: int, block_size: int) -> None:
        """A step loads so many blocks. What a restore has brought to the device in pieces counts as from where it was."""
        skipped = restore.num_skipped
        carried = restore.carried_before(restore.first + skipped)[: self.device // block_size]
        found = Counter(carried + restore.origins[skipped : skipped + num_blocks])
        self.device -= len(carried) * block_size
        self.host, self.disk, self.peer = (found[each] * block_size for each in ("host", "disk", "peer"))

    def cut(self, num_tokens: int) -> None:
        """Only so many of them came, from the first one on."""
        loaded = max(num_tokens - self.device, 0)
        self.host = min(self.host, loaded)
        self.disk = min(self.disk, loaded - self.host)
        self.peer = min(self.peer, loaded - self.host - self.disk)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the engine has taken. keys: of its whole blocks; the list grows as tokens come.

    session: what its KV is kept together with; None: with whatever began with the same block. is_saved: its KV goes to the tiers: not for what
    nobody has asked yet (a draft), which is to be nowhere but on the device. may_load: not for one that wants what only computing gives, such as
    log probabilities of its prompt. kv_from: the address of a node that may have its KV; "" for none.
    """

    request_id: str
    keys: Sequence[bytes]
    tenant: str = ""
    session: str | None = None
    weight: float = 1.0
    is_saved: bool = True
    may_load: bool = True
    kv_from: str = ""

    @property
    def group(self) -> str:
        """The name under which the KV is kept: the session, else the first block's hash, else the request's id."""
        if self.session is not None:
            return self.session
        return bytes(self.keys[0]).hex() if self.keys else self.request_id

    def block_keys(self, first: int, last: int) -> list[BlockKey]:
        """Keys of the blocks from `first` up to, but without, `last`."""
        return [BlockKey(bytes(key)) for key in self.keys[first:last]]


@dataclass(slots=True)
class _Known:
    """One request. entered: the group that the store was told of; has_looked: whether `restore` is what the tiers hold now; num_offered: blocks
    that the tiers were offered, None before it ran; way: chosen for its return when it was preempted. waits_for: requests that hold the host memory
    which its restore needs, STOPPED_READS, or TURN; num_waits: how often it has waited for others to give it back. goes_whole: its restore goes in no
    pieces; turn_bytes: that it reads when it is its turn."""

    request: NewRequest
    entered: str | None = None
    has_looked: bool = False
    restore: Restore | None = None
    num_offered: int | None = None
    way: Way | None = None
    waits_for: set[str] = field(default_factory=set)
    num_waits: int = 0
    goes_whole: bool = False
    turn_bytes: int = 0

    def take_restore(self) -> Restore | None:
        restore, self.restore = self.restore, None
        return restore


class Restores:
    """What waits in the tiers for which request, and what the next step moves."""

    def __init__(self, tiers: Tiers, block_size: int) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._known: dict[str, _Known] = {}
        self._sources: dict[str, Sources] = {}
        self._loads: list[Load] = []
        self._starting: set[str] = set()  # whose these are
        self._turn = Turn()
        self._in_pieces: set[str] = set()  # requests whose restore goes in pieces, or has
        self._copies: dict[str, Copy] = {}

    # -- a request waits -----------------------------------------------------------------------------------------------

    def enter(self, request: NewRequest) -> None:
        """It is in the engine: its session's KV is worth keeping in host memory, also where it runs, as it may be preempted."""
        known = self._known[request.request_id] = _Known(request)
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
        """Tokens behind the device's own that the next step can load; None: they are on their way, ask again.

        Asked in every step while the request waits, so all but the first call only look at how far its stage is.

        Args:
            num_computed_tokens: whole blocks of which the device holds the KV.
            num_tokens: of the prompt, and what was generated before it was preempted.
            is_resumed: it has run before.
        """
        known = self._known[request_id]
        self._turn.ask(request_id)
        if not known.request.may_load:
            return 0
        if not is_resumed:
            self._sources[request_id] = Sources(num_computed_tokens)
        first = num_computed_tokens // self._block_size
        restore = self._find_restore(known, first, num_tokens)
        if restore is None:
            return None if known.waits_for else 0
        if not restore.stages:
            return 0
        facts = restore.facts(self._store, self._tiers, num_tokens, self._block_size)
        if facts.num_blocks <= 0:
            return 0
        num_blocks = self._num_to_load(known.way if is_resumed else None, facts, first)
        most = restore.most_to_load(facts, self._tiers)
        return min(num_blocks, most) * self._block_size if num_blocks is not None else None

    def _num_to_load(self, way: Way | None, facts: RestoreFacts, num_on_device: int) -> int | None:
        """Blocks to load now, None: wait. The way that was chosen at the preemption is gone, unless another is far better by now."""
        decision = self._tiers.policy.decide(facts)
        if way is not None and is_still_right(way, self._loss(facts, num_on_device)):
            if way is Way.RECOMPUTE:
                return 0
            if facts.num_ready_blocks == facts.num_blocks:
                return facts.num_blocks
        return None if decision.action is Action.WAIT else decision.num_blocks

    def _loss(self, facts: RestoreFacts, num_on_device: int) -> LossDecision:
        costs = self._tiers.swap_or_recompute()
        assert costs is not None, "a way was chosen without costs"
        num_tokens = (num_on_device + facts.num_blocks) * self._block_size
        return costs.decide(num_tokens, num_on_device * self._block_size, disk_s(facts))

    def _find_restore(self, known: _Known, first: int, num_tokens: int) -> Restore | None:
        """What the tiers hold for a request; staged at the first call, and anew if the device has lost blocks before the stage."""
        store = self._tiers.usable_store
        if store is None:
            return None
        if known.has_looked:
            restore = known.restore
            if restore is None:
                return None
            restore.num_skipped = first - restore.first
            if restore.num_skipped >= 0 and self._goes_on(known, restore, num_tokens, store):
                return restore
        if known.waits_for:
            known.waits_for = {each for each in known.waits_for if self._holds_memory(each, store)}
            if known.waits_for:
                return None
        before = known.take_restore()
        # Where it lets go of what was read for it, that is memory for its next try.
        self._stage(known, first, num_tokens, store, {STOPPED_READS} if before is not None else set())
        if before is not None:
            if known.restore is not None:
                known.restore.carried = before.carried_before(first)
            before.release(store)  # not sooner, or its blocks might make room for one another
        return known.restore

    def _stage(
        self, known: _Known, first: int, num_tokens: int, store: KvBlocks, giving_back: set[str]
    ) -> None:
        """Have what the tiers hold of a request from the block `first` on in host memory. giving_back: who will have given some of it back."""
        # The last token is always computed: its logits are what the request is for.
        last = (num_tokens - 1) // self._block_size
        known.has_looked = True
        if first >= last:
            return
        request = known.request
        keys, peer = request.block_keys(first, last), self._peer_of(known, store)
        if not peer and self._begins_pieces(known, first, keys, num_tokens, store):
            return
        stage = store.stage(request.group, keys, tenant=request.tenant, peer=peer)
        if known.num_waits < MAX_WAITS and _is_whole_sooner(stage, keys, store, self._block_s()):
            names = (STOPPED_READS, *self._known)
            known.waits_for = giving_back | {name for name in names if self._holds_memory(name, store)}
            known.num_waits += 1
        if known.waits_for or not stage.blocks:
            store.release(stage)
            known.has_looked = not known.waits_for
        else:
            known.restore = Restore([stage], first)

    def _begins_pieces(
        self, known: _Known, first: int, keys: Sequence[BlockKey], num_tokens: int, store: KvBlocks
    ) -> bool:
        """Whether a restore goes in pieces. One request's at a time, as there is one disk: others wait for their turn, where that pays."""
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

    def _goes_on(self, known: _Known, restore: Restore, num_tokens: int, store: KvBlocks) -> bool:
        """Have a restore that goes in pieces come further. False: it can no more; host memory or the device has no room, or copying fails."""
        self._copies.pop(known.request.request_id, None)
        if not restore.is_in_pieces:
            return True
        request, last = known.request, (num_tokens - 1) // self._block_size

        def stage_piece(start: int, num_blocks: int) -> tuple[Stage, Behind]:
            keys = request.block_keys(start, last)
            stage = store.stage(request.group, keys[:num_blocks], tenant=request.tenant)
            behind = keys[len(stage.blocks) :]
            behind = behind[: store.num_held(behind)]
            return stage, Behind(len(behind), store.bytes_to_read(behind))

        # The block of its last tokens, too: then it can start at once. Others' pieces are not to make room for it.
        others = (self._known[each].restore for each in self._in_pieces - {request.request_id})
        num_needed = last + 1 + sum(other.first for other in others if other is not None)
        has_room = num_needed <= self._tiers.num_free_device_blocks()
        may_go_on = has_room and restore.num_asked < MAX_WAITS and not known.goes_whole
        if not may_go_on or not restore.go_on(store, stage_piece):
            known.goes_whole = True
            return False
        copy = restore.next_copy(request.keys, store, self._tiers.host_bytes_per_s())
        if copy is not None:
            self._copies[request.request_id] = copy
        return True

    def take_copies(self) -> dict[str, Copy]:
        """Pieces that are to go to the device before the next step, by request. What is not copied is asked for again."""
        copies, self._copies = self._copies, {}
        return copies

    def go_whole(self, request_id: str) -> None:
        """A piece could not be copied: this request's restore goes in none."""
        known = self._known.get(request_id)
        if known is not None:
            known.goes_whole = True

    def _holds_memory(self, name: str, store: KvBlocks) -> bool:
        """Whether a request, or what is being read for nobody, holds host memory that it gives back soon."""
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
        """To compute a block; endless before that was measured."""
        return self._block_size * (self._tiers.prefill_s_per_token() or math.inf)

    def _peer_of(self, known: _Known, store: KvBlocks) -> str:
        """Who is asked for what this node lacks. What ran here has left its KV here."""
        if known.num_offered is not None:
            return ""
        seconds = self._tiers.prefill_s_per_token()
        return peer_to_ask(known.request.kv_from, store, self._block_size, seconds)

    def admit(
        self,
        request_id: str,
        block_ids: Sequence[int],
        num_loaded_tokens: int,
        num_tokens: int,
        *,
        is_resumed: bool,
    ) -> None:
        """The request runs from the next step on, with `num_loaded_tokens` of its `num_tokens` loaded into its `block_ids`."""
        known = self._known[request_id]
        restore, num_blocks = known.restore, num_loaded_tokens // self._block_size
        if is_resumed:
            self._tiers.resumed[_way_of(restore, num_blocks, (num_tokens - 1) // self._block_size)] += 1
        sources = self._sources.get(request_id)
        if restore is not None and sources is not None and not is_resumed:
            sources.load(restore, num_blocks, self._block_size)
        if restore is not None and num_blocks:
            self._loads += restore.loads(block_ids, num_blocks, self._store)
            self._starting.add(request_id)
        self._release(known)

    def forget(self, request_id: str) -> None:
        """The request has ended, however."""
        known = self._known.pop(request_id, None)
        if known is None:
            return
        self._release(known)
        store = self._tiers.usable_store
        if known.entered is not None and store is not None:
            store.leave(known.entered, tenant=known.request.tenant)
        # An output that ends a request is built before this; one that was aborted has none to come.
        if len(self._sources) > 2 * len(self._known) + MAX_SPARE_SOURCES:
            self._sources = {name: kept for name, kept in self._sources.items() if name in self._known}

    def _release(self, known: _Known) -> None:
        if known.restore is not None:
            known.restore.release(self._store)
        self._copies.pop(known.request.request_id, None)
        self._in_pieces.discard(known.request.request_id)
        known.restore, known.has_looked, known.goes_whole = None, False, False

    def close(self) -> None:
        """The engine goes: nothing is held for its requests any more."""
        if self._tiers.usable_store is None:
            return
        for known in self._known.values():
            self._release(known)
        for load in self._loads:
            self._store.release(load.stage)
        self._loads = []

    def take_sources(self, request_id: str) -> Sources | None:
        """Where a request's KV came from; asked once, with its first output."""
        return self._sources.pop(request_id, None)

    # -- it is preempted -----------------------------------------------------------------------------------------------

    def preempted(self, request_id: str, num_computed_tokens: int) -> Way | None:
        """It loses its blocks of the device: choose how it gets back the KV of `num_computed_tokens`, by what each way is predicted to take.

        KV is written through, so a swap takes nothing now. What is not saved (the last block, mostly) is computed whatever the way. None
        where nothing is predicted.

        Source: AdaptiveLLM Algorithm 1, lines 4 to 14. Departs in taking all of the KV for lost: memory is short, so others will take it.
        """
        store, costs = self._tiers.usable_store, self._tiers.swap_or_recompute()
        known = self._known.get(request_id)
        if known is None or store is None or costs is None:
            return None
        keys = known.request.block_keys(0, num_computed_tokens // self._block_size)
        keys = keys[: store.num_held(keys)]
        num_tokens = len(keys) * self._block_size
        read_s = store.bytes_to_read(keys) / store.disk_bytes_per_s()
        known.way = costs.decide(num_tokens, read_s=read_s).way
        self._tiers.chosen[known.way.value] += 1
        return known.way

    # -- a step is scheduled -------------------------------------------------------------------------------------------

    def next_step(
        self, scheduled: Iterable[tuple[str, int]], block_ids_of: Callable[[str], Sequence[int]]
    ) -> StepMoves:
        """What the step that was just scheduled loads and saves.

        Args:
            scheduled: its requests, with the tokens of each that will have their KV after it.
            block_ids_of: the device's blocks of one of them.
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
            first, request = known.num_offered or 0, known.request
            last = min(num_computed_tokens // self._block_size, len(request.keys))
            known.num_offered = max(first, last)
            if first < last:
                job = _begin_save(request, first, last, block_ids_of(request_id), store)
                if job is not None:
                    moves.saves.append(job)
        return moves

    def spoiled_by(self, invalid: set[int], block_ids_of: Callable[[str], Sequence[int]]) -> set[int]:
        """Device blocks whose KV is not to be trusted when `invalid` ones did not load: those, and all behind them in any conversation.

        vLLM computes them again for the requests that run, but leaves them in its prefix cache meanwhile, where another request could
        take them for good.
        """
        spoiled = set(invalid)
        assert NULL_BLOCK_ID not in spoiled, "KV was loaded into a block that stands for none"
        for request_id, known in self._known.items():
            if known.num_offered is None:
                continue
            block_ids = block_ids_of(request_id)
            first = next((i for i, block_id in enumerate(block_ids) if block_id in invalid), None)
            if first is not None:
                spoiled.update(block_ids[first:])
                if request_id in self._sources:
                    self._sources[request_id].cut(first * self._block_size)
        return spoiled - {NULL_BLOCK_ID}

    @property
    def _store(self) -> KvBlocks:
        store = self._tiers.usable_store
        assert store is not None, "a stage without the store that made it"
        return store


def _begin_save(
    request: NewRequest, first: int, last: int, block_ids: Sequence[int], store: KvBlocks
) -> SaveJob | None:
    """Save what the tiers lack of a request's blocks from `first` up to, but without, `last`, where it has one on the device."""
    keys = request.block_keys(first, last)
    present = [at for at in range(len(keys)) if block_ids[first + at] != NULL_BLOCK_ID]
    save = store.begin_save(request.group, [keys[at] for at in present], tenant=request.tenant)
    if not save.blocks:
        return None
    return SaveJob(save, [block_ids[first + present[position]] for position in save.positions])


def _is_whole_sooner(stage: Stage, keys: Sequence[BlockKey], store: KvBlocks, block_s: float) -> bool:
    """Whether a stage that host memory has cut short would be whole, once others' are read, before the rest of it could be computed."""
    num_cut = store.num_held(keys) - len(stage.blocks)
    if num_cut <= 0 or block_s == math.inf:
        return False
    progress = store.progress(stage)
    num_bytes = progress.disk_bytes_ahead + num_cut * store.shape.block_bytes
    return num_bytes / progress.disk_bytes_per_s < num_cut * block_s


def _way_of(restore: Restore | None, num_loaded: int, num_wanted: int) -> str:
    """How a preempted request gets back the KV of its first `num_wanted` blocks, of which it loads so many."""
    if restore is None or not num_loaded:
        return "recompute"
    return "swap" if num_loaded >= num_wanted - restore.first - restore.num_skipped else "split"


class PrefillMeter:
    """Measures prefill by the time between steps: while requests run they follow one another without a pause."""

    def __init__(self) -> None:
        self._last_s, self._num_tokens = 0.0, 0

    def stepped(self, num_tokens: int, *, has_running: bool, now: float) -> tuple[int, float] | None:
        """A step of so many tokens was scheduled. has_running: some of it had begun before. Returns what the one before has cost, as (tokens,
        seconds), where that says something."""
        last_s, num_last = self._last_s, self._num_tokens
        self._last_s, self._num_tokens = now, num_tokens
        return (num_last, now - last_s) if num_last >= MIN_PREFILL_TOKENS and has_running else None
