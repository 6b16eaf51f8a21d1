"""What vLLM 0.33 does in another way than 0.32, in the forms in which our parts meet it (docs/decisions/0027)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.driver.apis.bodies import as_error_response
from engine_bridge.driver.engine.engine import failure_of
from engine_bridge.driver.scheduling.scheduling import PolicyQueue


def test_requests_that_a_step_takes_and_puts_back_are_not_told_as_started() -> None:
    """A request without room is put aside, and the next one is tried; before, the step ended there."""
    queue = PolicyQueue(SimpleNamespace(on_arrival=lambda request: None))  # type: ignore[arg-type]
    for name in "abcd":
        queue.add_request(SimpleNamespace(request_id=name))
    queue.begin_step(["b", "c", "a"])
    skipped = [queue.pop_request()]
    assert queue.pop_request().request_id == "c"
    skipped.append(queue.pop_request())
    assert not queue
    queue.prepend_requests(skipped)
    assert queue.end_step() == ["c"]
    assert {request.request_id for request in queue} == {"a", "b", "d"} and len(queue) == 3
    queue.begin_step(["a"])
    queue.pop_request()
    assert queue.end_step() == ["a"], "it may start in a later step"


@pytest.mark.parametrize(
    ("output", "status"),
    [
        (SimpleNamespace(error=SimpleNamespace(code="validation_error", message="Invalid structured outputs: no")), 400),
        (SimpleNamespace(error=SimpleNamespace(code="multimodal_cache_miss", message="gone")), None),
        (SimpleNamespace(error=None), None),
        (SimpleNamespace(), None),  # vLLM 0.32
    ],
)  # fmt: skip
def test_a_grammar_that_vllm_cannot_compile_is_the_clients_fault(output: Any, status: int | None) -> None:
    failure = failure_of(output)
    assert (failure and as_error_response(failure).error.code) == status
