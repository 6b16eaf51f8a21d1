"""Makes room in a disk log: removes the oldest segment, and carries its valuable blocks forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from kvtiers.io.block_read import BlockRead
from kvtiers.io.disk_room import DiskRoom
from kvtiers.io.files import Files
from kvtiers.io.log_contents import NEVER, BlockLocation, LogIndex
from kvtiers.io.log_reader import LogReader
from kvtiers.io.log_writer import LogWriter
from kvtiers.io.records import SEGMENT_HEADER_BYTES, Part, Record, RecordHead
from kvtiers.io.segment import Segment
from kvtiers.io.workers import FileWorkers
from kvtiers.keys import BlockKey
from kvtiers.policy.fairness import choose_victim, floors

logger = logging.getLogger(__name__)

# The share of an evicted segment that is carried forward: of blocks that were read, and of blocks whose owners are below their share. Chosen.
CARRIED_SHARE: Final = 1 / 2
CARRIED_FOR_OTHERS: Final = 7 / 8
# An owner that was not seen for this time has no share to be spared. Chosen: for users who come back the next day.
CLAIM_S: Final = 86_400.0


class Evictor:
    """Evicts segments. The caller holds the log's lock."""

    def __init__(
        self,
        directory: Path,
        contents: LogIndex,
        room: DiskRoom,
        reader: LogReader,
        writer: LogWriter,
        workers: FileWorkers,
        files: Files,
        now: Callable[[], float],
    ) -> None:
        self._directory, self._contents, self._room = directory, contents, room
        self._reader, self._writer = reader, writer
        self._workers, self._files, self._now = workers, files, now
        self._shape = contents.shape

    async def make_room(self, need_bytes: int) -> bool:
        """Evict until `need_bytes` fit, with room to carry blocks forward next time. Return False when all other segments are being read.

        Raises OSError when a file cannot be removed.
        """
        share = CARRIED_SHARE if len(self._contents.held) < 2 else CARRIED_FOR_OTHERS
        room_to_carry = int(self._room.segment_bytes * share) + SEGMENT_HEADER_BYTES
        target = max(self._room.capacity_bytes - room_to_carry - need_bytes, 0)
        while self._contents.num_bytes > target:
            givers = self._givers()
            victim = self._choose(givers)
            if victim is None:
                return self._contents.num_bytes + need_bytes <= self._room.capacity_bytes
            await self._evict(victim, givers)
        return True

    def _givers(self) -> Collection[int]:
        """Return the owners whose blocks make room now: a single owner, else the owners above their share and the ones long absent."""
        if len(self._contents.held) < 2:
            return self._contents.held.keys()
        since_s = self._now() - CLAIM_S
        absent = {owner for owner in self._contents.held if self._contents.used_s.get(owner, NEVER) < since_s}
        return (
            absent
            | floors(
                self._contents.held,
                self._contents.weights,
                max(self._room.segment_bytes // self._contents.single_bytes, 1),
            ).keys()
        )

    def _choose(self, givers: Collection[int]) -> Segment | None:
        segments = [segment for segment in self._contents.segments.values() if not segment.is_pinned]
        if len(self._contents.held) < 2 or not segments:
            return segments[0] if segments else None
        place = choose_victim(
            [(s.num_bytes // self._contents.single_bytes, s.live) for s in segments], givers
        )
        return segments[place] if place is not None else None

    async def _evict(self, victim: Segment, givers: Collection[int]) -> None:
        """Remove a segment, after its blocks that were read, or are not the givers', have been carried forward.

        Raises OSError; the segment is then still counted.
        """
        if self._writer.active is not None and self._writer.active[0] is victim:
            await self._writer.seal()
        live = self._contents.live(victim)
        chosen = self._second_chance(victim, live, givers)
        dropped = [key for key in live if key not in chosen]
        self._contents.counts.num_evicted += len(dropped)
        self._contents.drop(dropped)
        for record, keys in victim.records:
            kept = [key for key in keys if key in chosen and self._contents.is_at(key, record)]
            if kept:
                await self._carry(kept)
        left = self._contents.live(victim)
        self._contents.counts.num_evicted += len(left)
        self._contents.drop(left)
        await self._remove(victim)

    async def shed_oldest(self) -> bool:
        """Remove the oldest segment of a full disk. Return False when there is only the newest.

        Raises OSError.
        """
        held_bytes = self._contents.num_bytes
        victim = next((s for s in list(self._contents.segments.values())[:-1] if not s.is_pinned), None)
        if victim is None:
            return False
        left = self._contents.live(victim)
        self._contents.counts.num_evicted += len(left)
        self._contents.drop(left)
        await self._remove(victim)
        self._room.met_full_disk(held_bytes)
        return True

    async def _remove(self, victim: Segment) -> None:
        """Remove a segment's file once no read uses it. Raises OSError; the segment is then still counted."""
        await victim.wait_unpinned()  # Reads of the blocks just carried may have begun meanwhile.
        try:
            await self._workers.run(self._files.unlink, victim.path)
        except FileNotFoundError:
            pass
        # Another segment object may stand there if the folder was loaded again.
        if self._contents.segments.get(victim.number) is victim:
            del self._contents.segments[victim.number]
            self._contents.num_bytes -= victim.num_bytes

    def _second_chance(
        self, victim: Segment, live: Sequence[BlockKey], givers: Collection[int]
    ) -> set[BlockKey]:
        """Return the blocks to carry forward: first other owners' blocks than the givers', then blocks that were read, the last read first.

        They take up to half a segment's bytes; other owners' blocks may take more, as long as the eviction still gains room.
        """
        size = min(victim.num_bytes, self._room.segment_bytes)
        by_read = sorted(live, key=lambda key: self._contents.index[key].last_read_s, reverse=True)
        others = [key for key in by_read if self._contents.index[key].record.owner not in givers]
        # A new segment may have to be begun for them.
        gain = 2 * (SEGMENT_HEADER_BYTES + self._contents.single_bytes)
        most = max(size // 2, min(int(size * CARRIED_FOR_OTHERS), size - gain)) // self._contents.single_bytes
        chosen = set(others[:most])
        left = max(int(size * CARRIED_SHARE) // self._contents.single_bytes - len(chosen), 0)
        read = [key for key in by_read if self._contents.index[key].last_read_s > NEVER and key not in chosen]
        return chosen | set(read[:left])

    async def _carry(self, keys: list[BlockKey]) -> None:
        """Copy blocks of one record into the newest segment. Blocks that cannot be read or written stay where they are."""
        entries = [self._contents.index[key] for key in keys]
        shape = self._shape
        data = memoryview(bytearray(len(keys) * shape.block_bytes))

        def part(block: int, layer: int) -> memoryview:
            """Return the place of one part in the copy."""
            start = block * shape.block_bytes + layer * shape.layer_bytes
            return data[start : start + shape.layer_bytes]

        bad = set((await self._reader.read(BlockRead(keys, part), entries)).bad)
        good = [i for i in range(len(keys)) if i not in bad]
        need_bytes = RecordHead(len(good), shape).record_bytes + SEGMENT_HEADER_BYTES
        if not good or self._contents.num_bytes + need_bytes > self._room.capacity_bytes:
            return
        good_keys = [keys[i] for i in good]
        try:
            (record,) = await self._writer.write(
                [Record(good_keys, reordered(part, good), entries[0].record.owner)]
            )
        except OSError as error:
            self._contents.counts.num_write_errors += 1
            logger.warning("KV blocks cannot be carried forward in %s: %s", self._directory, error)
            return
        for position, i in enumerate(good):
            # Unless it was forgotten meanwhile.
            if self._contents.index.get(keys[i]) is entries[i]:
                self._contents.put(keys[i], BlockLocation(record, position))
                self._contents.counts.num_carried += 1


def reordered(part: Part, blocks: Sequence[int]) -> Part:
    """Return a source of the same bytes whose block `i` is block `blocks[i]` of the given one."""
    return lambda position, layer: part(blocks[position], layer)
