"""A store of KV blocks that lives in a dictionary: whatever state machines hold of it is counted, and the disk reads when told to."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from engine_bridge.core.kv.tier_store import block_key
from engine_bridge.policy.kv.kv_layout import BlockAt, KvLayout, LayerGroup, one_group
from engine_bridge.policy.kv.restore_method import SwapOrRecompute
from kvtiers.blocks import Block, Group, Save, Stage, StageProgress, count_while
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts, RestorePolicy

SHAPE = BlockShape(num_layers=2, layer_bytes=1000)
BLOCK_TOKENS = 4


def keys_of(name: str, num: int) -> list[bytes]:
    """Of a conversation's blocks, as an engine would make them."""
    return [f"{name}-{index}".encode() for index in range(num)]


ONE_GROUP = one_group(BLOCK_TOKENS)
# A window of nine tokens looks at two blocks and a token of a third; groups may have blocks of different sizes.
WINDOW = KvLayout((LayerGroup("window", BLOCK_TOKENS, 9),), BLOCK_TOKENS)
TWO_GROUPS = KvLayout((*WINDOW.groups, LayerGroup("all", BLOCK_TOKENS)), BLOCK_TOKENS)
STATES = KvLayout((LayerGroup("state", BLOCK_TOKENS), *ONE_GROUP.groups), BLOCK_TOKENS)
SIZES = KvLayout((LayerGroup("all", 2 * BLOCK_TOKENS), LayerGroup("chunk", BLOCK_TOKENS, 8)), BLOCK_TOKENS)


def places_of(layout: KvLayout, name: str, num: int) -> dict[BlockKey, BlockAt]:
    """Where each block of a conversation is, by the key under which the tiers keep it."""
    blocks = [
        BlockAt(number, block)
        for number, group in enumerate(layout.groups)
        for block in range(num * BLOCK_TOKENS // group.block_tokens)
    ]
    return {
        block_key(entry): at
        for entry, at in zip(layout.entries(keys_of(name, num), blocks), blocks, strict=True)
    }


class Shelf:
    """Has the promises of `KvStore` that its callers rely on. Releasing, committing or leaving once too often is an error."""

    shape = SHAPE
    num_host_blocks = 64

    def __init__(self) -> None:
        self.on_disk: dict[BlockKey, bool] = {}  # whether a block must be read first
        self.peers: dict[str, float] = {}  # bytes per second, by address; each has whatever is asked
        self.stages: list[Stage] = []
        self.saves: list[Save] = []
        self.live: Counter[tuple[str, str]] = Counter()
        self.expected: dict[tuple[str, str], float | None] = {}
        self.disk_rate = 1e6
        self.is_stopping_reads = False
        self.ends_reads_late = False  # those that nobody wants any more: only by `end_reads`
        self.stopped: list[Stage] = []  # released before all was read for them
        self.room: int | None = None  # blocks that all stages may hold; None: any number

    def put(self, keys: Sequence[bytes], *, on_disk: bool = False) -> None:
        self.on_disk |= {BlockKey(key): on_disk for key in keys}

    def enter(self, group: str, *, tenant: str, weight: float, is_asked: bool, is_session: bool) -> None:
        self.live[tenant, group] += 1

    def runs(self, group: str, *, tenant: str = "", is_running: bool) -> None:
        """Nothing is evicted here by what runs."""

    def leave(self, group: str, *, tenant: str = "") -> None:
        self.live[tenant, group] -= 1
        assert self.live[tenant, group] >= 0

    def expect(self, group: str, at_s: float | None, *, tenant: str = "") -> None:
        self.expected[tenant, group] = at_s

    def peer_bytes_per_s(self, address: str) -> float | None:
        return self.peers.get(address)

    def stage(self, group: str, keys: Sequence[BlockKey], *, peer: str = "", **options: Any) -> Stage:
        stage = Stage(0.0, gives_way=options.get("gives_way", False))
        owner = Group(options.get("tenant", ""), group)
        num_held = sum(len(each.blocks) for each in self.stages)
        for key in keys:
            if (key not in self.on_disk and not peer) or num_held + len(stage.blocks) == self.room:
                break
            block = Block(key, owner)
            block.slots = [0] * SHAPE.num_layers
            is_read = self.on_disk.get(key, True)
            block.ready = 0 if is_read else SHAPE.num_layers
            stage.blocks.append(block)
            stage.origins.append("host" if not is_read else "disk" if key in self.on_disk else "peer")
        stage.num_readings = int(any(origin != "host" for origin in stage.origins))
        self.stages.append(stage)
        return stage

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.on_disk), len(keys))

    def are_held(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self.on_disk for key in keys]

    @property
    def is_reading_for_requests(self) -> bool:
        return any(stage.num_readings and not stage.gives_way for stage in self.stages)

    def bytes_to_read(self, keys: Sequence[BlockKey]) -> int:
        return sum(self.on_disk[key] for key in keys) * SHAPE.block_bytes

    def progress(self, stage: Stage) -> StageProgress:
        assert stage in self.stages, "asked about what was released"
        num_ready = next((i for i, block in enumerate(stage.blocks) if not block.ready), len(stage.blocks))
        left = (len(stage.blocks) - num_ready) * SHAPE.block_bytes
        others = (block for each in self.stages if each is not stage for block in each.blocks)
        unread = [block for block in others if not block.ready]
        return StageProgress(
            num_blocks=count_while(not block.is_bad for block in stage.blocks),
            num_ready_blocks=num_ready,
            num_ready_layers=SHAPE.num_layers if not left else 0,
            waited_s=0.0,
            disk_bytes_done=0,
            disk_bytes_left=left,
            disk_bytes_ahead=len(unread) * SHAPE.block_bytes,
            disk_bytes_per_s=self.disk_rate,
        )

    def read_one(self) -> None:
        """The disk delivers the next block of every stage."""
        for stage in self.stages:
            waiting = ((index, block) for index, block in enumerate(stage.blocks) if not block.is_bad)
            unread = [index for index, block in waiting if not block.ready]
            for index in unread[:1]:
                stage.blocks[index].ready = SHAPE.num_layers
                stage.bytes_read[stage.origins[index]] += SHAPE.block_bytes
                self.on_disk[stage.blocks[index].key] = False
            stage.num_readings = int(len(unread) > 1)

    def revoke(self) -> None:
        """Every stage gives way."""
        for stage in self.stages:
            stage.is_revoked = True
            self._stop(stage)
        self.stages = []

    def release(self, stage: Stage) -> None:
        if stage.is_revoked:
            return
        assert stage in self.stages, "released twice"
        self.stages.remove(stage)
        self._stop(stage)

    def _stop(self, stage: Stage) -> None:
        if stage.num_readings:
            self.stopped.append(stage)
        if not self.ends_reads_late:
            self.end_reads()

    def end_reads(self, num_bytes: int = 0) -> None:
        """What was being read for nobody ends, the disk having given so many bytes more for each of them."""
        for stage in self.stopped:
            stage.bytes_read["disk"] += num_bytes
            stage.num_readings = 0
        self.stopped = []

    def begin_save(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "") -> Save:
        positions = [index for index, key in enumerate(keys) if key not in self.on_disk]
        save = Save([Block(keys[index], Group(tenant, group)) for index in positions], positions)
        if save.blocks:
            self.saves.append(save)
        return save

    def commit(self, save: Save) -> None:
        assert save in self.saves, "committed twice"
        self.saves.remove(save)
        self.put([block.key for block in save.blocks])

    def disk_bytes_per_s(self) -> float:
        return self.disk_rate


class LoadsAll:
    """Waits for the disk, then loads whatever there is."""

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        is_there = facts.num_ready_blocks == facts.num_blocks
        return RestoreDecision(Action.LOAD if is_there else Action.WAIT, facts.num_blocks, "", 0.0)


class Tiers:
    """A shelf with speeds. A prefill of so many seconds a token is what loading competes with."""

    def __init__(self, shelf: Shelf, policy: RestorePolicy | None = None) -> None:
        self.shelf = shelf
        self.policy: RestorePolicy = policy or LoadsAll()
        self.chosen: Counter[str] = Counter()
        self.resumed: Counter[str] = Counter()
        self.costs: SwapOrRecompute | None = None
        self.is_paused = False
        self.loads_must_hold = self.copies_beside = False
        self.s_per_token = 1.0
        self.bytes_per_s = 1e6
        self.num_free_blocks = 0  # of a device to which pieces can be copied

    def num_free_device_blocks(self) -> int:
        return self.num_free_blocks

    @property
    def usable_store(self) -> Shelf | None:
        return None if self.is_paused else self.shelf

    def swap_or_recompute(self) -> SwapOrRecompute | None:
        return self.costs

    def prefill_s_per_token(self) -> float | None:
        return self.s_per_token

    def host_bytes_per_s(self) -> float:
        return self.bytes_per_s
