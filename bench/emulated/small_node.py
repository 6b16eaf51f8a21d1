"""The smallest model of a serving node that a router needs, for tables of 60 nodes; `tests/unit/bench/test_routing.py` holds it to the emulated node.

Requests start in the order in which they came. A step computes prompts and one token for each request that decodes, and takes what `StepCost` says.
Each request keeps room for its prompt and its whole answer from its start to its end, so that no request is preempted. The emulated node
(`core/node.py`) is vLLM's own scheduler with our classes, of which 60 at 340 requests a second would take too long.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.emulated.core.arrivals import Arrival, Timed
from bench.emulated.core.clock import Clock
from bench.emulated.core.steps import BLOCK_TOKENS, Chunk, Shape, StepCost, pool_blocks
from engine_bridge.policy.nodes.routing import RequestEstimate, RoutingPolicy
from engine_bridge.protocol.node_facts import NodeFacts, Ranks


@dataclass(slots=True, eq=False)
class Served(Timed):
    """A request in a node. num_prefilled: tokens of its prompt that are computed."""

    arrival: Arrival
    rank: int
    num_prefilled: int = 0
    first_token_s: float = math.nan
    ended_s: float = math.nan

    @property
    def num_unfilled(self) -> int:
        """Tokens of its prompt that are still to be computed."""
        return self.arrival.num_prompt_tokens - self.num_prefilled


class SmallNode:
    """One device with its model and all adapters in memory of their own.

    Args:
        ranks: of the adapters that requests may name, by id.

    Raises:
        ValueError: if the model does not fit the device.
    """

    def __init__(self, clock: Clock, cost: StepCost, shape: Shape, ranks: Sequence[int] = ()) -> None:
        self.clock, self.cost, self.shape = clock, cost, shape
        self.num_tokens = pool_blocks(cost) * BLOCK_TOKENS
        self.waiting: deque[Served] = deque()
        self.prompts: deque[Served] = deque()
        """Requests that have started, whose prompts are not computed yet."""
        self.ended: list[Served] = []
        self.num_changes = 0
        """Counts requests that came, started, began to answer and ended: while it stays the same, `facts` may be kept."""
        self._ranks = ranks
        self._reserved_tokens = self._context_tokens = self._num_decoded = self._ranks_read = 0
        self._decoding: dict[str, Served] = {}
        self._num_by_rank: Counter[int] = Counter()
        self._ends: list[tuple[int, int, Served]] = []
        """By the count of steps that decode, `_num_decoded`, at which each has its answer."""
        self._order = itertools.count()
        self._is_busy = False

    def submit(self, arrival: Arrival) -> None:
        """Take a request in, now. Raises ValueError if it would not fit an empty device."""
        rank = self._ranks[arrival.adapter_id] if arrival.adapter_id is not None else 0
        request = Served(arrival, rank)
        if request.arrival.num_tokens > self.num_tokens:
            raise ValueError(f"{request.arrival.num_tokens} tokens do not fit the device")
        self.waiting.append(request)
        self.num_changes += 1
        if not self._is_busy:
            self._begin(self.clock.now)

    def facts(self, node_id: str) -> NodeFacts:
        """Return what the node reports to a router."""
        waiting_tokens = sum(request.arrival.num_prompt_tokens for request in self.waiting)
        filled = sum(request.num_prefilled for request in self.prompts)
        return NodeFacts(
            node_id=node_id,
            running=ranks_of(itertools.chain(self.prompts, self._decoding.values())),
            queued=ranks_of(self.waiting),
            num_tokens=self._context_tokens + filled + waiting_tokens,
            queued_tokens=waiting_tokens,
            free_tokens=self.num_tokens - self._reserved_tokens - waiting_tokens,
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Begin the next step, if there is anything to compute."""
        parts = list(self._parts())
        does_decode = bool(self._decoding) and (self.shape.is_mixed or not parts)
        self._is_busy = does_decode or bool(parts)
        if self._is_busy:
            chunks = [
                Chunk(size, each.num_prefilled, each.rank, size == each.num_unfilled) for each, size in parts
            ]
            decodes = (len(self._decoding), self._context_tokens, self._ranks_read) if does_decode else ()
            seconds = self.cost.step_s(chunks, *decodes)
            self.clock.at(now + seconds, lambda now: self._end(parts, does_decode, now))

    def _parts(self) -> Iterable[tuple[Served, int]]:
        """Yield the parts of prompts in the next step: chunks beside decoding, or whole prompts where steps are not mixed, and then at least one."""
        left = self.shape.step_tokens - (len(self._decoding) if self.shape.is_mixed else 0)
        for request in list(self.prompts):
            if left <= 0:
                return
            size = min(request.num_unfilled, left)
            left -= size
            yield request, size
        is_first = True
        while self.waiting and self._has_room(self.waiting[0]):
            size = self.waiting[0].arrival.num_prompt_tokens
            if left <= 0 or not (self.shape.is_mixed or is_first or size <= left):
                return
            request = self.waiting.popleft()
            self.prompts.append(request)
            self._reserved_tokens += request.arrival.num_tokens
            self.num_changes += 1
            size, is_first = min(size, left) if self.shape.is_mixed else size, False
            left -= size
            yield request, size

    def _has_room(self, request: Served) -> bool:
        num_running = len(self.prompts) + len(self._decoding)
        return (
            num_running < self.shape.max_running
            and self._reserved_tokens + request.arrival.num_tokens <= self.num_tokens
        )

    def _end(self, parts: Sequence[tuple[Served, int]], does_decode: bool, now: float) -> None:
        """End a step: give out its tokens, and begin the next one."""
        if does_decode:
            self._num_decoded += 1
            self._context_tokens += len(self._decoding)
            while self._ends and self._ends[0][0] <= self._num_decoded:
                self._leave(heapq.heappop(self._ends)[2], now)
        for request, size in parts:
            request.num_prefilled += size
            if request.num_unfilled == 0:
                self._enter(request, now)
        self._begin(now)

    def _enter(self, request: Served, now: float) -> None:
        """Let a request whose prompt is computed decode; its first token is there."""
        self.prompts.remove(request)
        self.num_changes += 1
        request.first_token_s = now
        self._decoding[request.arrival.request_id] = request
        self._context_tokens += request.arrival.num_prompt_tokens + 1
        self._count_rank(request.rank, 1)
        if request.arrival.num_answer_tokens == 1:
            self._leave(request, now)
        else:
            due = self._num_decoded + request.arrival.num_answer_tokens - 1
            heapq.heappush(self._ends, (due, next(self._order), request))

    def _leave(self, request: Served, now: float) -> None:
        request.ended_s = now
        self.num_changes += 1
        self.ended.append(request)
        del self._decoding[request.arrival.request_id]
        self._context_tokens -= request.arrival.num_tokens
        self._reserved_tokens -= request.arrival.num_tokens
        self._count_rank(request.rank, -1)

    def _count_rank(self, rank: int, change: int) -> None:
        if rank:
            self._num_by_rank[rank] += change
            self._ranks_read = self.cost.kernel(self._num_by_rank)


def ranks_of(requests: Iterable[Served]) -> Ranks:
    """Return the ranks of requests' adapters."""
    ranks = [request.rank for request in requests]
    return Ranks(len(ranks), sum(ranks), max(ranks, default=0))


class SmallCluster:
    """Nodes with the same model behind a router, which is an object of `engine_bridge.policy.nodes.routing` and is told what each node reports.

    Args:
        ranks: of adapters, by id.
        answer_tokens: the length of an answer that the router expects of every request.
    """

    def __init__(
        self, nodes: Sequence[SmallNode], policy: RoutingPolicy, ranks: Sequence[int], answer_tokens: int
    ) -> None:
        self.nodes, self.policy = nodes, policy
        self._ranks, self._answer_tokens = ranks, answer_tokens
        self._by_id = {str(at): node for at, node in enumerate(nodes)}
        self._reported: dict[str, tuple[int, NodeFacts]] = {}

    def submit(self, arrival: Arrival) -> None:
        """Send a request that comes now. Raises RuntimeError if the policy finds no node for it."""
        estimate = RequestEstimate(
            request_id=arrival.request_id,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_answer_tokens=self._answer_tokens,
            rank=self._ranks[arrival.adapter_id] if arrival.adapter_id is not None else 0,
        )
        route = self.policy.route(estimate, self.facts())
        if route.node_id is None:
            raise RuntimeError(f"no node for {arrival.request_id}: {route.reason}")
        self._by_id[route.node_id].submit(arrival)

    def facts(self) -> list[NodeFacts]:
        """Return what each node reported when a request last came to it, started, began to answer or ended."""
        for node_id, node in self._by_id.items():
            if node_id not in self._reported or self._reported[node_id][0] != node.num_changes:
                self._reported[node_id] = node.num_changes, node.facts(node_id)
        return [facts for _, facts in self._reported.values()]
