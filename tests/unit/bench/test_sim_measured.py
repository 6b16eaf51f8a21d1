"""Steps that take what was measured, and the bench that compares a node of such steps with the engine."""

from __future__ import annotations

import pytest

from bench.emulated import live as emulated
from bench.live.peers.adapters import Ask
from bench.sim.core.measured import MeasuredCost
from bench.sim.core.models import Model
from bench.sim.core.steps import Chunk
from engine_bridge.policy.costs.costs import StepTable

TINY = Model("tiny", 4, 16, 16, 1, 1, 16, 4096)
TOKEN_S, DECODE_S, CONTEXT_S = 0.001, 0.002, 0.00001


def table() -> StepTable:
    """A millisecond for a token of a prompt, two for a decode, a hundredth for a token of context."""
    return StepTable.of(
        lambda points: [p * TOKEN_S + d * DECODE_S + c * CONTEXT_S for p, d, c in points],
        (0, 64, 4096),
        (0, 1, 8, 256),
        (0, 4096, 1 << 20),
    )


def test_steps_take_what_the_table_says_and_the_time_between_them() -> None:
    cost = MeasuredCost(table(), TINY, between_s=0.5)
    chunks = (Chunk(100, 200, 0, True), Chunk(50, 0, 0, False))
    assert cost.step_s(chunks, 4, 1000) == pytest.approx(0.5 + 0.150 + 0.008 + 0.012)
    assert cost.prefill_s(300) == pytest.approx(0.8)


def test_a_table_knows_nothing_of_adapters() -> None:
    with pytest.raises(ValueError, match="adapters"):
        MeasuredCost(table(), TINY).step_s((Chunk(10, 0, 8, True),))
    with pytest.raises(ValueError, match="adapters"):
        MeasuredCost(table(), TINY).step_s((), 1, 10, 8)


# -- the bench ---------------------------------------------------------------------------------------------------------

HISTORY = [[20 + number % 50, 10 + number % 20, None] for number in range(300)]


@pytest.mark.parametrize("policy", emulated.POLICIES)
def test_the_bench_plays_its_requests_in_virtual_time(policy: str) -> None:
    asks = [Ask(at_s=0.0, prompt=[1] * 50, max_tokens=3), Ask(at_s=9.0, prompt=[1] * 30, max_tokens=1)]
    first, second = emulated.emulate(policy, asks, HISTORY, 1.0, table().grid(), 0.01, lambda at_s: 1.0)
    assert first.first_s == pytest.approx(0.060)
    assert first.end_s == pytest.approx(0.060 + 2 * 0.012 + (51 + 52) * CONTEXT_S, abs=1e-4)
    assert (second.at_s, second.first_s, second.num_tokens) == (9.0, pytest.approx(9.040), 1)
    steps = [(100, 0, 0, 5.0, 5.2), (100, 0, 0, 13.9, 14.2)]  # twice as slow at first, three times in the end
    slow = emulated.Slowness(steps, table().grid(), 5.0)
    first, second = emulated.emulate(policy, asks, HISTORY, 1.0, table().grid(), 0.01, slow.at)
    assert (first.first_s, second.first_s) == (pytest.approx(0.110), pytest.approx(9.100))


def test_slowness_is_that_of_the_nearest_steps() -> None:
    steps = [(100, 0, 0, 5.0, 5.1), (100, 0, 0, 6.9, 7.2), (0, 50, 0, 15.5, 15.6)]
    slow = emulated.Slowness(steps, table().grid(), 5.0)
    assert slow.at(1.0) == pytest.approx(2.0), "0.4 s that should have been 0.2"
    assert (slow.at(4.0), slow.at(9.0), slow.at(99.0)) == pytest.approx((2.0, 1.0, 1.0))
    assert slow.mean == pytest.approx(0.5 / 0.3)


def test_a_play_s_metrics_and_errors() -> None:
    live = emulated.metrics_of([emulated.Times(0.0, 1.0, 3.0, 3), emulated.Times(1.0, 1.5, 1.5, 1)])
    assert live["tokens_per_s"] == pytest.approx(4 / 3, abs=1e-4) and live["tpot_mean_s"] == 1.0
    assert live["ttft_mean_s"] == 0.75 and live["e2e_mean_s"] == 1.75
    play = emulated.Play("mlq", 0.5, live, {"profile": live | {"ttft_mean_s": 0.6}}, 1.0)
    assert play.error("profile", "ttft_mean_s") == pytest.approx(-0.2)
    assert play.error("profile", "tokens_per_s") == 0


def test_the_time_between_steps_is_the_median_and_never_negative() -> None:
    steps = [(1, 0, 0, 0.0, 1.0), (0, 1, 1, 1.2, 2.0), (0, 1, 2, 2.3, 3.0), (0, 1, 3, 2.9, 4.0)]
    assert emulated.gap_s(steps) == pytest.approx(0.2)
