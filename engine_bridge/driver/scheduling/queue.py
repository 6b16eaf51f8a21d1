"""vLLM's request queue that hands out what was decided before the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from engine_bridge.driver.vllm_api import RequestQueue


class Listener(Protocol):
    """Who wants to know what vLLM does with the queue; told vLLM's requests."""

    def on_arrival(self, request: Any) -> None:
        """Called for each request that vLLM adds to its queue, before it can be chosen."""

    def preempted(self, request: Any) -> None: ...

    def ended(self, request: Any) -> None: ...


class PolicyQueue(RequestQueue):
    """Takes the place of the scheduler's `waiting`.

    `bool()` is whether somebody starts in this step; `len()` is how many wait in all.
    Source: vllm-project/vllm, `Scheduler.schedule`, for what is asked of a queue when.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._requests: dict[str, Any] = {}
        self._plan: deque[str] = deque()
        self._popped: dict[str, Any] = {}

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, request_ids: Iterable[str]) -> None:
        self._plan = deque(request_ids)

    def end_step(self) -> list[str]:
        """Who was taken from the queue in this step and did not come back: they run."""
        self._plan.clear()
        admitted, self._popped = list(self._popped), {}
        return admitted

    # -- what vLLM asks ----------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        self._requests[request.request_id] = request
        self._listener.on_arrival(request)

    def peek_request(self) -> Any:
        return self._requests[self._plan[0]]

    def pop_request(self) -> Any:
        request = self._requests.pop(self._plan.popleft())
        self._popped[request.request_id] = request
        return request

    def prepend_request(self, request: Any) -> None:
        """A running request was preempted."""
        self._requests[request.request_id] = request
        self._listener.preempted(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Requests that could not start in this step after all."""
        for request in requests:
            self._popped.pop(request.request_id, None)
            self._requests[request.request_id] = request

    def remove_request(self, request: Any) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            if self._requests.pop(request.request_id, None) is not None:
                self._listener.ended(request)

    def __bool__(self) -> bool:
        return bool(self._plan)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests.values())
