"""Which agent asks next in a run of agents, and when: advisories for agents that send none.

A prediction is a promise: "this agent asks again in this run, within `MAX_GAP_S`". The agent that has just asked is a candidate like every other,
and at first the likeliest one: until evidence says otherwise, the rule is "this agent again". For each owner the odds of such promises are counted
in contexts, from wide to narrow: how the promised agent stands to the run (it has just asked, has asked before, or is new); which agent it is; after
which one; how often that one has asked in the run; and which agent asked before it. Each context begins with the odds of the wider one and departs
from them as its own evidence grows, so that short workflows are judged by what all of them have in common.

A run is the client's `workflow`; without one, a session id such as `run7:coder` without the agent's name; else everything of the owner.

A promise that came true is counted at once. A promise that did not is counted when its run has been silent for much longer than the owner's runs
ever are. If the run goes on after all, that count is corrected.

Source: SYMPHONY §4.1 profiles agents' run times beforehand and lets the client announce; here both are learned. The contexts are those of
prediction by partial matching (Cleary and Witten, 1984), mixed as MacKay and Peto (1995) mix language models, with a Beta prior for each.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import msgspec

MAX_OWNERS = 256
"""Beyond it, the owner that was silent for longest is forgotten. Chosen: more than learn at the same time."""
MAX_GAP_S = 1800.0
"""A request later than this after another does not follow it. Chosen: 99% of the next turns in Mooncake's trace come within 1,470 s."""
HALF_LIFE = 40.0
"""Number of later outcomes of a context after which an outcome counts half. See bench/LOG.md, learned advisories."""
SHRINK_WEIGHT = 4.0
"""Number of outcomes that the wider context's odds count for in the narrower one."""
CHECK_WEIGHT, NUM_BINS = 10.0, 10
"""Number of outcomes that a probability counts for when it is corrected by the outcomes in its bin, and the number of bins."""
PRIORS = {"self": 0.6, "seen": 0.6, "new": 0.1}
"""Odds for an owner without history, by how the agent stands to the run. Chosen, from `python -m bench.emulated followers`."""
PRIOR_WEIGHT = 4.0
MIN_COUNT = 3
"""Gaps needed before quantiles are taken from them. Chosen: fewer give none worth the name."""
UNKNOWN_GAP_S = (0.0, 60.0)
"""When an agent is expected if fewer than `MIN_COUNT` of its gaps are known."""
MAX_EXACT = 8
"""Requests of an agent in a run are counted exactly up to here; larger numbers with the same bit length are one context."""
MAX_CANDIDATES = 16
"""Agents that are considered after each request, those of the run first. Chosen: bounds the time, 0.1 ms."""
MAX_PENDING = 4
"""Promises kept for each agent of a run: the first and the latest. Chosen: with 8 nothing is predicted better."""
MAX_CONTEXTS = 2048
"""Contexts kept for an owner; beyond them the least recently used one is forgotten."""
MAX_GAPS = 32
"""Latest gaps that quantiles are taken from. Chosen: three lie beyond each decile."""
QUANTILES = (0.1, 0.9)
SILENCE, MIN_SILENCE_S = 2.0, 2.0
"""A run counts as over after a silence of this many times its owner's longest recent gap, and at least so many seconds. A run that goes on is
corrected, so this may be short: with ten times, promises are 0.12 too high on average, because those that come true are counted first."""
MIN_OWN = 0.1
"""The agent that asked is promised unless its probability is below this by two standard deviations. `worth` breaks even here."""

Kind = Literal["self", "seen", "new"]
Context = tuple[str, ...]
RunKey = tuple[str, str, str]
"""The workflow, and what stands before and after the agent's name in its session ids."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A request of an agent.

    workflow: one run of a graph of agents, if the client names it, else "". agent: its name, else "". adapter: the LoRA adapter or None.
    """

    owner: str
    workflow: str
    agent: str
    session_id: str
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class LikelyCall:
    """A request that is likely to come.

    probability: that it comes in this run within `MAX_GAP_S`. earliest_s, latest_s: from now; four of five such requests come between them.
    """

    agent: str
    session_id: str
    adapter: str | None
    probability: float
    earliest_s: float
    latest_s: float

    @property
    def lifetime_s(self) -> float:
        """How long to wait for it: ten times the time in which nine of ten come, and a minute."""
        return min(10 * self.latest_s + 60.0, MAX_GAP_S)


# -- state --------------------------------------------------------------------------------------------------------------


class Odds(msgspec.Struct):
    """How often promises of one context came true. weight: number of outcomes, came: number of true ones, both decayed."""

    weight: float = 0.0
    came: float = 0.0

    def add(self, has_come: bool) -> None:
        """Count an outcome."""
        left = 0.5 ** (1 / HALF_LIFE)
        self.weight = self.weight * left + 1.0
        self.came = self.came * left + has_come

    def correct(self) -> None:
        """Count an outcome as true that was counted as false."""
        self.came = min(self.came + 1.0, self.weight)

    def mean(self, prior: float, prior_weight: float) -> float:
        """Return the share that came true, mixed with a prior that counts for `prior_weight` outcomes."""
        return (self.came + prior * prior_weight) / (self.weight + prior_weight)


class Succession(msgspec.Struct):
    """Gaps between one agent's request and another's, counted from the first one's arrival and from its end.

    is_named_alike: the last session id of the second agent was the first one's with the name replaced.
    """

    is_named_alike: bool = False
    since_arrival_s: list[float] = msgspec.field(default_factory=list)
    since_end_s: list[float] = msgspec.field(default_factory=list)


class Agent(msgspec.Struct):
    """An agent's latest request. keeps_session: its last run used the session of the run before."""

    session_id: str | None = None
    adapter: str | None = None
    keeps_session: bool = False


class SavedOwner(msgspec.Struct):
    """The part of an owner's state that outlives a restart: all but the runs, whose times are this process's.

    Least recently used entries first.
    """

    name: str
    agents: list[tuple[str, Agent]]
    odds: list[tuple[Context, Odds]]
    links: list[tuple[Context, Succession]]
    gaps_s: list[float]


@dataclass(slots=True)
class _Visit:
    """An agent's request in a run. place: its number in the run; number: its number among the agent's own; before: the agent that asked before."""

    arrival: AgentCall
    arrived_s: float
    place: int
    number: int
    before: str
    ended_s: float | None = None


@dataclass(slots=True)
class _Promise:
    """A promise that an agent follows a visit. share: its probability when made; is_counted: it was counted as false, its run being silent."""

    visit: _Visit
    share: float
    is_counted: bool = False


@dataclass(slots=True)
class _Run:
    """The agents of a run by their latest request, the latest last. pending: the promises for each agent."""

    last_s: float
    num_requests: int = 0
    visits: OrderedDict[str, _Visit] = field(default_factory=OrderedDict)
    pending: dict[str, list[_Promise]] = field(default_factory=dict)

    def kind(self, agent: str, visit: _Visit) -> Kind:
        """Say how an agent stands to a request of the run. It is the same for all requests whose promises are pending."""
        if agent == visit.arrival.agent:
            return "self"
        return "seen" if agent in self.visits else "new"


def _contexts(kind: Kind, agent: str, visit: _Visit) -> tuple[Context, ...]:
    """Return the contexts of a promise, from the widest to the narrowest."""
    number, asked = visit.number, visit.arrival.agent
    size = str(number) if number < MAX_EXACT else f">{number.bit_length()}"
    return (
        (kind,),
        (kind, agent),
        (kind, agent, asked),
        (kind, agent, asked, size),
        (kind, agent, asked, size, visit.before),
    )


def _bin(kind: Kind, share: float) -> Context:
    """Return the context of all promises of a kind that were about equally likely."""
    return kind, "", "", str(int(share * NUM_BINS)), "", ""


@dataclass(slots=True)
class _Owner:
    """One owner's agents, runs and odds. Each mapping is in order of use, the latest last.

    open: runs that do not seem to be over. links: by the agent that asked and the agent that came. gaps_s: between two requests of a run.
    num_sessions: number of visits of all runs.
    """

    agents: OrderedDict[str, Agent] = field(default_factory=OrderedDict)
    runs: OrderedDict[RunKey, _Run] = field(default_factory=OrderedDict)
    open: OrderedDict[RunKey, _Run] = field(default_factory=OrderedDict)
    odds: OrderedDict[Context, Odds] = field(default_factory=OrderedDict)
    links: OrderedDict[Context, Succession] = field(default_factory=OrderedDict)
    gaps_s: list[float] = field(default_factory=list)
    num_sessions: int = 0

    def probability(self, kind: Kind, agent: str, visit: _Visit) -> tuple[float, float]:
        """Return the probability that the agent follows this request in its run, and its standard deviation.

        It is the share of the contexts, corrected by the outcomes of other promises with about the same share.
        """
        share, weight = self._share(kind, agent, visit)
        checked = self.odds.get(_bin(kind, share))
        if checked is not None:
            share = checked.mean(share, CHECK_WEIGHT)
        return share, math.sqrt(share * (1 - share) / (weight + 1))

    def _share(self, kind: Kind, agent: str, visit: _Visit) -> tuple[float, float]:
        """Return the share of promises that came true in such contexts, and the number of outcomes that it rests on."""
        share, weight, num = PRIORS[kind], PRIOR_WEIGHT, PRIOR_WEIGHT
        for context in _contexts(kind, agent, visit):
            odds = self.odds.get(context)
            if odds is None:
                break  # A narrower context has seen nothing either.
            share, num, weight = odds.mean(share, weight), odds.weight + weight, SHRINK_WEIGHT
        return share, num

    def trivial_precision(self) -> float:
        """Return how often "this agent again" has come true recently."""
        return self.odds.get(("self",), Odds()).mean(PRIORS["self"], PRIOR_WEIGHT)

    def _count(self, kind: Kind, agent: str, promise: _Promise, has_come: bool) -> None:
        for context in (*_contexts(kind, agent, promise.visit), _bin(kind, promise.share)):
            odds = self.odds.setdefault(context, Odds())
            self.odds.move_to_end(context)
            if promise.is_counted:
                odds.correct()
            else:
                odds.add(has_come)

    def _keep_promises(self, run: _Run, arrival: AgentCall, now: float) -> None:
        """Count the promises that this request makes true, or that it comes too late for."""
        agent = arrival.agent
        for promise in run.pending.pop(agent, ()):
            visit, kind = promise.visit, run.kind(agent, promise.visit)
            in_time = now - visit.arrived_s <= MAX_GAP_S
            if in_time or not promise.is_counted:
                self._count(kind, agent, promise, in_time)
            if in_time:
                link = self.links.setdefault((visit.arrival.agent, agent), Succession())
                self.links.move_to_end((visit.arrival.agent, agent))
                link.is_named_alike = _renamed(visit.arrival, agent) == arrival.session_id
                _keep_gap(link.since_arrival_s, now - visit.arrived_s)
                if visit.ended_s is not None:
                    _keep_gap(link.since_end_s, now - visit.ended_s)

    def close_silent(self, now: float) -> None:
        """Count the promises of the run that was silent for longest as false, if that run seems to be over."""
        silence_s = MAX_GAP_S
        if len(self.gaps_s) >= MIN_COUNT:
            silence_s = min(max(SILENCE * max(self.gaps_s), MIN_SILENCE_S), MAX_GAP_S)
        # One run a call: counting a run of forty agents takes a millisecond, and each run comes with a request.
        if self.open and now - (run := next(iter(self.open.values()))).last_s >= silence_s:
            self.open.popitem(last=False)
            for agent, promises in run.pending.items():
                for promise in promises:
                    if not promise.is_counted:
                        self._count(run.kind(agent, promise.visit), agent, promise, False)
                        promise.is_counted = True

    def run(self, key: RunKey, now: float) -> _Run:
        """Return the run; a new one if it is unknown or was silent for more than `MAX_GAP_S`."""
        run = self.runs.get(key)
        if run is not None and now - run.last_s > MAX_GAP_S:
            self.num_sessions -= len(run.visits)
            run = None
        if run is None:
            run = self.runs[key] = _Run(now)
        elif run.num_requests:
            _keep_gap(self.gaps_s, now - run.last_s)
        self.open[key] = run
        self.runs.move_to_end(key)
        self.open.move_to_end(key)
        run.last_s = max(run.last_s, now)
        return run

    def visit(self, run: _Run, arrival: AgentCall, now: float) -> None:
        """Put a request into its run, in place of the agent's former one, and make the promises that follow from it."""
        name, former = arrival.agent, run.visits.get(arrival.agent)
        self._keep_promises(run, arrival, now)
        agent = self.agents.setdefault(name, Agent())
        self.agents.move_to_end(name)
        if former is None:
            self.num_sessions += 1
            agent.keeps_session = agent.session_id == arrival.session_id
        agent.session_id, agent.adapter = arrival.session_id, arrival.adapter
        run.num_requests += 1
        before = next(reversed(run.visits), "")
        number = 1 if former is None else former.number + 1
        visit = run.visits[name] = _Visit(arrival, now, run.num_requests, number, before)
        run.visits.move_to_end(name)
        for candidate in self.candidates(run):
            share, _ = self._share(run.kind(candidate, visit), candidate, visit)
            promises = run.pending.setdefault(candidate, [])
            if len(promises) >= MAX_PENDING:
                del promises[1]  # The first is after the agent's own last request, or the run's first.
            promises.append(_Promise(visit, share))

    def candidates(self, run: _Run) -> list[str]:
        """Return the agents that may come next: the run's agents, the latest first, then the agents that the owner used last."""
        found = dict.fromkeys(islice(reversed(run.visits), MAX_CANDIDATES))
        for name in islice(reversed(self.agents), MAX_CANDIDATES):
            found.setdefault(name)
        return list(found)[:MAX_CANDIDATES]

    def shrink(self, max_agents: int, max_sessions: int) -> None:
        """Forget the least recently used agents, contexts, links and sessions."""
        for kept, most in ((self.agents, max_agents), (self.odds, MAX_CONTEXTS), (self.links, MAX_CONTEXTS)):
            while len(kept) > most:
                kept.popitem(last=False)
        while self.num_sessions > max_sessions:
            key, run = next(iter(self.runs.items()))
            agent, _ = run.visits.popitem(last=False)
            run.pending.pop(agent, None)
            self.num_sessions -= 1
            if not run.visits:
                del self.runs[key]
                self.open.pop(key, None)


def _keep_gap(gaps_s: list[float], gap_s: float) -> None:
    gaps_s.append(max(gap_s, 0.0))
    del gaps_s[:-MAX_GAPS]


# -- the learner -------------------------------------------------------------------------------------------------------


class Followers:
    """Learns from arrivals and ends of requests, and predicts the next ones. Owners share nothing.

    Args:
        max_agents, max_sessions: of each owner; beyond them its own oldest are forgotten. A session is an agent's latest in a run.
        max_guesses: number of predictions that `expected` returns at most.
        min_probability: of each prediction but that of the agent itself.
    """

    def __init__(
        self,
        *,
        max_agents: int = 64,
        max_sessions: int = 512,
        max_guesses: int = 4,
        min_probability: float = 0.3,
    ) -> None:
        self._max_agents = max_agents
        self._max_sessions = max_sessions
        self._max_guesses = max_guesses
        self._min_probability = min_probability
        self._owners: OrderedDict[str, _Owner] = OrderedDict()

    def num_sessions(self, owner: str) -> int:
        """Return how many sessions of an owner are remembered."""
        known = self._owners.get(owner)
        return 0 if known is None else known.num_sessions

    def note(self, arrival: AgentCall, now: float) -> None:
        """Learn from a request that has come. `expected` then returns what follows it."""
        owner = self._put(arrival.owner, self._owners.get(arrival.owner) or _Owner())
        owner.close_silent(now)
        owner.visit(owner.run(_run_key(arrival), now), arrival, now)
        owner.shrink(self._max_agents, self._max_sessions)

    def ended(self, arrival: AgentCall, now: float) -> None:
        """Learn that a noted request has finished. Optional; with it, gaps do not vary with the time that answers take.

        Of several requests that an agent has running in one run, only the latest one's end counts.
        """
        found = self._find(arrival)
        if found is None:
            return
        run, visit = found
        if visit.ended_s is None and visit.arrival.session_id == arrival.session_id:
            visit.ended_s = max(now, visit.arrived_s)
            run.last_s = max(run.last_s, now)

    def expected(self, arrival: AgentCall, now: float) -> list[LikelyCall]:
        """Return the requests likely to follow a noted one: the agent's own next, then others, the soonest first.

        Ask when the request has come, or for better times when it has ended. Left out are agents that have followed already or are overdue, and
        other agents with less than the recent precision of "this agent again", so that all promises together are no less precise than that rule.
        """
        found = self._find(arrival)
        if found is None:
            return []
        owner = self._owners[arrival.owner]
        bar = max(self._min_probability, owner.trivial_precision())
        own: list[LikelyCall] = []
        others: list[LikelyCall] = []
        for guess, deviation in _guesses(owner, *found, now):
            if guess.agent == arrival.agent:
                own += [guess] * (guess.probability + 2 * deviation >= MIN_OWN)
            elif guess.probability >= bar:
                others.append(guess)
        others.sort(key=lambda guess: (guess.earliest_s, -guess.probability, guess.agent))
        return (own + others)[: self._max_guesses]

    def saved(self) -> Iterator[SavedOwner]:
        """Yield what to keep over a restart, owner by owner, for `restore`. Requests may be noted between two of them."""
        for name in list(self._owners):
            known = self._owners.get(name)
            if known is not None:
                odds, links = list(known.odds.items()), list(known.links.items())
                yield SavedOwner(name, list(known.agents.items()), odds, links, known.gaps_s)

    def restore(self, saved: SavedOwner) -> None:
        """Replace an owner's state by a saved one."""
        owner = _Owner(OrderedDict(saved.agents), gaps_s=saved.gaps_s)
        owner.odds, owner.links = OrderedDict(saved.odds), OrderedDict(saved.links)
        owner.shrink(self._max_agents, self._max_sessions)
        self._put(saved.name, owner)

    def forget(self, name: str) -> None:
        """Forget all that was learned of an owner's agents."""
        self._owners.pop(name, None)

    def _put(self, name: str, owner: _Owner) -> _Owner:
        self._owners[name] = owner
        self._owners.move_to_end(name)
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)
        return owner

    def _find(self, arrival: AgentCall) -> tuple[_Run, _Visit] | None:
        owner = self._owners.get(arrival.owner)
        run = None if owner is None else owner.runs.get(_run_key(arrival))
        visit = None if run is None else run.visits.get(arrival.agent)
        return None if run is None or visit is None else (run, visit)


def _guesses(owner: _Owner, run: _Run, visit: _Visit, now: float) -> Iterator[tuple[LikelyCall, float]]:
    """Yield the candidates that have not come since the visit, each with the standard deviation of its probability."""
    for agent in owner.candidates(run):
        latest = run.visits.get(agent)
        if latest is not None and latest.place > visit.place:
            continue
        link = owner.links.get((visit.arrival.agent, agent))
        session = _session(owner, run, visit.arrival, agent, link)
        window = _window(visit, link, now)
        if window is not None and session is not None:
            share, deviation = owner.probability(run.kind(agent, visit), agent, visit)
            yield LikelyCall(agent, *session, share, *window), deviation


def _run_key(arrival: AgentCall) -> RunKey:
    """Return which run a request belongs to; see the module's docstring."""
    if arrival.workflow:
        return arrival.workflow, "", ""
    if not arrival.agent:
        return "", arrival.session_id, ""
    return "", *(_around(arrival.session_id, arrival.agent) or ("", ""))


def _around(session_id: str, agent: str) -> tuple[str, str] | None:
    """Split a session id at the agent's name, where that is a whole word; None where it is not: `a` is no name in `7fa3`."""
    start = session_id.find(agent) if agent else -1
    while start >= 0:
        end = start + len(agent)
        if not session_id[:start][-1:].isalnum() and not session_id[end : end + 1].isalnum():
            return session_id[:start], session_id[end:]
        start = session_id.find(agent, start + 1)
    return None


def _renamed(arrival: AgentCall, agent: str) -> str | None:
    """Return the arrival's session id with `agent` in place of the arrival's agent; None if the id does not contain that name."""
    around = _around(arrival.session_id, arrival.agent)
    return None if around is None else agent.join(around)


def _session(
    owner: _Owner, run: _Run, arrival: AgentCall, agent: str, link: Succession | None
) -> tuple[str, str | None] | None:
    """Return an agent's likely session and adapter: as used in this run, else as session names or the agent's last runs suggest."""
    visit = run.visits.get(agent)
    if visit is not None:
        return visit.arrival.session_id, visit.arrival.adapter
    known = owner.agents.get(agent)
    if known is None:
        return None
    renamed = _renamed(arrival, agent) if link is not None and link.is_named_alike else None
    session = renamed or (known.session_id if known.keeps_session else None)
    return None if session is None else (session, known.adapter)


def _window(visit: _Visit, link: Succession | None, now: float) -> tuple[float, float] | None:
    """Return when the follower comes, in seconds from now, as quantiles of the gap; None if it is overdue."""
    start_s, (early_s, late_s) = visit.arrived_s, UNKNOWN_GAP_S
    if link is not None and len(link.since_arrival_s) >= MIN_COUNT:
        gaps = link.since_arrival_s
        if visit.ended_s is not None and len(link.since_end_s) >= MIN_COUNT:
            start_s, gaps = visit.ended_s, link.since_end_s
        ordered = sorted(gaps)
        early_s, late_s = (_quantile(ordered, share) for share in QUANTILES)
    latest_s = start_s + late_s - now
    return None if latest_s < 0 else (max(start_s + early_s - now, 0.0), latest_s)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values, interpolated between two of them and bounded by the least and the greatest."""
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
