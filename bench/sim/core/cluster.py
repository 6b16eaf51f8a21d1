"""Several nodes behind a router, which is an object of `engine_bridge.policy.nodes.routing`. It is told what a node reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from bench.sim.core.batch import Request
from bench.sim.core.clock import Clock
from bench.sim.core.lean_node import Node
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import BLOCK_TOKENS
from engine_bridge.policy.nodes.routing import RequestEstimate, RoutingPolicy
from engine_bridge.protocol.node_facts import NodeFacts, Ranks


class Cluster:
    """Nodes with the same model and the same adapters, all of which are at hand.

    Args:
        ranks: of adapters, by id.
        answer_tokens: what is reckoned with for every request: nobody predicts answers here.
    """

    def __init__(
        self,
        clock: Clock,
        nodes: Sequence[Node],
        policy: RoutingPolicy,
        ranks: Sequence[int],
        answer_tokens: int,
    ) -> None:
        self.clock, self.nodes, self.policy = clock, nodes, policy
        self.num_by_node: Counter[str] = Counter()
        self._ranks, self._answer_tokens = ranks, answer_tokens
        self._by_id = {str(at): node for at, node in enumerate(nodes)}
        self._reported = {
            node_id: (node.num_changes, facts_of(node_id, node)) for node_id, node in self._by_id.items()
        }

    def submit(self, arrival: Arrival) -> None:
        """It comes now. Raises RuntimeError if the policy finds no node for it."""
        route = self.policy.route(self._ask(arrival), self.facts())
        if route.node_id is None:
            raise RuntimeError(f"no node for {arrival.request_id}: {route.reason}")
        self.num_by_node[route.node_id] += 1
        self._by_id[route.node_id].submit(arrival)

    def facts(self) -> list[NodeFacts]:
        """Of each node, as of when a request last came to it, started, began to answer or left."""
        for node_id, node in self._by_id.items():
            if self._reported[node_id][0] != node.num_changes:
                self._reported[node_id] = (node.num_changes, facts_of(node_id, node))
        return [facts for _, facts in self._reported.values()]

    def _ask(self, arrival: Arrival) -> RequestEstimate:
        return RequestEstimate(
            request_id=arrival.request_id,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_answer_tokens=self._answer_tokens,
            rank=self._ranks[arrival.adapter_id] if arrival.adapter_id is not None else 0,
        )


def facts_of(node_id: str, node: Node) -> NodeFacts:
    """What a node reports. A request that waits counts with the tokens that its start will take."""
    waiting = node.waiting.values()
    waiting_tokens = sum(node.start_blocks(request) for request in waiting) * BLOCK_TOKENS
    return NodeFacts(
        node_id=node_id,
        running=_ranks(node.running.values()),
        queued=_ranks(waiting),
        num_tokens=node.kv_blocks * BLOCK_TOKENS + waiting_tokens,
        queued_tokens=sum(request.num_tokens for request in waiting),
        free_tokens=node.free_blocks * BLOCK_TOKENS - waiting_tokens,
    )


def _ranks(requests: Iterable[Request]) -> Ranks:
    ranks = [request.rank for request in requests]
    return Ranks(len(ranks), sum(ranks), max(ranks, default=0))
