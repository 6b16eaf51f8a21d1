"""Turns for all tenants on the thread that renders and tokenises.

vLLM sends all of that work, its serving classes' and ours, through one executor with one thread, first come first served: one tenant's heavy prompts
would delay all other tenants' small ones. Here each of these jobs waits in its tenant's own queue instead, and `policy/scheduling/fair_queue.py` says
whose is next. A job belongs to the tenant that CALL names when it is handed in, so nothing is held between jobs, and a call that fails or is
cancelled leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from engine_bridge.driver.serving.call import CALL
from engine_bridge.policy.scheduling.fair_queue import FairQueue
from engine_bridge.protocol.engine_request import ANONYMOUS
from engine_bridge.protocol.errors import SeamMoved, TooBusy
from engine_bridge.protocol.figures import TokenizerStats

# Bounds of one tenant: jobs that may wait, and how long they may be expected to wait. Chosen: memory for prompts that wait, and a third of the 30 s
# after which vLLM gives up rendering.
MAX_WAITING, MAX_WAIT_S = 4096, 10.0
# A job that runs for longer than this is taken to run for ever. Chosen: a prompt as long as the limits allow takes about a second.
STUCK_S = 20.0


class _Job(NamedTuple):
    future: Future[Any]
    run: Callable[[], Any]


class TokenizerQueue(Executor):
    """An executor that is fair between tenants. Safe to use from several threads."""

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "tokenizer")
        self._lock = threading.Lock()
        self._queue: FairQueue[_Job] = FairQueue()
        self._num_jobs = 0
        self._seconds = 0.0
        self._began_s: float | None = None  # when the job that runs began

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a job of the tenant that CALL names."""
        call = CALL.get(None)
        asker = call.request if call is not None else ANONYMOUS
        job = _Job(Future(), lambda: fn(*args, **kwargs))
        with self._lock:
            self._queue.add(asker.tenant, asker.weight, job)
            # One errand is submitted for each job; when an errand's turn comes, the queue decides which job it does.
            self._pool.submit(self._run_next)
        return job.future

    def check_room(self, tenant: str) -> None:
        """Raise TooBusy where this tenant has enough work waiting."""
        with self._lock:
            wait_s = self._queue.wait_s(tenant)
            num_waiting = self._queue.num_waiting_of(tenant)
        if wait_s > MAX_WAIT_S or num_waiting >= MAX_WAITING:
            raise TooBusy(
                "Too much of your text is already waiting to be tokenised: wait for some of your requests to end.",
                retry_after_s=wait_s,
            )

    def stats(self) -> TokenizerStats:
        """Return how many jobs were done, their seconds, and how many wait."""
        with self._lock:
            return TokenizerStats(self._num_jobs, self._seconds, self._queue.num_waiting)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the thread. With `cancel_futures`, waiting jobs are cancelled."""
        self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)
        while cancel_futures:  # without their errands, waiting jobs would never be done
            with self._lock:
                if (taken := self._queue.take()) is None:
                    return
            tenant, job = taken
            job.future.cancel()
            self._account(tenant, None)

    def replace_inner(self) -> None:
        """Continue with another thread, which does the waiting jobs: vLLM thinks that this one is stuck.

        If the job has only waited for its turn, nothing happens.
        """
        with self._lock:
            if self._began_s is None or time.perf_counter() - self._began_s < STUCK_S:
                return
            self._began_s = None
            old, self._pool = self._pool, ThreadPoolExecutor(self._num_threads, "tokenizer")
            for _ in range(self._queue.num_waiting):  # the errands of waiting jobs belong to the old thread
                self._pool.submit(self._run_next)
        old.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            taken = self._queue.take()
        if taken is None:  # an errand of a thread that was replaced: its job is done
            return
        tenant, job = taken
        if not job.future.set_running_or_notify_cancel():
            self._account(tenant, None)
            return
        started_s = time.perf_counter()
        with self._lock:
            self._began_s = started_s
        error: BaseException | None
        try:
            result, error = job.run(), None
        except StopIteration as raised:
            # No future of asyncio's takes a StopIteration, and the job's caller would wait for ever. Source: PEP 479 makes the same of it.
            result, error = None, RuntimeError("a tokenizer's job raised StopIteration")
            error.__cause__ = raised
        except BaseException as raised:
            result, error = None, raised
        # The account is written first: a caller that hears of the end may read it.
        self._account(tenant, time.perf_counter() - started_s)
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)

    def _account(self, tenant: str, took_s: float | None) -> None:
        with self._lock:
            self._queue.done(tenant, took_s)
            self._began_s = None
            self._num_jobs += took_s is not None
            self._seconds += took_s or 0.0


class NoTokenizerQueue:
    """Stands in before there is a tokenizer, and where its thread is vLLM's own."""

    def check_room(self, tenant: str) -> None:
        """Do nothing: there is always room."""

    def stats(self) -> TokenizerStats | None:
        """Return None: there are no figures."""
        return None


def be_fair(renderer: Any) -> TokenizerQueue:
    """Put a TokenizerQueue under a vLLM renderer, whose own wrappers stay. Raises SeamMoved."""
    executor: Any = getattr(renderer, "_executor", None)
    if not hasattr(executor, "_inner") or not hasattr(executor, "replace_inner"):
        raise SeamMoved("vLLM's renderer no longer has an executor that can be replaced (_executor._inner)")
    queue = TokenizerQueue(getattr(executor, "_max_workers", 1))
    old, executor._inner = executor._inner, queue
    executor.replace_inner = queue.replace_inner
    old.shutdown(wait=False)
    return queue
