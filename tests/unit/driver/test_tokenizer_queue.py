import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from vllm.renderers.base import _SwappableExecutor
from vllm.utils.async_utils import make_async

from engine_bridge.driver.serving import tokenizer_queue
from engine_bridge.driver.serving.call import called_by
from engine_bridge.driver.serving.tokenizer_queue import TokenizerQueue, be_fair
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import SeamMoved, TooBusy

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
        with called_by(EngineRequest(tenant=tenant)):
            self.future = queue.submit(self._run)
        assert self.is_there.wait(PATIENCE_S)

    def _run(self) -> None:
        self.is_there.set()
        assert self.go.wait(PATIENCE_S)


def submitted(queue: TokenizerQueue, tenant: str, *jobs: Callable[[], Any]) -> list[Future[Any]]:
    with called_by(EngineRequest(tenant=tenant)):
        return [queue.submit(job) for job in jobs]


def test_a_small_job_waits_for_one_job_of_another_tenant_alone(queue: TokenizerQueue) -> None:
    order: list[str] = []
    busy = Busy(queue)
    names = [f"heavy{number}" for number in range(50)]
    heavy = submitted(queue, "heavy", *(partial(order.append, name) for name in names))
    (light,) = submitted(queue, "light", lambda: order.append("light"))
    assert all(future.cancel() for future in heavy[::2])
    busy.go.set()
    for future in (light, *heavy[1::2]):
        future.result(PATIENCE_S)
    assert order == ["light", *names[1::2]]
    assert queue.stats().num_waiting == 0 and queue.stats().num_jobs == 27


async def test_a_job_that_fails_tells_its_caller_and_nobody_else(queue: TokenizerQueue) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(queue, lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="StopIteration"):  # what no future holds
            await loop.run_in_executor(queue, lambda: next(iter(())))
        assert await loop.run_in_executor(queue, lambda: 7) == 7


@pytest.mark.parametrize(("bound", "value", "num_jobs"), [("MAX_WAITING", 3, 3), ("MAX_WAIT_S", 0.001, 1)])
def test_a_tenant_with_too_much_waiting_is_refused_and_others_are_not(
    queue: TokenizerQueue, monkeypatch: pytest.MonkeyPatch, bound: str, value: float, num_jobs: int
) -> None:
    monkeypatch.setattr(tokenizer_queue, bound, value)
    busy = Busy(queue)
    waiting = submitted(queue, "heavy", *[lambda: None] * num_jobs)
    with pytest.raises(TooBusy) as caught:
        queue.check_room("heavy")
    assert caught.value.retry_after_s > 0
    queue.check_room("light")
    busy.go.set()
    waiting[-1].result(PATIENCE_S)
    queue.check_room("heavy")


def test_a_stuck_thread_is_replaced(queue: TokenizerQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has not worked for long is not: vLLM's clock runs while a job waits for its turn, too."""
    busy = Busy(queue)
    waiting = [queue.submit(len, "x" * n) for n in range(5)]
    queue.replace_inner()
    assert not waiting[0].done()
    monkeypatch.setattr(tokenizer_queue, "STUCK_S", 0.0)
    queue.replace_inner()
    assert [future.result(PATIENCE_S) for future in waiting] == [0, 1, 2, 3, 4]
    busy.go.set()
    assert busy.future.result(PATIENCE_S) is None
    assert queue.submit(len, "abc").result(PATIENCE_S) == 3


async def test_vllms_own_wrappers_go_through_it() -> None:
    renderer = Renderer()
    queue = be_fair(renderer)
    busy = Busy(queue)
    done: list[str] = []

    def tokenized(tenant: str, text: str) -> asyncio.Future[str]:
        with called_by(EngineRequest(tenant=tenant)):
            future = asyncio.ensure_future(renderer.tokenize(text))
        future.add_done_callback(lambda _: done.append(tenant))
        return future

    heavy, light = [tokenized("heavy", "a") for _ in range(20)], tokenized("light", "b")
    busy.go.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await light == "B" and await asyncio.gather(*heavy) == ["A"] * 20
    assert done.index("light") <= 1, "its callback may cross with that of the job before it"
    renderer._executor.replace_inner()
    assert await renderer.tokenize("c") == "C" and queue.stats().num_jobs == 23
    renderer._executor.shutdown()
    with pytest.raises(SeamMoved):
        be_fair(object())
