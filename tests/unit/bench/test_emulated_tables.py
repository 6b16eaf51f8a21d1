"""The benches in virtual time: each finds the figures that are claimed of it, and short plays come to what the bench says of its arms."""

from __future__ import annotations

import importlib
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.emulated import (
    adaptivellm,
    caraserve,
    chameleon,
    host_tier,
    order,
    routing,
    scarce,
    symphony,
    urgent,
)
from bench.emulated.core import traces
from bench.emulated.core.adapters import AdapterMemory
from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.assist import ColdStart
from bench.emulated.core.calibration import A10_ON_DEMAND
from bench.emulated.core.hardware import AssistingHost
from bench.emulated.core.node import Engine, Job
from bench.emulated.core.people import Chats, LogNormal
from bench.emulated.core.plays import play_on_node
from bench.emulated.core.steps import Chunk, StepCost
from bench.emulated.followers import Tally
from bench.emulated.table import Bench
from bench.results.claims import CLAIMS
from bench.results.limits import SWEEPS
from bench.results.lookup import find
from bench.results.runs import Run
from engine_bridge.policy.adapters.adapter_cache import POLICIES
from engine_bridge.policy.scheduling.bounded import Bounded, BoundedSettings

NOWHERE = Path("there is none")


# -- figures -----------------------------------------------------------------------------------------------------------


def numbers(*names: str) -> Callable[[Any], dict[str, float]]:
    """A formula that gives each name a number between 1 and 2 that is the point's own."""
    return lambda point: {name: random.Random(repr((point, name))).uniform(1, 2) for name in names}


def at_slo(point: chameleon.Point) -> dict[str, float]:
    return {"ttft_p50_s": 1.0, "ttft_p99_s": point.per_s / 8 * chameleon.slo_s(point.setting)}


ERRORS = [f"{what}_{name}" for what in ("step", "swap") for name in adaptivellm.ERRORS]
# What a point comes to by a formula, instead of a play.
OUTCOMES: dict[str, Callable[[Any], Any]] = {
    "adapter_cache": numbers(*POLICIES),
    "adaptivellm": numbers("per_s", "weighted", "turnaround_s", *ERRORS),
    "caraserve": numbers("ttft_s"),
    "chameleon": at_slo,
    "followers": lambda point: Tally(),
    "host_tier": lambda point: [host_tier.Restore(8, 0, (8, 8, 8, 8), 1)],
    "order": numbers("capacity_per_s", "ttft_p50", "ttft_p99", "latency", "class 8"),
    "routing": numbers("tpot_s", "attainment"),
    "scarce": numbers("mean_s", "p50_s", "p99_s", "token_s", "disk_bytes"),
    "symphony": numbers("latency_s", "ttft_s"),
    "urgent": numbers("urgent_tpot_s", "others_ttft_s", "others_e2e_s"),
}


@pytest.mark.parametrize("command", OUTCOMES)
def test_a_table_finds_the_figures_that_are_claimed_of_it_and_the_sweeps_that_are_shown(command: str) -> None:
    table = importlib.import_module(f"bench.emulated.{command}").TABLE
    bench = Bench(OUTCOMES[command], (1, 2), table.sizes[0])
    for part in table.parts.values():
        part(bench)
    runs = {table.name: Run(table.name, "", "", "", {}, None, bench.found)}
    claimed = [place for claim in CLAIMS for place in (claim.sim, claim.bound)]
    own = [place for place in claimed if place.startswith(f"{table.name}:")]
    assert own and all(find(runs, place) is not None for place in own)
    for sweep in SWEEPS:
        if sweep.run.startswith(table.name):
            assert all(sweep.ratio(figures) > 0 for figures in bench.found["limits"][sweep.key].values())


def test_loads_within_slo_and_changes_are_over_those_of_the_same_seeds_base() -> None:
    """At the same load what serves has half the tail of base at seed 1 and a third at seed 2; one that knows the future a quarter less than base."""

    def outcome_of(point: chameleon.Point) -> dict[str, float]:
        p99_s = slo_s * point.per_s / 8
        if point.arm == chameleon.DEFAULT:
            p99_s /= 1 + point.seed
        return {"ttft_p50_s": 0.1, "ttft_p99_s": p99_s * (1 - 0.25 * point.arm.loads_are_free)}

    slo_s = chameleon.slo_s(chameleon.AMPLE)
    bench = Bench(outcome_of, (1, 2), 10.0)
    chameleon.main_part(bench)
    found, bound = bench.found, bench.found["parts"]["main"]["bound"]
    assert found["ttft_p99_change"] == {"6": -0.5833, "8": -0.5833, "9": -0.5833}
    assert bound["ttft_p99_change"]["6"] == -0.25 and bound["ttft_p50_change"]["6"] == 0.0
    assert found["slo_load_ratio"] == pytest.approx(2.5, rel=0.02) and found["sched_only_ratio"] == 1
    assert bound["slo_load_ratio"] == pytest.approx(4 / 3, rel=0.02)
    assert found["knees_per_s"]["base"] == pytest.approx([8, 8], rel=0.01)
    assert found["knees_per_s"]["default"] == pytest.approx([16, 24], rel=0.01), (
        "beyond the loads that are asked for"
    )
    assert set(found["parts"]["main"]["curve"]["base"]["6"]) == {"ttft_p99_s", "ttft_p50_s"}


def test_orders_are_compared_by_means_over_seeds_and_the_worst_class_that_all_seeds_have() -> None:
    stock = {"ttft_p50": 1.0, "ttft_p99": 2.0, "class short": 1.0, "class long": 4.0}
    half = stock | {"ttft_p99": 1.0, "class short": 0.5, "class long": 5.0}
    double = stock | {"ttft_p99": 8.0, "class short": 0.5, "class long": 5.0, "class rank 8": 99.0}
    found = order.changes([(half, stock), (double, stock | {"class rank 8": 1.0})])
    assert found["ttft_p99"] == pytest.approx(2**0.5 - 1, abs=1e-4), "half and four times"
    assert (found["ttft_p99_least"], found["ttft_p99_most"]) == (-0.5, 3.0)
    assert (found["worst_class_p99"], found["ttft_p50"]) == (0.25, 0.0)
    told = order.summary([found, found | {"ttft_p99": 0.2, "ttft_p50": -0.4}, found | {"ttft_p50": -0.2}])
    assert told["default_p99_vs_vllm_worst_mean"] == pytest.approx(1 + found["ttft_p99"])
    assert (told["worst_play"], told["p50_change_median"], told["worst_class_p99"]) == (4.0, -0.2, 1.25)


# -- order -------------------------------------------------------------------------------------------------------------


def test_without_overtaking_every_request_has_the_times_of_vllms_own_queue() -> None:
    none = BoundedSettings(overtaking_share=0.0)
    orders = ("vllm", lambda num_tokens: Bounded(num_tokens, none))
    points = (order.Point(each, "heavy tail", False, 30, seed=1) for each in orders)
    stock, own = ([(job.first_token_s, job.ended_s) for job in order.play(point)] for point in points)
    assert own == stock


def test_prompts_and_answers_of_made_traces_go_apart() -> None:
    rows = traces.trace_rows("equal prompts")[:200]
    prompts, answers = [row[1] for row in rows], [row[2] for row in rows]
    assert max(prompts) < 1.2 * min(prompts) and max(answers) > 15 * min(answers)
    gaps = [row[0] for row in traces.trace_rows("bursts")[:1200]]
    assert sum(gap < 1.0 for gap in gaps) > 0.9 * len(gaps) and max(gaps) > 10.0


# -- people who type ---------------------------------------------------------------------------------------------------


def test_a_session_that_was_announced_is_on_the_device_when_its_request_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six people with long sessions of short turns, so that little is computed."""
    chats = Chats(turns=LogNormal(20, 0.5), answers=LogNormal(60, 0.5))
    monkeypatch.setattr(symphony.Setting, "chats", chats)
    tiers = symphony.talk(symphony.Point("advised", 6, 60.0, seed=1)).tiers
    assert tiers is not None and tiers.advised["hit"] > 5
    assert tiers.advised["late"] <= tiers.advised["hit"] / 10


def test_sessions_are_as_published() -> None:
    rng, chats = random.Random(1), Chats()
    sessions = [chats.session(rng) for _ in range(4000)]
    exchanges = [exchange for session in sessions for exchange in session]
    assert statistics.fmean(len(session) > 1 for session in sessions) == pytest.approx(0.734, abs=0.02)
    assert statistics.fmean(map(len, sessions)) == pytest.approx(5.75, rel=0.1)
    assert statistics.fmean(exchange.lead_s for exchange in exchanges) == pytest.approx(11.3, rel=0.03)
    num_tokens = sum(each.num_prompt_tokens + each.num_answer_tokens for each in exchanges)
    assert num_tokens / 4000 == pytest.approx(2200, rel=0.1)
    met = chats.under_way(rng, 500)
    assert all(place < len(session) for session, place in met)
    assert statistics.fmean(len(session) for session, _ in met) > 3 * 5.75


def test_where_memory_is_scarce_who_is_announced_finds_kv_that_others_wait_for() -> None:
    setting = scarce.Setting(device=replace(scarce.TWO_CORES, step_s=0.05))
    none, advised, timed = (scarce.serve(scarce.Point(arm, 24, setting, seed=1)) for arm in scarce.ARMS)
    assert min(none["num_counted"], advised["num_counted"]) >= 18
    assert timed["mean_s"] <= advised["mean_s"] < 0.7 * none["mean_s"]


def test_what_nobody_asks_for_is_announced_no_less_and_counted_nowhere() -> None:
    setting = scarce.Setting(device=replace(scarce.TWO_CORES, step_s=0.05), given_up_share=0.6)
    advised = scarce.serve(scarce.Point("advised", 12, setting, seed=1))
    assert advised["num_counted"] >= 9 and advised["disk_bytes"] > 0


# -- urgent ------------------------------------------------------------------------------------------------------------


def test_where_no_request_is_urgent_everything_happens_when_it_did() -> None:
    points = (urgent.Point(tpot_s, 12, 0.0, per_s=20.0, seed=1) for tpot_s in (0.0, urgent.TPOT_S))
    never, paused = map(urgent.play, points)
    assert paused.times == never.times and paused.counts == never.counts


# -- cold adapters -----------------------------------------------------------------------------------------------------

SLOW_HOST = AssistingHost("slow", 10e9, 4, 1.0, 1000, 0.001)
QUICK_HOST = AssistingHost("quick", 1e15, 100, 1.0, 1, 0.0)
COPY_S = caraserve.MODEL.lora_bytes(64) / A10_ON_DEMAND.achieved_link_bytes_per_s


def cost_with(host: AssistingHost | None) -> StepCost:
    return StepCost(A10_ON_DEMAND, caraserve.MODEL, assistant=host)


def played(
    cold_start: ColdStart, *asked: tuple[float, int, int | None], host: AssistingHost | None = None
) -> list[Job]:
    """Requests that come so late each, with so long a prompt, for that adapter of rank 64; each answers five tokens."""
    requests = [Arrival(f"{n}", at_s, num, 5, adapter) for n, (at_s, num, adapter) in enumerate(asked)]
    engine, memory = Engine(800, has_prefix_cache=False), AdapterMemory(policy=None, cold_start=cold_start)
    return play_on_node("fcfs", requests, cost_with(host), engine, ranks=(64, 64), memory=memory).jobs


def test_a_step_that_waits_for_a_copy_holds_up_everybody_and_a_request_that_waits_nobody() -> None:
    base, cold = played("step waits", (0.0, 20, None), (0.01, 20, 0))
    alone, gated = played("request waits", (0.0, 20, None), (0.01, 20, 0))
    assert base.ended_s == pytest.approx(alone.ended_s + COPY_S, abs=0.002)
    assert cold.found_adapter == gated.found_adapter == "host"
    assert alone.tpot_s < 1.1 * cost_with(None).step_s((), 1, 20)
    assert gated.first_token_s > cost_with(None).prefill_s(20) + COPY_S, "its copy began after the first step"


def test_the_host_keeps_its_part_of_a_step_to_the_end_and_no_token_waits_for_the_copy() -> None:
    (slow,) = played("host helps", (0.0, 100, 0), host=SLOW_HOST)
    by_host_s = cost_with(SLOW_HOST).step_s((Chunk(100, 0, 64, True, is_assisted=True),))
    assert slow.first_token_s == pytest.approx(by_host_s) and by_host_s > 3 * COPY_S
    (quick,) = played("host helps", (0.0, 5, 0), host=QUICK_HOST)
    gpu_s = cost_with(None).step_s((Chunk(5, 0, 0, True),))
    assert quick.first_token_s == pytest.approx(gpu_s) and gpu_s < COPY_S
    assert quick.ended_s < gpu_s + 4 * cost_with(None).step_s((), 1, 10, 64) + 1e-6


# -- tight memory ------------------------------------------------------------------------------------------------------

FEW = adaptivellm.Setting(num_requests=60)


def test_lengths_have_the_published_mean_and_fit_host_memory() -> None:
    prompts = [
        arrival.num_prompt_tokens
        for arrival in replace(FEW, mean_prompt_tokens=340.48, num_requests=4000).arrivals(1)
    ]
    assert statistics.fmean(prompts) == pytest.approx(0.9 * 340.48, rel=0.05), "a few are cut"
    assert max(prompts) == 928 and FEW.arrivals(3) != FEW.arrivals(4)


# -- arms against each other -------------------------------------------------------------------------------------------


def of_cold(arm: str) -> caraserve.Point:
    return caraserve.Point(arm, 9.0, 0, 3.0, seed=1)


def of_cache(arm: chameleon.Arm) -> chameleon.Point:
    return chameleon.Point(arm, replace(chameleon.AMPLE, trace=NOWHERE, length_share=0.2), 8.0, 8.0, 1)


def of_memory(arm: str, gb_per_s: float = 50.0, **changed: Any) -> adaptivellm.Point:
    setting = replace(FEW, gpu=adaptivellm.linked(gb_per_s), **({"host_blocks": 256} | changed))
    return adaptivellm.Point(adaptivellm.ARMS[arm], setting, seed=1)


def of_router(policy: str, **changed: Any) -> routing.Point:
    site = routing.Site(num_nodes=4, num_adapters=200, per_s=24.0, span_s=8.0, warm_up_s=2.0, **changed)
    return routing.Point(policy, site, seed=1)


SLOW_LINK, LONG = {"gb_per_s": 0.4}, {"mean_prompt_tokens": 340.48}
LESS_THAN: list[tuple[str, Any, Any, float]] = [
    ("ttft_s", of_cold("cached"), of_cold("on_demand"), 1 / 1.5),
    ("ttft_s", of_cold("cpu_assist"), of_cold("cached"), 1.1),
    ("ttft_p50_s", of_cache(chameleon.CACHE), of_cache(chameleon.BASE), 1),
    ("ttft_p50_s", of_cache(*chameleon.KNOWING["cache"]), of_cache(chameleon.BASE), 1),
    ("per_s", of_memory("swap", **SLOW_LINK), of_memory("vllm"), 1),
    ("per_s", of_memory("vllm"), of_memory("swap"), 1),
    ("swapped", of_memory("cost", **SLOW_LINK), of_memory("cost"), 1),
    ("weighted", of_memory("adaptive", **LONG), of_memory("vllm", **LONG), 0.8),
    ("turnaround_s", of_memory("adaptive", **LONG), of_memory("vllm", **LONG), 1),
    ("tpot_s", of_router(routing.FREE_ADAPTERS), of_router("overture"), 1),
    ("tpot_s", of_router("overture"), of_router("random"), 1),
    ("tpot_s", of_router("rank_aware"), of_router("random"), 1),
    ("tpot_s", of_router("random"), of_router("first_fit"), 1),
    ("attainment", of_router("first_fit"), of_router("rank_aware"), 1),
]


@cache
def outcome_of(point: Any) -> Any:
    return importlib.import_module(type(point).__module__).serve(point)


@pytest.mark.parametrize(("measure", "less", "more", "times"), LESS_THAN)
def test_arms_differ_as_they_say(measure: str, less: Any, more: Any, times: float) -> None:
    assert outcome_of(less)[measure] < times * outcome_of(more)[measure]


def test_the_same_play_comes_to_the_same_and_another_seed_to_something_else() -> None:
    for point in (of_memory("cost"), of_router("random")):
        assert outcome_of.__wrapped__(point) == outcome_of(point) != outcome_of(replace(point, seed=2))
