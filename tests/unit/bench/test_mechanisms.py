"""What the bench of mechanisms makes of what it measured; its registry and router, which need no engine."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from bench.live.mechanisms_engine import BLOCK_TOKENS, compared, on_line, split_saves
from bench.live.mechanisms_host import decide, fill
from engine_bridge.adapters.registry import Registry
from engine_bridge.protocol.node import AdapterInfo


def test_times_between_those_measured_lie_on_straight_lines() -> None:
    assert on_line({100: 1.0, 300: 2.0}, 50) == 0.5
    assert on_line({100: 1.0, 300: 2.0}, 200) == 1.5
    with pytest.raises(ValueError, match="more than were measured"):
        on_line({100: 1.0}, 101)


def test_a_split_saves_half_where_both_ways_are_as_fast_and_nothing_where_one_costs_nothing() -> None:
    num = 64 * BLOCK_TOKENS
    assert split_saves({num: 2.0}, {num: 2.0}, num) == 0.5
    assert split_saves({num: 2.0}, {num: 0.0}, num) == 0.0
    assert split_saves({num: 1.0}, {num: 1000.0}, num) == pytest.approx(0.0, abs=0.02)


def test_an_arm_is_compared_with_the_base_repeat_by_repeat() -> None:
    found = compared({"base": [1.0, 2.0, 4.0], "other": [0.5, 2.0, 8.0]}, "base")
    assert found == {"ttft_ms": {"base": 2000.0, "other": 2000.0}, "other_vs_base": 1.0}


def test_adapters_that_were_filled_in_are_found_and_a_node_is_chosen_for_each_request(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "adapters.db", ["a", "b"])
    registry = Registry(tmp_path / "adapters.db")
    assert [record.name for record in registry.all_current()] == ["a", "b"]
    registry.close()
    assert len(decide({"a": AdapterInfo("a", 8, 1 << 20, version="1")}, ["a", "a"])) == 2
