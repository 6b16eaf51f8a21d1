"""Figures of several nodes add up, whatever fields they have."""

from __future__ import annotations

from typing import Any, get_origin

import pytest
from msgspec import Struct, structs

from engine_bridge.protocol.node import (
    EngineState,
    GrammarStats,
    LaneStats,
    LengthErrors,
    NodeStats,
    RequestState,
    SchedulingStats,
    TokenizerStats,
)
from gateway.nodes import router_figures as figures
from kvtiers.stats import DiskTierStats, HostStats, PeerStats, TierStats


def full(kind: type[Struct], value: int, **fields: Any) -> Any:
    """With every field set: numbers to `value`."""
    made: dict[str, Any] = {}
    for field in structs.fields(kind):
        if field.type is bool:
            made[field.name] = True
        elif field.type in (int, float):
            made[field.name] = value
        elif get_origin(field.type) is dict:
            made[field.name] = {"both": value, f"only {value}": value}
    return kind(**(made | fields))


def scheduling(value: int, lanes: LaneStats | None) -> SchedulingStats:
    errors = LengthErrors(num_answers=value, sum_tokens=value, num_within_p90=value, num_within={16: value})
    fields = {"policy": "mlq", "num_by_reason": {"queued": value}, "lanes": lanes, "length_errors": errors}
    stats: SchedulingStats = full(SchedulingStats, value, **fields)
    return stats


def lanes(*tokens: int) -> LaneStats:
    edges = (0.5,) * (len(tokens) - 1)
    return LaneStats(boundaries=edges, num_waiting=tokens, quota_tokens=tokens, used_tokens=tokens)


def tiers(value: int, problem: str | None = None) -> TierStats:
    parts = [full(kind, value) for kind in (HostStats, DiskTierStats, PeerStats)]
    return TierStats(host=parts[0], disk=parts[1], peers=parts[2], problem=problem)


def test_of_nobody_there_is_nothing() -> None:
    assert figures.tiers_of([]) is figures.scheduling_of([]) is None
    assert figures.tokenizers_of([]) is figures.grammars_of([]) is None


def test_of_one_it_is_its_own() -> None:
    assert figures.scheduling_of([scheduling(1, None)]) == scheduling(1, None)
    assert figures.tiers_of([tiers(3)]) == tiers(3)


def test_tiers_add_up_but_for_speeds_and_delays() -> None:
    both = figures.tiers_of([tiers(1), tiers(3, "no room")])
    assert both is not None
    assert (both.host.num_blocks, both.disk.num_hits, both.peers.bytes_fetched) == (4, 4, 4)
    assert (both.disk.bytes_per_s, both.disk.write_lag_s, both.disk.is_on) == (2.0, 3, True)
    assert both.peers.misses == {"both": 4, "only 1": 1, "only 3": 3}
    assert both.problem == "no room"


def test_scheduling_adds_up_lane_by_lane() -> None:
    both = figures.scheduling_of([scheduling(1, lanes(1, 2)), scheduling(3, lanes(10, 20))])
    assert both is not None
    assert both.lanes == lanes(11, 22)
    assert (both.num_running, both.num_by_reason, both.counts["both"]) == (4, {"queued": 4}, 4)
    assert both.length_errors is not None and both.length_errors.num_within == {16: 4}
    assert both.block_size == 1


def test_lanes_that_do_not_match_are_left_out() -> None:
    both = figures.scheduling_of([scheduling(1, lanes(1, 2)), scheduling(1, lanes(1))])
    assert both is not None and both.lanes is None


@pytest.mark.parametrize(
    ("kind", "put_together"),
    [(TokenizerStats, figures.tokenizers_of), (GrammarStats, figures.grammars_of)],
)
def test_small_figures_add_up(kind: Any, put_together: Any) -> None:
    assert put_together([full(kind, 1), full(kind, 2)]) == full(kind, 3)


def test_engines_are_one_with_the_first_requests_of_all() -> None:
    def state(name: str, value: int) -> EngineState:
        requests = [
            RequestState(request_id=f"{name}{at}", priority=0, size_tokens=1, num_output_tokens=0)
            for at in range(2)
        ]
        engine = full(NodeStats, value, state="ready", model="m", kv_tiers=tiers(value))
        return EngineState(
            engine=engine,
            scheduling=scheduling(value, None),
            waiting=requests,
            running=requests,
            num_waiting=2,
            num_running=2,
        )

    both = figures.engine_state_of([state("a", 1), state("b", 3)], "rebuilding", 3)
    assert [request.request_id for request in both.waiting] == ["a0", "a1", "b0"]
    assert (both.num_waiting, both.num_running) == (4, 4)
    engine = both.engine
    assert (engine.state, engine.num_kv_blocks, engine.max_model_len) == ("rebuilding", 4, 1)
    assert engine.kv_tiers is not None and engine.kv_tiers.host.bytes == 4
