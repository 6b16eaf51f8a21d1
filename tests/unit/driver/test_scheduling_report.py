from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from engine_bridge.core.scheduling.guess_errors import ERROR_BOUNDS, MAX_TENANTS, GuessErrors
from engine_bridge.driver.scheduling.report import SchedulingReport
from engine_bridge.policy.scheduling.queue_policy import Decision
from engine_bridge.protocol.engine_request import LengthGuess


class Waits(SimpleNamespace):
    """A request as vLLM keeps it; told apart by itself, as there."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


BLOCKS = SimpleNamespace(num_gpu_blocks=100, get_num_free_blocks=lambda: 40)


def request(request_id: str = "a", adapter: int | None = None, **fields: Any) -> Waits:
    lora = SimpleNamespace(lora_int_id=adapter) if adapter is not None else None
    usual = {"status": RequestStatus.WAITING, "lora_request": lora, "num_output_tokens": 0}
    return Waits(request_id=request_id, **(usual | {"structured_output_request": None} | fields))


def compiling(future: Any) -> Waits:
    status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return request(status=status, structured_output_request=SimpleNamespace(_grammar=future))


def scheduler(*waiting: Waits, deferred: Any = (), running: Any = (), has_room: bool | None = None) -> Any:
    room = None if has_room is None else SimpleNamespace(has_room=lambda adapter_id: has_room)
    queues = {"waiting": list(waiting), "kv_holding_waiting": [], "deferred_waiting": set(deferred)}
    counts = {"num_preempted": 3, "num_ended_tokens": 0, "lora_config": SimpleNamespace(max_loras=1)}
    return SimpleNamespace(**queues, **counts, running=list(running), residency=room)


class Ours:
    """What the report asks of `Scheduling` and its dispatcher."""

    def __init__(self, last: Decision, unready: tuple[str, ...] = ()) -> None:
        self.dispatcher = self
        self.last, self._unready = last, unready
        self.policy = SimpleNamespace(name="fcfs")
        self.guess_errors = GuessErrors()

    def reason(self, request_id: str) -> str:
        return "not_ready" if request_id in self._unready else self.last.reason(request_id)

    def lanes(self) -> None:
        return None

    def all_counts(self) -> dict[str, int]:
        return {}

    def seconds(self) -> dict[str, float]:
        return {}


DONE: Future[str] = Future()
DONE.set_result("grammar")
HERE, FIRST, SECOND = request(adapter=1), request("r", adapter=1), request("a", adapter=2)
PLAIN, LOADING = request("a"), request("a", status=RequestStatus.WAITING_FOR_REMOTE_KVS)
UNREADY, STARTS = Ours(Decision(), unready=("a",)), Ours(Decision(("a",)))
SAYS = Ours(Decision(deferred={"a": "no_blocks"}, otherwise="no_slot"))
DEFERRED = {"deferred": (SECOND,)}
HOST, DISK = {1: "host", 2: "host"}, {1: "disk"}


@pytest.mark.parametrize(
    ("scheduler", "ours", "places", "found"),
    [
        *((scheduler(compiling(at)), our, {}, "grammar_compiling") for at in (Future(), None) for our in (UNREADY, None)),
        (scheduler(compiling(DONE)), UNREADY, {}, "just_came"),
        (scheduler(compiling(DONE)), None, {}, "queued"),
        (scheduler(HERE), UNREADY, {}, "adapter_on_its_way"),
        (scheduler(HERE), None, DISK, "adapter_on_its_way"),
        (scheduler(HERE), None, HOST, "queued"),
        (scheduler(PLAIN, request("b")), SAYS, {}, "no_blocks no_slot"),
        # One that was to start and did not says what stopped it.
        (scheduler(PLAIN), STARTS, {}, "step_full"),
        (scheduler(PLAIN, deferred=(PLAIN,)), STARTS, {}, "kv_on_its_way"),
        (scheduler(LOADING), STARTS, {}, "kv_on_its_way"),
        (scheduler(SECOND, **DEFERRED, running=(FIRST,)), STARTS, HOST, "adapter_slots"),
        (scheduler(SECOND, **DEFERRED), STARTS, HOST, "kv_on_its_way"),
        (scheduler(SECOND, **DEFERRED), STARTS, {}, "adapter_on_its_way"),  # it left again
        # An adapter that finds no memory beside those that run is told from KV that is on its way.
        *((scheduler(SECOND, **DEFERRED, has_room=False), our, HOST, "adapter_memory") for our in (STARTS, None)),
        *((scheduler(SECOND, **DEFERRED, has_room=True), our, HOST, "kv_on_its_way") for our in (STARTS, None)),
    ],
)  # fmt: skip
def test_requests_say_why_they_wait(scheduler: Any, ours: Any, places: dict[int, str], found: str) -> None:
    stats = SchedulingReport(scheduler, ours, None, lambda: places, BLOCKS, 16).stats()
    assert sum(stats.num_by_reason.values()) == stats.num_waiting
    assert dict(stats.num_by_reason) == dict.fromkeys(found.split(), 1)
    if ours is None:
        assert (stats.policy, stats.counts, stats.lanes) == ("vllm", {"preempted": 3}, None)


def test_errors_of_guesses_are_counted_up_to_each_bound() -> None:
    errors = GuessErrors()
    for num_tokens in (100, 101, 98, 90, 300, 100_000):
        errors.saw("t", LengthGuess(100, 200, "test"), num_tokens)
    assert errors.num_answers == 6 and errors.num_within_p90 == 4
    assert errors.sum_tokens == 0 + 1 + 2 + 10 + 200 + 99_900
    assert errors.num_within == {bound: sum(e <= bound for e in (0, 1, 2, 10, 200)) for bound in ERROR_BOUNDS}
    assert errors.calibration == {"t": (6, 3, 4)}
    for number in range(MAX_TENANTS):
        errors.saw(f"another {number}", LengthGuess(100, 200, "test"), 150)
    assert "t" not in errors.calibration and len(errors.calibration) == MAX_TENANTS
    assert errors.calibration["another 0"] == (1, 0, 1)
