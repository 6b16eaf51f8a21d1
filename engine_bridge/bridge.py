"""The engine thread: commands in by a queue, outputs out in batches, a rebuild when a step fails.

It knows no vllm: an engine is anything with the four methods of `Driver`. One thread builds, steps and closes it, because nothing
in vLLM's in-process engine is locked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from engine_bridge.protocol.errors import BridgeError, EngineUnavailable
from engine_bridge.protocol.figures import NodeState

log = logging.getLogger(__name__)

# Back-off while the engine holds requests none of which may run now (a grammar that compiles, a gate, an empty quota):
# too short to be felt, long enough to stay under 1% CPU (an empty step takes about 0.1 ms).
FIRST_WAIT_S, LONGEST_WAIT_S = 0.001, 0.050
REBUILD_WAITS_S = (0.0, 1.0, 5.0, 30.0)
STEP_SMOOTHING = 0.1  # chosen: the last ten steps or so count


class Driver(Protocol):
    """An engine as the bridge sees it. Every method is called on the engine thread only."""

    def has_work(self) -> bool:
        """Return whether there are requests, running or waiting, or anything else that a step would move."""

    def step(self) -> list[Any]:
        """Run one step and return its outputs (none if nothing could run). After an exception the engine cannot be trusted any more."""

    def is_urgent(self, outputs: list[Any]) -> bool:
        """Return whether one of these outputs is the first or the last of its request."""

    def wait_s(self) -> float | None:
        """Return the seconds until there is work again without a new command; None if none will come."""

    def is_stuck(self) -> bool:
        """Return whether nothing runs after a step without outputs, so that stepping again at once would only spin."""

    def close(self) -> None:
        """End the engine."""


D = TypeVar("D", bound=Driver)
T = TypeVar("T")


class EngineThread(Generic[D]):
    """Owns a driver, on a separate thread.

    Args:
        make_driver: builds a driver; runs on the engine thread, again after each failure.
        on_outputs: called on the event loop with the outputs of one or more steps, in order.
        on_failed: called on the event loop once when a driver failed, before the rebuild: ends its streams.
        on_rebuilt: called on the engine thread with the new driver, after commands that came while it was built have been dropped.
        delivery_s: least seconds between two deliveries of outputs that are neither the first nor the last of a request; 0: after each step. See
            docs/decisions/0002.
    """

    def __init__(
        self,
        make_driver: Callable[[], D],
        on_outputs: Callable[[list[Any]], None],
        on_failed: Callable[[BaseException], None],
        on_rebuilt: Callable[[D], None] = lambda driver: None,
        *,
        delivery_s: float = 0.0,
    ) -> None:
        self._make_driver = make_driver
        self._delivery_s = delivery_s
        self._on_outputs = on_outputs
        self._on_failed = on_failed
        self._on_rebuilt = on_rebuilt
        self._commands = _Commands()
        self._wake = threading.Event()
        self._outputs: deque[list[Any]] = deque()
        self._delivery_posted = False
        self._delivered_s = -math.inf
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.driver: D | None = None
        """The driver, while there is one. For reading only: the engine thread alone acts on it."""
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
        """Run `run(driver)` between two steps; its exceptions are logged. It is dropped if the driver fails first."""
        self._put(_Command(run, None))

    def call(self, run: Callable[[D], T]) -> asyncio.Future[T]:
        """Run `run(driver)` between two steps and return a future of its result.

        The future raises EngineUnavailable if the driver fails or the engine is closed before that.
        """
        future = self._loop.create_future()
        if self.state not in ("ready", "draining", "asleep"):
            future.set_exception(EngineUnavailable(f"the engine is {self.state}"))
        elif not self._put(_Command(run, future)):
            future.set_exception(_closed())
        return future

    def rest(self, run: Callable[[D], None]) -> asyncio.Future[None]:
        """Run `run(driver)` between two steps, after which no step runs until `go_on`; commands do. The future is that of `call`.

        A `BridgeError` of `run` says that nothing has changed. After any other error the engine may be half asleep: it is rebuilt.
        """
        return self.call(lambda driver: self._run_into("asleep", run, driver))

    def go_on(self, run: Callable[[D], None]) -> asyncio.Future[None]:
        """Run `run(driver)`, after which steps run again. Its errors are those of `rest`. The future is that of `call`."""
        return self.call(lambda driver: self._run_into("ready", run, driver))

    def _run_into(self, state: NodeState, run: Callable[[D], None], driver: D) -> None:
        try:
            run(driver)
        except BridgeError:
            raise
        except Exception as error:
            raise _EngineBroken(f"{type(error).__name__}: {error}") from error
        self.state = state

    def wake(self) -> None:
        """Make the engine look again soon: work that it could not do may be possible now. From any thread."""
        self._wake.set()

    async def close(self) -> None:
        """Stop after the step in flight and wait for the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self.state = "closed"

    def close_later(self, then: Callable[[], object]) -> bool:
        """Close the first engine once it is built, which nothing can interrupt, then call `then`, on a thread that ends with the process.

        Returns False where no first engine is being built: call `close` then.
        """
        thread = self._thread
        if thread is None or self.state != "starting":
            return False
        self._stopping = True

        def close() -> None:
            """Wait for the engine thread, and go on."""
            thread.join()
            then()

        threading.Thread(target=close, name="engine-close", daemon=True).start()
        return True

    def _put(self, command: _Command) -> bool:
        """Return whether the engine thread will run this command, or fail it."""
        is_taken = self._commands.put(command)
        self._wake.set()
        return is_taken

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
        except RuntimeError:  # the loop is closed: the process is going down
            self._stopping = True

    def _main(self, ready: asyncio.Future[None]) -> None:
        try:
            driver = self._build_first(ready)
            while driver is not None:
                driver = self._serve(driver)
        except BaseException as error:
            log.exception("the engine thread ends: its engine could not be replaced")
            self.state, self.error = "failed", error
        finally:
            self.driver = None
            self._fail(self._commands.close(), _closed())

    def _build_first(self, ready: asyncio.Future[None]) -> D | None:
        try:
            driver = self._make_driver()
        except BaseException as error:
            self.state, self.error = "failed", error
            self._post(_set_error, ready, error)
            return None
        self.state, self.driver = "ready", driver
        self._post(_resolve, ready, None)
        return driver

    def _serve(self, driver: D) -> D | None:
        """Step until the engine is to stop or a step fails. Returns the engine that takes this one's place, None for none."""
        try:
            self._run(driver)
        except BaseException as error:
            self.driver = None
            self.driver = self._rebuild(driver, error)
            return self.driver
        self.driver = None
        # No command is taken from here on, so that no caller waits for an engine that is being closed.
        self._fail(self._commands.close(), _closed())
        _close(driver)
        return None

    def _run(self, driver: D) -> None:
        wait_s = FIRST_WAIT_S
        while not self._stopping:
            self._do_commands(driver)
            is_asleep = self.state == "asleep"
            if is_asleep or not driver.has_work():
                self._flush()
                self._sleep(None if is_asleep else driver.wait_s())
                continue
            started_s = time.monotonic()
            outputs = driver.step()
            self.num_steps += 1
            if outputs:
                now_s = time.monotonic()
                self.step_s += STEP_SMOOTHING * (now_s - started_s - self.step_s)
                self._outputs.append(outputs)
                if driver.is_urgent(outputs) or now_s - self._delivered_s >= self._delivery_s:
                    self._flush()
                wait_s = FIRST_WAIT_S
            elif driver.is_stuck():
                self._flush()
                self._sleep(wait_s)
                wait_s = min(wait_s * 2, LONGEST_WAIT_S)

    def _flush(self) -> None:
        """Post a delivery of the outputs that have gathered, unless one is posted already."""
        if self._outputs and not self._delivery_posted:
            self._delivery_posted = True
            self._delivered_s = time.monotonic()
            self._post(self._deliver)

    def _sleep(self, timeout_s: float | None) -> None:
        self._wake.wait(timeout_s)
        self._wake.clear()

    def _do_commands(self, driver: D) -> None:
        while (command := self._commands.get()) is not None:
            try:
                result = command.run(driver)
            except BaseException as error:
                if command.future is not None:
                    self._post(_set_error, command.future, error)
                elif isinstance(error, Exception):
                    log.exception("a command failed on the engine thread")
                if not isinstance(error, Exception):
                    raise
            else:
                if command.future is not None:
                    self._post(_resolve, command.future, result)

    def _rebuild(self, broken: D, error: BaseException) -> D | None:
        """Replace a driver whose step raised: its KV and its queues cannot be trusted.

        Measured: block hashes are registered when a step is scheduled, so an exception in the forward pass leaves prefix-cache entries that hold no
        KV.
        """
        log.error("an engine step failed; all its requests end and the engine is rebuilt", exc_info=error)
        self.state, self.error = "rebuilding", error
        self._outputs.clear()
        _clear_frames(error)
        self._post(self._on_failed, error)
        self._fail(self._commands.take_all(), EngineUnavailable("the engine failed and is being rebuilt"))
        _close(broken)
        del broken
        for wait_s in REBUILD_WAITS_S:
            deadline = time.monotonic() + wait_s
            while not self._stopping and (left := deadline - time.monotonic()) > 0:
                self._sleep(left)
            if self._stopping:
                return None
            try:
                driver = self._build_again()
            except Exception as failure:
                log.exception("rebuilding the engine failed")
                _clear_frames(failure)
                self.error = failure
                continue
            self.state, self.error = "ready", None
            self.num_rebuilds += 1
            return driver
        self.state = "failed"
        return None

    def _build_again(self) -> D:
        driver = self._make_driver()
        try:
            self._fail(
                self._commands.take_all(), EngineUnavailable("the engine failed and was rebuilt; ask again")
            )
            self._on_rebuilt(driver)
        except BaseException:
            _close(driver)
            raise
        return driver

    def _fail(self, commands: Iterable[_Command], error: EngineUnavailable) -> None:
        for command in commands:
            if command.future is not None:
                self._post(_set_error, command.future, error)


class _EngineBroken(BaseException):
    """A command has left the engine in a state that no step may run in. As any error that is no Exception it has the engine rebuilt."""


class _Command(NamedTuple):
    run: Callable[[Any], Any]
    future: asyncio.Future[Any] | None


class _Commands:
    """Commands that wait for the engine thread, the oldest first, until `close`. From any thread."""

    def __init__(self) -> None:
        self._waiting: deque[_Command] = deque()
        self._is_open = True
        self._lock = threading.Lock()

    def put(self, command: _Command) -> bool:
        """Add a command. Returns False once closed: the command is not taken."""
        with self._lock:
            if self._is_open:
                self._waiting.append(command)
            return self._is_open

    def get(self) -> _Command | None:
        """Return the oldest command; None if none waits."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def take_all(self) -> list[_Command]:
        """Return all commands that wait, and forget them."""
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
            return waiting

    def close(self) -> list[_Command]:
        """Take no more commands. Returns the commands that wait still."""
        with self._lock:
            self._is_open = False
        return self.take_all()


def _closed() -> EngineUnavailable:
    return EngineUnavailable("the engine is closed")


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(_bearable(error))


def _bearable(error: BaseException) -> Exception:
    """Return an exception that a future may hold.

    asyncio refuses StopIteration, so its caller would wait for ever; SystemExit would end the event loop.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    bearable = EngineUnavailable(
        "the engine has failed and is being rebuilt; try again in a moment"
        if isinstance(error, _EngineBroken)
        else f"the engine thread was ended by {type(error).__name__}: {error}"
    )
    bearable.__cause__ = error
    return bearable


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and of its causes: their variables hold on to the engine that failed, and a device has no room for two."""
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
