"""Session nodes behind one router, and who asks them: people who go on with their sessions, and workflows of agents."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.sim.core.batch import Request
from bench.sim.core.clock import Clock
from bench.sim.core.conversations import Chats, Session
from bench.sim.core.session_node import SessionNode, StepPrefill, Turn
from bench.sim.core.shapes import BLOCK_TOKENS
from bench.sim.core.tiers import SessionKv
from engine_bridge.policy.nodes.routing import RequestEstimate
from engine_bridge.policy.nodes.session_locations import Doors, Homes, Sent, SessionKey
from engine_bridge.protocol.node_facts import NodeFacts, NodePerf, Ranks
from engine_bridge.protocol.urgency import is_urgent


def facts_of(
    node_id: str,
    node: SessionNode,
    perf: NodePerf | None = None,
    adapter_ranks: Sequence[int] = (),
    store: str = "",
) -> NodeFacts:
    """What a node reports. Turns that wait for their KV are queued, too."""
    waiting, held = node.waiting.values(), node.held
    start_tokens = sum(node.start_blocks(request) for request in waiting) * BLOCK_TOKENS
    start_tokens += sum(turn.num_prompt_tokens for turn in held)
    return NodeFacts(
        node_id=node_id,
        running=_ranks([request.rank for request in node.running.values()]),
        queued=_ranks(
            [request.rank for request in waiting] + [_rank(turn.adapter_id, adapter_ranks) for turn in held]
        ),
        num_tokens=node.kv_blocks * BLOCK_TOKENS + start_tokens,
        queued_tokens=sum(map(node.start_tokens, waiting)) + sum(map(node.tail_tokens, held)),
        free_tokens=max(node.free_blocks * BLOCK_TOKENS - start_tokens, 0),
        perf=perf,
        store=store,
    )


def _rank(adapter_id: int | None, adapter_ranks: Sequence[int]) -> int:
    return adapter_ranks[adapter_id] if adapter_id is not None else 0


def _ranks(ranks: Sequence[int]) -> Ranks:
    return Ranks(len(ranks), sum(ranks), max(ranks, default=0))


class SessionCluster:
    """Sends advisories and requests to nodes as the live router's `Homes` says, which hears of a node at the moment of each choice.

    Args:
        perfs: of each node, as it says of itself.
        answer_tokens: what is reckoned with for every request: nobody predicts answers here.
        adapter_ranks: by adapter id.
    """

    def __init__(
        self,
        nodes: Sequence[SessionNode],
        doors: Doors,
        perfs: Sequence[NodePerf | None],
        answer_tokens: int,
        adapter_ranks: Sequence[int] = (),
    ) -> None:
        self.nodes = nodes
        self._ranks = adapter_ranks
        self._ids = [str(at) for at in range(len(nodes))]
        self._perfs, self._answer_tokens = perfs, answer_tokens
        self._homes = Homes(doors, settle_s=0.0)
        hosts = list(dict.fromkeys(node.host for node in nodes))
        self._stores = ["" if node.host is None else f"host {hosts.index(node.host)}" for node in nodes]

    def place(self, kv: SessionKv, num_blocks: int, at: int) -> None:
        """A session that went on there before the run began."""
        self._homes.placed(_key(kv), self._ids[at], num_blocks * BLOCK_TOKENS)
        host = self.nodes[at].host
        if host is not None:
            host.place(kv, num_blocks)

    def advise(
        self, kv: SessionKv, arrival_s: float | None, priority: int, now: float, adapter_id: int | None = None
    ) -> None:
        self._look(now)
        ask = self._ask(kv.session_id, kv.saved_blocks * BLOCK_TOKENS, adapter_id, priority)
        sent = self._homes.advised(_key(kv), kv.session_id, ask)
        self.nodes[_place(sent)].advise(kv, arrival_s, priority, now)

    def submit(self, turn: Turn) -> None:
        self._look(turn.at_s)
        ask = self._ask(turn.request_id, turn.num_prompt_tokens, turn.adapter_id, turn.priority)
        sent = self._homes.requested(_key(turn.kv), ask, turn.at_s)
        if sent.over is not None:
            self.nodes[int(sent.over[0])].retract(turn.kv)
        self.nodes[_place(sent)].arrive(turn)

    def _ask(self, name: str, num_tokens: int, adapter_id: int | None, priority: int) -> RequestEstimate:
        return RequestEstimate(
            request_id=name,
            num_prompt_tokens=num_tokens,
            num_answer_tokens=self._answer_tokens,
            rank=_rank(adapter_id, self._ranks),
            is_urgent=is_urgent(priority),
        )

    def _look(self, now: float) -> None:
        for node_id, node, perf, store in zip(self._ids, self.nodes, self._perfs, self._stores, strict=True):
            self._homes.reported(node_id, facts_of(node_id, node, perf, self._ranks, store), now)

    def ended(self, turn: Turn) -> None:
        """A request ended where it was sent."""
        num_tokens = turn.num_prompt_tokens + turn.num_answer_tokens
        self._homes.ended(turn.request_id, num_tokens=num_tokens // BLOCK_TOKENS * BLOCK_TOKENS)

    def forget(self, kv: SessionKv) -> None:
        """Its session goes on no more. What is stored of it stays: nobody says so to a node."""
        self._homes.forgotten(_key(kv))


def _key(kv: SessionKv) -> SessionKey:
    return "", kv.session_id


def _place(sent: Sent) -> int:
    assert sent.node_id is not None, "all nodes are open"
    return int(sent.node_id)


@dataclass(slots=True)
class Loads:
    """Requests at the nodes, looked at once a second: the most, the median and the least of all nodes."""

    most: list[int] = field(default_factory=list)
    median: list[float] = field(default_factory=list)
    least: list[int] = field(default_factory=list)

    def watch(self, clock: Clock, nodes: Sequence[SessionNode], from_s: float, until_s: float) -> None:
        def look(now: float) -> None:
            counts = [node.num_requests for node in nodes]
            self.most.append(max(counts))
            self.median.append(statistics.median(counts))
            self.least.append(min(counts))
            if now + 1 < until_s:
                clock.at(now + 1, look)

        clock.at(from_s, look)


# -- people ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _User:
    number: int
    rng: random.Random
    session: Session
    place: int
    kv: SessionKv
    priority: int
    adapter_id: int | None = None
    num_sessions: int = 0
    num_tokens: int = 0  # of the session so far


@dataclass(frozen=True, slots=True)
class Habits:
    """How people ask. missing: share of turns without an advisory; urgent: share of people of high priority; lead_share: times the leads of
    advisories, which come later than typing begins if it is below 1. num_adapters: of which each person has one; 0: all ask the base model.
    begin_on_first: all sessions that are under way are on the first node, which the others have just joined."""

    chats: Chats = field(default_factory=Chats)
    has_advisories: bool = True
    missing: float = 0.0
    urgent: float = 0.0
    lead_share: float = 1.0
    num_adapters: int = 0
    begin_on_first: bool = False


class Users:
    """So many at any time; whoever has done with a session begins another. All that they do is the seed's alone, but for when answers come."""

    def __init__(
        self, clock: Clock, cluster: SessionCluster, habits: Habits, num_users: int, seed: int
    ) -> None:
        self._clock, self._cluster, self._habits = clock, cluster, habits
        self._by_request: dict[str, _User] = {}
        rng = random.Random(f"users {seed}")
        met = habits.chats.under_way(rng, num_users)
        self._users = [
            self._user(number, session, place, seed) for number, (session, place) in enumerate(met)
        ]

    def _user(self, number: int, session: Session, place: int, seed: int) -> _User:
        rng = random.Random(f"user {seed} {number}")
        priority = -1 if rng.random() < self._habits.urgent else 0
        adapter_id = rng.randrange(self._habits.num_adapters) if self._habits.num_adapters else None
        user = _User(number, rng, session, place, SessionKv(f"{number}.0"), priority, adapter_id)
        user.num_tokens = sum(e.num_prompt_tokens + e.num_answer_tokens for e in session[:place])
        return user

    def start(self) -> None:
        """All at some moment of their reading and typing."""
        for user in self._users:
            if user.num_tokens:
                at = 0 if self._habits.begin_on_first else user.number % len(self._cluster.nodes)
                self._cluster.place(user.kv, (user.num_tokens - 1) // BLOCK_TOKENS, at)
            exchange = user.session[user.place]
            think_s = exchange.lead_s + exchange.read_s
            self._clock.at(user.rng.uniform(0, think_s), lambda now, user=user: self._type(user, now))  # type: ignore[misc]

    def _type(self, user: _User, now: float) -> None:
        habits, lead_s = self._habits, user.session[user.place].lead_s
        is_missing = user.rng.random() < habits.missing
        if habits.has_advisories and not is_missing:
            late_s = lead_s * (1 - habits.lead_share)
            self._clock.at(now + late_s, lambda now: self._advise(user, now))
        self._clock.at(now + lead_s, lambda now: self._send(user, now))

    def _advise(self, user: _User, now: float) -> None:
        self._cluster.advise(user.kv, None, user.priority, now, user.adapter_id)

    def _send(self, user: _User, now: float) -> None:
        exchange = user.session[user.place]
        turn = Turn(
            f"{user.kv.session_id}.{user.place:04d}",
            now,
            user.num_tokens + exchange.num_prompt_tokens,
            exchange.num_answer_tokens,
            kv=user.kv,
            priority=user.priority,
            adapter_id=user.adapter_id,
        )
        self._by_request[turn.request_id] = user
        self._cluster.submit(turn)

    def ended(self, request: Request, now: float) -> None:
        """An answer is there: it is read, and the next question typed."""
        turn = request.arrival
        assert isinstance(turn, Turn)
        self._cluster.ended(turn)
        user = self._by_request.pop(turn.request_id)
        read_s = user.session[user.place].read_s
        user.num_tokens = turn.num_prompt_tokens + turn.num_answer_tokens
        user.place += 1
        if user.place == len(user.session):
            self._cluster.forget(user.kv)
            user.num_sessions += 1
            user.kv = SessionKv(f"{user.number}.{user.num_sessions}")
            user.session, user.place = self._habits.chats.session(user.rng), 0
            user.num_tokens = 0
        self._clock.at(now + read_s, lambda now: self._type(user, now))


# -- agents ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """What an agent is asked: new text behind its own history."""

    agent: str
    num_prompt_tokens: int
    num_answer_tokens: int


@dataclass(frozen=True, slots=True)
class Company:
    """MetaGPT's software company: an architect writes documents; then for each file an engineer codes, and a tester's reviews and the
    engineer's revisions take turns three times (SYMPHONY §4.4).

    Numbers: 3 documents and 5.1 files of 49.3 lines for a project (MetaGPT, Hong et al., 2023, table of its SoftwareDev results). Tokens of a
    document, a line and a review are chosen; with one review each agent reads and writes some 38K tokens in all, where that table has 31K.
    """

    num_documents: int = 3
    mean_files: float = 5.1
    document_tokens: float = 500.0
    file_tokens: float = 49.3 * 11
    review_tokens: float = 200.0
    num_reviews: int = 3
    sigma: float = 0.3

    def drawn(self, rng: random.Random) -> tuple[list[Task], list[list[Task]]]:
        """The documents in order, then a chain for each file; chains run side by side."""

        def size(mean: float) -> int:
            return max(round(mean * rng.lognormvariate(-(self.sigma**2) / 2, self.sigma)), 8)

        documents = [Task("architect", 100, size(self.document_tokens)) for _ in range(self.num_documents)]
        shared = sum(task.num_answer_tokens for task in documents)
        num_files = max(round(rng.gauss(self.mean_files, 1.0)), 1)
        return documents, [list(self._file(at, shared, size)) for at in range(num_files)]

    def _file(self, at: int, shared: int, size: Callable[[float], int]) -> Iterator[Task]:
        engineer, tester = f"engineer{at}", f"tester{at}"
        code = size(self.file_tokens)
        yield Task(engineer, shared + 50, code)
        for review in range(self.num_reviews):
            words = size(self.review_tokens)
            yield Task(tester, code + (shared if review == 0 else 0), words)
            code = size(self.file_tokens)
            yield Task(engineer, words, code)


@dataclass(slots=True, eq=False)
class _Workflow:
    number: int
    began_s: float
    documents: list[Task]
    chains: list[list[Task]]
    kv: dict[str, SessionKv] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    num_left: int = 0


class Workflows:
    """So many at once. An agent's start announces the next agent in its chain, no sooner than its own prompt is computed (SYMPHONY §3.1)."""

    def __init__(
        self,
        clock: Clock,
        cluster: SessionCluster,
        company: Company,
        num_workflows: int,
        seed: int,
        *,
        has_advisories: bool,
        spread_s: float = 10.0,
    ) -> None:
        self.took_s: list[float] = []
        self.leads_s: list[float] = []
        self._clock, self._cluster, self._has_advisories = clock, cluster, has_advisories
        self._prefill = StepPrefill(cluster.nodes[0].cost, BLOCK_TOKENS * 128)
        self._running: dict[str, tuple[_Workflow, list[Task], int]] = {}
        self._announced_s: dict[str, float] = {}
        rng = random.Random(f"workflows {seed}")
        self._workflows = [
            _Workflow(number, rng.uniform(0, spread_s), *company.drawn(rng))
            for number in range(num_workflows)
        ]

    def start(self) -> None:
        for workflow in self._workflows:
            begin = lambda now, workflow=workflow: self._run(workflow, workflow.documents, 0, now)  # noqa: E731
            self._clock.at(workflow.began_s, begin)

    def _run(self, workflow: _Workflow, chain: list[Task], place: int, now: float) -> None:
        task = chain[place]
        kv = self._kv(workflow, task.agent)
        announced_s = self._announced_s.pop(kv.session_id, None)
        if announced_s is not None:
            self.leads_s.append(now - announced_s)
        num_prompt = workflow.num_tokens.get(task.agent, 0) + task.num_prompt_tokens
        turn = Turn(f"{kv.session_id}.{place}", now, num_prompt, task.num_answer_tokens, kv=kv)
        self._running[turn.request_id] = (workflow, chain, place)
        self._cluster.submit(turn)
        if self._has_advisories and place + 1 < len(chain):
            following = self._kv(workflow, chain[place + 1].agent)
            if following is not kv:
                self._announced_s[following.session_id] = now
                arrival_s = now + self._prefill.prefill_s(task.num_prompt_tokens)
                self._cluster.advise(following, arrival_s, 0, now)

    def _kv(self, workflow: _Workflow, agent: str) -> SessionKv:
        return workflow.kv.setdefault(agent, SessionKv(f"{workflow.number}.{agent}"))

    def ended(self, request: Request, now: float) -> None:
        turn = request.arrival
        assert isinstance(turn, Turn)
        self._cluster.ended(turn)
        workflow, chain, place = self._running.pop(turn.request_id)
        workflow.num_tokens[chain[place].agent] = turn.num_prompt_tokens + turn.num_answer_tokens
        if place + 1 < len(chain):
            self._run(workflow, chain, place + 1, now)
        elif chain is workflow.documents:
            workflow.num_left = len(workflow.chains)
            for file in workflow.chains:
                self._run(workflow, file, 0, now)
        else:
            workflow.num_left -= 1
            if workflow.num_left == 0:
                self.took_s.append(now - workflow.began_s)
