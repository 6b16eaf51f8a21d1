"""Which node serves a request. Pure: facts in, decision out; a decision looks at each node once.

A node reports a few numbers of itself (`NodeFacts`), as often as it likes; facts that depend on the request (where its KV and its adapter are) come
with it (`RequestEstimate`) and name only the nodes that have some of either. `POLICIES` lists the policies by name: `overture` is ours, `rank_aware`
is CaraServe's, `load_balance` and `priority` are SYMPHONY's, `relieve` is ours for advisories, the others are baselines.

A `PerfModel` predicts how long a batch takes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

from engine_bridge.protocol.node_facts import UNKNOWN, NodeFacts, NodePerf, PerfModel, Ranks

# Punica's largest batch, up to which its scheduler fills a GPU before it takes the next. Source: Chen et al., Punica, 2023.
MAX_BATCH = 32
# "A large penalty" (CaraServe §5) without a number: a minute is more than any other cost of a request. Chosen.
PENALTY_S = 60.0
# The weight of each second by which an answer is later than its SLO. Chosen. Weighing by how much an answer is late, not only whether it is, keeps
# a node that is late already from being given every request.
LATE_WEIGHT = 10.0
# The SLO where none is set, as a multiple of the time that a request takes alone. Chosen in the same way: with less, busy nodes are all late and
# their KV moves.
SLO_TIMES, MIN_SLO_S = 3.0, 1e-4
# The weight of a second before the first token, for which a user waits, against a second within an answer, which is read meanwhile. A session stays
# at home while that costs at most this share more than the cheapest node. No node takes more than this many times the requests of the emptiest, and
# this many beyond. All chosen in virtual time (docs/decisions/0014).
START_WEIGHT, INERTIA, BOUND_SHARE, BOUND_MORE = 5.0, 0.1, 3.0, 6.0
# The batch by which nodes are compared. Chosen: some chats.
TYPICAL, TYPICAL_TOKENS = Ranks(8), 8_192


# -- facts -------------------------------------------------------------------------------------------------------------


class CachedKv(Struct, frozen=True, gc=False):
    """The KV of a request's prompt on one node. num_tokens: tokens that have KV there. load_s: seconds to the device; 0 if it is there."""

    num_tokens: int
    load_s: float = 0.0


NO_KV = CachedKv(0)


class RequestEstimate(Struct, frozen=True, kw_only=True, gc=False):
    """A request, or an advisory of one.

    Attributes:
        num_answer_tokens: predicted tokens of the answer.
        home: the node where its session was last.
        kv: by node, the KV of its prompt there. kv_elsewhere: the KV that all other nodes can fetch from these.
        adapter_load_s: by node, seconds to bring its adapter to the device; 0 where it is there.
        usual_load_s: the same for nodes that are not named there; None: they cannot serve it.
    """

    request_id: str
    num_prompt_tokens: int
    num_answer_tokens: int
    rank: int = 0
    is_urgent: bool = False
    home: str = ""
    kv: Mapping[str, CachedKv] = {}
    kv_elsewhere: CachedKv = NO_KV
    adapter_load_s: Mapping[str, float] = {}
    usual_load_s: float | None = 0.0


class Cost(Struct, frozen=True, gc=False):
    """Seconds that a request would add on a node.

    Attributes:
        start_s: until its first token. decode_s: of decoding its answer. others_s: that all other requests lose. late_s: beyond the SLO.
    """

    start_s: float
    decode_s: float
    others_s: float
    late_s: float

    @property
    def total_s(self) -> float:
        """The weighted sum by which nodes are compared."""
        return START_WEIGHT * self.start_s + self.decode_s + self.others_s + LATE_WEIGHT * self.late_s


RouteReason = Literal["policy", "no_memory", "nobody"]


class Route(Struct, frozen=True, kw_only=True):
    """The decision where a request goes.

    Attributes:
        node_id: None if no node can serve it.
        reason: `policy`: the policy chose the node; `no_memory`: the policy chose, though no node has memory for it now; `nobody`:
            its adapter is on no open node.
        cost: None where the policy does not compute one.
    """

    node_id: str | None
    reason: RouteReason = "policy"
    cost: Cost | None = None


# -- policies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """The properties that nodes have in common, where they do not report their own speed, and the targets for all.

    Attributes:
        decode, prefill: seconds of a step that decodes, and of a step that computes prompts of the usual length.
        prompt_token_s: seconds per token of a prompt.
        prefill_step_s: seconds of a step with prompts, whatever they are; 0 for an engine that computes them beside requests that decode.
        slo_s: seconds per token of an answer.
        answer_tokens: length of the usual answer.

    Raises:
        ValueError: the SLO or the usual answer is not positive.
    """

    decode: PerfModel
    prefill: PerfModel
    slo_s: float
    answer_tokens: float
    prompt_token_s: float
    prefill_step_s: float = 0.0

    def __post_init__(self) -> None:
        if self.slo_s <= 0 or self.answer_tokens <= 0:
            raise ValueError("an SLO and the usual answer are positive")

    @property
    def usual_step_s(self) -> float:
        """Seconds of a typical step, by which nodes are compared."""
        return self.decode.seconds(TYPICAL, TYPICAL_TOKENS)


class RoutingPolicy(Protocol):
    """A policy that chooses a node for each request."""

    def route(self, ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> Route:
        """Return where the request goes; of equally good nodes, the first. Changes no state. Costs in proportion to the number of nodes."""
        ...


def candidates(ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> tuple[Sequence[NodeFacts], RouteReason]:
    """Return the nodes that are open, can have the adapter, and have memory for the prompt and its predicted answer.

    If no node has the memory, the nodes that lack it are returned.

    Source: CaraServe §5: "matching the base LLM, adapter, and GPU memory availability". Nodes of another base model are not among `nodes`.
    """
    if ask.usual_load_s is None:
        able = [node for node in nodes if node.is_open and node.node_id in ask.adapter_load_s]
    else:
        able = [node for node in nodes if node.is_open]
    needed = ask.num_prompt_tokens + ask.num_answer_tokens
    with_room = [node for node in able if node.free_tokens >= needed]
    if with_room:
        return with_room, "policy"
    return able, "no_memory" if able else "nobody"


def _least(ask: RequestEstimate, nodes: Sequence[NodeFacts], key: Callable[[NodeFacts], Any]) -> Route:
    found, reason = candidates(ask, nodes)
    if not found:
        return Route(node_id=None, reason=reason)
    return Route(node_id=min(found, key=key).node_id, reason=reason)


def _pace(node: NodeFacts, usual_s: float) -> float:
    """Return how many times slower a node is than a node that takes `usual_s` for a usual step; 1 where it reports no speed."""
    return node.perf.decode.seconds(TYPICAL, TYPICAL_TOKENS) / usual_s if node.perf and usual_s else 1.0


@dataclass(frozen=True, slots=True)
class Fewest:
    """The node that has the least of what `key` counts; of equal nodes, the first."""

    key: Callable[[RequestEstimate, NodeFacts], tuple[int, ...]]

    def route(self, ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> Route:
        """Return the node with the least key."""
        return _least(ask, nodes, lambda node: self.key(ask, node))


LOAD_BALANCE = Fewest(lambda ask, node: (node.num_requests, node.node_id != ask.home))
"""The node with the fewest requests; of equals, the session's home. Source: SYMPHONY §3.2, its default."""

MOST_IDLE = Fewest(lambda ask, node: (node.num_tokens,))
"""The node with the fewest tokens held and to be computed. Source: CaraServe §7.5, "the least workload", which it does not define."""


def _urgent_apart(ask: RequestEstimate, node: NodeFacts) -> tuple[int, ...]:
    counts = (node.num_requests, node.num_urgent)
    return *(counts[::-1] if ask.is_urgent else counts), node.node_id != ask.home


PRIORITY = Fewest(_urgent_apart)
"""Urgent requests are spread over the nodes first; others go to the node with the fewest requests, of equals the one with the fewest urgent.

A node pauses others for its urgent requests where that is needed (`core.scheduling.pauses`). Source: SYMPHONY §3.5.
"""


@dataclass(frozen=True, slots=True)
class Sticky:
    """The session's home; a request without one, or whose home cannot serve it, goes to the node with the fewest requests."""

    def route(self, ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> Route:
        """Return the session's home if it is open and can have the adapter."""
        can_load = ask.usual_load_s is not None or ask.home in ask.adapter_load_s
        if can_load and any(node.node_id == ask.home and node.is_open for node in nodes):
            return Route(node_id=ask.home)
        return _least(ask, nodes, lambda node: node.num_requests)


@dataclass(frozen=True, slots=True)
class Relieve:
    """The session's home, unless it has more than `share` times the requests of the emptiest node, and `more` beyond; then the emptiest node.

    For advisories: their KV moves only where that buys balance. SYMPHONY §3.2 balances the load alone; with a slow disk or network that costs many
    times its saving (docs/decisions/0014).

    Attributes:
        within_s: only nodes to whose device all of its KV comes in this many seconds count.
        usual_s: from `usual_step_s`, so that a request counts for more at a slower node; 0: all count alike.
    """

    share: float = 1.25
    more: int = 1
    within_s: float = math.inf
    usual_s: float = 0.0

    def route(self, ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> Route:
        """Return the session's home or the emptiest near node."""
        found, reason = candidates(ask, nodes)
        if not found:
            return Route(node_id=None, reason=reason)
        near = [node for node in found if self._wait_s(ask, node.node_id) <= self.within_s] or found
        loads = [(node.num_requests + 1) * _pace(node, self.usual_s) for node in near]
        least, emptiest = min(zip(loads, near, strict=True), key=lambda pair: pair[0])
        limit = least * self.share + (self.more + 1 - self.share) * _pace(emptiest, self.usual_s)
        at_home = [
            node for load, node in zip(loads, near, strict=True) if node.node_id == ask.home and load <= limit
        ]
        return Route(node_id=(at_home or [emptiest])[0].node_id, reason=reason)

    @staticmethod
    def _wait_s(ask: RequestEstimate, node_id: str) -> float:
        """Return the seconds until the node's device has all the KV that the session's home has; infinite where some must be computed."""
        there = ask.kv.get(node_id, ask.kv_elsewhere)
        return there.load_s if there.num_tokens >= ask.kv.get(ask.home, NO_KV).num_tokens else math.inf


def relief(settings: Settings) -> Relieve:
    """Return the policy for announced requests when they come: other nodes may be emptier by then.

    Chosen in virtual time: a longer wait evens out numbers more and costs TTFT (docs/decisions/0014).
    """
    return Relieve(share=1.1, more=0, within_s=0.04, usual_s=settings.usual_step_s)


@dataclass(frozen=True, slots=True)
class FirstFit:
    """The first node with memory and fewer than MAX_BATCH requests; else the one with the fewest. Source: CaraServe §7.5, after Punica."""

    def route(self, ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> Route:
        """Return the first node with room."""
        found, reason = candidates(ask, nodes)
        if reason == "policy":
            for node in found:
                if node.running.num + node.queued.num < MAX_BATCH:
                    return Route(node_id=node.node_id)
        return _least(ask, nodes, lambda node: node.num_requests)


@dataclass(frozen=True, slots=True)
class Random:
    """A node picked by a hash of the request's id: the same request gets the same node again while the same nodes are there."""

    def route(self, ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> Route:
        """Return the node that the hash picks."""
        found, reason = candidates(ask, nodes)
        if not found:
            return Route(node_id=None, reason=reason)
        digest = hashlib.blake2b(f"\0{ask.request_id}".encode(), digest_size=8).digest()
        return Route(node_id=found[int.from_bytes(digest) % len(found)].node_id, reason=reason)


@dataclass(frozen=True, slots=True)
class RankAware:
    """The node where the request costs all requests the least, by ranks. Source: CaraServe §5, Algorithm 1.

    The cost is the time that a request adds to a step of prompts, divided by the usual answer, and to a step of decoding; a penalty if decoding
    would be slower than the SLO; times the number of requests that are there. Departs for equal costs (all are, without adapters): then the fewest
    requests.
    """

    settings: Settings

    def route(self, ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> Route:
        """Return the node with the least cost."""

        def cost(node: NodeFacts) -> tuple[float, int]:
            """Return the sort key of a node: the cost, then the number of requests."""
            num = node.num_requests
            return self.cost_s(ask.rank, node) * num, num

        return _least(ask, nodes, cost)

    def cost_s(self, rank: int, node: NodeFacts) -> float:
        """Return the cost for one request that is there, in seconds: Algorithm 1's CalcCost."""
        settings, there = self.settings, node.running + node.queued
        model = node.perf or settings
        prefill, decode = model.prefill.seconds, model.decode.seconds
        added_prefill_s = prefill(node.queued.plus(rank)) - prefill(node.queued)
        after_s = decode(there.plus(rank))
        cost_s = added_prefill_s / settings.answer_tokens + after_s - decode(there)
        return cost_s + PENALTY_S * (after_s > settings.slo_s)


@dataclass(frozen=True, slots=True)
class Overture:
    """The node where a request adds the fewest seconds to all answers together (`Cost`), among nodes that are not much fuller than the emptiest.

    The sum holds its own answer and the ones that are under way. It stays at home where that costs at most `inertia` times as much more.

    The cost takes into account where the request's KV is and how long moving it takes, where its adapter is, the ranks in each batch, the tokens
    that they hold, and how fast each node is. Requests that come later are left out: they go where they cost least then. A sum of seconds alone
    would put long conversations on one node and short ones on another; BOUND_SHARE and BOUND_MORE bound by how many requests nodes may differ, and
    a slow node gets fewer in proportion to its speed.

    Source: CaraServe's Algorithm 1; departs in counting its own and others' seconds apart in place of multiplying by the requests, in KV, adapters
    and tokens, in a penalty that grows, in bounds and in staying at home.
    """

    settings: Settings
    inertia: float = INERTIA

    def route(self, ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> Route:
        """Return the cheapest node within the bounds, or the session's home if that costs little more."""
        found, reason = candidates(ask, nodes)
        if not found:
            return Route(node_id=None, reason=reason)
        usual = self._prefill(ask, "", self.settings)
        best, best_s, best_at, at_home = None, 0.0, found[0], None
        for node in self._within_bounds(found):
            prefill = usual
            if node.perf is not None or node.node_id in ask.kv:
                prefill = self._prefill(ask, node.node_id, node.perf or self.settings)
            cost = self.cost(ask, node, prefill)
            total_s = cost.total_s
            if node.node_id == ask.home:
                at_home = cost
            if best is None or total_s < best_s:
                best, best_s, best_at = cost, total_s, node
        if at_home is not None and at_home.total_s <= best_s * (1 + self.inertia):
            return Route(node_id=ask.home, reason=reason, cost=at_home)
        return Route(node_id=best_at.node_id, reason=reason, cost=best)

    def _within_bounds(self, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
        """Return the nodes that have not far more work than the emptiest. On a slow node a request counts for more, by its pace."""
        paces = [_pace(node, self.settings.usual_step_s) for node in nodes]
        loads = [node.num_requests * pace for node, pace in zip(nodes, paces, strict=True)]
        limit = min(load * BOUND_SHARE + BOUND_MORE * pace for load, pace in zip(loads, paces, strict=True))
        return [node for node, load in zip(nodes, loads, strict=True) if load <= limit]

    @staticmethod
    def _prefill(ask: RequestEstimate, node_id: str, model: NodePerf | Settings) -> tuple[float, float]:
        """Return the seconds of computing the uncached part of the prompt on a node, and of bringing the cached part to its device."""
        token_s = model.prompt_token_s
        here = ask.kv.get(node_id, ask.kv_elsewhere)
        compute_s = (ask.num_prompt_tokens - here.num_tokens) * token_s
        if here.load_s + compute_s > ask.num_prompt_tokens * token_s:
            return ask.num_prompt_tokens * token_s, 0.0
        return compute_s, here.load_s

    def cost(self, ask: RequestEstimate, node: NodeFacts, prefill: tuple[float, float]) -> Cost:
        """Return the cost of the request on a node. prefill: from `_prefill`."""
        settings, model = self.settings, node.perf or self.settings
        compute_s, bring_s = prefill
        load_s = ask.adapter_load_s.get(node.node_id, ask.usual_load_s or 0.0)
        running, queued = node.running, node.queued
        num = running.num + queued.num
        total, most = running.total + queued.total, max(running.most, queued.most)
        before_s = model.decode.seconds(Ranks(num, total, most), node.num_tokens)
        with_it = Ranks(num + 1, total + ask.rank, max(most, ask.rank))
        after_s = model.decode.seconds(with_it, node.num_tokens + ask.num_prompt_tokens)
        # A step under way is half done; then the queued requests are computed in one step with this one, and for them that step comes anyway.
        step_s = model.prefill_step_s + node.queued_tokens * model.prompt_token_s + compute_s
        stall_s = compute_s + model.prefill_step_s * (queued.num == 0)
        # The tokens left to the requests that are there; where they are not predicted, half of the usual answer.
        left = settings.answer_tokens / 2 if node.answer_tokens is None else node.answer_tokens / max(num, 1)
        overlap = min(ask.num_answer_tokens, left)
        late_s = max(after_s - settings.slo_s, 0.0)
        more_late_s = late_s - max(before_s - settings.slo_s, 0.0)
        return Cost(
            before_s / 2 + load_s + bring_s + step_s,
            ask.num_answer_tokens * after_s,
            # Requests that wait for KV to be loaded wait behind this one's.
            num * (stall_s + overlap * (after_s - before_s)) + queued.num * bring_s,
            ask.num_answer_tokens * late_s + num * overlap * more_late_s,
        )


def settings_of(facts: Iterable[NodeFacts], slo_s: float | None = None) -> Settings:
    """Return the settings for nodes that report their speed: the median node's hold for nodes that do not report theirs yet.

    slo_s: seconds per token of an answer; None: SLO_TIMES the time that one request alone takes there.
    """
    perfs = [node.perf for node in facts if node.perf is not None] or [UNKNOWN]
    middle = sorted(perfs, key=lambda perf: perf.decode.seconds(TYPICAL, TYPICAL_TOKENS))[len(perfs) // 2]
    answer_tokens = max(sum(perf.answer_tokens for perf in perfs) / len(perfs), 1.0)
    alone_s = middle.decode.seconds(Ranks(1), round(answer_tokens))
    return Settings(
        decode=middle.decode,
        prefill=middle.prefill,
        slo_s=slo_s or max(SLO_TIMES * alone_s, MIN_SLO_S),
        answer_tokens=answer_tokens,
        prompt_token_s=middle.prompt_token_s,
        prefill_step_s=middle.prefill_step_s,
    )


# -- by name -----------------------------------------------------------------------------------------------------------


POLICIES: dict[str, Callable[[Settings], RoutingPolicy]] = {
    "overture": Overture,
    "rank_aware": RankAware,
    "load_balance": lambda settings: LOAD_BALANCE,
    "most_idle": lambda settings: MOST_IDLE,
    "sticky": lambda settings: Sticky(),
    "relieve": lambda settings: Relieve(),
    "first_fit": lambda settings: FirstFit(),
    "random": lambda settings: Random(),
    "priority": lambda settings: PRIORITY,
}
"""Routing policies by name; each is made with the settings that the nodes have in common."""
