"""What is claimed of what no paper has: see `bench.results.claims`."""

from __future__ import annotations

from functools import partial

from bench.results.claim import BYTES, CHANGE, COUNT, HIGHER, LOWER, MS, RATIO, SHARE, YES, Claim, Figure, S

OVERTURE = "Overture"

_own_claim = partial(Claim, OVERTURE)
_advisory = partial(Figure, "live-advisory")
_from_disk = partial(Figure, "live-advisory-disk")
_scarce = partial(Figure, "emulated-scarce")
_followers = partial(Figure, "sim-followers")
# With intervals: six to fifteen repeats in turns.
_adapters = partial(Figure, "live-adapters")
_restore = partial(Figure, "live-restore")
_quick_restore = partial(Figure, "live-restore-quick")
_gateway = partial(Figure, "live-gateway")
_mechanisms = partial(Figure, "live-mechanisms")
_cluster = partial(Figure, "live-cluster")
_routing = partial(Figure, "live-cluster-routing")
_gpu = partial(Figure, "live-gpu")

OVERTURE_CLAIMS = (
    _own_claim(
        "E1",
        "TTFT of a pasted question of 2,000 tokens, computed while it stood in the field ÷ not",
        RATIO,
        live=_advisory("draft_ttft_ratio"),
        aim=0.2,
        better=LOWER,
    ),
    *(
        _own_claim(
            "A1",
            f"{what}, conversations of 4k to 16k tokens on disk, host memory for a tenth of them, others at work",
            unit,
            sim=sim,
            live=_from_disk(key),
            aim=aim,
            bound=bound,
            note=note,
            better=LOWER,
        )
        for what, key, unit, aim, sim, bound, note in (
            (
                "median TTFT with advisories ÷ without",
                "ttft_vs_without_p50",
                RATIO,
                0.6,
                _scarce("ttft_vs_none_p50"),
                _scarce("bound_ttft_vs_none_p50"),
                "the bound knows when each question will come",
            ),
            (
                "p99 TTFT with advisories ÷ without",
                "ttft_vs_without_p99",
                RATIO,
                0.6,
                _scarce("ttft_vs_none_p99"),
                _scarce("bound_ttft_vs_none_p99"),
                "of long conversations typed in for a short time: six of twenty people type at once, and the device holds four; the bound knows "
                "when each question will come",
            ),
            (
                "median TTFT with advisories ÷ with everything on the device",
                "vs_oracle_p50",
                RATIO,
                1.15,
                _scarce("vs_resident_p50"),
                _from_disk("vs_oracle_bound"),
                "the bound is live, too: so much slower are steps without advisories, where as much is read from the disk",
            ),
            ("tokens/s of others that advisories cost", "decode_lost", SHARE, 0.02, None, None, ""),
        )
    ),
    _own_claim(
        "A5",
        "event loop's time for an advisory",
        MS,
        live=_advisory("advisory_loop_ms"),
        aim=1.0,
    ),
    *(
        _own_claim(
            "E2",
            f"part of a restore of 1,920 tokens from {what} that splitting it would save at best",
            SHARE,
            live=_mechanisms(f"restores.split_saves.{key}"),
            aim=0.05,
            note="decided against, docs/decisions/0011, which reckons with 42% on an A100 with a disk of 3 GB/s; less than 5% is held not to pay",
            better=LOWER,
        )
        for what, key in (("host memory", "host"), ("disk", "disk_cold"))
    ),
    _own_claim(
        "E4",
        "TTFT of a session under a cold adapter, announced ÷ all on the device",
        RATIO,
        live=_mechanisms("announced.announced_vs_resident"),
        aim=1.1,
        note="aim: as of follow-ups (A1)",
        better=LOWER,
    ),
    _own_claim(
        "E4",
        "the same, not announced: to be shown",
        RATIO,
        live=_mechanisms("announced.cold_vs_resident"),
        aim=1.1,
    ),
    *(
        _own_claim(
            "E5",
            f"{what} of learned advisories ÷ that of “this agent again”, worst of twelve data sets",
            RATIO,
            sim=_followers(f"{what}_vs_trivial"),
            aim=1.0,
            better=HIGHER,
        )
        for what in ("precision", "recall")
    ),
    _own_claim(
        "E5",
        "how far their probabilities are off, worst of these",
        SHARE,
        sim=_followers("calibration_error"),
        aim=0.1,
        better=LOWER,
    ),
    _own_claim(
        "E6",
        "bytes that advisories say were moved for them, off from what disk and copies have counted, some taken back on their way",
        SHARE,
        live=_mechanisms("accounting.off_share"),
        aim=0.02,
        better=LOWER,
    ),
    _own_claim(
        "E7",
        "greedy answers the same from device, host, disk and after kill -9",
        YES,
        live=_restore("tokens_identical"),
        aim=1.0,
    ),
    _own_claim(
        "A5",
        "copy from host memory to the device ÷ memcpy",
        RATIO,
        live=_quick_restore("host_copy_efficiency"),
        aim=0.8,
    ),
    _own_claim(
        "A5",
        "KV read from disk ÷ plain read of the same files",
        RATIO,
        live=_quick_restore("disk_read_efficiency"),
        aim=0.8,
    ),
    *(
        _own_claim(
            "A1",
            f"an 8B model on an H200, {num_tokens:,} tokens: TTFT with an advisory ÷ {what}",
            RATIO,
            live=_gpu(f"{key}.{num_tokens}"),
            aim=aim,
            note=note,
            better=LOWER,
        )
        for num_tokens, note in ((2048, "a restore takes a few milliseconds of it"), (16384, ""))
        for what, key, aim in (
            ("without, KV in host memory", "advised_vs_host", 0.6),
            ("without, KV on disk", "advised_disk_vs_disk", 0.6),
            ("with everything on the device", "advised_vs_resident", 1.15),
        )
    ),
    _own_claim(
        "A5",
        "an 8B model on an H200: answers from host memory and disk are those from the device",
        YES,
        live=_gpu("tokens_identical"),
        aim=1.0,
        note="nine histories with eight different answers: the model's weights are made up",
    ),
    _own_claim(
        "A5",
        "an 8B model on an H200: copy from host memory to the device ÷ memcpy, 16,384 tokens",
        RATIO,
        live=_gpu("restore_vs_link"),
        aim=0.8,
        note="by what a restore adds to the TTFT, so all that is not copying counts against it",
    ),
    _own_claim(
        "A4",
        "decode throughput lost to the KV tiers",
        SHARE,
        live=_quick_restore("write_behind_overhead"),
        aim=0.03,
        better=LOWER,
    ),
    *(
        _own_claim(
            "C1",
            f"the default order against vLLM's own queue: {what}; three traces, loads of 0.5 to 1.3 of capacity, with and without adapters",
            unit,
            sim=Figure("emulated-order", f"default.{key}"),
            aim=aim,
            note=note,
            better=LOWER,
        )
        for what, unit, key, aim, note in (
            (
                "P99 TTFT, the worst",
                RATIO,
                "p99_vs_vllm_worst",
                1.0,
                "three requests of 300 decide it, in one trace at one load",
            ),
            (
                "median TTFT at 1.2 of the capacity",
                CHANGE,
                "p50_change_at_1_2",
                -0.4,
                "what the shorter half gains has to come from the longer one, and with it from P99",
            ),
            ("mean TTFT of the worst class", CHANGE, "worst_class_change", 0.1, ""),
        )
    ),
    _own_claim(
        "C1",
        "one request for a third adapter beside two that fill the memory without a pause, TTFT; alone 1.3 s",
        S,
        sim=Figure("emulated-order", "starved_wait_s"),
        aim=2.0,
    ),
    _own_claim(
        "E9",
        "longest gap that a cold adapter causes in other streams, in steps",
        RATIO,
        live=_adapters("stall_steps"),
        aim=0.5,
        better=LOWER,
    ),
    _own_claim(
        "E8",
        "most of a prompt's KV that another tenant, adapter or version of the adapter reuses",
        SHARE,
        live=_mechanisms("apart.others_share"),
        aim=0.0,
        better=LOWER,
    ),
    _own_claim(
        "E8",
        "least of it that the same ones reuse, from the device, from host memory, and after a version has come back",
        SHARE,
        live=_mechanisms("apart.same_share"),
        aim=1.0,
    ),
    _own_claim(
        "E10",
        "a CPU engine's KV comes back whole from host memory and disk, with the tokens of a hit on the device",
        YES,
        live=_mechanisms("restores.is_restored"),
        aim=True,
    ),
    _own_claim(
        "E10",
        "vLLM's OffloadingConnector and SimpleCPUOffloadConnector do not do that on a CPU: to be shown",
        YES,
        live=_mechanisms("refusals.are_refused"),
        aim=True,
    ),
    _own_claim(
        "E11",
        "TTFT of the first question after another adapter was picked, history computed at the switch ÷ not",
        RATIO,
        live=_mechanisms("switched.at_once_vs_not"),
        aim=0.2,
        note="aim: as of drafts (E1)",
        better=LOWER,
    ),
    *(
        _own_claim(
            "E3",
            f"100 adapters, memory for a fifth: {what}; aim: vLLM's LRU",
            unit,
            live=_adapters(f"policies.adaptive.{key}"),
            aim=_adapters(f"policies.peer.{key}"),
            note="341 requests; an adapter that was not at hand costs no wait that can be told from chance",
        )
        for what, unit, key in (
            ("requests whose adapter need not be read", SHARE, "hit_rate"),
            ("median TTFT", S, "ttft_p50_s"),
            ("p99 TTFT", S, "ttft_p99_s"),
        )
    ),
    *(
        _own_claim(
            "C2",
            f"wait for adapters ÷ LRU's, in virtual time: {what}",
            RATIO,
            sim=Figure("sim-adaptercache", path),
            aim=aim,
            better=LOWER,
        )
        for what, path, aim in (
            ("the worst of 12 tempers and three cache sizes", "worst_vs_lru", 1.0),
            ("where popularity stays, the worst of three cache sizes", "stationary_vs_lru", 0.85),
        )
    ),
    _own_claim(
        "E9",
        "8 requests over 8 adapters ÷ on the base model, tokens/s",
        RATIO,
        live=_adapters("lora_overhead"),
        aim=0.8,
        note="aim: what memory bandwidth allows",
    ),
    _own_claim(
        "",
        "emulated node against this machine, by what was known before each play: P99 of TTFT over all plays",
        SHARE,
        live=Figure("emulated-agree", "pooled_errors.ttft_p99"),
        aim=0.15,
        note="undecided: the interval of predicted over measured is 0.68 to 1.17; at the speed that the machine had in each play it is 4.7%",
        better=LOWER,
    ),
    _own_claim(
        "E12",
        "follow-up prompt found in the KV of the turn before, ids kept; aim: text encoded again",
        SHARE,
        live=Figure("live-continuity", "follow_up_hit_share.continuity.real"),
        aim=Figure("live-continuity", "follow_up_hit_share.text.real"),
    ),
    *(
        _own_claim(
            "",
            f"emulated node against this machine, {how}: worst of tokens/s, latency, TTFT and time per token, median error of plays",
            SHARE,
            live=Figure("emulated-agree", path),
            aim=0.15,
            note=note,
            better=LOWER,
        )
        for how, path, note in (
            ("by what was known before each play", "worst_error", "the prediction"),
            (
                "at the speed that it had in each play",
                "worst_error_at_own_speed",
                "no prediction: the play's own step times go in",
            ),
        )
    ),
    _own_claim(
        "A3",
        "sessions that go on from KV on two nodes ÷ on one, each with the same memory",
        RATIO,
        live=_cluster("sessions_held_ratio"),
        aim=1.8,
    ),
    _own_claim(
        "A3",
        "TTFT of a session of 2,048 tokens on another node, which fetches its KV from where it was ÷ computing it there",
        RATIO,
        live=_cluster("peer_fetch_vs_recompute"),
        aim=0.1,
        better=LOWER,
    ),
    _own_claim(
        "A3",
        "its answers are those of one node that computed everything",
        YES,
        live=_cluster("tokens_identical"),
        aim=1.0,
    ),
    _own_claim(
        "A3",
        "what a node in another process adds to TTFT",
        MS,
        live=Figure("live-cluster-ttft", "ttft_added_ms"),
        aim=3.0,
    ),
    *(
        _own_claim("A3", f"{what}, twelve conversations going on", COUNT, live=_cluster(key), aim=0.0)
        for what, key in (
            ("turns that are lost when a node is killed", "kill_lost_turns"),
            ("turns that are answered twice when a node is killed", "kill_answers_twice"),
            ("requests that fail while a node is drained and comes back", "drain_failed"),
            (
                "requests that fail while all nodes are restarted, one after the other",
                "rolling_restart_failed",
            ),
        )
    ),
    _own_claim(
        "A2",
        "P99 TTFT after a second node has joined, 32 people on the first, who ask 1.5 times what it answers: moved by advisories ÷ sticky",
        RATIO,
        live=_routing("advised_vs_sticky_ttft_p99", interval="routing_confidence.interval"),
        aim=0.7,
        note="the router also moves sessions of those who come unannounced, which gains nearly as much",
        better=LOWER,
    ),
    _own_claim(
        "A2",
        "the same where they ask 0.75 times what it answers",
        RATIO,
        live=_routing("easy_advised_vs_sticky_ttft_p99", interval="easy_confidence.interval"),
        aim=1.0,
        note="there is nothing to win where one node keeps up; the aim: nothing is lost",
        better=LOWER,
    ),
    _own_claim(
        "A2",
        "requests at the fuller of two nodes ÷ the median one's, from ten seconds after it has joined",
        RATIO,
        live=_routing("imbalance_max_vs_median"),
        aim=1.2,
        better=LOWER,
    ),
    _own_claim(
        "",
        "tokens/s through 16 chat sockets ÷ a bare engine loop",
        RATIO,
        live=_gateway("stream_efficiency"),
        aim=0.95,
    ),
    _own_claim(
        "",
        "memory of an idle chat socket",
        BYTES,
        live=_gateway("idle_socket_bytes"),
        aim=40_960,
    ),
    _own_claim(
        "",
        "event loop stall while serving, p99",
        MS,
        live=_gateway("loop_stall_ms_p99"),
        aim=20.0,
    ),
    _own_claim(
        "",
        "5 adapters and the base model in one batch, tokens as in single runs",
        YES,
        live=_gateway("mixed_batch_identical"),
        aim=1.0,
    ),
)
