"""Which slot an adapter enters, and which adapter leaves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine_bridge.core.adapters.adapter_moves import Fill, LeaveSlot, Move
from engine_bridge.core.adapters.adapter_table import AdapterTable, Version
from engine_bridge.core.adapters.adapter_worth import Worth
from engine_bridge.core.adapters.staging import StagingWishes

# The share of all slots that adapters may hold that are only announced. Chosen.
AHEAD_SHARE = 0.5


@dataclass(eq=False, slots=True)
class AdapterSlots:
    """Decides for the slots of one table.

    Args:
        step_room: room that the adapters in slots may take together as long as unused ones are among them, in the units of `Version.room`;
            None: only the number of slots bounds them.
        fills_from_copies: whether a slot is filled from KV blocks rather than from host memory.
        left: ids of adapters that left their slot and have a host copy are added here, so that the caller can keep a copy elsewhere.
    """

    _table: AdapterTable
    _worth: Worth
    _wanted: StagingWishes
    _step_room: int | None
    _fills_from_copies: bool
    _counts: Counter[str]
    _left: list[int]

    def offer(self, version: Version, running: Collection[int], now: float) -> list[Move]:
        """Begin to lay an adapter out before its first step, if there is a slot for it.

        A slot whose adapter has an older request waiting is not taken.
        """
        candidates = [
            other
            for other in self._owners_but(running)
            if not other.requests or other.oldest_request_s > version.oldest_request_s
        ]
        return self._enter(version, candidates, running, now)

    def offer_ahead(
        self,
        version: Version,
        is_expected: Callable[[int], bool],
        running: Collection[int],
        now: float,
    ) -> list[Move]:
        """Begin to lay an adapter out for a request that is expected, in a slot that no request and no other such adapter needs."""
        unused = [other for other in self._owners_but(running) if not other.requests]
        num_ahead = sum(is_expected(other.id) for other in unused)
        if num_ahead >= max(AHEAD_SHARE * len(self._table.slots), 1):
            return []
        candidates = [other for other in unused if not is_expected(other.id) and not other.num_layouts]
        return self._enter(version, candidates, running, now)

    def take(
        self, version: Version, stepping: Collection[int], running: Collection[int], now: float
    ) -> list[Move]:
        """Give the adapter a slot, because a step that computes with it begins. stepping: adapters of the step.

        Raises:
            RuntimeError: the step uses more adapters than there are slots.
        """
        in_use = {*stepping, *running}
        moves = self._enter(version, self._owners_but(in_use), in_use, now)
        if moves:
            return moves
        # More adapters run, over several steps, than there are slots: the ones that leave now come back from host memory.
        gone = {i for i in running if self._table[i].host_bytes is None}
        moves = self._enter(version, self._owners_but({*stepping, *gone}), in_use, now)
        if not moves:
            raise RuntimeError("a step uses more adapters than there are slots")
        return moves

    def leave(self, version: Version, is_emptied: bool = False) -> LeaveSlot:
        """Take the version out of its slot and return the move that says so. is_emptied: no adapter follows it in that slot."""
        slot = self._table.leave_slot(version)
        self._counts["evicted:slot"] += 1
        if version.requests:
            self._wanted.want(version)
        if version.host_bytes is not None and not version.is_removed:
            self._left.append(version.id)
        return LeaveSlot(version.id, slot, is_emptied)

    def _owners_but(self, keep: Collection[int]) -> list[Version]:
        return [self._table[i] for i in self._table.slots if i is not None and i not in keep]

    def _enter(
        self, version: Version, candidates: list[Version], in_use: Collection[int], now: float
    ) -> list[Move]:
        """Fill an empty slot, or the slot of the least valuable candidate; return no moves if there is neither."""
        moves: list[Move] = []
        if None in self._table.slots:
            slot = self._table.slots.index(None)
        elif candidates:
            victim = self._table[self._worth.order(candidates, "slot", now)[0]]
            left = self.leave(victim)
            moves.append(left)
            slot = left.slot
        else:
            return []
        self._table.enter_slot(version, slot)
        version.num_layouts += 1
        moves += self._shrink(version, in_use, now)
        self._counts["slot_fills"] += 1
        self._counts["slot_bytes"] += version.host_bytes or version.num_bytes
        # A copy on the device is nearer than host memory.
        is_near = version.copy == "whole" and (self._fills_from_copies or version.host_bytes is None)
        return [*moves, Fill(version.id, slot, "cached" if is_near else "host")]

    def _shrink(self, entering: Version, in_use: Collection[int], now: float) -> list[Move]:
        """Have unused adapters leave their slots until the adapters in slots take no more room than a step may."""
        if self._step_room is None:
            return []
        moves: list[Move] = []
        over = sum(owner.room for owner in self._owners_but(())) - self._step_room
        unused = [owner for owner in self._owners_but(in_use) if owner is not entering]
        for adapter_id in self._worth.order(unused, "slot", now) if over > 0 else ():
            victim = self._table[adapter_id]
            if over > 0 and not victim.num_layouts:
                over -= victim.room
                moves.append(self.leave(victim, is_emptied=True))
        return moves
