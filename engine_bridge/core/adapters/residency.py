"""Where each adapter is, and how it gets to where a request needs it without any step waiting for a disk.

An adapter version is on disk (always), in host memory (bounded in bytes), copied into free KV blocks of the device, in a slot (what a step
computes with), or in several of these. A request whose adapter cannot be computed yet is passed over by the scheduler until it can; others
go on. Loads and layouts take their time elsewhere; what is decided here is decided between steps, and as a step begins.

Source: Chameleon §4.1 (cache, eviction, prefetch), CaraServe §4 (a start that does not wait for the copy).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Literal

from msgspec import Struct

from engine_bridge.core.adapters.adapter_copies import AdapterCopies
from engine_bridge.core.adapters.adapter_moves import (
    DropHost,
    Fill,
    Forget,
    LeaveSlot,
    LoadToHost,
    Move,
    Refuse,
    WriteCopy,
)
from engine_bridge.core.adapters.adapter_slots import AdapterSlots
from engine_bridge.core.adapters.adapter_table import AdapterTable, Version
from engine_bridge.core.adapters.adapter_turns import AdapterTurns
from engine_bridge.core.adapters.adapter_worth import Worth
from engine_bridge.core.adapters.announced import Announcements
from engine_bridge.core.adapters.staging import NoPrefetch, StagingWishes
from engine_bridge.protocol.node import AdapterPlace

# Loads that may be under way at once, so that the layouts of loaded adapters wait behind no more than these. Chosen.
MAX_LOADS = 2


class Rules(Struct, frozen=True, kw_only=True):
    """The bounds within which adapters are placed.

    Attributes:
        step_room: the room that the adapters of all running requests may take together, in the units of `Version.room`; None: only the number
            of slots bounds them.
        cpu_assist: whether requests start while their adapter is still on its way into a slot.
        fills_from_copies: whether a slot is filled from KV blocks, even if the adapter is in host memory, too.
    """

    host_bytes: int
    num_slots: int
    step_room: int | None = None
    cpu_assist: bool = True
    fills_from_copies: bool = False


class AdapterPlaces:
    """The adapters of one engine. Events and the time go in, moves come out, for the caller to carry out at once and in order.

    `running` is always the adapters of the requests that run now. Methods are for one thread; other threads may read `table` and `place_of`.
    """

    def __init__(self, rules: Rules, worth: Worth, prefetch: NoPrefetch | None = None) -> None:
        self.rules = rules
        self.worth = worth
        self.table = AdapterTable(rules.num_slots)
        self.wanted = StagingWishes()
        self.counts: Counter[str] = Counter()
        """Counts of events since the start, see `AdapterStats`."""
        self.announced = Announcements(self.counts)
        self._prefetch = prefetch or NoPrefetch()
        self._left: list[int] = []
        parts = self.table, worth, self.wanted
        self._slots = AdapterSlots(*parts, rules.step_room, rules.fills_from_copies, self.counts, self._left)
        self.copies = AdapterCopies(*parts, self.counts, self._left, rules.fills_from_copies)
        self.turns = AdapterTurns(self.table, rules.step_room, rules.host_bytes)

    # -- facts -------------------------------------------------------------------------------------------------------

    def add(self, adapter_id: int, num_bytes: int, *, room: int, is_pinned: bool, now: float) -> None:
        """Know a version from now on; a known version may become pinned or unpinned. A new one is loaded where memory lies idle."""
        known = self.table.get(adapter_id)
        is_new = known is None
        if known is None:
            known = Version(adapter_id, num_bytes, room, last_used_s=now)
            self.table.add(known)
        if known.is_pinned and not is_pinned:
            self.wanted.something_moved()  # others may take its place in memory now
        known.is_pinned = is_pinned
        if is_pinned or (is_new and self._has_idle_memory(num_bytes)):
            self.prefetch(adapter_id)

    def remove(self, adapter_id: int) -> list[Move]:
        """Note that no new request will name this version; it is forgotten when its last request has ended."""
        version = self.table.get(adapter_id)
        if version is None:
            return []
        version.is_removed = True
        return self._forget_if_unused(version)

    def prefetch(self, adapter_id: int) -> None:
        """Bring the adapter to host memory for a request that may come. It displaces no adapter that a waiting request needs."""
        version = self.table.get(adapter_id)
        if version is not None and version.host_bytes is None and not version.is_loading:
            self.wanted.guess(version)

    def announce(self, advisory_id: str, adapter_id: int, probability: float) -> None:
        """Stage an adapter for a request that an advisory announces (E4).

        The adapter is brought to host memory, and if the request is likely, to a slot that no request uses.
        """
        version = self.table.get(adapter_id)
        if version is not None:
            self.announced.begin(advisory_id, adapter_id, probability)
            if version.slot is None:
                self.wanted.guess(version)

    def place_of(self, adapter_id: int) -> AdapterPlace | None:
        """Return the adapter's nearest place; None if it is unknown or on its way from the disk. May be called from any thread, as a hint."""
        version = self.table.get(adapter_id)
        return None if version is None or version.is_loading else version.place

    def places(self) -> dict[int, AdapterPlace]:
        """Return where each version is: the nearest place, if it is in several. May be called from any thread."""
        return {version.id: version.place for version in self.table}

    # -- requests ----------------------------------------------------------------------------------------------------

    def requested(self, request_id: str, adapter_id: int, now: float) -> None:
        """Note that a request for this adapter enters the engine."""
        version = self.table[adapter_id]
        self.counts[f"found:{version.place}"] += 1
        self.worth.used(adapter_id, now)
        self._prefetch.arrived(adapter_id, now)
        self.announced.requested(adapter_id)
        version.requests[request_id] = version.last_used_s = now
        version.is_put_back = False
        self.worth.touched(version, now)
        if not version.is_filled:
            self.wanted.want(version)

    def released(self, request_id: str, adapter_id: int, now: float) -> list[Move]:
        """Note that a request has ended or never was in the engine. An unknown request changes nothing."""
        version = self.table.get(adapter_id)
        if version is None or version.requests.pop(request_id, None) is None:
            return []
        version.last_used_s = now
        self.worth.touched(version, now)
        self.wanted.something_moved()
        self.copies.something_changed()
        return self._forget_if_unused(version)

    def is_at_hand(self, adapter_id: int, *, may_assist: bool = True) -> bool:
        """Return whether a step could compute with this adapter as far as its weights are concerned.

        may_assist: whether an adapter on its way into a slot counts too.
        """
        version = self.table[adapter_id]
        if version.is_filled or self._has_device_source(version):
            return True
        is_assisted = self.rules.cpu_assist and may_assist
        return version.host_bytes is not None and (is_assisted or self.rules.fills_from_copies)

    def is_assisted(self, adapter_id: int) -> bool:
        """Return whether the host computes for this adapter while its slot is being filled.

        An adapter that comes from KV blocks, within the device, is there sooner than the host could compute.
        """
        return self.rules.cpu_assist and not self._has_device_source(self.table[adapter_id])

    def free_room(self, running: Collection[int]) -> int | None:
        """Return the room that adapters of further requests may take in the steps to come; None: no bound.

        An adapter that is too large for the whole room runs alone.
        """
        if self.rules.step_room is None or not running:
            return None
        return self.rules.step_room - sum([self.table[adapter_id].room for adapter_id in running])

    def needed_room(self, adapter_id: int, running: Collection[int]) -> int:
        """Return the room that one more request of this adapter would take; 0 if the adapter runs already."""
        return 0 if adapter_id in running else self.table[adapter_id].room

    def has_room(self, adapter_id: int, running: Collection[int]) -> bool:
        """Return whether the adapter fits beside the running ones, and is not itself to make room for another adapter. Changes nothing."""
        room = self.free_room(running)
        fits = room is None or self.needed_room(adapter_id, running) <= room
        return fits and adapter_id not in self.turns.last

    def enter(self, adapter_ids: Collection[int], running: Collection[int], now: float) -> list[Move]:
        """Give slots to the adapters of a step that begins. Raises RuntimeError: the step uses more adapters than there are slots."""
        moves: list[Move] = []
        for adapter_id in adapter_ids:
            version = self.table[adapter_id]
            if version.slot is None:
                moves += self._slots.take(version, adapter_ids, running, now)
        return moves

    # -- between steps -----------------------------------------------------------------------------------------------

    def has_work(self, now: float) -> bool:
        """Return whether `advance` or `copies_to_write` would do something now."""
        may_stage = self.wanted.is_worth_a_turn and self.table.num_loads < MAX_LOADS
        return may_stage or bool(self._left) or self.wait_s(now) == 0

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until there is something to do even if no event comes; None: not before an event."""
        waits = (self._prefetch.wait_s(now), self.copies.wait_s(now)) if len(self.table) else ()
        return min((wait for wait in waits if wait is not None), default=None)

    def advance(self, running: Collection[int], now: float) -> list[Move]:
        """Bring every wanted adapter one step further, those of waiting requests first, in order of arrival."""
        if len(self.table):
            for adapter_id in self._prefetch.due(now):
                self.counts["prefetched"] += 1
                self.prefetch(adapter_id)
        self.announced.expire(now)
        moves: list[Move] = []
        for adapter_id, is_guess in self.wanted.begin_turn():
            version = self.table.get(adapter_id)
            if version is None or self._is_staged(version, is_guess):
                self.wanted.drop(adapter_id)
            elif version.host_bytes is None and not self._has_device_source(version):
                moves += self._begin_load(version, is_guess, running, now)
            elif version.slot is None and is_guess:
                moves += self._offer_ahead(version, running, now)
            elif version.slot is None:
                moves += self._slots.offer(version, running, now)
        return moves

    def _offer_ahead(self, version: Version, running: Collection[int], now: float) -> list[Move]:
        moves = self._slots.offer_ahead(version, self.announced.is_expected, running, now)
        self.announced.moved(version.id, sum(version.num_bytes for move in moves if isinstance(move, Fill)))
        return moves

    def copies_to_write(self, now: float) -> list[WriteCopy]:
        """Return the copies to write on the device: adapters that left their slot, else adapters that may be asked for."""
        return self.copies.take_left() or self.copies.take_ahead(now)

    def _is_staged(self, version: Version, is_guess: bool) -> bool:
        if is_guess:
            is_near = version.host_bytes is not None or self._has_device_source(version)
            return version.slot is not None or (is_near and not self.announced.is_expected(version.id))
        # A version whose layout failed needs its weights again.
        has_weights = version.is_filled or version.num_layouts > 0 or version.host_bytes is not None
        return not version.requests or (version.slot is not None and has_weights)

    # -- results of moves --------------------------------------------------------------------------------------------

    def loaded(
        self,
        adapter_id: int,
        host_bytes: int,
        source: Literal["disk", "cached"],
        elapsed_s: float,
        now: float,
    ) -> list[Move]:
        """Note that a load has ended and the adapter is in host memory. host_bytes: size of that copy. elapsed_s: duration of the load."""
        version = self.table[adapter_id]
        self.table.end_load(version, host_bytes)
        # Files may have another data type, and each of several ranks holds only a part: room is made by the bytes taken in memory.
        version.num_bytes = host_bytes
        self.wanted.arrived(adapter_id)
        self.counts[f"loads:{source}"] += 1
        self.counts[f"load_bytes:{source}"] += host_bytes
        rate = self.worth.disk_rate if source == "disk" else self.worth.copy_rate
        rate.note(host_bytes, elapsed_s, now)
        self.copies.something_changed()
        return self._forget_if_unused(version)

    def load_failed(self, adapter_id: int) -> list[Move]:
        """Note that the adapter could not be loaded. The caller must release its requests (`released`): no further load is tried for them."""
        version = self.table[adapter_id]
        self.table.end_load(version, None)
        self.wanted.something_moved()
        self.wanted.drop(adapter_id)
        self.counts["failed"] += 1
        return self._forget_if_unused(version)

    def filled(self, adapter_id: int, slot: int) -> None:
        """Note that steps can compute with the adapter in its slot, if it is still there."""
        if self.table.slots[slot] == adapter_id:
            self.table[adapter_id].is_filled = True

    def laid_out(self, adapter_id: int) -> list[Move]:
        """Note that one fill of the adapter has no work left; its host copy is no longer read for that fill."""
        version = self.table[adapter_id]
        version.num_layouts -= 1
        self.wanted.something_moved()
        return self._forget_if_unused(version)

    def broken(self, adapter_id: int) -> list[Move]:
        """Note that the adapter could not be made ready to compute with.

        The caller must release its requests (`released`). The adapter leaves every place where it is, so that a later request begins anew.
        """
        version = self.table.get(adapter_id)
        if version is None:
            return []
        moves: list[Move] = [*self.copies.give_up(version)]
        if version.slot is not None:
            moves.append(self._slots.leave(version, is_emptied=True))
        self._left[:] = [each for each in self._left if each != adapter_id]
        moves += self._leave_host(version)
        self.wanted.something_moved()
        self.wanted.drop(adapter_id)
        self.counts["failed"] += 1
        return moves

    def put_back(self, adapter_id: int, *, keeps_host: bool) -> list[Move]:
        """Have the adapter leave its slot and the KV blocks, and host memory unless `keeps_host`, so that a measurement begins with it there."""
        version = self.table[adapter_id]
        version.is_put_back = True
        moves: list[Move] = [*self.copies.give_up(version)]
        if version.slot is not None:
            moves.append(self._slots.leave(version))
        self._left.clear()
        if not keeps_host:
            moves += self._leave_host(version)
        return moves

    # -- host memory -------------------------------------------------------------------------------------------------

    def _begin_load(
        self, version: Version, is_guess: bool, running: Collection[int], now: float
    ) -> list[Move]:
        if version.is_loading or self.table.num_loads >= MAX_LOADS:
            return []
        moves = self._make_host_room(version, is_guess, running, now)
        if moves is None:
            is_refused = not is_guess and self._has_never_room(version)
            # A pinned adapter stays wanted until there is room, as it may be long before a request asks for it.
            if is_refused or (is_guess and not version.is_pinned):
                self.wanted.drop(version.id)
            return [Refuse(version.id)] if is_refused else []
        self.table.begin_load(version)
        if is_guess:
            self.announced.moved(version.id, version.num_bytes)
        return [*moves, LoadToHost(version.id, "cached" if version.copy == "whole" else "disk")]

    def _make_host_room(
        self, version: Version, is_guess: bool, running: Collection[int], now: float
    ) -> list[Move] | None:
        """Return the moves that make room in host memory for a version; None if there can be no room.

        A guess displaces no adapter that a request waits for.
        """
        over = self.table.host_bytes + self.table.reserved_bytes + version.num_bytes - self.rules.host_bytes
        if over <= 0:
            return []
        oldest_s = None if is_guess else version.oldest_request_s
        candidates = [
            other
            for other in self.table
            if _may_leave_host(other, oldest_s, running)
            and not (is_guess and self.announced.is_expected(other.id))
        ]
        victims = self.worth.victims(candidates, "host", over, now)
        moves: list[Move] = []
        for victim in victims:
            moves += self._leave_host(self.table[victim])
            self.worth.left(victim, "host")
            self.counts["evicted:host"] += 1
        return moves if victims else None

    def _has_never_room(self, version: Version) -> bool:
        """Return whether pinned adapters, which never leave, take the memory that this version needs."""
        pinned = (each for each in self.table if each.is_pinned and each is not version)
        held = sum(each.num_bytes if each.is_loading else each.host_bytes or 0 for each in pinned)
        return held + version.num_bytes > self.rules.host_bytes

    def _leave_host(self, version: Version) -> list[Move]:
        if version.host_bytes is None:
            return []
        self.table.leave_host(version)
        if version.requests:
            self.wanted.want(version)
        else:
            self.wanted.left_host(version)
        return [DropHost(version.id)]

    def _has_idle_memory(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` fit beside the loaded adapters and the wanted ones, with half of the memory left."""
        return 2 * (self.table.host_bytes + self.wanted.num_bytes + num_bytes) <= self.rules.host_bytes

    def _has_device_source(self, version: Version) -> bool:
        return self.rules.fills_from_copies and version.copy == "whole"

    def _forget_if_unused(self, version: Version) -> list[Move]:
        """Forget a removed version, with all that it holds, after its last request."""
        if not version.is_removed or version.requests or version.is_loading or version.num_layouts:
            return []
        self.wanted.drop(version.id)
        moves: list[Move] = []
        if version.slot is not None:
            moves.append(LeaveSlot(version.id, self.table.leave_slot(version)))
        moves += self.copies.give_up(version)
        moves += self._leave_host(version)
        self.table.remove(version)
        self.wanted.something_moved()
        self.worth.forgotten(version.id)
        self._prefetch.forgotten(version.id)
        return [*moves, Forget(version.id)]


def _may_leave_host(version: Version, waiting_since_s: float | None, running: Collection[int]) -> bool:
    """Return whether the version may leave host memory for one whose oldest request came at `waiting_since_s`; None: for a guess."""
    if version.host_bytes is None or version.is_pinned or version.is_host_copy_read:
        return False
    if not version.requests:
        return True
    if waiting_since_s is None or version.id in running:
        return False
    return version.oldest_request_s > waiting_since_s
