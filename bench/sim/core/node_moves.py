"""What goes in and out of a node's device: adapters, and the KV of those who are preempted and come back."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bench.sim.core.host_kv import HostKv
from bench.sim.core.node_steps import NodeSteps
from bench.sim.core.requests import Request, Stage
from bench.sim.core.shapes import BLOCK_TOKENS
from engine_bridge.policy.fairness import fair_priority
from engine_bridge.policy.preemption import RunningFacts, last_in_first_out
from engine_bridge.policy.ways_back import Way

# Forecasts: how far ahead, and from which probability on. As measured by bench.sim.adapter_cache.
LEAD_S, LIKELY = 10.0, 0.5


class NodeMoves(NodeSteps):
    """Gives memory to requests that start, and takes it from victims. Which victims, a `Preemption` says."""

    # -- victims -------------------------------------------------------------------------------------------------------

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

    # -- KV in host memory ---------------------------------------------------------------------------------------------

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
            num_filled = -(-self._num_kv_tokens(request) // BLOCK_TOKENS)
            self.host_kv.copy_out(request_id, num_filled, self._copied_out)
        return True

    def _copied_out(self, now: float) -> None:
        self._num_copies_out -= 1
        self._copied(now)

    def _enter(self, request: Request) -> None:
        """It has its blocks and its adapter: its KV comes back, or is computed."""
        if self.host_kv is None or not self.host_kv.held(request.arrival.request_id):
            self._enter_prefill(request, request.num_found)
        elif self.shape.writes_through:
            self._restore(request, self.host_kv)
        else:
            self._copy_in(request, self.host_kv, self.host_kv.held(request.arrival.request_id))

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

    # -- adapters ------------------------------------------------------------------------------------------------------

    def _pin(self, request: Request, now: float) -> str:
        adapter_id = request.arrival.adapter_id
        if adapter_id is None:
            return "here"
        if not self.adapters.is_known(adapter_id):
            self._claim(self.adapters.num_blocks[adapter_id], now)
        return self.adapters.pin(adapter_id, now, self._adapter_ready)

    def _adapter_ready(self, adapter_id: int, now: float) -> None:
        for request in self._loading.pop(adapter_id, ()):
            if self.shape.assists:
                self._join(request)
            else:
                self._enter(request)
        if self.shape.assists:
            self._take_over(adapter_id, now)
        self._copied(now)

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
