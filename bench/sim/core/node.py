"""A serving node in virtual time: continuous batching over one device, its memory in blocks, adapters, and one link to the host.

The node is hardware and bookkeeping. Who starts, who waits, who may pass and who is squashed is asked of a `QueuePolicy`; who is preempted
when memory runs out, of a `Preemption`; which unused adapter leaves, of an `EvictionPolicy`. They are told what the live engine tells them
(engine_bridge/driver/scheduling): facts at arrival, `admitted`, `outgrew`, `squashed`, `ended`, and refits of lanes.

Whatever needs a decision is decided before each step. Steps that only decode, while nobody waits whom the policy might start, are counted together
up to the next end, growth or lack of memory; what comes in between cuts the run at the end of the step that it meets.

With host memory (`host_kv.HostMemory`) the KV of those who are preempted may wait there. Where KV is copied out when somebody is preempted
(AdaptiveLLM, vLLM 0.2), `Preemption` chooses a way for each victim by what `SwapOrRecompute` predicts. Where it was written through as it was made
(the live engine), nothing is chosen then: when the request starts again, a `RestorePolicy` says how much is loaded and how much computed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from bench.sim.core.adapters import Adapters
from bench.sim.core.clock import Clock, Event
from bench.sim.core.host_kv import HostKv, HostMemory
from bench.sim.core.lane_fits import LaneFits
from bench.sim.core.links import SharedLink
from bench.sim.core.requests import Arrival, Guesser, Request, Stage
from bench.sim.core.steps import Chunk, Decoding, StepCost
from engine_bridge.policy.adapter_cache import EvictionPolicy
from engine_bridge.policy.arrivals import Arrivals
from engine_bridge.policy.fairness import fair_priority
from engine_bridge.policy.pacing import StepPace, pace
from engine_bridge.policy.preemption import POLICIES as PREEMPTIONS
from engine_bridge.policy.preemption import Preemption, RunningFacts, last_in_first_out
from engine_bridge.policy.queue import Decision, QueuePolicy, Room, Running, Waiting
from engine_bridge.policy.quotas import overcharged_tokens
from engine_bridge.policy.ways_back import Way

BLOCK_TOKENS = 16
# What a step's activations take. Chosen.
ACTIVATION_BYTES = 10**9
# Seconds of a token before any was measured, and how fast that is corrected. As in the live engine.
PRIOR_TOKEN_S, SMOOTHING = 0.02, 0.1
# Forecasts: how far ahead, and from which probability on. As measured by bench.sim.adapter_cache.
LEAD_S, LIKELY = 10.0, 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine forms its steps.

    step_tokens: in one step at most, None for a sixth of the memory's. Who may start and finds none left waits until it may again. is_mixed: prompts
    are computed in chunks beside those that decode; else whole, in steps of their own. reserves_answer: a start takes blocks for the predicted
    answer, too. loads_block: while the adapter of a request that has started is on its way, no step runs. assists: its prompt is computed
    meanwhile, with a host's help (`StepCost.assistant`). swaps_block: no step runs while KV comes back from host memory. writes_through: KV is in
    host memory as soon as it is made, so that whoever is preempted goes at once; else it is copied out then, and the next step waits for that,
    because it needs the blocks. max_step_s: prompts are computed in steps of about so long, as policy/pacing has it; 0: of any length.
    """

    name: str
    step_tokens: int | None
    is_mixed: bool
    reserves_answer: bool
    loads_block: bool
    max_running: int
    assists: bool = False
    swaps_block: bool = False
    writes_through: bool = False
    finds_cached: bool = False
    max_step_s: float = 0.0


SLORA = Shape("s-lora", None, False, True, True, 1000)
"""Source: S-LoRA/S-LoRA at 18895fa, slora/server/router: new requests' adapters are awaited before their prefill, which is a step of its own;
a request joins if it fits with its whole answer; a batch of prompts has a sixth of all tokens. Departs in joining before every step (Chameleon §4),
not every tenth, and in that answers are reserved as predicted, as nobody knows them."""
VLLM = Shape("vllm", 2048, True, False, False, 256, finds_cached=True)
"""vLLM's default step and number of requests; a request whose adapter is on its way waits for it alone, as the live engine has it."""
VLLM_0_2 = Shape("vllm 0.2", 2048, False, False, True, 256, swaps_block=True)
"""vLLM 0.2.5, which AdaptiveLLM is built on: prompts in steps of their own, and copies between device and host take turns with steps (AdaptiveLLM §6,
which leaves doing both at once for later). Departs in that prompts of one step are not padded to the longest, and no block is kept free at starts."""
OVERTURE = replace(VLLM, name="live engine", writes_through=True)
"""The live engine: vLLM's steps; KV is written through. Departs in that a load goes beside the steps, and the rest of its request is computed after
it; live, both go in one step, layer by layer. For a machine that was measured, `max_step_s` can be the live engine's."""


class _Facts(Mapping[str, Waiting]):
    """What waits, with what it needs by now."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getitem__(self, request_id: str) -> Waiting:
        node, request = self._node, self._node.waiting[request_id]
        adapter_id, adapter_blocks = request.arrival.adapter_id, 0
        if adapter_id is not None:
            adapter_blocks = node.adapters.missing_blocks(adapter_id)
        num_blocks = min(node.start_blocks(request), node.num_blocks - adapter_blocks)
        base = request.base
        if base.num_blocks != num_blocks or base.adapter_blocks != adapter_blocks:
            num_prefill = max(node.start_tokens(request), 1)
            base = request.base = msgspec.structs.replace(
                base,
                num_blocks=num_blocks,
                adapter_blocks=adapter_blocks,
                num_prefill_tokens=num_prefill,
                is_warm=2 * num_prefill <= request.num_tokens,
            )
        return base

    def __iter__(self) -> Iterator[str]:
        return iter(self._node.waiting)

    def __len__(self) -> int:
        return len(self._node.waiting)


class _RunningFacts(Mapping[str, Running]):
    """What runs, worked out only where it is asked for."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getitem__(self, request_id: str) -> Running:
        request = self._node.running[request_id]
        return Running(
            request_id=request_id,
            lane=0,
            charged_tokens=request.charged_tokens,
            num_blocks=self._node.held_blocks(request),
            started_s=request.started_s,
            predicted_end_s=request.started_s + request.base.duration_s,
            is_bypasser=request.is_bypasser,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._node.running)

    def __len__(self) -> int:
        return len(self._node.running)


class _Due(NamedTuple):
    """Something that happens to a request that decodes, at a number of decode steps."""

    at: int
    order: int
    what: str
    request: Request
    generation: int


@dataclass(slots=True)
class _Step:
    """One step, or a run of `num` that only decode. chunks: of which prompts how many tokens.

    left, since_s: what share of it was to be done when it was last planned, and when that was.
    """

    began_s: float
    num: int
    chunks: list[tuple[Request, int]]
    decoding: Decoding | None
    does_decode: bool
    end: Event
    left: float
    since_s: float


@dataclass(slots=True)
class Tally:
    """Of a whole run. counts: admitted, bypassed, squashed, preempted, steps, decode_tokens, prefill_tokens."""

    counts: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    stalled_s: float = 0.0
    most_blocks: int = 0


class Node:
    """One device with its model.

    Args:
        policy: who starts.
        lanes: fits the lanes of a policy that has some; None for others.
        eviction: which unused adapter leaves first; None for no cache.
        adapter_ranks: by adapter id.
        forecast: foretells adapters that will be asked for, None without.
        has_all_adapters: they lie in memory of their own: nothing is ever loaded.
        num_blocks: of device memory for KV and adapters; None: what the model leaves.
        host_memory: for the KV of those who are preempted, and what decides about it; None: they compute it anew.

    Raises:
        ValueError: a model that does not fit, a shape that assists without anything to do it, KV that is written through without a policy that
            restores it, or steps that are to be kept short at unknown costs.
    """

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        shape: Shape,
        policy: QueuePolicy,
        guesser: Guesser,
        *,
        lanes: LaneFits | None = None,
        eviction: EvictionPolicy | None = None,
        adapter_ranks: Sequence[int] = (),
        preemption: Preemption = PREEMPTIONS["vllm"],
        forecast: Arrivals | None = None,
        has_all_adapters: bool = False,
        num_blocks: int | None = None,
        host_memory: HostMemory | None = None,
    ) -> None:
        if shape.assists and cost.assistant is None:
            raise ValueError("a host that assists takes time: which one is it?")
        if shape.writes_through and host_memory is not None and host_memory.restore is None:
            raise ValueError("KV that is written through needs a policy that restores it")
        if shape.max_step_s and cost.table is None:
            raise ValueError("steps are kept short by a table of what they take: which one?")
        gpu, model = cost.gpu, cost.model
        self.clock, self.cost, self.shape, self.policy = clock, cost, shape, policy
        self.num_blocks = pool_blocks(cost) if num_blocks is None else num_blocks
        self.num_tokens = self.num_blocks * BLOCK_TOKENS
        self.link = SharedLink(clock, gpu.achieved_link_bytes_per_s, gpu.load_setup_s)
        block_bytes = BLOCK_TOKENS * model.kv_bytes_per_token
        bytes_by_rank = {rank: model.lora_bytes(rank) for rank in set(adapter_ranks)}
        sizes = [bytes_by_rank[rank] for rank in adapter_ranks]
        self.adapters = Adapters(sizes, block_bytes, eviction, self.link, has_all=has_all_adapters)
        self.host_kv = HostKv(clock, host_memory, block_bytes, self.link) if host_memory is not None else None
        self.waiting: dict[str, Request] = {}
        self._came: list[Request] = []  # of these, those that the policy does not know yet
        self.running: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.tally = Tally()
        self.kv_blocks = 0
        self._num_taken = 0  # blocks, ever
        self.num_changes = 0
        """Counts requests that came, started, began to answer and left: while it stays, so do the facts about them."""
        self._most_step_tokens = shape.step_tokens or max(self.num_tokens // 6, model.max_tokens)
        self._step_tokens = self._chunk_tokens = self._most_step_tokens
        self._ranks = adapter_ranks
        self._guesser, self._lanes, self._preemption = guesser, lanes, preemption
        self._forecast = forecast
        self._is_timeless = policy.is_timeless
        self._facts, self._running_facts = _Facts(self), _RunningFacts(self)
        self._prefilling: deque[Request] = deque()
        self._loading: dict[int, list[Request]] = {}
        self._step: _Step | None = None
        self._stalled_since_s: float | None = None
        self._num_copies_in = self._num_copies_out = 0
        # Their KV or their adapter came while a step was under way, of which they are no part.
        self._joining: list[Request] = []
        self._has_changed = True
        self._was_cut = False
        self._pace: StepPace | None = None
        self._token_s = PRIOR_TOKEN_S
        # Those that decode: they go in step, so one counter of steps says how far each is.
        self._counter = 0
        self._num_decodes = 0
        self._context = 0
        self._num_by_rank: Counter[int] = Counter()
        self._ranks_read = 0  # in a decode step
        self._growth = [0] * BLOCK_TOKENS
        self._due: list[_Due] = []
        self._order = itertools.count()

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, arrival: Arrival) -> None:
        """It comes now. Raises ValueError if it would not fit an empty device."""
        now = self.clock.now
        self.num_changes += 1
        request = self._accepted(arrival, now)
        self.waiting[arrival.request_id] = request
        if arrival.adapter_id is not None:
            self.adapters.asked_for(arrival.adapter_id, now)
            if self._forecast is not None:
                self._forecast.arrived(arrival.adapter_id, now)
        self._came.append(request)
        self._wake(now)

    def _accepted(self, arrival: Arrival, now: float) -> Request:
        rank = self._ranks[arrival.adapter_id] if arrival.adapter_id is not None else 0
        adapter_bytes = self.cost.model.lora_bytes(rank)
        num_tokens = arrival.num_prompt_tokens + arrival.num_answer_tokens
        adapter_tokens = adapter_bytes // self.cost.model.kv_bytes_per_token
        if num_tokens // BLOCK_TOKENS + 2 + adapter_tokens // BLOCK_TOKENS > self.num_blocks:
            raise ValueError(f"{num_tokens} tokens and their adapter do not fit the device")
        guess = self._guesser.guess(arrival)
        sizes = (float(arrival.num_prompt_tokens), float(guess.p50), float(rank))
        size_tokens = arrival.num_prompt_tokens + guess.p50 + adapter_tokens
        base = Waiting(
            request_id=arrival.request_id,
            arrived_s=now,
            wrs=self._lanes.wrs(sizes) if self._lanes is not None else 0.0,
            size_tokens=size_tokens,
            num_blocks=0,
            duration_s=guess.p50 * self._token_s,
            adapter_id=arrival.adapter_id,
        )
        return Request(arrival, rank, guess, sizes, base, size_tokens)

    def _take_in(self, now: float) -> None:
        """As live: the policy is told between two steps of those that came, and counts their waiting from there."""
        for request in self._came:
            request.base = msgspec.structs.replace(request.base, arrived_s=now)
            self.policy.arrived(request.base, now)
        self._came.clear()

    def start_blocks(self, request: Request) -> int:
        """Of KV, that its start takes: the prompt's and what was answered before, and the answer's if that is reserved."""
        num_answer = request.num_done
        if self.shape.reserves_answer:
            num_answer = max(num_answer, request.guess.p50)
        return -(-(request.arrival.num_prompt_tokens + num_answer) // BLOCK_TOKENS)

    def start_tokens(self, request: Request) -> int:
        """That its start has to compute, if all that is in host memory is loaded."""
        num_held = self.host_kv.held(request.arrival.request_id) if self.host_kv is not None else 0
        if num_held and not self.shape.writes_through:
            return 0
        return request.num_tokens - max(num_held * BLOCK_TOKENS, self._cached_tokens(request))

    def held_blocks(self, request: Request) -> int:
        """Of KV, now."""
        if request.grow_slot < 0:
            return request.num_blocks
        # Its last token has none yet: the step that computes with it takes a block where it needs one.
        return -(-(request.arrival.num_prompt_tokens + self._done(request) - 1) // BLOCK_TOKENS)

    def _done(self, request: Request) -> int:
        if request.stage is not Stage.DECODING:
            return request.num_done
        return request.num_done + self._counter - request.decodes_from

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """That a start may take: free ones, and those of adapters that nobody uses."""
        return self._empty_blocks + self.adapters.idle_blocks

    @property
    def _empty_blocks(self) -> int:
        return self.num_blocks - self.kv_blocks - self.adapters.used_blocks

    def _claim(self, num_blocks: int, now: float) -> None:
        """Have so many empty, by letting unused adapters go."""
        missing = num_blocks - self._empty_blocks
        if missing > 0:
            self.adapters.free(missing, now)

    def _take(self, num_blocks: int, now: float) -> None:
        self._claim(num_blocks, now)
        self.kv_blocks += num_blocks
        self._num_taken += num_blocks
        used = self.kv_blocks + self.adapters.used_blocks
        self.tally.most_blocks = max(self.tally.most_blocks, used)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """The engine is free: decide who starts, and run the next step if there is something to do."""
        self._take_in(now)
        self._refit(now)
        self._set_pace()
        self._decide(now)
        if self.waiting and self._has_changed and self._ranks:
            self._prefetch(now)
        self._has_changed = False
        self._forecast_loads(now)
        if self._is_held_up:
            self._stalled_since_s = now
            return
        self._form(now)

    @property
    def _is_held_up(self) -> bool:
        """No step may run now: it would lack what is still being copied."""
        is_loading = self.shape.loads_block and len(self._loading) > 0
        return is_loading or self._num_copies_out > 0 or (self.shape.swaps_block and self._num_copies_in > 0)

    def _set_pace(self) -> None:
        """Bounds of the next step, as the live engine sets them (engine_bridge/driver/scheduling/pace.py)."""
        if not self.shape.max_step_s:
            return
        assert self.cost.table is not None, "checked at the start"
        under_way = [request.num_unfilled for request in self._prefilling]
        num_context = self._context + sum(request.num_prefilled for request in self._prefilling)
        self._pace = pace(
            self.cost.table,
            self.shape.max_step_s,
            self._num_decodes,
            num_context,
            under_way,
            self._most_step_tokens,
        )
        self._step_tokens = min(self._pace.prefill_tokens + self._num_decodes, self._most_step_tokens)
        self._chunk_tokens = self._step_tokens

    def _refit(self, now: float) -> None:
        """As live: what is fitted beside one step is there for the next."""
        if self._lanes is None:
            return
        known = {i: r.sizes for group in (self.waiting, self.running) for i, r in group.items()}
        self._has_changed |= self._lanes.apply(self.policy, known)
        self._lanes.fit_if_due(now)

    def _decide(self, now: float) -> None:
        if not self.waiting or (self._is_timeless and not self._has_changed and not self._was_cut):
            return
        room = Room(
            free_blocks=self.free_blocks,
            num_slots=self.shape.max_running - len(self.running),
            num_tokens=self.num_tokens,
            prefill_tokens=self._pace.starting_tokens if self._pace is not None else None,
            is_prefilling=self._pace is not None and self._pace.num_prefilling > 0,
            overcharged_tokens=self._overcharged_tokens() if self.policy.charges_tokens else 0,
        )
        decision = self.policy.decide(self._facts, self._running_facts, room, now)
        if decision.squash:
            # Who makes room for a head in this step makes it for the next one.
            for request_id in decision.squash:
                self._squash(self.running[request_id], now)
            if not self.running:
                # Then no step will end that could ask again.
                self._decide(now)
            return
        if self.shape.is_mixed and self._make_room(now):
            # As in vLLM, those who run take their blocks first, and nobody starts in a step that has victims.
            self._was_cut = True
            return
        self._start_all(decision, now)
        self._note_full(decision)

    def _overcharged_tokens(self) -> int:
        """As the live engine tells it to policies that charge tokens."""
        held = (
            (request.charged_tokens, max(request.charged_tokens - self._reckoned_tokens(request), 0))
            for request in self.running.values()
        )
        return overcharged_tokens(held, self.host_kv is not None)

    def _reckoned_tokens(self, request: Request) -> int:
        """What it holds now of what it is charged: all but what is still to be answered."""
        return request.base.size_tokens - request.guess.p50 + self._done(request)

    def _start_all(self, decision: Decision, now: float) -> None:
        """As many of them as one step has tokens for, as engines take requests from a queue: none once they are used up."""
        left = self._step_tokens - (self._num_decodes if self.shape.is_mixed else 0)
        if self._pace is not None and self._pace.num_prefilling and decision.request_ids:
            started = (self.start_tokens(self.waiting[request_id]) for request_id in decision.request_ids)
            self._chunk_tokens = self._pace.chunk_tokens(sum(started))
        left -= sum(min(request.num_unfilled, self._chunk_tokens) for request in self._prefilling)
        self._was_cut = False
        num_growing = self._grown(1) if self.shape.is_mixed else 0
        for place, request_id in enumerate(decision.request_ids):
            request = self.waiting[request_id]
            num_tokens = self.start_tokens(request)
            needed = 1 if self.shape.is_mixed or place == 0 else num_tokens
            lacks_blocks = (
                num_growing > 0 and self._facts[request_id].num_blocks > self.free_blocks - num_growing
            )
            if left < needed or lacks_blocks:
                self._was_cut = True
                return
            left -= num_tokens
            del self.waiting[request_id]
            self._start(request, decision.bypassed.get(request_id), now)

    def _note_full(self, decision: Decision) -> None:
        """Who waits for want of time in this step asks again in the next."""
        for request_id, reason in decision.deferred.items():
            if reason == "step_full":
                self._was_cut = True
                base = self.waiting[request_id].base
                self.waiting[request_id].base = msgspec.structs.replace(
                    base, times_deferred=base.times_deferred + 1
                )

    def _start(self, request: Request, passed_id: str | None, now: float) -> None:
        request_id = request.arrival.request_id
        self.policy.admitted(request_id, now)
        self.running[request_id] = request
        self.num_changes += 1
        request.generation += 1
        request.started_s = now
        request.is_bypasser = passed_id is not None
        if request.num_preempted == 0:
            request.first_started_s = now
        self.tally.counts["admitted"] += 1
        if passed_id is not None:
            self._note_bypass(passed_id)
        found = self._pin(request, now)
        request.found_adapter = request.found_adapter or found
        request.num_found = self._cached_tokens(request)
        request.num_blocks = min(self.start_blocks(request), self.free_blocks)
        self._take(request.num_blocks, now)
        if found == "here" or self.shape.assists:
            self._enter(request)
        else:
            self._await_adapter(request)

    def _pin(self, request: Request, now: float) -> str:
        adapter_id = request.arrival.adapter_id
        if adapter_id is None:
            return "here"
        if not self.adapters.is_known(adapter_id):
            self._claim(self.adapters.num_blocks[adapter_id], now)
        return self.adapters.pin(adapter_id, now, self._adapter_ready)

    def _await_adapter(self, request: Request) -> None:
        adapter_id = request.arrival.adapter_id
        assert adapter_id is not None, "only adapters are loaded"
        request.stage = Stage.LOADING
        self._loading.setdefault(adapter_id, []).append(request)

    def _enter(self, request: Request) -> None:
        """It has its blocks and its adapter: its KV comes back, or is computed."""
        if self.host_kv is None or not self.host_kv.held(request.arrival.request_id):
            self._enter_prefill(request, request.num_found)
        elif self.shape.writes_through:
            self._restore(request, self.host_kv)
        else:
            self._copy_in(request, self.host_kv, self.host_kv.held(request.arrival.request_id))

    def _cached_tokens(self, request: Request) -> int:
        """That are still on the device of one that was preempted. vLLM takes free blocks in the order in which they came free."""
        if not request.num_cached:
            return 0
        num_left = max(request.cached_until - self._num_taken - self._grown(1), 0)
        return min(min(request.num_cached, num_left) * BLOCK_TOKENS, request.num_tokens - 1)

    def _enter_prefill(self, request: Request, num_ready: int = 0) -> None:
        """Compute what follows the first `num_ready` tokens."""
        request.stage = Stage.PREFILLING
        request.num_prefilled = num_ready
        request.num_front = 0
        self._prefilling.append(request)

    def _adapter_ready(self, adapter_id: int, now: float) -> None:
        for request in self._loading.pop(adapter_id, ()):
            if self.shape.assists:
                self._join(request)
            else:
                self._enter(request)
        if self.shape.assists:
            self._take_over(adapter_id, now)
        self._copied(now)

    def _copied(self, now: float) -> None:
        """A copy has ended: those who waited for it go on."""
        if self._stalled_since_s is None:
            self._wake(now)
        elif not self._is_held_up:
            self.tally.stalled_s += now - self._stalled_since_s
            self._stalled_since_s = None
            self._form(now)

    def _take_over(self, adapter_id: int, now: float) -> None:
        """If the step under way has the host compute this adapter, the device does the rest. Source: CaraServe §4.1."""
        step = self._step
        if step is None or step.end.at_s <= now:
            return
        if all(request.arrival.adapter_id != adapter_id for request, _ in step.chunks):
            return
        step.left *= (step.end.at_s - now) / (step.end.at_s - step.since_s)
        step.since_s = now
        step.end.cancel()
        seconds = self._mixed_s(step.chunks, step.does_decode)
        step.end = self.clock.at(now + step.left * seconds, self._end_step)

    def _note_bypass(self, head_id: str) -> None:
        self.tally.counts["bypassed"] += 1
        head = self.waiting.get(head_id)
        if head is not None:
            head.base = msgspec.structs.replace(head.base, times_bypassed=head.base.times_bypassed + 1)

    def _squash(self, request: Request, now: float) -> None:
        self.tally.counts["squashed"] += 1
        self.policy.squashed(request.arrival.request_id)
        request.base = msgspec.structs.replace(request.base, times_squashed=request.base.times_squashed + 1)
        self._preempt(request, now)

    def _preempt(self, request: Request, now: float, way: Way = Way.RECOMPUTE) -> None:
        """Out of memory, and back into the queue; what it has answered stays, its KV goes to host memory or is computed anew."""
        is_swapped = self._put_away(request, way)
        num_cached = self._num_kv_tokens(request) // BLOCK_TOKENS if self.shape.finds_cached else 0
        self._leave(request, now)
        request.num_cached, request.cached_until = num_cached, self._num_taken + self._empty_blocks
        request.num_preempted += 1
        self.tally.counts["preempted"] += 1
        request.stage = Stage.WAITING
        request.base = msgspec.structs.replace(
            request.base, is_swapped=is_swapped, size_tokens=request.charged_tokens
        )
        self.waiting[request.arrival.request_id] = request
        if request.arrival.adapter_id is not None:
            self.adapters.waits_again(request.arrival.adapter_id)
        self.policy.arrived(request.base, now)

    def _leave(self, request: Request, now: float) -> None:
        """It holds nothing any more."""
        num_done = self._done(request)
        self.kv_blocks -= self.held_blocks(request)
        if request.stage is Stage.DECODING:
            self._num_decodes -= 1
            self._context -= request.arrival.num_prompt_tokens + num_done
            self._count_rank(request.rank, -1)
        elif request.stage is Stage.PREFILLING:
            self._prefilling.remove(request)
        elif request.stage is Stage.LOADING:
            self._forget_load(request)
        if request.grow_slot >= 0:
            self._growth[request.grow_slot] -= 1
            request.grow_slot = -1
        request.num_done = num_done
        request.num_blocks = 0
        request.generation += 1
        del self.running[request.arrival.request_id]
        self.num_changes += 1
        self.policy.ended(request.arrival.request_id)
        if request.arrival.adapter_id is not None:
            self.adapters.unpin(request.arrival.adapter_id, now)
        self._has_changed = True

    def _forget_load(self, request: Request) -> None:
        """It waits no more for its adapter, which comes all the same."""
        adapter_id = request.arrival.adapter_id
        assert adapter_id is not None, "only adapters are loaded"
        self._loading[adapter_id].remove(request)
        if not self._loading[adapter_id]:
            del self._loading[adapter_id]

    # -- KV in host memory -----------------------------------------------------------------------------------------------

    def _put_away(self, request: Request, way: Way) -> bool:
        """Leave its KV in host memory, or not. Whether the policy counts it as swapped: live, whoever ran before is."""
        if self.host_kv is None:
            return True
        request_id = request.arrival.request_id
        if self.shape.writes_through:
            self.host_kv.save(request_id, self._num_kv_tokens(request) // BLOCK_TOKENS)
            return True
        self.tally.counts["preempted_to_host" if way is Way.SWAP else "preempted_to_compute"] += 1
        if way is Way.RECOMPUTE:
            self.host_kv.drop(request_id)
            return False
        if not self.host_kv.held(request_id):  # else it was still on its way back
            self._num_copies_out += 1
            self.host_kv.copy_out(request_id, self.held_blocks(request), self._copied_out)
        return True

    def _copied_out(self, now: float) -> None:
        self._num_copies_out -= 1
        self._copied(now)

    def _num_kv_tokens(self, request: Request) -> int:
        """That have their KV on the device: all but the last one of those who decode."""
        if request.stage is Stage.DECODING:
            return request.arrival.num_prompt_tokens + self._done(request) - 1
        return request.num_prefilled if request.stage is Stage.PREFILLING else 0

    def _copy_in(self, request: Request, host: HostKv, num_blocks: int) -> None:
        """Bring back so many of its blocks, from the first one that is not computed meanwhile on."""
        request.stage = Stage.SWAPPING
        request.num_loaded = 0
        generation = request.generation
        self._num_copies_in += 1

        def arrived(now: float) -> None:
            self._num_copies_in -= 1
            if request.generation == generation:
                self._loaded(request, host)
            self._copied(now)

        host.copy_in(num_blocks, arrived)

    def _loaded(self, request: Request, host: HostKv) -> None:
        """Its KV is on the device again; the copy in host memory makes room for others."""
        request.num_loaded = host.drop(request.arrival.request_id) * BLOCK_TOKENS
        if not self.shape.writes_through:
            self._join(request)
        elif request.stage is Stage.SWAPPING:
            self._enter_prefill(request, request.num_loaded)

    def _restore(self, request: Request, host: HostKv) -> None:
        """Load what was written through, compute it, or both at once, as the live engine asks when a preempted request may start again."""
        num_held = host.held(request.arrival.request_id)
        decision = host.decide_restore(num_held, request.num_tokens - num_held * BLOCK_TOKENS)
        num_front = getattr(decision, "num_front_blocks", 0)
        way = Way.SPLIT if num_front else Way.SWAP if decision.num_blocks else Way.RECOMPUTE
        self.tally.counts[f"restored by {way.value}"] += 1
        if way is Way.RECOMPUTE:
            host.drop(request.arrival.request_id)
            self._enter_prefill(request)
            return
        self._copy_in(request, host, num_held - num_front)
        if num_front:
            self._enter_prefill(request)
            request.num_front = num_front * BLOCK_TOKENS

    # -- loading ahead ---------------------------------------------------------------------------------------------------

    def _prefetch(self, now: float) -> None:
        """Load adapters of the next requests in order of arrival, as many as one step's prompts have; they displace none of each other's."""
        wanted: dict[int, None] = {}
        num_tokens = 0
        for request in self.waiting.values():
            num_tokens += request.num_tokens
            if num_tokens > self._step_tokens and wanted:
                break
            if request.arrival.adapter_id is not None:
                wanted[request.arrival.adapter_id] = None
        self.adapters.want_next(wanted)
        for adapter_id in wanted:
            self._load_ahead(adapter_id, wanted, now)

    def _load_ahead(self, adapter_id: int, spared: Mapping[int, object], now: float) -> bool:
        if self.adapters.is_known(adapter_id):
            return False
        missing = self.adapters.num_blocks[adapter_id] - self._empty_blocks
        if missing > self.adapters.idle_blocks_beyond(spared):
            return False
        if missing > 0:
            self.adapters.free(missing, now, spared)
        self.adapters.prefetch(adapter_id, now, self._adapter_ready)
        return True

    def _forecast_loads(self, now: float) -> None:
        """Load one of those that are likely to be asked for soon, if the link is idle."""
        if self._forecast is None or self.link.num_transfers:
            return
        likely = dict.fromkeys(a for a, chance in self._forecast.due(now, LEAD_S) if chance >= LIKELY)
        for adapter_id in likely:
            if self._load_ahead(adapter_id, likely, now):
                return

    # -- steps -----------------------------------------------------------------------------------------------------------

    def _wake(self, now: float) -> None:
        """Something came. If steps are under way, the next one begins with a decision."""
        self._has_changed = True
        if self._stalled_since_s is not None:
            return
        step = self._step
        if step is None:
            self._begin(now)
        elif step.num > 1 and step.decoding is not None:
            step.num = step.decoding.steps_until(now - step.began_s, step.num)
            step.end.cancel()
            step.end = self.clock.at(max(step.began_s + step.decoding.total_s(step.num), now), self._end_step)

    def _form(self, now: float) -> None:
        """Begin the next step, or a run of them; nothing if there is nothing to do."""
        does_decode = self._num_decodes > 0 and (self.shape.is_mixed or not self._prefilling)
        if does_decode:
            self._make_room(now)
            if self._is_held_up:
                self._stalled_since_s = now
                return
            does_decode = self._num_decodes > 0
        chunks = self._chunks(self._step_tokens - (self._num_decodes if does_decode else 0))
        if not chunks and not does_decode:
            return
        if chunks:
            decoding, num = None, 1
            seconds = self._mixed_s(chunks, does_decode)
        else:
            decoding = self.cost.decoding(self._num_decodes, self._context, self._ranks_read)
            num = self._num_alike()
            seconds = decoding.total_s(num)
        end = self.clock.at(now + seconds, self._end_step)
        self._step = _Step(now, num, chunks, decoding, does_decode, end, 1.0, now)

    def _chunks(self, num_tokens: int) -> list[tuple[Request, int]]:
        """Of prompts in the order in which they started; whole ones where steps are not mixed, and then at least one."""
        chunks: list[tuple[Request, int]] = []
        for request in self._prefilling:
            left = request.num_unfilled
            if self.shape.is_mixed:
                left = min(left, self._chunk_tokens, num_tokens)
                if left <= 0:
                    break
            elif left > num_tokens and chunks:
                break
            chunks.append((request, left))
            num_tokens -= left
        return chunks

    def _mixed_s(self, chunks: Sequence[tuple[Request, int]], does_decode: bool) -> float:
        parts = [
            Chunk(
                num,
                request.num_prefilled,
                request.rank,
                request.num_prefilled + num >= request.num_tokens,
                not self._has_adapter(request),
            )
            for request, num in chunks
        ]
        if not does_decode:
            return self.cost.step_s(parts)
        return self.cost.step_s(parts, self._num_decodes, self._context, self._ranks_read)

    def _has_adapter(self, request: Request) -> bool:
        adapter_id = request.arrival.adapter_id
        return adapter_id is None or self.adapters.is_here(adapter_id)

    def _num_alike(self) -> int:
        """How many decode steps can be counted together: until something is due, memory lacks, or a policy might change its mind."""
        if self.waiting and (self._has_changed or not self._is_timeless):
            return 1
        while self._due and self._due[0].generation != self._due[0].request.generation:
            heapq.heappop(self._due)
        num = self._due[0].at - self._counter
        free = self.free_blocks
        while num > 1 and self._grown(num) > free:
            num = num // 2
        return num

    def _grown(self, num_steps: int) -> int:
        """Blocks that those who decode need for so many steps more."""
        rounds, rest = divmod(num_steps, BLOCK_TOKENS)
        blocks = rounds * sum(self._growth) if rounds else 0
        for step in range(1, rest + 1):
            blocks += self._growth[(self._counter + step) % BLOCK_TOKENS]
        return blocks

    def _make_room(self, now: float) -> bool:
        """Preempt until the next decode step's KV fits. Whether anybody was."""
        num_preempted = self.tally.counts["preempted"]
        while (missing := self._grown(1) - self.free_blocks) > 0:
            facts = [self._facts_for_preemption(request, now) for request in self._preemptible()]
            plan = self._preemption.plan(
                facts,
                min(missing, sum(each.num_blocks for each in facts)),
                self.host_kv.free_blocks if self.host_kv is not None else 0,
            )
            assert plan.is_enough, "requests that do not fit together were started"
            for victim in plan.victims:
                self._preempt(self.running[victim.request_id], now, victim.way)
        return self.tally.counts["preempted"] > num_preempted

    def _preemptible(self) -> list[Request]:
        """Who started last, where the order is vLLM's, one at a time; else all but who came first (engine_bridge/core/victims.py)."""
        requests = list(self.running.values())
        if self._preemption.order is last_in_first_out:
            return requests[-1:]
        requests.remove(min(requests, key=lambda request: request.arrival.at_s))
        return requests

    def _facts_for_preemption(self, request: Request, now: float) -> RunningFacts:
        num_tokens = request.arrival.num_prompt_tokens + self._done(request)
        facts = RunningFacts(
            request_id=request.arrival.request_id,
            fairness=fair_priority(now - request.arrival.at_s, num_tokens),
            started_s=request.started_s,
            num_blocks=self.held_blocks(request),
            recompute_s=self.cost.prefill_s(num_tokens, request.rank),
        )
        if self.host_kv is None or not (
            request.stage is Stage.DECODING or self.host_kv.held(facts.request_id)
        ):
            return facts
        num_held = num_tokens - 1 if request.stage is Stage.DECODING else num_tokens
        return self.host_kv.with_ways(facts, num_held)

    def _end_step(self, now: float) -> None:
        step = self._step
        assert step is not None, "a step ended that had not begun"
        self._step = None
        self.tally.busy_s += now - step.began_s
        self.tally.counts["steps"] += step.num
        if step.does_decode:
            self._take(self._grown(step.num), now)
            self._counter += step.num
            self._context += step.num * self._num_decodes
            self.tally.counts["decode_tokens"] += step.num * self._num_decodes
        for request, num in step.chunks:
            self._prefilled(request, num, now)
        self._settle(now)
        for request in self._joining:
            self._enter_decoding(request)
        self._joining.clear()
        self._begin(now)

    def _prefilled(self, request: Request, num: int, now: float) -> None:
        self.tally.counts["prefill_tokens"] += num
        request.num_prefilled += num
        if request.num_unfilled > 0:
            return
        self._prefilling.remove(request)
        if request.num_front:
            self._front_computed(request)
            return
        if request.num_done == 0:
            request.first_token_s = now
        request.num_done += 1
        self.tally.counts["first_tokens"] += 1
        self.num_changes += 1
        self._join(request)

    def _front_computed(self, request: Request) -> None:
        """What is behind it comes from host memory, or has come."""
        if request.num_loaded:
            self._enter_prefill(request, request.num_loaded)
        else:
            request.stage = Stage.SWAPPING

    def _join(self, request: Request) -> None:
        """All its KV is there but the last token's: it decodes with the next step, if it has its adapter, or needs none because it is done."""
        if not self._has_adapter(request) and request.num_done < request.arrival.num_answer_tokens:
            self._await_adapter(request)
        elif self._step is None:
            self._enter_decoding(request)
        else:
            self._joining.append(request)

    def _enter_decoding(self, request: Request) -> None:
        request.stage = Stage.DECODING
        request.decodes_from = self._counter
        self._num_decodes += 1
        self._context += request.num_tokens
        self._count_rank(request.rank, 1)
        self._plan(request, "end", request.arrival.num_answer_tokens - request.num_done)
        self._plan(request, "outgrown", max(request.guess.p50 - request.num_done, 0))
        room = request.num_blocks * BLOCK_TOKENS - request.num_tokens
        self._plan(request, "grow", max(room + 1, 0))

    def _count_rank(self, rank: int, change: int) -> None:
        if rank:
            self._num_by_rank[rank] += change
            self._ranks_read = self.cost.kernel(self._num_by_rank)

    def _plan(self, request: Request, what: str, in_steps: int) -> None:
        due = _Due(self._counter + in_steps, next(self._order), what, request, request.generation)
        heapq.heappush(self._due, due)

    def _settle(self, now: float) -> None:
        """What is due by now: ends first in order of planning, since whoever has ended does not grow."""
        while self._due and self._due[0].at <= self._counter:
            due = heapq.heappop(self._due)
            if due.generation != due.request.generation:
                continue
            if due.what == "end":
                self._end(due.request, now)
            elif due.what == "grow":
                slot = due.request.grow_slot = (self._counter + 1) % BLOCK_TOKENS
                self._growth[slot] += 1
            else:
                self._outgrown(due.request)

    def _outgrown(self, request: Request) -> None:
        """It has as many tokens as were reckoned with, so that more are from now on."""
        num_done = self._done(request)
        bound = request.guess.bound(num_done)
        size = request.base.size_tokens + bound - request.guess.p50
        if size > request.charged_tokens:
            request.charged_tokens = size
            self.policy.outgrew(request.arrival.request_id, size)
            self._has_changed = True
        self._plan(request, "outgrown", max(bound - num_done, 1))

    def _end(self, request: Request, now: float) -> None:
        self._leave(request, now)
        request.stage = Stage.ENDED
        request.ended_s = now
        self.ended.append(request)
        took_s = now - request.started_s
        self._token_s += SMOOTHING * (took_s / request.num_done - self._token_s)
        self._guesser.ended(request.arrival)
        if self._lanes is not None:
            self._lanes.saw(request.num_tokens, took_s, request.sizes, now)

    # -- checks ----------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raises AssertionError if blocks or requests are lost, or counted twice."""
        self.adapters.check_invariants()
        if self.host_kv is not None:
            self.host_kv.check_invariants()
            on_its_way = {i for i, r in self.running.items() if r.stage is not Stage.DECODING}
            assert self.host_kv.holders() <= self.waiting.keys() | on_its_way, "KV kept for nobody"
        assert self.kv_blocks == sum(map(self.held_blocks, self.running.values())), "blocks lost"
        assert 0 <= self._empty_blocks <= self.num_blocks, "more blocks than there are"
        decoding = [request for request in self.running.values() if request.stage is Stage.DECODING]
        assert self._num_decodes == len(decoding), "decodes"
        assert all(map(self._has_adapter, decoding)), "decodes without its adapter"
        assert self._context == sum(r.arrival.num_prompt_tokens + self._done(r) for r in decoding), "context"
        by_rank = Counter(r.rank for r in decoding if r.rank)
        assert +self._num_by_rank == by_rank and self._ranks_read == self.cost.kernel(by_rank), "ranks"
        assert sum(self._growth) == sum(r.grow_slot >= 0 for r in decoding), "growth"


def pool_blocks(cost: StepCost) -> int:
    """Blocks for KV and adapters: what the weights and a step's activations leave of the memory. Raises ValueError if that is nothing."""
    gpu, model = cost.gpu, cost.model
    left = int(gpu.memory_bytes * gpu.usable_share) - model.weight_bytes - ACTIVATION_BYTES
    num_blocks = left // (BLOCK_TOKENS * model.kv_bytes_per_token)
    if num_blocks < 1:
        raise ValueError(f"{model.name} does not fit {gpu.name}")
    return num_blocks
