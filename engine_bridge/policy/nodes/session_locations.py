"""Where each session's KV is, what is on its way to the nodes, and so where the next request goes. Pure: events and `now` in, decisions out.

Requests come in two ways. An advisory is routed at once, and counts among its node's requests from then on; the request that it announced goes to
the same node, where its KV is by then. A request without an advisory goes to its session's home, unless that node has far too much to do; a new
session's request goes where the policy says. The locations of sessions are advice: if they are lost or wrong, that costs a fetch from another node
or computing anew, never an answer. Source: SYMPHONY §3.2; departs in keeping apart where KV is and where its request is expected, so that an
advisory whose request never comes moves no session.

The live router and the simulators use the same object; they differ in how fresh the reports are. A node's last report cannot include the requests
sent to it since: until a report can, `Homes` counts them itself.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from engine_bridge.policy.nodes.routing import (
    LOAD_BALANCE,
    NO_KV,
    POLICIES,
    CachedKv,
    Overture,
    Relieve,
    RequestEstimate,
    Route,
    RoutingPolicy,
    Sticky,
    relief,
    settings_of,
)
from engine_bridge.protocol.node_facts import NodeFacts, NodePerf, Ranks

SessionKey = tuple[str, str]
"""Tenant and session id. A request with an empty session id belongs to no session, and no location is kept for it."""

# A report includes the requests that were sent at least this many seconds before it came: they have crossed a socket, were rendered and queued.
# Chosen, a few times the duration of that.
SETTLE_S = 0.1
# A node's reported speed is believed once its steps differ from it by no more than this share. Before, it reports a guess, and a node that guesses
# itself slow would never be sent a request that could correct it (seen). Chosen: a node that has measured nothing reports 1, on a busy machine 0.5.
MAX_ERROR = 0.75
# A request without an advisory leaves its KV where staying costs over twice as much as another node. Chosen in virtual time: hardly any session
# moves where nodes are about even, and many leave an overloaded node when another joins (docs/decisions/0014).
UNANNOUNCED_INERTIA = 1.0
# Number of sessions that are remembered, some 500 bytes each; the ones unused for the longest time are forgotten. Chosen.
MAX_SESSIONS = 100_000


@dataclass(frozen=True, slots=True)
class Doors:
    """The policies that choose a node, by how a request comes.

    Attributes:
        unannounced: for a request without an advisory, of a session that has a home.
        new: for all other requests.
        second: asked again when an announced request comes, and told only of requests that are there; None: the request goes to its advisory's
            node.
    """

    announced: RoutingPolicy
    unannounced: RoutingPolicy
    new: RoutingPolicy
    second: RoutingPolicy | None = None


def doors_of(name: str, nodes: Sequence[NodeFacts]) -> Doors:
    """Return the doors for a policy's name, for nodes as fast as these report.

    `auto`: `overture` once a node reports its speed; before that by numbers of requests, moving a session only where that relieves its node.
    `overture`: an announced request goes to another node after all where fewer requests are and its KV is near; one without an advisory does where
    its node has far too much to do. All other policies leave both where they are.

    Raises:
        KeyError: there is no policy of this name.
    """
    if name == "auto":
        if all(node.perf is None for node in nodes):
            return Doors(Relieve(), Sticky(), LOAD_BALANCE)
        name = "overture"
    settings = settings_of(nodes)
    policy = POLICIES[name](settings)
    if name == "overture":
        # Without an advisory: at home, unless that is overloaded or only other nodes have memory for it.
        loyal = Overture(settings, inertia=UNANNOUNCED_INERTIA)
        return Doors(policy, loyal, policy, relief(settings))
    return Doors(policy, Sticky(), policy)


@dataclass(frozen=True, slots=True)
class Sent:
    """The node for an advisory or a request.

    Attributes:
        node_id: None if no node can serve it; then it is not under way.
        kv_at: another node that has KV of its session, as far as is known; "" for none.
        over: (node, advisory) of an advisory that was sent to another node and is of no use any more.
        route: the policy's decision; None where the advisory had decided.
    """

    node_id: str | None
    kv_at: str = ""
    over: tuple[str, str] | None = None
    route: Route | None = None


@dataclass(frozen=True, slots=True)
class _Announced:
    advisory_id: str
    node_id: str
    ask: RequestEstimate


@dataclass(slots=True, eq=False)
class _Session:
    """A session's known location. num_tokens: tokens that have KV at its home, as far as is known."""

    home: str = ""
    num_tokens: int = 0
    announced: _Announced | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A request that was sent and has not ended. home_before: its session's home before it."""

    key: SessionKey
    node: _Node
    ask: RequestEstimate
    since_s: float
    home_before: str


@dataclass(slots=True)
class _Load:
    """The sum of some requests. num_tokens: of their prompts; num_prefill_tokens: the part of these that has to be computed."""

    num: int = 0
    num_urgent: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    answer_tokens: int = 0
    ranks: Counter[int] = field(default_factory=Counter)

    def count(self, ask: RequestEstimate, node_id: str, sign: int) -> None:
        """Add a request to the sum. sign: 1 adds a request that is sent to this node, -1 takes it away."""
        self.num += sign
        self.num_urgent += sign * ask.is_urgent
        self.num_tokens += sign * ask.num_prompt_tokens
        num_cached = ask.kv.get(node_id, ask.kv_elsewhere).num_tokens
        self.num_prefill_tokens += sign * max(ask.num_prompt_tokens - num_cached, 0)
        self.answer_tokens += sign * ask.num_answer_tokens
        self.ranks[ask.rank] += sign
        if not self.ranks[ask.rank]:
            del self.ranks[ask.rank]

    def as_ranks(self) -> Ranks:
        """Return the adapter ranks of these requests."""
        total = sum(rank * num for rank, num in self.ranks.items())
        return Ranks(self.num, total, max(self.ranks, default=0))


@dataclass(slots=True, eq=False)
class _Node:
    """One node's requests and its last report.

    Attributes:
        unreported: requests that no report can have included, summed up in `on_the_way`.
        expected: the sum of announced requests.
        num_requests, num_urgent: requests that were sent here and have not ended.
    """

    node_id: str
    facts: NodeFacts | None = None
    is_open: bool = True
    unreported: OrderedDict[str, _Request] = field(default_factory=OrderedDict)
    on_the_way: _Load = field(default_factory=_Load)
    expected: _Load = field(default_factory=_Load)
    num_requests: int = 0
    num_urgent: int = 0

    def begin(self, request: _Request) -> None:
        """Note that a request is sent here."""
        self.unreported[request.ask.request_id] = request
        self.on_the_way.count(request.ask, self.node_id, 1)
        self.num_requests += 1
        self.num_urgent += request.ask.is_urgent

    def end(self, request: _Request) -> None:
        """Note that a request sent here has ended."""
        self.settle(request.ask.request_id)
        self.num_requests -= 1
        self.num_urgent -= request.ask.is_urgent

    def settle(self, request_id: str) -> None:
        """Stop counting a request here, because reports include it from now on or it has ended."""
        request = self.unreported.pop(request_id, None)
        if request is not None:
            self.on_the_way.count(request.ask, self.node_id, -1)

    def seen(self, *, with_expected: bool) -> NodeFacts | None:
        """Return the facts that a policy is told of this node; None: it has never reported."""
        facts, sent, expected = self.facts, self.on_the_way, self.expected
        if facts is None:
            return None
        if (
            not (sent.num or expected.num or self.num_urgent)
            and self.is_open
            and facts.node_id == self.node_id
        ):
            return facts
        queued, answer_tokens = facts.queued, facts.answer_tokens
        num_tokens = facts.num_tokens + sent.num_tokens
        queued_tokens = facts.queued_tokens + sent.num_prefill_tokens
        for load in (sent, expected) if with_expected else (sent,):
            if load.num:
                queued += load.as_ranks()
                if answer_tokens is not None:
                    answer_tokens += load.answer_tokens
        if with_expected:
            num_tokens += expected.num_tokens
        return NodeFacts(
            node_id=self.node_id,
            running=facts.running,
            queued=queued,
            num_tokens=num_tokens,
            queued_tokens=queued_tokens,
            answer_tokens=answer_tokens,
            free_tokens=max(facts.free_tokens - sent.num_tokens - sent.answer_tokens, 0),
            num_urgent=max(facts.num_urgent, self.num_urgent) + expected.num_urgent,
            is_open=self.is_open and facts.is_open,
            perf=facts.perf,
            store=facts.store,
        )


class Homes:
    """Tracks which node has each session's KV, and which requests are on their way to it. doors: may be replaced at any time."""

    def __init__(self, doors: Doors, *, max_sessions: int = MAX_SESSIONS) -> None:
        self.doors = doors
        self._max_sessions = max_sessions
        self._nodes: dict[str, _Node] = {}
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        self._by_advisory: dict[str, _Session] = {}
        self._requests: dict[str, _Request] = {}
        self._num_homes: Counter[str] = Counter()

    # -- events of nodes -------------------------------------------------------------------------------------------------

    def reported(self, node_id: str, facts: NodeFacts, now: float) -> None:
        """Take a node's report, under whatever name it was made. now: when it came."""
        node = self._node(node_id)
        if facts.perf is not None and facts.perf.error > MAX_ERROR:
            facts = structs.replace(facts, perf=None)
        node.facts = facts
        while node.unreported:
            request_id, request = next(iter(node.unreported.items()))
            if request.since_s > now - SETTLE_S:
                break
            node.settle(request_id)

    def set_open(self, node_id: str, is_open: bool) -> None:
        """Say whether the node may be sent anything new."""
        self._node(node_id).is_open = is_open

    def lost(self, node_id: str) -> None:
        """Note that the node's process has ended: its announced requests are dropped, and it gets none before its next report.

        Its sessions stay at home there: it may come back, with the KV that it has on disk.
        """
        node = self._node(node_id)
        node.facts = None
        for request_id in list(node.unreported):
            node.settle(request_id)
        for session in list(self._by_advisory.values()):
            if session.announced is not None and session.announced.node_id == node_id:
                self._end_announcement(session)

    def removed(self, node_id: str) -> None:
        """Forget a node that has left for good."""
        self.lost(node_id)
        del self._nodes[node_id]

    # -- events of sessions ----------------------------------------------------------------------------------------------

    def placed(self, key: SessionKey, node_id: str, num_tokens: int = 0) -> None:
        """Note that a session's KV is on this node. num_tokens: how many of its tokens have KV; 0 if that is unknown."""
        if key[1]:
            session = self._remember(key)
            self._move(session, node_id)
            session.num_tokens = num_tokens

    def advised(self, key: SessionKey, advisory_id: str, ask: RequestEstimate) -> Sent:
        """Route the announcement of a session's request, and expect the request on the returned node.

        It is no longer expected where an earlier advisory of the session was sent.
        """
        session = self._known(key)
        over = self._end_announcement(session)
        ask = self._asked(ask, session)
        route = self._choose(self.doors.announced, ask)
        if route.node_id is None:
            return Sent(None, over=over, route=route)
        if key[1]:
            session = self._remember(key)
            session.announced = _Announced(advisory_id, route.node_id, ask)
            self._by_advisory[advisory_id] = session
            self._nodes[route.node_id].expected.count(ask, route.node_id, 1)
        kv_at = session.home if session.home != route.node_id else ""
        return Sent(route.node_id, kv_at, over, route)

    def retracted(self, advisory_id: str) -> None:
        """End an advisory whose request did not come. An ended advisory is ignored."""
        session = self._by_advisory.get(advisory_id)
        if session is not None:
            self._end_announcement(session)

    def requested(
        self, key: SessionKey, ask: RequestEstimate, now: float, avoid: Collection[str] = ()
    ) -> Sent:
        """Route a request; its session is at home on the returned node from now on. `ended` must follow, with the ask's id, which is used once.

        avoid: nodes that have just failed this request.
        """
        session = self._known(key)
        told = self._end_announcement(session)
        announced = told[0] if told is not None else ""
        asked, node_id, route = self._asked(ask, session), None, None
        if not self._can_serve(announced, ask, avoid):
            door = self.doors.unannounced if self._can_serve(session.home, ask, avoid) else self.doors.new
            route = self._choose(door, asked, avoid)
        elif self.doors.second is not None:
            asked = self._announced(ask, session, announced)
            route = self._choose(self.doors.second, asked, avoid, with_expected=False)
        node_id = announced if route is None else route.node_id
        over = told if announced != node_id else None
        if node_id is None:
            return Sent(None, over=over, route=route)
        return Sent(node_id, self._begin(key, asked, node_id, now), over, route)

    def prepared(self, key: SessionKey, ask: RequestEstimate, now: float) -> Sent:
        """Choose the node that computes a session's KV ahead: where its request is expected, else its home. `ended` must follow as for a request."""
        session = self._known(key)
        announced = session.announced.node_id if session.announced is not None else ""
        for place in (announced, session.home):
            if self._can_serve(place, ask):
                return Sent(place, self._begin(key, self._asked(ask, session), place, now))
        route = self._choose(self.doors.new, self._asked(ask, session))
        if route.node_id is None:
            return Sent(None, route=route)
        return Sent(route.node_id, self._begin(key, ask, route.node_id, now), route=route)

    def ended(self, request_id: str, *, num_tokens: int = 0, is_cut: bool = False) -> str:
        """Note that a request has ended. An ended request is ignored.

        num_tokens: of which its session has KV now; 0 if that is unknown. is_cut: whether its node failed, so that the KV that the node had made is
        out of reach. Returns the node whose KV of the session will not be asked for any more, because the session has moved; "" for none.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return ""
        request.node.end(request)
        session = self._sessions.get(request.key)
        if session is None or session.home != request.node.node_id:
            return ""
        if is_cut:
            self._move(session, request.home_before)
        elif num_tokens:
            session.num_tokens = num_tokens
            return request.home_before if request.home_before != session.home else ""
        return ""

    def forgotten(self, key: SessionKey) -> None:
        """Forget a session, because it has ended."""
        if key in self._sessions:
            self._drop(key)

    # -- knowledge -----------------------------------------------------------------------------------------------------

    def home(self, key: SessionKey) -> str:
        """The node that has a session's KV, as far as is known; "" for none."""
        return self._known(key).home

    def num_sessions(self, node_id: str) -> int:
        """Return the number of sessions at home on this node."""
        return self._num_homes[node_id]

    def num_requests(self, node_id: str | None) -> int:
        """Return the number of requests sent to this node that have not ended; None: to any node."""
        if node_id is None:
            return len(self._requests)
        node = self._nodes.get(node_id)
        return node.num_requests if node is not None else 0

    def facts(self, avoid: Collection[str] = (), *, with_expected: bool = True) -> list[NodeFacts]:
        """Return the facts that policies are told, in the order in which the nodes came."""
        nodes = (
            [node for name, node in self._nodes.items() if name not in avoid]
            if avoid
            else self._nodes.values()
        )
        seen = [node.seen(with_expected=with_expected) for node in nodes]
        return [facts for facts in seen if facts is not None]

    def check_invariants(self) -> None:
        """Check, for tests, that every sum is the sum of its parts. Raises AssertionError: one is not."""
        assert len(self._sessions) <= self._max_sessions
        homes = Counter(session.home for session in self._sessions.values() if session.home)
        assert homes == self._num_homes
        announced = [
            session.announced for session in self._sessions.values() if session.announced is not None
        ]
        assert {each.advisory_id for each in announced} == self._by_advisory.keys()
        for name, node in self._nodes.items():
            own = [request for request in self._requests.values() if request.node is node]
            assert node.num_requests == len(own)
            assert node.num_urgent == sum(request.ask.is_urgent for request in own)
            assert node.unreported.keys() <= {request.ask.request_id for request in own}
            assert node.on_the_way == _sum(name, (request.ask for request in node.unreported.values()))
            assert node.expected == _sum(name, (each.ask for each in announced if each.node_id == name))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _node(self, node_id: str) -> _Node:
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = _Node(node_id)
        return node

    def _known(self, key: SessionKey) -> _Session:
        """Return the session; for an unknown one an empty session, which is not kept."""
        return self._sessions.get(key) or _Session()

    def _remember(self, key: SessionKey) -> _Session:
        session = self._sessions.pop(key, None) or _Session()
        self._sessions[key] = session
        while len(self._sessions) > self._max_sessions:
            self._drop(next(iter(self._sessions)))
        return session

    def _drop(self, key: SessionKey) -> None:
        session = self._sessions.pop(key)
        self._end_announcement(session)
        self._move(session, "")

    def _move(self, session: _Session, node_id: str) -> None:
        for place, change in ((session.home, -1), (node_id, 1)):
            if place:
                self._num_homes[place] += change
                if not self._num_homes[place]:
                    del self._num_homes[place]
        session.home = node_id

    def _end_announcement(self, session: _Session) -> tuple[str, str] | None:
        """End the session's advisory, if any, and return its (node, advisory)."""
        announced = session.announced
        if announced is None:
            return None
        session.announced = None
        del self._by_advisory[announced.advisory_id]
        self._nodes[announced.node_id].expected.count(announced.ask, announced.node_id, -1)
        return announced.node_id, announced.advisory_id

    def _can_serve(self, node_id: str, ask: RequestEstimate, avoid: Collection[str] = ()) -> bool:
        node = self._nodes.get(node_id)
        if node is None or node.facts is None or node_id in avoid:
            return False
        has_adapter = ask.usual_load_s is not None or node_id in ask.adapter_load_s
        return node.is_open and node.facts.is_open and has_adapter

    def _asked(self, ask: RequestEstimate, session: _Session) -> RequestEstimate:
        """Return the ask with its session's facts: where its KV is, and the seconds to the device there and elsewhere, as its home measured."""
        if not session.home:
            return ask
        # An advisory of a session without kept token ids says nothing of its length: take the length that the session had.
        if not ask.num_prompt_tokens:
            ask = structs.replace(ask, num_prompt_tokens=session.num_tokens)
        num_cached = min(session.num_tokens, ask.num_prompt_tokens)
        perf = self._perf(session.home)
        if not num_cached or perf is None:
            kv = {session.home: CachedKv(num_cached)} if num_cached else {}
            return structs.replace(ask, home=session.home, kv=kv)
        load_s = perf.kv_load_s(num_cached)
        # On another node it is written to disk again, which delays reads there.
        move_s = num_cached * perf.kv_disk_token_s
        return self._with_kv(ask, session.home, CachedKv(num_cached, load_s), load_s, move_s)

    def _announced(self, ask: RequestEstimate, session: _Session, place: str) -> RequestEstimate:
        """Return the ask with its KV where it was announced: on the device by now."""
        num_cached = min(session.num_tokens, ask.num_prompt_tokens)
        perf = self._perf(place)
        if perf is None:
            return self._with_kv(ask, place, CachedKv(num_cached), 0.0)
        # If the disk writes KV more slowly than it is computed, the disk is the bottleneck: no KV moves for the sake of even numbers.
        is_short = perf.kv_disk_token_s > perf.prompt_token_s
        move_s = math.inf if is_short else 0.0
        return self._with_kv(ask, place, CachedKv(num_cached), perf.kv_load_s(num_cached), move_s)

    def _with_kv(
        self, ask: RequestEstimate, place: str, here: CachedKv, load_s: float, move_s: float = 0.0
    ) -> RequestEstimate:
        """Return the ask with the KV that each node can use of the KV `here`, on the node at `place`.

        load_s: from host memory to a device. move_s: that moving costs beside the transfer.
        """
        perf, node = self._perf(place), self._nodes[place]
        elsewhere = NO_KV
        if perf is not None and perf.kv_fetch_token_s is not None:
            fetch_s = here.num_tokens * perf.kv_fetch_token_s
            elsewhere = CachedKv(here.num_tokens, load_s + fetch_s + move_s)
        kv = {place: here}
        if node.facts is not None and node.facts.store:
            beside = CachedKv(here.num_tokens, load_s)
            for name, other in self._nodes.items():
                if other.facts is not None and other.facts.store == node.facts.store:
                    kv.setdefault(name, beside)
        return structs.replace(ask, home=place, kv=kv, kv_elsewhere=elsewhere)

    def _perf(self, node_id: str) -> NodePerf | None:
        node = self._nodes.get(node_id)
        return node.facts.perf if node is not None and node.facts is not None else None

    def _choose(
        self,
        door: RoutingPolicy,
        ask: RequestEstimate,
        avoid: Collection[str] = (),
        *,
        with_expected: bool = True,
    ) -> Route:
        return door.route(ask, self.facts(avoid, with_expected=with_expected))

    def _begin(self, key: SessionKey, ask: RequestEstimate, node_id: str, now: float) -> str:
        """Send the request to the node, and return the other node that has KV of its session; "" for none."""
        session = self._remember(key) if key[1] else _Session()
        node = self._nodes[node_id]
        request = self._requests[ask.request_id] = _Request(key, node, ask, now, session.home)
        node.begin(request)
        if key[1]:
            self._move(session, node_id)
        return request.home_before if request.home_before != node_id else ""


def _sum(node_id: str, asks: Iterable[RequestEstimate]) -> _Load:
    load = _Load()
    for ask in asks:
        load.count(ask, node_id, 1)
    return load
