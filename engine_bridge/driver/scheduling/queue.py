"""A request queue for vLLM that hands out the requests which were chosen before the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from engine_bridge.driver.vllm_api import RequestQueue


class Listener(Protocol):
    """Hears of vLLM's requests in the queue."""

    def on_arrival(self, request: Any) -> None:
        """Called for each request that vLLM adds to its queue, before it can be chosen."""

    def preempted(self, request: Any) -> None:
        """Called for each running request that vLLM puts back into the queue."""

    def ended(self, request: Any) -> None:
        """Called for each request that leaves the queue without starting."""


class PolicyQueue(RequestQueue):
    """Takes the place of the scheduler's `waiting`.

    `bool()` says whether a request is to start in this step; `len()` is the number of all waiting requests. Source: vllm-project/vllm,
    `Scheduler.schedule`, for which questions a queue is asked, and when.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._requests: dict[str, Any] = {}
        self._plan: deque[str] = deque()
        self._popped: dict[str, Any] = {}

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, request_ids: Iterable[str]) -> None:
        """Hand out these requests in the step that begins, in this order."""
        self._plan = deque(request_ids)

    def end_step(self) -> list[str]:
        """Return the requests that were taken from the queue in this step and not put back: they run."""
        self._plan.clear()
        admitted, self._popped = list(self._popped), {}
        return admitted

    # -- what vLLM asks ----------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Add a new request."""
        self._requests[request.request_id] = request
        self._listener.on_arrival(request)

    def peek_request(self) -> Any:
        """Return the request that starts next. Raises IndexError if none is to start."""
        return self._requests[self._plan[0]]

    def pop_request(self) -> Any:
        """Take out the request that starts next. Raises IndexError if none is to start."""
        request = self._requests.pop(self._plan.popleft())
        self._popped[request.request_id] = request
        return request

    def prepend_request(self, request: Any) -> None:
        """Put back a running request that was preempted."""
        self._requests[request.request_id] = request
        self._listener.preempted(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Put back requests that could not start in this step after all."""
        for request in requests:
            self._popped.pop(request.request_id, None)
            self._requests[request.request_id] = request

    def remove_request(self, request: Any) -> None:
        """Remove a request that has ended; it is ignored if it does not wait here."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove requests that have ended; requests that do not wait here are ignored."""
        for request in requests:
            if self._requests.pop(request.request_id, None) is not None:
                self._listener.ended(request)

    def __bool__(self) -> bool:
        return bool(self._plan)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests.values())
