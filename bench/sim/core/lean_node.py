"""A serving node in virtual time, lean enough for many: continuous batching as vLLM does it, on one device with its memory in blocks.

The node is hardware and bookkeeping. Who starts, who is squashed and who is preempted when memory runs out is asked of the live engine's
`Dispatcher`, which is told what the live engine tells it (engine_bridge/driver/scheduling). `bench.emulated` has vLLM's own scheduler in its place
(`python -m bench.emulated agree` compares them), with adapters that are loaded and KV that waits in host memory; here adapters are at hand and cost
time alone, and whoever is preempted is computed anew but for blocks that nobody has overwritten.

Steps that only decode, while nobody waits whom the policy might start, are counted together up to the next end, growth, look or lack of memory; what
comes in between cuts the run at the end of the step that it meets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.sim.core.batch import Decoders, Part, Prompts, Request, Stage
from bench.sim.core.clock import Clock, Event
from bench.sim.core.requests import Arrival, Guesser
from bench.sim.core.shapes import BLOCK_TOKENS, Shape, pool_blocks
from bench.sim.core.steps import Chunk, Decoding, StepCost
from engine_bridge.core.scheduling import dispatcher
from engine_bridge.core.scheduling.dispatcher import Dispatcher, StepPlan, StepView
from engine_bridge.core.scheduling.refits import REFIT_EVERY_S, Refits, Work
from engine_bridge.policy.scheduling.queue_policy import QueuePolicy

# While somebody waits and nothing runs, the policy is asked again so often. As the engine thread does (engine_bridge/bridge.py, FIRST_WAIT_S).
STUCK_WAIT_S = 0.001


@dataclass(slots=True)
class Step:
    """One step, or a run of `num` that only decode."""

    began_s: float
    num: int
    parts: list[Part]
    decoding: Decoding | None
    does_decode: bool
    end: Event


@dataclass(slots=True)
class Tally:
    """Of a whole run. counts: steps, decode_tokens, prefill_tokens, first_tokens; who started and was preempted, the dispatcher counts."""

    counts: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    stalled_s: float = 0.0
    most_blocks: int = 0


class _Engine:
    """The node as the dispatcher asks it."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def _request(self, request_id: str) -> Request:
        return self._node.waiting.get(request_id) or self._node.running[request_id]

    def is_ready(self, request_id: str) -> bool:
        return True

    def num_tokens(self, request_id: str) -> int:
        request = self._request(request_id)
        return request.arrival.num_prompt_tokens + self._node.decoders.num_done(request)

    def start_blocks(self, request_id: str) -> int:
        return self._node.start_blocks(self._request(request_id))

    def shared_tokens(self, request_id: str) -> int:
        return 0

    def held_blocks(self, request_id: str) -> int:
        return self.num_tokens(request_id) // BLOCK_TOKENS + 1  # as the driver says it

    def num_cached_tokens(self, request_id: str) -> int:
        request = self._request(request_id)
        return request.num_tokens - self._node.start_tokens(request)

    def missing_adapter_bytes(self, adapter_id: int) -> int:
        return 0


class Node:
    """One device with its model.

    Args:
        policy: who starts; told everything by the dispatcher.
        adapter_ranks: by adapter id; all adapters lie in memory of their own.
        num_blocks: of device memory for KV; None: what the model leaves.
        refit_every_s: how often lanes are fitted at the least.

    Raises:
        ValueError: a model that does not fit.
    """

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        shape: Shape,
        policy: QueuePolicy,
        guesser: Guesser,
        *,
        adapter_ranks: Sequence[int] = (),
        num_blocks: int | None = None,
        refit_every_s: float = REFIT_EVERY_S,
    ) -> None:
        self.clock, self.cost, self.shape = clock, cost, shape
        self.num_blocks = pool_blocks(cost) if num_blocks is None else num_blocks
        self.kv_blocks = 0
        """That requests hold."""
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.tally = Tally()
        self.num_changes = 0
        """Counts requests that came, started, began to answer and left: while it stays, so do the facts about them."""
        self.prompts, self.decoders = Prompts(shape), Decoders(cost.kernel)
        self._ranks, self._guesser = adapter_ranks, guesser
        self._fits: list[Work] = []
        self.dispatcher = Dispatcher(
            policy,
            _Engine(self),
            Refits(self._fits.append, lambda: None, now=clock.now, every_s=refit_every_s),
            num_tokens=self.num_blocks * BLOCK_TOKENS,
        )
        self._is_timeless = policy.is_timeless
        # Else the dispatcher need not be told how far everybody is.
        self._tells_all = policy.charges_tokens
        self._has_changed = True
        self._will_ask = self._has_fitted = False
        self._num_taken = 0  # blocks, ever
        self._step: Step | None = None
        self._came: list[Request] = []  # of those that wait, those that the dispatcher does not know yet
        self._looks: list[Request] = []  # those whose length it is to be told

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, arrival: Arrival) -> None:
        """It comes now. Raises ValueError if it would not fit an empty device."""
        num_tokens = arrival.num_prompt_tokens + arrival.num_answer_tokens
        if num_tokens // BLOCK_TOKENS + 2 > self.num_blocks:
            raise ValueError(f"{num_tokens} tokens do not fit the device")
        rank = self._ranks[arrival.adapter_id] if arrival.adapter_id is not None else 0
        request = self.waiting[arrival.request_id] = Request(arrival, rank)
        self.num_changes += 1
        self._came.append(request)
        self._wake(self.clock.now)

    def start_blocks(self, request: Request) -> int:
        """Of KV, that its start takes: for the prompt and what was answered before."""
        return -(-request.num_tokens // BLOCK_TOKENS)

    def start_tokens(self, request: Request) -> int:
        """That its start has to compute."""
        return request.num_tokens - self._cached_tokens(request)

    def _cached_tokens(self, request: Request) -> int:
        """That are still on the device of one that was preempted. vLLM takes free blocks in the order in which they came free."""
        if not request.num_cached:
            return 0
        num_left = max(request.cached_until - self._num_taken - self.decoders.grown(1), 0)
        return min(min(request.num_cached, num_left) * BLOCK_TOKENS, request.num_tokens - 1)

    def _take_in(self, now: float) -> None:
        """As live: what came during a step is told after it."""
        for request in self._came:
            arrival = request.arrival
            self.dispatcher.arrived(
                dispatcher.Arrival(
                    request_id=arrival.request_id,
                    num_prompt_tokens=arrival.num_prompt_tokens,
                    guess=self._guesser.guess(arrival),
                    priority=arrival.priority,
                    tenant=arrival.tenant,
                    adapter_id=arrival.adapter_id,
                    rank=request.rank,
                ),
                now,
            )
        self._came.clear()

    def _preempt(self, request: Request, now: float) -> None:
        """Out of memory, and back into the queue; what it has answered stays, its KV is computed anew."""
        num_cached = self.decoders.num_kv_tokens(request) // BLOCK_TOKENS
        self._leave(request, now)
        request.num_cached, request.cached_until = num_cached, self._num_taken + self._empty_blocks
        request.num_preempted += 1
        request.stage = Stage.WAITING
        self.waiting[request.arrival.request_id] = request
        self.dispatcher.preempted(request.arrival.request_id)

    def _leave(self, request: Request, now: float) -> None:
        """It holds nothing any more."""
        self.kv_blocks -= self.decoders.held_blocks(request)
        if request.stage is Stage.DECODING:
            self.decoders.leave(request)
        else:
            self.prompts.leave(request)
        request.num_blocks = 0
        request.generation += 1
        del self.running[request.arrival.request_id]
        self.num_changes += 1
        self._has_changed = True

    def _end(self, request: Request, now: float) -> None:
        self._leave(request, now)
        request.stage = Stage.ENDED
        request.ended_s = now
        self.ended.append(request)
        self.dispatcher.ended(request.arrival.request_id, request.num_done, True, now)
        self._guesser.ended(request.arrival)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _wake(self, now: float) -> None:
        """Something came. If steps are under way, the next one begins with a decision."""
        self._has_changed = True
        step = self._step
        if step is None:
            self._begin(now)
        elif step.num > 1 and step.decoding is not None:
            step.num = step.decoding.steps_until(now - step.began_s, step.num)
            step.end.cancel()
            step.end = self.clock.at(max(step.began_s + step.decoding.total_s(step.num), now), self._end_step)

    def _begin(self, now: float) -> None:
        """The engine is free: decide who starts, and run the next step if there is something to do."""
        self._take_in(now)
        is_asked = self._has_changed or bool(self._looks) or not self._is_timeless
        plan = self._ask(now) if is_asked else StepPlan()
        # As in vLLM, those who run take their blocks first, and nobody starts in a step that has victims.
        has_victims = self.shape.is_mixed and self._make_room(now)
        if is_asked:
            started = [] if has_victims else self._start_all(plan.request_ids, now)
            self._has_changed |= len(started) < len(plan.request_ids)
            self.dispatcher.end_step(started, now)
        self._form(now)

    def _ask(self, now: float) -> StepPlan:
        looked_at = [request for request in self._looks if request.stage is Stage.DECODING]
        self._looks.clear()
        view = StepView(
            running=self.decoders.progress(self.running.values() if self._tells_all else looked_at),
            free_blocks=self.free_blocks,
            num_slots=self.shape.max_running - len(self.running),
        )
        plan = self.dispatcher.begin_step(view, now)
        # As live: what is fitted beside one step is there for the next.
        fits, self._fits[:] = list(self._fits), []
        self._has_fitted = bool(fits)
        for fit in fits:
            fit()
        for request in looked_at:
            if known := self.dispatcher.known(request.arrival.request_id):
                self.decoders.plan_look(request, known.next_look_tokens)
        # Who is not known to be ready yet asks again in the next step.
        self._has_changed = len(self.dispatcher.unready) > 0
        for request_id in plan.squash:
            self.dispatcher.squashed(request_id)
            self._preempt(self.running[request_id], now)
        return plan

    def _start_all(self, request_ids: Sequence[str], now: float) -> list[str]:
        """As many of them as the step has tokens and blocks for."""
        if not request_ids:
            return []
        requests = [self.waiting[request_id] for request_id in request_ids]
        num_most = self.prompts.startable(map(self.start_tokens, requests), self.decoders.num)
        num_growing = self.decoders.grown(1) if self.shape.is_mixed else 0
        for num, request in enumerate(requests[:num_most]):
            if self.start_blocks(request) > self.free_blocks - num_growing:
                return list(request_ids[:num])
            self._start(request, now)
        return list(request_ids[:num_most])

    def _start(self, request: Request, now: float) -> None:
        request_id = request.arrival.request_id
        del self.waiting[request_id]
        self.running[request_id] = request
        self.num_changes += 1
        request.generation += 1
        if request.num_preempted == 0:
            request.first_started_s = now
        request.num_prefilled = self._found_tokens(request, now)
        request.num_blocks = self.start_blocks(request)
        self._take(request.num_blocks)
        self.prompts.enter(request)

    def _found_tokens(self, request: Request, now: float) -> int:
        """Of one that starts: leading ones that are not computed."""
        return self._cached_tokens(request)

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """That no request holds."""
        return self.num_blocks - self.kv_blocks

    @property
    def _empty_blocks(self) -> int:
        """Of these, with nothing in them that is worth keeping."""
        return self.free_blocks

    def _take(self, num_blocks: int) -> None:
        self.kv_blocks += num_blocks
        self._num_taken += num_blocks
        self.tally.most_blocks = max(self.tally.most_blocks, self.kv_blocks)

    def _make_room(self, now: float) -> bool:
        """Preempt until the next decode step's KV fits. Whether anybody was."""
        if self.decoders.grown(1) <= self.free_blocks:
            return False
        # The last is the first victim.
        order = self.dispatcher.victims(self.decoders.progress(self.running.values()), now) or list(
            self.running
        )
        while self.decoders.grown(1) > self.free_blocks:
            self._preempt(self.running[order.pop()], now)
        return True

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _form(self, now: float) -> None:
        """Begin the next step, or a run of them; nothing if there is nothing to do."""
        decoders, is_mixed = self.decoders, self.shape.is_mixed
        does_decode = decoders.num > 0 and (is_mixed or not self.prompts)
        if does_decode and not is_mixed:
            self._make_room(now)
            does_decode = decoders.num > 0
        decoding, num = None, 1
        if parts := self.prompts.parts(decoders.num if does_decode else 0):
            seconds = self._mixed_s(parts, does_decode)
        elif does_decode:
            decoding = self.cost.decoding(decoders.num, decoders.num_context, decoders.ranks_read)
            num = self._num_alike(decoding)
            seconds = decoding.total_s(num)
        else:
            self._ask_later(now)
            return
        end = self.clock.at(now + seconds, self._end_step)
        self._step = Step(now, num, parts, decoding, does_decode, end)

    def _ask_later(self, now: float) -> None:
        """Nothing runs, and somebody may wait who could start by then."""
        if self.waiting and (self._has_changed or not self._is_timeless) and not self._will_ask:
            self._will_ask = True
            self.clock.at(now + STUCK_WAIT_S, self._ask_again)

    def _ask_again(self, now: float) -> None:
        self._will_ask = False
        if self._step is None:
            self._begin(now)

    def _mixed_s(self, parts: Sequence[Part], does_decode: bool) -> float:
        chunks = [
            Chunk(num, request.num_prefilled, request.rank, num >= request.num_unfilled)
            for request, num in parts
        ]
        if not does_decode:
            return self.cost.step_s(chunks)
        decoders = self.decoders
        return self.cost.step_s(chunks, decoders.num, decoders.num_context, decoders.ranks_read)

    def _num_alike(self, decoding: Decoding) -> int:
        """How many decode steps can be counted together, with nobody waiting for whom a policy might change its mind."""
        if self.waiting and (self._has_changed or not self._is_timeless):
            return 1
        num = self.decoders.steps_alike(self.free_blocks)
        if self.dispatcher.laned is None:
            return num
        # Lanes are fitted at their time, and taken over in the step after that.
        due_s = self.dispatcher.refits.due_s - self.clock.now
        return 1 if self._has_fitted else decoding.steps_until(due_s, num)

    def _end_step(self, now: float) -> None:
        step = self._step
        assert step is not None, "a step ended that had not begun"
        self._step = None
        counts = self.tally.counts
        self.tally.busy_s += now - step.began_s
        counts["steps"] += step.num
        if step.does_decode:
            self._take(self.decoders.grown(step.num))
            self.decoders.advance(step.num)
            counts["decode_tokens"] += step.num * self.decoders.num
        for request, num in step.parts:
            self._prefilled(request, num, now)
        for what, request in self.decoders.take_due():
            if what == "end":
                self._end(request, now)
            else:
                self._looks.append(request)
        self._begin(now)

    def _prefilled(self, request: Request, num: int, now: float) -> None:
        self.tally.counts["prefill_tokens"] += num
        request.num_prefilled += num
        if request.num_unfilled > 0:
            return
        self.prompts.leave(request)
        if request.num_done == 0:
            request.first_token_s = now
        request.num_done += 1
        self.tally.counts["first_tokens"] += 1
        self.num_changes += 1
        self.decoders.enter(request)
        self._looks.append(request)

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raises AssertionError if blocks or requests are lost, or counted twice."""
        self.dispatcher.check_invariants()
        self.decoders.check_invariants(self.running.values())
        known = self.dispatcher.num_waiting + self.dispatcher.num_running + len(self._came)
        assert known == len(self.waiting) + len(self.running), "requests lost"
        held = sum(map(self.decoders.held_blocks, self.running.values()))
        assert self.kv_blocks == held <= self.num_blocks, "blocks lost, or more than there are"
