"""Blocks in host memory, and the stages and saves made of them. Plain data: the store changes it, under its lock.

It loads neither asyncio nor numpy, so that pure state machines can speak of stages and saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from kvtiers.keys import BlockKey

Origin = Literal["host", "disk", "peer"]
"""Where a stage found a block."""
GroupId = tuple[str, str]
"""A tenant, and the name of a session: tenants choose the names of their sessions themselves, so two may have the same."""


class Block:
    """One block in host memory.

    Attributes:
        slots: the slots of its leading layers, of which the first `ready` hold its bytes.
    """

    __slots__ = ("group", "is_bad", "is_unwritten", "job", "key", "pins", "ready", "slots")

    def __init__(self, key: BlockKey, group: Group) -> None:
        self.key = key
        self.group = group
        self.slots: list[int] = []
        self.ready = 0
        self.pins = 0
        self.is_unwritten = False
        self.is_bad = False
        self.job: ReadJob | None = None


class Group:
    """The blocks of one session of a tenant, in the order of its conversation."""

    __slots__ = ("blocks", "expected_s", "is_over", "last_used_s", "name", "num_slots", "tenant")

    def __init__(self, tenant: str, name: str) -> None:
        self.tenant = tenant
        self.name = name
        self.blocks: dict[BlockKey, Block] = {}
        self.num_slots = 0
        self.last_used_s = 0.0
        self.is_over = False
        self.expected_s: float | None = None

    @property
    def id(self) -> GroupId:
        """Tenant and name, under which the group is found."""
        return self.tenant, self.name


class Task(Protocol):
    """The part of an asyncio task that is used here."""

    def cancel(self) -> object:
        """Cancel the task."""


class Supply(Protocol):
    """A source that stages read from: the disk, or a peer. jobs: its reads under way; bytes_done: bytes read since the start."""

    jobs: set[ReadJob]
    bytes_done: int


class ReadJob:
    """Blocks that are being read from `first_layer` on, for any number of stages.

    Attributes:
        begun_by: the stage that began the read; the bytes count for it.
        num_users: stages that wait for it; num_asked: those of requests that have come.
        num_left: layers, over all blocks, that have not come.
        is_stopped: whether the read was told to end, because for a moment no stage wanted it.
    """

    __slots__ = (
        "begun_by",
        "blocks",
        "first_layer",
        "is_stopped",
        "num_asked",
        "num_left",
        "num_users",
        "supply",
        "task",
    )

    def __init__(
        self, supply: Supply, begun_by: Stage, blocks: list[Block], first_layer: int, num_layers: int
    ) -> None:
        self.supply = supply
        self.begun_by = begun_by
        self.blocks = blocks
        self.first_layer = first_layer
        self.num_left = len(blocks) * (num_layers - first_layer)
        self.num_users = self.num_asked = 0
        self.is_stopped = False
        self.task: Task | None = None

    def stop_if_unwanted(self) -> None:
        """Cancel the read if no stage wants it. Call it on the I/O thread; a read that has not begun checks that itself."""
        if self.num_users == 0 and self.task is not None:
            self.is_stopped = True
            self.task.cancel()


class Save:
    """Blocks on their way from the device: fill the slots, then call `KvStore.commit` or `KvStore.abandon`.

    `slots[i][l]` is the slot of layer `l` of the block at `positions[i]` among the offered keys.
    """

    __slots__ = ("blocks", "positions")

    def __init__(self, blocks: list[Block], positions: list[int]) -> None:
        self.blocks = blocks
        self.positions = positions

    @property
    def slots(self) -> list[list[int]]:
        """The host slots of each block's layers."""
        return [block.slots for block in self.blocks]


class Stage:
    """Consecutive blocks held in host memory, or on their way there, until `KvStore.release`.

    Attributes:
        slots: `slots[i][l]` is the slot of layer `l` of block `i`.
        origins: where each block was found.
        bytes_before: bytes that each of its supplies had read before it.
        gives_way: whether it is for a request that may come: its reads and its memory give way to those of requests.
        is_revoked: whether it gave way to a stage or save that needed its memory; it holds no block any more.
        bytes_read: by the reads that it began, also the stopped ones.
        num_readings: number of these reads that have not ended. Both change on the I/O thread, also after the release.
    """

    __slots__ = (
        "blocks",
        "bytes_before",
        "bytes_read",
        "gives_way",
        "is_revoked",
        "jobs",
        "num_readings",
        "origins",
        "started_s",
    )

    def __init__(self, started_s: float, *, gives_way: bool = False) -> None:
        self.gives_way = gives_way
        self.blocks: list[Block] = []
        self.origins: list[Origin] = []
        self.jobs: set[ReadJob] = set()
        self.bytes_before: dict[Supply, int] = {}
        self.bytes_read: Counter[Origin] = Counter()
        self.num_readings = 0
        self.is_revoked = False
        self.started_s = started_s

    @property
    def slots(self) -> list[list[int]]:
        """The host slots of each block's layers."""
        return [block.slots for block in self.blocks]

    @property
    def first_bad(self) -> set[BlockKey]:
        """The first block that will not come, if any. Later ones may not have been looked for: a peer lends leading blocks only."""
        return set([block.key for block in self.blocks if block.is_bad][:1])


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How much of a stage is in host memory.

    Attributes:
        num_blocks: leading blocks that are not known to be bad. num_ready_blocks: leading blocks with all layers.
        num_ready_layers: layers that all `num_blocks` have.
        disk_bytes_done, disk_bytes_left: bytes read and still to be read, from disk or from the peer that it waits for.
        disk_bytes_ahead: bytes that other stages wait for there.
        is_from_peer: whether some of the missing blocks come from another node.
    """

    num_blocks: int
    num_ready_blocks: int
    num_ready_layers: int
    waited_s: float
    disk_bytes_done: int
    disk_bytes_left: int
    disk_bytes_ahead: int
    disk_bytes_per_s: float
    is_from_peer: bool = False


def count_while(flags: Iterable[bool]) -> int:
    """Return how many leading flags are true."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count
