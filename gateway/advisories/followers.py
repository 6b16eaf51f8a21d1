"""Who comes next in a run of agents, and when: advisories for agents that send none.

What is foreseen is a promise: "this agent asks again in this run, within `MAX_GAP_S`". The agent that has just asked is a candidate like every
other, and to begin with the likeliest one: until evidence says otherwise, the rule is "this agent again". For each owner the odds of such
promises are counted by context: whether the agent is the one that asked, one that was in the run before, or a new one; which agent it is; after
whom; how often that one has asked in the run; who asked before it. Each context begins with what the next wider one says and departs from it
as its own evidence grows, so that short workflows are judged by what all of them have in common.

What a run is: the client's `workflow`; without one, what is left of a session id such as `run7:coder` without the agent's name; else everything of
this owner. Chat, without workflow and agent: the session is the run, and its owner's sessions together teach how likely a next turn is.

A promise that came true is counted at once. One that did not is counted when its run has been silent for much longer than the owner's runs ever
are; until then it counts neither way, and if the run goes on after all, the count is put right.

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

MAX_GAP_S = 1800.0
"""A request more than this after another does not follow it. Chosen: 99% of the next turns in Mooncake's trace come within 1,470 s."""
HALF_LIFE = 40.0
"""After this many outcomes of a context, what an earlier one taught counts half. See bench/LOG.md, learned advisories."""
HALF_LIFE_OF_ALL = 400.0
"""The same for what an owner's agents have in common."""
SHRINK_WEIGHT = 4.0
"""Outcomes that the wider context's odds count for in the narrower one."""
CHECK_WEIGHT, NUM_BINS = 10.0, 10
"""Outcomes that a probability itself counts for when it is put right by those of others in the same of so many bins."""
PRIORS = {"self": 0.6, "seen": 0.6, "new": 0.1}
"""Assumed of an owner of whom nothing is known, by the agent's place in the run. Chosen, from `python -m bench.sim.followers`."""
PRIOR_WEIGHT = 4.0
MIN_COUNT = 3
"""Gaps seen before quantiles are taken from them. Chosen: fewer give none worth the name."""
UNKNOWN_GAP_S = (0.0, 60.0)
"""When an agent comes of which too few gaps are known."""
MAX_EXACT = 8
"""From here on, numbers of requests that have the same power of two below them are one context."""
MAX_CANDIDATES = 16
"""Agents that are considered after each request: those of the run first. Chosen: bounds the time, 0.1 ms."""
MAX_PENDING = 4
"""Requests of a run that wait for the same agent and are remembered: the first and the latest. With 8 nothing is foreseen better."""
MAX_CONTEXTS = 2048
"""Of an owner; beyond them the one that was silent for longest is forgotten."""
MAX_GAPS = 32
"""Latest gaps that quantiles are taken from. Chosen: three lie beyond each decile."""
QUANTILES = (0.1, 0.9)
SILENCE, MIN_SILENCE_S = 2.0, 2.0
"""A run is taken to be over when it was silent for so many times its owner's longest recent gap, and so many seconds. Put right where it goes on, so
it may be short: ten times leaves promises 0.12 too high on average, for those that come true are counted before those that do not."""
MIN_OWN = 0.1
"""That this agent asks again is promised unless it is less likely than this by two standard deviations. Where `worth` breaks even."""

Kind = Literal["self", "seen", "new"]
RunKey = tuple[str, str, str]
"""The workflow, and what stands before and after the agent's name in its session ids."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A request, as far as the chain goes.

    `workflow`: one run of a graph of agents, where the client names it, else "". `agent`: its name, else "". `adapter`: the LoRA adapter or None.
    """

    owner: str
    workflow: str
    agent: str
    session_id: str
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class LikelyCall:
    """A request that is likely to come.

    `probability`: that it comes, in this run and within `MAX_GAP_S`. `earliest_s`, `latest_s`: from now; if it comes, then in four of five
    cases between them.
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


# -- what is remembered ------------------------------------------------------------------------------------------------


class Odds(msgspec.Struct):
    """How often a promise in one context came true: outcomes and true ones, both faded."""

    weight: float = 0.0
    came: float = 0.0

    def add(self, has_come: bool, half_life: float) -> None:
        left = 0.5 ** (1 / half_life)
        self.weight = self.weight * left + 1.0
        self.came = self.came * left + has_come

    def put_right(self) -> None:
        """The last outcome that was counted as false came true after all."""
        self.came = min(self.came + 1.0, self.weight)

    def mean(self, prior: float, prior_weight: float) -> float:
        return (self.came + prior * prior_weight) / (self.weight + prior_weight)


class Succession(msgspec.Struct):
    """What is known of one agent's next request after another's: the gaps, by what they are counted from.

    is_named_alike: its last session id was the other's, with its own name in place of the other's.
    """

    is_named_alike: bool = False
    since_arrival_s: list[float] = msgspec.field(default_factory=list)
    since_end_s: list[float] = msgspec.field(default_factory=list)

    def add(self, visit: _Visit, now: float) -> None:
        """A request came after this one."""
        _keep_gap(self.since_arrival_s, now - visit.arrived_s)
        if visit.ended_s is not None:
            _keep_gap(self.since_end_s, now - visit.ended_s)


def _keep_gap(gaps_s: list[float], gap_s: float) -> None:
    gaps_s.append(max(gap_s, 0.0))
    del gaps_s[:-MAX_GAPS]


class Agent(msgspec.Struct):
    """`keeps_session`: the last run did not give it a new session."""

    session_id: str | None = None
    adapter: str | None = None
    keeps_session: bool = False


Context = tuple[str, ...]


class SavedOwner(msgspec.Struct):
    """What outlives a restart: all but the runs, whose times are this process's. What was used least recently comes first."""

    name: str
    agents: list[tuple[str, Agent]]
    odds: list[tuple[Context, Odds]]
    links: list[tuple[Context, Succession]]
    gaps_s: list[float]


@dataclass(slots=True)
class _Visit:
    """An agent's request in a run. `place`: its number in the run; `number`: among the agent's own; `before`: who asked before it."""

    arrival: AgentCall
    arrived_s: float
    place: int
    number: int
    before: str
    ended_s: float | None = None


@dataclass(slots=True)
class _Run:
    """The agents of a run, by their latest request; the one that asked last is last. `pending`: for each agent the requests that it may still follow.

    `counted`: requests up to this place whose promises have been counted as false, because the run seemed to be over.
    """

    last_s: float
    num_requests: int = 0
    counted: int = 0
    visits: OrderedDict[str, _Visit] = field(default_factory=OrderedDict)
    pending: dict[str, list[tuple[_Visit, float]]] = field(default_factory=dict)

    def kind(self, agent: str, visit: _Visit) -> Kind:
        """How an agent stands to a request of the run. True of all requests that it may still follow."""
        if agent == visit.arrival.agent:
            return "self"
        return "seen" if agent in self.visits else "new"

    def wait_for(self, agent: str, visit: _Visit, share: float) -> None:
        waiting = self.pending.setdefault(agent, [])
        if len(waiting) >= MAX_PENDING:
            del waiting[1]  # the first one is the agent's own last request, or the run's first
        waiting.append((visit, share))


def _contexts(kind: Kind, agent: str, visit: _Visit) -> tuple[Context, ...]:
    """From the widest to the narrowest."""
    number = visit.number
    size = str(number) if number < MAX_EXACT else f">{number.bit_length()}"
    asked = visit.arrival.agent
    return (
        (kind,),
        (kind, agent),
        (kind, agent, asked),
        (kind, agent, asked, size),
        (kind, agent, asked, size, visit.before),
    )


def _bin(kind: Kind, share: float) -> Context:
    """The context of all promises of a kind that were about as likely."""
    return kind, "", "", str(int(share * NUM_BINS)), "", ""


@dataclass(slots=True)
class _Owner:
    """All in order of use, the latest last. `open`: runs that do not seem to be over. `links`: by the agent that asked and the one that came, and
    by kind. `num_sessions` counts the visits of all runs. `gaps_s`: between two requests of a run.
    """

    agents: OrderedDict[str, Agent] = field(default_factory=OrderedDict)
    runs: OrderedDict[RunKey, _Run] = field(default_factory=OrderedDict)
    open: OrderedDict[RunKey, _Run] = field(default_factory=OrderedDict)
    odds: OrderedDict[Context, Odds] = field(default_factory=OrderedDict)
    links: OrderedDict[Context, Succession] = field(default_factory=OrderedDict)
    gaps_s: list[float] = field(default_factory=list)
    num_sessions: int = 0

    # -- odds ----------------------------------------------------------------------------------------------------------

    def probability(self, kind: Kind, agent: str, visit: _Visit) -> tuple[float, float]:
        """That the agent asks after this request, in its run, and the standard deviation of that.

        What the contexts say, put right by what became of others of which they said the same.
        """
        share, weight = self._share(kind, agent, visit)
        checked = self.odds.get(_bin(kind, share))
        if checked is not None:
            share = checked.mean(share, CHECK_WEIGHT)
        return share, math.sqrt(share * (1 - share) / (weight + 1))

    def _share(self, kind: Kind, agent: str, visit: _Visit) -> tuple[float, float]:
        """The share that has come true in such contexts, and how many outcomes that rests on."""
        share, weight, num = PRIORS[kind], PRIOR_WEIGHT, PRIOR_WEIGHT
        for context in _contexts(kind, agent, visit):
            odds = self.odds.get(context)
            if odds is None:
                break  # a narrower one has seen nothing either
            share, num, weight = odds.mean(share, weight), odds.weight + weight, SHRINK_WEIGHT
        return share, num

    def trivial_precision(self) -> float:
        """How often "this agent again" has come true of late."""
        return self.odds.get(("self",), Odds()).mean(PRIORS["self"], PRIOR_WEIGHT)

    def _count(
        self, kind: Kind, agent: str, visit: _Visit, share: float, has_come: bool, *, is_again: bool
    ) -> None:
        for context in (*_contexts(kind, agent, visit), _bin(kind, share)):
            odds = self.odds.setdefault(context, Odds())
            self.odds.move_to_end(context)
            if is_again:
                odds.put_right()
            else:
                odds.add(has_come, HALF_LIFE_OF_ALL if len(context) == 1 else HALF_LIFE)

    def has_come(self, run: _Run, arrival: AgentCall, now: float) -> None:
        """Count the promises that this request makes true, or too late."""
        agent = arrival.agent
        for visit, share in run.pending.pop(agent, ()):
            kind = run.kind(agent, visit)
            in_time = now - visit.arrived_s <= MAX_GAP_S
            was_counted = visit.place <= run.counted
            if in_time or not was_counted:
                self._count(kind, agent, visit, share, in_time, is_again=was_counted)
            if in_time:
                link = self._link(visit.arrival.agent, agent)
                link.add(visit, now)
                link.is_named_alike = _renamed(visit.arrival, agent) == arrival.session_id
                self._link(kind).add(visit, now)

    def _link(self, *key: str) -> Succession:
        link = self.links.setdefault(key, Succession())
        self.links.move_to_end(key)
        return link

    def close_silent(self, now: float) -> None:
        """Count as false what was promised in the run that was silent for longest, if it seems to be over."""
        silence_s = MAX_GAP_S
        if len(self.gaps_s) >= MIN_COUNT:
            silence_s = min(max(SILENCE * max(self.gaps_s), MIN_SILENCE_S), MAX_GAP_S)
        # One at a time: counting a run of forty agents takes a millisecond, and each run comes with a request.
        if self.open and now - (run := next(iter(self.open.values()))).last_s >= silence_s:
            self.open.popitem(last=False)
            for agent, waiting in run.pending.items():
                for visit, share in waiting:
                    if visit.place > run.counted:
                        self._count(run.kind(agent, visit), agent, visit, share, False, is_again=False)
            run.counted = run.num_requests

    # -- runs and agents -----------------------------------------------------------------------------------------------

    def run(self, key: RunKey, now: float) -> _Run:
        """The run, a new one where it is unknown or has been silent for too long for anything to follow."""
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
        """Put a request in its run, in place of the agent's former one."""
        name, former = arrival.agent, run.visits.get(arrival.agent)
        self.has_come(run, arrival, now)
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
            run.wait_for(candidate, visit, share)

    def candidates(self, run: _Run) -> list[str]:
        """Agents that may come next: those of the run, the latest first, then those that the owner has used last."""
        found = dict.fromkeys(islice(reversed(run.visits), MAX_CANDIDATES))
        for name in islice(reversed(self.agents), MAX_CANDIDATES):
            found.setdefault(name)
        return list(found)[:MAX_CANDIDATES]

    def shrink(self, max_agents: int, max_sessions: int) -> None:
        """Forget what was used least recently."""
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


# -- the learner -------------------------------------------------------------------------------------------------------


class Followers:
    """Learns from arrivals and ends of requests; says who comes next. Owners never see anything of each other.

    Args:
        max_owners: beyond it, the owner that was silent for longest is forgotten.
        max_agents, max_sessions: of each owner; beyond them its own oldest are forgotten. A session is an agent's latest in a run.
        max_guesses: that `expected` returns; min_probability: of each but that of the agent itself.
    Raises ValueError where a bound is below 1.
    """

    def __init__(
        self,
        *,
        max_owners: int = 256,
        max_agents: int = 64,
        max_sessions: int = 512,
        max_guesses: int = 4,
        min_probability: float = 0.3,
    ) -> None:
        if min(max_owners, max_agents, max_sessions, max_guesses) < 1:
            raise ValueError("bounds must be at least 1")
        self._max_owners = max_owners
        self._max_agents = max_agents
        self._max_sessions = max_sessions
        self._max_guesses = max_guesses
        self._min_probability = min_probability
        self._owners: OrderedDict[str, _Owner] = OrderedDict()

    @property
    def num_owners(self) -> int:
        """Owners whose workflows are remembered."""
        return len(self._owners)

    def num_agents(self, owner: str) -> int:
        """Agents of an owner that are remembered."""
        known = self._owners.get(owner)
        return 0 if known is None else len(known.agents)

    def num_sessions(self, owner: str) -> int:
        """Sessions of an owner that are remembered."""
        known = self._owners.get(owner)
        return 0 if known is None else known.num_sessions

    def note(self, arrival: AgentCall, now: float) -> None:
        """A request has come. `expected` then says what follows it."""
        owner = self._put(arrival.owner, self._owners.get(arrival.owner) or _Owner())
        owner.close_silent(now)
        owner.visit(owner.run(_run_key(arrival), now), arrival, now)
        owner.shrink(self._max_agents, self._max_sessions)

    def ended(self, arrival: AgentCall, now: float) -> None:
        """A request that was noted has finished. Optional; with it, gaps do not vary with the time that answers take.

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
        """What is likely to follow a request that was noted: the agent itself, then others, the soonest first.

        Ask when it has come, or for better times when it has ended. Left out: what has followed already, what is overdue, and others than the
        agent itself that are less sure than "this agent again" has been of late, so that the promises are in all no less precise than that rule's.
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

    def forget(self, owner: str) -> None:
        """Drop what is known of an owner."""
        self._owners.pop(owner, None)

    def saved(self) -> Iterator[SavedOwner]:
        """What to keep over a restart, owner by owner, for `restore`. Others may be noted between two of them."""
        for name in list(self._owners):
            known = self._owners.get(name)
            if known is not None:
                yield SavedOwner(
                    name,
                    list(known.agents.items()),
                    list(known.odds.items()),
                    list(known.links.items()),
                    known.gaps_s,
                )

    def restore(self, saved: SavedOwner) -> None:
        """Go on with what was known of an owner, in place of what is."""
        owner = _Owner(OrderedDict(saved.agents), gaps_s=saved.gaps_s)
        owner.odds, owner.links = OrderedDict(saved.odds), OrderedDict(saved.links)
        owner.shrink(self._max_agents, self._max_sessions)
        self._put(saved.name, owner)

    def _put(self, name: str, owner: _Owner) -> _Owner:
        """As the one that was used last."""
        self._owners[name] = owner
        self._owners.move_to_end(name)
        if len(self._owners) > self._max_owners:
            self._owners.popitem(last=False)
        return owner

    def _find(self, arrival: AgentCall) -> tuple[_Run, _Visit] | None:
        owner = self._owners.get(arrival.owner)
        run = None if owner is None else owner.runs.get(_run_key(arrival))
        visit = None if run is None else run.visits.get(arrival.agent)
        return None if run is None or visit is None else (run, visit)


def _guesses(owner: _Owner, run: _Run, visit: _Visit, now: float) -> Iterator[tuple[LikelyCall, float]]:
    for agent in owner.candidates(run):
        latest = run.visits.get(agent)
        if latest is not None and latest.place > visit.place:
            continue  # it has come since
        kind = run.kind(agent, visit)
        link = owner.links.get((visit.arrival.agent, agent))
        session = _session(owner, run, visit.arrival, agent, link)
        window = _window(visit, link, owner.links.get((kind,)), now)
        if window is not None and session is not None:
            share, deviation = owner.probability(kind, agent, visit)
            yield LikelyCall(agent, *session, share, *window), deviation


def _run_key(arrival: AgentCall) -> RunKey:
    """See the module's docstring."""
    if arrival.workflow:
        return arrival.workflow, "", ""
    if not arrival.agent:
        return "", arrival.session_id, ""
    return "", *(_around(arrival.session_id, arrival.agent) or ("", ""))


def _around(session_id: str, agent: str) -> tuple[str, str] | None:
    """What stands before and after the agent's name in a session id, where it stands there as a word of its own."""
    start = session_id.find(agent) if agent else -1
    while start >= 0:
        end = start + len(agent)
        # `a` is no name in `7fa3`.
        if not session_id[:start][-1:].isalnum() and not session_id[end : end + 1].isalnum():
            return session_id[:start], session_id[end:]
        start = session_id.find(agent, start + 1)
    return None


def _renamed(arrival: AgentCall, agent: str) -> str | None:
    """The arrival's session id with another agent's name in place of its own."""
    around = _around(arrival.session_id, arrival.agent)
    return None if around is None else agent.join(around)


def _session(
    owner: _Owner, run: _Run, arrival: AgentCall, agent: str, link: Succession | None
) -> tuple[str, str | None] | None:
    """The session and adapter that an agent is likely to use: what it used in this run, else what names or its last runs suggest."""
    visit = run.visits.get(agent)
    if visit is not None:
        return visit.arrival.session_id, visit.arrival.adapter
    known = owner.agents.get(agent)
    if known is None:
        return None
    renamed = _renamed(arrival, agent) if link is not None and link.is_named_alike else None
    if renamed is not None:
        return renamed, known.adapter
    if known.keeps_session and known.session_id is not None:
        return known.session_id, known.adapter
    return None


def _window(
    visit: _Visit, link: Succession | None, alike: Succession | None, now: float
) -> tuple[float, float] | None:
    """When it comes, from now: quantiles of the gap, of others of its kind where it has too few. None when it should have come already."""
    known = next(
        (one for one in (link, alike) if one is not None and len(one.since_arrival_s) >= MIN_COUNT), None
    )
    start_s, early_s, late_s = visit.arrived_s, *UNKNOWN_GAP_S
    if known is not None:
        gaps = known.since_arrival_s
        if visit.ended_s is not None and len(known.since_end_s) >= MIN_COUNT:
            start_s, gaps = visit.ended_s, known.since_end_s
        ordered = sorted(gaps)
        early_s, late_s = (_quantile(ordered, share) for share in QUANTILES)
    latest_s = start_s + late_s - now
    return None if latest_s < 0 else (max(start_s + early_s - now, 0.0), latest_s)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """What that share of later values lies below, on the line between two of these; the least or the greatest where they are too few."""
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
