import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine_bridge import bridge
from engine_bridge.bridge import EngineThread
from engine_bridge.protocol.errors import EngineUnavailable


class ScriptedDriver:
    """A driver whose requests are numbers: each step gives one output of each until it reaches zero."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.num_steps = 0
        self.is_gated = False
        self.due_in_s: float | None = None
        self.fault: Exception | None = None
        self.thread = threading.current_thread()
        self.is_closed = False

    def has_work(self) -> bool:
        return bool(self.left)

    def wait_s(self) -> float | None:
        return self.due_in_s

    def is_stuck(self) -> bool:
        return self.is_gated

    def is_urgent(self, outputs: list[Any]) -> bool:
        return False  # so that the tests see what waits longest

    def step(self) -> list[Any]:
        assert threading.current_thread() is self.thread, "stepped on another thread than it was built on"
        self.num_steps += 1
        if self.fault is not None:
            raise self.fault
        if self.is_gated:
            return []
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            outputs.append((name, self.left[name]))
            if self.left[name] == 0:
                del self.left[name]
        return outputs

    def close(self) -> None:
        self.is_closed = True


class Harness:
    """An engine thread with what it delivered and the drivers it built."""

    def __init__(self, make: Callable[[], ScriptedDriver] = ScriptedDriver, delivery_s: float = 0.05) -> None:
        self.built: list[ScriptedDriver] = []
        self.outputs: list[Any] = []
        self.failures: list[BaseException] = []
        self.changed = asyncio.Event()
        self._make = make
        self.thread: EngineThread[ScriptedDriver] = EngineThread(
            self._build, self._on_outputs, self._on_failed, delivery_s=delivery_s
        )

    def _build(self) -> ScriptedDriver:
        driver = self._make()
        self.built.append(driver)
        return driver

    def _on_outputs(self, outputs: list[Any]) -> None:
        self.outputs.extend(outputs)
        self.changed.set()

    def _on_failed(self, error: BaseException) -> None:
        self.failures.append(error)
        self.changed.set()

    def break_down(self) -> None:
        """Let the next step fail."""
        fault = RuntimeError("boom")
        self.thread.submit(lambda driver: (driver.left.update(a=1), setattr(driver, "fault", fault)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def until_state(self, state: str, num_rebuilds: int = 0) -> None:
        """The engine thread tells nobody of its state, so it is looked at until it is right."""
        async with asyncio.timeout(60):
            while self.thread.num_rebuilds < num_rebuilds or self.thread.state != state:
                await asyncio.sleep(0)


@asynccontextmanager
async def running(*settings: Any) -> AsyncIterator[Harness]:
    harness = Harness(*settings)
    await harness.thread.start()
    try:
        yield harness
    finally:
        await harness.thread.close()


async def test_outputs_gather_until_one_is_urgent() -> None:
    """While the engine is busy, the event loop is woken for urgent outputs only (and now and then: here never)."""
    start, urgent = 10**9, 10**9 - 100
    async with running(ScriptedDriver, 3600) as harness:
        harness.built[0].is_urgent = lambda outputs: ("a", urgent) in outputs  # type: ignore[method-assign]
        harness.thread.submit(lambda driver: driver.left.update(a=start))
        # The very first output goes at once: the last delivery was long ago.
        await harness.until(lambda: ("a", urgent) in harness.outputs)
        num_delivered = len(harness.outputs)
        steps = await harness.thread.call(lambda driver: driver.num_steps)
        while await harness.thread.call(lambda driver: driver.num_steps) < steps + 1000:
            pass
        assert len(harness.outputs) == num_delivered
        harness.thread.submit(lambda driver: driver.left.clear())
        await harness.until(lambda: len(harness.outputs) > num_delivered + 1000)
    assert [start - left for _, left in harness.outputs] == list(range(1, len(harness.outputs) + 1))


async def test_an_idle_engine_looks_again_when_something_is_due() -> None:
    async with running() as harness, asyncio.timeout(60):
        driver = harness.built[0]
        driver.due_in_s = 0.01
        harness.thread.wake()
        await asyncio.sleep(0.02)
        driver.left["a"] = 1  # nobody wakes the engine for it
        while driver.left:
            await asyncio.sleep(0.001)
        assert driver.num_steps == 1


async def test_work_that_may_not_run_is_not_spun_on() -> None:
    async with running() as harness:
        harness.thread.submit(lambda driver: (driver.left.update(a=1), setattr(driver, "is_gated", True)))
        await asyncio.to_thread(time.sleep, 0.1)
        # Without a back-off it would have stepped thousands of times.
        assert 1 <= harness.built[0].num_steps < 40
        harness.thread.submit(lambda driver: setattr(driver, "is_gated", False))
        await harness.until(lambda: harness.outputs == [("a", 0)])


class Memory:
    """What a step holds."""


async def test_what_a_failed_step_held_is_gone_before_the_next_engine_is_built() -> None:
    refs: list[weakref.ref[Memory]] = []
    left: list[list[Memory | None]] = []

    def held() -> Memory:
        memory = Memory()
        refs.append(weakref.ref(memory))
        return memory

    def fails() -> None:
        memory = held()  # noqa: F841
        raise KeyError("inner")

    class Holding(ScriptedDriver):
        def step(self) -> list[Any]:
            memory = held()  # noqa: F841
            try:
                fails()
            except KeyError as error:
                error.__cause__ = error  # no walk along the causes may go round for ever
                raise RuntimeError("boom") from error
            return []

    def make() -> ScriptedDriver:
        left.append([ref() for ref in refs])
        return ScriptedDriver() if refs else Holding()

    async with running(make) as harness:
        harness.thread.submit(lambda driver: driver.left.update(a=1))
        await harness.until_state("ready", 1)
        assert left == [[], [None, None]]


class Building:
    """Makes drivers, and waits in the build of number `waits_at`; the builds of `faults` raise."""

    def __init__(self, waits_at: int = 0, **faults: BaseException) -> None:
        self.num_builds, self.waits_at, self.faults = 0, waits_at, faults
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self) -> ScriptedDriver:
        self.num_builds += 1
        if self.num_builds == self.waits_at:
            self.entered.set()
            self.release.wait(60)
        fault = self.faults.get("first" if self.num_builds == 1 else "later")
        if fault is not None:
            raise fault
        return ScriptedDriver()


async def test_a_failed_step_ends_the_streams_and_calls_fail_clearly_until_the_engine_is_rebuilt() -> None:
    building = Building(waits_at=2)
    async with running(building) as harness:
        harness.break_down()
        await harness.until(lambda: [str(error) for error in harness.failures] == ["boom"])
        with pytest.raises(EngineUnavailable):
            await harness.thread.call(lambda driver: None)
        building.release.set()
        await harness.until_state("ready", 1)
        assert harness.built[0].is_closed and len(harness.built) == 2
        assert await harness.thread.call(lambda driver: driver.left) == {}
        harness.thread.submit(lambda driver: driver.left.update(a=2, b=1))
        await harness.until(lambda: len(harness.outputs) == 3)
        assert harness.outputs == [("a", 1), ("b", 0), ("a", 0)]


async def test_rebuilding_is_tried_again_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "REBUILD_WAITS_S", (0.0, 0.001))
    building = Building(later=OSError("no memory"))
    async with running(building) as harness:
        harness.break_down()
        await harness.until_state("failed")
        assert building.num_builds == 3
        with pytest.raises(EngineUnavailable):
            await harness.thread.call(lambda driver: None)


def leave(driver: ScriptedDriver) -> None:
    raise SystemExit("enough")


@pytest.mark.parametrize(
    ("command", "error", "num_rebuilds"),
    [
        (lambda driver: 1 // 0, ZeroDivisionError, 0),
        (lambda driver: next(iter(())), EngineUnavailable, 0),  # what no future can hold
        (leave, EngineUnavailable, 1),
    ],
)
async def test_a_failing_command_is_answered_and_harms_nobody_else(
    command: Callable[[ScriptedDriver], Any], error: type[Exception], num_rebuilds: int
) -> None:
    async with running() as harness, asyncio.timeout(60):
        with pytest.raises(error):
            await harness.thread.call(command)
        await harness.until_state("ready", num_rebuilds)
        if not num_rebuilds:
            harness.thread.submit(command)
            assert harness.failures == []
        assert await harness.thread.call(lambda driver: 7) == 7
        assert harness.built[-1].num_steps == 0, "an idle engine does not step"


async def test_start_raises_what_stopped_it() -> None:
    harness = Harness(Building(first=OSError("no such model")))
    with pytest.raises(OSError, match="no such model"):
        await harness.thread.start()
    assert harness.thread.state == "failed"
    await harness.thread.close()


class SlowToClose(ScriptedDriver):
    """Its `close` waits until it is let go, as one does that gives memory back."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closing, self.may_close = threading.Event(), threading.Event()

    def close(self) -> None:
        self.is_closing.set()
        self.may_close.wait(60)
        super().close()


async def test_close_ends_pending_calls_and_refuses_those_that_come_meanwhile_at_once() -> None:
    async with running(SlowToClose) as harness, asyncio.timeout(60):
        driver = harness.built[0]
        assert isinstance(driver, SlowToClose)
        entered, release = threading.Event(), threading.Event()
        first = harness.thread.call(lambda driver: (entered.set(), release.wait(60)))
        await asyncio.to_thread(entered.wait, 5)
        closing = asyncio.create_task(harness.thread.close())
        second = harness.thread.call(lambda driver: None)
        release.set()
        await asyncio.to_thread(driver.is_closing.wait, 60)
        # Either it was still run, or it was told that the engine is closed; it never hangs.
        assert isinstance((await asyncio.gather(second, return_exceptions=True))[0], EngineUnavailable | None)
        assert first.done()
        with pytest.raises(EngineUnavailable, match="closed"):
            await harness.thread.call(lambda driver: None)
        assert not closing.done(), "the engine was still being closed"
        driver.may_close.set()
        await closing
    with pytest.raises(EngineUnavailable, match="closed"):
        await harness.thread.call(lambda driver: None)


async def test_when_the_thread_cannot_go_on_every_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "REBUILD_WAITS_S", (0.0,))
    entered, release = threading.Event(), threading.Event()
    building = Building(later=SystemExit("a library ends the thread"))
    async with running(building) as harness, asyncio.timeout(60):

        def fall(driver: ScriptedDriver) -> None:
            entered.set()
            release.wait(60)
            driver.left["a"], driver.fault = 1, RuntimeError("boom")

        harness.thread.submit(fall)
        await asyncio.to_thread(entered.wait, 60)
        pending = harness.thread.call(lambda driver: driver.close())
        release.set()
        await asyncio.gather(pending, return_exceptions=True)
        await harness.until_state("failed")
        with pytest.raises(EngineUnavailable):
            await harness.thread.call(lambda driver: None)


@pytest.mark.parametrize("is_later", [False, True])
async def test_an_engine_that_is_still_being_built_is_closed_when_it_is_there(is_later: bool) -> None:
    """By `close_later` without being waited for."""
    building, is_over = Building(waits_at=1), threading.Event()
    harness = Harness(building)
    assert not harness.thread.close_later(is_over.set), "there is none"
    starting = asyncio.create_task(harness.thread.start())
    await asyncio.to_thread(building.entered.wait, 60)
    if is_later:
        assert harness.thread.close_later(is_over.set) and not is_over.is_set()
        building.release.set()
        await asyncio.to_thread(is_over.wait, 60)
        await starting
        assert not harness.thread.close_later(is_over.set), "nothing is being built any more"
    else:
        closing = asyncio.create_task(harness.thread.close())
        await asyncio.sleep(0)
        building.release.set()
        await asyncio.gather(starting, closing)
    assert harness.built[0].is_closed


async def test_no_step_runs_while_the_engine_rests_and_commands_do() -> None:
    def fails(driver: ScriptedDriver) -> None:
        raise EngineUnavailable("requests came meanwhile")

    async with running() as harness:
        with pytest.raises(EngineUnavailable):
            await harness.thread.rest(fails)
        assert harness.thread.state == "ready"
        await harness.thread.rest(lambda driver: None)
        assert harness.thread.state == "asleep"
        num_steps = await harness.thread.call(lambda driver: (driver.left.update(a=2), driver.num_steps)[1])
        assert await harness.thread.call(lambda driver: driver.num_steps) == num_steps
        await harness.thread.go_on(lambda driver: None)
        await harness.until(lambda: harness.outputs == [("a", 1), ("a", 0)])
        assert harness.thread.state == "ready"
        await harness.thread.rest(lambda driver: None)
    assert harness.thread.state == "closed", "an engine that rests can be closed"


@pytest.mark.parametrize("is_resting", [False, True])
async def test_an_engine_that_breaks_as_it_goes_to_rest_or_on_is_rebuilt(is_resting: bool) -> None:
    async with running() as harness, asyncio.timeout(60):
        if is_resting:
            await harness.thread.rest(lambda driver: None)
        change = harness.thread.go_on if is_resting else harness.thread.rest
        with pytest.raises(EngineUnavailable, match="rebuilt"):
            await change(lambda driver: 1 // 0)
        await harness.until_state("ready", 1)
        assert harness.built[0].is_closed
        await harness.until(lambda: len(harness.failures) == 1)
        harness.thread.submit(lambda driver: driver.left.update(a=1))
        await harness.until(lambda: harness.outputs == [("a", 0)])
