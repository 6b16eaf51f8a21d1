"""Who loses its memory first: the last in the list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.core.scheduling.victims import by_worth, most_new_blocks
from engine_bridge.policy.scheduling.preemption import RunningFacts, least_fair_first

NOW = 100.0


def request(request_id: str, arrived_s: float, num_tokens: int, priority: int = 0) -> Any:
    return SimpleNamespace(
        request_id=request_id, arrived_s=arrived_s, num_tokens=num_tokens, priority=priority
    )


def facts_of(each: Any) -> RunningFacts:
    return RunningFacts(
        request_id=each.request_id,
        fairness=(NOW - each.arrived_s) / each.num_tokens,
        started_s=each.arrived_s,
        num_blocks=1,
        urgency=each.priority,
    )


def order(*requests: Any) -> list[str]:
    return by_worth([(each.arrived_s, facts_of(each)) for each in requests], least_fair_first)


def test_the_long_and_the_young_go_before_the_short_and_the_old() -> None:
    first, short, long = request("first", 10, 5000), request("short", 50, 100), request("long", 50, 1000)
    assert order(long, short, first) == ["first", "short", "long"]


def test_who_may_wait_goes_before_everybody_else() -> None:
    first, batch, other = request("first", 10, 10), request("batch", 20, 10, 5), request("other", 90, 9000)
    assert order(batch, first, other) == ["first", "other", "batch"]


@given(
    st.lists(st.tuples(st.floats(0, 99), st.integers(1, 5000), st.integers(-5, 5)), min_size=2, max_size=8)
)
def test_who_came_first_is_nobodys_victim_and_nobody_is_lost(drawn: list[tuple[float, int, int]]) -> None:
    requests = [request(str(number), *each) for number, each in enumerate(drawn)]
    ranked = order(*requests)
    assert sorted(ranked) == sorted(each.request_id for each in requests)
    assert requests[int(ranked[0])].arrived_s == min(each.arrived_s for each in requests)


def test_a_step_needs_blocks_for_full_ones_and_for_what_its_prompts_fill() -> None:
    def needed(num_tokens: int, num_computed: int, step_tokens: int = 64) -> int:
        return most_new_blocks([("a", num_tokens, num_computed)], step_tokens, 16)

    assert needed(17, 16) == 1, "its last block is full"
    assert needed(16, 15) == needed(18, 17) == 0, "its next token has room"
    assert needed(16, 16) == 1, "of a step under way its token is not known yet"
    assert needed(40, 0) == 3
    assert needed(40, 10) == 2, "it holds the first of the three"
    assert needed(1000, 0) == 4, "a step computes no more"
    assert most_new_blocks([("a", 17, 16), ("b", 18, 17), ("c", 33, 32)], 64, 16) == 2
