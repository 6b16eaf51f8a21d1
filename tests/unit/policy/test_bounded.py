"""Shortest first, and nobody is overtaken who would then wait longer than P99 of the recent waits in order of arrival."""

from __future__ import annotations

import random
from statistics import geometric_mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measures import quantile
from engine_bridge.policy.scheduling.bounded import Bounded, BoundedSettings
from engine_bridge.policy.scheduling.guard import WorkLeft
from engine_bridge.policy.scheduling.queue_policy import StepRoom, Waiting
from engine_bridge.policy.scheduling.wait_tree import BLOCK, GONE, Waits
from tests.unit.facts import waiting_facts

ROOM = StepRoom(free_blocks=10_000, num_slots=1, num_tokens=10_000)


class Queue:
    """What waits by a policy that starts one request at a time, each after the work of the one before."""

    def __init__(self, overtaking_share: float = 0.2) -> None:
        self.policy = Bounded(10_000, BoundedSettings(overtaking_share=overtaking_share))
        self.waiting: dict[str, Waiting] = {}
        self.started: list[str] = []
        self.now = 0.0

    def ask(self, request_id: str, engine_s: float = 1.0, **fields: object) -> None:
        """A request that takes the whole engine for so many seconds."""
        own = {"engine_s": engine_s, "duration_s": engine_s} | fields
        self.waiting[request_id] = facts = waiting_facts(request_id, arrived_s=self.now, **own)
        self.policy.arrived(facts, self.now)

    def start(self, room: StepRoom = ROOM) -> None:
        for request_id in self.policy.decide(self.waiting, {}, room, self.now).request_ids:
            facts = self.waiting.pop(request_id)
            self.policy.admitted(request_id, self.now)
            self.started.append(request_id)
            self.now += facts.engine_s
            self.policy.ended(request_id)

    def leave(self, request_id: str) -> None:
        del self.waiting[request_id]
        self.policy.ended(request_id)

    def start_all(self) -> str:
        while self.waiting:
            self.start()
        return " ".join(self.started)


def after_a_long_queue(overtaking_share: float = 0.2) -> Queue:
    """In order of arrival the last of its requests waited for 40 s; all have started."""
    queue = Queue(overtaking_share)
    for number in range(41):
        queue.ask(f"early {number:02d}")
    queue.start_all()
    queue.started.clear()
    return queue


def behind_a_long_one(queue: Queue) -> Queue:
    for request_id, engine_s in (("long", 20.0), ("short", 1.0), ("shortest", 0.5)):
        queue.ask(request_id, engine_s)
    return queue


def test_the_shortest_goes_first_while_earlier_ones_wait_no_longer_than_others_did() -> None:
    assert behind_a_long_one(Queue()).start_all() == "short long shortest", (
        "in any order the last waits for 21 s"
    )
    assert behind_a_long_one(after_a_long_queue()).start_all() == "shortest long short"
    assert behind_a_long_one(after_a_long_queue(0.0)).start_all() == "long short shortest"


def test_a_request_that_has_waited_as_long_as_others_did_is_not_overtaken() -> None:
    queue = after_a_long_queue()
    queue.ask("long", 20.0)
    queue.now += 39.8
    queue.ask("short", 0.5)
    assert queue.start_all() == "long short"


def test_overtaking_takes_its_share_of_the_work_and_no_more() -> None:
    queue = after_a_long_queue(0.25)
    for number in range(4):
        queue.ask(f"long {number}", 3.0)
    for number in range(4):
        queue.ask(f"short {number}", 1.0)
    assert queue.start_all() == "short 0 long 0 short 1 long 1 short 2 long 2 short 3 long 3"


def test_a_tiny_request_may_overtake_one_that_has_waited_as_long_as_others_did() -> None:
    """It takes from the same share: a second one waits until earlier ones have made up for the first."""
    queue = after_a_long_queue()
    queue.ask("long", 20.0)
    queue.now += 39.9
    queue.ask("short", 0.5)
    for number in range(2):
        queue.ask(f"tiny {number}", 0.1)
    assert queue.start_all() == "tiny 0 long tiny 1 short"


def test_no_number_of_requests_that_take_nothing_passes_one_for_ever() -> None:
    queue = after_a_long_queue()
    queue.ask("long", 20.0)
    queue.now += 39.9
    for number in range(500):
        queue.ask(f"nothing {number:03d}", 0.0)
    assert queue.start_all().partition("long")[0].count("nothing") < 200


def test_turns_of_programs_take_from_no_share() -> None:
    queue = after_a_long_queue()
    for number in range(2):
        queue.ask(f"long {number}", 3.0)
    for number in range(3):
        queue.ask(f"turn {number}", 2.0, program_s=9.0 - number)
    assert queue.start_all() == "turn 2 turn 1 turn 0 long 0 long 1"


def test_a_preempted_request_goes_before_all() -> None:
    queue = after_a_long_queue()
    for request_id in "ab":
        queue.ask(request_id, 5.0)
    queue.ask("again", 30.0, is_swapped=True)
    assert queue.start_all() == "again a b"


# -- against the order of arrival --------------------------------------------------------------------------------------

NUM_SLOTS, LONGER = 16, 20


def waits(overtaking_share: float, load: float, seed: int) -> list[float]:
    """What 600 requests wait on a device of 16 slots. Their prompts are equal; one answer of five takes 20 times as long."""
    rng = random.Random(seed)
    asked, at_s = [], 0.0
    for number in range(600):
        long = rng.random() < 0.2
        run_s = rng.uniform(0.8, 1.2) * (LONGER if long else 1)
        at_s += rng.expovariate(load * NUM_SLOTS / (0.2 * LONGER + 0.8))
        facts = waiting_facts(
            f"{number:03d}",
            arrived_s=at_s,
            size_tokens=1540 + 760 * long,
            duration_s=run_s,
            engine_s=run_s / NUM_SLOTS,
        )
        asked.append(facts)
    policy = Bounded(10_000, BoundedSettings(overtaking_share=overtaking_share))
    waiting: dict[str, Waiting] = {}
    ends: list[tuple[float, str]] = []
    found: list[float] = []
    coming = [(facts.arrived_s, facts) for facts in asked]
    while coming or waiting:
        if coming and (not ends or coming[0][0] <= min(ends)[0]):
            now, facts = coming.pop(0)
            waiting[facts.request_id] = facts
            policy.arrived(facts, now)
        else:
            now, request_id = min(ends)
            ends.remove((now, request_id))
            policy.ended(request_id)
        room = StepRoom(free_blocks=10_000, num_slots=NUM_SLOTS - len(ends), num_tokens=10_000)
        for request_id in policy.decide(waiting, {}, room, now).request_ids:
            facts = waiting.pop(request_id)
            policy.admitted(request_id, now)
            ends.append((now + facts.duration_s, request_id))
            found.append(now - facts.arrived_s)
    return found


@pytest.mark.parametrize("load", [0.9, 1.2])
def test_answers_that_differ_by_20_times_behind_equal_prompts_leave_the_longest_waits_as_they_are(
    load: float,
) -> None:
    plays = [(waits(0.2, load, seed), waits(0.0, load, seed)) for seed in range(10)]
    longest = [quantile(own, 0.99) / quantile(plain, 0.99) for own, plain in plays]
    assert geometric_mean(longest) <= 1.05
    if load > 1:
        assert median(quantile(own, 0.5) / quantile(plain, 0.5) for own, plain in plays) < 0.8


# -- its parts ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.floats(0.1, 9.0), st.floats(0.1, 9.0), st.booleans()), max_size=40
    )
)
def test_work_left_is_the_sum_over_running_requests(events: list[tuple[int, float, float, bool]]) -> None:
    """An event is a number of a request, its work, how long it runs, and whether a second passes."""
    left, plain, now = WorkLeft(), dict[str, tuple[float, float, float]](), 0.0
    for number, work_s, duration_s, does_time_pass in events:
        now += does_time_pass
        request_id = str(number)
        if request_id in plain:
            left.ended(request_id)
            del plain[request_id]
        else:
            left.started(request_id, work_s, duration_s, now)
            plain[request_id] = work_s, now, duration_s
        expected = sum(work * max(1 - (now - at) / run, 0.0) for work, at, run in plain.values())
        assert left.left_s(now) == pytest.approx(expected, abs=1e-6)


EVENTS = st.sampled_from(["append", "remove", "remove the most", "raise", "lower", "copy", "look"])


def check_waits(waits: Waits, plain: dict[int, float], place: int) -> None:
    most = max((value for each, value in plain.items() if each < place), default=GONE)
    for limit in (most - 1, most, most + 1):
        assert waits.are_within(limit, before=place) == (most <= limit)


@given(st.integers(0, 2 * BLOCK), st.lists(st.tuples(EVENTS, st.integers(0, 10**6)), max_size=80))
def test_waits_are_those_of_a_plain_list(num: int, events: list[tuple[str, int]]) -> None:
    """A number stands for a place that still waits, and for tokens."""
    waits, plain = Waits(), dict[int, float]()
    for event, number in [("append", each) for each in range(num)] + events:
        place = sorted(plain)[number % len(plain)] if plain else 0
        if event == "append":
            plain[waits.append(float(number))] = float(number)
        elif event == "copy":
            waits = waits.copy()
        elif plain and event == "look":
            check_waits(waits, plain, place)
        elif plain and event.startswith("remove"):
            place = max(plain, key=plain.__getitem__) if event == "remove the most" else place
            waits.remove(place)
            del plain[place]
        elif plain and event == "raise":
            waits.raise_before(place, float(number))
            plain = {each: value + number * (each < place) for each, value in plain.items()}
        elif plain:
            waits.lower_after(place, float(number))
            plain = {each: value - number * (each > place) for each, value in plain.items()}
    for place in plain:
        check_waits(waits, plain, place)


def test_while_somebody_waits_for_adapter_memory_nothing_overtakes() -> None:
    queue = after_a_long_queue()
    for request_id in "ab":
        queue.ask(request_id, 10.0)
    for request_id in "xy":
        queue.ask(request_id)
    queue.ask("adapter", adapter_id=1, adapter_bytes=10)
    queue.ask("the same", adapter_id=1, adapter_bytes=10)
    scarce = StepRoom(free_blocks=10_000, num_slots=9, num_tokens=10_000, adapter_bytes=0)
    decision = queue.policy.decide(queue.waiting, {}, scarce, queue.now)
    assert decision.request_ids == ("a", "b", "x", "y")
    assert decision.deferred == {"adapter": "adapter_memory", "the same": "adapter_memory"}
    queue.leave("adapter")
    queue.leave("the same")
    assert queue.start_all() == "x a y b"
