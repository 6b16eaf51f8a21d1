"""A node whose steps take what was measured, kept short as the live engine keeps them; and the bench that compares both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from bench.emulated import live as emulated
from bench.live.peers.adapters import Ask
from bench.sim.core.batch import Request
from bench.sim.core.clock import Clock
from bench.sim.core.lean_node import Node
from bench.sim.core.measured import MeasuredCost
from bench.sim.core.models import Model
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import VLLM, Shape
from bench.sim.core.steps import Chunk, StepCost
from engine_bridge.policy.costs import StepTable
from engine_bridge.policy.registry import POLICIES
from tests.unit.bench.test_lean_node import Knows, gpu

TINY = Model("tiny", 4, 16, 16, 1, 1, 16, 4096)
TOKEN_S, DECODE_S, CONTEXT_S = 0.001, 0.002, 0.00001
PACED = replace(VLLM, max_running=8, max_step_s=0.1)


def table() -> StepTable:
    """A millisecond for a token of a prompt, two for a decode, a hundredth for a token of context."""
    return StepTable.of(
        lambda points: [p * TOKEN_S + d * DECODE_S + c * CONTEXT_S for p, d, c in points],
        (0, 64, 4096),
        (0, 1, 8, 256),
        (0, 4096, 1 << 20),
    )


def serve(
    asked: Sequence[tuple[float, int, int]],
    shape: Shape = PACED,
    policy: str = "fcfs",
    num_blocks: int = 1000,
    look: Callable[[Node], None] = Node.check_invariants,
) -> tuple[Node, list[Request]]:
    """Serve requests (at, prompt, answer), looking at the node twenty times a second; they come back in order of arrival."""
    clock = Clock()
    queue = POLICIES[policy](num_blocks * 16)
    cost = MeasuredCost(table(), TINY)
    node = Node(clock, cost, shape, queue, Knows(), num_blocks=num_blocks, refit_every_s=1.0)
    for number, (at_s, prompt, answer) in enumerate(asked):
        arrival = Arrival(f"{number:04d}", at_s, prompt, answer)
        clock.at(at_s, lambda now, arrival=arrival: node.submit(arrival))
    for check in range(1, 1000):
        clock.at(check / 20, lambda now: look(node))
    clock.run()
    assert not node.waiting and not node.running
    return node, sorted(node.ended, key=lambda request: request.arrival.request_id)


def test_steps_take_what_the_table_says_and_the_time_between_them() -> None:
    cost = MeasuredCost(table(), TINY, between_s=0.5)
    chunks = (Chunk(100, 200, 0, True), Chunk(50, 0, 0, False))
    assert cost.step_s(chunks, 4, 1000) == pytest.approx(0.5 + 0.150 + 0.008 + 0.012)
    assert cost.prefill_s(300) == pytest.approx(0.8)


def test_a_run_of_decodes_takes_as_long_as_its_steps() -> None:
    cost = MeasuredCost(table(), TINY, between_s=0.25)
    steps = [cost.step_s((), 4, 400 + 4 * step) for step in range(60)]
    assert cost.decoding(4, 400, 0).total_s(60) == pytest.approx(sum(steps))


def test_a_table_knows_nothing_of_adapters() -> None:
    with pytest.raises(ValueError, match="adapters"):
        MeasuredCost(table(), TINY).step_s((Chunk(10, 0, 8, True),))
    with pytest.raises(ValueError, match="adapters"):
        MeasuredCost(table(), TINY).step_s((), 1, 10, 8)


def test_steps_are_kept_short_only_by_a_table() -> None:
    with pytest.raises(ValueError, match="table"):
        Node(Clock(), StepCost(gpu(100), TINY), PACED, POLICIES["fcfs"](1600), Knows(), num_blocks=100)


def test_a_long_prompt_is_computed_in_steps_of_the_target() -> None:
    node, (request,) = serve([(0.0, 390, 1)])
    # Of 0.1 s: 100 tokens, then, with their context, 99, 98, 97 and nothing left to speak of.
    assert node.tally.counts["steps"] == 4
    assert request.first_token_s == pytest.approx(0.390 + (100 + 199 + 297) * CONTEXT_S, rel=0.01)
    assert serve([(0.0, 390, 1)], replace(PACED, max_step_s=0.0))[0].tally.counts["steps"] == 1


def test_who_finds_no_time_in_a_step_has_its_first_token_in_the_next() -> None:
    # Both come while the first one's step of 0.02 s is under way.
    found: list[list[str]] = []
    look = lambda node: found.append([node.dispatcher.reason(each) for each in node.dispatcher.waiting_ids()])  # noqa: E731
    _, (_, second, third) = serve([(0.0, 20, 1), (0.01, 80, 1), (0.01, 80, 1)], look=look)
    assert (second.first_token_s, third.first_token_s) == pytest.approx((0.1, 0.18))
    assert (found[0], found[2]) == (["step_full"], [])
    assert third.first_started_s == pytest.approx(0.1)


def test_a_short_prompt_starts_beside_a_long_one_that_is_under_way() -> None:
    _, (long, short) = serve([(0.0, 900, 1), (0.05, 30, 1)])
    assert short.first_token_s < 0.25, "it had half of a step's tokens to itself"
    assert long.first_token_s > 0.9


def test_prompts_get_three_times_what_the_decodes_of_a_step_take() -> None:
    tight = replace(PACED, max_running=64, max_step_s=0.01)
    requests = [(0.0, 16, 100)] * 40 + [(2.0, 240, 1)]
    _, ended = serve(requests, tight)
    # 40 decodes and their context take 0.08 s and more: 240 tokens fit beside them in one step, though its target is far shorter.
    assert ended[-1].first_token_s - 2.0 < 0.6
    assert serve(requests, replace(tight, max_running=41))[1][-1].ended_s == ended[-1].ended_s


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_blocks", [40, 400])
def test_short_steps_lose_nobody(policy: str, num_blocks: int) -> None:
    chance = random.Random(policy)
    asked = [
        (chance.uniform(0, 8), chance.randint(1, 400), chance.choice((1, 5, 60, 200))) for _ in range(60)
    ]
    node, requests = serve(asked, policy=policy, num_blocks=num_blocks)
    assert len(requests) == 60
    assert node.tally.counts["first_tokens"] + node.tally.counts["decode_tokens"] >= sum(a for *_, a in asked)
    if policy != "mlq":  # whose quotas spare it most of that
        assert (node.dispatcher.counts["preempted"] > 0) == (num_blocks == 40)


def test_a_shape_without_a_bound_is_as_it_was() -> None:
    asked = [(0.1 * number, 100 + number, 20) for number in range(30)]
    unpaced = replace(VLLM, max_running=8)
    wide = replace(VLLM, max_running=8, max_step_s=1e6)
    assert [r.ended_s for r in serve(asked, unpaced)[1]] == [r.ended_s for r in serve(asked, wide)[1]]


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
