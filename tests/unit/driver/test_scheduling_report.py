"""Why each request waits, as vLLM's scheduler and ours leave it after a step."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from engine_bridge.core.scheduling.guess_errors import ERROR_BOUNDS, GuessErrors
from engine_bridge.driver.scheduling.report import SchedulingReport
from engine_bridge.policy.scheduling.queue_policy import Decision
from engine_bridge.predict.length import LengthGuess


class Waits(SimpleNamespace):
    """A request as vLLM keeps it; told apart by itself, as there."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


BLOCKS = SimpleNamespace(num_gpu_blocks=100, get_num_free_blocks=lambda: 40)


def request(request_id: str = "a", adapter: int | None = None, **fields: Any) -> Waits:
    lora = SimpleNamespace(lora_int_id=adapter) if adapter is not None else None
    defaults: dict[str, Any] = {
        "status": RequestStatus.WAITING,
        "lora_request": lora,
        "structured_output_request": None,
    }
    defaults["num_output_tokens"] = 0
    return Waits(request_id=request_id, **(defaults | fields))


def compiling(future: Any) -> Waits:
    return request(
        status=RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        structured_output_request=SimpleNamespace(_grammar=future),
    )


def scheduler(*waiting: Waits, deferred: tuple[Waits, ...] = (), running: tuple[Waits, ...] = ()) -> Any:
    return SimpleNamespace(
        waiting=list(waiting),
        kv_holding_waiting=[],
        running=list(running),
        deferred_waiting=set(deferred),
        lora_config=SimpleNamespace(max_loras=1),
        residency=None,
        num_preempted=3,
        num_ended_tokens=0,
    )


class Ours:
    """What the report asks of `Scheduling` and its dispatcher."""

    def __init__(self, last: Decision, unready: tuple[str, ...] = ()) -> None:
        self.dispatcher = self
        self.last, self._unready = last, unready
        self.policy = SimpleNamespace(name="fcfs")
        self.laned = None
        self.guess_errors = GuessErrors()

    def reason(self, request_id: str) -> str:
        return "not_ready" if request_id in self._unready else self.last.reason(request_id)

    def all_counts(self) -> dict[str, int]:
        return {}

    def seconds(self) -> dict[str, float]:
        return {}


def reasons(scheduler: Any, ours: Any = None, places: dict[int, str] | None = None) -> dict[str, int]:
    stats = SchedulingReport(scheduler, ours, None, lambda: places or {}, BLOCKS, 16).stats()
    assert sum(stats.num_by_reason.values()) == stats.num_waiting
    return dict(stats.num_by_reason)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_grammar_that_compiles_is_waited_for(is_ours: bool) -> None:
    done: Future[str] = Future()
    done.set_result("grammar")
    ours = Ours(Decision(), unready=("a",)) if is_ours else None
    assert reasons(scheduler(compiling(Future())), ours) == {"grammar_compiling": 1}
    assert reasons(scheduler(compiling(None)), ours) == {"grammar_compiling": 1}
    assert reasons(scheduler(compiling(done)), ours) == {"just_came" if is_ours else "queued": 1}


def test_an_adapter_is_waited_for() -> None:
    here = request(adapter=1)
    assert reasons(scheduler(here), Ours(Decision(), unready=("a",))) == {"adapter_on_its_way": 1}
    assert reasons(scheduler(here), places={1: "disk"}) == {"adapter_on_its_way": 1}
    assert reasons(scheduler(here), places={1: "host"}) == {"queued": 1}


def test_what_the_policy_says_is_told() -> None:
    ours = Ours(Decision(deferred={"a": "no_blocks"}, otherwise="no_slot"))
    assert reasons(scheduler(request("a"), request("b")), ours) == {"no_blocks": 1, "no_slot": 1}


def test_one_that_was_to_start_and_did_not_says_what_stopped_it() -> None:
    ours = Ours(Decision(("a",)))
    plain, loading = request("a"), request("a", status=RequestStatus.WAITING_FOR_REMOTE_KVS)
    assert reasons(scheduler(plain), ours) == {"step_full": 1}
    assert reasons(scheduler(plain, deferred=(plain,)), ours) == {"kv_on_its_way": 1}
    assert reasons(scheduler(loading), ours) == {"kv_on_its_way": 1}
    second, first = request("a", adapter=2), request("r", adapter=1)
    host = {2: "host"}
    assert reasons(scheduler(second, deferred=(second,), running=(first,)), ours, host) == {
        "adapter_slots": 1
    }
    assert reasons(scheduler(second, deferred=(second,)), ours, host) == {"kv_on_its_way": 1}
    assert reasons(scheduler(second, deferred=(second,)), ours) == {"adapter_on_its_way": 1}, "it left again"


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize(("has_room", "reason"), [(False, "adapter_memory"), (True, "kv_on_its_way")])
def test_an_adapter_that_finds_no_memory_beside_those_that_run_is_told_from_kv_that_is_on_its_way(
    is_ours: bool, has_room: bool, reason: str
) -> None:
    second = request("a", adapter=2)
    own = scheduler(second, deferred=(second,))
    own.residency = SimpleNamespace(has_room=lambda adapter_id: has_room)
    ours = Ours(Decision(("a",))) if is_ours else None
    assert reasons(own, ours, {2: "host"}) == {reason: 1}


def test_vllms_own_queue_tells_its_preemptions() -> None:
    stats = SchedulingReport(scheduler(request()), None, None, dict, BLOCKS, 16).stats()
    assert (stats.policy, stats.counts, stats.lanes) == ("vllm", {"preempted": 3}, None)


def test_errors_of_guesses_are_counted_up_to_each_bound() -> None:
    errors = GuessErrors()
    for num_tokens in (100, 101, 98, 90, 300, 100_000):
        errors.saw(LengthGuess(100, 200, "test"), num_tokens)
    assert errors.num_answers == 6 and errors.num_within_p90 == 4
    assert errors.sum_tokens == 0 + 1 + 2 + 10 + 200 + 99_900
    assert errors.num_within == {bound: sum(e <= bound for e in (0, 1, 2, 10, 200)) for bound in ERROR_BOUNDS}


def test_where_vllm_no_longer_tells_why_requests_wait_they_are_just_queued() -> None:
    """As `VllmDriver` makes it when the names behind it have moved: none of those is looked at."""
    bare = SimpleNamespace(
        num_ended_tokens=0, waiting=[request("a-1"), compiling(None)], running=[], num_preempted=0
    )
    assert SchedulingReport(bare, None, None, dict, BLOCKS, 16, False).stats().num_by_reason == {"queued": 2}
