"""The figures of a node: its state, its queue, its adapters, its KV tiers and its work on texts and grammars."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from engine_bridge.protocol.node_facts import NodeFacts
from kvtiers.stats import TierStats

NodeState = Literal["starting", "ready", "rebuilding", "asleep", "draining", "failed", "closed"]


class AdapterStats(Struct, frozen=True, kw_only=True):
    """A node's adapters.

    `counts`: since the start, by what happened: `found:PLACE` (requests, by where their adapter was), `loads:SOURCE` and `load_bytes:SOURCE`
    into host memory, `slot_fills`, `slot_bytes`, `cache_bytes`, `evicted:TIER[:REASON]`, `failed`, `prefetched`, `copied_ahead`,
    `worker_deltas`, `laid_out_ahead`, `laid_out_in_step`.

    `seconds`: of the engine's time inside `step`s and `between` them, and on the loader's thread, `load:SOURCE` and `layout`.

    `failed`: by name, why an adapter of the folder, or one named at the start, is not served as its files are, and whether it is tried again.
    """

    num_adapters: int
    num_by_place: dict[str, int]
    host_bytes: int
    host_capacity_bytes: int
    cached_bytes: int
    num_waiting: int
    counts: dict[str, int]
    seconds: dict[str, float]
    failed: dict[str, str] = {}

    @property
    def num_failed(self) -> int:
        """Number of adapters that are not served as their files are."""
        return len(self.failed)


class LeftOut(Struct, frozen=True):
    """A mechanism that a node's engine runs without, though it was set up with it. why: as a phrase."""

    mechanism: str
    why: str


# Why a request waits. By the policy: its lane's quota is used up, blocks or memory for its adapter are lacking, another stands before it, or all
# that may run do. Before the policy considers it: its grammar or its adapter is not there yet, or no step began since it came. It was to start
# and could not: its KV is on its way, no slot for its adapter was free, the step was full. `paused`: urgent requests decode, which would be slower
# with it. `behind_programs`: it begins an agent's program, and those under
# way fill the device. `queued`: vLLM's own queue, which does not say more.
WaitReason = Literal[
    "lane_quota",
    "no_blocks",
    "adapter_memory",
    "behind_head",
    "no_slot",
    "grammar_compiling",
    "adapter_on_its_way",
    "just_came",
    "kv_on_its_way",
    "adapter_slots",
    "step_full",
    "paused",
    "behind_programs",
    "queued",
]


class LaneStats(Struct, frozen=True, kw_only=True):
    """Lanes in order of size. boundaries: between neighbouring lanes, one fewer than lanes. used_tokens: by who runs, borrowed ones with them."""

    boundaries: tuple[float, ...]
    num_waiting: tuple[int, ...]
    quota_tokens: tuple[int, ...]
    used_tokens: tuple[int, ...]


class LengthErrors(Struct, frozen=True, kw_only=True):
    """Errors of finished answers against their predicted median, in tokens.

    Attributes:
        num_within_p90: answers that were no longer than their predicted p90.
        num_within: number of answers by their largest error in tokens; cumulative.
    """

    num_answers: int
    sum_tokens: int
    num_within_p90: int
    num_within: dict[int, int]


class TokenizerStats(Struct, frozen=True):
    """Counts of rendering and tokenising for all tenants since the start: jobs done, their seconds, and the jobs that wait now."""

    num_jobs: int
    seconds: float
    num_waiting: int


class SchedulingStats(Struct, frozen=True, kw_only=True):
    """Figures of the queue, and how full the device is.

    `counts`: since the engine's start, `admitted`, `bypassed`, `squashed`, `preempted[:KIND]`, `refits` and
    `decisions`. `seconds`: of the engine thread, deciding (`decide`) and all about it (`step`). lanes, length_errors: None where there are none.
    length_calibration: for each tenant its answers, those no longer than their predicted median, and those no longer than their predicted 90th
    percentile. num_answer_tokens: generated since the engine's start. block_size: tokens that a KV block holds on average where prompts are long.
    """

    policy: str
    num_running: int
    num_waiting: int
    num_by_reason: dict[WaitReason, int]
    lanes: LaneStats | None
    counts: dict[str, int]
    seconds: dict[str, float]
    length_errors: LengthErrors | None
    length_calibration: dict[str, tuple[int, int, int]] = {}
    num_answer_tokens: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    block_size: int = 0


class RequestState(Struct, frozen=True, kw_only=True):
    """A request that waits or runs.

    request_id: as its client knows it. waited_s: until it started, or so far. ran_s: None while it waits, or where it is not known. size_tokens: the
    tokens that it is charged, prompt, predicted answer and adapter; without a policy of ours its tokens so far. defer_reason: None while it runs.
    """

    request_id: str
    priority: int
    lane: int | None = None
    waited_s: float | None = None
    ran_s: float | None = None
    size_tokens: int
    num_output_tokens: int
    defer_reason: WaitReason | None = None
    times_bypassed: int = 0
    times_squashed: int = 0
    times_preempted: int = 0
    is_bypasser: bool = False


class EngineState(Struct, frozen=True, kw_only=True):
    """An engine between two steps. waiting, running: the first of one tenant's; num_waiting, num_running: all of that tenant's."""

    state: NodeState
    num_steps: int
    num_rebuilds: int
    scheduling: SchedulingStats
    waiting: list[RequestState]
    running: list[RequestState]
    num_waiting: int
    num_running: int


class Progress(Struct, frozen=True):
    """How far a node has come on its way to `ready`. `stage` is a phrase for people."""

    state: NodeState
    stage: str
    elapsed_s: float
    error: str | None = None


class GrammarStats(Struct, frozen=True):
    """Grammars of structured output that were checked before the engine saw them.

    num_checked: by a helper process. num_refused: of these. num_deaths: that ended a helper process, by a crash or by
    their time. seconds: of checking.
    """

    num_checked: int
    num_refused: int
    num_deaths: int
    seconds: float


# Fields of `SchedulingStats`, `HostStats` and `AdapterStats` that are no counts since the start.
_LOAD = ("num_running", "num_waiting", "num_kv_blocks", "num_free_kv_blocks")
_HELD = ("bytes", "capacity_bytes", "num_blocks", "num_sessions")
_ADAPTERS_HELD = ("host_bytes", "host_capacity_bytes", "cached_bytes", "num_waiting")


class NodeFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node in figures, as one snapshot; None for figures that there are not (yet).

    Attributes:
        num_steps: the engine's steps since the start of the process.
        num_rebuilds: how often the engine was built anew, and its process started anew.
        left_out: what the engine runs without, though it was set up with it.
        facts: what routing reckons with, under an empty name: the caller knows which node this is. A router has none, for no router routes to it.
    """

    num_steps: int = 0
    num_rebuilds: int = 0
    num_ranks: int = 1
    kv_tiers: TierStats | None = None
    adapter_stats: AdapterStats | None = None
    tokenizer_stats: TokenizerStats | None = None
    grammar_stats: GrammarStats | None = None
    scheduling_stats: SchedulingStats | None = None
    left_out: tuple[LeftOut, ...] = ()
    facts: NodeFacts | None = None

    def without_load(self) -> NodeFigures:
        """Return the counts since the start, without what runs, waits and lies in memory: that is gone with a node's process."""
        scheduling, tiers, adapters = self.scheduling_stats, self.kv_tiers, self.adapter_stats
        if scheduling is not None:
            scheduling = replace(scheduling, num_by_reason={}, lanes=None, **dict.fromkeys(_LOAD, 0))
        if tiers is not None:
            disk = replace(tiers.disk, num_unwritten=0, write_lag_s=0.0, num_reads_queued=0)
            tiers = replace(tiers, host=replace(tiers.host, **dict.fromkeys(_HELD, 0)), disk=disk)
        if adapters is not None:
            adapters = replace(adapters, **dict.fromkeys(_ADAPTERS_HELD, 0))
        return replace(self, scheduling_stats=scheduling, kv_tiers=tiers, adapter_stats=adapters)
