"""AdaptiveLLM's tables on the emulated node: what runs, and what they report of it, on some dozens of requests."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from functools import cache

import pytest

from bench.emulated import adaptivellm
from bench.emulated.adaptivellm import (
    Bench,
    PerRequest,
    over_time_settings,
    pays_from,
    ratios,
    show,
    throughput_figure,
)
from bench.emulated.adaptivellm_runs import (
    ARMS,
    FREE,
    MAX_ANSWER_TOKENS,
    AlwaysLoads,
    Setting,
    engine_of,
    run_once,
    tiers_of,
)
from bench.emulated.node import EmulatedNode
from bench.sim.core.calibration import A800, A800_CONTEXT_TOKENS, A800_TOKENS_PER_S
from bench.sim.core.clock import Clock
from bench.sim.core.hardware import Gpu
from bench.sim.core.models import MISTRAL_7B, OPT_13B, OPT_30B
from bench.sim.core.shapes import BLOCK_TOKENS
from bench.sim.core.steps import StepCost
from bench.sim.core.tables import Workers
from engine_bridge.policy.kv.restore_method import FullCost, SwapOrRecompute
from engine_bridge.policy.scheduling.baselines import Fair
from engine_bridge.policy.scheduling.mlq import Mlq

FEW = Setting(num_requests=60)
LONG = replace(FEW, mean_prompt_tokens=340.48)


# Tests share runs: the same one gives the same again, as one of them checks.
outcome_of = cache(run_once)


def linked(gb_per_s: float) -> Gpu:
    return replace(A800, link_share=gb_per_s * 1e9 / A800.link_bytes_per_s)


def node_of(name: str, setting: Setting = FEW) -> EmulatedNode:
    arm = ARMS[name]
    cost = StepCost(setting.gpu, setting.model)
    return EmulatedNode(Clock(), cost, engine_of(arm, setting), arm.queue, tiers=tiers_of(arm, setting))


# -- what runs ---------------------------------------------------------------------------------------------------------


def test_arms_are_what_serves() -> None:
    nodes = {name: node_of(name) for name in ARMS}
    assert {name for name, node in nodes.items() if node.scheduling is None} == {
        "vllm",
        "swap",
        "swap only",
        "cost",
    }
    policies = {name: node.scheduling.dispatcher.policy for name, node in nodes.items() if node.scheduling}
    assert type(policies["adaptive"]) is Fair and type(policies["mlq"]) is Mlq
    assert nodes["vllm"].tiers is None
    tiers = {name: node.tiers for name, node in nodes.items() if node.tiers is not None}
    for name in ("cost", "adaptive", "mlq", "default"):
        assert type(tiers[name].policy) is FullCost
        assert type(tiers[name].swap_or_recompute()) is SwapOrRecompute
    assert type(tiers["swap"].policy) is type(tiers["swap only"].policy) is AlwaysLoads
    for node in nodes.values():
        node.close()


def test_memory_is_the_papers() -> None:
    node = node_of("adaptive")
    assert node.tiers is not None
    stats = node.tiers.stats()
    assert stats is not None
    held = stats.host.capacity_bytes // (BLOCK_TOKENS * OPT_13B.kv_bytes_per_token)
    assert (node.engine.num_blocks, held) == (128, 64)
    assert engine_of(ARMS["swap only"], FEW).num_blocks == 64
    node.close()


def test_the_device_decodes_as_published() -> None:
    cost = StepCost(A800, MISTRAL_7B)
    for num, per_s in A800_TOKENS_PER_S.items():
        assert num / cost.step_s((), num, num * A800_CONTEXT_TOKENS) == pytest.approx(per_s)
    assert A800.achieved_link_bytes_per_s == pytest.approx(25.13e9)


def test_opt_has_the_parameters_of_its_name() -> None:
    for model, num in ((OPT_13B, 13e9), (OPT_30B, 30e9)):
        assert model.layer_weights + model.head_weights == pytest.approx(num, rel=0.03)


# -- requests ----------------------------------------------------------------------------------------------------------


def test_the_same_requests_come_at_once_and_over_time() -> None:
    at_once, over_time = FEW.arrivals(3), replace(FEW, per_s=1.0).arrivals(3)
    assert [a.num_prompt_tokens for a in at_once] == [a.num_prompt_tokens for a in over_time]
    assert {a.at_s for a in at_once} == {0.0}
    assert over_time[-1].at_s == pytest.approx(60, rel=0.3)
    assert {a.num_answer_tokens for a in at_once} == {MAX_ANSWER_TOKENS}
    assert FEW.arrivals(4) != at_once


def test_lengths_have_the_published_mean_and_answers_keep_to_the_bound() -> None:
    many = replace(LONG, num_requests=4000, is_answer_drawn=True)
    arrivals = many.arrivals(1)
    # A few are cut.
    assert statistics.fmean(a.num_prompt_tokens for a in arrivals) == pytest.approx(0.9 * 340.48, rel=0.05)
    assert max(a.num_prompt_tokens for a in arrivals) == 928
    answers = [a.num_answer_tokens for a in arrivals]
    assert max(answers) == MAX_ANSWER_TOKENS and statistics.fmean(answers) < 0.7 * MAX_ANSWER_TOKENS
    assert {a.max_answer_tokens for a in arrivals} == {MAX_ANSWER_TOKENS}


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARMS)
def test_all_arms_serve_all_requests_in_both_readings(name: str) -> None:
    for setting in (LONG, replace(FEW, per_s=15.0, is_answer_drawn=True)):
        outcome = outcome_of(ARMS[name], setting, 1)
        assert outcome.per_s > 0 and outcome.weighted >= 1


def test_a_run_is_the_same_again_and_another_seed_is_another() -> None:
    assert run_once(ARMS["cost"], FEW, 1) == outcome_of(ARMS["cost"], FEW, 1)
    assert run_once(ARMS["cost"], FEW, 2) != outcome_of(ARMS["cost"], FEW, 1)


def test_ways_are_what_arms_say() -> None:
    outcomes = {name: outcome_of(ARMS[name], FEW, 1) for name in ("vllm", "swap", "cost")}
    assert outcomes["vllm"].swapped == 0 < outcomes["vllm"].recomputed
    assert outcomes["swap"].swapped > 0 and outcomes["cost"].swapped > 0
    assert outcomes["vllm"].stalled_share == pytest.approx(0.0)
    assert outcomes["swap"].stalled_share > 1e-4


def test_swapping_pays_on_a_fast_link_and_not_on_a_slow_one() -> None:
    roomy = replace(FEW, host_blocks=256)
    base = outcome_of(ARMS["vllm"], roomy, 1).per_s
    fast, slow = replace(roomy, gpu=linked(50.0)), replace(roomy, gpu=linked(0.4))
    assert outcome_of(ARMS["swap"], slow, 1).per_s < base < outcome_of(ARMS["swap"], fast, 1).per_s
    # Who goes by cost swaps on one and recomputes on the other.
    assert outcome_of(ARMS["cost"], slow, 1).swapped == 0
    assert outcome_of(ARMS["cost"], slow, 1).per_s == pytest.approx(base)
    assert outcome_of(ARMS["cost"], fast, 1).per_s == pytest.approx(outcome_of(ARMS["swap"], fast, 1).per_s)


def test_fairness_shortens_the_wait_where_lengths_differ_much() -> None:
    fair, fcfs = (outcome_of(ARMS[name], LONG, 1) for name in ("adaptive", "vllm"))
    assert fair.weighted < 0.8 * fcfs.weighted and fair.turnaround_s < fcfs.turnaround_s


# -- figures -----------------------------------------------------------------------------------------------------------


def bench(*seeds: int) -> Bench:
    return Bench(Workers(1), seeds, (("OPT-13B", "chatbot"),), 20)


def test_ratios_are_of_the_same_seeds_requests() -> None:
    found = bench(1, 2)
    setting = found.setting(found.groups[0])
    found.run([ARMS["vllm"], ARMS["swap"]], [setting])
    own = [
        run_once(ARMS["swap"], setting, seed).per_s / run_once(ARMS["vllm"], setting, seed).per_s
        for seed in (1, 2)
    ]
    figure = throughput_figure(found, "", ARMS["swap"], ARMS["vllm"], setting, 3.0)
    assert list(figure.values) == own and figure.falls_short
    with pytest.raises(ValueError):
        ratios(found.of(ARMS["swap"], setting), [], lambda outcome: outcome.per_s)


def test_what_an_arm_has_nothing_to_do_with_is_run_once() -> None:
    found = bench(1)
    setting = found.setting(found.groups[0])
    settings = [setting, replace(setting, host_blocks=8), replace(setting, gpu=linked(1.0))]
    found.run([ARMS["vllm"], ARMS["swap"]], settings)
    assert len(found.outcomes) == 1 + 3
    assert found.of(ARMS["vllm"], settings[2]) == found.of(ARMS["vllm"], setting)


def test_over_time_they_come_faster_than_they_are_served() -> None:
    found = bench(1)
    (setting,) = over_time_settings(found).values()
    served = run_once(ARMS["vllm"], replace(setting, per_s=None), 1).per_s
    assert setting.per_s == pytest.approx(1.3 * served, abs=0.01)


def test_numbers_of_preemptions_are_shown_but_never_fall_short() -> None:
    assert not PerRequest("", (0.1,), 1.0, True, "").falls_short
    assert "paper 1.00 a request" in PerRequest("", (0.1,), 1.0, True, "").row()[2]


def test_where_swapping_starts_to_pay() -> None:
    sweep = {"1.0": {"swap": 1.1}, "2.0": {"swap": 0.9}, "10.0": {"swap": 1.01}, "20.0": {"swap": 1.2}}
    assert pays_from(sweep) == 10.0
    assert pays_from({"1.0": {"swap": 0.9}}) is None


def test_short_figures_are_printed_first_and_json_last(capsys: pytest.CaptureFixture[str]) -> None:
    show(("main", "turnaround"), bench(1))
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    keys = {"throughput_vs_recompute", "throughput_vs_swap", "weighted_turnaround_change"}
    assert keys <= set(result) and keys <= set(result["over_time"])
    assert {"main", "turnaround"} == set(result["parts"])
    for part in result["parts"].values():
        assert all(len(figure["seeds"]) == 1 and figure["made_by"] for figure in part["figures"])
    start = next(at for at, line in enumerate(lines) if "-- turnaround" in line)
    short = ["FALLS SHORT" in line for line in lines[start + 1 : -1]]
    assert any(short) and short == sorted(short, reverse=True)


def test_free_swaps_lose_to_no_way_back() -> None:
    found = bench(1)
    setting = found.setting(found.groups[0])
    found.run([*ARMS.values(), *FREE], [setting])
    best = max(found.of(arm, setting)[0].per_s for arm in FREE)
    assert best >= max(found.of(ARMS[name], setting)[0].per_s for name in ("vllm", "swap", "cost"))
    assert found.of(FREE[0], setting)[0].stalled_share < 1e-4


def test_limits_are_in_the_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in (("LINKS_GB_PER_S", (0.8, 50.0)), ("HOST_SIZES", (0, 64)), ("PROMPTS", (17.02,))):
        monkeypatch.setattr(adaptivellm, name, values)
    show(("limits",), bench(1))
    limits = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["limits"]
    assert set(limits["link_gb_per_s"]) == {"0.8", "50.0"}
    slow, fast = limits["link_gb_per_s"]["0.8"], limits["link_gb_per_s"]["50.0"]
    assert slow["predicted_swap_s"] > slow["predicted_recompute_s"] > fast["predicted_swap_s"]
    assert limits["host_blocks"]["0"]["swap"] == 1.0
