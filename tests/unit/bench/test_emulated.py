"""vLLM's scheduler with our classes in virtual time: it is vLLM's order, it repeats, and its sums are those made by hand."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from bench.emulated import live
from bench.emulated.adapters import AdapterMemory
from bench.emulated.agree import figures_of, lean_play
from bench.emulated.deciding import Row, measure
from bench.emulated.node import EmulatedNode, Engine
from bench.emulated.trace import Played, arrivals, lognormal, play_on_node
from bench.sim.core.calibration import A40
from bench.sim.core.clock import Clock
from bench.sim.core.guesses import Classes
from bench.sim.core.hardware import Gpu
from bench.sim.core.models import LLAMA2_7B, Model
from bench.sim.core.requests import Arrival
from bench.sim.core.steps import StepCost
from bench.sim.core.traffic import play
from engine_bridge.policy.scheduling.policies import POLICIES

ROOMY = Engine(num_blocks=6000, max_running=64)
TIGHT = Engine(num_blocks=500, max_running=64)


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
SLOW = FlatCost(step_s=0.15, token_s=0.0002)


def played(policy: str, engine: Engine) -> Played:
    """Longer than the minute after which lanes are fitted."""
    return play_on_node(policy, arrivals(lognormal(150, 3), 1.7, 150, 3), SLOW, engine)


@pytest.mark.parametrize("engine", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_first_come_first_served_gives_every_request_the_times_of_vllms_own_queue(engine: Engine) -> None:
    stock, own = played("vllm", engine), played("fcfs", engine)
    assert own.times == stock.times
    assert (stock.num_preempted > 0) == (engine is TIGHT), "only tight memory has victims"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_is_played_twice_decides_the_same_twice(policy: str) -> None:
    first, again = played(policy, TIGHT), played(policy, TIGHT)
    assert first.times == again.times
    assert first.ended_s > 60


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
    assert node.tally.num_steps <= 20


def test_lanes_are_fitted_in_virtual_time_before_the_next_step() -> None:
    clock = Clock()
    node = EmulatedNode(clock, SLOW, ROOMY, "mlq")
    requests = arrivals(lognormal(70, 1), 1.0, 70, 1)
    play(clock, requests, node.submit)
    assert node.scheduling is not None and node.scheduling.dispatcher.counts["refits"] >= 1
    node.close()


def test_a_request_alone_takes_the_steps_that_its_tokens_make() -> None:
    one = Arrival("one", 2.0, num_prompt_tokens=100, num_answer_tokens=3)
    (job,) = play_on_node("fcfs", [one], COST, ROOMY).jobs
    first_s = 2.0 + 0.018 + 100 * 0.00011
    assert job.first_token_s == pytest.approx(first_s)
    assert job.ended_s == pytest.approx(first_s + 2 * (0.018 + 0.00011))


def test_a_prompt_beyond_a_steps_tokens_is_computed_in_several() -> None:
    long = Arrival("long", 0.0, num_prompt_tokens=3000, num_answer_tokens=1)
    result = play_on_node("fcfs", [long], COST, ROOMY)
    assert result.num_steps == 2
    assert result.jobs[0].first_token_s == pytest.approx(2 * 0.018 + 3000 * 0.00011)


def test_what_comes_during_a_step_is_taken_in_after_it() -> None:
    first = Arrival("a", 0.0, num_prompt_tokens=100, num_answer_tokens=1)
    during = replace(first, request_id="b", at_s=0.001)
    result = play_on_node("fcfs", [first, during], COST, ROOMY)
    assert [job.first_token_s for job in result.jobs] == pytest.approx([0.029, 0.058])


def test_a_request_that_would_never_fit_is_refused() -> None:
    node = EmulatedNode(Clock(), COST, Engine(num_blocks=40), "vllm")
    with pytest.raises(ValueError, match="do not fit"):
        node.submit(Arrival("a", 0.0, num_prompt_tokens=640, num_answer_tokens=1))


def test_the_cost_of_deciding_is_taken_with_as_many_queued_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.emulated.deciding.NUM_STEPS", 20)
    monkeypatch.setattr("bench.emulated.deciding.NUM_WARM", 10)
    looks = itertools.count()
    found = measure(Row("mlq", num_queued=300), COST, ROOMY, seed=1, stopwatch=lambda: next(looks) / 1e3)
    assert found["num_waiting"] + found["num_running"] == 300
    # A millisecond from look to look: around the decision; before and after it, and around the telling who started.
    assert (found["decide_p50_us"], found["decide_p99_us"]) == (1000, 1000)
    assert (found["own_p50_us"], found["own_p99_us"]) == (4000, 4000)
    assert found["decide_share"] == pytest.approx(1 / found["step_ms"], rel=1e-3)
    assert found["own_share"] == pytest.approx(4 / found["step_ms"], rel=1e-3)


@pytest.mark.parametrize("policy", ["fcfs", "mlq"])
def test_the_lean_model_gives_every_request_the_times_of_the_emulated_node_while_memory_suffices(
    policy: str,
) -> None:
    cost, engine = StepCost(A40, LLAMA2_7B), Engine(num_blocks=3000)
    requests = arrivals(lognormal(80, 5), 2.0, 80, 5)
    lean = lean_play(policy, requests, cost, engine.num_blocks, RIGHT)
    own = play_on_node(policy, requests, cost, engine, RIGHT)
    ended = sorted(lean.ended, key=lambda request: request.arrival.request_id)
    assert [job.first_token_s for job in own.jobs] == pytest.approx([each.first_token_s for each in ended])
    assert [job.ended_s for job in own.jobs] == pytest.approx([each.ended_s for each in ended])


def test_the_lean_model_preempts_nearly_as_the_emulated_node_does() -> None:
    cost, engine = StepCost(A40, LLAMA2_7B), Engine(num_blocks=900)
    requests = arrivals(lognormal(80, 5), 2.0, 80, 5)
    lean = figures_of(lean_play("fcfs", requests, cost, engine.num_blocks, RIGHT).ended)
    own = play_on_node("fcfs", requests, cost, engine, RIGHT)
    assert own.num_preempted > 3
    for name, value in figures_of(own.jobs).items():
        assert lean[name] == pytest.approx(value, rel=0.03), name


def test_errors_over_all_plays_are_the_larger_of_the_policies() -> None:
    def play(policy: str, first_s: float) -> live.Play:
        measured = (live.Times(0.0, 1.0, 3.0, 3),)
        ways = {
            live.UP_TO_DATE: (live.Times(0.0, first_s, 3.0, 3),),
            live.OWN_SPEED: (live.Times(0.0, 1.05, 3.0, 3),),
        }
        return live.Play(policy, 0.5, {}, {}, 1.0, measured, ways)

    plays = [play("mlq", 1.1), play("fcfs", 0.8)]
    found = live.pooled_errors(plays)
    assert found["ttft_p50"] == pytest.approx(0.2) and found["tokens_per_s"] == 0
    assert live.pooled_errors(plays, live.OWN_SPEED)["ttft_p50"] == pytest.approx(0.05)


def test_the_interval_of_an_error_spans_what_the_plays_differ_by() -> None:
    def play(first_s: float) -> live.Play:
        measured = (live.Times(0.0, 1.0, 3.0, 3),)
        ways = {live.UP_TO_DATE: (live.Times(0.0, first_s, 3.0, 3),)}
        return live.Play("mlq", 0.5, {}, {}, 1.0, measured, ways)

    same = live.pooled_intervals([play(1.1)] * 6)["mlq"]
    assert same["ttft_p99"] == (pytest.approx(1.1), pytest.approx(1.1))
    low, high = live.pooled_intervals([play(0.8)] * 3 + [play(1.2)] * 3)["mlq"]["ttft_p50"]
    assert (low, high) == (pytest.approx(0.8), pytest.approx(1.2))


def test_a_figure_is_undecided_where_its_interval_spans_the_aim() -> None:
    def of(low: float, high: float) -> list[str]:
        return live.undecided({"mlq": {"ttft_p99": (low, high)}})

    assert of(0.62, 1.38) == of(0.9, 1.2) == of(0.7, 0.95) == ["ttft_p99"]
    assert of(0.9, 1.1) == [], "within the aim"
    assert of(1.2, 1.4) == of(0.5, 0.8) == [], "beyond it"


def with_adapters(
    num_slots: int, policy: str | None, asked: list[tuple[float, int]]
) -> list[tuple[float, str]]:
    """TTFT and where the adapter was, of prompts that come so late each, by the adapter that they ask for."""
    requests = [Arrival(f"{number}", at_s, 100, 5, adapter) for number, (at_s, adapter) in enumerate(asked)]
    played = play_on_node(
        "fcfs", requests, A40_COST, ROOMY, ranks=(128, 64, 8), memory=AdapterMemory(num_slots, policy)
    )
    return [(job.ttft_s, job.found_adapter) for job in played.jobs]


def copy_s(rank: int) -> float:
    return LLAMA2_7B.lora_bytes(rank) / A40.achieved_link_bytes_per_s


def test_an_adapter_takes_its_bytes_over_the_link_before_its_first_step() -> None:
    found = with_adapters(8, "lru", [(0.0, 0), (5.0, 0), (9.0, 1)])
    assert [place for _, place in found] == ["host", "slot", "host"]
    assert found[0][0] == pytest.approx(copy_s(128) + A40_COST.prefill_s(100, 128))
    assert found[1][0] == pytest.approx(A40_COST.prefill_s(100, 128))
    assert found[2][0] == pytest.approx(copy_s(64) + A40_COST.prefill_s(100, 64))


def test_without_a_cache_an_adapter_leaves_with_its_last_request() -> None:
    asked = [(0.0, 0), (0.01, 0), (5.0, 0)]
    assert [place for _, place in with_adapters(8, None, asked)] == ["host", "slot", "host"]


def test_requests_beyond_the_slots_wait_until_one_is_free() -> None:
    first, second = with_adapters(1, "lru", [(0.0, 0), (0.001, 1)])
    assert second[0] > first[0] + copy_s(64) + 4 * 0.03, "the first one's whole answer, and the copy"


def test_a_prompt_that_fills_the_last_free_block_starts_as_in_vllms_own_queue() -> None:
    full = Engine(num_blocks=10)
    requests = [Arrival("a", 0.0, 70, 3), Arrival("b", 0.01, 80, 1)]
    stock = play_on_node("vllm", requests, COST, full)
    assert play_on_node("fcfs", requests, COST, full).times == stock.times
    assert stock.jobs[1].first_token_s < stock.jobs[0].ended_s
