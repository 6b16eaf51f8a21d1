"""Cold adapters on the emulated node: who waits for them, and what a host's help is worth; on some seconds of traffic."""

from __future__ import annotations

import json

import pytest

from bench.emulated.adapters import AdapterMemory
from bench.emulated.assist import ColdStart
from bench.emulated.caraserve import (
    MODEL,
    NONE,
    Bench,
    Means,
    Traffic,
    arms,
    lengths_part,
    overheads,
    serve,
    show,
    usual_prompt,
)
from bench.emulated.node import Engine
from bench.emulated.trace import Played, play_on_node
from bench.sim.core.calibration import A10_ON_DEMAND
from bench.sim.core.hardware import EPYC_7R32, AssistingHost
from bench.sim.core.requests import Arrival
from bench.sim.core.steps import Chunk, StepCost
from bench.sim.core.tables import Workers
from engine_bridge.driver.lora.gemm import MIN_ROWS

TRAFFIC = Traffic(9.0, 64)
SLOW_HOST = AssistingHost("slow", 10e9, 4, 1.0, 1000, 0.001)
COPY_S = MODEL.lora_bytes(64) / A10_ON_DEMAND.achieved_link_bytes_per_s


def means(arm: str, traffic: Traffic = TRAFFIC, span_s: float = 6.0) -> Means:
    return serve(traffic, arm, span_s, seed=1)


# -- requests by hand --------------------------------------------------------------------------------------------------


def cost_with(host: AssistingHost | None) -> StepCost:
    return StepCost(A10_ON_DEMAND, MODEL, assistant=host)


def played(
    cold_start: ColdStart, *asked: tuple[float, int, int | None], host: AssistingHost | None = None
) -> Played:
    """Requests that come so late each, with so long a prompt, for that adapter of rank 64; each answers five tokens."""
    requests = [Arrival(f"{n}", at_s, num, 5, adapter) for n, (at_s, num, adapter) in enumerate(asked)]
    engine = Engine(num_blocks=800, has_prefix_cache=False)
    return play_on_node(
        "fcfs",
        requests,
        cost_with(host),
        engine,
        ranks=(64, 64),
        memory=AdapterMemory(policy=None, cold_start=cold_start),
    )


def test_a_step_that_waits_for_a_copy_holds_up_everybody() -> None:
    base, cold = played("step waits", (0.0, 20, None), (0.01, 20, 0)).jobs
    alone, _ = played("request waits", (0.0, 20, None), (0.01, 20, 0)).jobs
    assert base.ended_s == pytest.approx(alone.ended_s + COPY_S, abs=0.002)
    assert cold.found_adapter == "host"


def test_a_request_that_waits_for_its_copy_holds_up_nobody() -> None:
    base, cold = played("request waits", (0.0, 20, None), (0.01, 20, 0)).jobs
    step_s = cost_with(None).step_s((), 1, 20)
    assert base.tpot_s < 1.1 * step_s
    assert cold.first_token_s > cost_with(None).prefill_s(20) + COPY_S, "its copy began after the first step"


def test_a_host_that_is_quick_enough_hides_the_copy() -> None:
    (job,) = played("host helps", (0.0, 20, 0), host=EPYC_7R32).jobs
    assert job.ttft_s < cost_with(None).prefill_s(20, 64) + COPY_S


def test_the_device_takes_over_in_the_midst_of_a_prompt_when_the_copy_is_whole() -> None:
    (job,) = played("device takes over", (0.0, 100, 0), host=SLOW_HOST).jobs
    by_host_s = cost_with(SLOW_HOST).step_s((Chunk(100, 0, 64, True, is_assisted=True),))
    left = 1 - COPY_S / by_host_s
    assert by_host_s > 3 * COPY_S
    assert job.first_token_s == pytest.approx(COPY_S + left * cost_with(None).prefill_s(100, 64))


def test_as_it_serves_the_host_keeps_its_part_of_a_step_to_the_end() -> None:
    (job,) = played("host helps", (0.0, 100, 0), host=SLOW_HOST).jobs
    assert job.first_token_s == pytest.approx(
        cost_with(SLOW_HOST).step_s((Chunk(100, 0, 64, True, is_assisted=True),))
    )


def test_a_first_token_does_not_wait_for_the_copy_and_the_next_ones_are_helped_with_too() -> None:
    quick = AssistingHost("quick", 1e15, 100, 1.0, 1, 0.0)
    gpu_s = cost_with(None).step_s((Chunk(5, 0, 0, True),))
    assert gpu_s < COPY_S
    (job,) = played("host helps", (0.0, 5, 0), host=quick).jobs
    assert job.first_token_s == pytest.approx(gpu_s)
    assert job.ended_s < gpu_s + 4 * cost_with(None).step_s((), 1, 10, 64) + 1e-6


def test_what_the_host_helped_with_is_the_devices_own_once_it_is_there() -> None:
    cold, warm = played("host helps", (0.0, 20, 0), (0.1, 20, 0), host=EPYC_7R32).jobs
    assert (cold.found_adapter, warm.found_adapter) == ("host", "slot")
    assert warm.ttft_s < 2 * cost_with(None).prefill_s(20, 64)


# -- arms --------------------------------------------------------------------------------------------------------------


def test_loads_cost_everybody_or_the_one_who_waits_and_a_hosts_help_costs_neither() -> None:
    cached, on_demand, gated, helped, helped_16 = map(
        means, ("cached", "on_demand", "gated", "cpu_assist", "cpu_assist_16")
    )
    assert on_demand.ttft_s > 1.5 * cached.ttft_s and on_demand.tpot_s > 1.2 * cached.tpot_s
    assert gated.ttft_s > 1.5 * cached.ttft_s and gated.tpot_s < 1.05 * cached.tpot_s
    assert helped.ttft_s < 1.1 * cached.ttft_s and helped.tpot_s < 1.1 * cached.tpot_s
    assert helped.ttft_s < helped_16.ttft_s < min(on_demand.ttft_s, gated.ttft_s)
    assert (cached.cold_share, on_demand.cold_share, helped.cold_share) == (0.0, 1.0, 1.0)


def test_smaller_ranks_and_fewer_requests_suffer_less() -> None:
    def added(traffic: Traffic) -> float:
        return means("on_demand", traffic, 8.0).tpot_s / means("cached", traffic, 8.0).tpot_s

    assert added(Traffic(9.0, 32)) < added(TRAFFIC)
    assert added(Traffic(6.0, 64)) < added(TRAFFIC)


def test_popular_adapters_are_found_where_others_use_them() -> None:
    few, many = (means("on_demand", Traffic(6.0, 64, num)) for num in (4, 400))
    assert few.cold_share < many.cold_share < 1.0


def test_cores_by_the_live_rule_are_as_quick_as_the_device() -> None:
    by_rank = {rank: arms(rank)["cpu_assist"].assistant for rank in (32, 64)}
    for rank, assistant in by_rank.items():
        assert assistant is not None
        flops = 2 * MODEL.lora_weights_per_rank * rank * assistant.tokens_per_core
        cost = arms(rank)["cpu_assist"].cost
        base_s = cost.prefill_s(usual_prompt()) - cost.gpu.step_s
        is_quick = flops / assistant.achieved_core_flops <= base_s * MODEL.adapted_share
        assert is_quick or assistant.tokens_per_core == MIN_ROWS
    tokens = {rank: host.tokens_per_core for rank, host in by_rank.items() if host is not None}
    assert tokens[64] < tokens[32]
    assert tokens[64] < EPYC_7R32.tokens_per_core


def test_slots_and_blocks_of_the_bounded_arm_share_one_memory() -> None:
    bounded, free = arms(64)["a10_memory"], arms(64)["on_demand"]
    slot_bytes = (free.num_blocks - bounded.num_blocks) * 16 * MODEL.kv_bytes_per_token / bounded.num_slots
    assert slot_bytes == MODEL.lora_bytes(64)
    assert 0 < bounded.num_slots < bounded.num_blocks


def test_a_prompt_too_long_for_the_hosts_cores_had_better_wait_for_the_copy() -> None:
    _, result = lengths_part(Bench(Workers(1), (1,)))
    ttft_s, until = result["ttft_s"], result["assist_wins_until_tokens"]["cpu_assist"]
    assert usual_prompt() < until < 1024
    assert ttft_s["cpu_assist"][1024] > ttft_s["on_demand"][1024]
    assert ttft_s["cpu_assist_16"][1024] <= ttft_s["cpu_assist"][1024], "there the device takes over"


# -- reports -----------------------------------------------------------------------------------------------------------


def test_figures_say_what_made_them_and_what_falls_short() -> None:
    bench = Bench(Workers(1), (1, 2), span_s=3.0)
    figures, result = overheads(bench, {TRAFFIC: ((4.12, 0.71, 0.5), (-0.9, 0.11, 0.09))})
    by_name = {figure.what: figure for figure in figures}
    slow, quick = (by_name[f"TTFT, {arm}, {TRAFFIC.name}"] for arm in ("on_demand", "cpu_assist"))
    assert slow.falls_short, "a baseline whose loads cost less than the paper's"
    assert quick.falls_short and len(quick.values) == 2
    assert "fcfs" in quick.made_by and "EPYC" in quick.made_by and "Alpaca" in quick.made_by
    own = result[TRAFFIC.name]
    assert own["on_demand"]["ttft_change"] == round(slow.median, 4)
    assert own["assist_ttft_change"]["on_demand"]["all"] == own["assist_ttft_change"]["on_demand"]["cold"] < 0


def test_the_command_ends_with_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.emulated.caraserve.PRODUCTION", {Traffic(7.7, 64, 512): (NONE, NONE)})
    show(("cold", "production"), Bench(Workers(1), (1,), span_s=1.5))
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    keys = {"on_demand", "cpu_assist"}
    assert set(result["ttft_overhead"]) == keys == set(result["production_ttft_overhead"])
    assert "a10_memory" in result["parts"]["cold"][TRAFFIC.name]
