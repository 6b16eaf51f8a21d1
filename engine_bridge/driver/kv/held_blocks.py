"""Blocks of the device that a copy beside the steps still reads or writes.

No kernel waits for such a copy. So until it is made its blocks are held in vLLM's block pool: no request is given them, and none finds what is still
on its way into them. Source: vLLM's SimpleCPUOffload, which holds the blocks that it stores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any

# The longest wait for copies that must end before the engine continues. Chosen: many times what copying all of host memory takes.
PATIENCE_S = 30.0
# Meanwhile, the seconds between two questions whether they have. Chosen.
LOOK_S = 0.005


class HeldBlocks:
    """The blocks that copies hold. All methods are called on the engine thread; the functions that `keep` returns, on any.

    Args:
        wake: called on any thread when `advance` has something to do.
    """

    def __init__(self, pool: Any, wake: Callable[[], None]) -> None:
        self._pool, self._wake = pool, wake
        self._num_kept = 0
        self._kept: dict[int, tuple[list[Any], Callable[[bool], None]]] = {}
        # Those whose blocks are the next to be given away again.
        self._first: set[int] = set()
        # The numbers of copies that have ended, and whether each was made.
        self._ended: SimpleQueue[tuple[int, bool]] = SimpleQueue()

    def hold(
        self,
        block_ids: Iterable[int],
        then: Callable[[bool], None] = lambda is_made: None,
        *,
        go_first: bool = False,
    ) -> Callable[[bool], None]:
        """Hold the blocks of these numbers while they are saved. then: as in `keep`, whose result is returned.

        go_first: whether they were the next to be given away, and are again afterwards.
        """
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        end = self.keep(blocks, then)
        if go_first:
            self._first.add(self._num_kept)
        return end

    def keep(
        self, blocks: Iterable[Any], then: Callable[[bool], None] = lambda is_made: None
    ) -> Callable[[bool], None]:
        """Keep the caller's hold of the pool's blocks until a copy has ended. Then they are given back, those behind in the order first.

        Returns a function to be called once, when the copy has ended, and told whether it was made; `then` is told it by `advance` before they are
        given back.
        """
        self._num_kept = number = self._num_kept + 1
        self._kept[number] = list(blocks), then

        def end(is_made: bool) -> None:
            """Note that the copy has ended."""
            self._ended.put((number, is_made))
            self._wake()

        return end

    def has_work(self) -> bool:
        """Return whether a copy has ended."""
        return not self._ended.empty()

    def wait_s(self) -> float | None:
        """Return None: the copier reports the end of a copy, so there is nothing to look for."""
        return None

    @property
    def num_open(self) -> int:
        """The number of copies that hold blocks."""
        return len(self._kept)

    @property
    def holds_last(self) -> bool:
        """Whether there are blocks that become free when a copy ends, as nothing else holds them."""
        return any(block.ref_cnt == 1 for blocks, _ in self._kept.values() for block in blocks)

    def advance(self, timeout_s: float = 0.0) -> None:
        """Give back the blocks of copies that have ended. timeout_s: how long to wait for one, if none has."""
        while self._kept:
            try:
                number, is_made = (
                    self._ended.get(timeout=timeout_s) if timeout_s else self._ended.get_nowait()
                )
            except Empty:
                return
            timeout_s = 0.0
            if number not in self._kept:  # told a second time, because something behind the first word failed
                continue
            blocks, then = self._kept.pop(number)
            try:
                then(is_made)
            finally:
                # The beginning of a conversation is evicted last, because it is of use without the end.
                self._pool.free_blocks(reversed(blocks))
                if number in self._first:
                    self._first.discard(number)
                    queue = self._pool.free_block_queue
                    free = [block for block in reversed(blocks) if not block.ref_cnt]
                    for block in free:
                        queue.remove(block)
                    queue.prepend_n(free)

    def finish(self, ask: Callable[[], None]) -> None:
        """Return when no copy holds blocks, or when that takes too long. ask: has copies tell of their end, where they do not by themselves."""
        ends_s = time.monotonic() + PATIENCE_S
        while self._kept and time.monotonic() < ends_s:
            ask()
            self.advance(LOOK_S)
