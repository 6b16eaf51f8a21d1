"""vLLM's scheduler with our classes in virtual time: it is vLLM's order, it repeats, and its sums are those made by hand."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bench.emulated.core.arrivals import Arrival, Classes
from bench.emulated.core.calibration import A40
from bench.emulated.core.clock import Clock
from bench.emulated.core.hardware import Gpu
from bench.emulated.core.models import LLAMA2_7B, Model
from bench.emulated.core.node import EmulatedNode, Engine
from bench.emulated.core.plays import Played, arrivals, lognormal, play_on_node
from bench.emulated.core.steps import StepCost, with_table
from bench.emulated.core.traffic import Lengths, play
from engine_bridge.policy.scheduling.policies import POLICIES

ROOMY = Engine(num_blocks=6000, max_running=64)
TIGHT = Engine(num_blocks=300, max_running=64)


class FlatCost(StepCost):
    """Steps by two numbers: so long in any case, and so long for each token. Sums are made by hand."""

    def __init__(self, step_s: float = 0.018, token_s: float = 0.00011) -> None:
        super().__init__(Gpu("flat", 1.0, 1.0, 0, 1e9), Model("flat", 1, 1, 1, 1, 1, 1, 4096))
        self._fixed_s, self._each_s = step_s, token_s

    def step_s(self, chunks: Any, num_decodes: int = 0, num_context: int = 0, sum_rank: int = 0) -> float:
        return self._fixed_s + self._each_s * (num_decodes + sum(chunk.num_tokens for chunk in chunks))


COST = FlatCost()
A40_COST = StepCost(A40, LLAMA2_7B)
RIGHT = Classes([answer for _, answer in lognormal(80, 5).pairs], accuracy=1.0, seed=0)
# Few steps make much of virtual time.
SLOW = FlatCost(step_s=0.5, token_s=0.0002)
SHORT_ANSWERS = tuple((prompt, -(-answer // 3)) for prompt, answer in lognormal(60, 3).pairs)
REQUESTS = [
    replace(arrival, tenant="ab"[number % 2], priority=number % 3 - 1)
    for number, arrival in enumerate(arrivals(Lengths(SHORT_ANSWERS), 0.8, 60, 3))
]


@cache
def played(policy: str, engine: Engine) -> Played:
    """Longer than the minute after which lanes are fitted."""
    return play_on_node(policy, REQUESTS, SLOW, engine)


@pytest.mark.parametrize("engine", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_first_come_first_served_gives_every_request_the_times_of_vllms_own_queue(engine: Engine) -> None:
    stock, own = played("vllm", engine), played("fcfs", engine)
    assert own.times == stock.times
    assert (stock.num_preempted > 0) == (engine is TIGHT), "only tight memory has victims"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_is_played_twice_decides_the_same_twice(policy: str) -> None:
    first, again = played(policy, TIGHT), played.__wrapped__(policy, TIGHT)
    assert first.times == again.times
    assert first.ended_s > 60 and (policy != "mlq" or first.counts["refits"] >= 1), (
        "lanes are fitted in virtual time"
    )


@pytest.mark.parametrize("policy", ["vllm", *POLICIES])
def test_requests_that_begin_alike_are_charged_once_for_what_they_share(policy: str) -> None:
    """Each holds 98 blocks of 500, but 96 of these are the same."""
    clock = Clock()
    node = EmulatedNode(clock, COST, Engine(500, max_running=64), policy, guesser=RIGHT)
    num_running = []
    node.on_step = lambda: num_running.append(len(node.scheduler.running))
    asked = [Arrival(f"{at:02d}", 0.0, 1536 + 16, 16, session="the same") for at in range(50)]
    play(clock, asked, node.submit)
    node.close()
    assert len(node.ended) == 50
    assert max(num_running) == 50
    assert node.num_steps <= 20


@pytest.mark.parametrize(
    ("asked", "first_token_s", "ended_s"),
    [
        ([(0.0, 3000)], [2 * 0.018 + 3000 * 0.00011], 0.366 + 2 * 0.01811),
        ([(0.0, 100), (0.001, 100)], [0.029, 0.05811], 0.05811 + 0.01822),
    ],
    ids=[
        "a prompt beyond a step's tokens is computed in two",
        "a request that comes during a step waits for its end",
    ],
)
def test_steps_are_those_of_the_engine(
    asked: list[tuple[float, int]], first_token_s: list[float], ended_s: float
) -> None:
    requests = [Arrival(str(at), at_s, num_tokens, 3) for at, (at_s, num_tokens) in enumerate(asked)]
    jobs = play_on_node("fcfs", requests, COST, ROOMY).jobs
    assert [job.first_token_s for job in jobs] == pytest.approx(first_token_s)
    assert jobs[0].ended_s == pytest.approx(ended_s)


def test_a_prompt_that_fills_the_last_free_block_starts_as_in_vllms_own_queue() -> None:
    full = Engine(num_blocks=10)
    requests = [Arrival("a", 0.0, 70, 3), Arrival("b", 0.01, 80, 1)]
    stock = play_on_node("vllm", requests, COST, full)
    assert play_on_node("fcfs", requests, COST, full).times == stock.times
    assert stock.jobs[1].first_token_s < stock.jobs[0].ended_s


def test_an_answer_goes_on_beside_a_long_prompt_that_came_before_it() -> None:
    """In vLLM's own order it stands still until that prompt, to which the engine turns first, is computed."""
    engine = replace(ROOMY, max_step_s=0.1, has_prefix_cache=False)
    asked = [
        Arrival("talk", 0.0, 100, 200),
        Arrival("long", 0.1, 4000, 2),
        Arrival("short", 0.11, 30, 8),
    ]
    jobs = {
        job.arrival.request_id: job
        for job in play_on_node("bounded", asked, with_table(A40_COST), engine).jobs
    }
    long, short = jobs["long"], jobs["short"]
    assert short.first_token_s < short.ended_s < long.first_token_s
