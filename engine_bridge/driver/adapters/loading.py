"""The loader's thread: reads adapters into host memory, on demand and ahead of their requests, and runs other long work."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch

from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.core.adapters.staging import ReadAhead
from engine_bridge.driver.adapters.blocks import AdapterInBlocks
from engine_bridge.driver.adapters.host_workers import AssistWorkers
from engine_bridge.driver.adapters.layouts import Layout, LayoutsAhead
from engine_bridge.driver.adapters.weights import AdapterWeights, Memories

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load. `weights`: None if it failed; then `problem` says why, if that is known."""

    weights: AdapterWeights | None
    source: Literal["disk", "cached"] = "disk"
    elapsed_s: float = 0.0
    problem: Exception | None = None
    was_ahead: bool = False


class AdapterLoader(Protocol):
    """A reader of adapters, on the loader's thread. `Loader` is one, where the engine's worker is in this process."""

    @property
    def buffers(self) -> Memories:
        """The memory that adapters are read into."""

    def load(self, record: AdapterRecord) -> AdapterWeights:
        """Read an adapter as it was registered. Raises AdapterRejected."""


class LoaderThread:
    """One thread and its results. Methods are for the engine's thread unless they say otherwise.

    Args:
        workers: get the adapters that were read.
        read_ahead: decides which adapters may be read ahead of their requests.
        wake: called on the thread when something is done.
    """

    def __init__(
        self,
        loader: AdapterLoader,
        workers: AssistWorkers,
        read_ahead: ReadAhead,
        layouts: LayoutsAhead,
        wake: Callable[[], None],
    ) -> None:
        self._loader = loader
        self._workers = workers
        self._wake = wake
        self._executor = ThreadPoolExecutor(1, "adapter-loader", initializer=_keep_out_of_the_way)
        self._done: deque[Callable[[], None]] = deque()
        self._read_ahead = read_ahead
        self._layouts = layouts
        self.early_layout_s = 0.0
        """Seconds spent on layouts ahead of requests."""
        self._ahead: dict[int, Future[Loaded]] = {}
        self._ahead_lock = threading.Lock()

    def load(
        self, record: AdapterRecord, entry: AdapterInBlocks | None, then: Callable[[Loaded], None]
    ) -> None:
        """Read an adapter, from KV blocks while they hold it, else from disk. `then` is called by `take_done`."""
        with self._ahead_lock:
            self._read_ahead.take(record.version_id)
            ahead = self._ahead.pop(record.version_id, None)
        if ahead is None:
            self._executor.submit(self._load, record, entry, then)
        elif ahead.done():
            self._done.append(lambda: then(self._take_ahead(record, ahead)))
        else:
            ahead.add_done_callback(lambda _: self._tell(lambda: then(self._take_ahead(record, ahead))))

    def lay_out(self, finish: Callable[[], None], then: Callable[[float, Exception | None], None]) -> None:
        """Run the rest of a slot's work. `take_done` calls `then` with the seconds it took and the error it raised, if any."""

        def run() -> None:
            """Run `finish`, and hand its duration and its error to `then`."""
            started_s, problem = time.perf_counter(), None
            try:
                finish()
            except Exception as error:
                problem = error
            elapsed_s = time.perf_counter() - started_s
            self._tell(lambda: then(elapsed_s, problem))

        self._executor.submit(run)

    def take_layout(self, adapter_id: int) -> Layout | None:
        """Return the adapter's layout that was made ahead, or is being made; None: there is no such layout."""
        return self._layouts.take(adapter_id)

    def give_up(self, adapter_id: int, weights: AdapterWeights) -> None:
        """Give up an adapter that leaves host memory: its layout, its copy at the workers and its buffer."""
        layout = self.take_layout(adapter_id)
        if layout is not None:
            layout.drop()
        self._executor.submit(self._workers.drop, adapter_id)
        self._give_back(weights)

    def has_done(self) -> bool:
        """Return whether a load has ended whose result has not been fetched yet."""
        return bool(self._done)

    def take_done(self) -> None:
        """Call back for all work that is done."""
        while self._done:
            self._done.popleft()()

    def rest(self) -> None:
        """Wait until the thread has finished all work it has."""
        self._executor.submit(lambda: None).result()

    def close(self) -> None:
        """Wait for the thread's current work; the rest is left undone."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    # -- ahead of requests -------------------------------------------------------------------------------------------

    def expect(self, record: AdapterRecord, now: float) -> None:
        """Read and lay out an adapter whose request is about to enter, unless too much is being read. From any thread."""
        with self._ahead_lock:
            if self._read_ahead.begin(record.version_id, record.num_bytes, now):
                self._ahead[record.version_id] = self._executor.submit(self._read_early, record, now)

    def expect_slot(
        self, record: AdapterRecord, weights_of: Callable[[int], AdapterWeights | None], now: float
    ) -> None:
        """Lay out an adapter in host memory whose request is about to enter. From any thread.

        `weights_of` is called on the loader's thread; it returns None if there is no need any more.
        """
        self._executor.submit(self._lay_out_early, record, weights_of, now)

    def drop_ahead(self, now: float) -> None:
        """Give up adapters that were read and laid out for requests that did not come."""
        self._layouts.expire(now)
        if not self._ahead:
            return
        with self._ahead_lock:
            dropped = [self._ahead.pop(adapter_id) for adapter_id in self._read_ahead.expire(now)]
        for read in dropped:
            if not read.cancel():  # it is done, or about to be
                read.add_done_callback(lambda done: self._tell(partial(self._give_up_read, done)))

    def _give_up_read(self, read: Future[Loaded]) -> None:
        weights = read.result().weights
        if weights is not None:
            self._give_back(weights)

    def _take_ahead(self, record: AdapterRecord, read: Future[Loaded]) -> Loaded:
        loaded = Loaded(None) if read.cancelled() else read.result()
        if loaded.weights is None:
            return loaded
        self._executor.submit(self._workers.put, record.version_id, loaded.weights)
        return Loaded(loaded.weights, elapsed_s=loaded.elapsed_s, was_ahead=True)

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _load(
        self, record: AdapterRecord, entry: AdapterInBlocks | None, then: Callable[[Loaded], None]
    ) -> None:
        try:
            loaded = self._copied(entry) or self._read(record)
            if loaded.weights is not None:
                self._workers.put(record.version_id, loaded.weights)
        except Exception as error:
            loaded = Loaded(None, problem=error)
        self._tell(lambda: then(loaded))

    def _read_early(self, record: AdapterRecord, now: float) -> Loaded:
        loaded = self._read(record)
        if loaded.weights is not None:
            self._lay_out_early(record, lambda adapter_id: loaded.weights, now)
        return loaded

    def _lay_out_early(
        self, record: AdapterRecord, weights_of: Callable[[int], AdapterWeights | None], now: float
    ) -> None:
        """Begin a layout ahead of its request.

        The thread continues it after the read's end has been told. A slot that is filled meanwhile uses the layers laid out by then.
        """
        try:
            layout = self._layouts.begin(record.version_id, record.num_bytes, weights_of, now)
        except Exception:  # out of memory: the layout ahead is only a hint
            log.exception("adapter %s could not be laid out ahead; its slot will have it", record.name)
            return
        if layout is not None:
            self._executor.submit(self._finish, layout)

    def _finish(self, layout: Layout) -> None:
        started_s = time.perf_counter()
        try:
            layout.finish()
        except Exception:
            log.exception("an adapter could not be laid out ahead; its step will")
        self.early_layout_s += time.perf_counter() - started_s

    def _copied(self, entry: AdapterInBlocks | None) -> Loaded | None:
        """Copy an adapter from its blocks. None if there are no blocks to copy from, or they were taken meanwhile."""
        if entry is None:
            return None
        started_s = time.perf_counter()
        weights = entry.read(self._loader.buffers.take(entry.size_bytes))
        return Loaded(weights, "cached", time.perf_counter() - started_s) if weights is not None else None

    def _read(self, record: AdapterRecord) -> Loaded:
        started_s = time.perf_counter()
        try:
            weights = self._loader.load(record)
        except Exception as error:
            return Loaded(None, problem=error)
        return Loaded(weights, elapsed_s=time.perf_counter() - started_s)

    def _tell(self, news: Callable[[], None]) -> None:
        self._done.append(news)
        self._wake()

    def _give_back(self, weights: AdapterWeights) -> None:
        if weights.release is not None:
            weights.release()
        if weights.buffer is not None:
            self._executor.submit(self._loader.buffers.give_back, weights.buffer)


def _keep_out_of_the_way() -> None:
    """Let this thread compute with one thread only, on any core.

    A thread inherits its core from the engine's, where it would take turns with it. vLLM's CPU worker replaces `torch.set_num_threads` by a function
    that does nothing; the one beneath it is per thread.
    """
    torch._C.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
