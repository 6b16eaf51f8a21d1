"""What is claimed, and where the figures stand: spec's id, the paper's figure, ours in virtual time and ours live.

One table, data only. A `Figure` names a kept run and a path into its JSON, keys with dots between them. `run` alone or `run-PART`: a bench's parts
may be kept one by one. A key that is not there is "not measured".
"""

from __future__ import annotations

from dataclasses import dataclass

LOWER, HIGHER = "lower", "higher"
CHANGE, RATIO, SHARE, MS, S, BYTES, YES = "change", "ratio", "share", "ms", "s", "bytes", "yes"
"""Units: a signed fraction of the baseline, shown in %; times the baseline; a part of 1, shown in %; milliseconds; seconds; bytes; true or false."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Where a number stands. less: taken from it, 1 where a bench reports a ratio and the claim is a change."""

    run: str
    path: str
    less: float = 0.0


@dataclass(frozen=True, slots=True)
class Claim:
    """One number to be reached.

    paper: its figure, None if no paper has one; a range as (from, to). source: where the paper shows it. better: which way. aim: what ours is held
    to: the paper's figure if not given (of a range, the end that is easier to reach), or a figure of ours. live_what: what the live figure is, where
    it is not quite the same thing.
    """

    id: str
    group: str
    what: str
    unit: str
    better: str
    paper: float | tuple[float, float] | None = None
    source: str = ""
    sim: Figure | None = None
    live: Figure | None = None
    aim: float | Figure | None = None
    live_what: str = ""
    note: str = ""

    @property
    def paper_ends(self) -> tuple[float, ...]:
        if self.paper is None:
            return ()
        return self.paper if isinstance(self.paper, tuple) else (self.paper,)

    @property
    def goal(self) -> float | Figure | None:
        if self.aim is not None:
            return self.aim
        if isinstance(self.paper, tuple):
            return max(self.paper) if self.better == LOWER else min(self.paper)
        return self.paper


PAPERS = {
    "SYMPHONY": "Improving Memory Management for LLM Inference Workloads",
    "CaraServe": "CPU-Assisted and Rank-Aware LoRA Serving for Generative LLM Inference",
    "Chameleon": "Adaptive Caching and Scheduling for Many-Adapter LLM Inference Environments",
    "AdaptiveLLM": "Efficient LLM inference based on swapping and re-computation",
}
MECHANISMS = {
    "A1": "advisory requests",
    "A2": "a scheduler with a door for them",
    "A4": "three tiers of KV, the disk's always whole",
    "A5": "reads and writes layer by layer",
    "B1": "CPU-assisted prefill",
    "B5": "rank-aware routing",
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
    "E3": "one budget for KV and adapters",
    "E7": "KV that survives a restart",
    "E9": "adapters loaded beside the steps",
    "E12": "token continuity",
}
SYMPHONY, CARASERVE, CHAMELEON, ADAPTIVELLM = "SYMPHONY", "CaraServe", "Chameleon", "AdaptiveLLM"
OVERTURE = "Overture"
GROUPS = (SYMPHONY, CARASERVE, CHAMELEON, ADAPTIVELLM, OVERTURE)


def _symphony(path: str) -> Figure:
    return Figure("sim-symphony", path)


def _caraserve(path: str) -> Figure:
    return Figure("sim-caraserve", path)


def _adaptivellm(path: str) -> Figure:
    return Figure("sim-adaptivellm", path)


def _chameleon(path: str) -> Figure:
    return Figure("sim-chameleon", path)


def _scheduling(path: str) -> Figure:
    return Figure("live-scheduling", path)


def _advisory(path: str) -> Figure:
    return Figure("live-advisory", path)


def _adapters(path: str, less: float = 0.0) -> Figure:
    return Figure("live-adapters", path, less)


def _restore(path: str) -> Figure:
    return Figure("live-restore", path)


def _gateway(path: str) -> Figure:
    return Figure("live-gateway", path)


SYMPHONY_CLAIMS = (
    Claim(
        "A2–A4",
        SYMPHONY,
        "users at equal time per token ÷ recomputing (vLLM)",
        RATIO,
        HIGHER,
        (4.0, 8.0),
        "Fig. 12, 13",
        _symphony("users_ratio.recompute"),
        _restore("sessions_held_ratio"),
        aim=4.0,
        live_what="sessions whose follow-ups start within twice the device's TTFT ÷ stock vLLM's, one node",
    ),
    Claim(
        "A2–A4",
        SYMPHONY,
        "users at equal time per token ÷ sticky routing (InferCept)",
        RATIO,
        HIGHER,
        4.2,
        "§4.2",
        _symphony("users_ratio.sticky"),
    ),
    Claim(
        "A2",
        SYMPHONY,
        "load of the busiest node ÷ the median one's",
        RATIO,
        LOWER,
        1.0,
        "Fig. 14, about",
        _symphony("imbalance_max_over_median.ours"),
        aim=1.2,
        note="aim chosen: the paper shows that its nodes are balanced, and gives no number",
    ),
    Claim(
        "A2",
        SYMPHONY,
        "load of the busiest node ÷ the median one's, to be shown of sticky routing",
        RATIO,
        HIGHER,
        3.1,
        "Fig. 14",
        _symphony("imbalance_max_over_median.sticky"),
    ),
    Claim(
        "A1",
        SYMPHONY,
        "one advisory in ten missing",
        CHANGE,
        LOWER,
        0.06,
        "Fig. 17",
        _symphony("missing_10pct_penalty"),
        _advisory("missing_10pct_penalty"),
        live_what="change of mean TTFT, one node",
        note="the paper's own 21.3 → 24.4 ms a token are 15%; its text says about 6%",
    ),
    Claim(
        "A1",
        SYMPHONY,
        "time of agents' workflow: vLLM's ÷ ours",
        RATIO,
        HIGHER,
        2.8,
        "Fig. 15",
        _symphony("agents_speedup"),
        _advisory("agent_workflow_speedup"),
        live_what="one node",
    ),
    Claim(
        "A1",
        SYMPHONY,
        "median TTFT of follow-ups ÷ with everything on the device",
        RATIO,
        LOWER,
        live=_advisory("followup_ttft_vs_oracle_p50"),
        aim=1.1,
    ),
    Claim(
        "A1",
        SYMPHONY,
        "p99 TTFT of follow-ups ÷ with everything on the device",
        RATIO,
        LOWER,
        live=_advisory("followup_ttft_vs_oracle_p99"),
        aim=1.3,
    ),
    Claim(
        "A1",
        SYMPHONY,
        "nine wrong advisories for each right one: mean TTFT of the others",
        CHANGE,
        LOWER,
        live=_advisory("wrong_90pct_penalty_others"),
        aim=0.03,
    ),
)

CARASERVE_CLAIMS = (
    Claim(
        "B1",
        CARASERVE,
        "mean TTFT with CPU-assist against adapters all resident",
        CHANGE,
        LOWER,
        0.22,
        "Fig. 10",
        _caraserve("ttft_overhead.cpu_assist"),
        _adapters("cold_ttft_vs_resident_p50", less=1),
        live_what="median TTFT of a cold start from host memory against a resident one",
    ),
    Claim(
        "B1",
        CARASERVE,
        "mean TTFT with loading on demand against adapters all resident: to be shown",
        CHANGE,
        HIGHER,
        4.12,
        "Fig. 10",
        _caraserve("ttft_overhead.on_demand"),
    ),
    Claim(
        "B1",
        CARASERVE,
        "mean TTFT with CPU-assist, 512 adapters of skewed popularity",
        CHANGE,
        LOWER,
        0.07,
        "Fig. 14",
        _caraserve("production_ttft_overhead.cpu_assist"),
    ),
    Claim(
        "B1",
        CARASERVE,
        "mean TTFT with loading on demand, 512 adapters: to be shown",
        CHANGE,
        HIGHER,
        0.39,
        "Fig. 14",
        _caraserve("production_ttft_overhead.on_demand"),
    ),
    Claim(
        "B5",
        CARASERVE,
        "requests within SLO, 60 nodes, 40,000 adapters, MBGMV",
        SHARE,
        HIGHER,
        0.99,
        "Fig. 19",
        _caraserve("slo_attainment.mbgmv"),
    ),
    Claim(
        "B5",
        CARASERVE,
        "requests within SLO, 60 nodes, 40,000 adapters, BGMV",
        SHARE,
        HIGHER,
        0.99,
        "Fig. 19",
        _caraserve("slo_attainment.bgmv"),
    ),
    *(
        Claim(
            "B5",
            CARASERVE,
            f"time per token against {name}, {kernel.upper()}",
            CHANGE,
            LOWER,
            paper,
            "Fig. 19",
            _caraserve(f"tpt_change.{kernel}.{key}"),
        )
        for kernel, key, name, paper in (
            ("mbgmv", "first_fit", "first fit", -0.364),
            ("mbgmv", "random", "random", -0.188),
            ("mbgmv", "most_idle", "most idle", -0.161),
            ("bgmv", "first_fit", "first fit", -0.36),
        )
    ),
    Claim(
        "B1",
        CARASERVE,
        "p99 TTFT of a cold start from host memory against a resident one",
        CHANGE,
        LOWER,
        live=_adapters("cold_ttft_vs_resident_p99", less=1),
        aim=0.2,
    ),
)

# Requests/s, name, the paper's changes of P99 and P50, the load of the live bench as a share of vLLM's capacity.
LOADS = (
    (6, "low", -0.147, -0.139),
    (8, "medium", -0.246, -0.209),
    (9, "high", -0.807, -0.481),
)
CHAMELEON_CLAIMS = (
    *(
        Claim(
            "C1–C9",
            CHAMELEON,
            f"P99 TTFT at {load} load ({per_s} requests/s)",
            CHANGE,
            LOWER,
            p99,
            "Fig. 10",
            _chameleon(f"ttft_p99_change.{per_s}"),
            _scheduling(f"loads.{load}.ttft_p99_change"),
            live_what=f"against vLLM, FCFS, at {per_s}/8.7 of its load within SLO",
        )
        for per_s, load, p99, _ in LOADS
    ),
    *(
        Claim(
            "C1–C9",
            CHAMELEON,
            f"P50 TTFT at {load} load ({per_s} requests/s)",
            CHANGE,
            LOWER,
            p50,
            "Fig. 12",
            _chameleon(f"ttft_p50_change.{per_s}"),
            _scheduling(f"loads.{load}.ttft_p50_change"),
            live_what=f"against vLLM, FCFS, at {per_s}/8.7 of its load within SLO",
        )
        for per_s, load, _, p50 in LOADS
    ),
    Claim(
        "C1–C9",
        CHAMELEON,
        "load within SLO ÷ S-LoRA's",
        RATIO,
        HIGHER,
        12.9 / 8.7,
        "Fig. 10",
        _chameleon("slo_load_ratio"),
        _scheduling("slo_load_ratio"),
    ),
    Claim(
        "C1–C3",
        CHAMELEON,
        "load within SLO, cache alone",
        RATIO,
        HIGHER,
        1.2,
        "Fig. 10",
        _chameleon("cache_only_ratio"),
    ),
    Claim(
        "C4–C9",
        CHAMELEON,
        "load within SLO, scheduler alone",
        RATIO,
        HIGHER,
        1.1,
        "Fig. 10",
        _chameleon("sched_only_ratio"),
    ),
    *(
        Claim(
            "C2",
            CHAMELEON,
            f"P99 TTFT at medium load, cache, {name}",
            CHANGE,
            LOWER,
            paper,
            "Fig. 14",
            _chameleon(f"eviction.{key}"),
        )
        for key, name, paper in (
            ("lru", "LRU", -0.18),
            ("equal", "equal weights", -0.22),
            ("paper", "the paper's weights", -0.26),
        )
    ),
    Claim(
        "C3",
        CHAMELEON,
        "P99 TTFT at medium load, prefetch by histogram, further",
        CHANGE,
        LOWER,
        -0.088,
        "Fig. 15",
        _chameleon("parts.eviction.at_8.prefetch"),
    ),
    Claim(
        "C4–C9",
        CHAMELEON,
        "mean TTFT of the class of requests that fares worst, high load",
        CHANGE,
        LOWER,
        live=_scheduling("worst_class_change"),
        aim=0.1,
    ),
    Claim(
        "C8",
        CHAMELEON,
        "time for deciding with 10,000 requests queued ÷ time of the step",
        SHARE,
        LOWER,
        live=_scheduling("decision_share_10k"),
        aim=0.01,
    ),
)

ADAPTIVELLM_CLAIMS = (
    Claim(
        "D3",
        ADAPTIVELLM,
        "throughput ÷ always recomputing (vLLM), tight memory",
        RATIO,
        HIGHER,
        (1.09, 1.4),
        "Table 3",
        _adaptivellm("throughput_vs_recompute"),
        _scheduling("tight_memory_throughput_vs_recompute"),
        aim=1.4,
    ),
    Claim(
        "D3",
        ADAPTIVELLM,
        "throughput ÷ always swapping, tight memory",
        RATIO,
        HIGHER,
        (1.64, 2.55),
        "Table 3",
        _adaptivellm("throughput_vs_swap"),
        _scheduling("tight_memory_throughput_vs_swap"),
        aim=2.55,
    ),
    Claim(
        "D4",
        ADAPTIVELLM,
        "weighted turnaround against vLLM, tight memory",
        CHANGE,
        LOWER,
        (-0.2, -0.4),
        "Fig. 8",
        _adaptivellm("weighted_turnaround_change"),
        _scheduling("weighted_turnaround_change"),
        aim=-0.4,
    ),
    Claim(
        "D1",
        ADAPTIVELLM,
        "error of predicted step times",
        SHARE,
        LOWER,
        0.02,
        "Tables 5, 6",
        live=_scheduling("recompute_error"),
    ),
    Claim(
        "D2",
        ADAPTIVELLM,
        "error of predicted swap times",
        SHARE,
        LOWER,
        0.04,
        "Fig. 9",
        live=_scheduling("swap_error"),
    ),
)

OVERTURE_CLAIMS = (
    Claim(
        "E1",
        OVERTURE,
        "TTFT of a pasted question of 2,000 tokens, computed while it stood in the field ÷ not",
        RATIO,
        LOWER,
        live=_advisory("draft_ttft_ratio"),
        aim=0.2,
    ),
    Claim(
        "A5",
        OVERTURE,
        "event loop's time for an advisory",
        MS,
        LOWER,
        live=_advisory("advisory_loop_ms"),
        aim=1.0,
    ),
    Claim(
        "E7",
        OVERTURE,
        "greedy answers the same from device, host, disk and after kill -9",
        YES,
        HIGHER,
        live=_restore("tokens_identical"),
        aim=1.0,
    ),
    Claim(
        "A5",
        OVERTURE,
        "copy from host memory to the device ÷ memcpy",
        RATIO,
        HIGHER,
        live=_restore("host_copy_efficiency"),
        aim=0.8,
    ),
    Claim(
        "A5",
        OVERTURE,
        "KV read from disk ÷ plain read of the same files",
        RATIO,
        HIGHER,
        live=_restore("disk_read_efficiency"),
        aim=0.8,
    ),
    Claim(
        "A4",
        OVERTURE,
        "decode throughput lost to the KV tiers",
        SHARE,
        LOWER,
        live=_restore("write_behind_overhead"),
        aim=0.03,
    ),
    Claim(
        "E9",
        OVERTURE,
        "longest gap that a cold adapter causes in other streams; aim: a step",
        MS,
        LOWER,
        live=_adapters("stall_ms"),
        aim=_adapters("step_ms"),
    ),
    Claim(
        "E3",
        OVERTURE,
        "100 adapters, memory for a fifth: requests whose adapter need not be read; aim: vLLM's LRU",
        SHARE,
        HIGHER,
        live=_adapters("policies.expected_gain.hit_rate"),
        aim=_adapters("policies.peer.hit_rate"),
    ),
    Claim(
        "E3",
        OVERTURE,
        "100 adapters, memory for a fifth: median TTFT; aim: vLLM's LRU",
        S,
        LOWER,
        live=_adapters("policies.expected_gain.ttft_p50_s"),
        aim=_adapters("policies.peer.ttft_p50_s"),
    ),
    Claim(
        "E3",
        OVERTURE,
        "100 adapters, memory for a fifth: p99 TTFT; aim: vLLM's LRU",
        S,
        LOWER,
        live=_adapters("policies.expected_gain.ttft_p99_s"),
        aim=_adapters("policies.peer.ttft_p99_s"),
    ),
    Claim(
        "E9",
        OVERTURE,
        "8 requests over 8 adapters ÷ on the base model, tokens/s",
        RATIO,
        HIGHER,
        live=_adapters("lora_overhead"),
        aim=0.8,
        note="aim: what memory bandwidth allows",
    ),
    Claim(
        "E12",
        OVERTURE,
        "follow-up prompt found in the KV of the turn before, ids kept; aim: text encoded again",
        SHARE,
        HIGHER,
        live=Figure("live-continuity", "follow_up_hit_share.continuity.real"),
        aim=Figure("live-continuity", "follow_up_hit_share.text.real"),
    ),
    *(
        Claim(
            "",
            OVERTURE,
            f"simulator against this machine, {how}: worst of tokens/s, latency, TTFT and time per token, median error of plays",
            SHARE,
            LOWER,
            live=Figure("live-simulator", path),
            aim=0.15,
            note=note,
        )
        for how, path, note in (
            ("by a profile made before", "worst_error", "the prediction"),
            (
                "at the speed that it had in each play",
                "worst_error_at_own_speed",
                "no prediction: the play's own step times go in",
            ),
        )
    ),
    Claim(
        "",
        OVERTURE,
        "tokens/s through 16 chat sockets ÷ a bare engine loop",
        RATIO,
        HIGHER,
        live=_gateway("stream_efficiency"),
        aim=0.95,
    ),
    Claim(
        "",
        OVERTURE,
        "memory of an idle chat socket",
        BYTES,
        LOWER,
        live=_gateway("idle_socket_bytes"),
        aim=40_960,
    ),
    Claim(
        "",
        OVERTURE,
        "event loop stall while serving, p99",
        MS,
        LOWER,
        live=_gateway("loop_stall_ms_p99"),
        aim=20.0,
    ),
    Claim(
        "",
        OVERTURE,
        "5 adapters and the base model in one batch, tokens as in single runs",
        YES,
        HIGHER,
        live=_gateway("mixed_batch_identical"),
        aim=1.0,
    ),
)

CLAIMS = (*SYMPHONY_CLAIMS, *CARASERVE_CLAIMS, *CHAMELEON_CLAIMS, *ADAPTIVELLM_CLAIMS, *OVERTURE_CLAIMS)
