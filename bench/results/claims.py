"""What is claimed, and where the figures stand: spec's id, the paper's figure, ours in virtual time and ours live.

One table, data only. A `Figure` names a kept run and a path into its JSON, keys with dots between them. `run` alone or `run-PART`: a bench's parts
may be kept one by one. A key that is not there is "not measured". Chameleon's and AdaptiveLLM's stand in `scheduling_claims`, what no
paper has in `own_claims`.
"""

from __future__ import annotations

from functools import partial

from bench.results.claim import CHANGE, HIGHER, LOWER, MS, RATIO, SHARE, YES, Claim, Figure, S
from bench.results.own_claims import OVERTURE, OVERTURE_CLAIMS
from bench.results.scheduling_claims import ADAPTIVELLM, ADAPTIVELLM_CLAIMS, CHAMELEON, CHAMELEON_CLAIMS

PAPERS = {
    "SYMPHONY": "Improving Memory Management for LLM Inference Workloads",
    "CaraServe": "CPU-Assisted and Rank-Aware LoRA Serving for Generative LLM Inference",
    "Chameleon": "Adaptive Caching and Scheduling for Many-Adapter LLM Inference Environments",
    "AdaptiveLLM": "Efficient LLM inference based on swapping and re-computation",
}
MECHANISMS = {
    "A1": "advisory requests",
    "A2": "a scheduler with a door for them",
    "A3": "a node manager that fetches KV from other nodes",
    "A4": "three tiers of KV, the disk's always whole",
    "A5": "reads and writes layer by layer",
    "A6": "first layers kept longest",
    "A7": "promoted KV gives way at once",
    "A8": "urgent sessions first",
    "B1": "CPU-assisted prefill",
    "B2": "hand-over to CPU workers",
    "B3": "as many cores as a prompt needs",
    "B4": "performance models of ranks",
    "B5": "rank-aware routing",
    "B6": "registry of adapters",
    "C1": "adapters in idle device memory",
    "C2": "cost-aware eviction",
    "C3": "prefetch of adapters",
    "C4": "weighted request size",
    "C8": "two-phase admission",
    "C9": "bypass",
    "D1": "prediction of step times",
    "D2": "prediction of swap times",
    "D3": "swap or recompute by cost",
    "D4": "fair start",
    "E1": "draft prefill",
    "E2": "part of a prefix loaded, part computed",
    "E3": "one budget for KV and adapters",
    "E4": "advisories carry adapters",
    "E5": "learned advisories",
    "E6": "honest accounting",
    "E7": "KV that survives a restart",
    "E8": "KV kept apart by tenant and adapter",
    "E9": "adapters loaded beside the steps",
    "E10": "KV tiers on CPU engines",
    "E11": "history computed when the adapter is switched",
    "E12": "token continuity",
}
SYMPHONY, CARASERVE = "SYMPHONY", "CaraServe"
GROUPS = (SYMPHONY, CARASERVE, CHAMELEON, ADAPTIVELLM, OVERTURE)


_symphony_claim = partial(Claim, SYMPHONY)
_caraserve_claim = partial(Claim, CARASERVE)
_symphony = partial(Figure, "sim-symphony")
_assist = partial(Figure, "emulated-caraserve")
_routing = partial(Figure, "sim-caraserve")
_urgent = partial(Figure, "emulated-urgent")
_mechanisms = partial(Figure, "live-mechanisms")
_advisory = partial(Figure, "live-advisory")
_adapters = partial(Figure, "live-adapters")
_restore = partial(Figure, "live-restore")

SYMPHONY_CLAIMS = (
    _symphony_claim(
        "A2–A4",
        "users at equal time per token ÷ recomputing (vLLM)",
        RATIO,
        (4.0, 8.0),
        "Fig. 12, 13",
        _symphony("users_ratio.recompute"),
        _restore("sessions_held_ratio"),
        aim=4.0,
        live_what="sessions whose follow-ups start within twice the device's TTFT ÷ stock vLLM's, one node",
    ),
    _symphony_claim(
        "A2–A4",
        "users at equal time per token ÷ sticky routing (InferCept)",
        RATIO,
        4.2,
        "§4.2",
        _symphony("users_ratio.sticky"),
        bound=_symphony("bound_users_ratio.sticky"),
        note="with 131 kB of KV a token InferCept's host memory never fills",
    ),
    _symphony_claim(
        "A2–A4",
        "users at equal time per token ÷ sticky routing, with KV as the paper counts it, 1.1 MB a token",
        RATIO,
        4.2,
        "§4.2",
        _symphony("parts.paper.users_ratio.sticky"),
        bound=_symphony("parts.paper.bound_users_ratio.sticky"),
        note="a disk of 3 GB/s takes five times as long for it as computing; the paper's 4.2 is of requests served with 1,024 users, ours 1.36×",
    ),
    _symphony_claim(
        "A2–A4",
        "what the paper's text says of its baselines is met in its own set-up",
        YES,
        sim=_symphony("baseline_matches_paper"),
        aim=True,
        note="six of seven are; not the difference of 300 requests between InferCept's nodes, Fig. 1, where ours is 34",
    ),
    _symphony_claim(
        "A2",
        "load of the busiest node ÷ the median one's, 256 users",
        RATIO,
        1.0,
        "Fig. 14, about",
        _symphony("imbalance_max_over_median.ours"),
        aim=1.2,
        bound=_symphony("imbalance_max_over_median.clairvoyant"),
        note="aim chosen: the paper gives no number; a node has two requests, so it is mostly chance",
        better=LOWER,
    ),
    _symphony_claim(
        "A2",
        "load of the busiest node ÷ the median one's, 1,024 users",
        RATIO,
        sim=_symphony("parts.chat8b.imbalance.1024.ours"),
        aim=1.2,
        better=LOWER,
    ),
    _symphony_claim(
        "A2",
        "load of the busiest node ÷ the median one's, to be shown of sticky routing",
        RATIO,
        3.1,
        "Fig. 14",
        _symphony("imbalance_max_over_median.sticky"),
        note="256 users; with 64 of them 3.3×, with 1,024 1.5×: the fewer requests a node has, the more is chance",
    ),
    _symphony_claim(
        "A1",
        "one advisory in ten missing",
        CHANGE,
        0.06,
        "Fig. 17",
        _symphony("missing_10pct_penalty"),
        _advisory("missing_10pct_penalty"),
        live_what="change of mean TTFT, one node",
        note="the paper's own 21.3 → 24.4 ms a token are 15%; its text says about 6%",
    ),
    _symphony_claim(
        "A1",
        "time of agents' workflow: vLLM's ÷ ours",
        RATIO,
        2.8,
        "Fig. 15",
        _symphony("agents_speedup"),
        _advisory("agent_workflow_speedup"),
        live_what="one node",
        bound=_symphony("parts.agents.config.128.bound"),
        note="128 workflows at once, whose number the paper does not say; most of a workflow's time is decoding",
    ),
    _symphony_claim(
        "A1",
        "median TTFT of follow-ups ÷ with everything on the device",
        RATIO,
        live=_advisory("followup_ttft_vs_oracle_p50"),
        aim=1.1,
        better=LOWER,
    ),
    _symphony_claim(
        "A1",
        "p99 TTFT of follow-ups ÷ with everything on the device",
        RATIO,
        live=_advisory("followup_ttft_vs_oracle_p99"),
        aim=1.3,
        better=LOWER,
    ),
    _symphony_claim(
        "A1",
        "nine wrong advisories for each right one: mean TTFT of the others",
        CHANGE,
        live=_advisory("wrong_90pct_penalty_others"),
        aim=0.03,
    ),
    *(
        _symphony_claim(
            "A6",
            f"mean wait for KV ÷ LRU's, host memory for {size} of it, Mooncake's trace: {whose}, the worst of three devices and disks",
            RATIO,
            sim=Figure("sim-hosttier", f"stall_vs_lru.{policy}.{size}"),
            aim=1.0,
            note=note,
            better=LOWER,
        )
        for size in ("3%", "10%")
        for whose, policy, note in (
            ("ours", "ByValue", ""),
            (
                "the paper's rule at its word",
                "strict A6",
                "not what serves: all last layers leave before any first one",
            ),
        )
    ),
    _symphony_claim(
        "A8",
        "P99 of an urgent request's time per token, 16 requests/s, a tenth of them urgent; aim: what is promised them",
        MS,
        sim=_urgent("urgent_tpot_p99_ms"),
        aim=25.0,
    ),
    *(
        _symphony_claim(
            "A7",
            f"3,072 tokens on a device full of wrong guesses, three times: {what}",
            unit,
            live=_mechanisms(f"giving_way.{key}"),
            aim=aim,
            better=better,
        )
        for what, unit, key, aim, better in (
            ("steps ÷ on an empty one", RATIO, "steps_ratio", 1.0, LOWER),
            ("the same tokens and no preemption", YES, "is_same", True, HIGHER),
            ("TTFT against that", CHANGE, "ttft_change", 0.03, LOWER),
        )
    ),
    *(
        _symphony_claim(
            "A8",
            f"{what} of the others by it",
            CHANGE,
            sim=_urgent(key),
            aim=0.1,
            note=note,
        )
        for what, key, note in (
            ("mean latency", "others_e2e_change", "aim chosen: as of the class that fares worst by an order"),
            (
                "P99 TTFT",
                "others_ttft_p99_change",
                "nobody is paused here: prompts are computed in smaller parts for the urgent ones' sake, and wait for it",
            ),
        )
    ),
)

CARASERVE_CLAIMS = (
    _caraserve_claim(
        "B1",
        "mean TTFT with CPU-assist against adapters all resident",
        CHANGE,
        0.22,
        "Fig. 10",
        _assist("ttft_overhead.cpu_assist"),
        _adapters("cold_ttft_vs_resident_p50", less=1),
        live_what="median TTFT of a cold start from host memory against a resident one",
    ),
    _caraserve_claim(
        "B1",
        "mean TTFT with loading on demand against adapters all resident: to be shown",
        CHANGE,
        4.12,
        "Fig. 10",
        _assist("ttft_overhead.on_demand"),
        note="with 512 adapters, below, the same model has twice the paper's",
        better=HIGHER,
    ),
    _caraserve_claim(
        "B1",
        "mean TTFT with CPU-assist, 512 adapters of skewed popularity",
        CHANGE,
        0.07,
        "Fig. 14",
        _assist("production_ttft_overhead.cpu_assist"),
    ),
    _caraserve_claim(
        "B1",
        "mean TTFT with loading on demand, 512 adapters: to be shown",
        CHANGE,
        0.39,
        "Fig. 14",
        _assist("production_ttft_overhead.on_demand"),
        better=HIGHER,
    ),
    *(
        _caraserve_claim(
            "B5",
            f"requests within SLO, 60 nodes, 40,000 adapters, {kernel.upper()}",
            SHARE,
            0.99,
            "Fig. 19",
            _routing(f"slo_attainment.{kernel}"),
        )
        for kernel in ("mbgmv", "bgmv")
    ),
    *(
        _caraserve_claim(
            "B5",
            f"time per token against {name}, {kernel.upper()}",
            CHANGE,
            paper,
            "Fig. 19",
            _routing(f"tpt_change.{kernel}.{key}"),
            bound=_routing(f"parts.router.bound_tpt_change.{kernel}.{key}"),
            note="the bound: adapters at no cost",
        )
        for kernel, key, name, paper in (
            ("mbgmv", "first_fit", "first fit", -0.364),
            ("mbgmv", "random", "random", -0.188),
            ("mbgmv", "most_idle", "most idle", -0.161),
            ("bgmv", "first_fit", "first fit", -0.36),
        )
    ),
    _caraserve_claim(
        "B1",
        "p99 TTFT of a cold start from host memory against a resident one",
        CHANGE,
        live=_adapters("cold_ttft_vs_resident_p99", less=1),
        aim=0.2,
    ),
    _caraserve_claim(
        "B2",
        "delta of one row through a worker process and back",
        MS,
        1.0,
        "§4.2, Fig. 17, less than",
        live=_mechanisms("handover.empty_ms"),
    ),
    _caraserve_claim(
        "B2",
        "part of a delta's time, 256 rows of rank 64, for which the engine's thread waits",
        SHARE,
        live=_mechanisms("handover.blocked_share"),
        aim=0.0,
        note="aim: the paper's operator blocks nothing; here the next layer needs the delta",
        better=LOWER,
    ),
    _caraserve_claim(
        "B3",
        "twice the rows that a core takes in a millisecond, on two workers ÷ on one",
        RATIO,
        live=_mechanisms("cores.shared_vs_one"),
        aim=0.6,
        note="aim chosen: half, and a fifth of that for handing out",
        better=LOWER,
    ),
    _caraserve_claim(
        "B3",
        "the same rows on torch's own threads ÷ on workers",
        RATIO,
        1.7,
        "Fig. 18, eight cores",
        live=_mechanisms("cores.torch_vs_shared"),
        live_what="two cores",
    ),
    _caraserve_claim(
        "B4",
        "R² of what adapters add to a decode step over the sum of their ranks (MBGMV), as our kernel reads them",
        SHARE,
        0.96,
        "Fig. 9",
        live=_mechanisms("law.sum_rank_r2"),
        note="the difference of two steps' medians, in which the noise of a shared machine shows; the paper's is of GPUs",
    ),
    _caraserve_claim(
        "B4",
        "the same over their number times the largest rank (BGMV); aim: less, for ours pads no rank",
        SHARE,
        live=_mechanisms("law.max_rank_r2"),
        aim=_mechanisms("law.sum_rank_r2"),
        better=LOWER,
    ),
    _caraserve_claim(
        "B6",
        "registry of 40,000 adapters, opened and read",
        S,
        live=_mechanisms("registry.open_s"),
        aim=1.0,
        note="aim chosen: a tenth of what an engine takes to start",
    ),
    _caraserve_claim(
        "B6",
        "where an adapter of 40,000 is and which of 60 nodes serves a request for it",
        MS,
        live=_mechanisms("registry.decision_ms"),
        aim=0.3,
        note="aim chosen: a tenth of the time between two of the paper's 340 requests/s",
    ),
)

CLAIMS = (*SYMPHONY_CLAIMS, *CARASERVE_CLAIMS, *CHAMELEON_CLAIMS, *ADAPTIVELLM_CLAIMS, *OVERTURE_CLAIMS)
