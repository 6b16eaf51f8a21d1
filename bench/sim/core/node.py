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

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from bench.sim.core.clock import Clock
from bench.sim.core.host_kv import HostMemory
from bench.sim.core.lane_fits import LaneFits
from bench.sim.core.node_moves import NodeMoves
from bench.sim.core.node_state import NodeState
from bench.sim.core.requests import Arrival, Guesser, Request, Stage
from bench.sim.core.shapes import BLOCK_TOKENS, Shape
from bench.sim.core.steps import StepCost
from engine_bridge.core.dispatcher import PRIOR_TOKEN_S, SMOOTHING
from engine_bridge.policy.adapter_cache import EvictionPolicy
from engine_bridge.policy.arrivals import Arrivals
from engine_bridge.policy.pacing import StepPace, pace
from engine_bridge.policy.preemption import POLICIES as PREEMPTIONS
from engine_bridge.policy.preemption import Preemption
from engine_bridge.policy.queue import Decision, QueuePolicy, Room, Running, Waiting
from engine_bridge.policy.quotas import overcharged_tokens


class _Facts(Mapping[str, Waiting]):
    """What waits, with what it needs by now."""

    def __init__(self, node: NodeState) -> None:
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

    def __init__(self, node: NodeState) -> None:
        self._node = node

    def __getitem__(self, request_id: str) -> Running:
        request = self._node.running[request_id]
        return Running(
            request_id=request_id,
            num_blocks=self._node.held_blocks(request),
            predicted_end_s=request.started_s + request.base.duration_s,
            is_bypasser=request.is_bypasser,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._node.running)

    def __len__(self) -> int:
        return len(self._node.running)


class Node(NodeMoves):
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
        super().__init__(
            clock,
            cost,
            shape,
            policy,
            eviction=eviction,
            adapter_ranks=adapter_ranks,
            preemption=preemption,
            forecast=forecast,
            has_all_adapters=has_all_adapters,
            num_blocks=num_blocks,
            host_memory=host_memory,
        )
        self._came: list[Request] = []  # of those that wait, those that the policy does not know yet
        self._ranks, self._guesser, self._lanes = adapter_ranks, guesser, lanes
        self._is_timeless = policy.is_timeless
        self._facts, self._running_facts = _Facts(self), _RunningFacts(self)
        self._was_cut = False
        self._pace: StepPace | None = None
        self._token_s = PRIOR_TOKEN_S

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
