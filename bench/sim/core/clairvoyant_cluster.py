"""A bound for routers: nodes that know how long each answer will be and what each step takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.sim.core.batch import Request
from bench.sim.core.clock import Clock
from bench.sim.core.cluster import Cluster
from bench.sim.core.lean_node import Node
from bench.sim.core.requests import Arrival
from engine_bridge.policy.routing import LoadBalance


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps of a node in which the same requests decode, if nobody else comes.

    until: the step, from when this was reckoned, after which one of them has ended. step_s: of a step with one request more. added_s: what that one
    adds to the sum of the others' times per token in each step.
    """

    until: int
    step_s: float
    added_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is ahead of a node. by_rank: stretches, in order, by the rank of one request more. waits_per_s: what a second in which nobody decodes
    adds to the sum of times per token. last: whoever ends last, None of an idle node; num_done: tokens that it had answered."""

    num_changes: int
    by_rank: dict[int, list[Stretch]]
    waits_per_s: float
    last: Request | None
    num_done: int


class ClairvoyantCluster(Cluster):
    """Gives each request to the node where it adds the least to the sum over requests of their mean time per token, its own among them.

    It knows the length of each answer that is under way or comes now. Of requests that come later it knows nothing, so a router may do better.
    """

    def __init__(self, clock: Clock, nodes: Sequence[Node], ranks: Sequence[int], usual_tokens: int) -> None:
        super().__init__(clock, nodes, LoadBalance(), ranks, usual_tokens)
        self._usual_tokens = usual_tokens
        self._all_ranks = sorted({0, *ranks})
        self._outlooks = {node_id: self._outlook(node) for node_id, node in self._by_id.items()}

    def _node_id(self, arrival: Arrival) -> str:
        for node_id, node in self._by_id.items():
            if self._outlooks[node_id].num_changes != node.num_changes:
                self._outlooks[node_id] = self._outlook(node)
        rank = self._rank_of(arrival)
        return min(self._by_id, key=lambda node_id: self._added_s(node_id, arrival, rank))

    def _added_s(self, node_id: str, arrival: Arrival, rank: int) -> float:
        node, outlook = self._by_id[node_id], self._outlooks[node_id]
        num_gone = node.decoders.num_done(outlook.last) - outlook.num_done if outlook.last else 0
        added_s = outlook.waits_per_s * node.cost.prefill_s(arrival.num_prompt_tokens, rank)
        own_share = _share_of(arrival)
        at, end = 0, arrival.num_answer_tokens - 1
        for stretch in outlook.by_rank[rank]:
            until = min(stretch.until - num_gone, end)
            if until > at:
                added_s += (until - at) * (stretch.added_s + stretch.step_s * own_share)
                at = until
        if at < end:
            added_s += (end - at) * own_share * self._step_s(node, [], [rank])
        return added_s

    def _outlook(self, node: Node) -> Outlook:
        there = [*node.running.values(), *node.waiting.values()]
        left = sorted(
            (
                (request.arrival.num_answer_tokens - node.decoders.num_done(request), request)
                for request in there
            ),
            key=lambda item: item[0],
        )
        by_rank: dict[int, list[Stretch]] = {rank: [] for rank in self._all_ranks}
        requests = [request for _, request in left]
        for place, (until, _) in enumerate(left):
            others = requests[place:]
            shares = sum(_share_of(request.arrival) for request in others)
            ranks = [request.rank for request in others]
            without_s = self._step_s(node, others, ranks)
            for rank, stretches in by_rank.items():
                step_s = self._step_s(node, others, [*ranks, rank])
                stretches.append(Stretch(until, step_s, (step_s - without_s) * shares))
        return Outlook(
            node.num_changes,
            by_rank,
            sum(_share_of(request.arrival) for request in requests),
            requests[-1] if requests else None,
            node.decoders.num_done(requests[-1]) if requests else 0,
        )

    def _step_s(self, node: Node, others: Sequence[Request], ranks: Sequence[int]) -> float:
        """Of a step in which these requests decode, and as many more of the usual length as there are more ranks."""
        num_context = sum(node.decoders.num_kv_tokens(request) for request in others)
        num_context += (len(ranks) - len(others)) * self._usual_tokens
        counts = Counter(rank for rank in ranks if rank)
        return node.cost.step_s((), len(ranks), num_context, node.cost.kernel(counts) if counts else 0)


def _share_of(arrival: Arrival) -> float:
    """What a second's wait adds to a request's mean time per token."""
    return 1 / max(arrival.num_answer_tokens - 1, 1)
