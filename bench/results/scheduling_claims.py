"""What is claimed of who starts next, which adapters stay and how preempted requests come back: see `bench.results.claims`."""

from __future__ import annotations

from functools import partial

from bench.results.claim import CHANGE, LOWER, RATIO, SHARE, Claim, Figure

CHAMELEON, ADAPTIVELLM = "Chameleon", "AdaptiveLLM"

_chameleon_claim = partial(Claim, CHAMELEON)
_adaptivellm_claim = partial(Claim, ADAPTIVELLM)
_adaptivellm = partial(Figure, "emulated-adaptivellm")
_chameleon = partial(Figure, "emulated-chameleon")
_scheduling = partial(Figure, "live-scheduling")
_low_load = partial(Figure, "live-scheduling-low")

LINK = (
    "over a link as fast as the paper's Fig. 2 says, loads take a twentieth of the time: no cache saves more; "
    "the paper's margin needs a slower way to load"
)
LITTLE_QUEUES = (
    "live hardly anything queues at this load, and most adapters are laid out beside the step that runs when their request comes; "
    "vLLM itself gains 7% of P50 there with a slot for each adapter, in 2.6 times the memory"
)
# Requests/s, and what the paper calls it.
LOADS = ((6, "low"), (8, "medium"), (9, "high"))
CHAMELEON_CLAIMS = (
    *(
        _chameleon_claim(
            "C1–C9",
            f"P{share} TTFT at {load} load ({per_s} requests/s)",
            CHANGE,
            change,
            figure,
            _chameleon(f"ttft_p{share}_change.{per_s}"),
            (_low_load if load == "low" else _scheduling)(f"loads.{load}.ttft_p{share}_change"),
            bound=_chameleon(f"parts.main.bound.ttft_p{share}_change.{per_s}"),
            note={6: LITTLE_QUEUES, 9: LINK}.get(per_s, ""),
            live_what=f"against vLLM, FCFS, at {per_s}/8.7 of its load within SLO"
            + (", about" if load == "low" else ""),
        )
        for share, figure, changes in (
            (99, "Fig. 10", (-0.147, -0.246, -0.807)),
            (50, "Fig. 12", (-0.139, -0.209, -0.481)),
        )
        for (per_s, load), change in zip(LOADS, changes, strict=True)
    ),
    _chameleon_claim(
        "C1–C9",
        "load within SLO ÷ S-LoRA's",
        RATIO,
        12.9 / 8.7,
        "Fig. 10",
        _chameleon("slo_load_ratio"),
        _scheduling("slo_load_ratio"),
        bound=_chameleon("parts.main.bound.slo_load_ratio"),
    ),
    _chameleon_claim(
        "C1–C3",
        "load within SLO, cache alone",
        RATIO,
        1.2,
        "Fig. 10",
        _chameleon("cache_only_ratio"),
        bound=_chameleon("parts.main.bound.cache_only_ratio"),
    ),
    _chameleon_claim(
        "C4–C9",
        "load within SLO, scheduler alone",
        RATIO,
        1.1,
        "Fig. 10",
        _chameleon("sched_only_ratio"),
        bound=_chameleon("parts.main.bound.sched_only_ratio"),
        note="up to the loads within SLO no request waits for memory, so no order differs from another",
    ),
    *(
        _chameleon_claim(
            "C2",
            f"P99 TTFT at medium load, cache, {name}",
            CHANGE,
            paper,
            "Fig. 14",
            _chameleon(f"eviction.{key}"),
            bound=_chameleon("parts.eviction.bound.at_8"),
            note="of 24 GB: where 48 are, no copy of an adapter has to go",
        )
        for key, name, paper in (
            ("lru", "LRU", -0.18),
            ("equal", "equal weights", -0.22),
            ("paper", "the paper's weights", -0.26),
        )
    ),
    _chameleon_claim(
        "C2",
        "P99 TTFT at medium load, all that serves by default: prompts of adapters that are on the link start on the host",
        CHANGE,
        -0.26,
        "Fig. 14, the paper's weights",
        _chameleon("parts.eviction.at_8.default"),
        bound=_chameleon("parts.eviction.bound.default_at_8"),
        note="of 24 GB, as above",
    ),
    _chameleon_claim(
        "C3",
        "P99 TTFT at medium load, prefetch by histogram, further",
        CHANGE,
        -0.088,
        "Fig. 15",
        _chameleon("parts.forecast.any_time.ttft_p99_change"),
        bound=_chameleon("parts.forecast.bound.any_time.ttft_p99_change"),
        note="the bound never reads one from disk; after a minute of warming up hardly any request has to",
    ),
    _chameleon_claim(
        "C4–C9",
        "mean TTFT of the class of requests that fares worst, high load",
        CHANGE,
        live=_scheduling("worst_class_change"),
        aim=0.1,
    ),
    _chameleon_claim(
        "C8",
        "time for deciding with 10,000 requests queued ÷ time of the step",
        SHARE,
        live=_scheduling("decision_share_10k"),
        aim=0.01,
        better=LOWER,
    ),
)

ADAPTIVELLM_CLAIMS = (
    _adaptivellm_claim(
        "D3",
        "throughput ÷ always recomputing (vLLM), tight memory",
        RATIO,
        (1.09, 1.4),
        "Table 3",
        _adaptivellm("throughput_vs_recompute"),
        _scheduling("tight_memory_throughput_vs_recompute"),
        aim=1.4,
        bound=_adaptivellm("parts.main.bound.throughput_vs_recompute"),
        note="in today's vLLM prompts are computed in chunks beside those that decode: even free swaps save no more",
    ),
    _adaptivellm_claim(
        "D3",
        "throughput ÷ always swapping, tight memory",
        RATIO,
        (1.64, 2.55),
        "Table 3",
        _adaptivellm("throughput_vs_swap"),
        _scheduling("tight_memory_throughput_vs_swap"),
        aim=2.55,
        bound=_adaptivellm("parts.main.bound.throughput_vs_swap"),
        note="the paper's system without recomputing can run no more than host memory holds; that is throughput_vs_swap_only",
    ),
    _adaptivellm_claim(
        "D4",
        "weighted turnaround against vLLM, tight memory",
        CHANGE,
        (-0.2, -0.4),
        "Fig. 8",
        _adaptivellm("weighted_turnaround_change"),
        _scheduling("fair_weighted_turnaround_change"),
        aim=-0.4,
        live_what="the paper's order, which is not the default",
    ),
    *(
        _adaptivellm_claim(
            "D4",
            f"mean turnaround against vLLM, tight memory, {whose}",
            CHANGE,
            sim=_adaptivellm(
                f"parts.turnaround.at once, batch 128.{arm} against vllm.mean_turnaround_change"
            ),
            live=_scheduling(f"{key}turnaround_mean_change"),
            aim=0.0,
            note=note,
        )
        for whose, arm, key, note in (
            (
                "the paper's order",
                "adaptive",
                "fair_",
                "the paper gives none; no order is known that has both",
            ),
            ("the default order", "default", "", ""),
        )
    ),
    *(
        _adaptivellm_claim(
            id,
            f"error of predicted {what} times, on an emulated device with the noise of a real one",
            SHARE,
            paper,
            source,
            _adaptivellm(f"{key}_error"),
            bound=_adaptivellm(f"{key}_error_floor"),
            note=note,
            better=LOWER,
        )
        for id, what, key, paper, source, note in (
            (
                "D1",
                "step",
                "step",
                0.02,
                "Tables 5, 6",
                "the bound knows the mean of each step, and not its noise",
            ),
            (
                "D2",
                "swap",
                "swap",
                0.04,
                "Fig. 9",
                "of copies out and back, the worse; the bound knows their means",
            ),
        )
    ),
    *(
        _adaptivellm_claim(
            id,
            f"error of predicted {what} times, live, by tables that learn",
            SHARE,
            live=_scheduling(f"{what}_error"),
            aim=0.08,
            bound=bound,
            note=note,
            better=LOWER,
        )
        for id, what, bound, note in (
            ("D1", "step", None, ""),
            (
                "D2",
                "swap",
                _scheduling("swap_error_fitted"),
                "the worse of both ways; copies of half a millisecond to two, in steps, so that each finds other caches; the bound is one "
                "set-up time and one bandwidth for all of them, fitted afterwards",
            ),
        )
    ),
)
