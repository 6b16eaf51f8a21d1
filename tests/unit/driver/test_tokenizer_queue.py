"""The executor under vLLM's renderer: fair between tenants, and nothing is left behind by what fails or is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from vllm.renderers.base import _SwappableExecutor
from vllm.utils.async_utils import make_async

from engine_bridge.driver.serving import tokenizer_queue
from engine_bridge.driver.serving.call import called_by
from engine_bridge.driver.serving.tokenizer_queue import TokenizerQueue, be_fair
from engine_bridge.protocol.errors import SeamMoved, TooBusy
from engine_bridge.protocol.request_context import RequestContext

PATIENCE_S = 30


class Renderer:
    """The part of vLLM's renderer that matters here, with its own executor and its own wrapper."""

    def __init__(self) -> None:
        self._executor = _SwappableExecutor(max_workers=1)
        self.tokenize = make_async(lambda text: text.upper(), executor=self._executor)


@pytest.fixture
def queue() -> Iterator[TokenizerQueue]:
    queue = TokenizerQueue()
    yield queue
    queue.shutdown(wait=True)


class Busy:
    """Holds the thread from when it is there until `go`."""

    def __init__(self, queue: TokenizerQueue, tenant: str = "heavy") -> None:
        self.go, self.is_there = threading.Event(), threading.Event()
        with called_by(RequestContext(tenant=tenant)):
            self.future = queue.submit(self._run)
        assert self.is_there.wait(PATIENCE_S)

    def _run(self) -> None:
        self.is_there.set()
        assert self.go.wait(PATIENCE_S)


def test_a_small_job_waits_for_one_job_of_another_tenant_alone(queue: TokenizerQueue) -> None:
    order: list[str] = []
    busy = Busy(queue)
    with called_by(RequestContext(tenant="heavy")):
        others = [queue.submit(order.append, f"heavy{n}") for n in range(50)]
    with called_by(RequestContext(tenant="light")):
        mine = queue.submit(order.append, "light")
    busy.go.set()
    mine.result(PATIENCE_S)
    for other in others:
        other.result(PATIENCE_S)
    assert order[0] == "light" and order[1:] == [f"heavy{n}" for n in range(50)]


def test_cancelled_jobs_do_not_run_and_leave_nothing(queue: TokenizerQueue) -> None:
    ran: list[int] = []
    busy = Busy(queue)
    waiting = [queue.submit(ran.append, n) for n in range(10)]
    for future in waiting[::2]:
        assert future.cancel()
    busy.go.set()
    for future in waiting[1::2]:
        future.result(PATIENCE_S)
    assert ran == [1, 3, 5, 7, 9]
    assert queue.stats().num_waiting == 0 and queue.stats().num_jobs == 6


def test_a_job_that_fails_tells_its_caller_and_nobody_else(queue: TokenizerQueue) -> None:
    failing = queue.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE_S)
    assert queue.submit(lambda: 7).result(PATIENCE_S) == 7


def test_a_tenant_with_too_much_waiting_is_refused_and_others_are_not(
    queue: TokenizerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_queue, "MAX_WAITING", 3)
    busy = Busy(queue)
    with called_by(RequestContext(tenant="heavy")):
        waiting = [queue.submit(len, "x") for _ in range(3)]
    with pytest.raises(TooBusy) as caught:
        queue.check_room("heavy")
    assert caught.value.retry_after_s > 0
    queue.check_room("light")
    busy.go.set()
    waiting[-1].result(PATIENCE_S)
    queue.check_room("heavy")


def test_a_tenant_whose_jobs_take_long_is_refused_sooner(
    queue: TokenizerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_queue, "MAX_WAIT_S", 0.001)
    busy = Busy(queue)
    with called_by(RequestContext(tenant="heavy")):
        queue.submit(len, "x")
    with pytest.raises(TooBusy):
        queue.check_room("heavy")
    busy.go.set()


def test_a_stuck_thread_is_replaced_and_what_waits_is_done(
    queue: TokenizerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_bridge.driver.serving.tokenizer_queue.STUCK_S", 0.0)
    busy = Busy(queue)
    waiting = [queue.submit(len, "x" * n) for n in range(5)]
    queue.replace_inner()
    assert [future.result(PATIENCE_S) for future in waiting] == [0, 1, 2, 3, 4]
    busy.go.set()
    assert busy.future.result(PATIENCE_S) is None
    assert queue.submit(len, "abc").result(PATIENCE_S) == 3


async def test_vllms_own_wrappers_go_through_it() -> None:
    renderer = Renderer()
    queue = be_fair(renderer)
    busy = Busy(queue)
    with called_by(RequestContext(tenant="heavy")):
        heavy = [asyncio.ensure_future(renderer.tokenize("a")) for _ in range(20)]
    done: list[str] = []
    for future in heavy:
        future.add_done_callback(lambda _: done.append("heavy"))
    with called_by(RequestContext(tenant="light")):
        light = asyncio.ensure_future(renderer.tokenize("b"))
    light.add_done_callback(lambda _: done.append("light"))
    busy.go.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await light == "B" and await asyncio.gather(*heavy) == ["A"] * 20
    assert done.index("light") <= 1, "its callback may cross with that of the job before it"
    renderer._executor.replace_inner()
    assert await renderer.tokenize("c") == "C" and queue.stats().num_jobs == 23
    renderer._executor.shutdown()


def test_a_renderer_without_that_executor_is_a_moved_seam() -> None:
    with pytest.raises(SeamMoved):
        be_fair(object())


def test_a_thread_that_has_not_worked_for_long_is_not_replaced() -> None:
    """vLLM's clock runs while a job waits for its turn, too."""
    queue = TokenizerQueue()
    pool = queue._pool
    queue.replace_inner()
    assert queue._pool is pool
    queue.shutdown()


async def test_a_job_that_raises_what_no_future_holds_is_answered(queue: TokenizerQueue) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await loop.run_in_executor(queue, lambda: next(iter(())))
        assert await loop.run_in_executor(queue, lambda: 7) == 7


async def test_jobs_that_wait_when_the_queue_is_shut_down_are_cancelled(queue: TokenizerQueue) -> None:
    busy = Busy(queue)
    waiting = [asyncio.wrap_future(queue.submit(lambda: None)) for _ in range(3)]
    queue.shutdown(wait=False, cancel_futures=True)
    busy.go.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait(waiting)
    assert all(each.cancelled() for each in waiting)
    assert queue.stats().num_waiting == 0
