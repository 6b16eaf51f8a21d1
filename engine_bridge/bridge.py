"""The engine thread: commands in by a queue, outputs out in batches, a rebuild when a step fails.

It knows no vllm: an engine is anything with the four methods of `Driver`. One thread builds, steps and closes it, because nothing
in vLLM's in-process engine is locked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from engine_bridge.errors import EngineUnavailable
from engine_bridge.node import NodeState

log = logging.getLogger(__name__)

# Back-off while the engine holds requests none of which may run now (a grammar that compiles, a gate, an empty quota):
# short enough that nobody notices, long enough to stay under 1% CPU (an empty step takes about 0.1 ms).
FIRST_WAIT_S, LONGEST_WAIT_S = 0.001, 0.050
REBUILD_WAITS_S = (0.0, 1.0, 5.0, 30.0)
# Outputs that nobody waits for (neither the first nor the last of a request) cross to the event loop at most this often:
# docs/decisions/0002.
DELIVERY_INTERVAL_S = 0.050
STEP_SMOOTHING = 0.1  # chosen: the last ten steps or so count


class Driver(Protocol):
    """An engine as the bridge sees it. Every method is called on the engine thread only."""

    def has_work(self) -> bool:
        """Are there requests, running or waiting, or anything else that a step would move?"""

    def step(self) -> list[Any]:
        """Run one step and return its outputs (none if nothing could run). An exception means: not to be trusted any more."""

    def is_urgent(self, outputs: list[Any]) -> bool:
        """Is one of these outputs the first or the last of its request?"""

    def wait_s(self) -> float | None:
        """Without work: how long until there is some by itself; None for as long as nothing comes."""

    def is_stuck(self) -> bool:
        """After a step without outputs: does nothing run, so that stepping again at once would only spin?"""

    def close(self) -> None: ...


D = TypeVar("D", bound=Driver)
T = TypeVar("T")


class EngineThread(Generic[D]):
    """Owns a driver on a thread of its own.

    Args:
        make_driver: builds a driver; runs on the engine thread, again after each failure.
        on_outputs: called on the event loop with the outputs of one or more steps, in order.
        on_failed: called on the event loop once when a driver died, before the rebuild: end its streams.
        on_rebuilt: called on the engine thread with the new driver, after what was submitted while it was built has been dropped.
    """

    def __init__(
        self,
        make_driver: Callable[[], D],
        on_outputs: Callable[[list[Any]], None],
        on_failed: Callable[[BaseException], None],
        on_rebuilt: Callable[[D], None] = lambda driver: None,
    ) -> None:
        self._make_driver = make_driver
        self._on_outputs = on_outputs
        self._on_failed = on_failed
        self._on_rebuilt = on_rebuilt
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._outputs: deque[list[Any]] = deque()
        self._delivery_posted = False
        self._delivered_s = -math.inf
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.driver: D | None = None
        """While there is one. To look at only: what it does is the engine thread's business."""
        self.state: NodeState = "starting"
        self.error: BaseException | None = None
        self.num_steps = 0
        self.num_rebuilds = 0
        self.step_s = 0.0
        """Recent time of a step that gave outputs, smoothed, in seconds; 0 before the first."""

    # -- event loop side ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Build the driver. Returns when it is ready; raises what stopped it."""
        self._loop = asyncio.get_running_loop()
        ready = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        await ready

    def submit(self, run: Callable[[D], None]) -> None:
        """Have `run(driver)` done between steps; its exceptions are logged. Dropped if the driver dies first."""
        self._put(_Command(run, None))

    def call(self, run: Callable[[D], T]) -> asyncio.Future[T]:
        """Have `run(driver)` done between steps and its result brought back. EngineUnavailable if the driver dies first."""
        future = self._loop.create_future()
        if self.state not in ("ready", "draining"):
            future.set_exception(EngineUnavailable(f"the engine is {self.state}"))
            return future
        self._put(_Command(run, future))
        return future

    def wake(self) -> None:
        """Have the engine look again soon: something that it could not run may run now. From any thread."""
        self._wake.set()

    async def close(self) -> None:
        """Stop after the step in flight and wait for the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self.state = "closed"

    def _put(self, command: _Command) -> None:
        self._commands.put(command)
        self._wake.set()

    def _deliver(self) -> None:
        # Cleared first: a step that ends from here on posts again, so no output waits for the next one.
        self._delivery_posted = False
        outputs: list[Any] = []
        while self._outputs:
            outputs.extend(self._outputs.popleft())
        if outputs:
            self._on_outputs(outputs)

    # -- engine thread -----------------------------------------------------------------------------------------------

    def _post(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is gone: the process is going down, nobody is left to tell
            self._stopping = True

    def _main(self, ready: asyncio.Future[None]) -> None:
        driver: D | None
        try:
            driver = self._make_driver()
        except BaseException as error:
            self.state, self.error = "failed", error
            self._post(_fail, ready, error)
            return
        self.state, self.driver = "ready", driver
        self._post(_resolve, ready, None)
        while driver is not None and not self._stopping:
            try:
                self._run(driver)
            except BaseException as error:
                self.driver = None
                self.driver = driver = self._rebuild(driver, error)
        self._fail_commands(EngineUnavailable("the engine is closed"))
        self.driver = None
        if driver is not None:
            _close(driver)

    def _run(self, driver: D) -> None:
        wait_s = FIRST_WAIT_S
        while not self._stopping:
            self._do_commands(driver)
            if not driver.has_work():
                self._flush()
                self._sleep(driver.wait_s())
                continue
            started_s = time.monotonic()
            outputs = driver.step()
            self.num_steps += 1
            if outputs:
                now_s = time.monotonic()
                self.step_s += STEP_SMOOTHING * (now_s - started_s - self.step_s)
                self._outputs.append(outputs)
                if driver.is_urgent(outputs) or now_s - self._delivered_s >= DELIVERY_INTERVAL_S:
                    self._flush()
                wait_s = FIRST_WAIT_S
            elif driver.is_stuck():
                self._flush()
                self._sleep(wait_s)
                wait_s = min(wait_s * 2, LONGEST_WAIT_S)

    def _flush(self) -> None:
        """Have what has gathered delivered, unless a delivery is on its way already."""
        if self._outputs and not self._delivery_posted:
            self._delivery_posted = True
            self._delivered_s = time.monotonic()
            self._post(self._deliver)

    def _sleep(self, timeout_s: float | None) -> None:
        self._wake.wait(timeout_s)
        self._wake.clear()

    def _do_commands(self, driver: D) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            try:
                result = command.run(driver)
            except Exception as error:
                if command.future is None:
                    log.exception("a command failed on the engine thread")
                else:
                    self._post(_fail, command.future, error)
            else:
                if command.future is not None:
                    self._post(_resolve, command.future, result)

    def _rebuild(self, broken: D, error: BaseException) -> D | None:
        """Replace a driver whose step raised: its KV and its queues are not to be trusted.

        Measured: block hashes are registered when a step is scheduled, so an exception in the
        forward pass leaves prefix-cache entries that hold no KV.
        """
        log.error("an engine step failed; all its requests end and the engine is rebuilt", exc_info=error)
        self.state, self.error = "rebuilding", error
        self._outputs.clear()
        _clear_frames(error)
        self._post(self._on_failed, error)
        self._fail_commands(EngineUnavailable("the engine failed and is being rebuilt"))
        _close(broken)
        del broken
        for wait_s in REBUILD_WAITS_S:
            deadline = time.monotonic() + wait_s
            while not self._stopping and (left := deadline - time.monotonic()) > 0:
                self._sleep(left)
            if self._stopping:
                return None
            try:
                driver = self._make_driver()
            except Exception as failure:
                log.exception("rebuilding the engine failed")
                _clear_frames(failure)
                self.error = failure
                continue
            self._fail_commands(EngineUnavailable("the engine failed and was rebuilt; ask again"))
            self._on_rebuilt(driver)
            self.state, self.error = "ready", None
            self.num_rebuilds += 1
            return driver
        self.state = "failed"
        return None

    def _fail_commands(self, error: EngineUnavailable) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command.future is not None:
                self._post(_fail, command.future, error)


class _Command:
    __slots__ = ("future", "run")

    def __init__(self, run: Callable[[Any], Any], future: asyncio.Future[Any] | None) -> None:
        self.run = run
        self.future = future


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _clear_frames(error: BaseException) -> None:
    """Of it and all that led to it: their variables hold on to the engine that failed, and a device has no room for two."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:  # one may be its own cause
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def _close(driver: Driver) -> None:
    try:
        driver.close()
    except Exception:
        log.exception("closing the engine failed")
