"""AdaptiveLLM's tables: what they report of runs, on a hundred requests or so."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

from bench.sim import adaptivellm
from bench.sim.adaptivellm import (
    ARMS,
    MAX_ANSWER_TOKENS,
    Bench,
    Setting,
    Thousands,
    node_of,
    over_time_settings,
    pays_from,
    ratios,
    run,
    throughput_figure,
)
from bench.sim.core.calibration import A800, A800_CONTEXT_TOKENS, A800_TOKENS_PER_S
from bench.sim.core.clock import Clock
from bench.sim.core.hardware import Gpu
from bench.sim.core.models import MISTRAL_7B, OPT_13B, OPT_30B
from bench.sim.core.step_fits import fit, samples
from bench.sim.core.steps import Chunk, StepCost
from bench.sim.core.tables import Workers
from engine_bridge.policy.baselines import Fair, Fcfs
from engine_bridge.policy.mlq import Mlq
from engine_bridge.policy.preemption import POLICIES
from engine_bridge.policy.ways_back import FullCost, SwapOrRecompute

FEW = Setting(num_requests=120)
LONG = replace(FEW, mean_prompt_tokens=340.48)


def linked(gb_per_s: float) -> Gpu:
    return replace(A800, link_share=gb_per_s * 1e9 / A800.link_bytes_per_s)


# -- what runs ---------------------------------------------------------------------------------------------------------


def test_arms_are_the_live_engines_policies() -> None:
    nodes = {name: node_of(arm, FEW, Clock(), 1) for name, arm in ARMS.items()}
    assert {name: type(nodes[name].policy) for name in ARMS} == {
        "vllm": Fcfs,
        "swap": Fcfs,
        "swap only": Fcfs,
        "cost": Fcfs,
        "adaptive": Fair,
        "ours": Mlq,
    }
    assert nodes["vllm"].host_kv is None
    assert nodes["adaptive"]._preemption is POLICIES["cost_aware"]
    assert nodes["swap"]._preemption is POLICIES["vllm_swap"]
    memory = nodes["adaptive"].host_kv._memory  # type: ignore[union-attr]
    assert type(memory.costs) is SwapOrRecompute and type(memory.restore) is FullCost
    # They copy out, block by block.
    assert not any(node.shape.writes_through for node in nodes.values())
    assert nodes["adaptive"].shape.swaps_block


def test_memory_is_the_papers() -> None:
    node = node_of(ARMS["adaptive"], FEW, Clock(), 1)
    assert (node.num_blocks, node.host_kv.num_blocks) == (128, 64)  # type: ignore[union-attr]
    assert node_of(ARMS["swap only"], FEW, Clock(), 1).num_blocks == 64


def test_the_device_decodes_as_published() -> None:
    cost = StepCost(A800, MISTRAL_7B)
    for num, per_s in A800_TOKENS_PER_S.items():
        assert num / cost.step_s((), num, num * A800_CONTEXT_TOKENS) == pytest.approx(per_s)
    # Counted together, steps take as long as one by one.
    together = cost.decoding(10, 2000, 0).total_s(3)
    assert together == pytest.approx(sum(cost.step_s((), 10, 2000 + 10 * n) for n in range(3)))
    assert A800.achieved_link_bytes_per_s == pytest.approx(25.13e9)


def test_opt_has_the_parameters_of_its_name() -> None:
    for model, num in ((OPT_13B, 13e9), (OPT_30B, 30e9)):
        assert model.layer_weights + model.head_weights == pytest.approx(num, rel=0.03)


# -- requests ----------------------------------------------------------------------------------------------------------


def test_the_same_requests_come_at_once_and_over_time() -> None:
    at_once, over_time = FEW.arrivals(3), replace(FEW, per_s=2.0).arrivals(3)
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


def test_all_arms_serve_all_requests_in_all_readings() -> None:
    settings = (FEW, LONG, replace(FEW, per_s=15.0, is_answer_drawn=True), replace(FEW, max_running=8))
    for name, arm in ARMS.items():
        for setting in settings:
            outcome = run(arm, setting, 1)
            assert outcome.per_s > 0 and outcome.weighted >= 1, name
            assert outcome.num_recomputed + outcome.num_swapped == outcome.counts.get("preempted", 0), name


def test_a_run_is_the_same_again_and_another_seed_is_another() -> None:
    assert run(ARMS["adaptive"], FEW, 1) == run(ARMS["adaptive"], FEW, 1)
    assert run(ARMS["adaptive"], FEW, 1) != run(ARMS["adaptive"], FEW, 2)


def test_ways_are_what_arms_say() -> None:
    outcomes = {name: run(arm, FEW, 1) for name, arm in ARMS.items()}
    assert outcomes["vllm"].num_swapped == 0 < outcomes["vllm"].num_recomputed
    assert outcomes["swap"].num_swapped > outcomes["swap"].num_recomputed
    assert outcomes["adaptive"].num_swapped > 0
    assert outcomes["vllm"].stalled_share == 0 < outcomes["swap"].stalled_share


def test_swapping_pays_on_a_fast_link_and_not_on_a_slow_one() -> None:
    base = run(ARMS["vllm"], FEW, 1).per_s
    fast, slow = replace(FEW, gpu=linked(50.0)), replace(FEW, gpu=linked(0.8))
    assert run(ARMS["swap"], slow, 1).per_s < 0.9 * base < base < run(ARMS["swap"], fast, 1).per_s
    # Who goes by cost swaps on one and recomputes on the other.
    assert run(ARMS["cost"], slow, 1).num_swapped == 0
    assert run(ARMS["cost"], slow, 1).per_s == base
    assert run(ARMS["cost"], fast, 1).per_s == run(ARMS["swap"], fast, 1).per_s


def test_fairness_shortens_the_wait_where_lengths_differ_much() -> None:
    fair, fcfs = (run(ARMS[name], LONG, 1) for name in ("adaptive", "vllm"))
    assert fair.weighted < 0.8 * fcfs.weighted and fair.turnaround_s < fcfs.turnaround_s


# -- predictors --------------------------------------------------------------------------------------------------------


def test_sampled_steps_are_the_formulas_with_noise() -> None:
    cost = StepCost(A800, OPT_13B)
    found = samples(cost, 300, 1)
    assert found == samples(cost, 300, 1) != samples(cost, 300, 2)
    errors = []
    for sample in found:
        chunks = (Chunk(sample.num_prefill_tokens, 0, 0, True),) if sample.num_prefill_tokens else ()
        exact = cost.step_s(chunks, sample.num_decodes, sample.num_context_tokens)
        errors.append(sample.seconds / exact - 1)
    assert 0.005 < statistics.stdev(errors) < 0.02
    kinds = {(sample.num_prefill_tokens > 0, sample.num_decodes > 0) for sample in found}
    assert kinds == {(True, False), (False, True), (True, True)}


def test_the_table_of_the_runs_is_close_to_the_device() -> None:
    cost, table = StepCost(A800, OPT_13B), fit(A800, OPT_13B).table
    for num_tokens in (20, 80, 400, 1000):
        assert table.step_s(num_tokens, 0, 0) == pytest.approx(cost.prefill_s(num_tokens), rel=0.1)


# -- figures -----------------------------------------------------------------------------------------------------------


def bench(*seeds: int) -> Bench:
    return Bench(Workers(1), seeds, (("OPT-13B", "chatbot"),), 60)


def test_ratios_are_of_the_same_seeds_requests() -> None:
    found = bench(1, 2)
    setting = found.setting(found.groups[0])
    found.run([ARMS["vllm"], ARMS["swap"]], [setting])
    own = [run(ARMS["swap"], setting, seed).per_s / run(ARMS["vllm"], setting, seed).per_s for seed in (1, 2)]
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
    served = run(ARMS["vllm"], replace(setting, per_s=None), 1).per_s
    assert setting.per_s == pytest.approx(1.3 * served, abs=0.01)


def test_numbers_of_preemptions_are_shown_but_never_fall_short() -> None:
    assert not Thousands("", (0.1,), 1.0, True, "").falls_short
    assert "paper 1.00 thousand" in Thousands("", (0.1,), 1.0, True, "").row()[2]


def test_where_swapping_starts_to_pay() -> None:
    sweep = {"1.0": {"swap": 1.1}, "2.0": {"swap": 0.9}, "10.0": {"swap": 1.01}, "20.0": {"swap": 1.2}}
    assert pays_from(sweep) == 10.0
    assert pays_from({"1.0": {"swap": 0.9}}) is None


def test_the_command_prints_short_figures_first_and_json_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptivellm, "QUICK_REQUESTS", 50)
    adaptivellm.main(["--quick", "--jobs", "1"])
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    keys = {"throughput_vs_recompute", "throughput_vs_swap", "weighted_turnaround_change"}
    assert keys <= set(result) and keys <= set(result["over_time"])
    assert {"main", "turnaround"} == set(result["parts"])
    for part in result["parts"].values():
        assert all(len(figure["seeds"]) == 2 and figure["made_by"] for figure in part["figures"])
    start = next(at for at, line in enumerate(lines) if "-- turnaround" in line)
    short = ["FALLS SHORT" in line for line in lines[start + 1 : -1]]
    assert any(short) and short == sorted(short, reverse=True)


def test_limits_are_in_the_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptivellm, "NUM_REQUESTS", 40)
    for name, values in (("LINKS_GB_PER_S", (0.8, 50.0)), ("HOST_SIZES", (0, 64)), ("PROMPTS", (17.02,))):
        monkeypatch.setattr(adaptivellm, name, values)
    adaptivellm.main(["--part", "limits", "--seeds", "1", "--jobs", "1"])
    limits = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["limits"]
    assert set(limits["link_gb_per_s"]) == {"0.8", "50.0"}
    slow, fast = limits["link_gb_per_s"]["0.8"], limits["link_gb_per_s"]["50.0"]
    assert slow["predicted_swap_s"] > slow["predicted_recompute_s"] > fast["predicted_swap_s"]
    assert limits["host_blocks"]["0"]["swap"] == 1.0
