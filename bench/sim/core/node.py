"""A serving node in virtual time: continuous batching over one device, its memory in blocks, adapters, and one link to the host.

The node is hardware and bookkeeping. Who starts, who waits, who may pass and who is squashed is asked of a `QueuePolicy`; who is preempted
when memory runs out, of a `Preemption`; which unused adapter leaves, of an `EvictionPolicy`. They are told what the live engine tells them
(engine_bridge/driver/scheduling): facts at arrival, `admitted`, `outgrew`, `squashed`, `ended`, and refits of lanes.

Whatever needs a decision is decided before each step. Steps that only decode, while nobody waits whom the policy might start, are counted together
up to the next end, growth or lack of memory; what comes in between cuts the run at the end of the step that it meets.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from bench.sim.core.adapters import Adapters
from bench.sim.core.clock import Clock, Event
from bench.sim.core.lane_fits import LaneFits
from bench.sim.core.links import SharedLink
from bench.sim.core.requests import Arrival, Guesser, Request, Stage
from bench.sim.core.steps import Chunk, Decoding, StepCost
from engine_bridge.policy.adapter_cache import EvictionPolicy
from engine_bridge.policy.admission import (
    Decision,
    Fcfs,
    Priority,
    QueuePolicy,
    Room,
    Running,
    Sjf,
    Waiting,
)
from engine_bridge.policy.arrivals import Arrivals
from engine_bridge.policy.preemption import POLICIES as PREEMPTIONS
from engine_bridge.policy.preemption import Preemption, RunningFacts

BLOCK_TOKENS = 16
# What a step's activations take. Chosen.
ACTIVATION_BYTES = 10**9
# Seconds of a token before any was measured, and how fast that is corrected. As in the live engine.
PRIOR_TOKEN_S, SMOOTHING = 0.02, 0.1
# Forecasts: how far ahead, and from which probability on. As measured by bench.sim.adapter_cache.
LEAD_S, LIKELY = 10.0, 0.5
# These decide the same for the same facts, whatever the time: they need no asking while nothing has changed.
TIMELESS = (Fcfs, Sjf, Priority)


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine forms its steps.

    step_tokens: in one step at most, None for a sixth of the memory's. Who may start and finds none left waits until it may again. is_mixed: prompts
    are computed in chunks beside those that decode; else whole, in steps of their own. reserves_answer: a start takes blocks for the predicted
    answer, too. loads_block: while the adapter of a request that has started is on its way, no step runs.
    """

    name: str
    step_tokens: int | None
    is_mixed: bool
    reserves_answer: bool
    loads_block: bool
    max_running: int


SLORA = Shape("s-lora", None, False, True, True, 1000)
"""Source: S-LoRA/S-LoRA at 18895fa, slora/server/router: new requests' adapters are awaited before their prefill, which is a step of its own;
a request joins if it fits with its whole answer; a batch of prompts has a sixth of all tokens. Departs in joining before every step (Chameleon §4),
not every tenth, and in that answers are reserved as predicted, as nobody knows them."""
VLLM = Shape("vllm", 2048, True, False, False, 256)
"""vLLM's default step and number of requests; a request whose adapter is on its way waits for it alone, as the live engine has it."""


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
            base = request.base = msgspec.structs.replace(
                base, num_blocks=num_blocks, adapter_blocks=adapter_blocks
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
    """One step, or a run of `num` that only decode. chunks: of which prompts how many tokens."""

    began_s: float
    num: int
    chunks: list[tuple[Request, int]]
    decoding: Decoding | None
    does_decode: bool
    end: Event


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
        lanes: fits the lanes of an `Mlq`; None for other policies.
        eviction: which unused adapter leaves first; None for no cache.
        adapter_ranks: by adapter id.
        forecast: foretells adapters that will be asked for, None without.
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
    ) -> None:
        gpu, model = cost.gpu, cost.model
        self.clock, self.cost, self.shape, self.policy = clock, cost, shape, policy
        self.num_blocks = pool_blocks(cost)
        self.num_tokens = self.num_blocks * BLOCK_TOKENS
        self.link = SharedLink(clock, gpu.achieved_link_bytes_per_s, gpu.load_setup_s)
        block_bytes = BLOCK_TOKENS * model.kv_bytes_per_token
        sizes = [model.lora_bytes(rank) for rank in adapter_ranks]
        self.adapters = Adapters(sizes, block_bytes, eviction, self.link)
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.tally = Tally()
        self.kv_blocks = 0
        self._step_tokens = shape.step_tokens or max(self.num_tokens // 6, model.max_tokens)
        self._ranks = adapter_ranks
        self._guesser, self._lanes, self._preemption = guesser, lanes, preemption
        self._forecast = forecast
        self._is_timeless = isinstance(policy, TIMELESS)
        self._facts, self._running_facts = _Facts(self), _RunningFacts(self)
        self._prefilling: deque[Request] = deque()
        self._loading: dict[int, list[Request]] = {}
        self._step: _Step | None = None
        self._stalled_since_s: float | None = None
        self._has_changed = True
        self._was_cut = False
        self._token_s = PRIOR_TOKEN_S
        # Those that decode: they go in step, so one counter of steps says how far each is.
        self._counter = 0
        self._num_decodes = 0
        self._context = 0
        self._sum_rank = 0
        self._growth = [0] * BLOCK_TOKENS
        self._due: list[_Due] = []
        self._order = itertools.count()

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, arrival: Arrival) -> None:
        """It comes now. Raises ValueError if it would not fit an empty device."""
        now = self.clock.now
        self._refit(now)
        request = self._accepted(arrival, now)
        self.waiting[arrival.request_id] = request
        if arrival.adapter_id is not None:
            self.adapters.asked_for(arrival.adapter_id, now)
            if self._forecast is not None:
                self._forecast.arrived(arrival.adapter_id, now)
        self.policy.arrived(request.base, now)
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

    def start_blocks(self, request: Request) -> int:
        """Of KV, that its start takes: the prompt's and what was answered before, the next token's, and the answer's if that is reserved."""
        num_answer = request.num_done + 1
        if self.shape.reserves_answer:
            num_answer = max(num_answer, request.guess.p50)
        return (request.arrival.num_prompt_tokens + num_answer) // BLOCK_TOKENS + 1

    def start_tokens(self, request: Request) -> int:
        """That its start has to compute."""
        return request.num_tokens

    def held_blocks(self, request: Request) -> int:
        """Of KV, now."""
        if request.grow_slot < 0:
            return request.num_blocks
        return (request.arrival.num_prompt_tokens + self._done(request)) // BLOCK_TOKENS + 1

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
        used = self.kv_blocks + self.adapters.used_blocks
        self.tally.most_blocks = max(self.tally.most_blocks, used)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """The engine is free: decide who starts, and run the next step if there is something to do."""
        self._refit(now)
        self._decide(now)
        if self.waiting and self._has_changed:
            self._prefetch(now)
        self._has_changed = False
        self._forecast_loads(now)
        if self.shape.loads_block and self._loading:
            self._stalled_since_s = now
            return
        self._form(now)

    def _refit(self, now: float) -> None:
        if self._lanes is not None and self._lanes.is_due(now):
            known = {i: r.sizes for group in (self.waiting, self.running) for i, r in group.items()}
            self._lanes.refit(self.policy, known, now)
            self._has_changed = True

    def _decide(self, now: float) -> None:
        if not self.waiting or (self._is_timeless and not self._has_changed and not self._was_cut):
            return
        room = Room(
            free_blocks=self.free_blocks,
            num_slots=self.shape.max_running - len(self.running),
            num_tokens=self.num_tokens,
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
        self._start_all(decision, now)

    def _start_all(self, decision: Decision, now: float) -> None:
        """As many of them as one step has tokens for, as engines take requests from a queue: none once they are used up."""
        left = self._step_tokens - (self._num_decodes if self.shape.is_mixed else 0)
        left -= sum(request.num_tokens - request.num_prefilled for request in self._prefilling)
        self._was_cut = False
        for place, request_id in enumerate(decision.request_ids):
            request = self.waiting[request_id]
            num_tokens = self.start_tokens(request)
            needed = 1 if self.shape.is_mixed or place == 0 else num_tokens
            if left < needed:
                self._was_cut = True
                return
            left -= num_tokens
            del self.waiting[request_id]
            self._start(request, decision.bypassed.get(request_id), now)

    def _start(self, request: Request, passed_id: str | None, now: float) -> None:
        request_id = request.arrival.request_id
        self.policy.admitted(request_id, now)
        self.running[request_id] = request
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
        request.num_blocks = min(self.start_blocks(request), self.free_blocks)
        self._take(request.num_blocks, now)
        if found == "here":
            self._enter_prefill(request)

    def _pin(self, request: Request, now: float) -> str:
        adapter_id = request.arrival.adapter_id
        if adapter_id is None:
            return "here"
        if not self.adapters.is_known(adapter_id):
            self._claim(self.adapters.num_blocks[adapter_id], now)
        found = self.adapters.pin(adapter_id, now, self._adapter_ready)
        if found != "here":
            request.stage = Stage.LOADING
            self._loading.setdefault(adapter_id, []).append(request)
        return found

    def _enter_prefill(self, request: Request) -> None:
        request.stage = Stage.PREFILLING
        request.num_prefilled = 0
        self._prefilling.append(request)

    def _adapter_ready(self, adapter_id: int, now: float) -> None:
        for request in self._loading.pop(adapter_id, ()):
            self._enter_prefill(request)
        if self._stalled_since_s is not None:
            if not self._loading:
                self.tally.stalled_s += now - self._stalled_since_s
                self._stalled_since_s = None
                self._form(now)
            return
        self._wake(now)

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

    def _preempt(self, request: Request, now: float) -> None:
        """Out of memory, and back into the queue; what it has answered stays, its KV is computed anew."""
        self._leave(request, now)
        request.num_preempted += 1
        self.tally.counts["preempted"] += 1
        request.stage = Stage.WAITING
        request.base = msgspec.structs.replace(
            request.base, is_swapped=True, size_tokens=request.charged_tokens
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
            self._sum_rank -= request.rank
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
            does_decode = self._num_decodes > 0
        chunks = self._chunks(self._step_tokens - (self._num_decodes if does_decode else 0))
        if not chunks and not does_decode:
            return
        if chunks:
            decoding, num = None, 1
            seconds = self._mixed_s(chunks, does_decode)
        else:
            decoding = self.cost.decoding(self._num_decodes, self._context, self._sum_rank)
            num = self._num_alike()
            seconds = decoding.total_s(num)
        end = self.clock.at(now + seconds, self._end_step)
        self._step = _Step(now, num, chunks, decoding, does_decode, end)

    def _chunks(self, num_tokens: int) -> list[tuple[Request, int]]:
        """Of prompts in the order in which they started; whole ones where steps are not mixed, and then at least one."""
        chunks: list[tuple[Request, int]] = []
        for request in self._prefilling:
            left = request.num_tokens - request.num_prefilled
            if self.shape.is_mixed:
                left = min(left, num_tokens)
                if left <= 0:
                    break
            elif left > num_tokens and chunks:
                break
            chunks.append((request, left))
            num_tokens -= left
        return chunks

    def _mixed_s(self, chunks: Sequence[tuple[Request, int]], does_decode: bool) -> float:
        parts = [
            Chunk(num, request.num_prefilled, request.rank, request.num_prefilled + num >= request.num_tokens)
            for request, num in chunks
        ]
        if not does_decode:
            return self.cost.step_s(parts)
        return self.cost.step_s(parts, self._num_decodes, self._context, self._sum_rank)

    def _num_alike(self) -> int:
        """How many decode steps can be counted together: until something is due, memory lacks, or a policy might change its mind."""
        if self.waiting and not self._is_timeless:
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

    def _make_room(self, now: float) -> None:
        """Preempt until the next decode step's KV fits."""
        while (missing := self._grown(1) - self.free_blocks) > 0:
            facts = [self._facts_for_preemption(request, now) for request in self.running.values()]
            plan = self._preemption.plan(facts, missing, 0)
            assert plan.is_enough, "requests that do not fit together were started"
            for victim in plan.victims:
                self._preempt(self.running[victim.request_id], now)

    def _facts_for_preemption(self, request: Request, now: float) -> RunningFacts:
        num_tokens = request.arrival.num_prompt_tokens + self._done(request)
        return RunningFacts(
            request_id=request.arrival.request_id,
            fairness=max(now - request.arrival.at_s, 0.0) / num_tokens,
            started_s=request.started_s,
            num_blocks=self.held_blocks(request),
            recompute_s=self.cost.prefill_s(num_tokens, request.rank),
        )

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
        self._begin(now)

    def _prefilled(self, request: Request, num: int, now: float) -> None:
        self.tally.counts["prefill_tokens"] += num
        request.num_prefilled += num
        if request.num_prefilled < request.num_tokens:
            return
        self._prefilling.remove(request)
        if request.num_done == 0:
            request.first_token_s = now
        request.num_done += 1
        self.tally.counts["first_tokens"] += 1
        request.stage = Stage.DECODING
        request.decodes_from = self._counter
        self._num_decodes += 1
        self._context += request.num_tokens
        self._sum_rank += request.rank
        self._plan(request, "end", request.arrival.num_answer_tokens - request.num_done)
        self._plan(request, "outgrown", max(request.guess.p50 - request.num_done, 0))
        room = request.num_blocks * BLOCK_TOKENS - request.num_tokens
        self._plan(request, "grow", max(room - 1, 0))

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
        assert self.kv_blocks == sum(map(self.held_blocks, self.running.values())), "blocks lost"
        assert 0 <= self._empty_blocks <= self.num_blocks, "more blocks than there are"
        decoding = [request for request in self.running.values() if request.stage is Stage.DECODING]
        assert self._num_decodes == len(decoding), "decodes"
        assert self._context == sum(r.arrival.num_prompt_tokens + self._done(r) for r in decoding), "context"
        assert self._sum_rank == sum(r.rank for r in decoding), "ranks"
        assert sum(self._growth) == sum(r.grow_slot >= 0 for r in decoding), "growth"


def pool_blocks(cost: StepCost) -> int:
    """Blocks for KV and adapters: what the weights and a step's activations leave of the memory. Raises ValueError if that is nothing."""
    gpu, model = cost.gpu, cost.model
    left = int(gpu.memory_bytes * gpu.usable_share) - model.weight_bytes - ACTIVATION_BYTES
    num_blocks = left // (BLOCK_TOKENS * model.kv_bytes_per_token)
    if num_blocks < 1:
        raise ValueError(f"{model.name} does not fit {gpu.name}")
    return num_blocks
