"""Host memory as blocks of sessions: how much each tenant holds, and which blocks leave. Every method runs under the store's lock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvtiers.blocks import Block, Group, GroupId, Stage
from kvtiers.io.host_pool import HostPool
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.eviction import EvictionPolicy, GroupFacts
from kvtiers.policy.fairness import floors, is_abandoned
from kvtiers.policy.regret import LessRegretted
from kvtiers.policy.returns import Returns
from kvtiers.stats import HostStats

# The share of the slots that leaves at a time, so that ranking all sessions is paid for once per batch. Chosen.
EVICTION_BATCH = 1 / 64
# The share of host memory in which a tenant's kept sessions are preferred; beyond it only the sessions kept last are. Chosen.
KEPT_SHARE = 0.5
# The most sessions remembered as kept. Chosen: the limit of `engine_bridge.policy.kv.hints` for all keys together.
MAX_KEPT = 32768


# Sessions that are remembered to have ended. Chosen: more than the device has KV of.
MAX_OVER = 4096


class Kept(NamedTuple):
    """A session that is worth more than its tenant's others until a time. is_shared: its blocks stay its own though other sessions use them."""

    until_s: float
    is_shared: bool


class HostTier:
    """The blocks in host memory, by key and by session.

    Args:
        shape: the shape of every block.
        host_bytes: size of the memory.
        eviction: chooses which sessions' blocks leave.
        is_on_disk: returns whether the disk has a block; None where there is no disk.
        clock: returns the time in seconds.
        is_shared: whether other processes can map the memory.
    """

    def __init__(
        self,
        shape: BlockShape,
        host_bytes: int,
        eviction: EvictionPolicy,
        is_on_disk: Callable[[BlockKey], bool] | None,
        clock: Callable[[], float],
        *,
        is_shared: bool = False,
    ) -> None:
        self.shape = shape
        self.pool = HostPool(shape.layer_bytes, host_bytes, is_shared=is_shared)
        self.blocks: dict[BlockKey, Block] = {}
        self.groups: dict[GroupId, Group] = {}
        self.weights: dict[str, float] = {}
        """The weights of tenants, where a weight is not 1."""
        self.live: Counter[GroupId] = Counter()
        """Number of requests in the engine, by group; the group may hold no block yet."""
        self.running: Counter[GroupId] = Counter()
        """The part of these that computes; the others wait."""
        self.device_keeps: Callable[[BlockKey], bool] | None = None
        """Says of a block whether the device has it, too, and keeps it for now; None where there is no device."""
        self._kept: OrderedDict[GroupId, Kept] = OrderedDict()  # the session kept last comes last
        self._over: OrderedDict[GroupId, None] = OrderedDict()
        """Sessions that have ended for good, the last one last."""
        self._returns = Returns()
        self.stats = HostStats(capacity_bytes=self.pool.num_slots * shape.layer_bytes)
        self._held: Counter[str] = Counter()  # slots by tenant, those of spoiled blocks left out
        self._eviction = LessRegretted(eviction, self.pool.num_slots // shape.num_layers)
        self._is_on_disk = is_on_disk
        self._clock = clock

    def is_held(self, key: BlockKey) -> bool:
        """Return whether a stage could bring all layers of this block: it is in memory, on its way there, or on disk."""
        block = self.blocks.get(key)
        if block is not None and len(block.slots) == self.shape.num_layers:
            return True
        return self._is_on_disk(key) if self._is_on_disk is not None else False

    def end(self, group: GroupId) -> None:
        """Note that a session has ended for good: its blocks leave first, and none of them is saved again."""
        self._kept.pop(group, None)
        if group in self.groups:
            self.groups[group].is_over = True
        self._over[group] = None
        if len(self._over) > MAX_OVER:
            self._over.popitem(last=False)

    def is_over(self, group: GroupId) -> bool:
        """Return whether a session has ended for good, and was not used since."""
        return group in self._over

    def find(self, tenant: str, name: str) -> Group:
        """Return the session's group as it is, or a new group, marked as used now."""
        return self.groups.get((tenant, name)) or self.touch(tenant, name, is_guess=True)

    def enter(self, group: GroupId, *, is_asked: bool, is_session: bool) -> None:
        """Note that a request of this group is in the engine. is_asked: whether a client waits for its answer."""
        self.live[group] += 1
        if is_asked:
            self._returns.came(group, self._clock(), is_one=is_session)

    def leave(self, group: GroupId) -> None:
        """Note that a request of this group has ended."""
        self.live[group] -= 1
        if self.live[group] <= 0:
            del self.live[group]
            self.running.pop(group, None)
            now = self._clock()
            self._returns.left(group, now)
            facts = self._facts(Group(*group), None)
            self._eviction.left(replace(facts, group=_name_of(group), last_used_s=now), now)

    def keep(self, group: GroupId, keep_s: float, *, is_shared: bool) -> None:
        """Prefer a session to others of its tenant for this many seconds, whether or not it has blocks yet; 0: no longer."""
        self._kept.pop(group, None)
        if keep_s <= 0:
            return
        self._kept[group] = Kept(self._clock() + keep_s, is_shared)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        self._over.pop(group, None)
        if group in self.groups:
            self.groups[group].is_over = False

    def _kept_now(self, now: float) -> set[GroupId]:
        """Return the sessions that are kept, as far as they fit into their tenant's share; forget the ones whose time is over."""
        found: set[GroupId] = set()
        most, num = self.pool.num_slots * KEPT_SHARE, Counter[str]()
        for group_id, kept in reversed(list(self._kept.items())):
            if kept.until_s <= now:
                del self._kept[group_id]
            elif (group := self.groups.get(group_id)) is not None and num[
                group.tenant
            ] + group.num_slots <= most:
                num[group.tenant] += group.num_slots
                found.add(group_id)
        return found

    def asked(self, group: GroupId, num_wanted: int) -> None:
        """Note that a request needs this many of a session's blocks from the tiers."""
        self._eviction.asked(_name_of(group), num_wanted)

    def saved(self, group: GroupId, num_blocks: int) -> None:
        """Note that a session has this many blocks that no tier held."""
        self._eviction.saved(_name_of(group), num_blocks)

    def touch(self, tenant: str, name: str, *, is_guess: bool = False) -> Group:
        """Return the session's group, marked as used now; a new one is known from its first block on. is_guess: its request is only expected."""
        group = self.groups.get((tenant, name)) or Group(tenant, name)
        group.last_used_s = self._clock()
        group.is_over = False
        self._over.pop(group.id, None)
        if not is_guess:
            group.expected_s = None
        return group

    def new_block(self, key: BlockKey, group: Group, pins: int = 1) -> Block:
        """Add an empty block to a group, in use `pins` times. An incomplete block with this key is dropped."""
        leftover = self.blocks.get(key)
        if leftover is not None:  # some of its layers, the others of which no disk has any more
            self.spoil(leftover)
        self.groups[group.id] = group  # also where the leftover was its last
        block = self.blocks[key] = group.blocks[key] = Block(key, group)
        block.pins = pins
        return block

    def put_first(self, group: Group, blocks: Sequence[Block]) -> None:
        """Put these blocks of a group before its others: what comes first in a conversation leaves last."""
        group.blocks = {block.key: block for block in blocks} | group.blocks

    def move(self, block: Block, group: Group) -> None:
        """Make a block the latest of a group: a block belongs to the session that used it last, or to a session kept for others to share."""
        kept = self._kept.get(block.group.id)
        if kept is not None and kept.is_shared and kept.until_s > self._clock():
            return
        del block.group.blocks[block.key]
        self._count(block.group, -len(block.slots))
        if not block.group.blocks:
            self.groups.pop(block.group.id, None)
        self.groups[group.id] = group
        block.group = group
        group.blocks[block.key] = block
        self._count(group, len(block.slots))

    def deal(self, blocks: list[Block], first_layer: int) -> None:
        """Give blocks slots for their layers from `first_layer` on, layer-major. Raises RuntimeError if the slots are not free."""
        num_layers = self.shape.num_layers - first_layer
        slots = self.pool.allocate(len(blocks) * num_layers) if blocks else []
        if slots is None:
            raise RuntimeError("slots were dealt that are not free")
        for position, block in enumerate(blocks):
            block.slots = block.slots + slots[position :: len(blocks)]
            self._count(block.group, num_layers)

    def trim(self, block: Block, keep_layers: int) -> int:
        """Free a block's slots from `keep_layers` on, and return their number. A block without slots is forgotten."""
        freed = block.slots[keep_layers:]
        self.pool.free(freed)
        block.slots = block.slots[:keep_layers]
        block.ready = min(block.ready, keep_layers)
        self._count(block.group, -len(freed))
        if not block.slots:
            self._forget(block)
        return len(freed)

    def _forget(self, block: Block) -> None:
        if self.blocks.get(block.key) is block:
            del self.blocks[block.key]
            del block.group.blocks[block.key]
            if not block.group.blocks:
                self.groups.pop(block.group.id, None)

    def spoil(self, block: Block) -> None:
        """Take a block whose bytes must not be used out of the index at once. Its slots are freed when its last pin ends."""
        block.is_bad = True
        self._count(block.group, -len(block.slots))
        self._forget(block)
        if block.pins == 0:
            self._free_bad(block)

    def _free_bad(self, block: Block) -> None:
        """Free a spoiled block's slots, overwritten: it may be spoiled because its tenant's data is erased."""
        for slot in block.slots:
            self.pool.region[slot] = 0
        self.pool.free(block.slots)
        block.slots = []

    def erase(self, tenant: str) -> None:
        """Take all that a tenant has out of memory. Blocks in use go with their last use; none may wait to be written."""
        for group in [group for group in self.groups.values() if group.tenant == tenant]:
            self._kept.pop(group.id, None)
            for block in list(group.blocks.values()):
                self.spoil(block)

    def empty(self, block: Block) -> None:
        """Free the slots of a spoiled block though it is pinned: no reader and no writer uses them."""
        self.pool.free(block.slots)
        block.slots = []

    def pin_held(self, keys: Sequence[BlockKey]) -> list[Block | None]:
        """Return the leading blocks that are held: pinned where they are whole in memory, None where they are on disk."""
        found: list[Block | None] = []
        for key in keys:
            block = self.blocks.get(key)
            if block is not None and block.ready == self.shape.num_layers:
                block.pins += 1
                found.append(block)
            elif self._is_on_disk is not None and self._is_on_disk(key):
                found.append(None)
            else:
                break
        return found

    def begin_copy(self, blocks: Iterable[Block]) -> list[Block]:
        """Pin blocks that a device copies, and return them."""
        copied = list(blocks)
        for block in copied:
            block.pins += 1
        return copied

    def unpin(self, block: Block) -> None:
        """End one use of a block. A spoiled block's slots are freed with its last use."""
        block.pins -= 1
        if block.pins == 0 and block.is_bad:
            self._free_bad(block)

    def _count(self, group: Group, num_slots: int) -> None:
        """Count `num_slots` more for a group and its tenant."""
        group.num_slots += num_slots
        self._held[group.tenant] += num_slots
        if not self._held[group.tenant]:
            del self._held[group.tenant]

    def make_room(self, num_slots: int, tenant: str) -> None:
        """Have `num_slots` free for a tenant, if enough may leave: first abandoned sessions, then blocks of tenants above their share."""
        if self.pool.num_free >= num_slots:
            return
        goal = min(max(num_slots, int(self.pool.num_slots * EVICTION_BATCH)), self.pool.num_slots)
        now = self._clock()
        groups: dict[str, list[GroupFacts]] = {}
        preferred = self._kept_now(now)
        for group in self.groups.values():
            expected_s = now if group.id in preferred else group.expected_s
            groups.setdefault(group.tenant, []).append(self._facts(group, expected_s))
        if len(groups) > 1 or tenant not in groups:
            for name, facts in groups.items():
                self._take(name, [each for each in facts if is_abandoned(each, now)], goal, 0)
        # The asked slots count as held, so that a tenant that is above its share with them makes room for itself.
        need = {name: num_slots if name == tenant else 0 for name in (*groups, tenant)}
        asked = {name: self._held[name] + need[name] for name in need}
        for name, kept in floors(asked, self.weights, goal - self.pool.num_free).items():
            self._take(name, groups.get(name, ()), goal, max(kept - need[name], 0))
        # Slots that others cannot give, because they are in use, come from the tenant itself, not from tenants below their share.
        self._take(tenant, groups.get(tenant, ()), goal, 0)

    def _facts(self, group: Group, expected_s: float | None) -> GroupFacts:
        usual_pause_s, pause_spread = self._returns.pause_of(group.id)
        return GroupFacts(
            group=group.name,
            num_bytes=group.num_slots * self.shape.layer_bytes,
            last_used_s=group.last_used_s,
            goes_on=self._returns.goes_on(group.id),
            is_over=group.is_over,
            is_live=group.id in self.live,
            is_waiting=self.live.get(group.id, 0) > self.running.get(group.id, 0),
            expected_s=expected_s,
            usual_pause_s=usual_pause_s,
            pause_spread=pause_spread,
        )

    def _take(self, tenant: str, facts: Sequence[GroupFacts], goal: int, floor: int) -> None:
        """Evict blocks of these groups of a tenant until `goal` slots are free, or it holds no more than `floor`."""
        # Without a disk nothing else has what leaves. With one it is only a read, and what the device has may be asked for after it has lost it.
        if self._is_on_disk is None and self._take_doubled(tenant, facts, goal, floor):
            return
        expected = {each.group: each for each in facts if each.expected_s is not None}
        for victim in self._eviction.order(facts, self.shape.num_layers, self._clock()):
            group = self.groups.get((tenant, victim.group))
            if victim.group in expected:
                if self._take_doubled(tenant, list(expected.values()), goal, floor):
                    return
                expected = {}
            # Without a disk the other layers would never come back.
            keep_layers = victim.keep_layers if self._is_on_disk is not None else 0
            # Most sessions are trimmed to this band already, and there are more blocks than time to look at each.
            if group is None or group.num_slots <= keep_layers * len(group.blocks):
                continue
            for block in reversed(list(group.blocks.values())):
                if self.pool.num_free >= goal or self._held[tenant] <= floor:
                    return
                if block.pins == 0 and not block.is_unwritten and len(block.slots) > keep_layers:
                    self.trim(block, keep_layers)
                    self.stats.num_evicted += not block.slots
                    self.stats.num_trimmed += bool(block.slots)

    def make_room_for_more(self, group: Group, num_slots: int) -> None:
        """Have `num_slots` free, if as many blocks of the group may leave that the device has by now."""
        if self.pool.num_free < num_slots:
            self._take_doubled(group.tenant, [self._facts(group, group.expected_s)], num_slots, 0)

    def _take_doubled(self, tenant: str, facts: Sequence[GroupFacts], goal: int, floor: int) -> bool:
        """Evict blocks that the device keeps for now, those of running requests first. Return whether that is enough, as in `_take`."""
        if self.device_keeps is None:
            return False
        for each in sorted(facts, key=lambda each: (not each.is_live, each.is_waiting, -each.last_used_s)):
            group = self.groups.get((tenant, each.group))
            blocks = list(group.blocks.values()) if group is not None else []
            # The device keeps the beginning of a session longest, so most sessions that it has lost are passed over at once.
            if not blocks or not (self.device_keeps(blocks[0].key) or self.device_keeps(blocks[-1].key)):
                continue
            for block in reversed(blocks):
                if self.pool.num_free >= goal or self._held[tenant] <= floor:
                    return True
                if block.pins == 0 and not block.is_unwritten and self.device_keeps(block.key):
                    self.trim(block, 0)
                    self.stats.num_evicted += 1
        return False

    def clear(self) -> None:
        """Free all blocks that are not pinned and that the disk has."""
        for block in list(self.blocks.values()):
            if block.pins == 0 and not block.is_unwritten:
                self.trim(block, 0)

    def cut_to_room(self, stage: Stage) -> None:
        """Shorten a stage to the blocks for which there is free memory."""
        num_layers, num_free = self.shape.num_layers, self.pool.num_free
        num_kept = 0
        for block in stage.blocks:
            num_free -= num_layers - len(block.slots)
            if num_free < 0:
                break
            num_kept += 1
        for block in stage.blocks[num_kept:]:
            self.unpin(block)
            if not block.slots:
                self._forget(block)
        del stage.blocks[num_kept:]

    def snapshot(self) -> HostStats:
        """Return a copy of the counts, with the memory as it is now."""
        host = HostStats(**{name: getattr(self.stats, name) for name in HostStats.__struct_fields__})
        host.bytes = (self.pool.num_slots - self.pool.num_free) * self.shape.layer_bytes
        host.num_blocks = len(self.blocks)
        host.num_sessions = len(self.groups)
        return host

    def check_invariants(self) -> None:
        """Raise AssertionError if memory does not add up or a slot is held twice."""
        self.pool.check_invariants()
        slots = [slot for block in self.blocks.values() for slot in block.slots]
        assert len(slots) == len(set(slots))
        assert len(slots) <= self.pool.num_slots - self.pool.num_free
        for group in self.groups.values():
            assert group.num_slots == sum(len(block.slots) for block in group.blocks.values())
            assert self.groups[group.id] is group
            assert all(
                block.group is group and self.blocks[key] is block for key, block in group.blocks.items()
            )
        assert sum(len(group.blocks) for group in self.groups.values()) == len(self.blocks)
        held = Counter[str]()
        for group in self.groups.values():
            held[group.tenant] += group.num_slots
        assert +held == +self._held
        assert all(0 <= block.ready <= len(block.slots) for block in self.blocks.values())
        assert all(block.pins >= 0 for block in self.blocks.values())


def _name_of(group: GroupId) -> str:
    """Return a name of a tenant's session that no other tenant's has."""
    return "\0".join(group)
