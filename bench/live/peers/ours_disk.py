"""Our node whose KV comes from the disk: reads that the page cache does not answer, and others' streams at work all the while."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.live.peers.engine import Settings
from bench.live.peers.ours import SlowableFiles, TieredNode
from bench.live.peers.play import text

# Of a stream of somebody else's; each is followed by the next. Chosen: a short question with a long answer.
STREAM_PROMPT_TOKENS, STREAM_ANSWER_TOKENS = 64, 400


class ForgettingFiles(SlowableFiles):
    """The real file system, whose page cache forgets what was read: the next read of it is the disk's again."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        num_bytes = super().preadv(fd, buffers, offset)
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        return num_bytes


class DiskNode(TieredNode):
    """A node with KV tiers beside which others' streams run."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, has_tiers=True, files=ForgettingFiles())
        self._num_streams = 0

    def hold(self) -> None:
        """Have the device hold every conversation as it stood at first."""
        self.talk.restart("")
        for history in self.talk.histories.values():
            self.turn(history, 1)

    def people_beside(self, num_streams: int, **script: Any) -> dict[str, Any]:
        """`people` beside so many streams. What they were answered, the streams' tokens a second and the longest times between two of their
        tokens, and bytes that the tiers and the disk itself have read."""
        self.talk.restart(script.pop("seed"))
        return self._await(self._people_beside(num_streams, script))

    async def _people_beside(self, num_streams: int, script: dict[str, Any]) -> dict[str, Any]:
        came_s: list[list[float]] = [[] for _ in range(num_streams)]
        streams = [asyncio.create_task(self._stream(times)) for times in came_s]
        while not all(came_s):  # noqa: ASYNC110  (a few steps)
            await asyncio.sleep(0.01)
        for times in came_s:
            times.clear()
        tiers_before, disk_before, started_s = self._tier_bytes_read(), bytes_from_disk(), time.perf_counter()
        try:
            asked = await self._people(**script)
        finally:
            elapsed_s = time.perf_counter() - started_s
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        return {
            "asked": asked,
            "decode_tokens_per_s": sum(map(len, came_s)) / elapsed_s,
            "gaps_s": [later - sooner for times in came_s for sooner, later in pairwise(times)],
            "tier_bytes": self._tier_bytes_read() - tiers_before,
            "disk_bytes": bytes_from_disk() - disk_before,
        }

    async def _stream(self, came_s: list[float]) -> None:
        while True:
            self._num_streams += 1
            prompt = text(STREAM_PROMPT_TOKENS, "stream", self._num_streams)
            async for output in self._generate(prompt, STREAM_ANSWER_TOKENS):
                came_s += [time.perf_counter()] * len(output.outputs[0].token_ids)

    def _tier_bytes_read(self) -> int:
        stats = self._tiers.stats()
        return stats.disk.bytes_read if stats is not None else 0


def bytes_from_disk() -> int:
    """What the kernel has fetched from storage for this process so far; what its page cache has is not counted."""
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            name, _, value = line.partition(": ")
            if name == "read_bytes":
                return int(value)
    return 0
