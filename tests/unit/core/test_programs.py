"""Programs of agents: how many are under way at once, and in which order their turns start."""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import pytest

from engine_bridge.core.scheduling.programs import (
    ANNOUNCED_AT_MOST_S,
    BUSY_SHARE,
    DEVICE_SHARE,
    LEAK_S,
    MAX_TURNS,
    UNANNOUNCED_S,
    Programs,
)
from engine_bridge.policy.scheduling.bounded import Bounded, BoundedSettings
from engine_bridge.policy.scheduling.queue_policy import StepRoom, Waiting
from engine_bridge.protocol.engine_request import LengthGuess

ROOM = 1000
NUM_TOKENS = (ROOM + 0.5) / DEVICE_SHARE


def turn(name: str, number: int = 0, num_tokens: int = 400, tenant: str = "", **fields: object) -> Waiting:
    return Waiting(
        request_id=f"{name}{number}",
        num_prompt_tokens=num_tokens - 10,
        guess=LengthGuess(10, 20, "test"),
        program=f"{tenant}/{name}",
        tenant=tenant,
        continues=number > 0,
        **fields,  # type: ignore[arg-type]
    )


def begin(programs: Programs, name: str, now: float = 0.0, **fields: object) -> bool:
    request = turn(name, **fields)  # type: ignore[arg-type]
    programs.came(request, now)
    return programs.may_start(request.request_id, now)


@pytest.fixture
def full() -> Programs:
    """Two programs are inside, and there is no room for a third."""
    programs = Programs(NUM_TOKENS, 10 * ROOM)
    assert begin(programs, "a") and begin(programs, "b")
    return programs


@pytest.mark.parametrize(
    ("announced_s", "probability", "kept_until_s"),
    [
        (None, 0.0, 1.0 + UNANNOUNCED_S),
        (9.0, 0.95, 9.0),
        (9.0, 0.5, 1.0 + UNANNOUNCED_S),
        (3600.0, 1.0, 1.0 + ANNOUNCED_AT_MOST_S),
    ],
    ids=["not announced", "announced", "no likelier than not", "for a minute at most"],
)
def test_no_more_programs_are_let_in_than_the_device_holds_with_those_that_come_back(
    full: Programs, announced_s: float | None, probability: float, kept_until_s: float
) -> None:
    full.ended("a0", 400, 1.0)
    if announced_s is not None:
        full.announced("/a", announced_s, 1.0, probability)
    assert not begin(full, "c", kept_until_s - 0.2) and "c0" in full, "it may come back"
    assert not full.may_start("c0", kept_until_s)
    assert full.may_start("c0", kept_until_s + 0.1) and "c0" not in full, "it did not"


def test_programs_that_are_away_keep_nobody_out_of_a_device_that_is_half_idle() -> None:
    programs = Programs(NUM_TOKENS, 10 * ROOM)
    for name in "abcde":
        assert begin(programs, name, num_tokens=180)
    for name in "abc":
        programs.ended(f"{name}0", 180, 1.0)
        programs.announced(f"/{name}", 60.0, 1.0)
    assert not begin(programs, "f", 1.0, num_tokens=180), (
        "two are at work, and a third would be more than half"
    )
    programs.ended("d0", 180, 1.0)
    programs.announced("/d", 60.0, 1.0)
    assert programs.may_start("f0", 1.0)
    assert 2 * 180 < BUSY_SHARE * NUM_TOKENS < 3 * 180


def test_a_beginning_that_programs_share_counts_once() -> None:
    programs = Programs(NUM_TOKENS, 10 * ROOM, lambda request_id: 0 if request_id == "a0" else 300)
    assert all(begin(programs, name) for name in "abcdefg") and not begin(programs, "h")
    programs.ended("b0", 500, 1.0)
    programs.came(turn("b", 1, 800), 1.1)
    programs.ended("a0", 400, 1.2)
    assert not programs.may_start("h0", 1.2 + UNANNOUNCED_S + 0.1), "b has grown by 400"
    programs.ended("b1", 800, 2.0)
    assert programs.may_start("h0", 2.0 + UNANNOUNCED_S + 0.1)


def test_turns_of_programs_inside_are_let_in_always_and_know_when_it_began() -> None:
    programs = Programs(NUM_TOKENS, 10 * ROOM)
    begin(programs, "a", 3.0), begin(programs, "b", 4.0)
    programs.ended("a0", 400, 5.0)
    programs.announced("/a", 9.0, 5.1)
    come = programs.came(turn("a", 1, 900), 6.0)
    assert come.program_s == 3.0 and programs.may_start("a1", 6.0)
    lost = programs.came(turn("x", 1), 7.0)
    assert lost.program_s is None and not programs.may_start("x1", 7.0), (
        "nobody says by a result that it was inside"
    )


@pytest.mark.parametrize("fields", [{"priority": -1}, {"is_background": True}])
def test_urgent_and_background_requests_wait_for_no_program(
    full: Programs, fields: dict[str, object]
) -> None:
    assert begin(full, "c", **fields)


def test_where_nothing_is_at_work_the_next_program_enters_however_full_it_is() -> None:
    programs = Programs(NUM_TOKENS, 10 * ROOM)
    assert begin(programs, "huge", num_tokens=5 * ROOM)
    assert not begin(programs, "b")
    programs.ended("huge0", 5 * ROOM, 1.0)
    programs.announced("/huge", 1e9, 1.0)
    assert programs.may_start("b0", 1.0), "the agent is away: its helper must not wait for it"


def test_a_tenant_has_its_share_whatever_others_hold() -> None:
    programs = Programs(NUM_TOKENS, 10 * ROOM)
    assert begin(programs, "a", tenant="ada") and begin(programs, "b", tenant="ada")
    assert not begin(programs, "c", tenant="ada") and begin(programs, "d", tenant="eve")
    assert not begin(programs, "e", tenant="eve"), "its share is half"
    assert not begin(programs, "f", tenant="joe") and begin(
        programs, "g", tenant="joe", weight=3.0, num_tokens=300
    )


def test_no_request_waits_for_ever(full: Programs) -> None:
    begin(full, "c", 1.0), begin(full, "d", 2.0)
    assert not full.may_start("c0", LEAK_S) and full.may_start("c0", LEAK_S + 1.0)
    assert not full.may_start("d0", LEAK_S + 2.0), "one has just been let in"
    assert full.may_start("d0", 2 * LEAK_S + 1.0)


def test_one_that_is_not_ready_holds_up_only_those_that_wait_for_the_same(full: Programs) -> None:
    asked = [turn("c"), turn("d", waits_for=7), turn("e", priority=9), turn("f", tenant="eve")]
    for request in asked:
        full.came(request, 1.0)
    assert len({full.waits_for(request) for request in asked}) == 4


def test_a_program_that_comes_back_later_than_announced_goes_on(full: Programs) -> None:
    full.ended("a0", 400, 1.0)
    full.announced("/a", 2.0, 1.0)
    assert begin(full, "c", 3.0), "its place is free"
    late = full.came(turn("a", 1), 4.0)
    assert late.program_s == 4.0 and full.may_start("a1", 4.0)


def test_programs_that_are_over_are_forgotten_and_other_orders_bound_none() -> None:
    programs = Programs(NUM_TOKENS, 10 * ROOM)
    for number in range(1000):
        assert begin(programs, f"p{number}-", float(number))
        programs.ended(f"p{number}-0", 400, number + 0.1)
    assert len(programs) < 5
    free = Programs(math.inf)
    assert free.came(turn("a"), 0.0) == turn("a") and free.may_start("a0", 0.0) and not len(free)


def test_an_endless_program_waits_with_the_new_ones_in_the_end(full: Programs) -> None:
    for number in range(1, MAX_TURNS):
        full.ended(f"a{number - 1}", 400, number)
        full.came(turn("a", number), number + 0.1)
        assert full.may_start(f"a{number}", number + 0.1)
    full.ended(f"a{MAX_TURNS - 1}", 400, 100.0)
    begin(full, "c", 100.0)
    full.came(turn("a", MAX_TURNS), 100.1)
    assert f"a{MAX_TURNS}" in full


def test_the_queue_starts_turns_of_the_earliest_program_first_while_others_can_bear_it() -> None:
    queue = Bounded(10_000, BoundedSettings())
    for number in range(2):  # so that a wait of 10.5 s is remembered
        queue.arrived(turn(f"gone{number}", engine_s=11.0, duration_s=1.0), 0.0)
    for number in range(2):
        queue.ended(f"gone{number}0")
    waiting = {
        facts.request_id: facts
        for facts in (
            turn("single", engine_s=0.1, duration_s=0.1),
            turn("late", 1, program_s=9.0, engine_s=2.5, duration_s=5.0),
            turn("early", 1, program_s=3.0, engine_s=2.5, duration_s=5.0),
            turn("last", 1, program_s=1.0, engine_s=2.5, duration_s=5.0),
        )
    }
    for facts in waiting.values():
        queue.arrived(facts, 0.0)
    room = StepRoom(free_blocks=1000, num_slots=3, num_tokens=10_000)
    assert queue.decide(waiting, {}, room, 4.0).request_ids[:2] == ("last1", "early1")
    assert queue.decide(waiting, {}, room, 4.0).request_ids[2] == "single0", "it has waited for long enough"


def test_helpers_start_in_the_place_of_the_program_that_waits_for_them(full: Programs) -> None:
    """While together they take no more than it does. In its order, too, and each goes on as a program of its own."""
    full.ended("a0", 500, 1.0)
    full.announced("/a", 50.0, 1.0)
    first = full.came(turn("x", num_tokens=300, caller="/a"), 2.0)
    assert first.program_s == 0.0 and full.may_start("x0", 2.0)
    assert not begin(full, "y", 2.1, num_tokens=350, caller="/a"), "both would take 650"
    assert begin(full, "z", 2.2, num_tokens=200, caller="/a")
    full.ended("x0", 300, 3.0)
    full.announced("/x", 9.0, 3.0)
    assert full.came(turn("x", 1, 320), 4.0).program_s == 0.0 and full.may_start("x1", 4.0)
    assert not begin(full, "other", 4.1, num_tokens=100)


@pytest.mark.parametrize("caller", ["/gone", "bob/theirs", ""])
def test_a_helper_of_none_that_is_inside_waits_as_a_new_program(full: Programs, caller: str) -> None:
    assert begin(full, "theirs", tenant="bob", num_tokens=300)
    full.ended("theirs0", 300, 1.0)
    full.announced("bob/theirs", 50.0, 1.0)
    assert not begin(full, "x", 2.0, num_tokens=300, caller=caller)


def test_one_helper_starts_however_large_it_is(full: Programs) -> None:
    assert begin(full, "x", 1.0, num_tokens=900, caller="/a")
    assert not begin(full, "y", 1.0, num_tokens=10, caller="/a"), (
        "the first takes more than its caller's place"
    )
    full.ended("x0", 900, 2.0)
    assert begin(full, "y2", 2.0 + UNANNOUNCED_S + 0.1, num_tokens=900, caller="/a")


@pytest.mark.parametrize(("num_host_tokens", "has_room"), [(10 * ROOM, True), (ROOM, False)])
def test_what_waits_for_helpers_takes_host_memory_alone(num_host_tokens: int, has_room: bool) -> None:
    programs = Programs(NUM_TOKENS, num_host_tokens)
    begin(programs, "a"), begin(programs, "b")
    programs.ended("a0", 500, 1.0)
    programs.announced("/a", 50.0, 1.0)
    assert begin(programs, "x", 2.0, num_tokens=200, caller="/a")
    assert begin(programs, "new", 2.1, num_tokens=300) == has_room, "200 and 400 take the device"
    programs.ended("x0", 200, 3.0)
    assert not begin(programs, "next", 3.0 + UNANNOUNCED_S + 0.1, num_tokens=300), "its caller may be back"


def test_helpers_of_helpers_share_the_place_of_the_first_caller(full: Programs) -> None:
    """So a chain of callers does not bring any number of programs in, whether the first is still there or not."""
    assert begin(full, "x", 1.0, num_tokens=400, caller="/a")
    assert begin(full, "y", 1.0, num_tokens=400, caller="/x"), "its caller waits for it"
    assert not begin(full, "z", 1.0, num_tokens=400, caller="/y"), "`x` and `z` would take 800"
    full.ended("a0", 400, 2.0)
    assert not begin(full, "w", 3.0, num_tokens=400, caller="/y")
    assert len(full) == 3, "`b`, `x` and `y`"


@pytest.mark.parametrize("seed", range(40))
def test_the_books_are_right_whoever_works_for_whom_and_nothing_waits_for_ever(seed: int) -> None:
    """With helpers of helpers, of programs that are gone, of other tenants', and with names that come again."""
    chance, programs, now = random.Random(seed), Programs(NUM_TOKENS, 10 * ROOM, lambda request_id: 9), 0.0
    names = [f"{tenant}/{name}" for tenant in "ab" for name in "vwxyz"]
    waiting: list[str] = []
    running: list[str] = []

    def start() -> None:
        for each in [each for each in waiting if programs.may_start(each, now)]:
            waiting.remove(each)
            running.append(each)

    for number in range(300):
        now += chance.choice([0.0, 0.05, 0.3, 5.0, 40.0])
        name, caller = chance.choice(names), chance.choice([*names, ""])
        tenant, _, short = name.partition("/")
        what = chance.randrange(5)
        if what < 2:
            request = turn(short, number, chance.choice([50, 400, 2000]), tenant, caller=caller)
            programs.came(msgspec.structs.replace(request, continues=chance.random() < 0.5), now)
            waiting.append(request.request_id)
        elif what == 2 and (left := chance.choice([waiting, running])):
            programs.ended(left.pop(chance.randrange(len(left))), 2000, now)
        elif what == 3:
            programs.announced(name, now + 60.0, now)
        else:
            start()
        check_books(programs)
    for _ in range(300):
        for each in running:
            programs.ended(each, 60, now)
        running.clear()
        now += LEAK_S + 1
        start()
    assert not waiting
    for each in running:
        programs.ended(each, 60, now)
    programs.came(turn("last"), now + 2 * ANNOUNCED_AT_MOST_S)
    assert not len(programs) and not programs._held and list(programs._weights) == [""]


def check_books(programs: Programs) -> None:
    inside = programs._inside.values()
    held = Counter[str]()
    for each in inside:
        held[each.tenant] += each.num_tokens
    assert programs._held == held and set(held) <= set(programs._weights)
    assert programs._active_tokens == sum(each.num_tokens for each in inside if each.num_active)
    assert programs._num_active == sum(each.num_active for each in inside) == len(programs._program_of)
    assert set(programs._program_of.values()) <= set(programs._inside)
